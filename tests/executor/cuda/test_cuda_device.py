"""What is held of a device's memory is what torch's allocator says; without a device it is nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ferrule_server.executor.cuda.cuda_device import CudaDevice
from ferrule_server.executor.fallback.executor import FallbackExecutor
from tests.executor.fallback.reference_world import Torch

STATS = {
    "reserved_bytes": {"all": {"current": 7, "peak": 9}, "large_pool": {"current": 1, "peak": 1}},
    "allocated_bytes": {"all": {"current": 3, "peak": 4}},
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Which devices torch is asked about; it has used one."""
    asked: list[torch.device] = []

    def stats(device: torch.device) -> dict[str, Any]:
        asked.append(device)
        return STATS

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
    return asked


def test_it_is_what_torch_took_from_the_driver(asked: list[torch.device]) -> None:
    """Used or not, of the device in question."""
    assert CudaDevice(None, "cuda:1").memory == (7, 9)
    assert asked == [torch.device("cuda:1")]


@pytest.mark.parametrize("stats", [{}, {"reserved_bytes": {}}])
def test_nothing_is_counted_that_torch_does_not_count(
    asked: list[torch.device], monkeypatch: pytest.MonkeyPatch, stats: dict[str, Any]
) -> None:
    """An allocator that keeps no books."""
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: stats)
    assert CudaDevice(None, "cuda:0").memory == (0, 0)


def test_a_processor_has_none(asked: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    """And a device that torch has not touched is not touched to ask."""
    assert CudaDevice(None, "cpu").memory == (0, 0)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert CudaDevice(None, "cuda:0").memory == (0, 0)
    assert asked == []


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize(("device", "expected"), [("cuda:0", (7, 9)), ("cpu", (0, 0))])
def test_the_state_of_an_executor_has_it(device: str, expected: tuple[int, int]) -> None:
    """Of its own device, kernels or not."""
    inner = Torch()
    inner.info = replace(inner.info, device=device)
    state = FallbackExecutor(inner, CudaDevice(None, device)).state
    assert (state.device_allocated_bytes, state.device_peak_bytes) == expected
