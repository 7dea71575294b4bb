"""Every language gets the same answers: the cases, and the examples. Languages that compile wait for the long run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conformance.cases import Case, load
from tests.conformance.languages import (
    EXAMPLES,
    Missing,
    compile_cpp,
    compile_go,
    compile_rust,
    compile_typescript,
    need,
    node_modules,
)
from tests.conformance.run import FAILED, SKIPPED, by_topic, main, play_all
from tests.conformance.servers import Servers

SHARED: dict[str, object] = {}
QUICK = [case for case in load() if not case.is_slow]


def _run_node() -> list[str]:
    node_modules()
    return [need("node"), str(EXAMPLES / "node" / "fork.js")]


def _run_shell() -> list[str]:
    need("jq")
    need("buf")
    return [str(EXAMPLES / "shell" / "fork.sh")]


COMMANDS: dict[str, Callable[[], list[str]]] = {
    "node": _run_node,
    "shell": _run_shell,
    "typescript": lambda: [need("node"), str(compile_typescript())],
    "rust": lambda: [str(compile_rust("fork", EXAMPLES / "rust"))],
    "go": lambda: [str(compile_go("fork", EXAMPLES / "go" / "fork.go"))],
    "cpp": lambda: [str(compile_cpp("fork", EXAMPLES / "cpp" / "fork.cc"))],
}
SLOW = ("typescript", "go", "rust", "cpp")


def _marked(names: list[str]) -> list[object]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in names]


def absent(why: object) -> None:
    """Skip for want of a program, or fail where all are to be there."""
    if os.environ.get("FERRULE_REQUIRE_TOOLS") == "1":
        pytest.fail(str(why))
    pytest.skip(f"{why}: make test-conformance installs it")


@pytest.mark.parametrize("language", ["python", "node"])
def test_every_case_passes(language: str, servers: Servers) -> None:
    """The quick ones; ``make test-conformance`` plays all of them in all languages."""
    results = play_all(language, QUICK, servers, SHARED)
    words = {word for word, _ in results.values()}
    if words == {SKIPPED}:
        absent(next(iter(results.values()))[1])
    assert {name: why for name, (word, why) in results.items() if word == FAILED} == {}
    assert words == {"ok"}


def test_a_failure_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The exit code is 1, and the reason names case and step; what is right beside it passes."""
    wrong = "- case: lies\n  steps:\n    - {call: GetStatus, expect: {status: {instance: elsewhere}}}\n"
    right = "- case: truth\n  steps:\n    - {call: GetStatus, expect: {status: {instance: conformance}}}\n"
    (tmp_path / "one.yaml").write_text(wrong + right, "utf-8")
    monkeypatch.setattr("tests.conformance.cases.FOLDER", tmp_path)
    assert main(["--language", "python"]) == 1
    out = capsys.readouterr().out
    assert "python FAILED: lies: step 1, GetStatus.status.instance is 'conformance', expected 'elsewhere'" in out
    assert out.splitlines()[3].split() == ["truth", "ok"]


def test_the_table_in_short_adds_up() -> None:
    """Whatever did not pass is told beside what did."""
    cases = [Case("a", "01-one", []), Case("b", "01-one", []), Case("c", "02-two", [])]
    passed, unable, failed = ("ok", ""), ("n/a", "why"), (FAILED, "why")
    told = by_topic(cases, {"x": {"a": passed, "b": passed, "c": passed}, "y": {"a": unable, "b": passed, "c": failed}})
    assert told.splitlines()[2:] == [
        "| one | 2 | 2 | 1, 1 n/a |",
        "| two | 1 | 1 | 0, 1 FAILED |",
        "| together | 3 | 3 | 1, 1 n/a, 1 FAILED |",
    ]


@pytest.fixture(scope="module")
def python_says(servers: Servers) -> str:
    """What the example in Python prints."""
    return said([sys.executable, "-W", "error", str(EXAMPLES / "python" / "raw_stubs.py")], servers.target("shipped"))


def said(command: list[str], target: str) -> str:
    """Return what an example prints against a server."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path}
    run = subprocess.run([*command, target], capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_example_forks_and_releases(python_says: str) -> None:
    """Two branches that begin alike and go apart, and nothing is left."""
    first, second, end = python_says.split("\n--\n")
    assert first != second
    assert first.lstrip()[:3] == second.lstrip()[:3]
    assert end == "released 3\n"


@pytest.mark.parametrize("language", _marked(list(COMMANDS)))
def test_examples_say_the_same(language: str, servers: Servers, python_says: str) -> None:
    """To the letter: same prompt, same seeds, same tokens."""
    try:
        command = COMMANDS[language]()
    except Missing as missing:
        absent(missing)
    assert said(command, servers.target("shipped")) == python_says
