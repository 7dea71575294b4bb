"""``make test`` runs every test once, in one of its two parts."""

from __future__ import annotations

import shlex
import subprocess
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def files_of(arguments: list[str]) -> list[Path]:
    """Return the files of tests that pytest collects with arguments of a command line."""
    ignored = [ROOT / word.removeprefix("--ignore=") for word in arguments if word.startswith("--ignore=")]
    named = [ROOT / word for word in arguments if word.startswith("tests")]
    assert all(path.exists() for path in [*ignored, *named]), arguments
    assert not (ignored and named), "a part either names its tests, or is all but those of the others"
    found = [file for path in named or [ROOT / "tests"] for file in ([path] if path.is_file() else below(path))]
    return [file for file in found if not any(file.is_relative_to(path) for path in ignored)]


def below(folder: Path) -> list[Path]:
    """Return the files of tests in a folder, as deep as it is."""
    return sorted(folder.rglob("test_*.py"))


def test_the_parts_of_make_test_are_all_tests_and_none_twice() -> None:
    """By the very commands of the recipe."""
    made = subprocess.run(
        ["make", "--dry-run", "--always-make", "test"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    commands = [shlex.split(line.partition("||")[0]) for line in made.stdout.splitlines() if " -m pytest " in line]
    assert len(commands) == 2
    runs = Counter(file for words in commands for file in files_of(words))
    assert runs == Counter(below(ROOT / "tests"))
