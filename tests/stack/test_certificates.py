"""Credentials in the compose stack: certificates from the script, tokens from the command, and their replacement."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ferrule import Client, FerruleError
from ferrule.types import Append, TlsConfig
from tests.tools import tool
from tools.compose.compose_file import ROOT
from tools.compose.stack import Stack

SCRIPT = ROOT / "deploy" / "make_certificates.sh"
AT_ONCE = {"FERRULE_EXECUTOR": "paged-reference", "FERRULE_MODEL": None}
"""No weights are read: what is tested is who gets in."""


@dataclasses.dataclass(frozen=True, slots=True)
class Folders:
    """Where the script writes.

    Attributes:
        certificates: Of the authority and of clients.
        secrets: Of the server: what compose mounts.
    """

    certificates: Path
    secrets: Path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the script and return what came of it."""
        tool("openssl")
        variables = {"CERTIFICATES": str(self.certificates), "SECRETS": str(self.secrets)}
        command = ["sh", str(SCRIPT), *arguments]
        environment = os.environ | variables
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    def made(self, *arguments: str) -> str:
        """Run the script, which must do it, and return what it prints."""
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def identity(self, principal: str) -> TlsConfig:
        """Return what a client needs."""
        key = (self.certificates / f"{principal}-key.pem").read_bytes()
        certificate = (self.certificates / f"{principal}.pem").read_bytes()
        return TlsConfig((self.secrets / "ca.pem").read_bytes(), key, certificate)


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    """Two that do not exist yet."""
    return Folders(tmp_path / "certificates", tmp_path / "secrets")


@pytest.fixture
def filled(folders: Folders) -> Folders:
    """With an authority, a server and two clients."""
    folders.made("authority")
    folders.made("server", "server.example.org", "10.1.2.3")
    folders.made("client", "ops", "alice")
    return folders


def stack_on(tmp_path: Path, name: str, folders: Folders) -> Stack:
    """Return the plain service under one of the files on top."""
    path = ROOT / "deploy" / f"compose.{name}.yml"
    folder = tmp_path / "stack"
    folder.mkdir()
    return Stack(folder, on_top=[path], environment={"SECRETS": str(folders.secrets)}, settings=AT_ONCE)


def served_certificate(address: str, folders: Folders, principal: str) -> bytes:
    """Return the certificate that a new connection gets to see, in DER."""
    context = ssl.create_default_context(cafile=str(folders.secrets / "ca.pem"))
    context.load_cert_chain(folders.certificates / f"{principal}.pem", folders.certificates / f"{principal}-key.pem")
    context.set_alpn_protocols(["h2"])
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), 10) as raw, context.wrap_socket(raw, server_hostname=host) as tls:
        certificate = tls.getpeercert(binary_form=True)
    assert certificate is not None
    return certificate


def test_keys_are_never_overwritten_nor_open_to_others(filled: Folders) -> None:
    """But for those of the server by ``renew``, which is asked for by name."""
    for folder in (filled.certificates, filled.secrets):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for path in folder.iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
            assert path.stat().st_uid == (10001 if os.getuid() == 0 and folder == filled.secrets else os.getuid())
    before = {path: path.read_bytes() for folder in (filled.certificates, filled.secrets) for path in folder.iterdir()}
    for arguments in (("authority",), ("server", "localhost"), ("client", "alice"), ("client", "bob", "ops")):
        refused = filled.run(*arguments)
        assert refused.returncode == 2
        assert "it is left as it is" in refused.stderr
    assert all(path.read_bytes() == content for path, content in before.items())
    filled.made("renew", "server.example.org")
    changed = {path.name for path, content in before.items() if path.read_bytes() != content}
    assert changed == {"cert.pem", "key.pem", "probe.pem", "probe-key.pem"}


def test_what_others_do_not_trust_is_not_put_in_place(filled: Folders, tmp_path: Path) -> None:
    """A new authority comes first to those who check: with the old one alone the health check would fail."""
    other = Folders(tmp_path / "others", filled.secrets)
    other.made("authority")
    before = {path: path.read_bytes() for path in filled.secrets.iterdir()}
    for name in ("ca.pem", "client-ca.pem"):
        refused = other.run("renew", "localhost")
        assert refused.returncode == 2
        assert f"{name} does not trust" in refused.stderr
        assert {path: path.read_bytes() for path in filled.secrets.iterdir()} == before
        path = filled.secrets / name
        _replace(path, path.read_text() + (other.certificates / "ca.pem").read_text())
        before[path] = path.read_bytes()
    other.made("renew", "localhost")


def test_a_long_name_is_only_an_alternative_one(filled: Folders) -> None:
    """The common name has room for 64 characters, a host name may be longer."""
    long = f"{'a' * 40}.{'b' * 40}.example.org"
    assert f"DNS:{long}" in filled.made("renew", long)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_script_that_is_stopped_leaves_no_key_behind(folders: Folders, tmp_path: Path, name: str) -> None:
    """Its working folder goes with it."""
    programs, work = tmp_path / "bin", tmp_path / "work"
    programs.mkdir()
    work.mkdir()
    (programs / "openssl").write_text("#!/bin/sh\nexec sleep 30\n")
    (programs / "openssl").chmod(0o755)
    variables = {"PATH": f"{programs}:{os.environ['PATH']}", "TMPDIR": str(work)}
    places = {"CERTIFICATES": str(folders.certificates), "SECRETS": str(folders.secrets)}
    process = subprocess.Popen(
        ["sh", str(SCRIPT), "authority"], env=os.environ | variables | places, start_new_session=True
    )
    while not list(work.glob("*/output")):
        time.sleep(0.01)
    os.killpg(process.pid, getattr(signal, name))
    assert process.wait(10) != 0
    assert list(work.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ((), "make_certificates.sh authority"),
        (("nonsense",), "make_certificates.sh authority"),
        (("server", "localhost"), "first: "),
        (("client", "alice"), "first: "),
    ],
)
def test_the_script_says_what_to_do_first(folders: Folders, arguments: tuple[str, ...], hint: str) -> None:
    """And makes nothing."""
    refused = folders.run(*arguments)
    assert refused.returncode == 2
    assert hint in refused.stderr
    assert not folders.secrets.exists()


