"""Cold sequences: the KV of a restored sequence is computed before the first job that needs it.

The computation is an append of all its tokens that appends nothing. It holds the lane of the sequence, and the job that
needed the KV is the first one to wait behind it::

    lane of a cold sequence:   tokens run again  <-  append A  <-  fork  <-  append B
                               in flight             waits         waits     waits

So it shares steps with other prefills, in the order of use, fairly between principals, and at their pace.

Forks of one trunk are often used at the same time. Then one of them computes the trunk, and the others are answered
with RESTORING until they find its blocks. Otherwise each would compute it, and would hold blocks of its own for it. It
does not matter whether these blocks are published: see ``kv/prefix_cache.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ferrule_server.engine.appends.running import RunningAppend
from ferrule_server.engine.jobs import AppendJob, OutputRequest
from ferrule_server.engine.metrics.counters import EngineCounters
from ferrule_server.errors import HandleLost, Restoring
from ferrule_server.kv.handle import Handle
from ferrule_server.kv.sequence import Sequence
from ferrule_server.kv.sequence_store import SequenceStore

_NOTHING = OutputRequest(None)
_USUAL_RATE = 500.0
"""Tokens per second that are assumed before any prompt has run."""
_SHORTEST_S = 0.1
_LONGEST_S = 5.0
_FAULT_RETRY_S = 1.0


@dataclass(slots=True)
class Cold:
    """Starts the computation of cold sequences.

    Args:
        store: The sequences; called from the engine thread only.
        counters: Say how fast prompts run, and count the tokens that are computed again.
        wait_tokens: Jobs wait for the computation of at most so many tokens; for more they are answered with RESTORING,
            and the computation goes on.
    """

    store: SequenceStore
    counters: EngineCounters
    wait_tokens: int

    def start(self, sequence: Sequence, running: Iterable[RunningAppend]) -> RunningAppend:
        """Reserve the blocks of a cold sequence and return the append that computes them.

        Args:
            sequence: The sequence.
            running: The appends in flight.

        Raises:
            ContextExceeded, ExceedsPool, BlocksExhausted, QuotaExceeded: There is no room; the sequence stays cold.
            Restoring: Blocks that it will share are computed for another sequence now.
        """
        num_cached = self.store.reservations.num_cached(sequence)
        if num_left := max((self._num_left(run, sequence, num_cached) for run in running), default=0):
            raise Restoring(sequence.handle_id, sequence.length, self._estimate_s(num_left))
        reservation = self.store.reservations.reserve_cold(sequence)
        token_ids = tuple(sequence.token_ids)
        job = AppendJob(sequence.principal, token_ids, None, _NOTHING, is_internal=True, keeps_record=False)
        run = RunningAppend(job, None, reservation, token_ids, specs={})
        run.skip_cached(reservation.num_cached)
        self.counters.restored_tokens += run.remaining
        return run

    def _num_left(self, run: RunningAppend, sequence: Sequence, num_cached: int) -> int:
        """Return how many tokens ``run`` has to compute until its blocks hold all that the sequence can share."""
        if not run.is_warming or run.job.principal != sequence.principal:
            return 0
        other = run.reservation.sequence
        assert other is not None
        num_common = other.chain.num_common(sequence.chain)
        num_shared = num_common - num_common % self.store.pool.block_size
        return max(0, num_shared - run.cursor) if num_shared > num_cached else 0

    def restoring(self, run: RunningAppend) -> Restoring:
        """Return the error of a job that cannot wait for the computation."""
        sequence = run.reservation.sequence
        assert sequence is not None
        return Restoring(sequence.handle_id, run.remaining, self._estimate_s(run.remaining))

    def _estimate_s(self, num_tokens: int) -> float:
        """Return in how many seconds to ask again, from the measured speed of prompts."""
        counters = self.counters
        rate = counters.prefill_tokens / (counters.prefill_ns * 1e-9) if counters.prefill_ns else _USUAL_RATE
        return min(max(num_tokens / max(rate, 1.0), _SHORTEST_S), _LONGEST_S)


def lost(store: SequenceStore, handle: Handle | None) -> HandleLost | Restoring:
    """Return the error of a job after a device fault: a durable sequence stays, and its KV is computed again."""
    if handle is None:
        return HandleLost("")
    sequence = store.registry.sequences.get(handle.cache_id)
    if sequence is not None and sequence.is_durable:
        return Restoring(sequence.handle_id, sequence.length, _FAULT_RETRY_S)
    return HandleLost(handle.handle_id)
