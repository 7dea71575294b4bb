"""``ferrule serve --model org/name`` as a process, against a stand-in of the hub."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ferrule import Client, sample
from ferrule.errors import UnavailableError
from tests.model.hub_stand_in import Faults, Hub, serving

DEMO = Path(__file__).resolve().parents[2] / "server" / "ferrule_server" / "demo_model"
NAME = "tiny/model"
SETTINGS = ("--listen", "127.0.0.1:0", "--kv-memory", "16MiB", "--drain-grace", "0s", "--dtype", "float32")


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A stand-in that has the model that ships."""
    if not (DEMO / "model.safetensors").exists():
        pytest.skip("the model that ships is not built")
    with serving(tiny__model=DEMO) as hub:
        yield hub


@contextmanager
def _start(hub: Hub, cache: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Give a process that is ended whatever happens."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("FERRULE_", "HF_"))}
    environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(cache)}
    command = [sys.executable, "-W", "error", "-m", "ferrule_server", *SETTINGS, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _run(hub: Hub, cache: Path, *arguments: str) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a server that must end by itself."""
    with _start(hub, cache, *arguments) as process:
        out, err = process.communicate(timeout=300)
        return process.returncode, out, err


def _said(hub: Hub, cache: Path, *arguments: str) -> tuple[dict[str, str], list[int]]:
    """Return the ready line of a server, and what it draws behind a prompt."""
    with _start(hub, cache, *arguments) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready "), process.communicate(timeout=10)
        values = dict(part.split("=", 1) for part in line.split()[1:])
        with Client(values["listen"]) as client:
            tokens = client.generate("def read_file(path):", 24, policy=sample(seed=1)).read().tokens
        process.terminate()
        assert process.wait(20) == 0
    return values, list(tokens)


def test_a_model_by_name_is_the_model_of_the_folder(hub: Hub, tmp_path: Path) -> None:
    """The same tokens; fetched with the first start, and the second needs no network."""
    ready, by_folder = _said(hub, tmp_path, "--model", str(DEMO))
    assert "commit" not in ready
    ready, by_name = _said(hub, tmp_path, "--model", NAME)
    assert (ready["model"], ready["commit"]) == (NAME, hub.commit(NAME))
    assert by_name == by_folder
    hub.seen.clear()
    for more in ((), ("--revision", hub.commit(NAME))):
        code, out, err = _run(hub, tmp_path, "--model", NAME, *more, "--offline", "--download-only")
        assert (code, Path(out.strip()).name) == (0, hub.commit(NAME)), err
    assert hub.seen == []


def test_ctrl_c_ends_a_download_at_once_and_does_no_harm(hub: Hub, tmp_path: Path) -> None:
    """The status says what is being done meanwhile."""
    hub.faults = Faults(pause_s=0.05)
    address = f"unix:{tmp_path}/f.sock"
    with _start(hub, tmp_path, "--model", NAME, "--listen", address) as process, Client(address) as client:
        while _stage(client) != ("downloading", "starting") or hub.sent_bytes < 3 << 20:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        assert process.returncode == 130
        assert time.monotonic() - begin < 10
    hub.faults = Faults()
    code, out, err = _run(hub, tmp_path, "--model", NAME, "--download-only")
    assert code == 0, err
    assert (Path(out.strip()) / "model.safetensors").read_bytes() == (DEMO / "model.safetensors").read_bytes()


def _stage(client: Client) -> tuple[str, str]:
    try:
        status = client.status()
    except UnavailableError:
        return "", ""
    return status.load_stage, status.state


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "no/body"), "ferrule serve: --model no/body: no such folder, and http"),
        (("--model", NAME, "--max-context", "4096"), "ferrule serve: --max-context 4096 is beyond the"),
    ],
)
def test_what_cannot_be_fetched_ends_with_2(hub: Hub, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    """One line, no traceback, and no weights that are of no use."""
    code, out, err = _run(hub, tmp_path, *arguments, "--log-level", "error", "--download-only")
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
    assert hub.sent_bytes == 0


def test_other_models_never_load_the_library_of_the_hub() -> None:
    """A start without the hub is as quick as it was, and asks nobody anything."""
    script = "import sys\nfrom ferrule_server import loading\nfrom ferrule_server.config import ServerConfig\n"
    script += f"loading.download(ServerConfig(model={str(DEMO)!r}), print)\nassert 'huggingface_hub' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
