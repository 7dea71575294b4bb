"""The way over the kernels: not there yet, open, or given up for good."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

from ferrule_server.executor.base import ExecutorState, Int32Array, MemoryPlan, RowOutput, StepBatch
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

    def copy_blocks(self, block_pairs: Int32Array) -> None:
        """Put copies of whole blocks of the pool into the stream."""
        ...

    def capture_next(self) -> bool:
        """Capture a graph that is wanted and return whether there are more; no step is pending."""
        ...

    def close(self) -> None:
        """Give back what it holds; the stream is idle."""
        ...


MakeRunner = Callable[[Mapping[KernelSpec, Cubin]], Runner]


@dataclass(frozen=True, slots=True)
class _Way:
    """How far it is: at most one of build and runner.

    Attributes:
        build: The kernels, in the making, or made for no runner yet.
        is_loading: They are there, and the runner is being made.
        runner: Runs steps.
        num_graph_steps: Of runners that were given up.
        num_launched_steps: Likewise.
    """

    build: KernelBuild | None = None
    is_loading: bool = False
    runner: Runner | None = None
    num_graph_steps: int = 0
    num_launched_steps: int = 0

    def num_steps(self) -> tuple[int, int]:
        """Return the steps so far that replayed graphs, and that were launched."""
        if self.runner is None:
            return self.num_graph_steps, self.num_launched_steps
        return (
            self.num_graph_steps + self.runner.num_graph_steps,
            self.num_launched_steps + self.runner.num_launched_steps,
        )

    def preparation(self) -> str:
        """Return what is being done, for people; empty: nothing."""
        if self.build is not None:
            return "loading kernels" if self.is_loading and self.build.is_done else self.build.progress
        num_wanted = self.runner.num_wanted if self.runner else 0
        return f"capturing graphs, {num_wanted} left" if num_wanted else ""


class KernelPath:
    """From kernels that are being built to the runner of steps, and what can be told of both.

    Invariant: there is a build that may still give a runner, or a runner, or neither; where neither is there although
    one was wanted, ``reason`` says why. What other threads see of it is one value, replaced at once.

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
        self._make_runner = make_runner
        self._now = _Way(build=build)
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

    def open(self) -> Runner:
        """Make the runner; waits for the kernels. Where that fails, the way is to be given up.

        Raises:
            Exception: There are no kernels, or the runner cannot be made.
        """
        build = self._now.build
        if build is None or self._make_runner is None:
            raise GpuError(self.reason or "they are switched off")
        self._now = replace(self._now, is_loading=True)
        runner = self._make_runner(build.result())
        self._now = replace(self._now, build=None, runner=runner, is_loading=False)
        _log.info("event=kernels_serve max_rows=%d", runner.max_rows)
        return runner

    def give_up(self, error: Exception) -> None:
        """Close the way for good, for a reason that is said once; nothing in the stream uses the runner afterwards.

        Raises:
            GpuLost: The device is gone altogether.
        """
        self._fall_back(sentence(error), error)
        self._leave()

    def close(self) -> None:
        """Give everything back; what fails meanwhile does not matter any more."""
        if self._now.build is not None:
            self._now.build.close()
        with suppress(Exception):
            self._leave()

    def state(self, memory: MemoryPlan | None, num_torch_steps: int) -> ExecutorState:
        """Return what can be told, from any thread.

        Args:
            memory: The plan made at start.
            num_torch_steps: Steps, or parts of steps, that torch ran.
        """
        now = self._now  # before the reason, which is there before the way is given up
        runner, build = now.runner, now.build
        num_graph_steps, num_launched_steps = now.num_steps()
        return ExecutorState(
            name=NAME if runner is not None or (build is not None and build.has_succeeded) else "torch",
            preparation=now.preparation(),
            fallback_reason=self.reason or (build.failure if build else ""),
            memory=_memory_with(memory, runner),
            captured_batch_sizes=runner.captured_batch_sizes if runner else (),
            num_graph_steps=num_graph_steps,
            num_launched_steps=num_launched_steps,
            num_torch_steps=num_torch_steps,
        )

    def _fall_back(self, reason: str, error: Exception | None = None) -> None:
        self.reason = reason
        _log.warning("event=torch_serves reason=%r", reason, exc_info=error)

    def _leave(self) -> None:
        """Let the runner go once the stream is idle; refusals mean nothing but that the device may be gone."""
        runner = self.runner
        num_graph_steps, num_launched_steps = self._now.num_steps()
        self._now = _Way(num_graph_steps=num_graph_steps, num_launched_steps=num_launched_steps)
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


def _memory_with(plan: MemoryPlan | None, runner: Runner | None) -> MemoryPlan | None:
    """Return the plan with what graphs really take."""
    if plan is None or runner is None:
        return plan
    taken = runner.graph_bytes
    return replace(plan, graphs=taken, free=plan.free + plan.graphs - taken)
