"""The viewer: a consistent view of pool, sequences and principals, cheap enough to be taken between two steps.

Data proportional to the pool is copied, not traversed, and the reader computes the rest from the copies. With 200 000
blocks and 10 000 sequences a view takes about a millisecond of the engine thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from ferrule_server.engine.bridge.gate import Gate
from ferrule_server.engine.metrics.counters import EngineSnapshot, OwnCounters
from ferrule_server.engine.metrics.views import PrincipalSeen, SequenceSeen, View
from ferrule_server.kv.per_principal import PerPrincipal
from ferrule_server.kv.sequence import Sequence
from ferrule_server.kv.sequence_store import SequenceStore


@dataclass(frozen=True, slots=True)
class Viewer:
    """Takes views of an engine; called from its thread only.

    Args:
        store: The sequences.
        gate: Knows the accepted and unfinished jobs.
        own: The counters of each principal.
        num_pending: Returns the number of jobs in flight or waiting on a sequence.
        snapshot: Returns the engine's current state.
    """

    store: SequenceStore
    gate: Gate
    own: PerPrincipal[OwnCounters]
    num_pending: Callable[[Sequence], int]
    snapshot: Callable[[], EngineSnapshot]

    def look(self, max_sequences: int, max_principals: int) -> View:
        """Return a view of the current state; nothing changes, and no lease is renewed."""
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
            has_gaps=self.store.pool.has_gaps,
            sequences=tuple(self._seen(sequence, now) for sequence in self.store.registry.soonest(max_sequences)),
            principals=tuple(self._principal(name, pending) for name in islice(known, max_principals)),
            num_principals=len(known),
            num_jobs=self.gate.num_jobs,
        )

    def _known(self, pending: dict[str, tuple[int, int]]) -> dict[str, None]:
        """Return the principals that appended recently, newest first, then those that hold sequences or have jobs."""
        known = dict.fromkeys(self.own.recent())
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
            sequence.first_position,
            sequence.lowest_length,
            tuple(sequence.held_ids),
            len(sequence.spare_ids),
            sequence.ttl_s,
            max(0.0, sequence.expires_at - now),
            now - sequence.created_at,
            self.num_pending(sequence),
            sequence.is_appending,
            sequence.is_durable,
            sequence.length if sequence.is_cold else 0,
        )

    def _principal(self, name: str, pending: dict[str, tuple[int, int]]) -> PrincipalSeen:
        held, own = self.store.usage.of(name), self.own.look(name)
        seen = PrincipalSeen(name, held.num_sequences, held.num_blocks, *pending.get(name, (0, 0)))
        seen.num_appends = own.prefills + own.decodes + own.verifies
        seen.num_tokens = own.prefill_tokens + own.decode_tokens
        seen.queue_ns, seen.run_ns = own.queue_ns, own.prefill_ns + own.decode_ns + own.verify_ns
        return seen
