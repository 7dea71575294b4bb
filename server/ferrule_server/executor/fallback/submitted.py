"""A step that was submitted: it stands in the queue of the fast path, or it is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from ferrule_server.executor.base import StepBatch, StepResult

__all__ = ["QueuedStep", "SubmittedStep"]


class QueuedStep(Protocol):
    """A step that the fast path is about to run."""

    def result(self) -> StepResult:
        """Wait for the step and return what its output rows asked for; called once.

        Raises:
            DeviceError: The step failed.
        """
        ...


class SubmittedStep:
    """Implements ``executor.base.PendingStep``.

    Invariant: once it is done, it has a result or an error, and refers to no other step.

    Args:
        batch: The step; kept until it is done, because torch may have to run it.
        before: The step submitted before it, which the batch's feedback refers to.
        read: Makes a step done, and those before it.
    """

    def __init__(self, batch: StepBatch, before: SubmittedStep | None, read: Callable[[SubmittedStep], None]) -> None:
        self.queued: QueuedStep | None = None
        self._batch: StepBatch | None = batch
        self._before = before
        self._read = read
        self._result = StepResult()
        self._error: Exception | None = None

    @property
    def is_done(self) -> bool:
        """Whether :meth:`result` returns without the device."""
        return self._batch is None

    def result(self) -> StepResult:
        """Wait for the step and return what its output rows asked for; raises the error that the step ended with."""
        if not self.is_done:
            self._read(self)
        if self._error is not None:
            raise self._error
        return self._result

    def batch_for_host(self) -> StepBatch:
        """Return the batch with the tokens that are fed back written into it.

        Raises:
            ValueError: Tokens are fed back, and no step was submitted before.
            Exception: The error of the step before.
        """
        assert self._batch is not None
        return self._batch if self._batch.feedback is None else fed_back(self._batch, self._before)

    def finish(self, result: StepResult) -> None:
        """Make the step done."""
        self._result, self._batch, self._before, self.queued = result, None, None, None

    def fail(self, error: Exception) -> None:
        """Make the step done with an error, which :meth:`result` raises."""
        self._error = error
        self.finish(StepResult())


def fed_back(batch: StepBatch, before: SubmittedStep | None) -> StepBatch:
    """Return a batch without feedback: the tokens that the step before chose, which is done, are written into it.

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
