"""The real GPU: memory, stream, events and graphs of torch, kernels and copies through the driver, one context.

Why torch's: its allocator, cuBLAS and what is captured must know of each other. A graph keeps addresses, so whatever
stands in one must stay where it is. Kernels use memory of :meth:`TorchGpu.allocate` only. The workspace of cuBLAS is
torch's: one for each thread and stream, made when a product is launched for the first time and kept until the end, so
launch and capture in one thread. What else a product takes for itself comes from a pool that all graphs share, which
is safe as they run one after another and keep nothing in it.

Why the driver's: a copy through ``Tensor.copy_`` takes the host longer.
"""

from __future__ import annotations

import gc
import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Final

import torch
from torch import Tensor

from ferrule_server.executor.cuda.driver import Device, DriverError, Function, Launch, is_context_lost
from ferrule_server.executor.cuda.gpu import Event, GpuError, GpuLost, Graph, Kernel, Operation
from ferrule_server.kernels.cuda.spec import Cubin, KernelSpec

_ALIGNMENT: Final = 16
"""Bytes that kernels load at a time; at another address the device faults, and the context is lost."""

_CUDA_MESSAGE = re.compile(r"\b(CUDA|CUBLAS|cuBLAS|CUDNN|cuDNN|NVIDIA|NVML|cu[A-Z][a-z]+[A-Z])")
_log = logging.getLogger(__name__)
_Cuda = Any  # the module torch.cuda, or a double of it


def translated(error: BaseException) -> GpuError | None:
    """Return what an error of torch or of the driver means; None: it does not come from a GPU.

    What torch's libraries report (``CUBLAS_STATUS_EXECUTION_FAILED``) may be the first sign of a lost context, without
    saying so: :meth:`TorchGpu.synchronize` tells.
    """
    if isinstance(error, GpuError):
        return error
    if isinstance(error, DriverError):
        return _made(error, is_lost=is_context_lost(error.code))
    if isinstance(error, torch.AcceleratorError):
        return _made(error, is_lost=is_context_lost(int(getattr(error, "error_code", 0))))
    if isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError):
        return _made(error, is_lost=False) if _CUDA_MESSAGE.search(str(error)) else None
    return None


def _made(error: BaseException, *, is_lost: bool) -> GpuError:
    message = str(error).partition("\n")[0]  # torch goes on with advice for debugging
    return (GpuLost if is_lost else GpuError)(message)


