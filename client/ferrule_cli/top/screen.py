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
from collections.abc import Callable, Iterator
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ferrule_cli.top.figures import Figures, History, Look
from ferrule_cli.top.frame import Frame, map_cells
from ferrule_cli.top.picture import glyphs_of
from ferrule_cli.top.source import Source
from ferrule_client.errors import FerruleError

__all__ = ["Screen"]

_TURN_S = 0.25
"""How soon a new size of the terminal is seen."""
_GOOD_BYE_S = 0.5


class Screen:
    """Shows a server until somebody presses q.

    Args:
        console: A terminal.
        source: Where to look.
        interval_s: Between two looks.
    """

    def __init__(self, console: Console, source: Source, interval_s: float) -> None:
        self._console = console
        self._source = source
        self._interval_s = interval_s
        self._history = History()
        self._figures: Figures | None = None
        self._error: FerruleError | None = None
        self._seen_at = 0.0
        self._glyphs = glyphs_of(console)

    def run(self) -> None:
        """Show it.

        Raises:
            FerruleError: The first look fails: there is nothing to show yet.
        """
        self._take(self._source.look(self._cells()))
        with (
            _Looker(self._source, self._interval_s, self._cells) as looker,
            _single_keys() as keys,
            Live(console=self._console, screen=True, auto_refresh=False, transient=True) as live,
        ):
            while self._turn(looker, keys, live):
                pass

    def _turn(self, looker: _Looker, keys: int | None, live: Live) -> bool:
        """Draw, then wait for something to happen; False: it is over."""
        live.update(Group(*self._lines(has_keys=keys is not None)), refresh=True)
        size, deadline = self._console.size, time.monotonic() + 1.0
        while time.monotonic() < deadline and self._console.size == size:
            sources = [looker.reader] if keys is None else [looker.reader, keys]
            ready, _, _ = select.select(sources, [], [], _TURN_S)
            if keys in ready and keys is not None and os.read(keys, 64).lower().find(b"q") >= 0:
                return False
            if looker.reader in ready:
                for found in looker.take():
                    self._take(found)
                return True
        return True

    def _take(self, found: Look | FerruleError) -> None:
        if isinstance(found, FerruleError):
            self._error = found
            return
        self._error, self._seen_at = None, time.monotonic()
        self._figures = self._history.add(found)

    def _cells(self) -> int:
        width, height = self._console.size
        return map_cells(width, height)

    def _lines(self, *, has_keys: bool) -> list[Text]:
        assert self._figures is not None
        width, height = self._console.size
        frame = Frame(width, height, self._glyphs)
        note = ""
        if self._error is not None:
            away_s = time.monotonic() - self._seen_at
            note = f"no answer for {away_s:.0f} s ({self._error.reason}), trying again; this is what was seen last"
        hint = f"{'q' if has_keys else 'Ctrl-C'} ends   every {self._interval_s:g} s"
        return frame.lines(self._figures, note=note, hint=hint)


class _Looker:
    """Looks again and again on a thread of its own; the newest results lie ready, and ``reader`` can be read then."""

    def __init__(self, source: Source, interval_s: float, cells: Callable[[], int]) -> None:
        self._source = source
        self._interval_s = interval_s
        self._cells = cells
        self._found: queue.SimpleQueue[Look | FerruleError] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self.reader, self._writer = os.pipe()
        self._thread = threading.Thread(target=self._main, name="ferrule-top", daemon=True)

    def __enter__(self) -> _Looker:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join(_GOOD_BYE_S)

    def take(self) -> list[Look | FerruleError]:
        """Return what was found since the last time, oldest first."""
        os.read(self.reader, 4096)
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._found.get_nowait())
        return found

    def _main(self) -> None:
        next_at = time.monotonic() + self._interval_s
        while not self._is_over.wait(max(0.0, next_at - time.monotonic())):
            next_at = max(next_at + self._interval_s, time.monotonic())
            try:
                self._found.put(self._source.look(self._cells()))
            except FerruleError as error:
                self._found.put(error)
            if not self._is_over.is_set():
                os.write(self._writer, b".")


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
