"""``python -m ferrule_server``: arguments to settings, the parts put together, served until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import secrets
import shlex
import signal
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NoReturn

from ferrule_server import __version__, log_format
from ferrule_server.addresses import ListenAddress
from ferrule_server.arguments import as_given, parse_config, unknown_variables
from ferrule_server.config import ServerConfig
from ferrule_server.errors import ConfigError, ModelError

if TYPE_CHECKING:  # imported when the process is set up: they bring libraries that start threads
    from ferrule_server.api.rpc.state import ServerState, Serving
    from ferrule_server.api.serve import ApiServer
    from ferrule_server.api.telemetry.tracing import Tracer
    from ferrule_server.engine.engine import Engine
    from ferrule_server.engine.failpoints import Failpoints
    from ferrule_server.executor.base import Executor
    from ferrule_server.loading import LoadedExecutor, OnProgress

_LOG = logging.getLogger("ferrule_server")
_SWITCH_INTERVAL_S: Final = 0.0005
_EXIT_FAULT: Final = 1
_EXIT_UNUSABLE: Final = 2
_EXIT_INTERRUPTED: Final = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server until a signal ends it; return the exit code: 0 as asked, 1 a fault, 2 unusable settings.

    Ctrl-C before the server is ready leaves no such choice to whoever called: the process ends with 130. Nor does a
    fault, after which it ends with 1: in a broken context of a GPU the interpreter's own end may abort or hang.
    """
    given = sys.argv[1:] if arguments is None else arguments
    try:
        config = parse_config(given, os.environ)
        _set_up_process(config)
        if unknown := unknown_variables(os.environ):
            _LOG.warning("settings that nobody knows change nothing variables=%s", ", ".join(unknown))
        if config.is_download_only:
            return _download(config)
        code = asyncio.run(_serve(config))
        return code if code != _EXIT_FAULT else _exit_now(code)
    except (ConfigError, ModelError) as error:
        return _say(as_given(str(error), given, os.environ))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ferrule"):
            raise
        return _say(f"the module {error.name!r} is missing: install ferrule[server]")


def _set_up_process(config: ServerConfig) -> None:
    """Set what must be set before any library starts its threads.

    Compute threads that spin while they wait starve the event loop and each other: under one busy neighbour decoding
    fell from 121 to 1.9 tokens/s. The tokenizer gets no threads of its own: texts come one at a time, and those that
    are long have a thread already. The short switch interval lets the event loop in while a step holds the interpreter.
    gRPC would write a line of its own for each stranger who speaks no TLS: it writes none beside JSON, else errors.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE" if config.log_format == "json" else "ERROR")
    if config.num_threads is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(config.num_threads))
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    log_format.set_up(config.log_level, config.log_format)


def _say(message: str) -> int:
    if log_format.is_json():
        _LOG.error("cannot serve: %s", message)
    else:
        sys.stderr.write(f"ferrule serve: {message}\n")
    return _EXIT_UNUSABLE


async def _serve(config: ServerConfig) -> int:
    """Bind, start, load, serve until a signal or a fault; return the exit code."""
    from ferrule_server.api.limits import ApiLimits
    from ferrule_server.api.rpc.state import ServerState
    from ferrule_server.api.security.auth import access_of
    from ferrule_server.api.security.tls import tls_of
    from ferrule_server.api.serve import ApiServer
    from ferrule_server.api.telemetry.call_log import watch_calls

    limits = ApiLimits(max_connections=config.connection_limit, max_ttl_s=config.max_ttl_s)
    failpoints = _failpoints(config)
    tls, access = tls_of(config), access_of(config)
    state = ServerState(config.instance, secrets.token_hex(6), __version__, limits, access.limits_of)
    tracer = _tracer(config)
    server = ApiServer(
        state,
        access,
        has_reflection=config.has_reflection,
        drain_grace_s=config.drain_grace_s,
        observers=(*((tracer,) if tracer is not None else ()), watch_calls()),
    )
    async with _web(config, server) as metrics_address:
        addresses = {"listen": server.bind(config.listen, tls)}
        if metrics_address is not None:
            addresses["metrics_listen"] = metrics_address
        stopping = _stop_signal()
        await server.start()
        _LOG.info("listening address=%s instance=%s epoch=%s", addresses["listen"].target, state.instance, state.epoch)
        try:
            with _progress(state) as on_progress:  # left before the process ends, so that no bar stays on the terminal
                loading = asyncio.create_task(_load(config, on_progress))
                await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                await server.stop()
                # The thread that loads cannot be asked to stop.
                _exit_now(_EXIT_INTERRUPTED if stopping.result() is signal.SIGINT else 0)
            return await _run_engine(config, server, addresses, loading.result(), stopping, failpoints=failpoints)
        finally:
            stopping.cancel()
            await server.stop()
            if tracer is not None:
                await asyncio.to_thread(tracer.close)
            _ignore_signals()


@contextlib.asynccontextmanager
async def _web(config: ServerConfig, server: ApiServer) -> AsyncIterator[ListenAddress | None]:
    """Serve metrics and the page in the block, from before the model is loaded until nothing runs any more.

    Raises:
        ConfigError: The address is in use, or cannot be bound.
    """
    if config.metrics_listen is None:
        yield None
        return
    from ferrule_server.api.web.assembly import listener_of

    listener = listener_of(config, config.metrics_listen, server.state, server.views)
    listener.start()
    try:
        yield listener.address
    finally:
        await asyncio.to_thread(listener.close)


def _tracer(config: ServerConfig) -> Tracer | None:
    """Return what traces calls; None where nothing is to be traced, and then nothing of it is imported.

    Raises:
        ConfigError: What traces are made with is not installed, or cannot use what the variables of its own say.
    """
    if config.otlp_endpoint is None:
        return None
    try:
        from ferrule_server.api.telemetry.tracing import Tracer
    except ModuleNotFoundError as error:
        raise ConfigError(f"--otlp-endpoint: the module {error.name!r} is missing: install ferrule[otel]") from None
    try:
        tracer = Tracer(config.otlp_endpoint, config.instance)
    except Exception as error:
        raise ConfigError(f"--otlp-endpoint, or a variable OTEL_*: {error}") from error
    _LOG.info("tracing endpoint=%s", config.otlp_endpoint)
    return tracer


async def _run_engine(
    config: ServerConfig,
    server: ApiServer,
    addresses: Mapping[str, ListenAddress],
    loaded: LoadedExecutor,
    stopping: asyncio.Task[signal.Signals],
    *,
    failpoints: Failpoints | None,
) -> int:
    """Put the engine together, serve until a signal or a caller ends it or the device is lost, drain, close."""
    loop = asyncio.get_running_loop()
    failed = asyncio.Event()
    engine = _make_engine(config, server.state, loaded.executor, loop, failed, failpoints=failpoints)
    engine.start()
    try:
        await server.ready(_serving(config, server.state, engine, loaded))
        _say_ready(addresses, engine, config, loaded.commit)
        stopping.add_done_callback(lambda _: server.ask_to_stop(None))
        await _first_of(server.asked_to_stop, failed)
        _say_draining(server.state.num_sequences, server.grace_s, has_failed=failed.is_set())
        await server.drain(has_failed=failed.is_set())
    finally:
        await asyncio.to_thread(engine.close)
    _LOG.info("drained")
    return _EXIT_FAULT if failed.is_set() else 0


async def _first_of(*events: asyncio.Event) -> None:
    """Return once one of the events is set."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()


