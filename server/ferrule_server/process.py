"""The process: what libraries read when they start, signals, and exit codes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from importlib.metadata import version
from typing import Final, NoReturn

from ferrule_server import log_format
from ferrule_server.config import ServerConfig

EXIT_FAULT: Final = 1
EXIT_UNUSABLE: Final = 2
EXIT_INTERRUPTED: Final = 130

_SWITCH_INTERVAL_S: Final = 0.0005


def set_up(config: ServerConfig) -> None:
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


def stop_signal() -> asyncio.Task[signal.Signals]:
    """Return a task whose result is the first SIGTERM or SIGINT; a second signal ends the process at once.

    The first signal may arrive after the task is cancelled, when the server stops for another reason.
    """
    loop = asyncio.get_running_loop()
    first: asyncio.Queue[signal.Signals] = asyncio.Queue(1)
    stopping = loop.create_task(first.get())

    def on_signal(number: signal.Signals) -> None:
        if first.full() or (stopping.done() and not stopping.cancelled()):
            exit_now(128 + number)
        first.put_nowait(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stopping


def ignore_signals() -> None:
    """Ignore signals while the process ends: the loop would restore their default action, which kills the process."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


def exit_now(code: int) -> NoReturn:
    """End the process at once: nothing is closed, no thread is awaited."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
