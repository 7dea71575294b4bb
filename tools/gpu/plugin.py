"""A plugin of pytest that puts a GPU in the place of the simulator, or notes what the simulator runs.

python -m pytest -p tools.gpu.plugin --gpu [--gpu-bundle FILE] [--gpu-dry sm_90a] tests/kernels/cuda/...
python -m pytest -p tools.gpu.plugin --gpu-record FILE tests/kernels/cuda/...
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tools import cuda_simulator as simulator
from tools.cuda_simulator.launch import Launch


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare where kernels come from, or that launches are noted."""
    group = parser.getgroup("gpu")
    group.addoption("--gpu", action="store_true", help="run on a GPU in place of the simulator")
    group.addoption("--gpu-bundle", type=Path)
    group.addoption("--gpu-dry", help="architecture of a dry run")
    group.addoption("--gpu-record", type=Path, help="note the kernels that the simulator runs")


def pytest_configure(config: pytest.Config) -> None:
    """Replace the simulator before any test imports it."""
    record = config.getoption("--gpu-record")
    if record is not None:
        _note_launches(record)
    elif config.getoption("--gpu"):
        _use_gpu(config)


def _use_gpu(config: pytest.Config) -> None:
    import torch

    from tools.gpu.device_memory import DeviceMemory, run_on_device
    from tools.gpu.gpu import Gpu

    gpu = Gpu(config.getoption("--gpu-bundle"), config.getoption("--gpu-dry"))

    def run(memory: DeviceMemory, launches: Sequence[Launch], *, seed: int = 0) -> None:
        run_on_device(gpu, memory, launches)

    def memory() -> Any:
        return DeviceMemory(gpu)

    simulator.Memory = memory  # type: ignore[assignment,misc]
    simulator.run = run  # type: ignore[assignment]
    if not gpu.is_dry:
        _fit_pools(int(0.4 * torch.cuda.mem_get_info()[0]))
    config.pluginmanager.register(_Summary(gpu))


def _fit_pools(num_bytes: int) -> None:
    """Have the tests take pools that fit, before they import the size: still more than 32 bits address."""
    from tests.kernels.cuda import attention_case

    attention_case.set_pool_bytes(min(attention_case.pool_bytes(), num_bytes))


class _Summary:
    """Says at the end what ran: a skipped test proves nothing."""

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Write the line that the run of layer 3 reads."""
        left_out = (
            f", {number} tests left out, too large for its memory" if (number := self._gpu.num_without_room) else ""
        )
        terminalreporter.write_line(f"gpu: {self._gpu.num_chains} chains of kernels{left_out}")


def _note_launches(record: Path) -> None:
    simulate = simulator.run
    seen: set[str] = set()

    def run(memory: Any, launches: Sequence[Launch], *, seed: int = 0) -> None:
        if any(launch.specialised is not None for launch in launches):
            pytest.skip("mutants are not run on a GPU")
        for launch in launches:
            line = json.dumps(
                {
                    "module": launch.kernel.__module__,
                    "kernel": launch.kernel.__name__,
                    "constants": sorted(launch.constants.items()),
                    "num_threads": launch.num_threads,
                }
            )
            if line not in seen:
                seen.add(line)
                with record.open("a") as file:
                    file.write(line + "\n")
        simulate(memory, launches, seed=seed)

    simulator.run = run
