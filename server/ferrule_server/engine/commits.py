"""Commits: an append whose rows have all been run becomes part of its sequence, and an answer."""

from __future__ import annotations

from dataclasses import dataclass

from ferrule_server.engine.counters import EngineCounters
from ferrule_server.engine.creations import Creations
from ferrule_server.engine.failpoints import Failpoints
from ferrule_server.engine.jobs import AppendResult
from ferrule_server.engine.records import ReplayRecords
from ferrule_server.engine.running import RunningAppend
from ferrule_server.errors import NonFiniteLogits
from ferrule_server.kv.append_rule import Verdict
from ferrule_server.kv.sequence import Sequence
from ferrule_server.kv.store import KvStore


@dataclass(frozen=True, slots=True)
class Commits:
    """Commits appends to the store.

    Args:
        store: The sequences; called from the engine thread only.
        records: Told what was answered to each append.
        creations: Told what was made.
        counters: Counts prefills and decodes.
        failpoints: For tests.
    """

    store: KvStore
    records: ReplayRecords
    creations: Creations
    counters: EngineCounters
    failpoints: Failpoints | None = None

    def commit(self, run: RunningAppend) -> AppendResult:
        """Move the tip, renew the lease, keep the record; return the answer.

        Should anything fail once the tip has moved, the append stays committed: a retry is answered as a replay. A new
        sequence that no request_id finds again is given back, since nobody will ever hear of it.

        Raises:
            NonFiniteLogits: A row holds NaN or infinity; nothing was committed.
        """
        for row in run.outputs:
            if not row.is_finite:
                raise NonFiniteLogits(row.position)
        sequence = self._write(run)
        try:
            return self._settle(run, sequence)
        except Exception:  # whatever failed: tidied up here, raised again for the engine to answer with a fault
            if run.reservation is not None and run.reservation.sequence is None and run.creation is None:
                self.store.release(self.store.handle_at(sequence), sequence.principal)
                self.records.forget(sequence.handle_id)
            raise

    def _write(self, run: RunningAppend) -> Sequence:
        if run.reservation is not None:
            return self.store.commit(run.reservation, run.token_ids, run.ttl_s)
        assert run.sequence is not None
        self.store.renew(run.sequence, run.ttl_s)
        return run.sequence

    def _settle(self, run: RunningAppend, sequence: Sequence) -> AppendResult:
        """Remember the append that is committed, and return its answer."""
        handle = self.store.handle_at(sequence, run.length_after)
        if run.creation is not None:
            self.creations.finish(run.creation, (handle,), run.start, run.seed)
        is_replay = run.verdict is Verdict.REPLAY
        answer = AppendResult(
            handle=handle,
            rows=tuple(run.outputs),
            seed=run.seed,
            timing=run.timing,
            replayed=is_replay,
            recomputed=is_replay,
            forked=run.job.branched_to(handle.cache_id),
            ttl_s=sequence.ttl_s,
        )
        if run.verdict is Verdict.APPEND or run.verdict is Verdict.REWIND or run.creation is not None:
            self.records.keep(sequence.handle_id, run.start, run.job, answer)
        self._count(run)
        if self.failpoints is not None:
            self.failpoints.hit("after_commit")
        return answer

    def _count(self, run: RunningAppend) -> None:
        if run.reservation is None:
            return
        if run.sequence is None or len(run.token_ids) > 1:
            self.counters.prefills += 1
            self.counters.prefill_tokens += len(run.token_ids)
            self.counters.prefill_ns += run.run_ns
        else:
            self.counters.decodes += 1
            self.counters.decode_ns += run.run_ns
