"""An executor for engine tests that takes the next step before the last one's results are read.

Nothing that is submitted runs before it must, so whatever the engine does in between too early is seen by the rows; or,
where it is told so, at once, so that what is done too late is seen as well.
"""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ferrule_server.engine.jobs import GenerateJob, Job
from ferrule_server.executor.base import (
    DeviceLost,
    Executor,
    ExecutorInfo,
    ExecutorState,
    Int32Array,
    OutputSpec,
    RowOutput,
    StepBatch,
    StepResult,
)
from tests.engine.harness import Harness, Pending
from tests.engine.streams import Branch, Stream, start
from tests.fakes import FakeExecutor

Call = Literal["submit", "result", "tend", "run"]


class DeferredStep:
    """A submitted step: its batch as it was then, and what came of it once it has run."""

    def __init__(self, executor: DeferredExecutor, batch: StepBatch, before: DeferredStep | None) -> None:
        self.batch = batch
        self._executor = executor
        self._before = before
        self.outputs: list[RowOutput] = []
        self.error: Exception | None = None
        self.has_run = False
        self.is_read = False

    def result(self) -> StepResult:
        """Run it, should it not have run yet, and return what it gave."""
        return self._executor.read(self)

    def run(self, inner: Executor) -> None:
        """Run it on the executor below, with the tokens that the step before chose."""
        if self.has_run:
            return
        self.has_run = True
        try:
            self.outputs = inner.run(self._resolved()).rows
        except Exception as error:  # noqa: BLE001 - raised to whoever reads it
            self.error = error

    def _resolved(self) -> StepBatch:
        """The batch with its tokens, as the device has them: 0 where the step before chose none."""
        batch = dataclasses.replace(self.batch, feedback=None)
        for row, source in enumerate([] if self.batch.feedback is None else self.batch.feedback.tolist()):
            if source >= 0:
                assert self._before is not None
                if self._before.error is not None:
                    raise RuntimeError("the step before has failed, so this one has no tokens")
                batch.token_ids[row] = self._before.outputs[source].token or 0
        return batch


class DeferredExecutor:
    """A :class:`PipelinedExecutor` over one that is none.

    Invariant: at most two steps are pending, asked for in order; what breaks the protocol is noted in ``misuse``, since
    the engine answers an exception of its executor with a fault.

    Args:
        inner: What runs the steps.
        is_eager: Steps run as they are submitted; None: by chance.
        chance: For that.

    Attributes:
        misuse: What was done that must not be.
        fails: What the n-th call of a kind raises (1 is the first).
        num_calls: Of each kind.
        num_to_tend: Pieces of preparation left.
        refuses: :meth:`can_submit` says no. takes_histories: it does not mind penalties.
        calls: Kinds of calls in order, with the rows of steps.
    """

    def __init__(self, inner: Executor, *, is_eager: bool | None = False, chance: random.Random | None = None) -> None:
        self.inner = inner
        self.misuse: list[str] = []
        self.fails: dict[tuple[Call, int], Exception] = {}
        self.num_calls: dict[Call, int] = dict.fromkeys(("submit", "result", "tend", "run"), 0)
        self.num_to_tend = 0
        self.refuses = self.takes_histories = False
        self.calls: list[tuple[str, int]] = []
        self._is_eager = is_eager
        self._chance = chance or random.Random(0)
        self._pending: deque[DeferredStep] = deque()
        self._last: DeferredStep | None = None
        self._is_lost = False

    @property
    def info(self) -> ExecutorInfo:
        """What the executor below is."""
        return self.inner.info

    @property
    def num_pending(self) -> int:
        """Steps submitted and not asked for."""
        return len(self._pending)

    # ---- steps ------------------------------------------------------------------------------------------------------

    def run(self, batch: StepBatch) -> StepResult:
        """Run a step at once."""
        self._expect(not self._pending, "run while a step is pending")
        self._expect(batch.feedback is None, "run of a step with feedback")
        self._called("run", batch.num_rows)
        return self.inner.run(batch)

    @property
    def state(self) -> ExecutorState:
        """What it is doing."""
        return ExecutorState("numba-cuda")

    def can_submit(self, batch: StepBatch) -> bool:
        """One row for each sequence, and outputs of a kind that needs no help of the host."""
        if self.refuses or batch.num_rows != batch.num_seqs or batch.num_rows != len(batch.output_rows):
            return False
        return (self.takes_histories or not batch.histories) and not any(map(_needs_host, batch.output_specs))

    def submit(self, batch: StepBatch) -> DeferredStep:
        """Take a step; it runs when its result is asked for, or something is done behind it."""
        self._called("submit", batch.num_rows)
        self._expect(len(self._pending) < 2, "a third step is pending")
        self._expect(self.can_submit(batch), "a step was submitted that cannot be")
        self._check_feedback(batch)
        step = DeferredStep(self, _copy_of(batch), self._last)
        self._pending.append(step)
        self._last = step
        if self._is_eager or (self._is_eager is None and self._chance.random() < 0.5):
            self._flush()
        return step

    def read(self, step: DeferredStep) -> StepResult:
        """The result of a step, once, in order."""
        self._expect(not step.is_read, "a result was asked for twice")
        self._expect(bool(self._pending) and self._pending[0] is step, "a result was asked for out of order")
        step.is_read = True
        if step in self._pending:
            self._pending.remove(step)
        step.run(self.inner)
        self._called("result", step.batch.num_rows)
        if step.error is not None:
            self._is_lost = self._is_lost or isinstance(step.error, DeviceLost)
            raise step.error
        return StepResult(step.outputs)

    def tend(self) -> bool:
        """Do a piece of preparation."""
        self._expect(not self._pending, "tended while a step is pending")
        self._called("tend", 0)
        self.num_to_tend = max(0, self.num_to_tend - 1)
        return self.num_to_tend > 0

    # ---- everything else --------------------------------------------------------------------------------------------

    def copy_blocks(self, block_pairs: Int32Array) -> None:
        """Copy behind what was submitted."""
        self._flush()
        self.inner.copy_blocks(block_pairs)

    def copy_slots(self, slot_pairs: Int32Array) -> None:
        """Copy behind what was submitted."""
        self._flush()
        self.inner.copy_slots(slot_pairs)

    def read_blocks(self, block_ids: Int32Array) -> npt.NDArray[np.uint8]:
        """Read behind what was submitted."""
        self._flush()
        return self.inner.read_blocks(block_ids)

    def write_blocks(self, block_ids: Int32Array, data: npt.NDArray[np.uint8]) -> None:
        """Write behind what was submitted."""
        self._flush()
        self.inner.write_blocks(block_ids, data)

    def close(self) -> None:
        """Close; nothing may be pending, unless the device is lost."""
        self._expect(self._is_lost or not self._pending, "closed while a step is pending")
        self.inner.close()

    def _flush(self) -> None:
        for step in self._pending:
            step.run(self.inner)

    def _called(self, call: Call, num_rows: int) -> None:
        """Count a call, and raise what it is told to."""
        self.calls.append((call, num_rows))
        self.num_calls[call] += 1
        error = self.fails.pop((call, self.num_calls[call]), None)
        if error is not None:
            self._is_lost = self._is_lost or isinstance(error, DeviceLost)
            raise error

    def _check_feedback(self, batch: StepBatch) -> None:
        sources = [] if batch.feedback is None else [each for each in batch.feedback.tolist() if each >= 0]
        if sources:
            self._expect(self._last is not None, "feedback of no step")
            assert self._last is not None
            self._expect(max(sources) < len(self._last.batch.output_rows), "feedback of a row that chooses nothing")
            self._expect(len(set(sources)) == len(sources), "one token fed to two rows")

    def _expect(self, is_right: bool, what: str) -> None:
        if not is_right:
            self.misuse.append(what)


