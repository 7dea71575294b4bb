"""``make test`` runs every test once, in one of its two parts, also in the background, and says what was skipped."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import skips

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


def test_a_child_can_be_interrupted() -> None:
    """By Ctrl-C as by SIGINT, which a shell leaves ignored for what it starts in the background."""
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    code = "import signal; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_tests_of_ctrl_c_pass_in_the_background(tmp_path: Path) -> None:
    """As in ``make test &`` of a script; the variable of the skips is not inherited either."""
    node = f"{Path(__file__).relative_to(ROOT)}::{test_a_child_can_be_interrupted.__name__}"
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", node]
    done = subprocess.run(
        ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *pytest_command],
        cwd=ROOT,
        env=os.environ | {skips.VARIABLE: str(tmp_path / "skips")},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
    assert (tmp_path / "skips").read_text() == ""


def test_skips_are_counted_by_their_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each test once, the most frequent reason first, over all the runs that have the same file."""
    path = tmp_path / "skips"
    needs_gpu = [skips.skip_of(f"tests/gpu/test_{name}.py::test_x", ("", 1, "Skipped: no GPU")) for name in "abcde"]
    skips.keep(path, [skips.skip_of("tests/test_a.py", "Skipped: no\n jq"), *needs_gpu[:3]])
    skips.keep(path, needs_gpu)
    skips.main(str(path), "not slow")
    assert capsys.readouterr().out.splitlines() == [
        "== skipped: 6",
        "     5  no GPU  (tests/gpu/test_a.py, tests/gpu/test_b.py, tests/gpu/test_c.py and 2 more)",
        "     1  no jq  (tests/test_a.py)",
        "   and  every test that is not (not slow)",
    ]
    assert skips.table([]) == ["  none"]


def test_a_run_says_at_its_end_what_it_skipped(tmp_path: Path) -> None:
    """Pytest alone, without a file for the table."""
    (tmp_path / "test_skipping.py").write_text(
        "import pytest\n\n@pytest.mark.skip(reason='there is no sea')\ndef test_swim(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.conftest", "--rootdir", "."]
    done = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped, and why" in done.stdout
    assert "     1  there is no sea" in done.stdout
