"""Kernels that a new process reads from disk compute what those did that were compiled in the process before."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from tests.executor.cpu.models import running, write_tiny
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


def test_a_new_process_computes_the_same_bits(tmp_path: Path) -> None:
    """One process compiles and writes the machine code; this one reads it, and writes nothing."""
    folder, cache = write_tiny(tmp_path / "model"), tmp_path / "cache"
    command = [sys.executable, "-m", "tests.executor.cpu.test_restart", str(folder), str(cache)]
    compiled = subprocess.check_output(command, cwd=ROOT, text=True, timeout=600).strip()
    written = {path: path.stat().st_mtime_ns for path in cache.rglob("*.nb?")}
    assert len([path for path in written if path.suffix == ".nbc"]) == 8
    assert digest(folder, cache) == compiled
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.nb?")} == written


if __name__ == "__main__":
    print(digest(Path(sys.argv[1]), Path(sys.argv[2])))
