"""Examples end with one line that says what is missing, where no server is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROGRAMS = [EXAMPLES / "openai_gateway.py", *sorted((EXAMPLES / "python").glob("*.py"))]
NOBODY = "127.0.0.1:1"


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_an_example_without_a_server_says_so(path: Path) -> None:
    """And ends with 1; no traceback."""
    target = [NOBODY] if path.stem == "raw_stubs" else ["--target", NOBODY]
    run = subprocess.run(
        [sys.executable, "-W", "error", str(path), *target], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 1
    assert run.stdout == ""
    (line,) = run.stderr.splitlines()
    assert "onnection refused" in line
    assert "127.0.0.1:1" in line
