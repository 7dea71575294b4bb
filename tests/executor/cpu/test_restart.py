"""Kernels that a new process reads from disk compute what those did that were compiled in the process before."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from ferrule_server.executor.cpu.executor import prepare
from ferrule_server.model.config_reader import read_config
from tests.executor.cpu.models import plan_of, running, write_tiny
from tests.model.stepping import Piece, PooledSequence, Stepper

ROOT = Path(__file__).parents[3]
CHUNKS = [300, 1, 2, 3, 4, 5, 1, 16, 17, 33, 1]
"""Every number of queries that attention has code for, and both sides of its tiles."""


def digest(folder: Path, cache: Path) -> str:
    """Return a digest of the logits of a sequence that grows by chunks."""
    found = hashlib.sha256()
    with running(folder, kernel_cache=cache) as executor:
        stepper, seq = Stepper(executor), PooledSequence()
        for size in CHUNKS:
            tokens = [(7 * seq.length + i) % 1000 for i in range(size)]
            found.update(stepper.logits(Piece(seq, tokens, num_outputs=min(size, 40))).tobytes())
    return found.hexdigest()


def stages_of(folder: Path, cache: Path) -> list[str]:
    """Return what a start says while it prepares the kernels."""
    stages: list[str] = []
    config = read_config(folder)
    prepare(config, plan_of(config, "bfloat16"), cache, lambda stage, _share: stages.append(stage))
    return stages


def test_a_new_process_computes_the_same_bits(tmp_path: Path) -> None:
    """One process compiles, says so, and writes the machine code; this one reads it, and writes nothing."""
    folder, cache = write_tiny(tmp_path / "model"), tmp_path / "cache"
    command = [sys.executable, "-m", "tests.executor.cpu.test_restart", str(folder), str(cache)]
    stages, compiled = subprocess.check_output(command, cwd=ROOT, text=True, timeout=600).splitlines()
    assert stages.startswith("kernels, 0 of 8; kernels, 1 of 8, 1 compiled; ")
    assert stages.endswith("; kernels, 8 of 8, 8 compiled")
    written = {path: path.stat().st_mtime_ns for path in cache.rglob("*.nb?")}
    assert len([path for path in written if path.suffix == ".nbc"]) == 8
    assert digest(folder, cache) == compiled
    assert stages_of(folder, cache) == [f"kernels, {num} of 8" for num in range(9)]
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.nb?")} == written


if __name__ == "__main__":
    print("; ".join(stages_of(Path(sys.argv[1]), Path(sys.argv[2]))))
    print(digest(Path(sys.argv[1]), Path(sys.argv[2])))
