"""What this process holds of a device's memory, as torch's allocator counts it."""

from __future__ import annotations

import torch

__all__ = ["device_memory"]


def device_memory(device: str) -> tuple[int, int]:
    """Return how many bytes torch holds of a device, and how many it held at most; from any thread.

    That is what it took from the driver, used or kept for later: weights, pool, buffers, workspace. The context, code
    of kernels and the driver's part of graphs are not in it. Nothing is asked of the device, so it does not matter
    whether that works, and it waits for nobody but an allocation of another thread.

    Args:
        device: As torch writes it; anything but a GPU has none.
    """
    if not device.startswith("cuda") or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return 0, 0
    reserved = torch.cuda.memory_stats_as_nested_dict(torch.device(device)).get("reserved_bytes", {}).get("all", {})
    return int(reserved.get("current", 0)), int(reserved.get("peak", 0))
