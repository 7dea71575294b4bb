"""The demo, end to end, without a terminal and with one."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from ferrule import Client
from ferrule_cli.demo.story import Figures, _Story
from ferrule_cli.demo.view import Add, PlainView, PoolRow
from tests.client.fake_server import wait_for
from tests.terminal import Terminal

COMMAND = [sys.executable, "-m", "ferrule_cli.app", "demo"]
PAGED = ["--executor", "paged-reference", "--max-tokens", "20"]
MODEL = Path(__file__).resolve().parents[2] / "server" / "ferrule_server" / "demo_model" / "model.safetensors"


def servers_below(folder: str) -> list[str]:
    """Return the command lines of servers on a socket in that folder."""
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    return [line.decode() for line in lines if b"ferrule_server" in line and folder.encode() in line]


@pytest.fixture
def place() -> Iterator[Path]:
    """An empty folder for temporary files, whose path leaves room for that of a socket."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_demo_tells_the_whole_story_in_plain_text(place: Path) -> None:
    """No terminal: plain lines, no control codes, every part, nothing left behind, whatever a server would ask for."""
    environment = os.environ | {"TMPDIR": str(place), "FERRULE_TOKEN_FILE": "/nowhere"}
    done = subprocess.run([*COMMAND, *PAGED], capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    for part in ("1  Prefill", "2  Stream", "3  Fork", "4  Roll back", "5  Release", "Done"):
        assert f"== {part} ==" in done.stdout
    assert "branch 3  # # # # o o   4 shared + 2 own" in done.stdout
    assert "without sharing it would be 24" in done.stdout
    assert "branch 3 forgets 7 tokens" in done.stdout
    assert "pool      all 8191 blocks free" in done.stdout
    assert "ended with exit code 0" in done.stdout
    assert list(place.iterdir()) == []
    assert servers_below(str(place)) == []


def test_demo_prints_figures_for_scripts(tmp_path: Path) -> None:
    """JSON alone on standard output, the story on standard error; also if a socket in TMPDIR has too long a path."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    environment = os.environ | {"TMPDIR": str(long)}
    done = subprocess.run(
        [*COMMAND, *PAGED, "--json"], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    figures = json.loads(done.stdout)
    assert (figures["leaked_blocks"], figures["server_exit_code"]) == (0, 0)
    assert figures["peak_blocks"] == 12
    assert figures["prefill_tokens_per_s"] > 0
    assert set(figures["texts"]) == {"trunk", "branch 1", "branch 2", "branch 3", "branch 3, again"}
    assert len({*figures["texts"].values()}) == 5
    assert "== 3  Fork ==" in done.stderr


@pytest.mark.skipif(not MODEL.exists(), reason="the model that ships is not built")
def test_demo_speaks_python_with_the_model_that_ships() -> None:
    """Text, not numbers, within the promised time."""
    start = time.monotonic()
    done = subprocess.run([*COMMAND, "--max-tokens", "24"], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("  | def read_file(path):") == 6
    assert "\ufffd" not in done.stdout
    assert time.monotonic() - start < 60


class _SlowView(PlainView):
    """Takes 5 ms to show a piece of text."""

    @contextmanager
    def panels(self, titles: Sequence[str], beginnings: Sequence[str]) -> Iterator[Add]:
        """Show as the base class does, slowly."""
        with super().panels(titles, beginnings) as add:

            def add_slowly(place: int, piece: str) -> None:
                time.sleep(0.005)
                add(place, piece)

            yield add_slowly


def test_tokens_that_come_while_text_is_drawn_are_not_free(shipped_target: str) -> None:
    """The rate of one handle is that of the whole call, as a reader sees it."""
    figures = Figures()
    with Client(shipped_target) as client:
        _Story(client, _SlowView(io.StringIO()), figures, 24).tell()
    assert 0 < figures.decode_tokens_per_s <= 1 / 0.005


def test_failing_server_shows_its_last_words() -> None:
    """The log's tail, then one line; the exit code says it failed."""
    done = subprocess.run(
        [*COMMAND, "--model", "/nowhere/model"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    *tail, last = done.stderr.splitlines()
    assert any("/nowhere/model" in line for line in tail)
    assert last == "error: the server ended with exit code 2 (SERVER_ENDED)"
    assert "Fatal Python error" not in done.stderr


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)]
)
def test_interrupted_demo_ends_its_server(place: Path, number: signal.Signals, exit_code: int) -> None:
    """Ctrl-C, SIGTERM, a closed terminal and even SIGKILL take the server and its folder along."""
    environment = os.environ | {"TMPDIR": str(place)}
    command = [*COMMAND, "--executor", "paged-reference", "--max-tokens", "400"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert any("2  Stream" in line for line in process.stdout)
        process.send_signal(number)
        assert process.wait(20) == exit_code
    if number is signal.SIGKILL:
        wait_for(lambda: not servers_below(str(place)) and not list(place.iterdir()))
    assert servers_below(str(place)) == []
    assert list(place.iterdir()) == []


def test_closed_terminal_ends_the_demo(place: Path) -> None:
    """The terminal goes away under the panels: nothing stays behind."""
    environment = os.environ | {"TMPDIR": str(place), "TERM": "xterm-256color"}
    leader, follower = pty.openpty()
    command = [*COMMAND, "--executor", "paged-reference", "--max-tokens", "400"]
    own = ["setsid", "--ctty", *command]  # the terminal is its own, so that its end sends SIGHUP
    with subprocess.Popen(own, stdin=follower, stdout=follower, stderr=follower, env=environment) as process:
        os.close(follower)
        seen = b""
        while b"Stream" not in seen:
            seen += os.read(leader, 4096)
        os.close(leader)
        assert process.wait(20) != 0
    assert servers_below(str(place)) == []
    assert list(place.iterdir()) == []


def test_demo_draws_in_colour_on_a_terminal() -> None:
    """With a terminal there are panels, a picture in colour, and the same ending."""
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "50"}
    with Terminal([*COMMAND, *PAGED], environment) as terminal:
        assert terminal.end() == 0
    text = terminal.seen
    assert "▣" in text
    assert "╭─" in text
    assert "\x1b[3" in text
    assert "done" in text


def test_plain_view_survives_narrow_encodings(tmp_path: Path) -> None:
    """A log file in ASCII gets question marks, not an exception."""
    path = tmp_path / "log"
    with path.open("w", encoding="ascii") as out:
        view = PlainView(out)
        view.code("naïve")
        view.pool([PoolRow("trunk", tuple(range(99)), (1,) * 99)], 1, 100)
    assert "na?ve" in path.read_text()
    assert path.read_text().count("o") < 60
