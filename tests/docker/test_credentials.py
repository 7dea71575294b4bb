"""The files on top of docker-compose.yml in real containers: who gets in, and what is published."""

from __future__ import annotations

import ssl
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from ferrule import Client, FerruleError
from ferrule.errors import AuthError
from ferrule.types import TlsConfig
from tests.chaos.server_process import wait_for
from tests.docker.engine import Project
from tests.tools import tool
from tools.compose.compose_file import ROOT

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]
NAME = "server.example.org"


def run_script(places: Mapping[str, object], *words: str) -> None:
    """Run deploy/make_certificates.sh with variables."""
    command = ["env", *(f"{name}={value}" for name, value in places.items())]
    command += ["sh", str(ROOT / "deploy" / "make_certificates.sh"), *words]
    subprocess.run(command, check=True, timeout=60, stdout=subprocess.DEVNULL)


class Secrets:
    """Folders with certificates and tokens, as deploy/make_certificates.sh and ``ferrule token`` make them."""

    def __init__(self, folder: Path) -> None:
        tool("openssl")
        self.folder = folder
        self.certificates, self.ours, self.envoys = folder / "certificates", folder / "secrets", folder / "envoy"
        self.ours.mkdir()
        self.make("authority")
        self.make("server", NAME)
        self.make("client", "ops", "alice")
        self.make("server", NAME, secrets=self.envoys, uid=101)
        self.ops, self.alice = self._token("ops", "--admin"), self._token("alice")
        for path in (self.ours, *self.ours.iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o644)

    def make(self, *words: str, secrets: Path | None = None, uid: int = 10001) -> None:
        """Run the script."""
        run_script({"CERTIFICATES": self.certificates, "SECRETS": secrets or self.ours, "SERVER_UID": uid}, *words)

    def _token(self, name: str, *options: str) -> str:
        command = [sys.executable, "-m", "ferrule_cli.app", "token", name, *options]
        command += ["--append", str(self.ours / "tokens")]
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True).stdout.strip()

    @property
    def environment(self) -> dict[str, str]:
        """Variables of compose."""
        return {"SECRETS": str(self.ours), "ENVOY_SECRETS": str(self.envoys), "SERVER_NAME": NAME}

    def tls(self, principal: str | None = None) -> TlsConfig:
        """Return what a client needs, with a certificate of its own or without."""
        authority = (self.ours / "ca.pem").read_bytes()
        if principal is None:
            return TlsConfig(authority, server_name=NAME)
        key, certificate = (self.certificates / f"{principal}{end}.pem" for end in ("-key", ""))
        return TlsConfig(authority, key.read_bytes(), certificate.read_bytes(), server_name=NAME)


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    """For all tests of this file."""
    return Secrets(tmp_path_factory.mktemp("secrets"))


def test_tokens_on_this_machine(secrets: Secrets, tmp_path: Path) -> None:
    """In plain text, published on this machine; a token gives the role."""
    with Project(tmp_path, on_top=["tokens"], environment=secrets.environment) as project:
        with Client(project.target, token=secrets.ops) as client:
            assert _principal(client) == ("ops", True)
        with Client(project.target) as client, pytest.raises(AuthError):
            client.prefill([1])


def test_tokens_over_tls(secrets: Secrets, tmp_path: Path) -> None:
    """Published everywhere; nobody gets in without TLS and a token, and the health check is content."""
    with Project(tmp_path, on_top=["secured"], environment=secrets.environment) as project:
        with Client(project.target, tls=secrets.tls(), token=secrets.alice) as client:
            assert _principal(client) == ("alice", False)
        with Client(project.target, tls=secrets.tls()) as client, pytest.raises(AuthError):
            client.prefill([1])
        _refused(project.target)
        ports = project.inspect("ferrule")["NetworkSettings"]["Ports"]["50051/tcp"]
        assert {port["HostIp"] for port in ports} <= {"0.0.0.0", "::"}
        assert project.stop("ferrule") == 0


def test_certificates_of_clients(secrets: Secrets, tmp_path: Path) -> None:
    """By name, ``ops`` with the role, nobody without one."""
    with Project(tmp_path, on_top=["mtls"], environment=secrets.environment) as project:
        for name, is_admin in (("alice", False), ("ops", True)):
            with Client(project.target, tls=secrets.tls(name)) as client:
                assert _principal(client) == (name, is_admin)
        _refused(project.target, secrets.tls())


def test_certificates_are_replaced_under_a_client_that_goes_on(secrets: Secrets, tmp_path: Path) -> None:
    """The old connection loses nothing, new ones get the new certificate; then the authority of clients changes."""
    with Project(tmp_path, on_top=["mtls"], environment=secrets.environment) as project:
        with Client(project.target, tls=secrets.tls("alice")) as client, client.prefill([1, 2, 3]) as cache:
            secrets.make("renew", NAME)
            with Client(project.target, tls=secrets.tls("alice")) as another:
                assert _principal(another) == ("alice", False)
            cache.append([4])
        authorities, ours = secrets.ours / "client-ca.pem", (secrets.certificates / "ca.pem").read_text()
        other = secrets.folder / "others"
        places = {"CERTIFICATES": other, "SECRETS": other / "unused"}
        for words in (["authority"], ["client", "carol"]):
            run_script(places, *words)
        carol = TlsConfig(
            (secrets.ours / "ca.pem").read_bytes(),
            (other / "carol-key.pem").read_bytes(),
            (other / "carol.pem").read_bytes(),
            server_name=NAME,
        )
        _refused(project.target, carol)
        for text in (ours + (other / "ca.pem").read_text(), ours):
            beside = authorities.with_suffix(".new")
            beside.write_text(text)
            beside.rename(authorities)
            if text != ours:
                with Client(project.target, tls=carol) as client:
                    wait_for("the authority of carol", lambda: _principal(client)[0] == "carol", 10)
        _refused(project.target, carol)
        with Client(project.target, tls=secrets.tls("alice")) as client:
            assert _principal(client) == ("alice", False)


def test_two_servers_behind_envoy_over_tls(secrets: Secrets, tmp_path: Path) -> None:
    """TLS ends at Envoy, tokens at the servers; a renewed certificate holds without a restart."""
    with Project(
        tmp_path, "envoy", profiles=("scale",), on_top=["secured"], environment=secrets.environment
    ) as project:
        with Client(project.target, tls=secrets.tls(), token=secrets.alice, timeout=20) as client:
            assert _principal(client) == ("alice", False)
            caches = [client.prefill([number]) for number in range(20)]
            assert {cache.handle.instance for cache in caches} == {"ferrule-a", "ferrule-b"}
            client.release(caches)
        with Client(project.target, tls=secrets.tls(), token="other") as client, pytest.raises(AuthError):
            client.prefill([1])
        _refused(project.target)
        secrets.make("renew", NAME, secrets=secrets.envoys, uid=101)
        new = ssl.PEM_cert_to_DER_cert((secrets.envoys / "cert.pem").read_text())
        wait_for("the new certificate", lambda: _served_certificate(project.port) == new, 10)


def _served_certificate(port: int) -> bytes:
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("127.0.0.1", port), timeout=5))


def _principal(client: Client) -> tuple[str, bool]:
    caller = client.capabilities().caller
    assert caller is not None
    return caller.principal, caller.is_admin


def _refused(target: str, tls: TlsConfig | None = None) -> None:
    with Client(target, tls=tls, timeout=5, max_retries=0) as client, pytest.raises(FerruleError):
        client.prefill([1])
