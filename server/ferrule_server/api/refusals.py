"""Refused items of one call or stream: logged with one line for each reason, not one for each of thousands."""

from __future__ import annotations

import time
from typing import Final

from ferrule_server.api.observe import current_call
from ferrule_server.api.status import log_refused, reason_of
from ferrule_server.errors import FerruleError

_QUIET_S: Final = 1.0
"""A stream that floods a full queue has lines of its own this often, not one for each of thousands of frames."""


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
