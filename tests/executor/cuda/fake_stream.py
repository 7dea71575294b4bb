"""The stream of a double of a GPU: a list of work that runs, in order, when somebody waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ferrule_server.executor.cuda.gpu import GpuError, GpuLost
from ferrule_server.kernels.cuda.spec import KernelSpec
from tools import cuda_simulator as simulator

__all__ = ["Copy", "FakeLaunch", "FakeStream", "Faults", "Mark", "Replay", "StandIn", "TorchWork", "Work"]

StandIn = Callable[[Mapping[str, int | float]], object]
"""Does what a kernel would, from its arguments by name; ``FakeGpu.at`` gives the tensors."""


@dataclass(slots=True)
class _Fault:
    call: str
    error: GpuError
    num_before: int


@dataclass(slots=True)
class Faults:
    """Errors that calls raise when their turn has come.

    Attributes:
        lost: Raised by every call, once it has been raised.
    """

    lost: GpuLost | None = None
    _planned: list[_Fault] = field(default_factory=list)

    def plan(self, call: str, error: GpuError, nth: int) -> None:
        """Let a call fail its nth time."""
        self._planned.append(_Fault(call, error, nth - 1))

    def check(self, *calls: str) -> None:
        """Count calls; raise where one is to fail."""
        if self.lost:
            raise self.lost
        for fault in [fault for fault in self._planned if fault.call in calls]:
            fault.num_before -= 1
            if fault.num_before < 0:
                self._raise(fault)

    def _raise(self, fault: _Fault) -> None:
        self._planned.remove(fault)
        if isinstance(fault.error, GpuLost):
            self.lost = fault.error
        raise fault.error


@dataclass(frozen=True, slots=True, eq=False)
class FakeLaunch:
    """A kernel with its arguments."""

    spec: KernelSpec
    arguments: Mapping[str, int | float]
    grid: int
    shared_bytes: int
    starts_early: bool

    @property
    def kernel(self) -> str:
        """Name of the kernel, without constants."""
        return self.spec.kernel.__name__

    def simulated(self) -> simulator.Launch:
        """Return what the simulator runs."""
        spec, arguments = self.spec, tuple(self.arguments.values())
        return simulator.Launch(
            spec.kernel, dict(spec.constants), arguments, self.grid, spec.num_threads, self.shared_bytes
        )


@dataclass(slots=True, eq=False)
class Mark:
    """A place in the stream."""

    has_passed: bool = False

    def run(self) -> None:
        """Say that the stream has come here."""
        self.has_passed = True


@dataclass(slots=True, eq=False)
class Copy:
    """Checked when it runs: pinned memory must still be what it was when the copy was put into the stream."""

    target: Tensor
    source: Tensor
    pinned: Tensor
    pinned_then: Tensor

    def run(self) -> None:
        """Copy."""
        assert torch.equal(self.pinned, self.pinned_then), "staging memory was changed before its copy has run"
        self.target.copy_(self.source)


@dataclass(slots=True, eq=False)
class TorchWork:
    """Recorded calls of torch."""

    calls: list[Callable[[], object]]

    def run(self) -> None:
        """Make them."""
        for call in self.calls:
            call()


@dataclass(slots=True, eq=False)
class Replay:
    """What a graph holds; a chain of kernels neither begins before it nor goes on behind it."""

    work: list[Work]


Work = FakeLaunch | Mark | Copy | TorchWork | Replay
"""What may stand in a stream."""


class FakeStream:
    """Work in order; consecutive kernels that start early are one chain, as on a GPU.

    Args:
        memory: What kernels read and write.
        faults: Of kernels: ``run gemv``.
        stand_ins: Act for kernels, by name, with constants or without; not copied.
        simulate: Run the others in the simulator.
        seed: Of the order of their threads.

    Attributes:
        is_running: Work is being done.
    """

    def __init__(
        self, memory: simulator.Memory, faults: Faults, stand_ins: Mapping[str, StandIn], *, simulate: bool, seed: int
    ) -> None:
        self._memory, self._faults, self._stand_ins = memory, faults, stand_ins
        self._simulate, self._seed = simulate, seed
        self._queue: deque[Work] = deque()
        self.is_running = False

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, work: Work) -> None:
        """Add work at the end."""
        self._queue.append(work)

    def run(self, until: Mark | None = None) -> None:
        """Run everything, or what stands before a mark.

        Raises:
            GpuError: A fault; nothing behind it runs if it is a lost context.
        """
        self.is_running = True
        try:
            while self._queue and not (until and until.has_passed):
                self._run_next(self._queue)
        except GpuLost:
            self._queue.clear()
            raise
        finally:
            self.is_running = False

    def _run_next(self, queue: deque[Work]) -> None:
        work = queue.popleft()
        if isinstance(work, FakeLaunch):
            chain = [work]
            while queue and isinstance(queue[0], FakeLaunch) and queue[0].starts_early:
                chain.append(queue[0])
                queue.popleft()
            self._run_chain(chain)
        elif isinstance(work, Replay):
            inner = deque(work.work)
            while inner:
                self._run_next(inner)
        else:
            work.run()

    def _run_chain(self, chain: list[FakeLaunch]) -> None:
        """Run kernels, each begun before the one in front has ended; stand-ins part a chain."""
        together: list[simulator.Launch] = []
        for launch in chain:
            self._faults.check(f"run {launch.kernel}")
            if stand_in := self._stand_ins.get(launch.spec.name) or self._stand_ins.get(launch.kernel):
                self._run_together(together)
                stand_in(launch.arguments)
            elif self._simulate:
                together.append(launch.simulated())
        self._run_together(together)

    def _run_together(self, launches: list[simulator.Launch]) -> None:
        if launches:
            simulator.run(self._memory, launches, seed=self._seed)
            self._seed += 1
            launches.clear()
