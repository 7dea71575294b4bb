"""The threat model names tests that exist, and a row without a test says so."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text("utf-8")
ROWS = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| ")]


def test_every_test_of_the_threat_model_exists() -> None:
    """By its file, which is named once in a cell, and its function."""
    for *_, cell in ROWS[2:]:
        file = ""
        for path, function in re.findall(r"`([\w/]+\.py)?::(\w+)`", cell):
            file = path or file
            assert f"def {function}(" in (ROOT / "tests" / file).read_text("utf-8"), f"{file}::{function}"


def test_every_row_of_the_threat_model_names_a_test() -> None:
    """Nothing is promised without one."""
    assert len(ROWS) > 15
    for row in ROWS[2:]:
        assert len(row) == 4, row
        assert re.search(r"::test_\w+|test-hostile", row[3]), row
