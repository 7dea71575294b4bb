"""One decoded token passes a bounded number of functions and files, so that a reader can follow it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_CALLS = 138
MAX_FILES = 35
MAX_HOPS = 14
_HOP = re.compile(r"^\| (\d+) \| `([\w.]+)` \| `([\w/.]+)` \|", re.MULTILINE)


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """What the command prints: functions in the order of the calls, then files, then the totals."""
    command = [sys.executable, "-m", "tools.trace_token", "--tokens", "50", "--order"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    return run.stdout.splitlines()


def test_a_decoded_token_passes_few_functions(lines: list[str]) -> None:
    """Raise a bound only with a reason in the commit; lower it when the path gets shorter."""
    total = re.search(r"(\d+)  calls of \d+ functions in (\d+) files", lines[-1])
    assert total is not None, lines
    assert int(total[1]) <= MAX_CALLS, lines
    assert int(total[2]) <= MAX_FILES, lines
    assert "engine/steps/stepper.py Stepper.step" in lines, "the engine thread was not traced"


def test_the_way_of_a_token_is_the_one_that_is_shown(lines: list[str]) -> None:
    """The table of docs/architecture.md has hops that a token passes, in that order, and each has a verb of its own."""
    hops = _HOP.findall((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    assert [int(number) for number, _, _ in hops] == list(range(1, len(hops) + 1))
    assert 10 <= len(hops) <= MAX_HOPS
    passed = [f"{file} {name}" for _, name, file in hops]
    assert [line for line in lines if line in passed] == passed
    functions = [line.split()[1] for line in lines if re.fullmatch(r"\S+\.py \S+", line)]
    verbs = Counter(name.rpartition(".")[2] for name in functions)
    assert {name: verbs[verb] for _, name, _ in hops if verbs[verb := name.rpartition(".")[2]] > 1} == {}
