"""One rendering for all who ask meanwhile, so that no number of readers takes the interpreter from the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")

_REST: Final = 9.0
"""Rest after a rendering, as a multiple of what it took: a tenth of one core at most is spent."""
_MAX_REST_S: Final = 0.5
"""Longest rest: nobody is to wait for one that was slow for a reason of its own."""


class SharedRender(Generic[T]):
    """Renders something that is fresh for whoever asked: it began after each of them did.

    Invariant: one rendering runs at a time, and next to none of the time, however many ask.

    Args:
        render: Returns what everybody gets; may raise, which who asked then sees.
    """

    def __init__(self, render: Callable[[], T]) -> None:
        self._render = render
        self._changed = threading.Condition()
        self._is_rendering = False
        self._num_begun = 0
        self._last: tuple[int, T] | None = None
        self._rest_until = 0.0

    def get(self) -> T:
        """Return a rendering that began after this call did."""
        with self._changed:
            wanted = self._num_begun + 1
            while self._is_rendering:
                self._changed.wait()
                if self._last is not None and self._last[0] >= wanted:
                    return self._last[1]
            self._is_rendering = True
        try:
            return self._rendered()
        finally:
            with self._changed:
                self._is_rendering = False
                self._changed.notify_all()

    def _rendered(self) -> T:
        time.sleep(max(0.0, self._rest_until - time.monotonic()))
        with self._changed:
            self._num_begun += 1
        began = time.monotonic()
        try:
            result = self._render()
        finally:
            ended = time.monotonic()
            self._rest_until = ended + min(_REST * (ended - began), _MAX_REST_S)
        self._last = (self._num_begun, result)
        return result
