"""Which device a model runs on: a GPU that PyTorch can use, or the processor with the reason why."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Device", "find_device", "memory_of"]


@dataclass(frozen=True, slots=True)
class Device:
    """Where a model runs.

    Attributes:
        index: Of the GPU, as PyTorch counts them; None: the processor.
        reason: Why it is not the GPU that was looked for, a sentence without an end; empty: it is, or none was.
        is_broken: There is a GPU, and it cannot be used: whoever runs the server should know.
    """

    index: int | None = None
    reason: str = ""
    is_broken: bool = False

    @property
    def name(self) -> str:
        """As PyTorch writes it."""
        return "cpu" if self.index is None else f"cuda:{self.index}"


def find_device(wanted: str) -> Device:
    """Return the GPU that is asked for if it is there and runs something, else the processor and the reason.

    Args:
        wanted: ``auto`` and ``cuda`` are the first one, ``cuda:N`` is that one, ``cpu`` looks for none.
    """
    if wanted == "cpu":
        return Device()
    if torch.version.cuda is None:
        return Device(reason="this PyTorch was built without CUDA")
    if not torch.cuda.is_available():
        return Device(reason="PyTorch finds no GPU, or no driver for one")
    index, count = int(wanted.partition(":")[2] or 0), torch.cuda.device_count()
    if index >= count:
        return Device(reason=f"there is no GPU {index}, PyTorch sees {count}")
    return _tried(index)


def memory_of(index: int) -> tuple[int, int]:
    """Return the free bytes and all bytes of a GPU's memory; what other processes use is not free."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    return free_bytes, total_bytes


def _tried(index: int) -> Device:
    """Run one operation: a GPU may be there and taken, out of memory, or too old for this PyTorch."""
    try:
        torch.zeros(1, device=f"cuda:{index}").add_(1).item()
    except (RuntimeError, AssertionError) as error:  # torch.AcceleratorError and OutOfMemoryError are RuntimeErrors
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        return Device(reason=f"GPU {index} is there and cannot be used: {first_line}", is_broken=True)
    return Device(index)
