"""TLS between Envoy and servers, as docs/scaling.md shows it; tests/docker has that of clients."""

from __future__ import annotations

import hashlib
import re
import socket
import time
from pathlib import Path
from typing import Any

import yaml

from ferrule import Client, greedy
from tests.api.certificates import Authority
from tests.chaos.server_process import ServerProcess
from tools.compose.envoy import CONFIG, ROOT, EnvoyProcess, free_ports

NAME = "ferrule.internal"
TOKEN = "x" * 40


def secured_config(folder: Path) -> Path:
    """Return the path of the shipped configuration with the page's piece in each cluster, and secrets in a folder."""
    text = (ROOT / "docs" / "scaling.md").read_text("utf-8")
    (piece,) = re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    upstream: dict[str, Any] = yaml.safe_load(piece.replace("/run/envoy", str(folder)))
    config = yaml.safe_load(CONFIG.read_text("utf-8"))
    for cluster in config["static_resources"]["clusters"]:
        if cluster["name"] != "admin":
            cluster.update(upstream)
    path = folder / "secured.yaml"
    path.write_text(yaml.safe_dump(config), "utf-8")
    return path


def write_tokens(path: Path) -> None:
    """Write the file of a server that knows one token."""
    path.write_text(f"{hashlib.sha256(TOKEN.encode()).hexdigest()} alice\n")
    path.chmod(0o600)


def principal_of(client: Client) -> str:
    """Return who a server takes the caller for, and see it serve him."""
    with client.prefill([1, 2], policy=greedy()) as cache:
        assert len(cache.step().tokens) == 1
    caller = client.capabilities().caller
    assert caller is not None
    return caller.principal


def test_envoy_trusts_the_servers_that_it_should(tmp_path: Path) -> None:
    """Behind it travels TLS; the token goes through, and is the server's to judge."""
    authority = Authority()
    identity = authority.client("server", dns=[NAME])
    for name, content in (("ca.pem", authority.cert), ("cert.pem", identity.cert), ("key.pem", identity.key)):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "key.pem").chmod(0o600)
    write_tokens(tmp_path / "tokens")
    files = [f"--tls-cert={tmp_path}/cert.pem", f"--tls-key={tmp_path}/key.pem", f"--token-file={tmp_path}/tokens"]
    server = ("--executor", "paged-reference", "--kv-memory", "1MiB", "--instance", "ferrule-a", *files)
    with ServerProcess(tmp_path / "server.log", *server) as running:
        ports = {"ferrule-a": running.port, "ferrule-b": free_ports(1)[0]}
        with EnvoyProcess(tmp_path, ports, secured_config(tmp_path)) as envoy:
            envoy.wait_for_healthy({running.port})
            with Client(envoy.target, token=TOKEN) as client:
                assert principal_of(client) == "alice"


def test_a_handshake_that_does_not_come_ends_the_connection(tmp_path: Path) -> None:
    """Strangers share 10 000 connections, so one that does not even speak TLS is closed soon."""
    authority = Authority()
    identity = authority.server()
    for name, content in (("cert.pem", identity.cert), ("key.pem", identity.key)):
        (tmp_path / name).write_bytes(content)
    deploy = ROOT / "deploy"
    secret = (deploy / "envoy.secret.yaml").read_text("utf-8").replace("/run/envoy", str(tmp_path))
    (tmp_path / "envoy.secret.yaml").write_text(secret)
    lines = CONFIG.read_text("utf-8").splitlines(keepends=True)
    (place,) = [number for number, line in enumerate(lines, 1) if "# TLS for clients" in line]
    lines.insert(place, (deploy / "envoy.tls.yaml").read_text("utf-8").replace("/etc/envoy", str(tmp_path)))
    path = tmp_path / "tls.yaml"
    path.write_text("node: {id: envoy, cluster: ferrule}\n" + "".join(lines))
    ports = dict(zip(("ferrule-a", "ferrule-b"), free_ports(2), strict=True))
    with EnvoyProcess(tmp_path, ports, path) as envoy, socket.create_connection(("127.0.0.1", envoy.port)) as silent:
        start = time.monotonic()
        silent.settimeout(20)
        assert silent.recv(1) == b""
        assert time.monotonic() - start < 15
