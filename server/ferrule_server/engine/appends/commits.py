"""Commits: make an append whose rows have all been run part of its sequence, and build its answer."""

from __future__ import annotations

from dataclasses import dataclass

from ferrule_server.engine.appends.creations import Creations
from ferrule_server.engine.appends.records import ReplayRecords
from ferrule_server.engine.appends.rows import verify, with_numbers, with_row_handles, with_tokens
from ferrule_server.engine.appends.running import Reports, RunningAppend
from ferrule_server.engine.faults.failpoints import Failing
from ferrule_server.engine.jobs import Acceptance, AppendResult, Verified
from ferrule_server.engine.metrics.counters import EngineCounters, OwnCounters
from ferrule_server.errors import NonFiniteLogits
from ferrule_server.kv.append_rule import Verdict
from ferrule_server.kv.sequence import Sequence
from ferrule_server.kv.sequence_store import SequenceStore

_RECORDED = (Verdict.APPEND, Verdict.REWIND)


@dataclass(frozen=True, slots=True)
class Commits:
    """Commits appends to the store.

    Args:
        store: The sequences; called from the engine thread only.
        records: Keeps the answer to each append.
        creations: Keeps the sequences that were created.
        counters: Counts prefills, decodes and verifies, and how long they took.
        journal: Writes what happens to durable sequences.
        failpoints: Where to fail on purpose.
    """

    store: SequenceStore
    records: ReplayRecords
    creations: Creations
    counters: EngineCounters
    journal: Reports
    failpoints: Failing

    def conclude(self, run: RunningAppend) -> AppendResult:
        """Move the tip, renew the lease, keep the record, and return the answer.

        If anything fails after the tip has moved, the append stays committed: a retry is answered as a replay. A new
        sequence that no request_id can find again is released, since no client will ever learn of it.

        Raises:
            NonFiniteLogits: A row holds NaN or infinity; nothing was committed. Rows of rejected drafts do not matter.
        """
        if run.numbers:
            run.outputs = with_numbers(run.outputs, run.numbers)
        if run.job.drafts is not None:
            _settle_drafts(run)
        for row in run.outputs:
            if not row.is_finite:
                raise NonFiniteLogits(row.position)
        sequence = self.store.commit(run.reservation, run.token_ids, run.ttl_s)
        try:
            return self._settle(run, sequence)
        except Exception:  # clean up here; the engine answers with a fault
            if run.reservation.verdict.creates and run.creation is None:
                self.store.release(sequence.handle_at(), sequence.principal)
                self.records.forget(sequence.handle_id)
            if sequence.is_durable:
                self.journal.note_state(sequence)
            raise

    def _settle(self, run: RunningAppend, sequence: Sequence) -> AppendResult:
        """Record the committed append, and return its answer."""
        job, verdict, start = run.job, run.reservation.verdict, run.reservation.start
        handle = sequence.handle_at(start + len(run.token_ids))
        spec = run.specs.get(0) or next(iter(run.specs.values()), None)
        seed = None if spec is None or spec.sample is None else spec.sample.seed
        if (creation := run.creation) is not None:
            creation.start, creation.seed, creation.verified = start, seed, run.verified
            self.creations.finish(creation, (handle,))
        is_replay = verdict is Verdict.REPLAY
        rows, timing = tuple(run.outputs), run.timing
        if timing.started_ns > job.submitted_ns:
            timing.queue_ns = timing.started_ns - job.submitted_ns
        # Positional: keywords would take 0.3 us of each token's 8.
        answer = AppendResult(handle, rows, seed, run.num_cached, timing, is_replay, is_replay, sequence.ttl_s)
        if job.drafts is not None:
            assert run.verified is not None
            answer.verified = with_row_handles(run.verified, job.drafts, sequence, handle.length)
        if job.keeps_record and (verdict in _RECORDED or run.creation is not None):
            self.records.keep(sequence.handle_id, start, job, answer)
        if sequence.is_durable:
            self.journal.note_append(run, sequence)
        if not verdict.reads:
            _count(run, self.counters, self.counters.own.of(job.principal))
        if not job.is_internal:
            self._measure(run, timing.queue_ns)
        self.failpoints.hit("after_commit")
        return answer

    def _measure(self, run: RunningAppend, queue_ns: int) -> None:
        """Record how long a client has waited; Generates and Forwards measure their own appends."""
        job, timings = run.job, self.counters.timings
        timings.record_queue(queue_ns)
        if run.reservation.verdict.reads:
            return
        if job.drafts is None and (run.reservation.sequence is None or len(run.token_ids) > 1):
            if run.outputs:
                timings.record_first_token(job.submitted_ns)
        else:
            timings.record_decode(job.submitted_ns)


def _count(run: RunningAppend, *all_counters: OwnCounters) -> None:
    """Count a committed append."""
    for counters in all_counters:
        counters.queue_ns += run.timing.queue_ns
        if run.job.drafts is not None:
            assert run.verified is not None
            counters.verifies += 1
            counters.verify_ns += run.timing.run_ns
            counters.draft_tokens += run.job.drafts.count
            counters.accepted_tokens += run.verified.accepted_count
            counters.verify_tokens += len(run.token_ids)
        elif run.reservation.sequence is None or len(run.token_ids) > 1:
            counters.prefills += 1
            counters.prefill_tokens += len(run.token_ids) - run.num_cached
            counters.prefill_ns += run.timing.run_ns
        else:
            counters.decodes += 1
            counters.decode_ns += run.timing.run_ns


def _settle_drafts(run: RunningAppend) -> None:
    """Keep only the accepted rows, tokens and length of a verify; for a replayed one, those that were answered."""
    drafts = run.job.drafts
    assert drafts is not None
    first = len(run.job.token_ids) - drafts.count
    draft_ids = run.job.token_ids[first:]
    if drafts.acceptance is Acceptance.NONE:
        run.verified = Verified()
        return
    if run.verified is not None:
        run.outputs = with_tokens(run.verified, draft_ids, run.outputs)
        return
    run.verified = verify(drafts, draft_ids, run.outputs)
    del run.outputs[run.verified.accepted_count + 1 :]
    run.token_ids = run.token_ids[: first + run.verified.accepted_count]
