"""The gather window: how long a step waits until the clients of the last step send their next tokens.

Without it, clients that need a moment to answer split into two halves that alternate for ever at half the batch::

    step:   A+B | A | B | A | B ...      each step costs nearly as much as A+B would
    window: A+B |~ A+B |~ A+B ...        a short wait joins them again
"""

from __future__ import annotations

from ferrule_server.engine.settings import EngineSettings


class GatherWindow:
    """Decides when to stop waiting for the rows of the last step.

    A row *comes back* when a new job names its sequence. The window is open while some row is out, for at most
    ``gather_share`` of the last step. It closes early if nothing has come back for ``gather_gap_s``. Closing forgets
    the rows that are still out, so a client that has left is awaited only once.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._gap_s = settings.gather_gap_s
        self._share = settings.gather_share
        self._out: set[str] = set()
        self._closes_at = 0.0
        self._last_back = 0.0

    def open(self, cache_ids: set[str], step_s: float, now: float) -> None:
        """Start waiting for ``cache_ids``, the sequences of a step that took ``step_s`` seconds."""
        self._out = cache_ids
        self._closes_at = now + self._share * step_s
        self._last_back = now

    def came_back(self, cache_id: str, now: float) -> None:
        """Note that a job has named ``cache_id``."""
        if cache_id in self._out:
            self._out.discard(cache_id)
            self._last_back = now

    def forget(self, cache_id: str) -> None:
        """Stop waiting for ``cache_id``, a sequence that was released."""
        self._out.discard(cache_id)

    def remaining_s(self, now: float) -> float:
        """Return the seconds to wait for another job; 0.0: the step should start, rows still out are forgotten."""
        if self._out:
            left = min(self._closes_at, self._last_back + self._gap_s) - now
            if left > 0.0:
                return left
            self._out = set()
        return 0.0
