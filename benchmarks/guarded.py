"""Processes that end with this one, whatever becomes of it: by SIGKILL or a crash too.

Between the two stands the guardian of the demo (``ferrule_cli.demo.guardian``), which holds the reading end of a
pipe: it ends the process once nobody holds the other end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from ferrule_cli.demo import guardian

Process = subprocess.Popen[bytes]
"""The guardian, whose exit code is that of the process."""

_STOP_S = 15.0  # more than the guardian itself waits


def start(command: Sequence[str], folder: Path, stdout: int | IO[bytes], stderr: IO[bytes] | None = None) -> Process:
    """Return a process running; the folder goes with it.

    It has a session of its own: Ctrl-C in the terminal reaches this program only, which then ends it in order.
    """
    prefix = [sys.executable, "-I", "-S", guardian.__file__, str(folder)]
    return subprocess.Popen(
        [*prefix, *command], stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, start_new_session=True
    )


def end(process: Process) -> None:
    """End it, the hard way where it takes too long; ending twice changes nothing."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
