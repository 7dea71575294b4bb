"""The run of layer 3 without a GPU: it says so, goes up to the driver, and its parts do what they say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ferrule_server.kernel_builder.bundles import write_bundle
from ferrule_server.kernels.cuda import embed
from ferrule_server.kernels.cuda.spec import Cubin, KernelSpec
from tools.gpu import run
from tools.gpu.device_memory import DeviceMemory
from tools.gpu.gpu import Gpu

RUN = Path(run.__file__)


@pytest.mark.slow  # make test-kernels
def test_dry_run_passes_up_to_the_driver(tmp_path: Path) -> None:
    """Buffers on the CPU, kernels compiled, arguments packed; the report says that nothing was executed."""
    command = [sys.executable, str(RUN), "--dry-run", "--output", str(tmp_path), "--verbose"]
    command += ["--ops", "embed", "--stages", "litmus", "core"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing is executed" in done.stdout
    assert "case=embed rows=64  status=stopped at the driver" in done.stdout
    report = json.loads((tmp_path / "results.json").read_text())
    assert report["is_dry"]
    assert report["failures"] == []
    assert {stage: {row["status"] for row in rows} for stage, rows in report["results"].items()} == {
        "litmus": {"stopped at the driver"},
        "core": {"stopped at the driver"},
    }
    assert json.loads(done.stdout.splitlines()[-1])["is_dry"]


def test_what_matters_most_comes_first() -> None:
    """The litmus, the ceiling, kernels of decode steps; an op that is not asked for is left out."""
    tasks = run.tasks_of([*run.LIMITS_S, *run.BUDGETS_S], run.OPS)
    assert [task["stage"] for task in tasks][:3] == ["litmus", "ceiling", "core"]
    assert [task["op"] for task in tasks if "op" in task] == list(run.OPS)
    assert [task["op"] for task in run.tasks_of(["core", "others"], ["top_k", "gemv"])] == ["gemv", "top_k"]


def test_sides_of_a_choice_stand_beside_each_other() -> None:
    """Cases that differ in nothing else, and our products beside those of cuBLAS."""
    results: dict[str, list[dict[str, Any]]] = {
        "core": [
            {"case": "gemv qkv M=1 ring=5", "us": 10.0, "torch_us": 15.0},
            {"case": "gemv qkv M=1 ring=0", "us": 12.0, "torch_us": 15.0},
            {"case": "gemv down M=1 ring=4", "us": 20.0},
            {"case": "gemm qkv M=64", "us": 30.0, "torch_us": 25.0},
            {"case": "embed rows=64", "us": 1.0},
            {"case": "attention M=1 split=64", "status": "WRONG"},
        ],
        "trigger": [
            {"case": f"layer M=1 ring=5 trigger={side}", "us": us} for side, us in (("early", 5.0), ("off", 9.0))
        ],
    }
    assert run.choices_of(results) == {
        "ring of gemv qkv M=1": {"5": 10.0, "0": 12.0},
        "border of gemm qkv M=64": {"ours": 30.0, "cuBLAS": 25.0},
        "trigger of layer M=1": {"early": 5.0, "off": 9.0},
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shape", "Nope"], "--shape: invalid choice"),
        (["--architecture", "sm_70"], "--architecture: invalid choice"),
        (["--output", "file/below"], "--output: .*file"),
        (["--build-bundle", "none/kernels"], "--build-bundle: .*none"),
        (["--bundle", "none"], "--bundle: .*none is not a bundle"),
    ],
)
def test_arguments_are_checked_first(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    """With 2 and one line, before any process is started."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    monkeypatch.setattr(subprocess, "run", None)
    with pytest.raises(SystemExit, match="2"):
        run._parse_arguments(["--dry-run", "--output", "out", *arguments])
    assert re.search(said, capsys.readouterr().err)


