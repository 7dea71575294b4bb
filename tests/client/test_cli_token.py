"""``ferrule token``, and every command against a server that wants tokens and TLS."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ferrule import Client
from ferrule.errors import UnavailableError
from ferrule.types import TlsConfig
from ferrule_cli import app as cli
from ferrule_client._status import no_server
from ferrule_server.api.security.token_file import TokenFile, parse_tokens
from ferrule_server.quotas import UNLIMITED, QuotaLimits
from tests.api.certificates import Authority
from tests.client.command_line import run
from tests.client.conftest import TOKEN

pytestmark = pytest.mark.usefixtures("no_variables")


# ---- making tokens --------------------------------------------------------------------------------------------------


def test_a_token_comes_with_the_line_that_lets_it_in(capsys: pytest.CaptureFixture[str]) -> None:
    """The server reads the line as it is, and finds the token."""
    assert run("token", "alice") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "token for alice, shown this once:"
    assert lines[1].startswith("ferrule_")
    assert len(lines[1]) == len("ferrule_") + 43  # 256 bits
    assert lines[3] == "line for the server's --token-file:"
    assert lines[4] == f"{hashlib.sha256(lines[1].encode()).hexdigest()} alice"
    assert len(lines) == 5


def test_a_line_holds_role_and_quotas(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the command takes, the server takes."""
    quotas = ("handles=8", "kv_tokens=none", "queued_rows=100", "prefill_rate=2000", "retained=1.5MiB")
    rates = ("call_rate=50", "request_bytes=2MiB", "text_rate=none")
    options = [part for quota in (*quotas, *rates) for part in ("--quota", quota)]
    assert run("token", "ops@example.org", "--admin", *options, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    table = parse_tokens(facts["line"])
    (caller,) = table.callers.values()
    assert (caller.principal, caller.is_admin) == ("ops@example.org", True)
    assert QuotaLimits(**table.quotas["ops@example.org"]) == QuotaLimits(
        8, None, 100, 2000, 3 << 19, None, 50, 2 << 20, None
    )


def test_every_token_is_another(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing of one tells another."""
    for _ in range(20):
        run("token", "alice", "--json")
    tokens = [json.loads(line)["token"] for line in capsys.readouterr().out.splitlines()]
    assert len({token[8:16] for token in tokens}) == 20


def test_append_adds_the_line_and_prints_the_token_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A new file is the owner's alone; a file that ends in the middle of a line gets its end first."""
    path = tmp_path / "tokens"
    assert run("token", "alice", "--append", str(path)) == 0
    first = capsys.readouterr().out
    assert first.startswith("ferrule_")
    assert first.count("\n") == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text(path.read_text().rstrip("\n"))
    assert run("token", "bob", "--admin", "--append", str(path), "--json") == 0
    second = json.loads(capsys.readouterr().out)
    assert set(second) == {"token"}
    file = TokenFile(path, UNLIMITED)
    callers = [file.find(first.strip()), file.find(second["token"])]
    assert [caller and caller.principal for caller in callers] == ["alice", "bob"]
    assert path.read_text().count("\n") == 2


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("al ice",), "NAME_INVALID"),
        (("",), "NAME_INVALID"),
        (("=x",), "NAME_INVALID"),
        (("a" * 129,), "NAME_INVALID"),
        (("alice", "--quota", "speed=3"), "QUOTA_INVALID"),
        (("alice", "--quota", "handles"), "QUOTA_INVALID"),
        (("alice", "--quota", "handles=0"), "QUOTA_INVALID"),
        (("alice", "--quota", "retained=16"), "QUOTA_INVALID"),
    ],
)
def test_what_the_server_would_refuse_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], reason: str
) -> None:
    """In one line, with exit code 2, and no token on the way."""
    assert run("token", *arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.endswith(f"({reason})\n")
    assert captured.err.count("\n") == 1


def test_a_file_that_cannot_be_written_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """No token is shown that no server knows."""
    assert run("token", "alice", "--append", str(tmp_path / "no" / "tokens")) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith("No such file or directory (FILE_UNWRITABLE)\n")


# ---- using them -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("client_files")
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("health",), "serving: paged-reference"),
        (("caches",), "0 live handles"),
        (("generate", "--ids", "--max-tokens", "3", "--seed", "1", "1 2 3"), ""),
    ],
)
def test_every_command_can_use_a_secured_server(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], shown: str
) -> None:
    """By the environment alone."""
    assert run(*arguments) == 0
    captured = capsys.readouterr()
    assert shown in captured.out
    assert TOKEN not in captured.out + captured.err


