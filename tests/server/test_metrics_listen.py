"""``--metrics-listen`` of a server process: its address, its life, and what it says of the risk."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ferrule import Client
from ferrule_server.addresses import ListenAddress, parse_listen
from tests.api.web.plain_http import get, listening

REFERENCE = ("--executor", "paged-reference", "--kv-memory", "4MiB")


@contextmanager
def _running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start a server; it is gone afterwards."""
    command = [sys.executable, "-W", "error", "-m", "ferrule_server", "--listen", "127.0.0.1:0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _ready(process: subprocess.Popen[str]) -> dict[str, str]:
    """Return the values of the ready line."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("ready "), process.communicate(timeout=10)
    return dict(part.split("=", 1) for part in shlex.split(line)[1:])


def _address_in_log(process: subprocess.Popen[str]) -> ListenAddress:
    """Return the address that the log tells before the model is loaded."""
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"metrics address=(\S+) ui=on", line):
            return parse_listen(found[1])
    raise AssertionError("no line tells the address")


def test_metrics_and_page_are_served_from_start_to_end() -> None:
    """Before the model is loaded, on the port that the log and the line 'ready' tell; and while the server drains."""
    with _running("--metrics-listen", "[::1]:0", "--kv-memory", "4MiB", "--drain-grace", "20s") as process:
        address = _address_in_log(process)
        assert b'ferrule_state{state="starting"} 1.0' in get(address, "/metrics").body
        assert get(address, "/ui").status == 200
        values = _ready(process)
        assert parse_listen(values["metrics_listen"]) == address
        with Client(values["listen"]) as client, client.prefill([1, 2, 3]) as cache:
            assert b"ferrule_sequences 1.0" in get(address, "/metrics").body
            process.send_signal(signal.SIGTERM)
            while b'ferrule_state{state="draining"} 1.0' not in get(address, "/metrics").body:
                cache.info()
        _, err = process.communicate(timeout=20)
        assert process.returncode == 0, err
        assert "Traceback" not in err
        with pytest.raises(ConnectionRefusedError):
            get(address, "/metrics")


def test_an_address_in_use_ends_the_start_before_anything_is_loaded() -> None:
    """Exit code 2, the flag is named, and no socket of the server's own is left."""
    with listening() as other, _running(*REFERENCE, "--metrics-listen", other.address.target) as process:
        out, err = process.communicate(timeout=20)
    assert process.returncode == 2
    assert f"--metrics-listen: cannot listen on {other.address.target}" in err
    assert "another server uses it" in err
    assert "loading" not in err
    assert out == ""


def test_what_other_machines_can_read_is_said_once() -> None:
    """Metrics without a page unless it is asked for; both need no --insecure, which is about using the server."""
    with _running(*REFERENCE, "--metrics-listen", "0.0.0.0:0") as process:
        port = parse_listen(_ready(process)["metrics_listen"]).port
        assert get(ListenAddress("127.0.0.1", port), "/metrics", "Host: ferrule:9464").status == 200
        assert get(ListenAddress("127.0.0.1", port), "/ui").status == 404
        process.terminate()
        _, err = process.communicate(timeout=20)
    assert err.count("insecure: everybody who can reach 0.0.0.0:") == 1
    assert f"0.0.0.0:{port} can read the metrics\n" in err
    with _running(*REFERENCE, "--metrics-listen", "0.0.0.0:0", "--ui", "on") as process:
        port = parse_listen(_ready(process)["metrics_listen"]).port
        assert get(ListenAddress("127.0.0.1", port), "/ui").status == 200
        process.terminate()
        _, err = process.communicate(timeout=20)
    assert "can read the metrics, and at /ui who uses the server and how" in err


def test_without_the_flag_nothing_listens_and_nothing_of_it_is_imported() -> None:
    """It costs nothing where nobody asks for it."""
    code = (
        "import sys; from ferrule_server.__main__ import main\n"
        "import ferrule_server.__main__ as server; server._say_ready = lambda *_: (\n"
        "    print([name for name in sys.modules if 'api.web' in name or 'prometheus' in name], flush=True),\n"
        "    __import__('os')._exit(0))\n"
        "main(['--executor', 'paged-reference', '--listen', '127.0.0.1:0'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
