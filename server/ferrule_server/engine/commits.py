"""Commits: an append whose rows have all been run becomes part of its sequence, and an answer."""

from __future__ import annotations

from dataclasses import dataclass

from ferrule_server.engine.counters import EngineCounters
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
        counters: Counts prefills and decodes.
    """

    store: KvStore
    records: ReplayRecords
    counters: EngineCounters

    def commit(self, run: RunningAppend) -> AppendResult:
        """Move the tip, renew the lease, keep the record; return the answer.

        Raises:
            NonFiniteLogits: A row holds NaN or infinity; nothing was committed.
        """
        for row in run.outputs:
            if not row.is_finite:
                raise NonFiniteLogits(row.position)
        sequence = self._write(run)
        answer = AppendResult(
            handle=self.store.handle_at(sequence, run.length_after),
            rows=tuple(run.outputs),
            seed=run.seed,
            timing=run.timing,
            replayed=run.verdict is Verdict.REPLAY,
            recomputed=run.verdict is Verdict.REPLAY,
            forked=run.verdict is Verdict.FORK,
        )
        if run.verdict is Verdict.APPEND or run.verdict is Verdict.REWIND:
            self.records.keep(sequence.handle_id, run.start, run.job, answer)
        self._count(run)
        return answer

    def _write(self, run: RunningAppend) -> Sequence:
        if run.reservation is not None:
            return self.store.commit(run.reservation, run.token_ids, run.job.ttl_s)
        assert run.sequence is not None
        run.sequence.num_pins -= 1
        self.store.renew(run.sequence, run.job.ttl_s)
        return run.sequence

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
