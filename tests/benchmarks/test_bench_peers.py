"""The runner of peers: exact versions, environments that are made once, failures that leave the rest going, ratios."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from benchmarks.cpu.cells import PEER_CELLS, QUICK, Cell
from benchmarks.cpu.rounds import Record
from benchmarks.make_random_model import write_model
from benchmarks.peers import __main__ as runner
from benchmarks.peers import environments, table
from benchmarks.peers.catalog import PEERS
from benchmarks.peers.environments import Environment, NotInstalled
from benchmarks.peers.llama_cpp_peer import gguf_name, read_tensors
from benchmarks.peers.openvino_peer import write_tokenizer
from benchmarks.peers.picture import draw
from benchmarks.peers.worker import Task

ROOT = Path(__file__).resolve().parents[2]
DECODE, RSS = Cell("decode", 1, 128), Cell("rss")


def _plan(folder: Path, *cells: Cell) -> runner.Plan:
    return runner.Plan("tiny", folder, folder, folder / "results.jsonl", cells, QUICK, 2, True, False)


def _record(cell: Cell, side: str, median: float) -> Record:
    figures = {"median": median, "min": median, "max": median, "num_samples": 1, "is_disturbed": False}
    return {
        "model": "tiny",
        "side": side,
        "cell": cell.name,
        "is_quick": True,
        "unit": cell.unit,
        "read_rate_gbs": 40.0,
    } | figures


def _environment(folder: Path, script: str) -> Environment:
    """Return an environment whose interpreter is a shell script."""
    made = Environment(PEERS[0], folder / PEERS[0].name)
    made.python.parent.mkdir(parents=True)
    made.python.write_text(f"#!/bin/sh\n{script}\n")
    made.python.chmod(0o755)
    return made


# ---- catalog and environments ---------------------------------------------------------------------------------------


def test_peers_are_named_once_and_their_versions_are_exact() -> None:
    """The package that a peer is named after is pinned; its module is there."""
    assert len({peer.name for peer in PEERS}) == len(PEERS)
    for peer in PEERS:
        assert any(re.fullmatch(rf"{peer.name}==[0-9.]+", package) for package in peer.packages), peer.name
        assert (ROOT / "benchmarks" / "peers" / f"{peer.module}.py").is_file()


def test_no_file_of_the_peers_names_a_host() -> None:
    """Packages come from where pip is set up to find them."""
    for path in (ROOT / "benchmarks" / "peers").glob("*.py"):
        assert "://" not in path.read_text(encoding="utf-8"), path


def test_an_environment_is_made_once_and_again_if_its_packages_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Constraints are given, and what is unwanted is removed."""
    commands: list[list[str]] = []
    monkeypatch.setattr(environments.subprocess, "run", lambda command, **_: commands.append(command))  # type: ignore[attr-defined]
    peer = next(peer for peer in PEERS if peer.unwanted)
    environment = Environment(peer, tmp_path / "peer")
    environment.make()
    assert [command[2:5] for command in commands] == [
        ["venv", str(tmp_path / "peer")],
        ["pip", "--disable-pip-version-check", "install"],
        ["pip", "--disable-pip-version-check", "uninstall"],
    ]
    assert set(peer.packages) <= set(commands[1])
    assert (tmp_path / "peer" / "constraints.txt").read_text().splitlines() == list(peer.constraints)
    environment.make()
    assert len(commands) == 3
    assert not Environment(replace(peer, packages=("other==1",)), tmp_path / "peer").is_ready


def test_a_failed_installation_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the last line of its log that names an error; it is tried again the next time."""

    def fail(command: list[str], *, stdout: Any, **_: object) -> None:
        stdout.write("ERROR: no such version\nnote: done\n")
        stdout.flush()
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(environments.subprocess, "run", fail)  # type: ignore[attr-defined]
    environment = Environment(PEERS[0], tmp_path / "peer")
    with pytest.raises(NotInstalled, match="ERROR: no such version"):
        environment.make()
    assert not environment.is_ready


def test_a_run_sees_nothing_of_the_environment_of_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the modules of the benchmark; a library that a peer wants first is loaded first."""
    monkeypatch.setenv("PYTHONHOME", "/elsewhere")
    library = tmp_path / "lib" / "libiomp5.so"
    library.parent.mkdir(parents=True)
    library.touch()
    peer = next(peer for peer in PEERS if peer.preload)
    variables = Environment(peer, tmp_path).variables(ROOT, 3)
    assert variables["PYTHONPATH"] == str(ROOT)
    assert variables["LD_PRELOAD"] == str(library)
    assert "PYTHONHOME" not in variables
    assert variables["OMP_NUM_THREADS"] == "3"
    assert peer.environment.items() <= variables.items()


# ---- runner ---------------------------------------------------------------------------------------------------------


def test_a_task_survives_the_command_line(tmp_path: Path) -> None:
    """The worker gets what the runner made."""
    task = Task(tmp_path, tmp_path / "work", "bf16", 2, PEER_CELLS, QUICK, {"model": "tiny", "side": "a bf16"})
    assert Task.from_json(task.to_json()) == task
    assert task.max_batch == 32
    assert task.max_length == task.max_tokens == 16384 + QUICK.num_steps + 8


