"""``--metrics-listen`` of a server process: its address, its life, and what it says of the risk."""

from __future__ import annotations

import contextlib
import re
import shlex
import signal
import subprocess
import sys

import pytest

from ferrule import Client
from ferrule_server.addresses import ListenAddress, parse_listen
from tests.api.web.plain_http import get, listening
from tests.server.test_main import REFERENCE, _command, _end, _environment, _run, _running

LISTEN = ("--listen", "127.0.0.1:0", "--metrics-listen")


def _address_in_log(process: subprocess.Popen[str]) -> ListenAddress:
    """Return the address that the log tells before the model is loaded."""
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"metrics address=(\S+) ui=on", line):
            return parse_listen(found[1])
    raise AssertionError("no line tells the address")


def test_metrics_and_page_are_served_from_start_to_end() -> None:
    """Before the model is loaded, on the port that the log and the line 'ready' tell; and while the server drains."""
    command = _command(*LISTEN, "[::1]:0", "--kv-memory", "4MiB", "--drain-grace", "20s")
    with (
        subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=_environment()) as process,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(process.kill)
        address = _address_in_log(process)
        assert b'ferrule_state{state="starting"} 1.0' in get(address, "/metrics").body
        assert get(address, "/ui").status == 200
        assert process.stdout is not None
        values = dict(part.split("=", 1) for part in shlex.split(process.stdout.readline())[1:])
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
    with listening() as other:
        done = _run(*REFERENCE, *LISTEN, other.address.target)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--metrics-listen: cannot listen on {other.address.target}" in done.stderr
    assert "loading" not in done.stderr


def test_what_other_machines_can_read_is_said_once() -> None:
    """Metrics without a page unless it is asked for; both need no --insecure, which is about using the server."""
    for more, page in (((), 404), (("--ui", "on"), 200)):
        with _running(*REFERENCE, *LISTEN, "0.0.0.0:0", *more) as (process, values):
            port = parse_listen(values["metrics_listen"]).port
            assert get(ListenAddress("127.0.0.1", port), "/metrics", "Host: ferrule:9464").status == 200
            assert get(ListenAddress("127.0.0.1", port), "/ui").status == page
            _, err = _end(process)
        assert err.count("insecure: everybody who can reach 0.0.0.0:") == 1
        assert ("and at /ui" in err) is (page == 200)


def test_without_the_flag_nothing_listens_and_nothing_of_it_is_imported() -> None:
    """It costs nothing where nobody asks for it."""
    code = (
        "import sys; from ferrule_server.__main__ import main\n"
        "from ferrule_server import console; console.say_ready = lambda *_: (\n"
        "    print([name for name in sys.modules if 'api.web' in name or 'prometheus' in name], flush=True),\n"
        "    __import__('os')._exit(0))\n"
        "main(['--executor', 'paged-reference', '--listen', '127.0.0.1:0'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "[]\n"
