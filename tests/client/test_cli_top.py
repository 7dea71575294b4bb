"""``ferrule top`` as it is used: in a pipe, for scripts, as a picture, and on a terminal that must be as it was."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import grpc
import pytest
from rich.console import Console

from ferrule import Client
from ferrule.errors import AuthError, UnavailableError
from ferrule_cli.top.figures import Look
from ferrule_cli.top.screen import Screen
from ferrule_cli.top.source import Source
from ferrule_server.api.security.auth import OpenAccess
from tests.api.harness import RunningServer
from tests.client import command_line
from tests.client.views import look
from tests.terminal import Terminal

pytestmark = pytest.mark.usefixtures("no_variables")

SHOWN, GONE = "\x1b[?1049h", "\x1b[?1049l"
NO_CURSOR, CURSOR = "\x1b[?25l", "\x1b[?25h"
ENVIRONMENT = {"PATH": os.environ["PATH"], "TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONUTF8": "1"}
COMMAND = [sys.executable, "-m", "ferrule_cli.app", "top", "--interval", "0.1"]


def run(*arguments: str) -> int:
    """Return the exit code of the command, whose looks are short."""
    return command_line.run("top", "--interval", "0.1", *arguments)


# ---- once -----------------------------------------------------------------------------------------------------------


def test_a_pipe_gets_one_picture_as_text(shipped_target: str) -> None:
    """Without colours or codes, by a server that is really there."""
    command = [*COMMAND, "--target", shipped_target]
    with Client(shipped_target) as client, client.prefill(list(range(100, 140))) as cache:
        done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=300, check=False)
        handle_id = cache.handle.handle_id
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ferrule top  ")
    assert handle_id in done.stdout
    assert "\x1b" not in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert {"tokens/s", "steps", "queue", "KV"} <= {line.split()[0] for line in done.stdout.splitlines() if line}


def test_scripts_get_one_object(target: str, client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    """With rates of the time between two looks."""
    with client.prefill(range(40)) as cache:
        assert run("--json", "--target", target) == 0
        facts = json.loads(capsys.readouterr().out)
        assert (facts["state"], facts["is_whole"], facts["model_id"]) == ("ready", True, "paged-reference")
        assert [one["handle_id"] for one in facts["sequences"]] == [cache.handle.handle_id]
        assert facts["rates"]["seconds"] >= 0.1
        assert facts["kv"]["used_blocks"] == 3
        assert facts["principals"][0]["principal"] == "local"


def test_a_picture_goes_to_a_file(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As SVG, in the size that the environment says; what cannot be written is one line."""
    monkeypatch.setenv("COLUMNS", "90")
    assert run("--once", "--svg", str(tmp_path / "top.svg"), "--target", target) == 0
    ET.fromstring((tmp_path / "top.svg").read_text("utf-8"))
    assert capsys.readouterr().out == ""
    assert run("--once", "--svg", str(tmp_path / "no" / "top.svg"), "--target", target) == 1
    assert "(FILE_UNWRITABLE)" in capsys.readouterr().err
    assert run("--svg", str(tmp_path / "top.svg"), "--target", target) == 2