def _make_engine(
    config: ServerConfig,
    state: ServerState,
    executor: Executor,
    loop: asyncio.AbstractEventLoop,
    failed: asyncio.Event,
    *,
    failpoints: Failpoints | None,
) -> Engine:
    from ferrule_server.engine.engine import Engine
    from ferrule_server.engine.settings import EngineSettings
    from ferrule_server.kv.block_pool import BlockPool
    from ferrule_server.kv.sequence_store import SequenceStore

    info = executor.info
    store = SequenceStore(
        BlockPool(info.num_blocks, info.block_size),
        instance=state.instance,
        epoch=state.epoch,
        fingerprint=info.model.fingerprint,
        max_context=info.model.max_context,
        max_ttl_s=config.max_ttl_s,
        limits_of=state.limits_of,
        has_prefix_cache=config.has_prefix_cache,
    )
    settings = EngineSettings(
        max_step_rows=config.max_step_rows,
        max_step_time_s=config.max_step_time_s,
        max_waiting_jobs=config.max_waiting_jobs,
        debug_top_tokens=config.logs_top_tokens,
    )

    def on_failure() -> None:
        loop.call_soon_threadsafe(failed.set)

    return Engine(
        executor,
        store,
        settings,
        loop.call_soon_threadsafe,
        on_failure,
        limits_of=state.limits_of,
        shares=state.shares,
        failpoints=failpoints,
    )


def _failpoints(config: ServerConfig) -> Failpoints | None:
    """Return where to break on purpose, None in production; said loudly, so that nobody wonders why it breaks."""
    from ferrule_server.engine.failpoints import Failpoints

    if not config.failpoints:
        return None
    try:
        failpoints = Failpoints.parse(config.failpoints)
    except ValueError as error:
        raise ConfigError(f"--failpoints: {error}") from None
    _LOG.warning("failpoints are armed, this server breaks on purpose: %s", config.failpoints)
    return failpoints


def _serving(config: ServerConfig, state: ServerState, engine: Engine, loaded: LoadedExecutor) -> Serving:
    from ferrule_server.api.requests.inputs import InputReader
    from ferrule_server.api.rpc.state import Serving, state_of
    from ferrule_server.engine.masks import MaskRegistry

    inputs = InputReader(
        engine.info.model,
        state.limits,
        max_step_rows=config.max_step_rows,
        masks=MaskRegistry(state.limits_of),
        tokenizer=loaded.tokenizer,
    )
    return Serving(
        engine,
        inputs,
        loaded.tokenizer,
        config.max_step_rows,
        loaded.chat_template,
        has_prefix_cache=config.has_prefix_cache,
        is_deterministic=config.is_deterministic,
        executor_state=state_of(loaded.executor),
    )


