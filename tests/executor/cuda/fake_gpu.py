"""A GPU for tests of what runs on one: tensors of the CPU, and a stream that runs nothing before somebody waits for it.

    gpu = FakeGpu(simulate=True)                     # kernels run in the simulator; else they are recorded only
    x = gpu.allocate("x", (64,), torch.float32)
    launch = gpu.load(spec, CUBIN).prepare([gpu.address(x), 64], grid=2)
    gpu.fail("launch", GpuLost("gone"), nth=3)       # the third call from now raises; see `fail`
    gpu.launch([launch])                             # nothing has happened yet
    gpu.record().wait()                              # now it has
    assert gpu.names() == ["allocate", "load", "launch", "record", "wait"]

What a real GPU lets pass and punishes later is an error here: a staging buffer that changes before its copy has run,
host memory of a download that is touched before it is there (it holds 0xDB until then), a graph of operations that
were never launched, and in a capture everything but launches and torch's ``out=`` functions.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ferrule_server.executor.cuda.gpu import Event, Gpu, GpuError, GpuInfo, GpuLost, Graph, Launch, Operation
from ferrule_server.kernels.cuda.spec import KernelSpec
from ferrule_server.kernels.cuda.toolchain.compile import Cubin
from ferrule_server.kernels.cuda.toolchain.driver import Device, Function
from ferrule_server.kernels.cuda.toolchain.sources import parameters
from tests.executor.cuda.fake_memory import FakeMemory
from tests.executor.cuda.torch_recorder import recorded
from tests.gpu.gpu import CELLS
from tests.kernels.cuda import simulator
from tests.kernels.cuda.toolchain.recorded_driver import RecordedDriver

__all__ = ["CUBIN", "Call", "FakeEvent", "FakeGpu", "FakeGraph", "FakeLaunch", "StandIn"]

CUBIN = Cubin("kernel", "sm_90a", b"", "", 0, 0, 0)
"""Serves as the code of every kernel."""

UNREAD = 0xDB
"""What the target of a download holds until it has run."""

StandIn = Callable[[Mapping[str, int | float]], None]
"""Does what a kernel would, from its arguments by name; :meth:`FakeGpu.at` gives the tensors."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a :class:`FakeGpu`.

    Attributes:
        name: Of the method; ``wait`` is that of an event.
        subject: Name of the memory or of the kernel, if there is one.
        kernels: Of the operations, ``torch`` where it is none.
        num_bytes: Allocated, adopted or copied.
    """

    name: str
    subject: str = ""
    kernels: tuple[str, ...] = ()
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class FakeLaunch:
    """A kernel with its arguments."""

    spec: KernelSpec
    arguments: Mapping[str, int | float]
    grid: int | tuple[int, int]
    shared_bytes: int
    starts_early: bool

    @property
    def kernel(self) -> str:
        """Name of the kernel, without constants."""
        return self.spec.kernel.__name__


@dataclass(frozen=True, slots=True, eq=False)
class FakeKernel:
    """A loaded kernel; the driver's own code checks what is prepared."""

    spec: KernelSpec
    gpu: FakeGpu
    function: Function

    def prepare(
        self,
        arguments: Sequence[int | float],
        *,
        grid: int | tuple[int, int],
        shared_bytes: int | None = None,
        starts_early: bool = True,
    ) -> FakeLaunch:
        """Return a launch."""
        self.gpu._called("prepare", self.spec.kernel.__name__)
        self.function.prepare(arguments, grid=grid, shared_bytes=shared_bytes, starts_early=starts_early)
        kinds = parameters(self.spec.kernel)
        for (name, kind), value in zip(kinds, arguments, strict=True):
            assert kind != "Address" or self.gpu.memory.is_valid(int(value)), f"{self.spec.name}: {name} = {value:#x}"
        named = {name: value for (name, _), value in zip(kinds, arguments, strict=True)}
        size = self.spec.shared_bytes if shared_bytes is None else shared_bytes
        return FakeLaunch(self.spec, named, grid, size, starts_early)


@dataclass(slots=True, eq=False)
class FakeEvent:
    """A place in the stream."""

    gpu: FakeGpu
    has_passed: bool = False

    def wait(self) -> None:
        """Run the stream up to here."""
        self.gpu._called("wait")
        self.gpu._run(until=self)


