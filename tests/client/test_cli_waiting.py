"""What a terminal shows while a command waits for more than a second, and that nothing else ever sees it."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from ferrule_cli.waiting import Waiting
from tests.client.fake_server import FakeServer


class Screen:
    """A command on a terminal of its own; ``shown`` is what was written on it."""

    def __init__(self, *arguments: str) -> None:
        self._side, theirs = pty.openpty()
        command = [sys.executable, "-m", "ferrule_cli.app", *arguments]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FERRULE_")}
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environment | {"TERM": "dumb"}
        )
        os.close(theirs)
        self.shown = ""

    def read_until(self, part: str) -> None:
        """Read until a text is on the screen."""
        while part not in self.shown:
            self.shown += os.read(self._side, 4096).decode()  # the end of the terminal is an OSError

    def end(self) -> int:
        """Read the rest and return the exit code."""
        with contextlib.suppress(OSError):
            self.read_until("there is no such text")
        os.close(self._side)
        return self.process.wait(20)


def _left(shown: str) -> str:
    """Return what is left of a line that was drawn over."""
    return shown.rpartition("\x1b[K")[2]


@pytest.mark.parametrize("arguments", [("generate", "--max-tokens", "6", "the"), ("generate", "--json", "the")])
def test_a_server_that_loads_is_waited_for_with_its_stage(fake: FakeServer, arguments: tuple[str, ...]) -> None:
    """As a bar with a share; when the server is ready the bar is gone and the command goes on."""
    fake.is_loading = True
    screen = Screen(*arguments, "--target", fake.target)
    screen.read_until("waiting: reading weights 52 % [==========          ] ")
    fake.is_loading = False
    assert screen.end() == 0
    assert _left(screen.shown).lstrip().startswith(("quick", "{"))


@pytest.mark.parametrize("command", [("caches",), ("metrics",), ("admin", "warmup"), ("admin", "drain")])
def test_every_command_that_needs_a_model_waits_for_it(fake: FakeServer, command: tuple[str, ...]) -> None:
    """And if it takes too long, says in one line what it waited for."""
    fake.is_loading = True
    screen = Screen(*command, "--target", fake.target, "--timeout", "1.5")
    assert screen.end() == 1
    assert "waiting: reading weights 52 % [" in screen.shown
    assert _left(screen.shown) == "error: the server is starting: reading weights (STARTING)\r\n"


def test_a_load_shows_how_far_it_is(target: str) -> None:
    """As a share of its time; the table takes the place of the bar."""
    screen = Screen("bench", target, "--concurrency", "2", "--seconds", "60", "--warm-up", "0")
    screen.read_until("requests under way ")
    screen.process.send_signal(signal.SIGINT)
    assert screen.end() == 130
    assert "2 at once" in _left(screen.shown)


def test_without_a_terminal_nothing_is_shown(fake: FakeServer) -> None:
    """Standard error of a script has errors alone."""
    fake.is_loading = True
    command = [sys.executable, "-m", "ferrule_cli.app", "caches", "--target", fake.target, "--timeout", "1.5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
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
