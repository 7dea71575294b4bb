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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ferrule_server.executor.cuda.driver import Device, Function, GpuInfo
from ferrule_server.executor.cuda.gpu import Event, GpuError, Graph, Operation
from ferrule_server.kernels.cuda.spec import Cubin, KernelSpec, parameters
from tests.executor.cuda.fake_memory import FakeMemory
from tests.executor.cuda.fake_stream import Copy, FakeLaunch, FakeStream, Faults, Mark, Replay, StandIn, TorchWork, Work
from tests.executor.cuda.torch_recorder import recorded, watched
from tools.gpu.recorded_driver import RecordedDriver

__all__ = ["CUBIN", "UNREAD", "Call", "FakeEvent", "FakeGpu", "FakeGraph", "FakeKernel", "FakeLaunch", "StandIn"]

CUBIN = Cubin("kernel", b"")
"""Serves as the code of every kernel."""

UNREAD = 0xDB
"""What the target of a download holds until it has run."""


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
class FakeKernel:
    """A loaded kernel; the driver's own code checks what is prepared."""

    spec: KernelSpec
    gpu: FakeGpu
    function: Function

    def prepare(
        self,
        arguments: Sequence[int | float],
        *,
        grid: int,
        shared_bytes: int | None = None,
        starts_early: bool = True,
    ) -> FakeLaunch:
        """Return a launch."""
        self.gpu._called("prepare", self.spec.kernel.__name__)
        self.function.prepare(arguments, grid=grid, shared_bytes=shared_bytes, starts_early=starts_early)
        kinds = dict(parameters(self.spec.kernel))
        named = dict(zip(kinds, arguments, strict=True))
        for name, value in named.items():
            if kinds[name] == "Address" and not name.endswith("_stride"):  # those have 64 bits too
                assert self.gpu.memory.is_valid(int(value)), f"{self.spec.name}: {name} = {value:#x}"
        size = self.spec.shared_bytes if shared_bytes is None else shared_bytes
        return FakeLaunch(self.spec, named, grid, size, starts_early)


@dataclass(frozen=True, slots=True, eq=False)
class FakeEvent:
    """A place in the stream."""

    gpu: FakeGpu
    mark: Mark

    def wait(self) -> None:
        """Run the stream up to here."""
        self.gpu._called("wait")
        self.gpu._stream.run(until=self.mark)


@dataclass(frozen=True, slots=True, eq=False)
class FakeGraph:
    """Captured operations: the names of their kernels, and what is replayed."""

    gpu: FakeGpu
    kernels: tuple[str, ...]
    replay: Replay

    def close(self) -> None:
        """Give the memory back."""
        if self in self.gpu.graphs:
            self.gpu._called("close graph", kernels=self.kernels)
            self.gpu.graphs.remove(self)