def test_paths_count_from_where_the_command_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers run in the checkout."""
    monkeypatch.chdir(tmp_path)
    args = run._parse_arguments(["--output", "out", "--build-bundle", "kernels"])
    assert (args.output, args.build_bundle) == (tmp_path / "out", tmp_path / "kernels")
    assert list(tmp_path.rglob("*")) == [], "nothing is left of trying"


def _bundle(path: Path, spec: KernelSpec, architecture: str = "sm_90a") -> list[str]:
    """Write a bundle with what stands for one kernel; return the options of a dry run with it."""
    write_bundle(path, architecture, {spec: Cubin(spec.kernel.__name__, b"code")}, (12, 9))
    options = ["--dry-run", "--stages", "tools", "--ops", "embed", "--bundle", str(path)]
    return [*options, "--output", str(path.with_name("out"))]


def _main(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> str | int | None:
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        run.main()
    return ended.value.code


def test_bundle_of_another_architecture_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any stage."""
    said = _main(monkeypatch, _bundle(tmp_path / "kernels", embed.spec(), "sm_80"))
    assert re.search(r"error: .*kernels is for sm_80, not for sm_90a", str(said))


def test_bundle_without_a_kernel_of_the_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is of other sources or another model."""
    said = _main(monkeypatch, _bundle(tmp_path / "kernels", replace(embed.spec(), num_threads=32)))
    assert re.search(r"error: .*kernels: none of the \d+ kernels of this run", str(said))


def test_what_a_bundle_lacks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the screen and in the report."""
    assert _main(monkeypatch, _bundle(tmp_path / "kernels", embed.spec())) == 0
    assert re.search(r"WARNING .*kernels: only 1 of the \d+ kernels of this run", capsys.readouterr().out)
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    assert report["results"]["bundle"][0]["in_bundle"] == 1


@pytest.mark.slow  # make test-kernels
def test_bundle_is_built_without_control_characters(tmp_path: Path) -> None:
    """Into a pipe, and what pytest writes meanwhile is announced; one kernel, and those of its tests."""
    options = ["--ops", "embed", "--build-bundle", str(tmp_path / "kernels")]
    done = subprocess.run([sys.executable, str(RUN), *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not set("\r\033") & set(done.stdout + done.stderr)
    assert "in the simulator" in done.stdout.splitlines()[0]
    assert re.search(r"kernels: \d+ kernels, \d\.\d MB$", done.stderr.strip())


def test_work_that_hangs_or_dies_is_a_failure_and_no_end(tmp_path: Path) -> None:
    """Each with its reason; what was said before counts."""
    it = run.Run({}, None, tmp_path)
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
        "late: not run, the time is over",
    ]


WORKER = """
import json, sys, time
for number, task in enumerate(json.loads(sys.argv[1])["tasks"]):
    print(json.dumps({"begin": number}), flush=True)
    if task["op"] == "dies":
        raise SystemExit("gone")
    if task["op"] == "hangs":
        time.sleep(60)
    print("noise", json.dumps({"case": task["op"], "status": "ok"}), sep="\\n", flush=True)
"""


def test_a_task_that_hangs_or_dies_costs_its_own_result_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are done in one process, or in the next one; what has no time left is said."""
    monkeypatch.setattr(run, "WORKER", ("-c", WORKER))
    monkeypatch.setitem(run.LIMITS_S, "core", 3)
    it = run.Run({}, None, tmp_path)
    tasks = [{"stage": "core", "task": "op", "op": op} for op in ("a", "dies", "b", "hangs", "c")]
    it.work(tasks)
    assert [result["case"] for result in it.results["core"]] == ["a", "b", "c"]
    it.deadline = it.started
    it.work(tasks[:1])
    assert it.failures == [
        "core dies: exit status 1: gone",
        "core hangs: stopped after 3 s",
        "core a: not run, the time is over",
    ]


def test_a_result_that_is_wrong_is_a_failure(tmp_path: Path) -> None:
    """And is kept."""
    it = run.Run({}, None, tmp_path)
    it.note({"stage": "core", "op": "gemv"}, {"case": "qkv", "status": "WRONG"})
    assert it.failures == ['core gemv: {"case": "qkv", "status": "WRONG"}']
    assert it.results["core"][0]["status"] == "WRONG"


def test_budgets_leave_most_of_ten_minutes_to_the_worker() -> None:
    """Starting processes included."""
    assert sum(run.BUDGETS_S.values()) <= run.TOTAL_S / 3
    assert run.TOTAL_S <= 590
    assert set(run.BUDGETS_S) == set(run.STAGES)


def test_device_memory_behaves_as_the_simulators() -> None:
    """Addresses, offsets, parts and copies; here on the CPU."""
    memory = DeviceMemory(Gpu(dry_architecture="sm_90a"))
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
