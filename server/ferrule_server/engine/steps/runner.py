"""Steps: the executor's side of a step: copies first, then one run, counted."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ferrule_server.engine.faults.failpoints import Failing
from ferrule_server.engine.metrics.counters import EngineCounters
from ferrule_server.engine.steps import top_tokens
from ferrule_server.engine.steps.batcher import Chunk, build_batch
from ferrule_server.executor.base import Executor, RowOutput, StepBatch


@dataclass(slots=True)
class StepOutcome:
    """The rows that a step returned. It ran for ``elapsed_ns`` from ``started_ns`` on, on the monotonic clock."""

    rows: list[RowOutput]
    started_ns: int
    elapsed_ns: int
    num_rows: int


@dataclass(eq=False)
class StepRunner:
    """Runs chunks on the executor. It does not change sequences.

    Args:
        executor: Called from the engine thread only.
        counters: Counts each step.
        failpoints: Where to fail on purpose.
        logs_top_tokens: Log the likeliest tokens of every output row.
    """

    executor: Executor
    counters: EngineCounters
    failpoints: Failing
    logs_top_tokens: bool = False

    def __post_init__(self) -> None:
        """Warn if the log will show what sequences say."""
        if self.logs_top_tokens:
            top_tokens.warn()

    def run(self, chunks: list[Chunk]) -> StepOutcome:
        """Make the copies that the chunks need and run their rows as one batch; raises what the executor raises."""
        return self.run_batch(self.prepare(chunks), chunks)

    def prepare(self, chunks: list[Chunk]) -> StepBatch:
        """Make the copies that the chunks need and return their rows as one batch; raises what the executor raises."""
        self.failpoints.hit("after_schedule")
        self._copy_on_write(chunks)
        return build_batch(chunks, self.executor.info.block_size)

    def run_batch(self, batch: StepBatch, chunks: list[Chunk]) -> StepOutcome:
        """Run the batch that :meth:`prepare` made of the chunks; raises what the executor raises."""
        started_ns = time.monotonic_ns()
        result = self.executor.run(batch)
        outcome = self.finish(batch, result.rows, started_ns, time.monotonic_ns() - started_ns)
        if self.logs_top_tokens:
            top_tokens.log_top_tokens(self.executor, batch, chunks, result)
        return outcome

    def finish(self, batch: StepBatch, rows: list[RowOutput], started_ns: int, elapsed_ns: int) -> StepOutcome:
        """Count a step that has run, and return its outcome.

        Raises:
            RuntimeError: It returned more or fewer rows than requested.
        """
        if len(rows) != len(batch.output_specs):
            raise RuntimeError(f"the executor gave {len(rows)} rows for {len(batch.output_specs)} asked for")
        counters, num_rows = self.counters, batch.num_rows
        counters.steps += 1
        counters.step_ns += elapsed_ns
        counters.last_step_seqs = batch.num_seqs
        counters.last_step_unix_ns = time.time_ns()
        counters.max_step_rows = max(counters.max_step_rows, num_rows)
        counters.timings.record_step(started_ns + elapsed_ns, elapsed_ns, num_rows, batch.num_seqs)
        return StepOutcome(rows, started_ns, elapsed_ns, num_rows)

    def _copy_on_write(self, chunks: Iterable[Chunk]) -> None:
        pairs = [pair for chunk in chunks if not chunk.run.cursor for pair in chunk.run.reservation.copies]
        for part in self.failpoints.halves(pairs, "during_copy") if pairs else ():
            if part:
                self.executor.copy_blocks(np.array(part, np.int32))
