"""Warm-up: steps of real shapes that touch no sequence, so that the first request of each shape is not slow.

Their rows have no slot and read the null block, which nobody owns; what they return is dropped. One of them is run at a
time, between other steps, and not counted among those.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from ferrule_server.engine.faults import fault
from ferrule_server.engine.jobs import Job, Outcome, Sink, WarmStep, WarmupJob, WarmupResult
from ferrule_server.errors import FerruleError, InvalidRequest
from ferrule_server.executor.base import NO_SLOT, NULL_BLOCK, DeviceLost, Executor, OutputSpec, StepBatch

_LARGEST_DEFAULT: Final = 64
"""Largest batch that is prepared for unasked."""
_KV_LEN: Final = 256
"""Tokens that each row of a warm decode reads."""


@dataclass(eq=False, slots=True)
class _Warming:
    """A warm-up on its way: batch sizes still to run, 0 for the prefill, and the steps that were run for it."""

    job: WarmupJob
    sink: Sink
    sizes: deque[int]
    steps: list[WarmStep] = field(default_factory=list)


class Warmup:
    """The warm-ups that were asked for, one after the other. Used on the engine thread.

    Invariant: what is in ``_warm`` has been run and is not run again.

    Args:
        executor: Runs the steps.
        max_step_rows: Most rows in a step.
        finish: Takes the outcome of each job, once.
    """

    def __init__(self, executor: Executor, max_step_rows: int, finish: Callable[[Job, Sink, Outcome], None]) -> None:
        self._executor = executor
        self._max_step_rows = max_step_rows
        self._finish = finish
        self._queue: deque[_Warming] = deque()
        self._warm: set[int] = set()

    @property
    def is_pending(self) -> bool:
        """Whether there is something to run or to answer."""
        return bool(self._queue)

    def add(self, job: WarmupJob, sink: Sink) -> None:
        """Queue a warm-up.

        Raises:
            InvalidRequest: A batch size is outside [1, max_step_rows].
        """
        for size in job.batch_sizes:
            if not 1 <= size <= self._max_step_rows:
                raise InvalidRequest("batch_sizes", f"{size} is outside [1, {self._max_step_rows}]", batch_size=size)
        sizes = sorted(set(job.batch_sizes)) or _default_sizes(self._max_step_rows)
        self._queue.append(_Warming(job, sink, deque([*sizes, 0])))

    def run_one(self) -> None:
        """Run the next step that is not warm, and answer what is complete. A step that fails ends its warm-up.

        Raises:
            DeviceLost: As the executor says.
        """
        warming = self._queue[0]
        try:
            self._run_next(warming)
        except DeviceLost:
            raise
        except Exception:  # noqa: BLE001 - what cannot be warmed must not stop who is served
            self._queue.popleft()
            self._finish(warming.job, warming.sink, fault("warm step failed"))
            return
        if not warming.sizes:
            self._queue.popleft()
            batch_sizes = tuple(sorted(self._warm - {0}))
            self._finish(warming.job, warming.sink, WarmupResult(tuple(warming.steps), batch_sizes))

    def end_all(self, why: Callable[[], FerruleError]) -> None:
        """Answer everything that is not complete."""
        while self._queue:
            warming = self._queue.popleft()
            self._finish(warming.job, warming.sink, why())

    def _run_next(self, warming: _Warming) -> None:
        self._skip_warm(warming.sizes)
        if not warming.sizes:
            return
        size = warming.sizes.popleft()
        warming.steps.append(self._run(self._decode(size) if size else self._prefill()))
        self._warm.add(size)
        self._skip_warm(warming.sizes)

    def _skip_warm(self, sizes: deque[int]) -> None:
        while sizes and sizes[0] in self._warm:
            sizes.popleft()

    def _run(self, batch: StepBatch) -> WarmStep:
        begun_ns = time.monotonic_ns()
        self._executor.run(batch)
        return WarmStep(batch.num_seqs, batch.num_rows, time.monotonic_ns() - begun_ns)

    def _decode(self, num_seqs: int) -> StepBatch:
        """One row each, behind as many tokens as a sequence of some length has."""
        return self._batch([1] * num_seqs, min(_KV_LEN, self._executor.info.model.max_context))

    def _prefill(self) -> StepBatch:
        """As many rows as a step may have, of one sequence where the context allows it."""
        num_left, max_context = self._max_step_rows, self._executor.info.model.max_context
        counts = [max_context] * (num_left // max_context)
        if num_left % max_context:
            counts.append(num_left % max_context)
        return self._batch(counts)

    def _batch(self, counts: list[int], kv_len: int = 0) -> StepBatch:
        """Rows of sequences with ``counts`` rows each, the last ones before ``kv_len``; 0: all they have."""
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
    """1, 2, 4, ... up to the largest worth preparing for."""
    largest = min(max_step_rows, _LARGEST_DEFAULT)
    return [1 << power for power in range(largest.bit_length())]