def test_flags_win_over_the_environment(
    client_files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files of TLS; the token has no flag, which other users of the machine could read."""
    for name in ("FERRULE_TLS_CA", "FERRULE_CLIENT_CERT", "FERRULE_CLIENT_KEY"):
        monkeypatch.setenv(name, "/nowhere")
    files = (f"--tls-{name}={client_files / name}.pem" for name in ("ca", "cert", "key"))
    assert run("health", *files, "--tls-server-name", "localhost") == 0
    assert capsys.readouterr().out.startswith("serving: ")
    assert run("health", "--token", "x") == 2


@pytest.mark.usefixtures("client_files")
def test_health_needs_no_token(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe learns whether it serves; everything else says what is missing."""
    monkeypatch.delenv("FERRULE_TOKEN")
    assert run("health") == 0
    assert capsys.readouterr().out == "serving; more is told with a token only (TOKEN_MISSING)\n"
    assert run("health", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"serving": True, "reason": "TOKEN_MISSING"}
    assert run("caches") == 1
    assert capsys.readouterr().err == "error: the server requires a token: set FERRULE_TOKEN (TOKEN_MISSING)\n"
    assert run("health", "--instance", "x") == 0
    assert capsys.readouterr().out.startswith("serving; which instance it is, and more, is told with a token only")
    monkeypatch.setenv("FERRULE_TOKEN", "wrong")
    assert run("caches") == 1
    refusal = capsys.readouterr()
    assert refusal.err.endswith("(TOKEN_INVALID)\n")
    assert run("health") == 1
    assert capsys.readouterr() == refusal
    assert run("health", "--json") == 1
    assert json.loads(capsys.readouterr().out) == {"serving": True, "reason": "TOKEN_INVALID"}
    assert run("health", "--probe") == 0


@pytest.mark.usefixtures("client_files")
def test_a_probe_leaves_no_line_in_the_log(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks the health service alone; a container does so every few seconds."""
    monkeypatch.delenv("FERRULE_TOKEN")
    assert run("health", "--probe") == 0
    assert capsys.readouterr().out == "serving\n"
    assert run("health", "--probe", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"serving": True}
    assert "refused" not in caplog.text
    assert run("health") == 0
    assert "refused rpc=GetStatus" in caplog.text


@pytest.mark.usefixtures("client_files")
@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("FERRULE_TLS_CA", "nowhere.pem", "nowhere.pem: No such file or directory (TLS_FILE_UNREADABLE)"),
        ("FERRULE_CLIENT_KEY", "", "--tls-cert and --tls-key go together (TLS_INCOMPLETE)"),
        ("FERRULE_TOKEN", "fürs", "FERRULE_TOKEN: a token is printable ASCII without spaces (TOKEN_MALFORMED)"),
    ],
)
def test_what_is_missing_is_said_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, value: str, hint: str
) -> None:
    """A file, half of a pair."""
    monkeypatch.setenv(name, value)
    assert run("caches") == 2
    assert capsys.readouterr().err == f"error: {hint}\n"


def test_a_wrong_authority_is_one_line(client_files: Path) -> None:
    """GRPC's own lines stay away, unless the environment asks for them."""
    wrong = client_files / "wrong.pem"
    wrong.write_bytes(Authority("wrong").cert)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    command = [sys.executable, "-m", "ferrule_cli", "caches", "--tls-ca", str(wrong), "--timeout", "3"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: the server at ")
    assert done.stderr.count("\n") == 1
    chatty = environment | {"GRPC_VERBOSITY": "INFO"}
    done = subprocess.run(command, capture_output=True, text=True, env=chatty, check=False)
    assert done.stderr.count("\n") > 1


def test_a_failed_handshake_keeps_its_advice() -> None:
    """Starting a server would not help."""
    trusted = no_server("127.0.0.1:1", "last error: Ssl handshake failed: CERTIFICATE_VERIFY_FAILED")
    assert "no authority that was named" in str(cli._for_users(trusted))
    refused = no_server("127.0.0.1:1", "Connection refused")
    assert "start one with" in str(cli._for_users(refused))


def test_a_refusal_names_the_address_where_the_target_has_several() -> None:
    """A name may stand for [::1] and 127.0.0.1, and gRPC tells of the last it tried only."""
    details = "last error: UNKNOWN: ipv6:%5B::1%5D:50051: Failed to connect to remote host: connect: Connection refused"
    for target in ("localhost:50051", "dns:localhost:50051"):
        assert "(connection refused by [::1]:50051, the last address tried)" in str(no_server(target, details))
    assert "(connection refused)" in str(no_server("[::1]:50051", details))
    last = "last error: UNKNOWN: ipv4:10.0.0.5:1: Failed to connect: Connection refused (111)"
    assert "(connection refused by 10.0.0.5:1, the last address tried)" in str(no_server("box:1", last))


def test_certificates_that_grpc_cannot_use_are_said_to_be_that() -> None:
    """A key that is not the certificate's, or authorities that are no PEM: gRPC then cannot begin a handshake."""
    tls = TlsConfig(root_certificates=b"no PEM")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = f"127.0.0.1:{listener.getsockname()[1]}"
        with Client(target, tls=tls, timeout=5) as client, pytest.raises(UnavailableError) as caught:
            client.status()
    assert caught.value.reason == "CONNECTION_FAILED"
    assert "certificates" in str(caught.value)