def test_who_is_no_admin_sees_less_and_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Status, metrics and own handles."""
    with RunningServer(access=OpenAccess(is_admin=False)) as server:
        handle = server.prefill().kv_cache
        assert run("--once", "--target", server.address.target) == 0
        text = capsys.readouterr().out
        assert "without the admin role" in text
        assert handle.handle_id in text
        assert run("--json", "--target", server.address.target) == 0
        facts = json.loads(capsys.readouterr().out)
        assert (facts["is_whole"], len(facts["sequences"]), facts["principals"]) == (False, 1, [])


def test_a_proxy_that_wants_a_name_is_no_missing_role(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses without a reason of ours: what helps is the flag, not another token."""
    refusal = AuthError(grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED", "several servers")
    monkeypatch.setattr(client.admin, "server_view", Mock(side_effect=refusal))
    assert "--instance NAME" in Source(client, 5.0).look(100).note


def test_who_is_refused_does_not_ask_again(caplog: pytest.LogCaptureFixture) -> None:
    """Every refusal is a line in the server's log: one is enough."""
    with (
        RunningServer(access=OpenAccess(is_admin=False)) as server,
        Client(server.address.target) as client,
        caplog.at_level("WARNING", "ferrule_server"),
    ):
        source = Source(client, 5.0)
        assert [source.look(100).is_whole for _ in range(3)] == [False] * 3
    assert caplog.text.count("ROLE_REQUIRED") == 1


def test_a_server_that_loads_is_seen_loading(capsys: pytest.CaptureFixture[str]) -> None:
    """With and without the role; nothing fails for want of a model."""
    for is_admin in (True, False):
        with RunningServer(is_loaded=False, access=OpenAccess(is_admin=is_admin)) as server:
            assert run("--once", "--target", server.address.target) == 0
            assert "starting" in capsys.readouterr().out
            assert run("--json", "--target", server.address.target) == 0
            assert json.loads(capsys.readouterr().out)["state"] == "starting"


# ---- a terminal -----------------------------------------------------------------------------------------------------


@contextmanager
def _terminal(target: str) -> Iterator[Terminal]:
    with Terminal([*COMMAND, "--target", target], ENVIRONMENT) as terminal:
        before = terminal.modes
        yield terminal
        assert terminal.modes == before, "keys are read in another way than before"


def _is_restored(seen: str) -> bool:
    """Whether the other screen is left and the cursor is seen, last of all."""
    return seen.count(SHOWN) == seen.count(GONE) == 1 and seen.rfind(CURSOR) > seen.rfind(NO_CURSOR) > -1


@pytest.mark.parametrize(("ending", "code"), [("q", 0), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_terminal_is_as_it_was(target: str, ending: str | int, code: int) -> None:
    """However it ends: the old screen, the cursor, and keys that are seen as they are typed."""
    with _terminal(target) as terminal:
        terminal.read_until("q ends")
        terminal.read_until("every 0.1 s")
        if isinstance(ending, str):
            terminal.type(ending)
        else:
            terminal.process.send_signal(ending)
        assert terminal.end() == code
        assert _is_restored(terminal.seen)
        assert "Traceback" not in terminal.seen


def test_a_screen_is_drawn_over_and_never_cleared(target: str) -> None:
    """So that nothing flickers: after the first frame no code clears the screen or a line before it is written."""
    with _terminal(target) as terminal:
        terminal.read_until("q ends")
        start = len(terminal.seen)
        terminal.read_while(lambda: terminal.seen[start:].count("ferrule top") < 3)
        assert not re.search(r"\x1b\[[0-3]?[JK]", terminal.seen[start:])
        terminal.type("q")
        assert terminal.end() == 0


class _Flaky(Source):
    """Answers as it is told."""

    def __init__(self, *answers: Look | Exception) -> None:
        self._answers = list(answers)

    def look(self, max_cells: int) -> Look:
        """Return or raise the next answer."""
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_server_that_is_away_leaves_its_picture() -> None:
    """The last figures stay, a line says since when they are old, and the next answer takes it away."""
    away = UnavailableError(grpc.StatusCode.UNAVAILABLE, "CONNECTION_FAILED", "nobody is there")
    screen = Screen(Console(width=100, height=30, force_terminal=True), _Flaky(), 1.0)

    def text() -> str:
        return "\n".join(line.plain for line in screen._lines(has_keys=True))

    screen._take(look(100.0, num_decode_tokens=10))
    screen._take(look(101.0, num_decode_tokens=52))
    assert "generated 42" in text()
    screen._take(away)
    assert "(CONNECTION_FAILED), trying again" in text()
    assert "generated 42" in text()
    screen._take(look(3.0, epoch="e2"))
    assert "trying again" not in text()
    assert "restarted while we looked: 1" in text()


def test_the_first_look_must_succeed() -> None:
    """Nothing is drawn for a server that was never seen."""
    away = UnavailableError(grpc.StatusCode.UNAVAILABLE, "CONNECTION_FAILED", "nobody is there")
    with pytest.raises(UnavailableError):
        Screen(Console(width=100, height=30), _Flaky(away), 1.0).run()