def test_records_of_a_worker_are_kept_and_its_failures_are_reported(tmp_path: Path) -> None:
    """A cell that failed does not end the run; a process that ends early is named with its status."""
    good = json.dumps(_record(DECODE, "transformers bf16", 5.0))
    bad = json.dumps({"side": "transformers bf16", "cell": "prefill 512", "error": "ValueError: too long"})
    environment = _environment(
        tmp_path, f"echo '{good}'; echo '{bad}'; echo 'Fatal error: killed' >&2; printf '{{'; exit 3"
    )
    plan = _plan(tmp_path, DECODE, Cell("prefill", context=512), Cell("prefill", context=2048))
    with pytest.raises(runner.CannotRun) as caught:
        runner._measure_variant(plan, environment, PEERS[0].variants[0])
    assert "prefill 512: ValueError: too long" in str(caught.value)
    assert "status 3 after 2 of 3 cells; Fatal error: killed" in str(caught.value)
    assert [record["median"] for record in plan.records()] == [5.0]
    assert DECODE not in plan.left("transformers bf16")


def test_a_peer_that_is_built_is_not_installed_unless_asked_for(tmp_path: Path) -> None:
    """The reason names the flag."""
    optional = next(peer for peer in PEERS if peer.is_optional)
    with pytest.raises(NotInstalled, match="--build"):
        runner._measure_peer(_plan(tmp_path, DECODE), optional, builds=False, installs_only=False)


def test_a_peer_with_all_its_results_is_not_started(tmp_path: Path) -> None:
    """Not even its environment is made."""
    plan = _plan(tmp_path, DECODE)
    for variant in PEERS[0].variants:
        plan.results().add(_record(DECODE, table.side_of(PEERS[0].name, variant.name), 1.0))
    runner._measure_peer(plan, PEERS[0], builds=False, installs_only=False)
    assert not (tmp_path / PEERS[0].name).exists()


def test_a_peer_that_is_skipped_leaves_the_others_going(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is returned for the end of the report."""
    tried: list[str] = []

    def measure(_plan: runner.Plan, peer: Any, **_: bool) -> None:
        tried.append(peer.name)
        if len(tried) == 1:
            raise NotInstalled("no wheel")

    monkeypatch.setattr(runner, "_measure_peer", measure)
    args = runner._parse_arguments(["--only", *(peer.name for peer in PEERS)])
    assert runner._measure_all(_plan(tmp_path, DECODE), args) == {PEERS[0].name: "no wheel"}
    assert tried == [peer.name for peer in PEERS]


# ---- table ----------------------------------------------------------------------------------------------------------


def test_the_ratio_is_to_the_best_peer_of_the_same_bits() -> None:
    """The fastest, or the one with the least memory; ours with weights of as many bits."""
    sides = {"numba-cpu": 30.0, "transformers bf16": 10.0, "openvino-genai fp16": 20.0, "openvino-genai int8": 60.0}
    sides |= {"numba-cpu-int8": 90.0}
    for cell, ratio in ((DECODE, 1.5), (RSS, 3.0)):
        mine = {side: _record(cell, side, median) for side, median in sides.items()}
        assert table.best_ratio(mine, cell, 16) == pytest.approx(ratio)
        assert table.best_ratio(mine, cell, 8) == pytest.approx(1.5)
        assert table.best_ratio(mine, cell, 4) is None
    assert table.best_ratio({"numba-cpu": mine["numba-cpu"]}, RSS, 16) is None


def test_the_picture_has_a_bar_for_each_figure() -> None:
    """The longest of a group reaches the end; memory is no rate and is left out."""
    records = [
        _record(DECODE, "numba-cpu", 30.0),
        _record(DECODE, "vllm-cpu bf16", 15.0),
        _record(RSS, "numba-cpu", 9.0),
    ]
    drawn = draw(records, [DECODE, RSS], "a <machine>")
    assert drawn.count("<rect") == 3
    assert "a &lt;machine&gt;" in drawn
    assert 'width="430.0"' in drawn
    assert 'width="215.0"' in drawn
    assert "rss" not in drawn


def test_the_table_has_a_column_for_each_side_with_results() -> None:
    """Cells without a result have a dash."""
    lines = table.lines_of([_record(DECODE, "numba-cpu", 30.0), _record(DECODE, "vllm-cpu bf16", 20.0)], [DECODE, RSS])
    assert lines[0].split()[:4] == ["unit", "numba-cpu", "vllm-cpu", "bf16"]
    assert lines[1].split() == ["decode", "b1", "c128", "tok/s", "30.0", "20.0", "1.50", "-", "-", "40", "40"]
    assert lines[2].split() == ["rss", "MiB", "-", "-", "-", "-", "-", "-"]


# ---- formats of peers -----------------------------------------------------------------------------------------------


def test_tensors_are_read_without_torch_and_have_names_of_llama_cpp(tmp_path: Path) -> None:
    """Every tensor of a checkpoint, value for value."""
    write_model(tmp_path, "tiny")
    found = dict(read_tensors(tmp_path / "model.safetensors"))
    names = {gguf_name(name) for name in found}
    assert {"token_embd.weight", "output_norm.weight", "blk.1.attn_q_norm.weight", "blk.0.ffn_down.weight"} <= names
    assert len(names) == len(found)
    tensors = {"a.weight": torch.randn(3, 5).bfloat16(), "b.weight": torch.randn(7).bfloat16()}
    save_file(tensors, tmp_path / "two.safetensors")
    for name, values in read_tensors(tmp_path / "two.safetensors"):
        assert np.array_equal(values, tensors[name].float().numpy())


def test_the_tokenizer_that_openvino_needs_can_be_read(tmp_path: Path) -> None:
    """One that is there is not replaced."""
    write_tokenizer(tmp_path)
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode("a").ids == [2]
    (tmp_path / "tokenizer.json").write_text("mine")
    write_tokenizer(tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == "mine"
