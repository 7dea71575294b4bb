"""What the runner needs of a GPU: memory that torch sees too, one stream, kernels, copies, events, graphs.

Two classes implement it: :class:`~ferrule_server.executor.cuda.torch_gpu.TorchGpu` over a real device, and a double in
the tests whose stream runs nothing before somebody waits for it.

Everything is put into *one* stream, in the order of the calls, and runs later; only what says so waits. So a later
operation may overwrite what an earlier one reads on the device, and nothing on the host may be changed before the
copies that read it are done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from ferrule_server.executor.cuda.driver import GpuInfo
from ferrule_server.executor.fallback.device import DeviceError, DeviceGone
from ferrule_server.kernels.cuda.spec import Cubin, KernelSpec


class GpuError(DeviceError):
    """The GPU, its driver or torch refused something; other things may still work."""


class GpuLost(GpuError, DeviceGone):
    """A fault that ends the context: nothing on the GPU can be trusted, and only a new process helps."""


class Launch(Protocol):
    """A kernel with all its arguments; may be put into the stream any number of times."""

    @property
    def spec(self) -> KernelSpec:
        """Of the kernel."""


Operation = Launch | Callable[[], None]
"""What a step is made of: a launch, or a function that puts work into the stream through torch (``out=`` only: it may
be captured, and then must neither allocate nor wait)."""


class Kernel(Protocol):
    """A loaded kernel."""

    def prepare(
        self,
        arguments: Sequence[int | float],
        *,
        grid: int,
        shared_bytes: int | None = None,
        starts_early: bool = True,
    ) -> Launch:
        """Return a launch; as ``driver.Function.prepare`` says."""


class Event(Protocol):
    """A place in the stream."""

    def wait(self) -> None:
        """Block until everything before it has run.

        Raises:
            GpuError: Something in the stream failed, perhaps long ago.
        """


class Graph(Protocol):
    """Captured operations."""

    def close(self) -> None:
        """Give its memory back; it is not replayed again."""


class Gpu(Protocol):
    """One GPU and the one stream of an executor on it. For one thread at a time.

    Every method may raise :class:`GpuError`, and :class:`GpuLost` where nothing works any more.
    """

    @property
    def info(self) -> GpuInfo:
        """What it is; constant."""

    @property
    def torch_device(self) -> torch.device:
        """Where its tensors are."""

    def free_bytes(self) -> int:
        """Return how much of its memory nobody uses now; what torch keeps for later counts as used."""

    def allocate(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a zeroed tensor that stays where it is for as long as it lives, at a multiple of 256 bytes."""

    def allocate_pinned(self, name: str, num_bytes: int) -> Tensor:
        """Return page-locked memory of the host: uint8 [num_bytes]."""

    def adopt(self, name: str, tensor: Tensor, *, is_mutable: bool) -> None:
        """Let kernels use a tensor that somebody else allocated on the device; it must outlive the launches."""

    def address(self, tensor: Tensor) -> int:
        """Return where kernels find a tensor (or a view of one) that was allocated or adopted here."""

    def load(self, spec: KernelSpec, cubin: Cubin) -> Kernel:
        """Load a kernel, wholly."""

    def current(self) -> AbstractContextManager[None]:
        """Have torch put what it does inside into the stream."""

    def upload(self, target: Tensor, source: Tensor) -> None:
        """Copy pinned memory to the device, uint8 tensors of one size; it is read when the stream gets there."""

    def download(self, target: Tensor, source: Tensor) -> None:
        """Copy device memory to pinned memory, likewise."""

    def record(self) -> Event:
        """Mark the place that the stream has come to."""

    def launch(self, operations: Sequence[Operation]) -> None:
        """Put operations into the stream; if one is refused, those before it are there."""

    def capture(self, operations: Sequence[Operation]) -> Graph:
        """Return a graph of operations; they do not run. Each must have been launched before, outside of a capture."""

    def replay(self, graph: Graph) -> None:
        """Put all operations of a graph into the stream, with one call of the driver."""

    def synchronize(self) -> None:
        """Wait until the stream is idle."""

    def close(self) -> None:
        """Give back what this object holds."""
