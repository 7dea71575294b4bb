"""``python -m ferrule_server``: read the settings, assemble the server, and serve until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Final, NoReturn

from ferrule_server import __version__, log_format
from ferrule_server.addresses import ListenAddress
from ferrule_server.arguments import as_given, log_format_of, parse_config, settings_text, unknown_variables
from ferrule_server.config import ServerConfig
from ferrule_server.errors import ConfigError, ModelError

if TYPE_CHECKING:  # imported after the process is set up, because they import libraries that start threads
    from ferrule_server.api.rpc.state import ServerState, Serving
    from ferrule_server.api.serve import ApiServer
    from ferrule_server.api.telemetry.tracing import Tracer
    from ferrule_server.engine.durable.opening import Durability
    from ferrule_server.engine.engine import Engine
    from ferrule_server.engine.faults.failpoints import Failing
    from ferrule_server.executor.base import Executor
    from ferrule_server.loading import LoadedExecutor, OnProgress

_LOG = logging.getLogger("ferrule_server")
_SWITCH_INTERVAL_S: Final = 0.0005
_USUAL_TARGET: Final = "127.0.0.1:50051"
"""What commands use without ``--target``."""
_LOADED: Final = 0.95
"""The share of the start that is over when the model is loaded; the rest is the journal of durable handles."""
_EXIT_FAULT: Final = 1
_EXIT_UNUSABLE: Final = 2
_EXIT_INTERRUPTED: Final = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server until a signal stops it, and return the exit code: 0 stopped as asked, 2 unusable settings.

    This function does not return in two cases. Ctrl-C before the server is ready ends the process with 130. A fault
    ends it with 1, because the normal exit of the interpreter may abort or hang if the GPU context is broken.
    """
    given = sys.argv[1:] if arguments is None else arguments
    if log_format_of(given, os.environ) == "json":
        log_format.set_up("info", "json")  # what is wrong with the settings is a line of JSON too
    try:
        config = parse_config(given, os.environ)
        _set_up_process(config)
        if unknown := unknown_variables(os.environ):
            _LOG.warning("unknown FERRULE_* variables are ignored variables=%s", ", ".join(unknown))
        if (text := settings_text(given, os.environ)) is not None:
            sys.stdout.write(text)
            return 0
        if config.is_download_only:
            return _download(config)
        code = asyncio.run(_serve(config))
        return code if code != _EXIT_FAULT else _exit_now(code)
    except (ConfigError, ModelError) as error:
        return _say(as_given(str(error), given, os.environ))
    except KeyboardInterrupt:  # before or after the loop, which has a handler of its own
        return _EXIT_INTERRUPTED
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("ferrule"):
            raise
        return _say(f"the module {error.name!r} is missing: install ferrule-server")


def _set_up_process(config: ServerConfig) -> None:
    """Set the variables and intervals that libraries read when they start their threads.

    Compute threads that spin while they wait starve the event loop and each other: beside one busy process, decoding
    fell from 121 to 1.9 tokens/s. The tokenizer gets no threads, because texts arrive one at a time and long texts
    have a thread already. The short switch interval lets the event loop run while a step holds the interpreter.
    gRPC writes a line for each client that does not speak TLS. It writes no lines beside a JSON log, otherwise errors.
    The default listener of gRPC 1.85 switches threads 8 times for a message, the one before 4 times, which is 0.1 ms
    faster. The setting is left out for other versions, which write a line about a name that they do not know.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE" if config.log_format == "json" else "ERROR")
    if version("grpcio").startswith("1.85."):
        os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
    if config.num_threads is not None:
        os.environ.setdefault("OMP_NUM_THREADS", str(config.num_threads))
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    log_format.set_up(config.log_level, config.log_format)


def _say(message: str) -> int:
    """Report on stderr why the server cannot serve, and return the exit code."""
    if log_format.is_json():
        _LOG.error("cannot serve: %s", message)
    else:
        sys.stderr.write(f"ferrule serve: {message}\n")
    return _EXIT_UNUSABLE


async def _serve(config: ServerConfig) -> int:
    """Bind the addresses, load the model, serve until a signal or a fault, and return the exit code."""
    stopping = _stop_signal()  # before the imports, which take a second

    from ferrule_server.api.limits import ApiLimits
    from ferrule_server.api.rpc.state import ServerState
    from ferrule_server.api.security.auth import access_of
    from ferrule_server.api.security.tls import tls_of
    from ferrule_server.api.serve import ApiServer
    from ferrule_server.api.telemetry.call_log import watch_calls
    from ferrule_server.durability.directory import check_directory

    if config.durable is not None:
        check_directory(config.durable, config.instance)  # before anything is loaded; the lock is taken afterwards
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
        await server.start()
        _LOG.info("listening address=%s instance=%s epoch=%s", addresses["listen"].target, state.instance, state.epoch)
        try:
            with _progress(state) as on_progress:  # ends before the process, so that no bar stays on the terminal
                loading = asyncio.create_task(asyncio.to_thread(_load, config, on_progress))
                await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done():
                await server.stop()
                # The loading thread cannot be stopped.
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
    """Serve metrics and the web page while the block runs.

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


