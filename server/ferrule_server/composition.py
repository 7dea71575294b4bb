"""Puts the parts of a server together, bottom-up, and serves until a signal, an administrator or a fault.

Imported after the process is set up, because its imports start threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from ferrule_server import __version__, console
from ferrule_server.addresses import ListenAddress
from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.requests.inputs import InputReader
from ferrule_server.api.rpc.state import ServerState, Serving, state_of
from ferrule_server.api.security.auth import access_of
from ferrule_server.api.security.tls import tls_of
from ferrule_server.api.serve import ApiServer
from ferrule_server.api.telemetry.call_log import watch_calls
from ferrule_server.config import ServerConfig
from ferrule_server.durability.directory import Wanted, cannot_write, check_directory
from ferrule_server.engine.assembly.assemble import Setup
from ferrule_server.engine.durable.opening import Durability, open_durability
from ferrule_server.engine.engine import Engine
from ferrule_server.engine.faults.failpoints import Failing, Failpoints, NoFailpoints
from ferrule_server.engine.masks import MaskRegistry
from ferrule_server.engine.settings import EngineSettings
from ferrule_server.errors import ConfigError
from ferrule_server.executor.base import Executor, ExecutorInfo
from ferrule_server.kv.block_pool import BlockPool
from ferrule_server.kv.sequence_store import SequenceStore
from ferrule_server.loading import LoadedExecutor, OnProgress, create_executor
from ferrule_server.process import EXIT_FAULT, EXIT_INTERRUPTED, exit_now

if TYPE_CHECKING:  # imported only if traces are sent
    from ferrule_server.api.telemetry.tracing import Tracer

_LOG = logging.getLogger("ferrule_server")
_LOADED: Final = 0.95
"""The share of the start that is over when the model is loaded; the rest is the journal of durable handles."""


async def serve(config: ServerConfig, stopping: asyncio.Task[signal.Signals]) -> int:
    """Bind the addresses, load the model, serve until a signal or a fault, and return the exit code.

    Args:
        config: The settings.
        stopping: Its result is the first signal.

    Raises:
        ConfigError: A setting or an address is unusable.
        ModelError: The model cannot be loaded.
    """
    gc.disable()  # until it is ready: what is loaded stays, and collections looked at it for a second
    if config.durable is not None:
        check_directory(config.durable, config.instance)  # before anything is loaded; the lock is taken afterwards
    limits = ApiLimits(max_connections=config.connection_limit, max_ttl_s=config.max_ttl_s)
    failpoints = failpoints_of(config)
    tls, access = tls_of(config), access_of(config)
    state = ServerState(config.instance, secrets.token_hex(6), __version__, limits, access.limits_of)
    tracer = tracer_of(config)
    server = ApiServer(
        state,
        access,
        has_reflection=config.has_reflection,
        drain_grace_s=config.drain_grace_s,
        observers=(*((tracer,) if tracer is not None else ()), watch_calls()),
    )
    run = _Run(config, server, stopping, failpoints)
    async with _web(config, server) as metrics_address:
        addresses = {"listen": server.bind(config.listen, tls), **metrics_address}
        await server.start()
        _LOG.info("listening address=%s instance=%s epoch=%s", addresses["listen"].target, state.instance, state.epoch)
        try:
            return await run.serve(addresses, await run.load())
        finally:
            stopping.cancel()
            await server.stop()
            if tracer is not None:
                await asyncio.to_thread(tracer.close)


@contextlib.asynccontextmanager
async def _web(config: ServerConfig, server: ApiServer) -> AsyncIterator[dict[str, ListenAddress]]:
    """Serve metrics and the web page while the block runs, and yield their address by the name of its setting.

    Raises:
        ConfigError: The address is in use, or cannot be bound.
    """
    if config.metrics_listen is None:
        yield {}
        return
    from ferrule_server.api.web.assembly import listener_of

    listener = listener_of(config, config.metrics_listen, server.state, server.views)
    listener.start()
    try:
        yield {"metrics_listen": listener.address}
    finally:
        await asyncio.to_thread(listener.close)


def tracer_of(config: ServerConfig) -> Tracer | None:
    """Return the tracer of calls; if traces are off, return None and import nothing.

    Raises:
        ConfigError: OpenTelemetry is not installed, or its own variables are unusable.
    """
    if config.otlp_endpoint is None:
        return None
    try:
        from ferrule_server.api.telemetry.tracing import Tracer
    except ModuleNotFoundError as error:
        text = f"--otlp-endpoint: the module {error.name!r} is missing: install ferrule-server[otel]"
        raise ConfigError(text) from None
    try:
        tracer = Tracer(config.otlp_endpoint, config.instance)
    except Exception as error:
        raise ConfigError(f"--otlp-endpoint, or a variable OTEL_*: {error}") from error
    _LOG.info("tracing endpoint=%s", config.otlp_endpoint)
    return tracer


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of a server that is bound already, from the loading of the model to the end.

    Attributes:
        config: The settings.
        server: Serves the contract.
        stopping: Its result is the first signal.
        failpoints: Where the engine fails on purpose.
    """

    config: ServerConfig
    server: ApiServer
    stopping: asyncio.Task[signal.Signals]
    failpoints: Failing

    async def load(self) -> LoadedExecutor:
        """Load the executor, on a thread, because importing torch alone takes seconds. A signal ends the process."""
        with _progress(self.server.state) as on_progress:  # ends before the process: no bar stays on the terminal
            loading = asyncio.create_task(asyncio.to_thread(create_executor, self.config, on_progress))
            await asyncio.wait({loading, self.stopping}, return_when=asyncio.FIRST_COMPLETED)
        if self.stopping.done():
            await self.server.stop()
            # The loading thread cannot be stopped.
            exit_now(EXIT_INTERRUPTED if self.stopping.result() is signal.SIGINT else 0)
        return loading.result()

    async def serve(self, addresses: Mapping[str, ListenAddress], loaded: LoadedExecutor) -> int:
        """Start the engine and serve until a signal, an administrator or a lost device stops the server; then drain."""
        server, has_failed = self.server, False

        def fail() -> None:
            nonlocal has_failed
            has_failed = True
            server.asked_to_stop.set()

        loop = asyncio.get_running_loop()
        engine = await asyncio.to_thread(self._make_engine, loaded.executor, fail, loop)  # a journal may take seconds
        engine.start()
        try:
            await server.ready(serving_of(self.config, server.state, engine, loaded))
            gc.collect()
            gc.freeze()  # loaded objects stay for good: later collections skip them
            gc.enable()
            console.say_ready(addresses, engine.info, self.config, loaded.commit)
            self.stopping.add_done_callback(lambda _: server.ask_to_stop(None))
            await server.asked_to_stop.wait()
            console.say_draining(server.state.num_ending, server.grace_s, has_failed=has_failed)
            await server.drain(has_failed=has_failed)
        finally:
            await asyncio.to_thread(engine.close)
        _LOG.info("drained")
        return EXIT_FAULT if has_failed else 0

    def _make_engine(self, executor: Executor, fail: Callable[[], None], loop: asyncio.AbstractEventLoop) -> Engine:
        """Return the engine; it calls ``fail`` on the event loop when the device is lost.

        Raises:
            ConfigError: The journal of durable handles cannot be used.
        """
        config, state, info = self.config, self.server.state, executor.info
        durability = _durability(config, state, info)
        store = SequenceStore(
            BlockPool(info.num_blocks, info.block_size),
            instance=state.instance,
            epoch=state.epoch,
            max_context=info.model.max_context,
            max_ttl_s=config.max_ttl_s,
            limits_of=state.limits_of,
            has_prefix_cache=config.has_prefix_cache,
            durable_epoch=None if durability is None else durability.epoch,
        )
        settings = EngineSettings(
            max_step_rows=config.max_step_rows,
            max_step_time_s=config.max_step_time_s,
            max_waiting_jobs=config.max_waiting_jobs,
            restore_wait_tokens=config.restore_wait,
            debug_top_tokens=config.logs_top_tokens,
        )
        setup = Setup(
            executor,
            store,
            settings,
            loop.call_soon_threadsafe,
            partial(loop.call_soon_threadsafe, fail),
            later=loop.call_later,
            limits_of=state.limits_of,
            shares=state.shares,
            durability=durability,
            failpoints=self.failpoints,
        )
        try:
            return Engine(setup)
        except OSError as error:
            assert config.durable is not None, "only a journal is written"
            raise ConfigError(cannot_write(config.durable, error)) from error


