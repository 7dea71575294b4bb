"""What a terminal shows while a command waits for more than a second, and that nothing else ever sees it."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time

import pytest

from ferrule_cli.waiting import Waiting
from tests.client.fake_server import FakeServer
from tests.terminal import Terminal


def _command(*arguments: str) -> Terminal:
    """Return a command on a terminal."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FERRULE_")}
    return Terminal([sys.executable, "-m", "ferrule_cli.app", *arguments], environment | {"TERM": "dumb"})


def _left(shown: str) -> str:
    """Return what is left of a line that was drawn over."""
    return shown.rpartition("\x1b[K")[2]


@pytest.mark.parametrize("arguments", [("generate", "--max-tokens", "6", "the"), ("generate", "--json", "the")])
def test_a_server_that_loads_is_waited_for_with_its_stage(fake: FakeServer, arguments: tuple[str, ...]) -> None:
    """As a bar with a share; when the server is ready the bar is gone and the command goes on."""
    fake.is_loading = True
    with _command(*arguments, "--target", fake.target) as screen:
        screen.read_until("waiting: reading weights 52 % [==========          ] ")
        fake.is_loading = False
        assert screen.end() == 0
    assert _left(screen.seen).lstrip().startswith(("quick", "{"))


@pytest.mark.parametrize("command", [("caches",), ("metrics",), ("admin", "warmup"), ("admin", "drain")])
def test_every_command_that_needs_a_model_waits_for_it(fake: FakeServer, command: tuple[str, ...]) -> None:
    """And if it takes too long, says in one line what it waited for."""
    fake.is_loading = True
    with _command(*command, "--target", fake.target, "--timeout", "5") as screen:
        assert screen.end() == 1
    assert "waiting: reading weights 52 % [" in screen.seen
    assert _left(screen.seen) == "error: the server is starting: reading weights (STARTING)\r\n"


def test_a_load_shows_how_far_it_is(target: str) -> None:
    """As a share of its time; the table takes the place of the bar."""
    with _command("bench", target, "--concurrency", "2", "--seconds", "60", "--warm-up", "0") as screen:
        screen.read_until("requests under way ")
        screen.process.send_signal(signal.SIGINT)
        assert screen.end() == 130
    assert "2 at once" in _left(screen.seen)


def test_without_a_terminal_nothing_is_shown(fake: FakeServer) -> None:
    """Standard error of a script has errors alone."""
    fake.is_loading = True
    command = [sys.executable, "-m", "ferrule_cli.app", "caches", "--target", fake.target, "--timeout", "1.5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: the server is starting: reading weights (STARTING)\n"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Let standard error be a terminal of 40 columns, and return what was written to it."""
    file = _Terminal(newline="")
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setenv("COLUMNS", "40")
    return file


def test_a_short_wait_leaves_the_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that flickers says nothing."""
    terminal = _terminal(monkeypatch)
    with Waiting("nothing"):
        time.sleep(0.3)
    assert terminal.getvalue() == ""


def test_a_long_wait_says_for_how_long_and_never_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is cut, because only one line can be drawn over; ending twice changes nothing."""
    terminal = _terminal(monkeypatch)
    with Waiting("something") as waiting:
        time.sleep(1.3)
        waiting.show("x" * 100)
        time.sleep(0.5)
        waiting.end()
        shown = terminal.getvalue()
    assert shown.startswith("\r\x1b[Kwaiting: something, 1 s\r\x1b[K")
    assert f"\r\x1b[Kwaiting: {'x' * 30}\r" in shown
    assert shown.endswith("\r\x1b[K")
    assert terminal.getvalue() == shown