async def _run_engine(
    config: ServerConfig,
    server: ApiServer,
    addresses: Mapping[str, ListenAddress],
    loaded: LoadedExecutor,
    stopping: asyncio.Task[signal.Signals],
    *,
    failpoints: Failing,
) -> int:
    """Start the engine and serve until a signal, an administrator or a lost device stops the server; then drain."""
    has_failed = False

    def fail() -> None:
        nonlocal has_failed
        has_failed = True
        server.asked_to_stop.set()

    loop = asyncio.get_running_loop()
    make = partial(_make_engine, config, server.state, loaded.executor, fail, loop, failpoints=failpoints)
    engine = await asyncio.to_thread(make)  # reading a journal may take seconds
    engine.start()
    try:
        await server.ready(_serving(config, server.state, engine, loaded))
        _say_ready(addresses, engine, config, loaded.commit)
        stopping.add_done_callback(lambda _: server.ask_to_stop(None))
        await server.asked_to_stop.wait()
        _say_draining(server.state.num_ending, server.grace_s, has_failed=has_failed)
        await server.drain(has_failed=has_failed)
    finally:
        await asyncio.to_thread(engine.close)
    _LOG.info("drained")
    return _EXIT_FAULT if has_failed else 0


def _make_engine(
    config: ServerConfig,
    state: ServerState,
    executor: Executor,
    fail: Callable[[], None],
    loop: asyncio.AbstractEventLoop,
    *,
    failpoints: Failing,
) -> Engine:
    """Return the engine; it calls ``fail`` on the event loop when the device is lost.

    Raises:
        ConfigError: The journal of durable handles cannot be used.
    """
    from ferrule_server.durability.directory import cannot_write
    from ferrule_server.engine.assembly.assemble import Setup
    from ferrule_server.engine.engine import Engine
    from ferrule_server.engine.settings import EngineSettings
    from ferrule_server.kv.block_pool import BlockPool
    from ferrule_server.kv.sequence_store import SequenceStore

    info = executor.info
    durability = _durability(config, state, executor)
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

    try:
        return Engine(
            Setup(
                executor,
                store,
                settings,
                loop.call_soon_threadsafe,
                partial(loop.call_soon_threadsafe, fail),
                later=loop.call_later,
                limits_of=state.limits_of,
                shares=state.shares,
                durability=durability,
                failpoints=failpoints,
            )
        )
    except OSError as error:
        assert config.durable is not None, "only a journal is written"
        raise ConfigError(cannot_write(config.durable, error)) from error


def _durability(config: ServerConfig, state: ServerState, executor: Executor) -> Durability | None:
    """Open the journal of durable handles and read it, which may take seconds; None: there is none.

    Raises:
        ConfigError: It cannot be used.
    """
    if config.durable is None:
        return None
    from ferrule_server.durability.directory import Wanted
    from ferrule_server.engine.durable.opening import open_durability

    info = executor.info
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


