"""A server as people run it, in a process of its own, for benchmarks that measure what lies between it and a client."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def server(*arguments: str) -> Iterator[str]:
    """Run a server as a child on a free port; yields its address.

    Args:
        *arguments: Flags of ``ferrule serve`` besides.
    """
    with server_process(*arguments) as (target, _):
        yield target


@contextmanager
def server_process(*arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run a server like :func:`server`; yields its address and its process."""
    command = [sys.executable, "-m", "ferrule_server", "--listen", "127.0.0.1:0", "--drain-grace", "0s", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        if not ready.startswith("ready"):
            raise RuntimeError(f"the server did not start: {ready!r}")
        yield next(word.removeprefix("listen=") for word in ready.split() if word.startswith("listen=")), process
    finally:
        process.terminate()
        process.wait(timeout=30)
