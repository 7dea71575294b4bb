"""Logs refusals: one line for a call, and one line per reason for the items of a stream."""

from __future__ import annotations

import logging
import time
from typing import Final

from ferrule_server.api.rpc.observe import current_call
from ferrule_server.api.rpc.status import code_of, log_refused
from ferrule_server.errors import FerruleError

_LOG = logging.getLogger(__name__)

MAX_STRANGER_LINES: Final = 20
"""Lines per second about calls whose credentials are refused."""
_QUIET_S: Final = 1.0
"""How often a stream that floods a full queue is logged, rather than for each of thousands of frames."""


class StrangerLog:
    """Logs each call whose credentials are refused, up to a number of lines per second; the others are counted."""

    def __init__(self) -> None:
        self._until_s = 0.0
        self._num_written = self._num_left_out = 0

    def record(self, rpc: str, error: FerruleError, peer: str, trace_id: str) -> None:
        """Log the call, or count it among those left out."""
        if time.monotonic() >= self._until_s:
            self._begin_second()
        if self._num_written >= MAX_STRANGER_LINES:
            self._num_left_out += 1
            return
        self._num_written += 1
        _LOG.warning(
            "refused rpc=%s code=%s reason=%s peer=%s trace_id=%s",
            rpc,
            code_of(error).name,
            error.reason,
            peer,
            trace_id or "-",
        )

    def _begin_second(self) -> None:
        if self._num_left_out:
            _LOG.warning("refused strangers=%d more, not written one by one", self._num_left_out)
        self._num_written = self._num_left_out = 0
        self._until_s = time.monotonic() + 1.0


class Refusals:
    """Counts refused items by reason until they are logged. Created by the task that serves the call.

    Args:
        rpc: The method.
        principal: The principal of the caller.

    Attributes:
        counts: By reason the first error and how many there were since the last lines; read only.
    """

    __slots__ = ("_call", "_principal", "_quiet_until", "_rpc", "counts")

    def __init__(self, rpc: str, principal: str) -> None:
        self._rpc = rpc
        self._principal = principal
        self._call = current_call()  # lines are logged outside of its task
        self.counts: dict[str, tuple[FerruleError, int]] = {}
        self._quiet_until = 0.0

    def add(self, error: FerruleError) -> None:
        """Count one refused item."""
        first, count = self.counts.get(error.reason, (error, 0))
        self.counts[error.reason] = (first, count + 1)

    def log(self, *, is_last: bool = False) -> None:
        """Log one line for each reason since the last time; at most once per second unless it is the last time."""
        if not self.counts:
            return
        now = time.monotonic()
        if now < self._quiet_until and not is_last:
            return
        self._quiet_until = now + _QUIET_S
        for error, count in self.counts.values():
            log_refused(self._rpc, error, self._principal, count, self._call)
        self.counts.clear()
