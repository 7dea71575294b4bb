"""Admission: from a job to rows that run, by the append rule, with everything it needs reserved beforehand."""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass

from ferrule_server.engine.counters import EngineCounters
from ferrule_server.engine.jobs import AppendJob, AppendResult, OutputRequest, Sink
from ferrule_server.engine.records import ReplayRecords
from ferrule_server.engine.running import RunningAppend
from ferrule_server.errors import InvalidRequest
from ferrule_server.executor.base import OutputSpec
from ferrule_server.kv.append_rule import Verdict
from ferrule_server.kv.reservation import Reservation
from ferrule_server.kv.sequence import Sequence
from ferrule_server.kv.store import KvStore


@dataclass(frozen=True, slots=True)
class Admission:
    """Judges appends and reserves what they need: all of it or nothing.

    Args:
        store: The sequences; called from the engine thread only.
        records: What was answered to the last append of each sequence.
        counters: Counts queries, replays and recomputed replays.
    """

    store: KvStore
    records: ReplayRecords
    counters: EngineCounters

    def create(self, job: AppendJob, sink: Sink) -> RunningAppend:
        """Reserve a new sequence.

        Raises:
            ContextExceeded, ExceedsPool, BlocksExhausted: There is no room; nothing was reserved.
        """
        reservation = self.store.reserve_new(job.principal, len(job.token_ids))
        return _writing(job, sink, reservation)

    def append(self, job: AppendJob, sink: Sink, sequence: Sequence) -> RunningAppend | AppendResult:
        """Judge an append on a sequence that nothing is in flight on.

        Returns:
            The rows to run, or the answer where nothing has to run.

        Raises:
            HandleStale: By the append rule.
            InvalidRequest: A replay can only be answered by sampling again, and no seed was given.
            ContextExceeded, ExceedsPool, BlocksExhausted: There is no room; nothing was reserved.
        """
        handle = job.handle
        assert handle is not None
        verdict = self.store.judge(sequence, handle, job.token_ids, job.on_stale)
        match verdict:
            case Verdict.QUERY:
                self.counters.queries += 1
                return self._reading(job, sink, sequence, verdict)
            case Verdict.REPLAY:
                self.counters.replays += 1
                return self._replay(job, sink, sequence)
            case _:
                reservation = self._reserve(sequence, verdict, handle.length, len(job.token_ids))
                return _writing(job, sink, reservation, sequence, verdict)

    def _reserve(self, sequence: Sequence, verdict: Verdict, length: int, num_tokens: int) -> Reservation:
        if verdict is Verdict.FORK:
            return self.store.reserve_branch(sequence, length, num_tokens)
        if verdict is Verdict.REWIND:
            return self.store.reserve_rewind(sequence, length, num_tokens)
        return self.store.reserve_append(sequence, num_tokens)

    def _replay(self, job: AppendJob, sink: Sink, sequence: Sequence) -> RunningAppend | AppendResult:
        """Answer from the record, or have the rows run again without writing."""
        assert job.handle is not None
        answered = self.records.find(sequence.handle_id, job.handle.length, job)
        if answered is not None:
            self.store.renew(sequence, job.ttl_s)
            return answered
        spec = job.output.spec
        if spec is not None and spec.sample is not None and not job.output.is_seeded:
            raise InvalidRequest(
                "logits_policy.sample.seed",
                "these tokens were appended before; sampling their rows again needs the seed that was returned then",
            )
        self.counters.recomputed += 1
        return self._reading(job, sink, sequence, Verdict.REPLAY)

    def _reading(
        self, job: AppendJob, sink: Sink, sequence: Sequence, verdict: Verdict
    ) -> RunningAppend | AppendResult:
        """Run rows again over KV that is there: the last one for a query, those of the input for a replay."""
        assert job.handle is not None
        length = job.handle.length
        is_query = verdict is Verdict.QUERY
        start, end = (length - 1, length) if is_query else (length, length + len(job.token_ids))
        token_ids = tuple(sequence.token_ids[start:end])
        specs, seed = _row_specs(job.output, token_ids)
        if not specs:  # nothing is asked of any row, so there is nothing to run
            self.store.renew(sequence, job.ttl_s)
            return AppendResult(self.store.handle_at(sequence, end), replayed=not is_query)
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
        )


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
    )


def _row_specs(output: OutputRequest, token_ids: tuple[int, ...]) -> tuple[dict[int, OutputSpec], int | None]:
    """Return what each row returns (rows without an entry return nothing), and the seed, None when nothing is drawn."""
    spec, seed = output.spec, None
    if spec is None:
        return {}, None
    if spec.sample is not None:
        seed = spec.sample.seed
        if not output.is_seeded:
            seed = secrets.randbits(64)
            spec = dataclasses.replace(spec, sample=dataclasses.replace(spec.sample, seed=seed))
    last = len(token_ids) - 1
    if last == 0:
        return {0: spec}, seed
    rows = range(len(token_ids)) if output.all_positions else (last,)
    if not output.wants_targets:
        return dict.fromkeys(rows, spec), seed
    targeted = {row: dataclasses.replace(spec, target_id=token_ids[row + 1]) if row < last else spec for row in rows}
    return targeted, seed
