"""The fast path: not open yet, serving, or given up permanently."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from ferrule_server.executor.base import ExecutorState, MemoryPlan, PendingStep, StepBatch, StepResult
from ferrule_server.executor.fallback.device import Device, DeviceError, DeviceGone

_TERSE = (LookupError, AssertionError, AttributeError, NameError, TypeError, ArithmeticError)
"""Errors whose message is unclear without the name of the error."""

_log = logging.getLogger(__name__)


class Runner(Protocol):
    """Runs steps on the fast path.

    All methods may raise :class:`DeviceError`, and so may the result of a submitted step. Properties are read by any
    thread.
    """

    @property
    def max_rows(self) -> int:
        """The most rows of a step."""

    @property
    def max_seq_rows(self) -> int:
        """The most rows of one sequence in a step."""

    @property
    def state(self) -> ExecutorState:
        """The work done and the preparation in progress; a new value each time."""

    @property
    def graph_bytes(self) -> int:
        """Bytes of memory that graphs use, by estimate."""

    def can_submit(self, batch: StepBatch) -> bool:
        """Return whether :meth:`submit` accepts this step without waiting."""

    def submit(self, batch: StepBatch) -> PendingStep:
        """Put a step into the queue."""

    def run(self, batch: StepBatch) -> StepResult:
        """Run a step; no step is pending."""

    def capture_next(self) -> bool:
        """Capture the next graph and return whether there are more; no step is pending."""

    def close(self) -> None:
        """Release everything that the runner holds; the device is idle."""


MakeRunner = Callable[[], Runner]
"""Returns the runner; raises if none can be made."""


@dataclass(frozen=True, slots=True)
class _Stage:
    """The stage of the path.

    Attributes:
        is_closed: No runner has been made yet, and one may be.
        is_loading: The runner is being made.
        runner: Runs steps.
        spent: The last state of a runner that was given up.
    """

    is_closed: bool = False
    is_loading: bool = False
    runner: Runner | None = None
    spent: ExecutorState | None = None

    def state(self, name: str) -> ExecutorState:
        """Return the state of the path, given its name."""
        if self.runner is not None:
            return self.runner.state
        if self.is_closed:
            return ExecutorState(name, "loading kernels" if self.is_loading else "")
        return self.spent or ExecutorState("torch")


class FastPath:
    """Makes the runner of steps when it is first needed, and reports its state.

    Invariant: a runner may still be made, or there is one, or neither. If neither although one was requested,
    ``reason`` says why. Other threads see one value, which is replaced as a whole.

    Args:
        name: Name of the executor while the path serves.
        device: The device that the runner uses.
        make_runner: Makes the runner; None: there is none, and ``reason`` says why if one was requested.
        reason: Why there is none, for people; logged at once unless empty.
    """

    def __init__(self, name: str, device: Device, make_runner: MakeRunner | None, reason: str = "") -> None:
        self._name = name
        self._device = device
        self._make_runner = make_runner
        self._now = _Stage(is_closed=make_runner is not None)
        self.reason = ""
        if reason:
            self._fall_back(reason)

    @property
    def runner(self) -> Runner | None:
        """Runs steps; None if there is no runner, yet or any more."""
        return self._now.runner

    @property
    def can_open(self) -> bool:
        """Whether :meth:`open` makes a runner."""
        return self._now.is_closed

    def open(self) -> None:
        """Make the runner.

        Raises:
            Exception: It cannot be made. The caller must give the path up.
        """
        if self._make_runner is None or not self._now.is_closed:
            raise DeviceError(self.reason or "they are switched off")
        self._now = replace(self._now, is_loading=True)
        runner = self._make_runner()
        self._now = _Stage(runner=runner)
        _log.info("event=kernels_serve max_rows=%d", runner.max_rows)

    def give_up(self, error: Exception) -> None:
        """Give the path up permanently and log the reason; afterwards nothing in the queue uses the runner.

        Raises:
            DeviceGone: The device no longer works.
        """
        self._fall_back(sentence(error), error)
        self._leave()

    def close(self) -> None:
        """Release everything; errors are ignored."""
        with suppress(Exception):
            self._leave()

    def state(self, memory: MemoryPlan | None, num_torch_steps: int) -> ExecutorState:
        """Return the state of the path; called from any thread.

        Args:
            memory: The plan that was made at start.
            num_torch_steps: Steps, or parts of steps, that torch ran.
        """
        now = self._now  # read before the reason, which is set before the path is given up
        return replace(
            now.state(self._name),
            fallback_reason=self.reason,
            memory=_memory_with(memory, now.runner),
            num_torch_steps=num_torch_steps,
        )

    def _fall_back(self, reason: str, error: Exception | None = None) -> None:
        self.reason = reason
        _log.warning("event=torch_serves reason=%r", reason, exc_info=error)

    def _leave(self) -> None:
        """Release the runner once the device is idle; errors are ignored unless the device is gone."""
        runner = self.runner
        done = self._now.state(self._name)
        counts = replace(done, name="torch", preparation="", captured_batch_sizes=())
        self._now = _Stage(spent=counts)
        for step in [self._device.synchronize, *([runner.close] if runner else [])]:
            try:
                step()
            except DeviceGone:
                raise
            except Exception as error:  # noqa: BLE001 - torch serves, whatever error the runner reports
                _log.debug("event=leaving_runner error=%r", error)


def sentence(error: Exception) -> str:
    """Return the first line of an error's message, with the error's name if the message alone says little."""
    name = type(error).__name__
    line = (str(error).splitlines() or [""])[0].rstrip(":")  # tools add pages of their own output
    if not line:
        return name
    return f"{name}: {line}" if isinstance(error, _TERSE) else line


def _memory_with(plan: MemoryPlan | None, runner: Runner | None) -> MemoryPlan | None:
    """Return the plan with the memory that the graphs there are use."""
    if plan is None or runner is None:
        return plan
    taken = runner.graph_bytes
    return replace(plan, graphs=taken, free=plan.free + plan.graphs - taken)
