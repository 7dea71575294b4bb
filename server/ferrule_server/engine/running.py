"""An append on its way through the steps, and the record that lets a retry be answered without running it again."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from dataclasses import dataclass, field

from ferrule_server.engine.jobs import AppendJob, AppendResult, OutputRequest, Sink, StepTiming
from ferrule_server.executor.base import OutputSpec, RowOutput
from ferrule_server.kv.append_rule import Verdict
from ferrule_server.kv.reservation import Reservation
from ferrule_server.kv.sequence import Sequence


@dataclass(eq=False, slots=True)
class RunningAppend:
    """Rows of one append, some run and some not.

    Invariant: rows ``0..cursor`` have been run; ``reservation`` is None exactly when nothing is written (a query or
    a recomputed replay), and then the sequence is pinned instead.

    Attributes:
        verdict: What the append rule said; None for a new sequence.
        sequence: The sequence whose lane is held; None for a new sequence.
        token_ids: The rows' tokens. start: position of the first one.
        block_ids: Block table that covers all of them.
        length_after: Length the answered handle names.
        specs: Row index -> what it returns; rows without an entry return nothing.
        outputs: Results so far, in row order.
    """

    job: AppendJob
    sink: Sink
    verdict: Verdict | None
    sequence: Sequence | None
    reservation: Reservation | None
    token_ids: tuple[int, ...]
    start: int
    block_ids: list[int]
    length_after: int
    specs: dict[int, OutputSpec]
    seed: int | None
    cursor: int = 0
    outputs: list[RowOutput] = field(default_factory=list)
    first_step_ns: int = 0
    run_ns: int = 0
    step_rows: int = 0

    @property
    def remaining(self) -> int:
        """Rows not run yet."""
        return len(self.token_ids) - self.cursor

    def num_outputs(self, num_rows: int) -> int:
        """How many of the next ``num_rows`` rows return something."""
        if num_rows == len(self.token_ids):
            return len(self.specs)
        return sum(row in self.specs for row in range(self.cursor, self.cursor + num_rows))

    @property
    def timing(self) -> StepTiming:
        """Where the time went so far."""
        return StepTiming(max(0, self.first_step_ns - self.job.submitted_ns), self.run_ns, self.step_rows)


@dataclass(eq=False, slots=True)
class AppendRecord:
    """The last append of a sequence, kept for replay as long as the sequence lives.

    Attributes:
        start: Length before. num_tokens: how many were appended.
        output: The request as it came (an unseeded one matches an unseeded retry).
        result: What was answered; its rows are dropped first when memory is short.
        retained_bytes: Bytes of logits held by ``result``.
    """

    start: int
    num_tokens: int
    output: OutputRequest
    result: AppendResult
    retained_bytes: int
    has_rows: bool = True

    def answers(self, start: int, job: AppendJob) -> bool:
        """Whether this record holds exactly what ``job`` asks for behind ``start``."""
        same_range = self.start == start and self.num_tokens == len(job.token_ids)
        return same_range and self.has_rows and self.output == job.output

    def drop_rows(self) -> None:
        """Forget the rows; a later replay runs them again."""
        self.result = dataclasses.replace(self.result, rows=())
        self.has_rows = False
        self.retained_bytes = 0


class RetainedLogits:
    """Bounds the logits kept for replay: the records of least recent appends lose their rows first.

    Invariant: the sum of ``retained_bytes`` over the records held is ``used_bytes`` and at most ``limit_bytes``.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._records: OrderedDict[str, AppendRecord] = OrderedDict()
        self.used_bytes = 0

    def keep(self, cache_id: str, record: AppendRecord) -> None:
        """Hold ``record`` in place of the sequence's previous one."""
        if self._records:
            self.forget(cache_id)
        if record.retained_bytes:
            self._records[cache_id] = record
            self.used_bytes += record.retained_bytes
            self._shrink()

    def forget(self, cache_id: str) -> None:
        """Stop counting the record of a sequence that appended again or is gone."""
        if (old := self._records.pop(cache_id, None)) is not None:
            self.used_bytes -= old.retained_bytes

    def _shrink(self) -> None:
        while self.used_bytes > self._limit_bytes:
            _, record = self._records.popitem(last=False)
            self.used_bytes -= record.retained_bytes
            record.drop_rows()