def _failpoints(config: ServerConfig) -> Failing:
    """Return the failpoints, with a warning in the log; none of them in production.

    Raises:
        ConfigError: ``--failpoints`` is unusable.
    """
    from ferrule_server.engine.faults.failpoints import Failpoints, NoFailpoints

    if not config.failpoints:
        return NoFailpoints()
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
    """Print the line ``ready`` on stdout, as JSON if the log is, and log the same values."""
    gc.collect()
    gc.freeze()  # loaded objects stay for good: later collections skip them
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
    if log_format.is_json():  # containers mix stdout with the log, where each line is to be JSON
        sys.stdout.write(json.dumps({"message": "ready", **values}) + "\n")
    else:
        line = " ".join(f"{key}={shlex.quote(str(value))}" for key, value in values.items())
        sys.stdout.write(f"ready {line}\n")
    sys.stdout.flush()
    if _is_watched():
        _say_next(addresses, has_ui=config.has_ui)
    _LOG.info(f"model loaded {' '.join(f'{key}=%s' for key in values)}", *values.values())


def _say_next(addresses: Mapping[str, ListenAddress], *, has_ui: bool) -> None:
    """Write on a terminal what can be done with a server that is ready."""
    target = addresses["listen"].target
    option = "" if target == _USUAL_TARGET else f" --target {target}"
    sys.stderr.write(f'ferrule serve: try `ferrule generate{option} "def area("` in another terminal\n')
    if (metrics := addresses.get("metrics_listen")) is not None and has_ui:
        sys.stderr.write(f"ferrule serve: the page is http://{metrics.target}/ui\n")


def _say_draining(num_sequences: int, grace_s: float, *, has_failed: bool) -> None:
    """Log that the server drains; on a terminal, write what it waits for and how to stop it at once."""
    _LOG.info("draining live_sequences=%d grace_s=%.1f has_failed=%s", num_sequences, grace_s, has_failed)
    if _is_watched() and num_sequences and not has_failed:
        handles = "1 live handle" if num_sequences == 1 else f"{num_sequences} live handles"
        sys.stderr.write(f"ferrule serve: serving {handles} for up to {grace_s:g} s more; Ctrl-C stops at once\n")


def _stop_signal() -> asyncio.Task[signal.Signals]:
    """Return a task whose result is the first SIGTERM or SIGINT; a second signal ends the process at once.

    The first signal may arrive after the task is cancelled, when the server stops for another reason.
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
    """Ignore signals while the process ends: the loop would restore their default action, which kills the process."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


def _exit_now(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _load(config: ServerConfig, on_progress: OnProgress) -> LoadedExecutor:
    """Load the executor, on a thread: importing torch alone takes seconds."""
    from ferrule_server.loading import create_executor

    return create_executor(config, on_progress)


def _download(config: ServerConfig) -> int:
    """Fetch the model and print its folder. Ctrl-C ends the process at once; the next download resumes."""
    from ferrule_server.loading import download

    def on_interrupt(*_: object) -> NoReturn:
        if _is_watched():
            sys.stderr.write("\x1b[?25h\n")  # the bar hides the cursor
        _exit_now(_EXIT_INTERRUPTED)

    signal.signal(signal.SIGINT, on_interrupt)
    with _bar() as show:
        folder = download(config, show)
    sys.stdout.write(f"{folder}\n")
    return 0


@contextlib.contextmanager
def _progress(state: ServerState) -> Iterator[OnProgress]:
    """Yield a callable that shows progress: in GetStatus, and as a bar on a terminal or as lines in the log."""
    with _bar() as show:

        def on_progress(stage: str, share: float) -> None:
            state.load_stage, state.load_progress = stage, share
            show(stage, share)

        yield on_progress


def _is_watched() -> bool:
    """Whether stderr is a terminal, and the log on it is text."""
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
    """Yield a callable that moves a bar on a terminal; elsewhere it logs each stage once."""
    if not _is_watched():
        yield _log_stage()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<22}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("loading", total=1.0)
        with log_format.written_by(lambda text: progress.console.out(text, end="", highlight=False)):
            yield lambda stage, share: progress.update(task, description=stage, completed=share)


if __name__ == "__main__":
    # Everything is closed by now. A normal exit of the interpreter would only wait 2 s longer: gRPC with certificates
    # waits for objects that are never freed.
    _exit_now(main())
