"""A program on a terminal of its own."""

from __future__ import annotations

import codecs
import contextlib
import os
import pty
import select
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence

__all__ = ["Terminal"]


class Terminal:
    """A process whose input and output are a terminal of 80 by 24 cells; leave the block to end it.

    Args:
        command: The process.
        environment: Its variables; None: those of this process.

    Attributes:
        seen: Everything that it has shown so far.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self.seen = ""
        self._side, theirs = pty.openpty()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        termios.tcsetwinsize(theirs, (24, 80))
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._side)

    @property
    def modes(self) -> list[object]:
        """How the terminal treats what is typed."""
        return list(termios.tcgetattr(self._side))

    def read_until(self, part: str, after: int = 0) -> int:
        """Return where a text ends on the terminal, once it is there."""
        self.read_while(lambda: part not in self.seen[after:])
        return self.seen.index(part, after) + len(part)

    def read_while(self, goes_on: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Read until a condition ends."""
        deadline = time.monotonic() + timeout_s
        while goes_on():
            assert time.monotonic() < deadline, self.seen[-3000:]
            if select.select([self._side], [], [], 0.05)[0]:
                self._read()

    def type(self, text: str) -> None:
        """Type keys."""
        os.write(self._side, text.encode())

    def end(self) -> int:
        """Return the exit code, having read all that was shown."""
        with contextlib.suppress(OSError):  # how the end of a terminal reads on Linux
            while True:
                self._read()
        return self.process.wait(20)

    def _read(self) -> None:
        self.seen += self._decoder.decode(os.read(self._side, 65536))
