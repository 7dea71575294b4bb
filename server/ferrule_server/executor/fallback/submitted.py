"""A step that was submitted: it is in the queue of the fast path, or it is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ferrule_server.executor.base import PendingStep, StepBatch, StepResult


class SubmittedStep:
    """Implements ``executor.base.PendingStep``.

    Invariant: once the step is done, it has a result or an error, and refers to no other step.

    Args:
        batch: The rows; kept until the step is done, because torch may have to run them.
        before: The step submitted before it, which the batch's feedback refers to.
        read: Completes a step and those before it.

    Attributes:
        queued: The step in the queue of the fast path; None: it is not there.
    """

    def __init__(self, batch: StepBatch, before: SubmittedStep | None, read: Callable[[SubmittedStep], None]) -> None:
        self.queued: PendingStep | None = None
        self._batch: StepBatch | None = batch
        self._before = before
        self._read = read
        self._result = StepResult()
        self._error: Exception | None = None

    @property
    def is_done(self) -> bool:
        """Whether :meth:`result` returns without waiting for the device."""
        return self._batch is None

    def result(self) -> StepResult:
        """Wait for the step and return what its output rows request; raise the error that the step ended with."""
        if not self.is_done:
            self._read(self)
        if self._error is not None:
            raise self._error
        return self._result

    def batch_for_host(self) -> StepBatch:
        """Return the batch with the tokens of the step before written into it.

        Raises:
            ValueError: The batch uses tokens of the step before, and there was none.
            Exception: The error of the step before.
        """
        assert self._batch is not None
        return self._batch if self._batch.feedback is None else fed_back(self._batch, self._before)

    def finish(self, result: StepResult) -> None:
        """Complete the step with its result."""
        self._result, self._batch, self._before, self.queued = result, None, None, None

    def fail(self, error: Exception) -> None:
        """Complete the step with an error, which :meth:`result` raises."""
        self._error = error
        self.finish(StepResult())


def fed_back(batch: StepBatch, before: SubmittedStep | None) -> StepBatch:
    """Return the batch without feedback: the tokens that the step before chose are written into it.

    The step before is done, or is completed here.

    Raises:
        ValueError: There was no step before.
        Exception: The error of the step before.
    """
    assert batch.feedback is not None
    fed = np.flatnonzero(batch.feedback >= 0)
    token_ids = batch.token_ids.copy()
    if len(fed):
        if before is None:
            raise ValueError("a step takes tokens of the step submitted before it, and there was none")
        chosen = np.array([row.token or 0 for row in before.result().rows], np.int32)
        token_ids[fed] = chosen[batch.feedback[fed]]
    return replace(batch, token_ids=token_ids, feedback=None)