class DeferredHarness(Harness):
    """An engine over a :class:`DeferredExecutor`; at the end nothing may have been done that must not be."""

    def __init__(
        self,
        inner: FakeExecutor | None = None,
        *,
        is_eager: bool | None = False,
        chance: random.Random | None = None,
        **settings: object,
    ) -> None:
        self.inner = inner or FakeExecutor()
        self.deferred = DeferredExecutor(self.inner, is_eager=is_eager, chance=chance)
        super().__init__(self.deferred, **settings)  # type: ignore[arg-type]

    def __enter__(self) -> DeferredHarness:
        super().__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        super().__exit__(*failure)  # type: ignore[arg-type]
        if failure[0] is None:
            assert self.deferred.misuse == []
            assert not self.deferred.num_pending or self.engine.snapshot().is_failed


class Rounds:
    """An engine without its thread: what comes in which round is the same in every run, and no round sleeps.

    Args:
        harness: Over a fake executor.
    """

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        inbox = harness.engine._inbox
        following = inbox.next
        inbox.next = lambda patience_s: following(0.0)  # type: ignore[method-assign]

    def start(self, job: GenerateJob) -> Stream:
        """Submit a Generate."""
        return start(self.harness, job)

    def run(self, count: int) -> None:
        """Run rounds while there is something to run."""
        for _ in range(count):
            if self.is_idle:
                return
            self.harness.engine._round()

    def finish(self) -> None:
        """Run until nothing is left, and check everything."""
        self.run(500)
        assert self.is_idle
        self.harness.check_integrity()

    @property
    def is_idle(self) -> bool:
        """Whether a round would wait for somebody."""
        engine = self.harness.engine
        return len(engine._inbox) == 0 and not engine._lanes.running and not engine._drivers.has_work

    def ask(self, job: Job[object]) -> Pending:
        """Submit a job."""
        return self.harness.submit(job)

    def ask_all(self, *jobs: Job[object]) -> list[Pending]:
        """Submit jobs as one frame."""
        return self.harness.submit_all(*jobs)


def check_pool(harness: Harness, executor: FakeExecutor) -> None:
    """Every sequence finds its own tokens in its blocks, whatever was written beyond its tip."""
    for sequence in harness.store.registry:
        assert executor.tokens_at(sequence.block_ids, sequence.length) == list(sequence.token_ids)


def what_became_of(branch: Branch) -> tuple[object, ...]:
    """All that a reader learns, names of sequences left out."""
    error = None if branch.last.error is None else branch.last.error.reason
    handles = [(handle.length, handle.lineage) for handle in branch.handles]
    return (branch.tokens, handles, branch.last.finish, error, branch.frames[0].seed)


def _needs_host(spec: OutputSpec) -> bool:
    return spec.full_logits or spec.hidden_state or spec.draft is not None or not (spec.greedy or spec.sample)


def _copy_of(batch: StepBatch) -> StepBatch:
    """A copy whose arrays are its own: the engine may use its own again."""
    arrays: dict[str, Any] = {  # by name, and each as it was
        name: value.copy()
        for name, value in ((name, getattr(batch, name)) for name in StepBatch.__slots__)
        if isinstance(value, np.ndarray)
    }
    return dataclasses.replace(batch, **arrays)
