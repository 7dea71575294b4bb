"""The viewer: a consistent look at pool, sequences and principals, cheap enough to be taken between two steps.

What is proportional to the pool is copied, not walked through, and what can be told from the copies is told by whoever
reads them: with 200 000 blocks and 10 000 sequences a look takes about a millisecond of the engine thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from ferrule_server.engine.appends.running import RunningAppend
from ferrule_server.engine.bridge.gate import Gate
from ferrule_server.engine.metrics.counters import EngineSnapshot
from ferrule_server.engine.metrics.views import PrincipalSeen, SequenceSeen, View
from ferrule_server.kv.sequence import Sequence
from ferrule_server.kv.sequence_store import SequenceStore


@dataclass(frozen=True, slots=True)
class Viewer:
    """Looks at an engine; called from its thread only.

    Args:
        store: The sequences.
        gate: What is accepted and not finished.
        tallies: What the appends of each principal came to.
        num_pending: Jobs in flight or waiting on a sequence.
        snapshot: The engine's state now.
    """

    store: SequenceStore
    gate: Gate
    tallies: Tallies
    num_pending: Callable[[Sequence], int]
    snapshot: Callable[[], EngineSnapshot]

    def look(self, max_sequences: int, max_principals: int) -> View:
        """Return how everything stands; nothing changes, no lease is renewed."""
        snapshot = self.snapshot()
        refcounts, is_cached = self.store.pool.picture()
        pending = self.gate.pending()
        known = self._known(pending)
        now = self.store.clock()
        return View(
            at_s=time.monotonic(),
            unix_ns=time.time_ns(),
            snapshot=snapshot,
            timings=dict(snapshot.counters.timings),
            kv=self.store.metrics(),
            refcounts=refcounts,
            is_cached=is_cached,
            sequences=tuple(self._seen(sequence, now) for sequence in self.store.registry.soonest(max_sequences)),
            principals=tuple(self._principal(name, pending) for name in islice(known, max_principals)),
            num_principals=len(known),
            num_jobs=self.gate.num_jobs,
        )

    def _known(self, pending: dict[str, tuple[int, int]]) -> dict[str, None]:
        """Everybody who appended lately, most recently first, then who holds something or waits."""
        known = dict.fromkeys(self.tallies.recent())
        known.update(dict.fromkeys(self.store.usage.principals()))
        known.update(dict.fromkeys(pending))
        return known

    def _seen(self, sequence: Sequence, now: float) -> SequenceSeen:
        return SequenceSeen(
            sequence.handle_id,
            sequence.parent_handle_id,
            sequence.principal,
            sequence.length,
            sequence.reserved_length,
            tuple(sequence.block_ids),
            len(sequence.spare_ids),
            sequence.ttl_s,
            max(0.0, sequence.expires_at - now),
            now - sequence.created_at,
            self.num_pending(sequence),
            sequence.is_appending,
        )

    def _principal(self, name: str, pending: dict[str, tuple[int, int]]) -> PrincipalSeen:
        held, tally = self.store.usage.of(name), self.tallies.of(name)
        seen = PrincipalSeen(name, held.num_sequences, held.num_blocks, *pending.get(name, (0, 0)))
        if tally is not None:
            seen.num_appends, seen.num_tokens = tally.num_appends, tally.num_tokens
            seen.queue_ns, seen.run_ns = tally.queue_ns, tally.run_ns
        return seen


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

    Invariant: at most MAX_TALLIES principals have one; a principal that is forgotten starts again at zero.
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
