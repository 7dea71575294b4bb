"""Tallies: what the appends of each principal came to, so that a view can tell who waits and who works."""

from __future__ import annotations

from ferrule_server.engine.running import RunningAppend

MAX_TALLIES = 1024
"""Principals with sums; beyond it the quarter that was active longest ago is forgotten."""


class Tally:
    """Sums over the appends of one principal.

    Attributes:
        num_appends: Appends committed. num_tokens: their tokens, those from the prefix cache left out.
        queue_ns: Waited for their first steps. run_ns: run time of the steps they had rows in.
        last_ns: Start of the first step of the newest of them, on the clock of ``submitted_ns``.
    """

    __slots__ = ("last_ns", "num_appends", "num_tokens", "queue_ns", "run_ns")

    def __init__(self) -> None:
        self.num_appends = self.num_tokens = self.queue_ns = self.run_ns = self.last_ns = 0


class Tallies:
    """A tally for each principal that appended something lately. Called from the engine thread only.

    Invariant: at most MAX_TALLIES principals have one; whose is forgotten begins anew at zero.
    """

    __slots__ = ("_tallies",)

    def __init__(self) -> None:
        self._tallies: dict[str, Tally] = {}

    def __len__(self) -> int:
        return len(self._tallies)

    def of(self, principal: str) -> Tally | None:
        """Return the principal's tally, to be read only; None: it has none."""
        return self._tallies.get(principal)

    def recent(self) -> list[str]:
        """Return all principals with a tally, the most recently active first."""
        return sorted(self._tallies, key=lambda name: self._tallies[name].last_ns, reverse=True)

    def add(self, run: RunningAppend) -> None:
        """Count an append that is committed; one that appended nothing, a query or a replay, is left out."""
        if run.reservation is None:
            return
        job = run.job
        tally = self._tallies.get(job.principal)
        if tally is None:
            tally = self._new(job.principal)
        tally.num_appends += 1
        tally.num_tokens += len(run.token_ids) - run.num_cached
        tally.last_ns = run.first_step_ns
        if run.first_step_ns > job.submitted_ns:
            tally.queue_ns += run.first_step_ns - job.submitted_ns
        tally.run_ns += run.run_ns

    def _new(self, principal: str) -> Tally:
        if len(self._tallies) >= MAX_TALLIES:
            for name in self.recent()[-MAX_TALLIES // 4 :]:
                del self._tallies[name]
        tally = self._tallies[principal] = Tally()
        return tally
