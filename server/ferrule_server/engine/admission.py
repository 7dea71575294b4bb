"""Admission: from a job to rows that run, by the append rule, with everything it needs reserved beforehand."""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass

from ferrule_server.engine.counters import EngineCounters
from ferrule_server.engine.creations import Creation, Creations
from ferrule_server.engine.jobs import AppendJob, AppendResult, OutputRequest, Sink
from ferrule_server.engine.records import ReplayRecords
from ferrule_server.engine.running import RunningAppend
from ferrule_server.errors import InvalidRequest
from ferrule_server.executor.base import OutputSpec
from ferrule_server.kv.append_rule import Verdict, check_handle
from ferrule_server.kv.reservation import Reservation
from ferrule_server.kv.sequence import Sequence
from ferrule_server.kv.store import KvStore


@dataclass(frozen=True, slots=True)
class Admission:
    """Judges appends and reserves what they need: all of it or nothing.

    Args:
        store: The sequences; called from the engine thread only.
        records: What was answered to the last append of each sequence.
        creations: What was made for each request_id.
        counters: Counts queries, replays and recomputed replays.
    """

    store: KvStore
    records: ReplayRecords
    creations: Creations
    counters: EngineCounters

    def create(self, job: AppendJob, sink: Sink) -> RunningAppend:
        """Reserve a new sequence.

        Raises:
            ContextExceeded, ExceedsPool, BlocksExhausted, QuotaExceeded: There is no room; nothing was reserved.
        """
        reservation = self.store.reserve_new(job.principal, len(job.token_ids), job.reserved_length)
        return self._creating(_writing(job, sink, reservation))

    def append(self, job: AppendJob, sink: Sink, sequence: Sequence) -> RunningAppend | AppendResult:
        """Judge an append on a sequence that nothing is in flight on.

        Returns:
            The rows to run, or the answer where nothing has to run.

        Raises:
            HandleStale: By the append rule.
            InvalidRequest: A replay can only be answered by sampling again, and no seed was given.
            RequestIdReused: It would make a branch, and its request_id made something else.
            ContextExceeded, ExceedsPool, BlocksExhausted, QuotaExceeded: There is no room; nothing was reserved.
        """
        handle = job.handle
        assert handle is not None
        verdict = self.store.judge(sequence, handle, job.token_ids, job.on_stale)
        match verdict:
            case Verdict.QUERY:
                self.counters.queries += 1
                rows = _Rows(handle.length - 1, handle.length, job.ttl_s)
                return self._reading(job, sink, sequence, verdict, rows)
            case Verdict.REPLAY:
                rows = _Rows(handle.length, handle.length + len(job.token_ids))
                return self._replay(job, sink, sequence, rows)
            case Verdict.FORK:
                self.creations.check_free(job)
                reservation = self.store.reserve_branch(sequence, handle.length, len(job.token_ids))
                return self._creating(_writing(job, sink, reservation, sequence, verdict))
            case Verdict.REWIND:
                reservation = self.store.reserve_rewind(sequence, handle.length, len(job.token_ids))
                return _writing(job, sink, reservation, sequence, verdict)
            case Verdict.APPEND:
                reservation = self.store.reserve_append(sequence, len(job.token_ids))
                return _writing(job, sink, reservation, sequence, verdict)

    def repeat(
        self, job: AppendJob, sink: Sink, sequence: Sequence, creation: Creation
    ) -> RunningAppend | AppendResult:
        """Answer a creation again, on the sequence that it made; nothing is in flight on that.

        Raises:
            HandleStale: The sequence was truncated below what was answered, and perhaps rewritten.
        """
        (handle,) = creation.handles
        check_handle(sequence, handle)
        return self._replay(job, sink, sequence, _Rows(creation.start, handle.length, seed=creation.seed))

    def _creating(self, run: RunningAppend) -> RunningAppend:
        if run.job.request_id:
            run.creation = self.creations.begin(run.job, run)
        return run

    def _replay(self, job: AppendJob, sink: Sink, sequence: Sequence, rows: _Rows) -> RunningAppend | AppendResult:
        """Answer from the record, or have the rows run again without writing.

        The lease is renewed as long as it is: a late duplicate must not shorten what a keep-alive has asked for since.
        """
        record = self.records.find(sequence.handle_id, rows.start, rows.end - rows.start, job.output)
        if record is not None:
            if record.result is not None:
                self.counters.replays += 1
                ttl_s = self.store.renew(sequence, rows.ttl_s)
                return dataclasses.replace(record.result, replayed=True, ttl_s=ttl_s)
            rows.seed = record.seed
        spec = job.output.spec
        if spec is not None and spec.sample is not None and not job.output.is_seeded and rows.seed is None:
            raise InvalidRequest(
                "logits_policy.sample.seed",
                "these tokens were appended before; sampling their rows again needs the seed that was returned then",
            )
        self.counters.replays += 1
        return self._reading(job, sink, sequence, Verdict.REPLAY, rows)

    def _reading(
        self, job: AppendJob, sink: Sink, sequence: Sequence, verdict: Verdict, rows: _Rows
    ) -> RunningAppend | AppendResult:
        """Run rows again over KV that is there: the last one for a query, those of the input for a replay."""
        start, end = rows.start, rows.end
        is_replay = verdict is Verdict.REPLAY
        token_ids = tuple(sequence.token_ids[start:end])
        specs, seed = _row_specs(job.output, token_ids, rows.seed)
        if not specs:  # nothing is asked of any row, so there is nothing to run
            ttl_s = self.store.renew(sequence, rows.ttl_s)
            handle = self.store.handle_at(sequence, end)
            return AppendResult(handle, replayed=is_replay, forked=job.branched_to(handle.cache_id), ttl_s=ttl_s)
        self.counters.recomputed += is_replay
        first = min(specs)
        sequence.num_pins += 1
        return RunningAppend(
            job=job,
            sink=sink,
            verdict=verdict,
            sequence=sequence,
            reservation=None,
            token_ids=token_ids[first:],
            start=start + first,
            block_ids=sequence.block_ids,
            length_after=end,
            specs={row - first: spec for row, spec in specs.items()},
            seed=seed,
            ttl_s=rows.ttl_s,
        )


