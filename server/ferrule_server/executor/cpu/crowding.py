"""How many threads a step uses while other processes, or the server itself, keep cores busy.

A thread that has lost its core comes back after some milliseconds, and the others wait for it at the next barrier.
Steps that take less than that may be faster with a thread fewer. Long waits only raise the question. What decides is a
trial: if steps with fewer threads are not faster than recent steps of as many rows with all of them, all threads return
at once. What a step computes does not depend on its threads.
"""

from __future__ import annotations

from typing import Final

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
_MEMORY_STEPS: Final = 16
_MEMORY_S: Final = 0.1
"""The usual time of steps with some number of rows is that of so many of them, or of the last of so many seconds."""
_TRIAL_STEPS: Final = 8
_TRIAL_S: Final = 0.06
_LONGEST_TRIAL_S: Final = 0.2
"""A trial ends after so many steps that can be compared, or earlier after so much time; it has two of them at least. It
fails if it takes longest without them."""
_STALE_S: Final = 1.0
"""An unfinished trial is forgotten after so long without a pause."""
_GAIN: Final = 0.95
"""A trial succeeds if its steps take at most this share of the usual time."""
_FIRST_REST_S: Final = 0.25
_LONGEST_REST_S: Final = 8.0
"""After a failed trial there is none for a while: first this, then twice as long each time, up to the limit."""


class ThreadCount:
    """Counts threads for the next step: all of them, or fewer for a while if that is faster.

    Args:
        most: All threads.
    """

    def __init__(self, most: int) -> None:
        self._most = self._count = most
        self._pause_s = _FIRST_PAUSE_S
        self._until = 0.0
        self._crowding = 0.0
        self._num_calm = 0
        self._usual_s: dict[int, float] = {}  # of steps with all threads, by rows
        self._trial: _Trial | None = None
        self._rest_s = _FIRST_REST_S
        self._rests_until = 0.0

    def at(self, now: float) -> int:
        """Return the threads of a step that begins now, in seconds of any clock that never goes back."""
        if now >= self._until:
            self._count = self._most
        return self._count

    def add(self, now: float, num_rows: int, seconds: float, waited_share: float) -> None:
        """Learn from a step that ended now.

        Args:
            now: On the same clock.
            num_rows: Of the step.
            seconds: How long it took.
            waited_share: The long waits of all its threads together, as a share of that.
        """
        if self._most == 1 or (self._count == self._most and seconds > _SHORT_S):
            return
        if self._count == self._most:
            usual_s = self._usual_s.get(num_rows, seconds)
            weight = min(1.0, max(1 / _MEMORY_STEPS, seconds / _MEMORY_S))
            self._usual_s[num_rows] = usual_s + weight * (seconds - usual_s)
        elif self._has_failed(num_rows, seconds):
            self._end_trial(now)
            return
        if self._count > 1 and seconds <= _SHORT_S:
            self._add_wait(now, seconds, waited_share / (self._count - 1))  # for a late thread all others wait

    def _add_wait(self, now: float, seconds: float, waited_share: float) -> None:
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
            if now >= self._rests_until:
                self._begin_trial(now, seconds)

    def _begin_trial(self, now: float, step_s: float) -> None:
        self._count -= 1
        if self._trial is None or now > self._until + _STALE_S:
            self._trial = _Trial()  # else the last pause was too short for a whole trial
        self._until = now + max(self._pause_s, 3 * step_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _has_failed(self, num_rows: int, seconds: float) -> bool:
        """Return whether the trial has ended with this step and fewer threads were not faster."""
        trial = self._trial
        if trial is None or not trial.add(seconds, self._usual_s.get(num_rows)):
            return False
        self._trial = None
        if trial.share > _GAIN:
            return True
        self._rest_s = _FIRST_REST_S
        return False

    def _end_trial(self, now: float) -> None:
        """Return to all threads; the next trial must wait."""
        self._until, self._pause_s = now, _FIRST_PAUSE_S
        self._rests_until = now + self._rest_s
        self._rest_s = min(2 * self._rest_s, _LONGEST_REST_S)


class _Trial:
    """Compares steps with fewer threads with the usual time of such steps."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._taken_s = self._usual_s = self._unknown_s = 0.0

    def add(self, seconds: float, usual_s: float | None) -> bool:
        """Add a step, and None if its usual time is unknown; return whether the trial is over."""
        if usual_s is None:
            self._unknown_s += seconds
            return self._unknown_s >= _LONGEST_TRIAL_S
        self._num_steps += 1
        self._taken_s += seconds
        self._usual_s += usual_s
        return self._num_steps >= _TRIAL_STEPS or (self._num_steps > 1 and self._taken_s >= _TRIAL_S)

    @property
    def share(self) -> float:
        """How long the steps took, as a share of the usual time; 1 if that is unknown."""
        return self._taken_s / self._usual_s if self._usual_s else 1.0
