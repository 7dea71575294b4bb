"""TLS on both sides of Envoy, by the very pieces that docs/scaling.md shows."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ferrule_client import AuthError, Client, TlsConfig, UnavailableError, greedy
from tests.api.certificates import Authority
from tests.chaos.server_process import ServerProcess
from tests.stack.envoy import CONFIG, ROOT, EnvoyProcess, free_ports

NAME = "ferrule.internal"
TOKEN = "x" * 40


def pieces(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the page puts beside the filters and into the clusters, with secrets in a folder."""
    text = (ROOT / "docs" / "scaling.md").read_text("utf-8")
    found = re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    downstream, upstream = (yaml.safe_load(one.replace("/run/secrets", str(folder))) for one in found)
    return downstream, upstream


def secured_config(folder: Path) -> Path:
    """Return the path of the shipped configuration with both pieces."""
    downstream, upstream = pieces(folder)
    config = yaml.safe_load(CONFIG.read_text("utf-8"))
    config["static_resources"]["listeners"][0]["filter_chains"][0].update(downstream)
    for cluster in config["static_resources"]["clusters"]:
        if cluster["name"] != "admin":
            cluster.update(upstream)
    path = folder / "secured.yaml"
    path.write_text(yaml.safe_dump(config), "utf-8")
    return path


def test_tokens_and_tls_reach_through_envoy(tmp_path: Path) -> None:
    """The token is the server's to judge; who does not speak TLS, or trusts another authority, gets nowhere."""
    authority = Authority()
    identity = authority.client("server", dns=[NAME])
    for name, content in (("ca.pem", authority.cert), ("cert.pem", identity.cert), ("key.pem", identity.key)):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "key.pem").chmod(0o600)
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{hashlib.sha256(TOKEN.encode()).hexdigest()} alice\n")
    tokens.chmod(0o600)
    files = [f"--tls-cert={tmp_path}/cert.pem", f"--tls-key={tmp_path}/key.pem", f"--token-file={tokens}"]
    server = ("--executor", "paged-reference", "--kv-memory", "1MiB", "--instance", "ferrule-a", *files)
    with ServerProcess(tmp_path / "server.log", *server) as running:
        ports = {"ferrule-a": running.port, "ferrule-b": free_ports(1)[0]}
        with EnvoyProcess(tmp_path, ports, secured_config(tmp_path)) as envoy:
            envoy.wait_for_healthy({running.port})
            tls = TlsConfig(root_certificates=authority.cert, server_name=NAME)
            with Client.connect(envoy.target, token=TOKEN, tls=tls) as client:
                caller = client.capabilities().caller
                assert caller is not None
                assert caller.principal == "alice"
                with client.prefill([1, 2], policy=greedy()) as cache:
                    assert cache.decode(3, policy=greedy()).token is not None
            with Client.connect(envoy.target, token="other", tls=tls) as client, pytest.raises(AuthError):
                client.prefill([1])
            strange = TlsConfig(root_certificates=Authority().cert, server_name=NAME)
            for options in ({"tls": strange}, {}):
                client = Client.connect(envoy.target, max_retries=0, timeout=5, **options)  # type: ignore[arg-type]
                with client, pytest.raises(UnavailableError):
                    client.prefill([1])
