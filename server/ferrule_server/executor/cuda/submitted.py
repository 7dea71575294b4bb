"""A step that was submitted: in the device's queue, or done one way or the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from ferrule_server.executor.base import Int32Array, RowOutput, StepBatch, StepResult

__all__ = ["QueuedRows", "SubmittedStep"]


class QueuedRows(Protocol):
    """Output rows that the device is about to make."""

    def result(self) -> list[RowOutput]:
        """Wait for them; once.

        Raises:
            GpuError: The step failed.
        """
        ...


class SubmittedStep:
    """Implements ``executor.base.PendingStep``.

    Invariant: once it is done, it has rows or an error, and refers to no other step.

    Args:
        batch: Of the step; kept until it is done, because torch may have to run it.
        before: The step submitted before, which the batch's feedback refers to.
        read: Makes a step done, and those before it.
    """

    def __init__(self, batch: StepBatch, before: SubmittedStep | None, read: Callable[[SubmittedStep], None]) -> None:
        self.queued: QueuedRows | None = None
        self._batch: StepBatch | None = batch
        self._before = before
        self._read = read
        self._rows: list[RowOutput] = []
        self._error: Exception | None = None

    @property
    def is_done(self) -> bool:
        """Whether :meth:`result` needs nothing of the device."""
        return self._batch is None

    def result(self) -> StepResult:
        """Wait for the step and return what its output rows asked for; raises what failed in it."""
        if not self.is_done:
            self._read(self)
        return StepResult(self._known_rows())

    def batch_for_host(self) -> StepBatch:
        """Return the batch with the tokens that it is fed back written into it.

        Raises:
            ValueError: Tokens are fed back, and no step was submitted before.
            Exception: What failed in the step before.
        """
        assert self._batch is not None
        return self._batch if self._batch.feedback is None else fed_back(self._batch, self._before)

    def finish(self, rows: list[RowOutput]) -> None:
        """Make it done."""
        self._rows, self._batch, self._before, self.queued = rows, None, None, None

    def fail(self, error: Exception) -> None:
        """Make it done with an error for whoever asks for its result."""
        self._error = error
        self.finish([])

    def tokens(self) -> Int32Array:
        """Return what each output row of a step that is done chose, 0 where it chose none: int32 [num_outputs].

        Raises:
            Exception: What failed in the step.
        """
        return np.array([row.token or 0 for row in self._known_rows()], np.int32)

    def _known_rows(self) -> list[RowOutput]:
        if self._error is not None:
            raise self._error
        return self._rows


def fed_back(batch: StepBatch, before: SubmittedStep | None) -> StepBatch:
    """Return a batch without feedback: the tokens of the step before, which is done, are written into it.

    Raises:
        ValueError: There was no step before.
        Exception: What failed in it.
    """
    assert batch.feedback is not None
    fed = np.flatnonzero(batch.feedback >= 0)
    token_ids = batch.token_ids.copy()
    if len(fed):
        if before is None:
            raise ValueError("a step takes tokens of the one submitted before it, and there was none")
        token_ids[fed] = before.tokens()[batch.feedback[fed]]
    return replace(batch, token_ids=token_ids, feedback=None)
