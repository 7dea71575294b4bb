"""A line on the terminal while a command waits for more than a second: for what, how far it is, and for how long."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from types import TracebackType

__all__ = ["Waiting"]

_PATIENCE_S = 1.0  # a wait that is shorter leaves the terminal alone
_FRAME_S = 0.2
_BAR_WIDTH = 20


class Waiting:
    """Shows the line on standard error, if that is a terminal, as long as the ``with`` around it lasts, or to the end.

    Nothing else may be printed meanwhile. When it ends, the line is gone and the cursor is at its start.

    Example:
        ``with Waiting("the answer") as waiting: waiting.show("reading weights", 0.52)``
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._share: float | None = None
        self._begin = time.monotonic()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Waiting:
        if sys.stderr.isatty():
            self._thread = threading.Thread(target=self._draw, name="ferrule-waiting", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.end()

    def show(self, text: str, share: float | None = None) -> None:
        """Say what is waited for now, and how much of it is over, 0 to 1; None: that is not known."""
        self._text, self._share = text, share

    def end(self) -> None:
        """Take the line away; ending twice changes nothing."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _draw(self) -> None:
        pause_s = _PATIENCE_S
        while not self._is_over.wait(pause_s):
            pause_s = _FRAME_S
            line = self._line(time.monotonic() - self._begin)[: max(1, shutil.get_terminal_size().columns - 1)]
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        if pause_s != _PATIENCE_S:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _line(self, seconds: float) -> str:
        share = self._share
        if share is None:
            return f"waiting: {self._text}, {seconds:.0f} s"
        bar = ("=" * round(_BAR_WIDTH * share)).ljust(_BAR_WIDTH)
        return f"waiting: {self._text} {100 * share:.0f} % [{bar}] {seconds:.0f} s"