def _durability(config: ServerConfig, state: ServerState, info: ExecutorInfo) -> Durability | None:
    """Open the journal of durable handles and read it, which may take seconds; None: there is none.

    Raises:
        ConfigError: It cannot be used.
    """
    if config.durable is None:
        return None
    begun, is_there = time.monotonic(), config.durable.exists()
    wanted = Wanted(state.instance, info.model.fingerprint, info.model.dtype, info.block_size)
    with _progress(state) as show:
        durability = open_durability(
            config.durable, wanted, on_progress=lambda part: show("reading the journal", _LOADED + (1 - _LOADED) * part)
        )
    lengths = [len(sequence.token_ids) for sequence in durability.state.sequences.values()]
    what = "journal %s path=%s durable_sequences=%d tokens=%d epoch=%s seconds=%.2f"
    values = ("read" if is_there else "created", config.durable, len(lengths), sum(lengths), durability.epoch)
    _LOG.info(what, *values, time.monotonic() - begun)
    return durability


def failpoints_of(config: ServerConfig) -> Failing:
    """Return the failpoints, with a warning in the log; none of them in production.

    Raises:
        ConfigError: ``--failpoints`` is unusable.
    """
    if not config.failpoints:
        return NoFailpoints()
    try:
        failpoints = Failpoints.parse(config.failpoints)
    except ValueError as error:
        raise ConfigError(f"--failpoints: {error}") from None
    _LOG.warning("failpoints are armed, this server breaks on purpose: %s", config.failpoints)
    return failpoints


def serving_of(config: ServerConfig, state: ServerState, engine: Engine, loaded: LoadedExecutor) -> Serving:
    """Return what the calls of a server use once the model is loaded."""
    masks = MaskRegistry(state.limits_of)
    masks.restore(engine.restored_masks)
    inputs = InputReader(
        engine.info.model,
        state.limits,
        max_step_rows=config.max_step_rows,
        masks=masks,
        tokenizer=loaded.tokenizer,
        is_durable=engine.is_durable,
    )
    return Serving(
        engine,
        inputs,
        loaded.chat_template,
        has_prefix_cache=config.has_prefix_cache,
        is_deterministic=config.is_deterministic,
        executor_state=state_of(loaded.executor),
    )


@contextlib.contextmanager
def _progress(state: ServerState) -> Iterator[OnProgress]:
    """Yield a callable that shows progress: in GetStatus, and as a bar on a terminal or as lines in the log."""
    with console.bar() as show:

        def on_progress(stage: str, share: float) -> None:
            state.load_stage, state.load_progress = stage, share
            show(stage, share)

        yield on_progress
