"""TLS on both sides of Envoy: to clients by deploy/compose.scale-tls.yml, to servers as docs/scaling.md shows it."""

from __future__ import annotations

import hashlib
import os
import re
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ferrule import Client, greedy
from ferrule.errors import AuthError, UnavailableError
from ferrule.types import TlsConfig
from tests.api.certificates import Authority
from tests.chaos.server_process import ServerProcess, wait_for
from tests.tools import tool
from tools.compose.envoy import CONFIG, ROOT, EnvoyProcess, free_ports
from tools.compose.stack import Stack

NAME = "ferrule.internal"
TOKEN = "x" * 40
SETTINGS = {"FERRULE_EXECUTOR": "paged-reference", "FERRULE_MODEL": None}


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


def test_two_servers_are_published_with_tls_and_tokens(tmp_path: Path) -> None:
    """Who does not speak TLS, trusts another authority or has no token gets nowhere; a renewed one holds at once."""
    secrets, own, stack_folder = tmp_path / "secrets", tmp_path / "own", tmp_path / "stack"
    for folder in (secrets, stack_folder):
        folder.mkdir()
    write_tokens(secrets / "tokens")
    make_certificates(own, "authority")
    make_certificates(own, "server", NAME)
    places = {"SECRETS": str(secrets), "ENVOY_SECRETS": str(own)}
    overlay = ROOT / "deploy" / "compose.scale-tls.yml"
    stack = Stack(
        stack_folder, ("envoy",), profiles=("scale",), on_top=[overlay], environment=places, settings=SETTINGS
    )
    with stack:
        target = stack.address("envoy", 50051)
        certificates = (own / "ca.pem").read_bytes()
        tls = TlsConfig(root_certificates=certificates, server_name=NAME)
        with Client(target, token=TOKEN, tls=tls, timeout=20) as client:
            wait_for("a healthy server", lambda: _is_served(client), 20)
            assert principal_of(client) == "alice"
        with Client(target, token="other", tls=tls) as client, pytest.raises(AuthError):
            client.prefill([1])
        strange = TlsConfig(root_certificates=Authority().cert, server_name=NAME)
        for options in ({"tls": strange}, {}):
            client = Client(target, max_retries=0, timeout=5, **options)  # type: ignore[arg-type]
            with client, pytest.raises(UnavailableError):
                client.prefill([1])
        make_certificates(own, "renew", NAME)
        new = ssl.PEM_cert_to_DER_cert((own / "cert.pem").read_text())
        wait_for("the new certificate", lambda: _served_certificate(target) == new, 10)
        with Client(target, token=TOKEN, tls=tls) as client:
            assert principal_of(client) == "alice"
        config = stack_folder / "envoy" / "etc" / "envoy" / "envoy.yaml"
        config.write_text(config.read_text().replace("# TLS for clients", "# ours"))
        refused = subprocess.run(stack.command("envoy"), capture_output=True, text=True, timeout=20, check=False)
        assert (refused.returncode, refused.stdout[:6]) == (2, "error:"), "nothing is published in plain text"


def make_certificates(secrets: Path, *arguments: str) -> None:
    """Run the script as for Envoy, whose user in the image has the id 101."""
    tool("openssl")
    places = {"CERTIFICATES": str(secrets.parent / "certificates"), "SECRETS": str(secrets), "SERVER_UID": "101"}
    script = str(ROOT / "deploy" / "make_certificates.sh")
    subprocess.run(["sh", script, *arguments], env=os.environ | places, capture_output=True, timeout=60, check=True)
    if secrets.exists() and os.getuid() == 0:
        assert {path.stat().st_uid for path in (secrets, *secrets.iterdir())} == {101}


def _is_served(client: Client) -> bool:
    try:
        client.status()
    except UnavailableError:
        return False
    return True


def _served_certificate(target: str) -> bytes:
    host, port = target.split(":")
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((host, int(port)), timeout=5))
