"""Certificates from the script of the compose stack; tests/docker serves with them."""

from __future__ import annotations

import dataclasses
import os
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

from ferrule.types import TlsConfig
from tests.tools import tool
from tools.compose.compose_file import ROOT

SCRIPT = ROOT / "deploy" / "make_certificates.sh"


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
        path.write_text(path.read_text() + (other.certificates / "ca.pem").read_text())
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
    started = tmp_path / "started"
    (programs / "openssl").write_text(f"#!/bin/sh\n: > {started}\nexec sleep 30\n")
    (programs / "openssl").chmod(0o755)
    variables = {"PATH": f"{programs}:{os.environ['PATH']}", "TMPDIR": str(work)}
    places = {"CERTIFICATES": str(folders.certificates), "SECRETS": str(folders.secrets)}
    process = subprocess.Popen(
        ["sh", str(SCRIPT), "authority"], env=os.environ | variables | places, start_new_session=True
    )
    while not started.exists():  # before, the signal could miss it, and the script would wait for its end
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
