"""The benchmark of GGUF files: both sides read the same file, and a peer that fails is named."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import bench_cpu, bench_gguf
from benchmarks.bench_gguf import CELLS, OURS, PEER, TYPES, Peer
from benchmarks.cpu.cells import QUICK, Cell
from benchmarks.peers.llama_cpp_peer import converted
from benchmarks.peers.worker import Task
from benchmarks.random_gguf import random_matrix, write_random_gguf
from ferrule_server.model.config_reader import read_config
from ferrule_server.model.gguf.blocks import BLOCKS, dequantise
from ferrule_server.model.weights import load_model

DECODE = Cell("decode", 1, 128)


@pytest.mark.parametrize("name", BLOCKS)
def test_random_matrices_are_about_as_large_as_trained_ones(name: str) -> None:
    """Whatever the type."""
    assert 0.01 < dequantise(name, random_matrix(name, 64, 1024, size=0.02)).std() < 0.04


def test_a_random_file_is_a_model(tmp_path: Path) -> None:
    """Every matrix has the type that was asked for, and the network is that of the folder."""
    write_random_gguf(tmp_path / "tiny.gguf", "tiny", "Q4_1")
    config = read_config(tmp_path / "tiny.gguf")
    assert (config.vocab_size, config.num_layers, config.is_tied) == (1024, 2, True)
    assert set(config.blocks.values()) == {"Q4_1"}
    assert len(config.blocks) == 2 * 7 + 1
    load_model(tmp_path / "tiny.gguf", dtype="float32")
    assert set(TYPES) <= set(BLOCKS)


def _python(folder: Path, script: str) -> Path:
    """Return an interpreter that is a shell script."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_the_peer_waits_as_it_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not inherit how our threads wait, which costs llama.cpp up to three quarters of its speed."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    bench_cpu.set_up_process()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    python = _python(tmp_path, f"env > {tmp_path}/variables; echo '{{\"median\": 7.5}}'")
    with bench_gguf._opened(python, tmp_path / "model.gguf", 77, 3, QUICK) as peer:
        assert peer is not None
        peer.rate(DECODE)
    names = (tmp_path / "variables").read_text().splitlines()
    assert [name for name in names if name.startswith(("OMP_", "KMP_"))] == ["OMP_NUM_THREADS=3"]


def test_the_peer_gets_the_very_file(tmp_path: Path) -> None:
    """As one that it has converted before; nothing is left of it afterwards."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    python = _python(tmp_path, f'printf "%s" "$3" > {tmp_path}/task; echo \'{{"median": 7.5}}\'')
    with bench_gguf._opened(python, path, 77, 3, QUICK) as peer:
        assert peer is not None
        assert peer.rate(DECODE) == 7.5
        task = Task.from_json((tmp_path / "task").read_text())
        assert converted(task.folder, task.work_folder, task.variant).resolve() == path
        assert (task.config["vocab_size"], task.num_threads, task.cells) == (77, 3, (DECODE,))
        assert task.effort.num_rounds == 1
    assert not peer.folder.exists()
    with bench_gguf._opened(None, path, 77, 3, QUICK) as nothing:
        assert nothing is None


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('echo \'{"cell": "decode", "error": "RuntimeError: cannot load"}\'', "llama.cpp: RuntimeError: cannot load"),
        ("echo 'No module named llama_cpp' >&2; exit 1", "llama.cpp: No module named llama_cpp"),
    ],
)
def test_a_peer_that_fails_says_why(tmp_path: Path, script: str, message: str) -> None:
    """By its record, or by what it wrote before it ended."""
    with pytest.raises(RuntimeError, match=message):
        Peer(_python(tmp_path, script), tmp_path, 1, QUICK).rate(DECODE)


def test_a_quick_run_prints_a_table_and_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of both sides, with their ratio; the peer is a stand-in."""
    monkeypatch.setattr(bench_gguf, "CACHE", tmp_path)
    monkeypatch.setattr(bench_gguf, "set_up_process", lambda: None)
    monkeypatch.setattr(Peer, "rate", lambda _peer, cell: 2.0 * max(1, cell.batch))
    arguments = ["--quick", "--type", "Q4_0", "--shape", "tiny", "--threads", "1", "--peer-python", sys.executable]
    bench_gguf.main(arguments)
    *table, line = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert (report["file"], report["packed_types"], report["num_threads"]) == ("tiny-Q4_0.gguf", ["Q4_0"], 1)
    assert [record["side"] for record in report["records"]] == [OURS, PEER] * len(CELLS)
    assert all(record["median"] > 0 for record in report["records"])
    assert report["ratios"]["decode b4 c128"] == report["records"][2]["median"] / 8.0
    assert [row.split()[0] for row in table[2:6]] == ["decode"] * 3 + ["prefill"]
    assert (tmp_path / "models" / "tiny-Q4_0.gguf").exists()
