"""The way over the kernels: not there yet, open, or given up for good."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from ferrule_server.executor.base import ExecutorState, MemoryPlan, RowOutput, StepBatch
from ferrule_server.executor.cuda.gpu import Gpu, GpuError, GpuLost
from ferrule_server.executor.cuda.kernel_build import KernelBuild
from ferrule_server.executor.cuda.submitted import QueuedRows
from ferrule_server.kernels.cuda.spec import KernelSpec
from ferrule_server.kernels.cuda.toolchain.compile import Cubin

__all__ = ["NAME", "KernelPath", "MakeRunner", "Runner", "sentence"]

NAME = "numba-cuda"
"""Of the executor, where kernels run or are to run."""

_TERSE = (LookupError, AssertionError, AttributeError, NameError, TypeError, ArithmeticError)
"""Errors that say what was wrong, and not that it was."""

_log = logging.getLogger(__name__)


class Runner(Protocol):
    """Steps on the kernels; :class:`~ferrule_server.executor.cuda.runner.CudaDecodeRunner`.

    Everything may raise :class:`GpuError`; then only ``close`` is called any more. Properties are read by any thread.
    """

    @property
    def max_rows(self) -> int:
        """Of one step."""
        ...

    @property
    def captured_batch_sizes(self) -> tuple[int, ...]:
        """Rows of the graphs that exist, ascending."""
        ...

    @property
    def num_wanted(self) -> int:
        """Graphs that are to be captured."""
        ...

    @property
    def graph_bytes(self) -> int:
        """Taken by graphs."""
        ...

    @property
    def num_graph_steps(self) -> int:
        """Steps that replayed a graph."""
        ...

    @property
    def num_launched_steps(self) -> int:
        """Steps whose kernels were launched one by one."""
        ...

    def can_submit(self, batch: StepBatch) -> bool:
        """Return whether ``submit`` takes this step without waiting."""
        ...

    def submit(self, batch: StepBatch) -> QueuedRows:
        """Put a step into the stream."""
        ...

    def run(self, batch: StepBatch) -> list[RowOutput]:
        """Run a step; none is pending."""
        ...

    def capture_next(self) -> bool:
        """Capture a graph that is wanted and return whether there are more; no step is pending."""
        ...

    def close(self) -> None:
        """Give back what it holds; the stream is idle."""
        ...


MakeRunner = Callable[[Mapping[KernelSpec, Cubin]], Runner]


class KernelPath:
    """From kernels that are being built to the runner of steps, and what can be told of both.

    Invariant: there is a build that may still give a runner, or a runner, or neither; where neither is there although
    one was wanted, ``reason`` says why.

    Args:
        gpu: What the runner runs on; None: none.
        build: The kernels, started; None: none are wanted, or ``reason`` says why there are none.
        make_runner: Makes the runner of the kernels.
        reason: For people; said in the log at once, where there is one.
    """

    def __init__(
        self, gpu: Gpu | None, build: KernelBuild | None, make_runner: MakeRunner | None, reason: str = ""
    ) -> None:
        self._gpu = gpu
        self._build = build
        self._make_runner = make_runner
        self._num_graph_steps = self._num_launched_steps = 0
        self.runner: Runner | None = None
        self.reason = ""
        if reason:
            self._fall_back(reason)

    @property
    def is_opening(self) -> bool:
        """Whether :meth:`open` has something to do."""
        return self._build is not None and self._build.is_done

    @property
    def is_blocked(self) -> bool:
        """Whether :meth:`open` will raise."""
        return self._build is not None and bool(self._build.failure)

    def open(self) -> Runner:
        """Make the runner; waits for the kernels.

        Raises:
            Exception: There are no kernels, or the runner cannot be made.
        """
        build, self._build = self._build, None
        if build is None or self._make_runner is None:
            raise GpuError(self.reason or "they are switched off")
        self.runner = self._make_runner(build.result())
        _log.info("event=kernels_serve max_rows=%d", self.runner.max_rows)
        return self.runner

    def give_up(self, error: Exception) -> None:
        """Close the way for good, for a reason that is said once; nothing in the stream uses the runner afterwards.

        Raises:
            GpuLost: The device is gone altogether.
        """
        self._fall_back(sentence(error), error)
        self._leave()

    def close(self) -> None:
        """Give everything back; what fails meanwhile does not matter any more."""
        if self._build is not None:
            self._build.close()
        with suppress(Exception):
            self._leave()

    def state(self, memory: MemoryPlan | None, num_torch_steps: int) -> ExecutorState:
        """Return what can be told, from any thread.

        Args:
            memory: The plan made at start.
            num_torch_steps: Steps, or parts of steps, that torch ran.
        """
        runner, build = self.runner, self._build
        return ExecutorState(
            name=NAME if runner is not None or (build is not None and build.has_succeeded) else "torch",
            preparation=_preparation(runner, build),
            fallback_reason=self.reason or (build.failure if build else ""),
            memory=_memory_with(memory, runner),
            captured_batch_sizes=runner.captured_batch_sizes if runner else (),
            num_graph_steps=self._num_graph_steps + (runner.num_graph_steps if runner else 0),
            num_launched_steps=self._num_launched_steps + (runner.num_launched_steps if runner else 0),
            num_torch_steps=num_torch_steps,
        )

    def _fall_back(self, reason: str, error: Exception | None = None) -> None:
        self.reason = reason
        _log.warning("event=kernels_not_used reason=%r torch serves", reason, exc_info=error)

    def _leave(self) -> None:
        """Let the runner go once the stream is idle; refusals mean nothing but that the device may be gone."""
        runner, self.runner = self.runner, None
        if runner is not None:
            self._num_graph_steps += runner.num_graph_steps
            self._num_launched_steps += runner.num_launched_steps
        steps = ([self._gpu.synchronize] if self._gpu else []) + ([runner.close] if runner else [])
        for step in steps:
            try:
                step()
            except GpuLost:
                raise
            except Exception as error:  # noqa: BLE001 - torch serves, whatever the runner still says
                _log.debug("event=leaving_runner error=%r", error)


def sentence(error: Exception) -> str:
    """Return the first line of what an error says, with its name where that alone would say little."""
    name = type(error).__name__
    line = (str(error).splitlines() or [""])[0]
    if not line:
        return name
    return f"{name}: {line}" if isinstance(error, _TERSE) else line


def _preparation(runner: Runner | None, build: KernelBuild | None) -> str:
    if build is not None:
        return build.progress
    num_wanted = runner.num_wanted if runner else 0
    return f"capturing graphs, {num_wanted} left" if num_wanted else ""


def _memory_with(plan: MemoryPlan | None, runner: Runner | None) -> MemoryPlan | None:
    """Return the plan with what graphs really take."""
    if plan is None or runner is None:
        return plan
    taken = runner.graph_bytes
    return replace(plan, graphs=taken, free=plan.free + plan.graphs - taken)
