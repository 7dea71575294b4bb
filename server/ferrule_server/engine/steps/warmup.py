"""Warm-up: steps of real shapes that touch no sequence, so that the first request of each shape is not slow.

The rows have no slot and read the null block, which no sequence owns. Their results are dropped. One such step runs at
a time, between other steps, and is not counted with them.

An executor may prepare itself between steps (kernels, graphs). It is not warm for a batch size after one run, because
it may run that size in another way later. So a size is run again when no preparation is under way, until the executor
takes such a step without waiting or is known never to do so. Only then the warm-up is answered.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ferrule_server.engine.faults.unexpected import fault
from ferrule_server.engine.jobs import Job, Outcome, Sink, WarmStep, WarmupJob, WarmupResult
from ferrule_server.errors import FerruleError
from ferrule_server.executor.base import (
    NO_SLOT,
    NULL_BLOCK,
    DeviceLost,
    Executor,
    OutputSpec,
    PipelinedExecutor,
    StepBatch,
)

_LARGEST_DEFAULT: Final = 64
"""Largest batch size that is prepared by default."""
_KV_LEN: Final = 256
"""Number of tokens that each row of a warm decode reads."""
_MOST_RUNS: Final = 4
"""Most runs of one batch size, if the executor never takes it without waiting although it prepares nothing: in torch
before there are kernels, on the kernels, from its graph, and one more."""


@dataclass(eq=False, slots=True)
class _Warming:
    """A warm-up under way: the batch sizes still to run (0: the prefill) and the steps that were run for it.

    ``num_runs`` is how often the first of the sizes was run.
    """

    job: WarmupJob
    sink: Sink
    sizes: deque[int]
    steps: list[WarmStep] = field(default_factory=list)
    num_runs: int = 0


class Warmup:
    """Runs the requested warm-ups one after another. Used on the engine thread.

    Invariant: a size in ``_warm`` has been run in the way in which it will run from now on. It is not run again unless
    the executor changes its way.

    Args:
        executor: Runs the steps.
        max_step_rows: Most rows in a step.
        finish: Takes the outcome of each job, once.

    Attributes:
        queue: What is to be run or to be answered; empty most of the time.
    """

    def __init__(
        self, executor: Executor, max_step_rows: int, finish: Callable[[Job[object], Sink, Outcome], None]
    ) -> None:
        self._executor = executor
        self._pipelined = executor if isinstance(executor, PipelinedExecutor) else None
        self._way = self._current_way()
        self._max_step_rows = max_step_rows
        self._finish = finish
        self.queue: deque[_Warming] = deque()
        self._warm: set[int] = set()

    @property
    def is_waiting(self) -> bool:
        """Return whether the next run has to wait until the executor has finished a preparation."""
        return bool(self.queue) and self.queue[0].num_runs > 0 and self._is_preparing()

    def add(self, job: WarmupJob, sink: Sink) -> None:
        """Queue a warm-up; its batch sizes are in [1, max_step_rows]."""
        sizes = sorted(set(job.batch_sizes)) or _default_sizes(self._max_step_rows)
        self.queue.append(_Warming(job, sink, deque([*sizes, 0])))

    def run_one(self) -> None:
        """Run the next step that is not warm, and answer a complete warm-up. A step that fails ends its warm-up.

        Does nothing if it :attr:`is_waiting`. The caller tends the executor after each call.

        Raises:
            DeviceLost: As the executor says.
        """
        warming = self.queue[0]
        try:
            self._run_next(warming)
        except DeviceLost:
            raise
        except Exception:  # noqa: BLE001 - a failed warm-up must not stop requests
            self.queue.popleft()
            self._finish(warming.job, warming.sink, fault("warm step failed"))
            return
        if not warming.sizes:
            self.queue.popleft()
            batch_sizes = tuple(sorted(self._warm - {0}))
            self._finish(warming.job, warming.sink, WarmupResult(tuple(warming.steps), batch_sizes))

    def end_all(self, why: Callable[[], FerruleError]) -> None:
        """Answer all warm-ups that are not complete with an error."""
        while self.queue:
            warming = self.queue.popleft()
            self._finish(warming.job, warming.sink, why())

    def _run_next(self, warming: _Warming) -> None:
        if self.is_waiting:
            return
        way = self._current_way()
        if way != self._way:  # torch has replaced the kernels since
            self._way = way
            self._warm.clear()
        self._settle(warming)
        if not warming.sizes:
            return
        batch = self._batch_of(warming.sizes[0])
        begun_ns = time.monotonic_ns()
        self._executor.run(batch)
        warming.steps.append(WarmStep(batch.num_seqs, batch.num_rows, time.monotonic_ns() - begun_ns))
        warming.num_runs += 1
        if not self._is_preparing():
            self._settle(warming)

    def _settle(self, warming: _Warming) -> None:
        """Remove the sizes that are warm; the first one may have become warm by its last run."""
        while warming.sizes:
            size = warming.sizes[0]
            if warming.num_runs and self._has_become_warm(size, warming.num_runs):
                self._warm.add(size)
            if size not in self._warm:
                return
            warming.sizes.popleft()
            warming.num_runs = 0

    def _has_become_warm(self, size: int, num_runs: int) -> bool:
        """Return whether a size that was run is fully prepared. No preparation is under way."""
        executor = self._pipelined
        if executor is None or size == 0 or num_runs >= _MOST_RUNS:
            return True
        return executor.state.is_torch_for_good or executor.can_submit(self._batch_of(size))

    def _is_preparing(self) -> bool:
        return self._pipelined is not None and bool(self._pipelined.state.preparation)

    def _current_way(self) -> str:
        """Return the reason why torch runs the steps for good; empty: none so far."""
        return "" if self._pipelined is None else self._pipelined.state.fallback_reason

    def _batch_of(self, size: int) -> StepBatch:
        """Return one row for each of ``size`` sequences, at the end of a sequence of moderate length.

        0: a prefill of as many rows as a step may have, of one sequence if the context allows it.
        """
        max_context = self._executor.info.model.max_context
        if size:
            return self._batch([1] * size, min(_KV_LEN, max_context))
        num_whole, num_left = divmod(self._max_step_rows, max_context)
        return self._batch([max_context] * num_whole + [num_left] * (num_left > 0))

    def _batch(self, counts: list[int], kv_len: int = 0) -> StepBatch:
        """Return the last ``counts`` rows of sequences of length ``kv_len``; 0: all rows of each."""
        ends = [kv_len or count for count in counts]
        starts = np.cumsum([0, *counts]).astype(np.int32)
        positions = [np.arange(end - count, end, dtype=np.int32) for end, count in zip(ends, counts, strict=True)]
        num_rows, max_blocks = int(starts[-1]), -(-max(ends) // self._executor.info.block_size)
        return StepBatch(
            token_ids=np.zeros(num_rows, np.int32),
            positions=np.concatenate(positions),
            slot_mapping=np.full(num_rows, NO_SLOT, np.int32),
            cu_seqlens_q=starts,
            kv_lens=np.array(ends, np.int32),
            block_tables=np.full((len(counts), max_blocks), NULL_BLOCK, np.int32),
            output_rows=(starts[1:] - 1).astype(np.int32),
            output_specs=(OutputSpec(greedy=True),) * len(counts),
        )


def _default_sizes(max_step_rows: int) -> list[int]:
    """Return 1, 2, 4, ... up to the largest size that is prepared by default."""
    largest = min(max_step_rows, _LARGEST_DEFAULT)
    return [1 << power for power in range(largest.bit_length())]
