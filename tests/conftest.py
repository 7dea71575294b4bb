"""One server with the model that ships, for every test that runs what the pages and examples say."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

MODEL = Path(__file__).resolve().parents[1] / "server" / "ferrule_server" / "demo_model" / "model.safetensors"


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
