"""A real server with the paged reference, a fake one, and clients of both."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ferrule import Client
from ferrule_server.api.security.auth import TokenAccess
from ferrule_server.api.security.token_file import TokenFile
from ferrule_server.quotas import UNLIMITED
from tests.api.certificates import Authority, ServerFiles
from tests.api.harness import RunningServer
from tests.client.fake_server import FakeServer

TOKEN = "ferrule_of_alice"
TOKEN_OF_BOB = "ferrule_of_bob"
"""Of a principal that can hold three handles."""


@pytest.fixture(scope="package")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a real server in a process of its own."""
    folder: Path = tmp_path_factory.mktemp("server")
    address = f"unix:{folder}/ferrule.sock"
    command = [sys.executable, "-m", "ferrule_server", "--executor", "paged-reference", "--listen", address]
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--kv-memory", "1MiB", "--instance", "test"], stdout=subprocess.PIPE, stderr=log, text=True
        )
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready"), (folder / "server.log").read_text()
        yield address
        process.terminate()
        assert process.wait(20) == 0


@pytest.fixture
def client(target: str) -> Iterator[Client]:
    """A client of the real server; the test must leave no sequence behind."""
    with Client(target, timeout=20) as client:
        yield client
        assert list(client.list_caches()) == []
        assert client.status().free_blocks == client.capabilities().total_blocks


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    """A server that does as it is told."""
    with FakeServer() as server:
        yield server


@pytest.fixture
def fake_client(fake: FakeServer) -> Iterator[Client]:
    """A client of the fake server."""
    with Client(fake.target, timeout=20) as client:
        yield client


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away the variables that would change what a command does."""
    for name in [name for name in os.environ if name.startswith("FERRULE_") or name in ("COLUMNS", "LINES")]:
        monkeypatch.delenv(name)


@pytest.fixture
def target_variable(no_variables: None, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """Let commands find the real server by the environment."""
    monkeypatch.setenv("FERRULE_TARGET", target)


@pytest.fixture(scope="package")
def authority() -> Authority:
    """Signs the server and its clients."""
    return Authority()


@pytest.fixture(scope="package")
def secured(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[RunningServer]:
    """A server that requires certificates and tokens."""
    files = ServerFiles(tmp_path_factory.mktemp("secured"))
    files.write(authority.server(), authority.cert)
    path = files.folder / "tokens"
    lines = {TOKEN: "alice", TOKEN_OF_BOB: "bob handles=3"}
    path.write_text("".join(f"{hashlib.sha256(one.encode()).hexdigest()} {name}\n" for one, name in lines.items()))
    path.chmod(0o600)
    with RunningServer(access=TokenAccess(TokenFile(path, UNLIMITED)), tls=files.load()) as server:
        yield server


@pytest.fixture
def client_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_variables: None, secured: RunningServer, authority: Authority
) -> Path:
    """The files of a client of it; the environment names target, authority, certificate and token."""
    alice = authority.client("alice")
    for name, data in (("ca.pem", authority.cert), ("cert.pem", alice.cert), ("key.pem", alice.key)):
        (tmp_path / name).write_bytes(data)
    monkeypatch.setenv("FERRULE_TARGET", secured.address.target)
    monkeypatch.setenv("FERRULE_TLS_CA", str(tmp_path / "ca.pem"))
    monkeypatch.setenv("FERRULE_CLIENT_CERT", str(tmp_path / "cert.pem"))
    monkeypatch.setenv("FERRULE_CLIENT_KEY", str(tmp_path / "key.pem"))
    monkeypatch.setenv("FERRULE_TOKEN", f"{TOKEN}\n")
    return tmp_path
