"""An append on its way through the steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from ferrule_server.engine.jobs import AppendJob, Sink, StepTiming
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