class _Translating:
    """Raises what an error means in its place; one serves all, and costs nothing where there is none."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        meant = translated(error) if isinstance(error, Exception) else None
        if meant is not None and meant is not error:
            raise meant from error


class _Entered(threading.local):
    """What a thread has done; another one that gets its id when it has ended has done nothing.

    Attributes:
        is_bound: The context is its own.
        is_current: Torch puts what it does into the stream.
    """

    is_bound = False
    is_current = False


_TRANSLATING: Final = _Translating()
_INSIDE: Final = nullcontext()


class TorchEvent:
    """A place in the stream."""

    __slots__ = ("_event",)

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        """Block until everything before it has run; other threads go on."""
        with _TRANSLATING:
            self._event.synchronize()


class TorchGraph:
    """Captured operations."""

    __slots__ = ("graph",)

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self.graph = graph

    def close(self) -> None:
        """Give its memory back."""
        with _TRANSLATING:
            self.graph.reset()


class TorchGpu:
    """A GPU that torch and the driver share; implements :class:`~ferrule_server.executor.cuda.gpu.Gpu`.

    For one thread at a time; a thread that comes to it makes the context its own, once.

    Args:
        device: The GPU, as the driver sees it; closed by :meth:`close`.
        torch_device: The same one.
        cuda: Stands for ``torch.cuda``.

    Attributes:
        info: What it is.
        torch_device: Where its tensors are.
    """

    def __init__(self, device: Device, torch_device: torch.device, cuda: _Cuda = torch.cuda) -> None:
        self._device, self.torch_device, self._cuda = device, torch_device, cuda
        self._entered = _Entered()
        self._functions: list[Function] = []
        self._failed_graphs: list[torch.cuda.CUDAGraph] = []
        with _TRANSLATING:
            self._bind()
            self._stream = cuda.Stream(device=torch_device)
            self._pool = cuda.graph_pool_handle()
        self._handle = int(self._stream.cuda_stream)
        self.info = device.info

    @classmethod
    def open(cls, index: int = 0) -> TorchGpu:
        """Return a GPU.

        Args:
            index: Of the GPU, as torch and the driver count them.

        Raises:
            GpuError: torch, the driver, the package or the GPU is missing; the message says which.
        """
        if torch.version.cuda is None:
            raise GpuError(f"torch {torch.__version__} was built without CUDA")
        with _TRANSLATING:
            device = Device.open(index)
            num_devices = torch.cuda.device_count()
            if index >= num_devices:
                raise GpuError(f"torch {torch.__version__} sees {num_devices} GPUs, the driver more: is it too old?")
            return cls(device, torch.device("cuda", index))

    def free_bytes(self) -> int:
        """Return how much memory nobody has."""
        with _TRANSLATING:
            return int(self._cuda.mem_get_info(self.torch_device)[0])

    def allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a zeroed tensor, at a multiple of 512 bytes as torch gives them."""
        with self._named(f"memory for {name}"), self.current():
            return torch.zeros(shape, dtype=dtype, device=self.torch_device)

    def allocate_pinned(self, name: str, num_bytes: int) -> Tensor:
        """Return zeroed page-locked memory."""
        with self._named(f"page-locked memory for {name}"):
            self._bind()
            return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def adopt(self, name: str, tensor: Tensor, *, is_mutable: bool) -> None:  # noqa: ARG002  (the double checks it)
        """Order what torch has put into its current stream, the tensor's contents perhaps, before what comes."""
        self._check(name, tensor)
        if beyond := tensor.data_ptr() % _ALIGNMENT:  # a view of something larger, as only whoever made it can know
            raise GpuError(f"{name} begins {beyond} bytes behind a multiple of {_ALIGNMENT}, kernels cannot read it")
        with _TRANSLATING:
            self._bind()
            self._stream.wait_stream(self._cuda.current_stream(self.torch_device))

    def address(self, tensor: Tensor) -> int:
        """Return where kernels find a tensor."""
        self._check("a tensor", tensor)
        address = tensor.data_ptr()
        if address % _ALIGNMENT:
            raise ValueError(f"a tensor at {address:#x}, kernels need a multiple of {_ALIGNMENT}")
        return address

    def load(self, spec: KernelSpec, cubin: Cubin) -> Kernel:
        """Load a kernel, wholly; say if fewer CTAs fit than its grids are made for, which is slow and shows nowhere."""
        with _TRANSLATING:
            self._bind()
            function = self._device.load(spec, cubin)
            num_ctas = function.max_ctas_per_sm(spec.shared_bytes)
        planned = spec.ctas_on(self.info.shared_bytes_per_sm)
        self._functions.append(function)
        if num_ctas < planned:
            _log.warning("event=kernel_too_large kernel=%s ctas=%d planned=%d", spec.name, num_ctas, planned)
        return function

    def current(self) -> AbstractContextManager[None]:
        """Have torch put what it does inside into the stream; inside of another one it costs nothing."""
        return _INSIDE if self._entered.is_current else self._entering()

    @contextmanager
    def _entering(self) -> Iterator[None]:
        self._bind()
        with self._cuda.stream(self._stream):
            self._entered.is_current = True
            try:
                yield
            finally:
                self._entered.is_current = False

    def upload(self, target: Tensor, source: Tensor) -> None:
        """Copy pinned memory to the device."""
        self._copy(self._device.upload, target, source)

    def download(self, target: Tensor, source: Tensor) -> None:
        """Copy device memory to pinned memory."""
        self._copy(self._device.download, target, source)

    def _copy(self, put: Callable[[int, int, int, int], None], target: Tensor, source: Tensor) -> None:
        if target.nbytes != source.nbytes or not (target.is_contiguous() and source.is_contiguous()):
            raise ValueError(f"{source.nbytes} bytes do not fit {target.nbytes}, or either has holes")
        with _TRANSLATING:
            self._bind()
            put(target.data_ptr(), source.data_ptr(), target.nbytes, self._handle)

    def record(self) -> Event:
        """Mark the place that the stream has come to."""
        with _TRANSLATING:
            self._bind()
            event = self._cuda.Event()
            event.record(self._stream)
        return TorchEvent(event)

    def launch(self, operations: Sequence[Operation]) -> None:
        """Put operations into the stream."""
        with _TRANSLATING, self.current():
            self._put(operations)

    def capture(self, operations: Sequence[Operation]) -> Graph:
        """Return a graph of operations; other threads may go on allocating and waiting meanwhile."""
        with _TRANSLATING, self.current(), _no_collection():
            graph = self._cuda.CUDAGraph()
            with self._abandoning(graph):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                self._put(operations)
            except BaseException:
                with suppress(RuntimeError), self._abandoning(graph):  # the capture has failed, and says so again
                    graph.capture_end()
                raise
            with self._abandoning(graph):
                graph.capture_end()
        return TorchGraph(graph)

    @contextmanager
    def _abandoning(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Take torch's allocator out of a capture that does not begin, or does not end.

        ``CUDAGraph.capture_end`` does so only behind an end of the stream's capture that succeeds. In a capture the
        allocator does not give cached memory back before it says that there is none, and asks the graph, by a pointer,
        which streams are its. The allocator of page-locked memory keeps that pointer: there is no call to end its part.
        """
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # it was not in one
                torch._C._cuda_endAllocateToPool(self.torch_device.index, self._pool)  # noqa: SLF001  (no other way)
                self._failed_graphs.append(graph)
            raise

    def replay(self, graph: Graph) -> None:
        """Put all operations of a graph into the stream."""
        assert isinstance(graph, TorchGraph), graph
        with _TRANSLATING, self.current():
            graph.graph.replay()

    def synchronize(self) -> None:
        """Wait until the stream is idle."""
        with _TRANSLATING:
            self._bind()
            self._device.synchronize(self._handle)

    def close(self) -> None:
        """Unload the kernels and give the context back; one that is lost is given back by the end of the process."""
        with suppress(DriverError):
            self._bind()
            self._device.synchronize(self._handle)
            while self._functions:
                self._functions.pop().unload()
            self._device.close()

    def _put(self, operations: Sequence[Operation]) -> None:
        handle = self._handle
        for operation in operations:
            if isinstance(operation, Launch):
                operation(handle)
            else:
                assert callable(operation), operation
                operation()

    def _bind(self) -> None:
        if not self._entered.is_bound:
            self._cuda.set_device(self.torch_device)
            self._device.make_current()
            self._entered.is_bound = True

    def _check(self, name: str, tensor: Tensor) -> None:
        if tensor.device != self.torch_device:
            raise ValueError(f"{name} lies on {tensor.device}, kernels need it on {self.torch_device}")

    @contextmanager
    def _named(self, wanted: str) -> Iterator[None]:
        try:
            with _TRANSLATING:
                yield
        except GpuLost:
            raise
        except GpuError as error:
            raise GpuError(f"no {wanted}: {error}") from error


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from freeing what belongs to the device in the midst of a capture, which ends it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
