"""The device that a model runs on: a GPU that PyTorch can use, or the processor and the reason."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Device:
    """The device of a model.

    Attributes:
        index: The number of the GPU in PyTorch; None: the processor.
        reason: Why it is not a GPU although one was requested, without a full stop; empty if there is no such reason.
        is_broken: There is a GPU, but it cannot be used: the operator should know.
    """

    index: int | None = None
    reason: str = ""
    is_broken: bool = False

    @property
    def name(self) -> str:
        """Its name in PyTorch."""
        return "cpu" if self.index is None else f"cuda:{self.index}"


def find_device(wanted: str) -> Device:
    """Return the requested GPU if it exists and can run an operation; otherwise the processor and the reason.

    Args:
        wanted: ``auto`` and ``cuda`` select the first GPU, ``cuda:N`` selects GPU N, ``cpu`` selects none.
    """
    if wanted == "cpu":
        return Device()
    if torch.version.cuda is None:
        return Device(reason="this PyTorch was built without CUDA (install one with CUDA, such as PyPI's)")
    if complaint := _complaint():
        return Device(reason=f"PyTorch cannot use CUDA: {complaint}", is_broken=True)
    if not torch.cuda.is_available():
        return Device(reason="PyTorch finds no GPU, or no driver for one")
    index, count = int(wanted.partition(":")[2] or 0), torch.cuda.device_count()
    if index >= count:
        return Device(reason=f"there is no GPU {index}, PyTorch sees {count}")
    return _tried(index)


def _complaint() -> str:
    """Return the warning that PyTorch gives while it looks for GPUs, such as a driver that is too old; else empty."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.is_available()
    return _first_line(str(caught[-1].message)) if caught else ""


def _tried(index: int) -> Device:
    """Run one operation, because a GPU may be in use, out of memory, or too old for this PyTorch."""
    try:
        torch.zeros(1, device=f"cuda:{index}").add_(1).item()
    except (RuntimeError, AssertionError) as error:  # torch.AcceleratorError and OutOfMemoryError are RuntimeErrors
        reason = _first_line(str(error)) or type(error).__name__
        return Device(reason=f"GPU {index} is there and cannot be used: {reason}", is_broken=True)
    return Device(index)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
