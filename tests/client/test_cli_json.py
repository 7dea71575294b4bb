"""``--json``: every command has it, and what goes wrong is one JSON object on standard error."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ferrule_cli import app as cli

WITHOUT = {"ferrule serve", "ferrule completion"}
"""The server has a log in JSON, and a script for a shell is none."""


@pytest.fixture(autouse=True)
def target_is_set(monkeypatch: pytest.MonkeyPatch, environment: None, target: str) -> None:
    """The target comes from the environment; nothing else of it does."""
    monkeypatch.setenv("FERRULE_TARGET", target)


def _commands(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the commands that can be run, each with its parser."""
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for action in below:
        for inner, its in action.choices.items():
            yield from _commands(f"{name} {inner}", its)
    if not below:
        yield name, parser


def test_every_command_has_json() -> None:
    """With the same flag."""
    commands = dict(_commands("ferrule", cli.build_parser()))
    assert len(commands) > 12
    assert {name for name, parser in commands.items() if "--json" not in parser._option_string_actions} == WITHOUT


Said = Callable[..., dict[str, object]]


@pytest.fixture
def said(capfd: pytest.CaptureFixture[str]) -> Said:
    """Return what runs a command with ``--json`` and returns the object that standard error gets."""

    def run(*arguments: str, code: int) -> dict[str, object]:
        assert cli.main([*arguments, "--json"]) == code
        (line,) = capfd.readouterr().err.splitlines()
        facts: dict[str, object] = json.loads(line)
        return facts

    return run


def test_failed_calls_are_objects(said: Said) -> None:
    """With the message, the reason, the status code and the values of the message."""
    facts = said("caches", "--target", "127.0.0.1:1", code=1)
    assert str(facts["error"]).startswith("no server at 127.0.0.1:1 (connection refused); start one with ")
    assert (facts["reason"], facts["code"]) == ("CONNECTION_FAILED", "UNAVAILABLE")
    assert isinstance(facts["metadata"], dict)
    assert facts["metadata"]["target"] == "127.0.0.1:1"
    facts = said("generate", "--ids", "1 " * 600, code=1)
    assert (facts["reason"], facts["code"]) == ("CONTEXT_EXCEEDED", "OUT_OF_RANGE")


def test_wrong_use_is_an_object(said: Said) -> None:
    """Exit code 2 as ever, whether the command, its parser or the package of the server says it."""
    expected = {"error": "the prompt is empty", "reason": "PROMPT_EMPTY"}
    assert said("generate", "", code=2) == expected
    text = 'unknown option --max-tokns, did you mean --max-tokens?; see "ferrule generate --help"'
    assert said("generate", "--max-tokns", "5", "x", code=2) == {"error": text, "reason": "USED_WRONGLY"}
    assert said("halth", code=2)["reason"] == "USED_WRONGLY"
    assert said("token", "a b", code=2)["reason"] == "NAME_INVALID"


def test_what_the_package_of_the_server_refuses_is_an_object(said: Said, tmp_path: Path) -> None:
    """In processes of their own."""
    facts = said("durable", "verify", f"{tmp_path}/none", code=2)
    assert str(facts["error"]).startswith(f"{tmp_path}/none is not a readable journal: ")
    assert facts["reason"] == "JOURNAL_UNREADABLE"
    facts = said("check", "demo", "--dtype", "float8", code=2)
    assert str(facts["error"]).startswith("--dtype 'float8': must be one of ")
