"""Refused items of one call or stream: logged with one line for each reason, not one for each of thousands."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from ferrule_server.api.rpc.observe import current_call
from ferrule_server.api.rpc.status import code_of, log_refused, reason_of
from ferrule_server.errors import FerruleError

_LOG = logging.getLogger(__name__)

MAX_STRANGER_LINES: Final = 20
"""Lines a second about calls whose credentials are refused."""
_QUIET_S: Final = 1.0
"""A stream that floods a full queue has lines of its own this often, not one for each of thousands of frames."""


class StrangerLog:
    """Writes a line about each call whose credentials are refused, but only so many a second.

    Of a flood of them only the number is told.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until_s = 0.0
        self._num_written = self._num_left_out = 0

    def record(self, rpc: str, error: FerruleError, peer: str, trace_id: str) -> None:
        """Write the line, or count it among those left out."""
        if self._clock() >= self._until_s:
            self._begin_second()
        if self._num_written >= MAX_STRANGER_LINES:
            self._num_left_out += 1
            return
        self._num_written += 1
        _LOG.warning(
            "refused rpc=%s code=%s reason=%s peer=%s trace_id=%s",
            rpc,
            code_of(error).name,
            reason_of(error),
            peer,
            trace_id or "-",
        )

    def _begin_second(self) -> None:
        if self._num_left_out:
            _LOG.warning("refused strangers=%d more, not written one by one", self._num_left_out)
        self._num_written = self._num_left_out = 0
        self._until_s = self._clock() + 1.0


class Refusals:
    """Counts refused items by reason until they are logged. Made by the task that serves the call.

    Args:
        rpc: The method.
        principal: Who asked.
    """

    __slots__ = ("_call", "_counts", "_principal", "_quiet_until", "_rpc")

    def __init__(self, rpc: str, principal: str) -> None:
        self._rpc = rpc
        self._principal = principal
        self._call = current_call()  # where lines are written, on the engine's side, there is none
        self._counts: dict[str, tuple[FerruleError, int]] = {}
        self._quiet_until = 0.0

    def add(self, error: FerruleError) -> None:
        """Count one item in."""
        first, count = self._counts.get(reason_of(error), (error, 0))
        self._counts[reason_of(error)] = (first, count + 1)

    def log(self, *, is_last: bool = False) -> None:
        """Write one line for each reason counted since the last time; at most once a second but for the last time."""
        if not self._counts:
            return
        now = time.monotonic()
        if now < self._quiet_until and not is_last:
            return
        self._quiet_until = now + _QUIET_S
        for error, count in self._counts.values():
            log_refused(self._rpc, error, self._principal, count, self._call)
        self._counts.clear()