def _say_ready(
    addresses: Mapping[str, ListenAddress], engine: Engine, config: ServerConfig, commit: str | None
) -> None:
    """Print the one line on stdout that tells whoever started the server that it serves."""
    gc.collect()
    gc.freeze()  # what is loaded stays: later collections need not look at it
    info = engine.info
    values = {
        **{name: address.target for name, address in addresses.items()},
        "model": info.model.model_id,
        **({} if commit is None else {"commit": commit}),
        "executor": info.name,
        "device": info.device,
        "dtype": info.model.dtype,
        "blocks": info.num_blocks - 1,
        "block_size": info.block_size,
        "max_context": info.model.max_context,
        "instance": config.instance,
    }
    line = " ".join(f"{key}={shlex.quote(str(value))}" for key, value in values.items())
    sys.stdout.write(f"ready {line}\n")
    sys.stdout.flush()
    _LOG.info(f"model loaded {' '.join(f'{key}=%s' for key in values)}", *values.values())


def _say_draining(num_sequences: int, grace_s: float, *, has_failed: bool) -> None:
    """Log that the server drains; tell whoever sits at the terminal what it waits for, and how not to."""
    _LOG.info("draining live_sequences=%d grace_s=%.1f has_failed=%s", num_sequences, grace_s, has_failed)
    if _is_watched() and num_sequences and not has_failed:
        handles = "1 live handle" if num_sequences == 1 else f"{num_sequences} live handles"
        sys.stderr.write(f"ferrule serve: serving {handles} for up to {grace_s:g} s more; Ctrl-C stops at once\n")


def _stop_signal() -> asyncio.Task[signal.Signals]:
    """Return a task that the first SIGTERM or SIGINT ends and is the result of; a second ends the process at once.

    The first one may come when nobody waits for the task any more, because something else ends the process already.
    """
    loop = asyncio.get_running_loop()
    first: asyncio.Queue[signal.Signals] = asyncio.Queue(1)
    stopping = loop.create_task(first.get())

    def on_signal(number: signal.Signals) -> None:
        if first.full() or (stopping.done() and not stopping.cancelled()):
            _exit_now(128 + number)
        first.put_nowait(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stopping


def _ignore_signals() -> None:
    """Let nothing change how the process ends, once it does: the loop would give signals back their deadly default."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


def _exit_now(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# ---- loading --------------------------------------------------------------------------------------------------------


async def _load(config: ServerConfig, on_progress: OnProgress) -> LoadedExecutor:
    """Load the executor on a thread of its own, which does not keep the process alive, telling how far it is."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[LoadedExecutor] = loop.create_future()

    def finish(result: LoadedExecutor | Exception) -> None:
        if future.done():
            return
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    def load() -> None:
        from ferrule_server.loading import create_executor

        result: LoadedExecutor | Exception
        try:
            result = create_executor(config, on_progress)
        except Exception as error:  # noqa: BLE001  (raised again by whoever waits)
            result = error
        loop.call_soon_threadsafe(finish, result)

    threading.Thread(target=load, name="ferrule-load", daemon=True).start()
    return await future


def _download(config: ServerConfig) -> int:
    """Fetch the model and print its folder; Ctrl-C ends it at once, and the next time goes on from there."""
    from ferrule_server.loading import download

    def on_interrupt(*_: object) -> NoReturn:
        if _is_watched():
            sys.stderr.write("\x1b[?25h\n")  # the bar hides the cursor
        _exit_now(_EXIT_INTERRUPTED)

    signal.signal(signal.SIGINT, on_interrupt)
    with _bar() if _is_watched() else contextlib.nullcontext(_log_stage()) as show:
        folder = download(config, show)
    sys.stdout.write(f"{folder}\n")
    return 0


@contextlib.contextmanager
def _progress(state: ServerState) -> Iterator[OnProgress]:
    """Give a callable that shows progress: in GetStatus, and as a bar on a terminal or as lines in the log."""
    with _bar() if _is_watched() else contextlib.nullcontext(_log_stage()) as show:

        def on_progress(stage: str, share: float) -> None:
            state.load_stage, state.load_progress = stage, share
            show(stage, share)

        yield on_progress


def _is_watched() -> bool:
    """Whether somebody sits at the terminal, and reads more than the log."""
    return sys.stderr.isatty() and not log_format.is_json()


def _log_stage() -> OnProgress:
    """Return a callable that logs each stage once."""
    seen: set[str] = set()

    def show(stage: str, share: float) -> None:
        if stage not in seen:
            seen.add(stage)
            _LOG.info("loading stage=%r progress=%.2f", stage, share)

    return show


@contextlib.contextmanager
def _bar() -> Iterator[OnProgress]:
    """Give a callable that moves a bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<22}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("loading", total=1.0)
        yield lambda stage, share: progress.update(task, description=stage, completed=share)


if __name__ == "__main__":
    # Everything is closed by now. All that the interpreter's own end would add is that gRPC, where it has certificates,
    # waits 2 s for objects that are never freed.
    _exit_now(main())
