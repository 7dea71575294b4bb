"""The fast path: not built yet, serving, serving without some of its parts, or given up for good."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from ferrule_server.executor.base import ExecutorState, Int32Array, MemoryPlan, StepBatch, StepResult
from ferrule_server.executor.fallback.device import Device, DeviceError, DeviceGone
from ferrule_server.executor.fallback.submitted import QueuedStep

__all__ = ["Build", "FastPath", "MakeRunner", "Runner", "sentence"]

_TERSE = (LookupError, AssertionError, AttributeError, NameError, TypeError, ArithmeticError)
"""Errors whose message needs the name of the error."""

_log = logging.getLogger(__name__)


class Runner(Protocol):
    """Runs steps on the fast path.

    A runner has *parts*, each of which serves some steps or calls. If a part fails, the others go on. All methods may
    raise :class:`DeviceError`. Properties are read by any thread.
    """

    @property
    def max_rows(self) -> int:
        """Most rows of a step."""
        ...

    @property
    def max_seq_rows(self) -> int:
        """Most rows of one sequence in a step."""
        ...

    @property
    def state(self) -> ExecutorState:
        """What it has done, what it prepares, and which parts have failed; a new value each time."""
        ...

    @property
    def graph_bytes(self) -> int:
        """Memory that graphs take."""
        ...

    def can_run(self, batch: StepBatch) -> bool:
        """Return whether no part that the step needs has failed."""
        ...

    def can_submit(self, batch: StepBatch) -> bool:
        """Return whether :meth:`submit` takes this step without waiting."""
        ...

    def submit(self, batch: StepBatch) -> QueuedStep:
        """Put a step into the queue."""
        ...

    def run(self, batch: StepBatch) -> StepResult:
        """Run a step that :meth:`can_run`; none is pending."""
        ...

    def copy_blocks(self, block_pairs: Int32Array) -> bool:
        """Put copies of whole blocks of the pool into the queue; return False if the part that copies has failed."""
        ...

    def capture_next(self) -> bool:
        """Capture a graph that is wanted and return whether there are more; no step is pending."""
        ...

    def part_of(self, error: Exception) -> str:
        """Return the part that an error takes out; empty if it takes out the whole path."""
        ...

    def drop(self, part: str, reason: str) -> None:
        """Do without a part from now on; the device is idle."""
        ...

    def close(self) -> None:
        """Release what the runner holds; the device is idle."""
        ...


class Build(Protocol):
    """The making of what a runner needs, beside a server that serves; from any thread."""

    @property
    def progress(self) -> str:
        """What is being done, for people; empty once it is done."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether it has succeeded or failed."""
        ...

    @property
    def has_succeeded(self) -> bool:
        """Whether a runner can be made."""
        ...

    @property
    def failure(self) -> str:
        """Why no runner can be made, in one line; empty as long as one may be."""
        ...

    def close(self) -> None:
        """Begin nothing further."""
        ...


MakeRunner = Callable[[], Runner]
"""Waits for the build and returns the runner; raises if there cannot be one."""


@dataclass(frozen=True, slots=True)
class _Stage:
    """How far the path is: at most one of build and runner.

    Attributes:
        build: It is running, or no runner has been made of it yet.
        is_loading: The build is done, and the runner is being made.
        runner: Runs steps.
        spent: What a runner has done that was given up.
    """

    build: Build | None = None
    is_loading: bool = False
    runner: Runner | None = None
    spent: ExecutorState | None = None

    def state(self, name: str) -> ExecutorState:
        """Return what is known of the path, whose name is given."""
        if self.runner is not None:
            return self.runner.state
        build = self.build
        if build is None:
            return self.spent or ExecutorState("torch")
        preparation = "loading kernels" if self.is_loading and build.is_done else build.progress
        return ExecutorState(name if build.has_succeeded else "torch", preparation, build.failure)


