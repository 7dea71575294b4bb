"""Runs the demo's server and ends it with the demo, whatever became of that; a program by itself.

``python -I -S guardian.py FOLDER COMMAND...`` runs the command until it ends, or until standard input does. That
is a pipe whose other end the demo holds, so it ends with the demo's process, by SIGKILL too. Then the command gets
SIGTERM and the folder is removed. Only the standard library is imported, and nothing of this package.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading

__all__ = ["main"]

_STOP_S = 10.0


def main(folder: str, command: list[str]) -> int:
    """Run the command as described above and return its exit code, 128 + N for signal N."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)  # noqa: S603 - the demo's own
    has_ended = threading.Event()
    threading.Thread(target=_watch, args=(process, has_ended), daemon=True).start()
    code = process.wait()
    if has_ended.is_set():
        shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


def _watch(process: subprocess.Popen[bytes], has_ended: threading.Event) -> None:
    """Wait for the end of standard input, then end the process."""
    while os.read(0, 4096):  # not sys.stdin: a thread that holds its lock when the interpreter ends aborts the program
        pass
    has_ended.set()
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
