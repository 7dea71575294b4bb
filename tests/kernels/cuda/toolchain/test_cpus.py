"""How many processors a process may use: its affinity, and quotas of either version of cgroups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ferrule_server.kernels.cuda.toolchain.cpus import usable_cpus


@pytest.fixture(autouse=True)
def _many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large machine, of which 64 processors are allowed."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)


def write(path: Path, text: str) -> None:
    """Write a file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        pytest.param("0::/\n", {}, 64, id="no quota"),
        pytest.param("", {"cpu.max": "100000 100000\n"}, 64, id="in no group"),
        pytest.param("0::/\n", {"cpu.max": "max 100000\n"}, 64, id="max"),
        pytest.param("0::/\n", {"cpu.max": "800000 100000\n"}, 8, id="version 2"),
        pytest.param("0::/\n", {"cpu.max": "50000 100000\n"}, 1, id="half a processor"),
        pytest.param("0::/\n", {"cpu.max": "150000 100000\n"}, 2, id="one and a half"),
        pytest.param("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3, id="group around"),
        pytest.param(
            "7:memory:/x\n2:cpu,cpuacct:/x\n0::/\n",
            {"cpu/x/cpu.cfs_quota_us": "400000\n", "cpu/x/cpu.cfs_period_us": "100000\n"},
            4,
            id="version 1",
        ),
        pytest.param(
            "2:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64, id="1, no quota"
        ),
        pytest.param("0::/\n", {"cpu.max": "nonsense\n"}, 64, id="nonsense"),
        pytest.param("0::/\n", {"cpu.max": "9900000 100000\n"}, 64, id="quota above affinity"),
    ],
)
def test_affinity_and_quotas_limit(tmp_path: Path, own: str, files: dict[str, str], expected: int) -> None:
    """The least of them, rounded up, at least 1."""
    write(tmp_path / "own", own)
    for name, text in files.items():
        write(tmp_path / "groups" / name, text)
    assert usable_cpus(tmp_path / "groups", tmp_path / "own") == expected


def test_this_machine_has_one_at_least() -> None:
    """Whatever it says of itself."""
    assert 1 <= usable_cpus() <= 64
