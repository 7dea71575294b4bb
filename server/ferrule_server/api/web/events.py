"""One message per second for everybody who watches, made once, and only while somebody does."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

INTERVAL_S: Final = 1.0
MAX_WATCHERS: Final = 16
_CLOSE_S: Final = 2.0


class TooManyWatchers(Exception):
    """As many watch as may."""


class Events:
    """Makes a message per tick on a thread of its own and gives it to all watchers.

    Invariant: ``make`` runs at most once per tick, whoever watches; never while nobody does. A watcher that falls
    behind misses messages and holds up nobody.

    Args:
        make: Returns the message of now; must not raise.
        interval_s: Between two messages.
        max_watchers: Most at a time.
    """

    def __init__(
        self, make: Callable[[], bytes], interval_s: float = INTERVAL_S, max_watchers: int = MAX_WATCHERS
    ) -> None:
        self._make = make
        self._interval_s = interval_s
        self._max_watchers = max_watchers
        self._changed = threading.Condition()
        self._num_watchers = 0
        self._is_closed = False
        self._message = b""
        self._number = 0
        self._made_at = -interval_s
        self._thread = threading.Thread(target=self._main, name="ferrule-web-events", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End what everybody watches; a message that is being made is waited for, though not for long."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    @contextlib.contextmanager
    def watch(self) -> Iterator[Iterator[bytes]]:
        """Give an iterator over the messages from now on, which ends when this is closed.

        Raises:
            TooManyWatchers: As many watch as may.
        """
        with self._changed:
            if self._num_watchers >= self._max_watchers:
                raise TooManyWatchers
            self._num_watchers += 1
            is_fresh = time.monotonic() - self._made_at < self._interval_s
            seen = self._number - 1 if is_fresh else self._number
            self._changed.notify_all()
        try:
            yield self._messages(seen)
        finally:
            with self._changed:
                self._num_watchers -= 1

    def _messages(self, seen: int) -> Iterator[bytes]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda seen=seen: self._is_closed or self._number > seen)  # type: ignore[misc]
                if self._is_closed:
                    return
                seen, message = self._number, self._message
            yield message

    def _main(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._num_watchers > 0)
                if self._is_closed:
                    return
            began = time.monotonic()
            message = self._make()
            with self._changed:
                self._message, self._number, self._made_at = message, self._number + 1, time.monotonic()
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_closed, self._interval_s - (time.monotonic() - began))
