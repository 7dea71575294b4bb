"""The GPU as the fallback executor sees it, with or without kernels, and what this process holds of its memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from ferrule_server.executor.cuda.gpu import Gpu, GpuError
from ferrule_server.executor.cuda.torch_gpu import translated


class CudaDevice:
    """Implements ``executor.fallback.device.Device``.

    Args:
        gpu: The GPU that the kernels use; None: only torch can use it. Owned from now on.
        device: Its name in torch, such as ``cuda:0``.
    """

    def __init__(self, gpu: Gpu | None, device: str) -> None:
        self._gpu = gpu
        self._device = device

    @property
    def name(self) -> str:
        """The name that the driver reports; empty without kernels."""
        return "" if self._gpu is None else self._gpu.info.name

    @property
    def memory(self) -> tuple[int, int]:
        """Bytes that torch holds of the device, and the most that it held; from any thread.

        They are those that torch took from the driver, used or kept: weights, pool, buffers and workspace, but not the
        context, the code of kernels or the driver's share of graphs. The device is not asked, so this never waits for
        it. Anything but a GPU has no bytes.
        """
        if not self._device.startswith("cuda") or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return 0, 0
        stats = torch.cuda.memory_stats_as_nested_dict(torch.device(self._device))
        reserved = stats.get("reserved_bytes", {}).get("all", {})
        return int(reserved.get("current", 0)), int(reserved.get("peak", 0))

    def current(self) -> AbstractContextManager[None]:
        """Make torch use the stream of the kernels; without kernels it keeps its own."""
        return nullcontext() if self._gpu is None else self._gpu.current()

    def synchronize(self) -> None:
        """Wait until the stream is idle."""
        if self._gpu is not None:
            self._gpu.synchronize()

    def translated(self, error: Exception) -> GpuError | None:
        """Return what an error of torch or of the driver means; None if it does not come from a GPU."""
        return translated(error)

    def close(self) -> None:
        """Release the GPU."""
        if self._gpu is not None:
            self._gpu.close()
