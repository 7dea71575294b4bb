"""The run of layer 3 without a GPU: it says so, goes up to the driver, and its parts do what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.gpu import run
from tests.gpu.device_memory import DeviceMemory
from tests.gpu.gpu import Gpu

RUN = Path(run.__file__)


def test_dry_run_passes_up_to_the_driver(tmp_path: Path) -> None:
    """Buffers on the CPU, kernels compiled, arguments packed; the report says that nothing was executed."""
    command = [sys.executable, str(RUN), "--dry-run", "--cache", str(tmp_path / "cache"), "--output", str(tmp_path)]
    command += ["--ops", "embed", "--stages", "kernels"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing is executed" in done.stdout
    report = json.loads((tmp_path / "results.json").read_text())
    assert report["is_dry"]
    assert report["failures"] == []
    assert {row["status"] for row in report["results"]["kernels"]} == {"stopped at the driver"}
    assert json.loads(done.stdout.splitlines()[-1])["is_dry"]


def test_work_that_hangs_or_dies_is_a_failure_and_no_end(tmp_path: Path) -> None:
    """Each with its reason; what was said before counts."""
    it = run.Run({}, (), None, tmp_path, ())
    it.deadline = it.started + 60
    hangs = "import time; print('before', flush=True); time.sleep(60)"
    assert it.process([sys.executable, "-c", hangs], "hangs", 1.5) == "before\n"
    assert it.process([sys.executable, "-c", "raise SystemExit('gone')"], "dies", 20) == ""
    assert it.process([sys.executable, "-c", "raise SystemExit(4)"], "tool", 20, failing=(9,)) == ""
    it.process([sys.executable, "-c", "raise SystemExit(9)"], "tool", 20, failing=(9,))
    it.deadline = it.started
    assert it.process([sys.executable, "-c", ""], "late", 20) == ""
    assert it.failures == [
        "hangs: stopped after 2 s",
        "dies: exit status 1: gone",
        "tool: exit status 9: ",
        "late: not run, the time of the stage is over",
    ]


def test_budgets_stay_below_ten_minutes() -> None:
    """Starting processes included."""
    assert sum(run.BUDGETS_S.values()) <= run.TOTAL_S
    assert run.TOTAL_S <= 590
    assert set(run.BUDGETS_S) == set(run.STAGES)


def test_winners_are_the_fastest_right_ones() -> None:
    """Per case, with what the default takes; a wrong or unmeasured variant is none."""
    rows = [
        {"case": "a", "status": "ok", "us": 3.0, "spec": ["default"], "is_default": True},
        {"case": "a", "status": "ok", "us": 2.0, "spec": ["better"], "is_default": False},
        {"case": "a", "status": "WRONG", "us": 1.0, "spec": ["wrong"], "is_default": False},
        {"case": "b", "status": "ok", "us": 5.0, "spec": ["default"], "is_default": True},
        {"case": "c", "status": "stopped at the driver", "spec": ["dry"], "is_default": True},
    ]
    chosen = run.winners(rows, "sm_90a", "Qwen3-8B")
    assert (chosen["architecture"], chosen["shape"]) == ("sm_90a", "Qwen3-8B")
    assert chosen["winners"] == {
        "a": {"kernels": ["better"], "us": 2.0, "default_us": 3.0},
        "b": {"kernels": ["default"], "us": 5.0, "default_us": 5.0},
    }


def test_device_memory_behaves_as_the_simulators(tmp_path: Path) -> None:
    """Addresses, offsets, parts and copies; here on the CPU."""
    memory = DeviceMemory(Gpu(tmp_path, dry_architecture="sm_90a"))
    values = np.arange(12, dtype=np.uint16).reshape(3, 4)
    at = memory.put("values", values, offset=32)
    assert at == memory.address("values")
    np.testing.assert_array_equal(memory.get("values"), values)
    memory.write(at + 8, np.array([70, 71], np.uint16))
    np.testing.assert_array_equal(memory.read(at + 6, 3, np.uint16), [3, 70, 71])
    memory.check_guards()
    memory.empty("out", (2, 2), np.float32)
    assert np.isnan(memory.get("out")).all()
    memory._by_name["out"].whole[0] = 1
    with pytest.raises(AssertionError, match="beside out"):
        memory.check_guards()
    with pytest.raises(pytest.skip.Exception, match="100 GiB"):
        memory.sparse("pool", 100 << 30)
