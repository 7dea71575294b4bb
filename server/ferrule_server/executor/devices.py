"""Which device a model runs on: a GPU that PyTorch can use, or the processor with the reason why."""

from __future__ import annotations

import warnings
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
    if complaint := _complaint():
        return Device(reason=f"PyTorch cannot use CUDA: {complaint}", is_broken=True)
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


def _complaint() -> str:
    """Return what PyTorch warns of while it looks for GPUs: a driver that is too old, or does not start."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.is_available()
    return _first_line(str(caught[-1].message)) if caught else ""


def _tried(index: int) -> Device:
    """Run one operation: a GPU may be there and taken, out of memory, or too old for this PyTorch."""
    try:
        torch.zeros(1, device=f"cuda:{index}").add_(1).item()
    except (RuntimeError, AssertionError) as error:  # torch.AcceleratorError and OutOfMemoryError are RuntimeErrors
        reason = _first_line(str(error)) or type(error).__name__
        return Device(reason=f"GPU {index} is there and cannot be used: {reason}", is_broken=True)
    return Device(index)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
