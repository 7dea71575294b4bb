"""A double of the GPU executor: a submitted step runs when its result is asked for, in torch on the CPU."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from ferrule_server.executor.base import ExecutorInfo, ExecutorState, Int32Array, StepBatch, StepResult
from ferrule_server.executor.torch import TorchExecutor


@dataclass(eq=False)
class Queued:
    """A step that waits."""

    executor: QueuedExecutor
    batch: StepBatch
    found: StepResult | None = None

    def result(self) -> StepResult:
        """Run what was submitted before, then this."""
        while self.found is None:
            self.executor.run_oldest()
        return self.found


class QueuedExecutor:
    """Takes steps ahead as the GPU executor does.

    Args:
        inner: Runs them.
        num_preparations: Calls of ``tend`` until there is a graph.
        fallback_reason: Set from the first step on.
    """

    def __init__(self, inner: TorchExecutor, *, num_preparations: int = 2, fallback_reason: str = "") -> None:
        self.inner = inner
        self.pending: deque[Queued] = deque()
        self.most_pending = 0
        self._last: list[int] = []
        self._left = num_preparations
        self._num_graph_steps = 0
        self._num_torch_steps = 0
        self._reason = fallback_reason

    @property
    def info(self) -> ExecutorInfo:
        """Of the executor behind."""
        return self.inner.info

    @property
    def state(self) -> ExecutorState:
        """What ran so far."""
        return ExecutorState(
            name="numba-cuda",
            preparation="capturing" if self._left else "",
            fallback_reason=self._reason,
            num_graph_steps=self._num_graph_steps,
            num_torch_steps=self._num_torch_steps,
        )

    def run(self, batch: StepBatch) -> StepResult:
        """Run a step at once."""
        assert not self.pending, "a step is pending"
        assert batch.feedback is None, "tokens of a step that was not submitted"
        return self._run(batch)

    def can_submit(self, batch: StepBatch) -> bool:
        """Everything of one row per sequence."""
        return batch.num_rows == batch.num_seqs

    def submit(self, batch: StepBatch) -> Queued:
        """Keep a step for later."""
        step = Queued(self, batch)
        self.pending.append(step)
        self.most_pending = max(self.most_pending, len(self.pending))
        assert len(self.pending) <= 2
        return step

    def run_oldest(self) -> None:
        """Run the step that has waited longest, its tokens those of the step before."""
        step = self.pending.popleft()
        batch = step.batch
        if batch.feedback is not None:
            tokens = np.array([self._last[place] for place in batch.feedback], np.int32)
            batch = replace(batch, token_ids=tokens, feedback=None)
        step.found = self._run(batch)

    def tend(self) -> bool:
        """Prepare one thing."""
        self._left -= self._left > 0
        return self._left > 0

    def copy_blocks(self, block_pairs: Int32Array) -> None:
        """Copy whole blocks."""
        self.inner.copy_blocks(block_pairs)

    def copy_slots(self, slot_pairs: Int32Array) -> None:
        """Copy single slots."""
        self.inner.copy_slots(slot_pairs)

    def read_blocks(self, block_ids: Int32Array) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """Return blocks."""
        return self.inner.read_blocks(block_ids)

    def write_blocks(self, block_ids: Int32Array, data: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
        """Overwrite blocks."""
        self.inner.write_blocks(block_ids, data)

    def close(self) -> None:
        """End."""
        self.inner.close()

    def _run(self, batch: StepBatch) -> StepResult:
        if self._left:
            self._num_torch_steps += 1
        else:
            self._num_graph_steps += 1
        result = self.inner.run(batch)
        self._last = [-1 if row.token is None else row.token for row in result.rows]
        return result
