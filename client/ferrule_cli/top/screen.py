"""``ferrule top`` on a terminal: a thread looks, the main one draws and listens to keys.

The screen is the terminal's alternate one, drawn over in place, so nothing flickers; however the command ends, what
was there before comes back, with the cursor and the way keys are read.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ferrule_cli.top.figures import Figures, History, Look
from ferrule_cli.top.frame import Frame, map_cells
from ferrule_cli.top.parts import glyphs_of
from ferrule_cli.top.source import Source
from ferrule_client.errors import FerruleError

__all__ = ["Screen"]

_TURN_S = 0.25  # how soon a new size of the terminal is seen
_GOOD_BYE_S = 0.5


class Screen:
    """Shows a server on a terminal until somebody presses q, with ``interval_s`` seconds between two looks."""

    def __init__(self, console: Console, source: Source, interval_s: float) -> None:
        self._console = console
        self._source = source
        self._interval_s = interval_s
        self._history = History()
        self._figures: Figures | None = None
        self._error: FerruleError | None = None
        self._seen_at = 0.0
        self._glyphs = glyphs_of(console)
        self._found: queue.SimpleQueue[Look | FerruleError] = queue.SimpleQueue()
        self._is_over = threading.Event()

    def run(self) -> None:
        """Show it; if the first look fails, its error is raised, as there is nothing to show yet."""
        self._take(self._source.look(map_cells(*self._console.size)))
        reader, writer = os.pipe()
        looker = threading.Thread(target=self._look_again, args=(writer,), name="ferrule-top", daemon=True)
        looker.start()
        try:
            with _single_keys() as keys, Live(console=self._console, screen=True, auto_refresh=False) as live:
                while self._turn(reader, keys, live):
                    pass
        finally:
            self._is_over.set()
            looker.join(_GOOD_BYE_S)

    def _look_again(self, writer: int) -> None:
        """Look again and again; with each result that was found a byte can be read from the other end of ``writer``."""
        next_at = time.monotonic() + self._interval_s
        while not self._is_over.wait(max(0.0, next_at - time.monotonic())):
            next_at = max(next_at + self._interval_s, time.monotonic())
            try:
                self._found.put(self._source.look(map_cells(*self._console.size)))
            except FerruleError as error:
                self._found.put(error)
            os.write(writer, b".")

    def _turn(self, reader: int, keys: int | None, live: Live) -> bool:
        """Draw, then wait for something to happen; False: it is over."""
        live.update(Group(*self._lines(has_keys=keys is not None)), refresh=True)
        size, deadline = self._console.size, time.monotonic() + 1.0
        while time.monotonic() < deadline and self._console.size == size:
            ready, _, _ = select.select([reader] if keys is None else [reader, keys], [], [], _TURN_S)
            if keys is not None and keys in ready and b"q" in os.read(keys, 64).lower():
                return False
            if reader in ready:
                os.read(reader, 4096)
                while not self._found.empty():
                    self._take(self._found.get())
                return True
        return True

    def _take(self, found: Look | FerruleError) -> None:
        if isinstance(found, FerruleError):
            self._error = found
            return
        self._error, self._seen_at = None, time.monotonic()
        self._figures = self._history.add(found)

    def _lines(self, *, has_keys: bool) -> list[Text]:
        assert self._figures is not None
        note = ""
        if self._error is not None:
            away_s = time.monotonic() - self._seen_at
            note = f"no answer for {away_s:.0f} s ({self._error.reason}), trying again; this is what was seen last"
        hint = f"{'q' if has_keys else 'Ctrl-C'} ends   every {self._interval_s:g} s"
        return Frame(*self._console.size, self._glyphs).lines(self._figures, note=note, hint=hint)


@contextlib.contextmanager
def _single_keys() -> Iterator[int | None]:
    """Have keys arrive one by one and unseen; yields where to read them, None where nobody types."""
    try:
        import termios
        import tty

        keys = sys.stdin.fileno()
        before = termios.tcgetattr(keys)
    except (ImportError, OSError, ValueError, termios.error):
        yield None
        return
    tty.setcbreak(keys)
    try:
        yield keys
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)
