"""What every run of tests has: Ctrl-C, a table of what was skipped, and one server with the bundled model."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import skips

MODEL = Path(__file__).resolve().parents[1] / "server" / "ferrule_server" / "demo_model" / "model.safetensors"


_SKIPS_FILE = pytest.StashKey[str]()

# On a busy machine an example may take longer than 200 ms, and making examples longer than a second.
hypothesis.settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy machine")


def pytest_configure(config: pytest.Config) -> None:
    """Take back signals that are ignored, since children inherit that.

    A shell starts what runs in the background without SIGINT, and ``nohup`` without SIGHUP, which does not end this
    run. Children do not inherit the variable that names the file of the skips: only this run writes to it.
    """
    config.stash[_SKIPS_FILE] = os.environ.pop(skips.VARIABLE, "")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector away while tests are collected, and from what is there when they run.

    It finds nothing to free among thousands of tests and all that they import.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was skipped and why; if a file is named for it, the table of all runs is made from that."""
    found = [skips.skip_of(report.nodeid, report.longrepr) for report in terminalreporter.getreports("skipped")]
    if path := config.stash[_SKIPS_FILE]:
        skips.keep(Path(path), found)
    elif found:
        terminalreporter.section("skipped, and why")
        for line in skips.table(found, left_out=config.option.markexpr):
            terminalreporter.line(line)


@pytest.fixture(scope="session")
def shipped_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server with the model that ships; it ends with 0."""
    if not MODEL.exists():
        pytest.skip("the model that ships is not built")
    process, address = _served(tmp_path_factory.mktemp("shipped"))
    with process:
        yield address
        process.terminate()
        assert process.wait(20) == 0


@pytest.fixture
def mortal_target(tmp_path: Path) -> Iterator[str]:
    """Address of such a server for one test, which may have it drain and end."""
    if not MODEL.exists():
        pytest.skip("the model that ships is not built")
    process, address = _served(tmp_path)
    with process:
        yield address
        process.terminate()


def _served(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """Return a server that is ready, and its address."""
    address = f"unix:{folder}/ferrule.sock"
    command = [sys.executable, "-m", "ferrule_cli.app", "serve", "--listen", address, "--kv-memory", "16MiB"]
    command += ["--drain-grace", "0s"]  # what a test left behind is not waited for
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("ready"), (folder / "log").read_text()
    return process, address
