"""Looking for a GPU, against a stand-in of ``torch.cuda``: there is none here."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from ferrule_server.executor.devices import Device, find_device


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A PyTorch with two GPUs; the devices that something was allocated on."""
    used: list[str] = []
    zeros = torch.zeros

    def zeros_somewhere(*shape: int, device: str) -> torch.Tensor:
        used.append(device)
        return zeros(*shape)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "zeros", zeros_somewhere)
    return used


@pytest.mark.parametrize(("wanted", "index"), [("auto", 0), ("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_gpu_that_runs_something_is_taken(cuda: list[str], wanted: str, index: int) -> None:
    """The first one unless a number is given, after one operation on it."""
    assert find_device(wanted) == Device(index)
    assert Device(index).name == f"cuda:{index}"
    assert cuda == [f"cuda:{index}"]


def test_the_processor_is_taken_without_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking may start a driver, and takes its time."""

    def look() -> bool:
        raise AssertionError("somebody looked for a GPU")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", look)
    monkeypatch.setattr(torch.cuda, "device_count", look)
    assert find_device("cpu") == Device(None)
    assert Device(None).name == "cpu"


def test_a_pytorch_without_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The most common reason: the wheel for processors was installed."""
    monkeypatch.setattr(torch.version, "cuda", None)
    assert find_device("auto") == Device(
        reason="this PyTorch was built without CUDA (install one with CUDA, such as PyPI's)"
    )


def test_a_machine_without_a_gpu_is_told_from_one_that_is_broken(
    cuda: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is tried then."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    device = find_device("auto")
    assert (device.index, device.is_broken) == (None, False)
    assert "finds no GPU" in device.reason
    assert cuda == []


def test_a_driver_that_pytorch_warns_of_is_broken(cuda: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Too old, or it does not start: told in PyTorch's words, and the warning goes nowhere else."""

    def look() -> bool:
        warnings.warn("CUDA initialization: the driver is too old\nupdate it", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", look)
    reason = "PyTorch cannot use CUDA: CUDA initialization: the driver is too old"
    assert find_device("auto") == Device(None, reason, is_broken=True)


def test_a_number_beyond_the_last_gpu_is_told_how_many_there_are(cuda: list[str]) -> None:
    """Counted from 0."""
    assert find_device("cuda:2").reason == "there is no GPU 2, PyTorch sees 2"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: no kernel image is available\nCompile with `TORCH_USE_CUDA_DSA`"),
        torch.OutOfMemoryError("CUDA error: no kernel image is available"),
        AssertionError("CUDA error: no kernel image is available"),
    ],
)
def test_a_gpu_that_runs_nothing_is_broken(monkeypatch: pytest.MonkeyPatch, cuda: list[str], error: Exception) -> None:
    """Too old, taken by another process, or out of memory: one line says which."""

    def refuse(*_: Any, **__: Any) -> torch.Tensor:
        raise error

    monkeypatch.setattr(torch, "zeros", refuse)
    reason = "GPU 1 is there and cannot be used: CUDA error: no kernel image is available"
    assert find_device("cuda:1") == Device(None, reason, is_broken=True)