class FakeGpu:
    """Implements :class:`~ferrule_server.executor.cuda.gpu.Gpu` over tensors of the CPU.

    Args:
        num_sms: Multiprocessors; few, as the simulator is slow.
        simulate: Run kernels in the simulator; else they are recorded, and ``stand_ins`` may act for them.
        total_bytes: Of its memory; more than that cannot be allocated or adopted.
        graph_bytes: Taken by every graph.
        seed: Of the order in which the simulator's threads run.
        stand_ins: By name of the kernel (``embed``) or of its spec: run in its place, in either case.
        capability: Its compute capability, which decides what shared memory a kernel may have.

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
        capability: tuple[int, int] = (9, 0),
    ) -> None:
        self.log: list[Call] = []
        self.memory = FakeMemory()
        self.graphs: list[FakeGraph] = []
        self.stand_ins = dict(stand_ins or {})
        self._driver = RecordedDriver(capability=capability)
        self._device = Device.open(0, self._driver)
        self._device.info = self._info = replace(self._device.info, name="Fake GPU", num_sms=num_sms)
        self._total_bytes = total_bytes
        self._graph_bytes = graph_bytes
        self._faults = Faults()
        self._stream = FakeStream(self.memory.simulated, self._faults, self.stand_ins, simulate=simulate, seed=seed)
        self._launched: set[Operation] = set()
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
        return len(self._stream)

    def names(self) -> list[str]:
        """Return the names of all calls so far."""
        return [call.name for call in self.log]

    def calls(self, name: str) -> list[Call]:
        """Return all calls of one name."""
        return [call for call in self.log if call.name == name]

    def at(self, address: float, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the tensor at an address, as a stand-in needs it."""
        return self.memory.at(int(address), shape, dtype)

    def fail(self, call: str, error: GpuError, *, nth: int = 1) -> None:
        """Let a call fail once, its nth time from now.

        Args:
            call: ``allocate``, ``adopt``, ``load``, ``prepare``, ``upload``, ``download``, ``record``, ``launch``,
                ``capture``, ``replay``, ``wait``, ``synchronize``; a kernel's name behind ``load``, ``prepare``,
                ``launch``, ``capture`` and ``run`` (``launch gemv``) counts that kernel only, and memory's name behind
                ``allocate`` and ``adopt`` that memory. ``run gemv`` is a fault on the device: whoever waits next
                gets it. After a :class:`GpuLost` every call raises it.
            error: What it raises.
            nth: 1 for the next.
        """
        self._faults.plan(call, error, nth)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Let torch's work on memory of the GPU fail where it is in no order with the stream: outside of ``current``.

        For what is tested; a test's own looks at tensors fail as well.
        """
        with watched(lambda tensor: not self._depth and not self._stream.is_running and tensor in self.memory):
            yield

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
        return FakeKernel(spec, self, self._device.load(spec, cubin))

    @contextmanager
    def current(self) -> Iterator[None]:
        """Run the stream, which torch's work inside comes after; what is put into it inside runs at once."""
        self._called("current")
        self._stream.run()
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
        event = FakeEvent(self, Mark())
        self._put(event.mark)
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
        self.graphs.append(FakeGraph(self, kernels, Replay(work)))
        return self.graphs[-1]

    def replay(self, graph: Graph) -> None:
        """Put a graph into the stream."""
        assert isinstance(graph, FakeGraph)
        assert graph in self.graphs, "this graph is closed, or another GPU's"
        self._called("replay", kernels=graph.kernels)
        self._put(graph.replay)

    def synchronize(self) -> None:
        """Run the stream."""
        self._called("synchronize")
        self._stream.run()

    def close(self) -> None:
        """Take no more calls."""
        self._called("close")
        self._inside = "a time after close"

    @property
    def _free_bytes(self) -> int:
        return self._total_bytes - self.memory.num_bytes - self._graph_bytes * len(self.graphs)

    def _called(self, name: str, subject: str = "", *, kernels: tuple[str, ...] = (), num_bytes: int = 0) -> None:
        assert not self._inside, f"{name} in {self._inside}"
        if not self._faults.lost:
            self.log.append(Call(name, subject, kernels, num_bytes))
        self._faults.check(name, f"{name} {subject}")

    def _work(self, call: str, operation: Operation) -> Work:
        if isinstance(operation, FakeLaunch):
            self._faults.check(f"{call} {operation.kernel}")
            return operation
        assert callable(operation), operation
        self._faults.check(f"{call} torch")
        self._inside = f"an operation of a {call}"
        try:
            return TorchWork(recorded(operation))
        finally:
            self._inside = ""

    def _copy(self, target: Tensor, source: Tensor, *, pinned: Tensor) -> None:
        for tensor in (target, source):
            assert (tensor.dtype, tensor.dim(), tensor.is_contiguous()) == (torch.uint8, 1, True), tensor.shape
        assert target.numel() == source.numel(), f"{source.numel()} bytes into {target.numel()}"
        assert self.memory.is_pinned(pinned), "only pinned memory is copied without waiting"
        self._put(Copy(target, source, pinned, pinned.clone()))

    def _put(self, work: Work) -> None:
        self._stream.put(work)
        if self._depth:
            self._stream.run()


def _kernels(operations: Sequence[Operation]) -> tuple[str, ...]:
    return tuple(operation.kernel if isinstance(operation, FakeLaunch) else "torch" for operation in operations)