@dataclass(slots=True)
class _Rows:
    """The rows of tokens ``start`` to ``end`` of a sequence, wanted again.

    Attributes:
        ttl_s: The lease to set; None keeps the sequence's own.
        seed: What an unseeded draw used when they were run first; None: not known, or a draw of its own is wanted.
    """

    start: int
    end: int
    ttl_s: float | None = None
    seed: int | None = None


def _writing(
    job: AppendJob,
    sink: Sink,
    reservation: Reservation,
    sequence: Sequence | None = None,
    verdict: Verdict | None = None,
) -> RunningAppend:
    specs, seed = _row_specs(job.output, job.token_ids)
    return RunningAppend(
        job=job,
        sink=sink,
        verdict=verdict,
        sequence=sequence,
        reservation=reservation,
        token_ids=job.token_ids,
        start=reservation.start,
        block_ids=reservation.block_ids,
        length_after=reservation.start + reservation.num_tokens,
        specs=specs,
        seed=seed,
        ttl_s=job.ttl_s,
    )


def _row_specs(
    output: OutputRequest, token_ids: tuple[int, ...], known_seed: int | None = None
) -> tuple[dict[int, OutputSpec], int | None]:
    """Return what each row returns (rows without an entry return nothing), and the seed, None when nothing is drawn.

    An unseeded draw uses ``known_seed``, or a new one where that is None.
    """
    spec, seed = output.spec, None
    if spec is None:
        return {}, None
    if spec.sample is not None:
        seed = spec.sample.seed
        if not output.is_seeded:
            seed = secrets.randbits(64) if known_seed is None else known_seed
            spec = dataclasses.replace(spec, sample=dataclasses.replace(spec.sample, seed=seed))
    last = len(token_ids) - 1
    if last == 0:
        return {0: spec}, seed
    rows = range(len(token_ids)) if output.all_positions else (last,)
    if not output.wants_targets:
        return dict.fromkeys(rows, spec), seed
    targeted = {row: dataclasses.replace(spec, target_id=token_ids[row + 1]) if row < last else spec for row in rows}
    return targeted, seed