@dataclass(slots=True, eq=False)
class FakeGraph:
    """Captured operations; kernels are those of :attr:`work`, in order."""

    gpu: FakeGpu
    work: list[Work]
    kernels: tuple[str, ...]
    is_closed: bool = False

    def close(self) -> None:
        """Give the memory back."""
        if not self.is_closed:
            self.gpu._called("close graph", kernels=self.kernels)
            self.gpu.graphs.remove(self)
        self.is_closed = True


@dataclass(slots=True, eq=False)
class _Copy:
    """Checked when it runs: pinned memory must still be what it was when the copy was put into the stream."""

    target: Tensor
    source: Tensor
    pinned: Tensor
    pinned_then: Tensor

    def run(self) -> None:
        assert torch.equal(self.pinned, self.pinned_then), "staging memory was changed before its copy has run"
        self.target.copy_(self.source)


_TorchCalls = list[Callable[[], object]]
Work = FakeLaunch | FakeEvent | FakeGraph | _Copy | _TorchCalls
"""What may stand in the stream."""


@dataclass(slots=True)
class _Failure:
    call: str
    error: GpuError
    num_before: int
    num_times: int


class FakeGpu:
    """Implements :class:`~ferrule_server.executor.cuda.gpu.Gpu` over tensors of the CPU.

    Args:
        num_sms: Multiprocessors; few, as the simulator is slow.
        simulate: Run kernels in the simulator; else they are recorded, and ``stand_ins`` may act for them.
        total_bytes: Of its memory; more than that cannot be allocated or adopted.
        graph_bytes: Taken by every graph.
        seed: Of the order in which the simulator's threads run.
        stand_ins: By name of the kernel (``embed``): run in its place, in either case.

    Attributes:
        log: Every call so far that got as far as the GPU, failed ones included.
        memory: Simulated addresses of all tensors.
        graphs: Captured and not closed.
        stand_ins: As given; may be changed.
    """

    def __init__(
        self,
        *,
        num_sms: int = 2,
        simulate: bool = False,
        total_bytes: int = 1 << 34,
        graph_bytes: int = 1 << 20,
        seed: int = 0,
        stand_ins: Mapping[str, StandIn] | None = None,
    ) -> None:
        self.log: list[Call] = []
        self.memory = FakeMemory()
        self.graphs: list[FakeGraph] = []
        self.stand_ins = dict(stand_ins or {})
        self._driver = RecordedDriver()
        self._device = Device.open(0, self._driver)
        self._device.num_sms = num_sms
        self._simulate, self._seed, self._graph_bytes = simulate, seed, graph_bytes
        self._info = GpuInfo("Fake GPU", "sm_90a", num_sms, total_bytes, self._device.shared_bytes_per_cta)
        self._queue: deque[Work] = deque()
        self._launched: set[Operation] = set()
        self._failures: list[_Failure] = []
        self._lost: GpuLost | None = None
        self._depth = 0
        self._inside = ""

    @property
    def info(self) -> GpuInfo:
        """What it is."""
        return self._info

    @property
    def torch_device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def num_waiting(self) -> int:
        """What stands in the stream and has not run."""
        return len(self._queue)

    def names(self) -> list[str]:
        """Return the names of all calls so far."""
        return [call.name for call in self.log]

    def calls(self, name: str) -> list[Call]:
        """Return all calls of one name."""
        return [call for call in self.log if call.name == name]

    def at(self, address: float, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor at an address, as a stand-in needs it."""
        return self.memory.at(int(address), shape, dtype)

    def fail(self, call: str, error: GpuError, *, nth: int = 1, times: int = 1) -> None:
        """Let a call fail from its nth time on, counted from now.

        Args:
            call: ``allocate``, ``adopt``, ``load``, ``prepare``, ``upload``, ``download``, ``record``, ``launch``,
                ``capture``, ``replay``, ``wait``, ``synchronize``; a kernel's name behind ``load``, ``prepare``,
                ``launch``, ``capture`` and ``run`` (``launch gemv``) counts that kernel only, and memory's name behind
                ``allocate`` and ``adopt`` that memory. ``run gemv`` is a fault on the device: whoever waits next
                gets it. After a :class:`GpuLost` every call raises it.
            error: What it raises.
            nth: 1 for the next.
            times: In a row.
        """
        self._failures.append(_Failure(call, error, nth - 1, times))

    def free_bytes(self) -> int:
        """Return what is not taken."""
        self._called("free_bytes")
        return self._free_bytes

    def allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a zeroed tensor, known to kernels."""
        num_bytes = math.prod(shape) * dtype.itemsize
        self._called("allocate", name, num_bytes=num_bytes)
        if num_bytes > self._free_bytes:
            raise GpuError(f"out of memory: {name} takes {num_bytes} bytes, {self._free_bytes} are free")
        tensor = torch.zeros(shape, dtype=dtype)
        self.memory.add(name, tensor, is_mutable=True)
        return tensor

    def allocate_pinned(self, name: str, num_bytes: int) -> Tensor:
        """Return zeroed memory that uploads and downloads take."""
        self._called("allocate_pinned", name, num_bytes=num_bytes)
        tensor = torch.zeros(num_bytes, dtype=torch.uint8)
        self.memory.add_pinned(tensor)
        return tensor

    def adopt(self, name: str, tensor: Tensor, *, is_mutable: bool) -> None:
        """Make a tensor known to kernels."""
        self._called("adopt", name, num_bytes=tensor.nbytes)
        self.memory.add(name, tensor, is_mutable=is_mutable)

    def address(self, tensor: Tensor) -> int:
        """Return the simulated address of a tensor or of a view of one."""
        return self.memory.address(tensor)

    def load(self, spec: KernelSpec, cubin: Cubin) -> FakeKernel:
        """Return a kernel; the code is not looked at."""
        self._called("load", spec.kernel.__name__)
        self._driver.kinds = [CELLS[kind] for _, kind in parameters(spec.kernel)]
        return FakeKernel(spec, self, self._device.load(spec, cubin))

    @contextmanager
    def current(self) -> Iterator[None]:
        """Run the stream, which torch's work inside comes after; what is put into it inside runs at once."""
        self._called("current")
        self._run()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def upload(self, target: Tensor, source: Tensor) -> None:
        """Put a copy into the stream."""
        self._called("upload", self.memory.name(target), num_bytes=source.nbytes)
        self._copy(target, source, pinned=source)

    def download(self, target: Tensor, source: Tensor) -> None:
        """Put a copy into the stream; the target is of no use until it has run."""
        self._called("download", self.memory.name(source), num_bytes=source.nbytes)
        target.fill_(UNREAD)
        self._copy(target, source, pinned=target)

    def record(self) -> Event:
        """Return the place that the stream has come to."""
        self._called("record")
        event = FakeEvent(self)
        self._put(event)
        return event

    def launch(self, operations: Sequence[Operation]) -> None:
        """Put operations into the stream; what a function does through torch is recorded now and done later."""
        self._called("launch", kernels=_kernels(operations))
        for operation in operations:
            self._put(self._work("launch", operation))
            self._launched.add(operation)

    def capture(self, operations: Sequence[Operation]) -> Graph:
        """Return a graph of operations that were launched before."""
        kernels = _kernels(operations)
        self._called("capture", kernels=kernels)
        for operation in operations:
            assert operation in self._launched, f"{operation} is captured and was never launched"
        work = [self._work("capture", operation) for operation in operations]
        if self._free_bytes < self._graph_bytes:
            raise GpuError("out of memory: no room for a graph")
        self.graphs.append(FakeGraph(self, work, kernels))
        return self.graphs[-1]

    def replay(self, graph: Graph) -> None:
        """Put a graph into the stream."""
        assert isinstance(graph, FakeGraph)
        assert graph in self.graphs, "this graph is closed, or another GPU's"
        self._called("replay", kernels=graph.kernels)
        self._put(graph)

    def synchronize(self) -> None:
        """Run the stream."""
        self._called("synchronize")
        self._run()

    def close(self) -> None:
        """Take no more calls."""
        self._called("close")
        self._inside = "a time after close"

    @property
    def _free_bytes(self) -> int:
        return self._info.total_bytes - self.memory.num_bytes - self._graph_bytes * len(self.graphs)

    def _called(self, name: str, subject: str = "", *, kernels: tuple[str, ...] = (), num_bytes: int = 0) -> None:
        assert not self._inside, f"{name} in {self._inside}"
        if self._lost:
            raise self._lost
        self.log.append(Call(name, subject, kernels, num_bytes))
        self._fail_if_due(name)
        if subject:
            self._fail_if_due(f"{name} {subject}")

    def _fail_if_due(self, name: str) -> None:
        for failure in [failure for failure in self._failures if failure.call == name]:
            failure.num_before -= 1
            if failure.num_before < 0:
                failure.num_times -= 1
                if not failure.num_times:
                    self._failures.remove(failure)
                if isinstance(failure.error, GpuLost):
                    self._lost = failure.error
                    self._queue.clear()
                raise failure.error

    def _work(self, call: str, operation: Operation) -> Work:
        if isinstance(operation, FakeLaunch):
            self._fail_if_due(f"{call} {operation.kernel}")
            return operation
        assert callable(operation), operation
        self._fail_if_due(f"{call} torch")
        self._inside = f"an operation of a {call}"
        try:
            return recorded(operation)
        finally:
            self._inside = ""

    def _copy(self, target: Tensor, source: Tensor, *, pinned: Tensor) -> None:
        for tensor in (target, source):
            assert (tensor.dtype, tensor.dim(), tensor.is_contiguous()) == (torch.uint8, 1, True), tensor.shape
        assert target.numel() == source.numel(), f"{source.numel()} bytes into {target.numel()}"
        assert self.memory.is_pinned(pinned), "only pinned memory is copied without waiting"
        self._put(_Copy(target, source, pinned, pinned.clone()))

    def _put(self, work: Work) -> None:
        self._queue.append(work)
        if self._depth:
            self._run()

    def _run(self, until: FakeEvent | None = None) -> None:
        while self._queue and not (until and until.has_passed):
            work = self._queue.popleft()
            if isinstance(work, FakeLaunch):
                chain = [work]
                while self._queue and _follows(self._queue[0]):
                    chain.append(self._queue.popleft())  # type: ignore[arg-type]  # _follows says so
                self._run_chain(chain)
            else:
                self._run_one(work)

    def _run_one(self, work: Work) -> None:
        if isinstance(work, FakeEvent):
            work.has_passed = True
        elif isinstance(work, _Copy):
            work.run()
        elif isinstance(work, FakeGraph):
            rest, self._queue = self._queue, deque(work.work)
            try:
                self._run()
            finally:
                self._queue.extend(() if self._lost else rest)
        else:
            for call in work if isinstance(work, list) else ():
                call()

    def _run_chain(self, chain: list[FakeLaunch]) -> None:
        """Run kernels that start early, each before the one in front has ended; stand-ins part a chain."""
        together: list[simulator.Launch] = []
        for launch in chain:
            self._fail_if_due(f"run {launch.kernel}")
            if launch.kernel in self.stand_ins:
                self._simulate_all(together)
                self.stand_ins[launch.kernel](launch.arguments)
            elif self._simulate:
                together.append(_simulated(launch))
        self._simulate_all(together)

    def _simulate_all(self, launches: list[simulator.Launch]) -> None:
        if launches:
            simulator.run(self.memory.simulated, launches, seed=self._seed)
            self._seed += 1
            launches.clear()


def _follows(work: Work) -> bool:
    return isinstance(work, FakeLaunch) and work.starts_early


def _simulated(launch: FakeLaunch) -> simulator.Launch:
    spec, arguments = launch.spec, tuple(launch.arguments.values())
    return simulator.Launch(
        spec.kernel, dict(spec.constants), arguments, launch.grid, spec.num_threads, launch.shared_bytes
    )


def _kernels(operations: Sequence[Operation]) -> tuple[str, ...]:
    return tuple(operation.kernel if isinstance(operation, FakeLaunch) else "torch" for operation in operations)


def _as_gpu(gpu: FakeGpu) -> tuple[Gpu, Launch | None]:
    """Say to the type checker that the double has all of the interface."""
    return gpu, None