@pytest.mark.parametrize(
    ("action", "name"),
    [
        *(("client", name) for name in ("a b", "../x", "", "x\ny", "a/b", ".hidden", "ca", "x$(id)")),
        *(("server", name) for name in ("a b", "", "a,b", "x\ny", "DNS:a\n[b]", "a;b")),
    ],
)
def test_a_name_that_is_none_makes_no_file(folders: Folders, action: str, name: str) -> None:
    """Nor does it leave the folder, or write into openssl's configuration."""
    folders.made("authority")
    refused = folders.run(action, name)
    assert refused.returncode == 2, refused.stdout
    assert {path.name for path in folders.certificates.iterdir()} == {"ca.pem", "ca-key.pem"}
    assert not folders.secrets.exists()


def test_certificates_let_in_whom_they_name(filled: Folders, tmp_path: Path) -> None:
    """With deploy/compose.mtls.yml: by name, ``ops`` with the role, nobody without one."""
    with stack_on(tmp_path, "mtls", filled) as stack:
        address = stack.address("ferrule", 50051)
        with Client(address, tls=filled.identity("alice")) as alice:
            caller = alice.capabilities().caller
            assert caller is not None
            assert (caller.principal, caller.is_admin) == ("alice", False)
        with Client(address, tls=filled.identity("ops")) as ops:
            caller = ops.capabilities().caller
            assert caller is not None
            assert (caller.principal, caller.is_admin) == ("ops", True)
        nobody = TlsConfig((filled.secrets / "ca.pem").read_bytes())
        with Client(address, tls=nobody, timeout=5) as stranger, pytest.raises(FerruleError):
            stranger.status()
        assert stack.stop_all() == {"ferrule": 0}


def test_certificates_are_replaced_under_a_client_that_goes_on(filled: Folders, tmp_path: Path) -> None:
    """New connections get the new certificate, the old one loses nothing; then the authority of clients changes."""
    with stack_on(tmp_path, "mtls", filled) as stack:
        address = stack.address("ferrule", 50051)
        with Client(address, tls=filled.identity("alice")) as client, client.prefill([1, 2, 3]) as cache:
            old = served_certificate(address, filled, "alice")
            with client.stream() as stream:
                stream.run([Append(cache, 4)])
                filled.made("renew", "server.example.org")
                new = served_certificate(address, filled, "alice")
                stream.run([Append(cache, 5)])
            assert new != old
            assert new == ssl.PEM_cert_to_DER_cert((filled.secrets / "cert.pem").read_text())
            assert cache.length == 5
        stack.wait_until_healthy("ferrule")  # by the new certificate of the probe
        other = Folders(tmp_path / "others", tmp_path / "unused")
        other.made("authority")
        other.made("client", "carol")
        carol = Folders(other.certificates, filled.secrets).identity("carol")
        assert not _gets_in(address, carol)
        both = (filled.certificates / "ca.pem").read_text() + (other.certificates / "ca.pem").read_text()
        _replace(filled.secrets / "client-ca.pem", both)
        assert _gets_in(address, carol)
        assert _gets_in(address, filled.identity("alice"))
        _replace(filled.secrets / "client-ca.pem", (other.certificates / "ca.pem").read_text())
        assert _gets_in(address, carol)
        assert not _gets_in(address, filled.identity("alice"))


@pytest.mark.slow
def test_tokens_over_tls(filled: Folders, tmp_path: Path) -> None:
    """With deploy/compose.secured.yml: who has one gets in, and an admin sees the whole server."""
    ops, alice = _token(filled, "ops", "--admin"), _token(filled, "alice")
    tls = TlsConfig((filled.secrets / "ca.pem").read_bytes())
    with stack_on(tmp_path, "secured", filled) as stack:
        address = stack.address("ferrule", 50051)
        with (
            Client(address, tls=tls, token=alice) as client,
            client.prefill([1, 2, 3]),
            Client(address, tls=tls, token=ops) as admin,
        ):
            assert [one.principal for one in admin.admin.server_view().sequences] == ["alice"]
        assert not _gets_in(address, tls)
        assert stack.stop_all() == {"ferrule": 0}


def test_tokens_on_this_machine_give_somebody_the_role(folders: Folders, tmp_path: Path) -> None:
    """With deploy/compose.tokens.yml, in plain text: ``ferrule top`` needs it."""
    folders.secrets.mkdir()
    ops, alice = _token(folders, "ops", "--admin"), _token(folders, "alice")
    with stack_on(tmp_path, "tokens", folders) as stack:
        for token, is_admin in ((ops, True), (alice, False)):
            with Client(stack.address("ferrule", 50051), token=token) as client:
                caller = client.capabilities().caller
                assert caller is not None
                assert caller.is_admin is is_admin


def _token(folders: Folders, name: str, *options: str) -> str:
    """Return a token whose line is in the server's file."""
    command = [sys.executable, "-m", "ferrule_cli.app", "token", name, *options]
    command += ["--append", str(folders.secrets / "tokens")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def _gets_in(address: str, tls: TlsConfig) -> bool:
    with Client(address, tls=tls, timeout=5) as client:
        try:
            client.status()
        except FerruleError:
            return False
    return True


def _replace(path: Path, text: str) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(text)
    shutil.move(beside, path)
