"""Admission: judges a job by the append rule, and reserves all that it needs before its rows run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ferrule_server.engine.appends.creations import Creations
from ferrule_server.engine.appends.records import AppendRecord, ReplayRecords
from ferrule_server.engine.appends.rows import row_specs, with_row_handles
from ferrule_server.engine.appends.running import Creation, RunningAppend
from ferrule_server.engine.jobs import Acceptance, AppendJob, AppendResult, Sink, Verified
from ferrule_server.engine.metrics.counters import EngineCounters
from ferrule_server.errors import SeedRequired
from ferrule_server.executor.base import RowOutput
from ferrule_server.kv import append_rule
from ferrule_server.kv.append_rule import Verdict, check_handle
from ferrule_server.kv.reservation import Reservation
from ferrule_server.kv.sequence import Sequence
from ferrule_server.kv.sequence_store import SequenceStore


@dataclass(frozen=True, slots=True)
class Admission:
    """Judges appends and reserves what they need, all or nothing.

    Args:
        store: The sequences; called from the engine thread only.
        records: The result of the last append of each sequence.
        creations: The sequences created for each request_id.
        counters: Counts queries, replays and recomputed replays.
        root: Identifies the model: the root of the lineage of each new sequence.
    """

    store: SequenceStore
    records: ReplayRecords
    creations: Creations
    counters: EngineCounters
    root: bytes

    def create(self, job: AppendJob, sink: Sink) -> RunningAppend:
        """Reserve a new sequence.

        Raises:
            ContextExceeded, ExceedsPool, BlocksExhausted, QuotaExceeded: There is no room; nothing was reserved.
        """
        reservation = self.store.reservations.reserve_new(
            job.principal,
            self.root,
            len(job.token_ids),
            job.new,
            job.token_ids if job.new.reuse_prefix and _wants_last_row_at_most(job) else None,
        )
        run = _writing(job, sink, reservation)
        run.skip_cached(reservation.num_cached)
        return self._creating(run)

    def append(self, job: AppendJob, sink: Sink, sequence: Sequence) -> RunningAppend | AppendResult | None:
        """Judge an append on a sequence that has no append in flight.

        Returns:
            The rows to run, or the answer if nothing has to run. None: the sequence is cold and has to be computed
            first; nothing was reserved or counted.

        Raises:
            HandleStale: By the append rule.
            KvGivenBack: The rows attend to tokens whose KV was given back.
            SeedRequired: A replay must be sampled again, and no seed was given.
            RequestIdReused: It would create a branch, and its request_id has created something else.
            ContextExceeded, ExceedsPool, BlocksExhausted, QuotaExceeded: There is no room; nothing was reserved.
        """
        handle = job.handle
        assert handle is not None
        if job.drafts is None:
            verdict = append_rule.judge(sequence, handle, job.token_ids, job.on_stale)
        else:
            verdict, record = self._judge_verify(job, sequence)
            if record is not None:
                result = record.result
                rows = _Rows(record.start, result.handle.length, seed=result.seed, verified=result.verified)
                return self._replay(job, sink, sequence, rows)
        if verdict is Verdict.REPLAY:
            rows = _Rows(handle.length, handle.length + len(job.token_ids))
            return self._replay(job, sink, sequence, rows)
        if sequence.is_cold:
            return None
        if verdict is Verdict.QUERY:
            rows = _Rows(handle.length - 1, handle.length, job.ttl_s)
            admitted = self._reading(job, sink, sequence, verdict, rows)
            self.counters.queries += 1
            return admitted
        if verdict is Verdict.APPEND:
            reservation = self.store.reservations.reserve_append(sequence, len(job.token_ids))
            return _writing(job, sink, reservation)
        return self._branch_or_rewind(job, sink, sequence, verdict)

    def _branch_or_rewind(self, job: AppendJob, sink: Sink, sequence: Sequence, verdict: Verdict) -> RunningAppend:
        """Reserve what an append needs that does not begin at the tip."""
        handle = job.handle
        assert handle is not None
        if verdict is Verdict.REWIND:
            reservation = self.store.reservations.reserve_rewind(sequence, handle.length, len(job.token_ids))
            return _writing(job, sink, reservation)
        self.creations.check_free(job)
        reservation = self.store.reservations.reserve_branch(sequence, handle.length, len(job.token_ids))
        run = _writing(job, sink, reservation)
        if run.ttl_s is None:  # its current value: later jobs may change the source's lease while this one runs
            run.ttl_s = sequence.ttl_s
        return self._creating(run)

    def replay_creation(
        self, job: AppendJob, sink: Sink, sequence: Sequence, creation: Creation
    ) -> RunningAppend | AppendResult | None:
        """Answer a creation again, on the sequence that it created; no append is in flight on it.

        Returns:
            As :meth:`append` does.

        Raises:
            HandleStale: The sequence was truncated below the answered length, and perhaps rewritten.
            KvGivenBack: Rows must be run again that attend to tokens whose KV was given back.
        """
        (handle,) = creation.handles
        check_handle(sequence, handle)
        rows = _Rows(creation.start, handle.length, seed=creation.seed, verified=creation.verified)
        return self._replay(job, sink, sequence, rows)

    def _judge_verify(self, job: AppendJob, sequence: Sequence) -> tuple[Verdict, AppendRecord | None]:
        """Judge a verify; return its record too if only the record shows that it is a replay.

        It is a replay if it equals the sequence's last append and the tokens that it appended are still there.
        """
        handle, drafts = job.handle, job.drafts
        assert handle is not None
        assert drafts is not None
        if drafts.acceptance is Acceptance.NONE:
            return append_rule.judge(sequence, handle, job.token_ids, job.on_stale), None
        check_handle(sequence, handle)
        record = self.records.find_verify(sequence.handle_id, handle.length, job)
        if record is not None:
            appended = job.token_ids[: record.num_tokens]
            if append_rule.is_committed(sequence, handle.length, appended):
                return Verdict.REPLAY, record
        return append_rule.judge(sequence, handle, job.token_ids, job.on_stale, may_replay=False), None

    def _creating(self, run: RunningAppend) -> RunningAppend:
        if run.job.request_id:
            run.creation = self.creations.begin(run.job, run)
        return run

    def _replay(
        self, job: AppendJob, sink: Sink, sequence: Sequence, rows: _Rows
    ) -> RunningAppend | AppendResult | None:
        """Answer from the record, or run the rows again without writing.

        The lease keeps its current duration: a late duplicate must not shorten it after a keep-alive has set a longer
        one.
        """
        record = self.records.find(sequence.handle_id, rows.start, rows.end - rows.start, job)
        if record is not None:
            if record.is_whole:
                self.counters.replay(job.principal)
                return _again(record.result, job, sequence, self.store.renew(sequence, rows.ttl_s))
            rows.seed, rows.numbers = record.result.seed, record.result.rows
        spec = job.output.spec
        if spec is not None and spec.sample is not None and not job.output.is_seeded and rows.seed is None:
            raise SeedRequired
        running = self._reading(job, sink, sequence, Verdict.REPLAY, rows)
        if running is not None:
            self.counters.replay(job.principal)
        return running

    def _reading(
        self, job: AppendJob, sink: Sink, sequence: Sequence, verdict: Verdict, rows: _Rows
    ) -> RunningAppend | AppendResult | None:
        """Run rows again over existing KV: the last row for a query, the rows of the input for a replay."""
        start, end = rows.start, rows.end
        is_replay = verdict is Verdict.REPLAY
        token_ids = tuple(sequence.token_ids[start:end])
        specs = row_specs(job.output, job.token_ids or token_ids, job.drafts, rows.seed)
        if job.drafts is not None:  # rejected drafts were not committed
            specs = {row: specs[row] for row in specs if row < len(token_ids)}
        if not specs:  # no row returns anything, so nothing is run
            return self._answer(job, sequence, rows, is_replay=is_replay)
        if sequence.is_cold:
            return None
        first = next(iter(specs))
        sequence.require_kv(start + first + 1)
        self.counters.recomputed += is_replay
        reservation = self.store.reservations.reserve_read(sequence, verdict, start + first, end)
        specs = {row - first: specs[row] for row in specs} if first else specs
        run = RunningAppend(job, sink, reservation, token_ids[first:], specs, rows.ttl_s)
        run.verified, run.numbers = rows.verified, rows.numbers
        return run

    def _answer(self, job: AppendJob, sequence: Sequence, rows: _Rows, *, is_replay: bool) -> AppendResult:
        """Return the answer if no row is requested."""
        ttl_s = self.store.renew(sequence, rows.ttl_s)
        answer = AppendResult(sequence.handle_at(rows.end), replayed=is_replay, ttl_s=ttl_s)
        if job.drafts is not None:
            answer.verified = with_row_handles(rows.verified or Verified(), job.drafts, sequence, rows.end)
        return answer


@dataclass(slots=True)
class _Rows:
    """The rows of tokens ``start`` to ``end`` of a sequence, requested again.

    Attributes:
        ttl_s: The lease to set; None keeps the sequence's own.
        seed: The seed of an unseeded draw when the rows first ran; None: unknown, or a new draw is requested.
        verified: Of a verify: the result that was answered.
        numbers: The numbers of the rows that were answered; empty: they are computed.
    """

    start: int
    end: int
    ttl_s: float | None = None
    seed: int | None = None
    verified: Verified | None = None
    numbers: tuple[RowOutput, ...] = ()


def _writing(job: AppendJob, sink: Sink, reservation: Reservation) -> RunningAppend:
    specs = row_specs(job.output, job.token_ids, job.drafts)
    return RunningAppend(job, sink, reservation, job.token_ids, specs, job.ttl_s)


def _again(result: AppendResult, job: AppendJob, sequence: Sequence, ttl_s: float) -> AppendResult:
    """Return the answer of a record to a repeated request; what depends on the request alone is not in the record."""
    verified = result.verified
    if job.drafts is not None and verified is not None:
        verified = with_row_handles(verified, job.drafts, sequence, result.handle.length)
    return dataclasses.replace(result, replayed=True, ttl_s=ttl_s, verified=verified)


def _wants_last_row_at_most(job: AppendJob) -> bool:
    """Return whether no row before the last one returns anything."""
    output, drafts = job.output, job.drafts
    return output.spec is None or not (output.all_positions or (drafts is not None and drafts.count))