class FastPath:
    """Leads from a build to the runner of steps, and reports on both.

    Invariant: there is a build that may still give a runner, or a runner, or neither. If there is neither although one
    was wanted, ``reason`` says why. Other threads see one value, which is replaced as a whole.

    Args:
        name: Name of the executor while the path serves.
        device: The device that the runner uses.
        build: Started; None: there is none, and ``reason`` says why if one was wanted.
        make_runner: Makes the runner.
        reason: Why there is no build, for people; logged at once unless empty.
    """

    def __init__(
        self, name: str, device: Device, build: Build | None, make_runner: MakeRunner | None, reason: str = ""
    ) -> None:
        self._name = name
        self._device = device
        self._make_runner = make_runner
        self._now = _Stage(build=build)
        self.reason = ""
        if reason:
            self._fall_back(reason)

    @property
    def runner(self) -> Runner | None:
        """What runs steps; None as long as there is none."""
        return self._now.runner

    @property
    def is_opening(self) -> bool:
        """Whether :meth:`open` has something to do."""
        build = self._now.build
        return build is not None and build.is_done

    @property
    def is_blocked(self) -> bool:
        """Whether :meth:`open` will raise."""
        build = self._now.build
        return build is not None and bool(build.failure)

    def open(self) -> None:
        """Make the runner; waits for the build. If that fails, the path is to be given up.

        Raises:
            Exception: There is no build, or the runner cannot be made.
        """
        if self._now.build is None or self._make_runner is None:
            raise DeviceError(self.reason or "they are switched off")
        self._now = replace(self._now, is_loading=True)
        runner = self._make_runner()
        self._now = _Stage(runner=runner)
        _log.info("event=kernels_serve max_rows=%d", runner.max_rows)
        if reason := runner.state.fallback_reason:
            _log.warning("event=part_falls_back reason=%r", reason)

    def drop(self, error: Exception) -> bool:
        """Do without the part that an error takes out; return False if it takes out the whole path.

        The device is idle. A warning is logged.

        Raises:
            DeviceGone: Nothing on the device works any more.
        """
        part = self.part_of(error)
        if self.runner is None or not part:
            return False
        try:
            self.runner.drop(part, sentence(error))
        except DeviceGone:
            raise
        except Exception as refusal:  # noqa: BLE001 - what cannot be left out takes the rest along
            _log.debug("event=leaving_part part=%r error=%r", part, refusal)
            return False
        _log.warning("event=part_falls_back reason=%r", f"{part}: {sentence(error)}", exc_info=error)
        return True

    def part_of(self, error: Exception) -> str:
        """Return the part that an error takes out; empty if it takes out the whole path, or there is no runner."""
        return "" if self.runner is None else self.runner.part_of(error)

    def give_up(self, error: Exception) -> None:
        """Give the path up for good and log the reason; nothing in the queue uses the runner afterwards.

        Raises:
            DeviceGone: Nothing on the device works any more.
        """
        self._fall_back(sentence(error), error)
        self._leave()

    def close(self) -> None:
        """Release everything; errors no longer matter."""
        if self._now.build is not None:
            self._now.build.close()
        with suppress(Exception):
            self._leave()

    def state(self, memory: MemoryPlan | None, num_torch_steps: int) -> ExecutorState:
        """Return the state of the path, from any thread.

        Args:
            memory: The plan made at start.
            num_torch_steps: Steps, or parts of steps, that torch ran.
        """
        now = self._now  # read before the reason, which is set before the path is given up
        state = now.state(self._name)
        return replace(
            state,
            fallback_reason=self.reason or state.fallback_reason,
            memory=_memory_with(memory, now.runner),
            num_torch_steps=num_torch_steps,
        )

    def _fall_back(self, reason: str, error: Exception | None = None) -> None:
        self.reason = reason
        _log.warning("event=torch_serves reason=%r", reason, exc_info=error)

    def _leave(self) -> None:
        """Release the runner once the device is idle; a refusal matters only if the device is gone."""
        runner = self.runner
        done = self._now.state(self._name)
        counts = replace(done, name="torch", preparation="", fallback_reason="", captured_batch_sizes=())
        self._now = _Stage(spent=counts)
        for step in [self._device.synchronize, *([runner.close] if runner else [])]:
            try:
                step()
            except DeviceGone:
                raise
            except Exception as error:  # noqa: BLE001 - torch serves, whatever the runner still reports
                _log.debug("event=leaving_runner error=%r", error)


def sentence(error: Exception) -> str:
    """Return the first line of an error's message, with the error's name if the message alone says little."""
    name = type(error).__name__
    line = (str(error).splitlines() or [""])[0].rstrip(":")  # tools add pages of their own output
    if not line:
        return name
    return f"{name}: {line}" if isinstance(error, _TERSE) else line


def _memory_with(plan: MemoryPlan | None, runner: Runner | None) -> MemoryPlan | None:
    """Return the plan with the memory that graphs have taken."""
    if plan is None or runner is None:
        return plan
    taken = runner.graph_bytes
    return replace(plan, graphs=taken, free=plan.free + plan.graphs - taken)
