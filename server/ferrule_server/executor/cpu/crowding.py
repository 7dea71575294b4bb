"""How many threads a step uses while other processes keep cores busy.

A thread that has lost its core comes back after some milliseconds, and the others wait for it at the next barrier.
Steps that take less than that are faster with a thread fewer. What a step computes does not depend on its threads.
"""

from __future__ import annotations

from typing import Final

__all__ = ["ThreadCount"]

_SHORT_S: Final = 0.1
"""Longer steps go on with what the thread has left: its work is shared out piece by piece."""
_LEAST_WAIT_S: Final = 0.0012
"""Shorter waits are those for a thread that is woken, or that has made room for a short call of the server."""
_WAIT_SHARE: Final = 0.15
_ENOUGH: Final = 2.0
"""Crowded steps after which there is a thread less; steps without a wait count against them."""
_CALM: Final = 0.25
_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 0.64
_CALM_STEPS: Final = 50


class ThreadCount:
    """Counts threads for the next step: all of them, or fewer for a while after steps in which threads waited long.

    Args:
        most: All threads.
    """

    def __init__(self, most: int) -> None:
        self._most = self._count = most
        self._pause_s = _FIRST_PAUSE_S
        self._until = 0.0
        self._crowding = 0.0
        self._num_calm = 0

    def at(self, now: float) -> int:
        """Return the threads of a step that begins now, in seconds of any clock that never goes back."""
        if now >= self._until:
            self._count = self._most
        return self._count

    def add(self, now: float, seconds: float, waited_share: float) -> None:
        """Learn from a step that ended now: how long it took, and the long waits of all threads as a share of it."""
        if self._count == 1 or seconds > _SHORT_S:
            return
        waited_share /= self._count - 1  # at the barrier of a thread that is late, all others wait
        if waited_share < _WAIT_SHARE or waited_share * seconds < _LEAST_WAIT_S:
            if self._count < self._most:
                return  # that it is calm with fewer threads does not say that the core is free again
            self._crowding = max(0.0, self._crowding - _CALM)
            self._num_calm += 1
            if self._num_calm >= _CALM_STEPS:
                self._pause_s = _FIRST_PAUSE_S
            return
        self._num_calm = 0
        self._crowding += 1
        if self._crowding >= _ENOUGH:
            self._crowding = _ENOUGH - 1
            self._count -= 1
            self._until = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
