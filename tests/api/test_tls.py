"""TLS: who gets a connection, whom a certificate names, rotation without a restart, and hints for clients."""

from __future__ import annotations

import datetime as dt
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ferrule import Client
from ferrule.errors import UnavailableError
from ferrule.types import TlsConfig
from ferrule.v1 import executor_pb2, executor_pb2_grpc, info_pb2
from ferrule_server.api.security.auth import Access, CertificateAccess, OpenAccess
from ferrule_server.api.security.tls import TlsFiles, tls_of
from ferrule_server.config import ServerConfig
from ferrule_server.errors import ConfigError
from ferrule_server.quotas import QuotaLimits
from tests.api.certificates import Authority, Identity, ServerFiles
from tests.api.harness import RunningServer, refused, token_access

DAY = dt.timedelta(days=1)


@pytest.fixture(scope="module")
def authority() -> Authority:
    """Signs the server and its clients."""
    return Authority()


@pytest.fixture
def files(tmp_path: Path, authority: Authority) -> ServerFiles:
    """A server's files."""
    files = ServerFiles(tmp_path)
    files.write(authority.server(), authority.cert)
    return files


@pytest.fixture
def mutual(files: ServerFiles) -> Iterator[RunningServer]:
    """A server that knows its callers by their certificates."""
    with _serving(files, CertificateAccess(["ops"], QuotaLimits(handles=5))) as server:
        yield server


def _serving(files: ServerFiles, access: Access, *, is_mutual: bool = True) -> RunningServer:
    return RunningServer(access=access, tls=files.load(is_mutual=is_mutual))


def _channel(server: RunningServer, root: bytes | None, identity: Identity | None = None) -> grpc.Channel:
    credentials = grpc.ssl_channel_credentials(
        root, identity.key if identity else None, identity.cert if identity else None
    )
    return grpc.secure_channel(server.address.target, credentials, options=[("grpc.use_local_subchannel_pool", 1)])


def _caller(channel: grpc.Channel, *metadata: tuple[str, str]) -> info_pb2.CallerInfo:
    stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
    request = executor_pb2.GetCapabilitiesRequest()
    return stub.GetCapabilities(request, metadata=metadata, timeout=20).capabilities.caller


def _is_let_in(server: RunningServer, root: bytes, identity: Identity | None) -> bool:
    with _channel(server, root, identity) as channel:
        try:
            _caller(channel)
        except grpc.RpcError as error:
            code = cast("grpc.Call", error).code()
        else:
            return True
    assert code is grpc.StatusCode.UNAVAILABLE
    return False


# ---- who gets a connection ------------------------------------------------------------------------------------------


def test_a_certificate_of_the_authority_is_let_in_and_nothing_else(mutual: RunningServer, authority: Authority) -> None:
    """None at all, one of another authority, one that is over: no connection, so not even an error of ours."""
    stranger = Authority("test authority")  # of the same name
    assert _is_let_in(mutual, authority.cert, authority.client("alice"))
    assert not _is_let_in(mutual, authority.cert, None)
    assert not _is_let_in(mutual, authority.cert, stranger.client("alice"))
    assert not _is_let_in(mutual, authority.cert, authority.client("alice", valid_for=-DAY))
    with grpc.insecure_channel(mutual.address.target) as channel, pytest.raises(grpc.RpcError):
        _caller(channel)


def test_health_needs_a_connection_too(mutual: RunningServer, authority: Authority) -> None:
    """It needs no principal, but TLS comes first."""
    with _channel(mutual, authority.cert, authority.client()) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    with _channel(mutual, authority.cert) as channel, pytest.raises(grpc.RpcError):
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=20)


@pytest.mark.parametrize(
    ("names", "principal"),
    [
        ({"name": "alice", "dns": ["alice.example.org"]}, "alice"),
        ({"name": "alice", "uris": ["spiffe://example.org/a"], "dns": ["b"]}, "spiffe://example.org/a"),
        ({"name": "Team A"}, "Team%20A"),
    ],
)
def test_a_certificate_names_the_principal(
    mutual: RunningServer, authority: Authority, names: dict[str, Any], principal: str
) -> None:
    """By its one URI, else by its common name."""
    with _channel(mutual, authority.cert, authority.client(**names)) as channel:
        caller = _caller(channel)
    assert (caller.principal, caller.is_admin, caller.quotas.handles) == (principal, False, 5)


def test_an_administrator_is_named_by_the_settings(mutual: RunningServer, authority: Authority) -> None:
    """By the principal, whatever else is in the certificate."""
    with _channel(mutual, authority.cert, authority.client("ops")) as channel:
        assert _caller(channel).is_admin
    with _channel(mutual, authority.cert, authority.client("ops", ["urn:example:ops"])) as channel:
        assert not _caller(channel).is_admin


@pytest.mark.parametrize(
    ("name", "uris"),
    [
        ("", []),
        ("alice", ["urn:a:b", "spiffe://c/d"]),
        ("ops\0.evil.example", []),
        ("ops\0x", []),
        (["ops", "mallory"], []),
        (["mallory", "ops"], []),
        ("ops", ["spiffe://td/a\0b"]),
    ],
)
def test_a_certificate_that_names_nobody_or_several_is_refused(
    mutual: RunningServer, authority: Authority, name: str | list[str], uris: list[str]
) -> None:
    """The connection stands, so there is an answer. A name that is cut at a NUL is another's, ``ops`` is an admin."""
    with _channel(mutual, authority.cert, authority.client(name, uris)) as channel, refused() as refusals:
        _caller(channel)
    assert (refusals[0].code, refusals[0].reason) == (grpc.StatusCode.UNAUTHENTICATED, "TOKEN_INVALID")
    assert "must name one principal" in refusals[0].message


def test_with_tokens_a_certificate_only_opens_the_connection(files: ServerFiles, authority: Authority) -> None:
    """The token names the principal, and there must be one."""
    with (
        _serving(files, token_access(files.folder, {"secret": "bob"})) as server,
        _channel(server, authority.cert, authority.client("alice")) as channel,
    ):
        assert _caller(channel, ("authorization", "Bearer secret")).principal == "bob"
        with refused() as refusals:
            _caller(channel)
        assert refusals[0].reason == "TOKEN_MISSING"
        assert not _is_let_in(server, authority.cert, None)


def test_without_authorities_nobody_is_asked_for_a_certificate(files: ServerFiles, authority: Authority) -> None:
    """TLS alone keeps what travels secret."""
    with (
        _serving(files, OpenAccess(is_admin=False), is_mutual=False) as server,
        _channel(server, authority.cert) as channel,
    ):
        assert _caller(channel).principal == "local"


# ---- rotation -------------------------------------------------------------------------------------------------------


def test_new_certificates_are_served_without_a_restart(
    files: ServerFiles, authority: Authority, mutual: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    """From the next handshake on, authorities of clients included; connections made before live on."""
    caplog.set_level(logging.INFO)
    successor, alice = Authority("successor"), authority.client("alice")
    with _channel(mutual, authority.cert, alice) as before:
        assert _caller(before).principal == "alice"
        files.write(successor.server(), successor.cert)
        assert _is_let_in(mutual, successor.cert, successor.client("alice"))
        assert not _is_let_in(mutual, authority.cert, alice)
        assert not _is_let_in(mutual, successor.cert, alice)
        assert _caller(before).principal == "alice"
    assert [record.getMessage() for record in caplog.records if "certificates read" in record.getMessage()]


def test_a_symbolic_link_that_is_swapped_is_followed(tmp_path: Path, authority: Authority) -> None:
    """As Kubernetes replaces a secret: all files at once."""
    successor = Authority("successor")
    for name, signer in (("one", authority), ("two", successor)):
        (tmp_path / name).mkdir()
        ServerFiles(tmp_path / name).write(signer.server(), signer.cert)
    (tmp_path / "data").symlink_to("one")
    with _serving(ServerFiles(tmp_path / "data"), CertificateAccess([])) as server:
        assert _is_let_in(server, authority.cert, authority.client("alice"))
        (tmp_path / "next").symlink_to("two")
        (tmp_path / "next").rename(tmp_path / "data")
        assert _is_let_in(server, successor.cert, successor.client("alice"))
        assert not _is_let_in(server, authority.cert, authority.client("alice"))


def test_a_pair_that_does_not_match_keeps_the_old_one(
    files: ServerFiles, authority: Authority, mutual: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    """An ERROR says so once, however many handshakes there are; the key that comes later completes the change."""
    alice, renewed = authority.client("alice"), authority.server("renewed")
    cert, key, _ = files.paths
    cert.write_bytes(renewed.cert)
    for _ in range(3):
        assert _is_let_in(mutual, authority.cert, alice)
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "do not belong together" in errors[0]
    assert "the ones read before stay in use" in errors[0]
    key.write_bytes(renewed.key)
    assert _is_let_in(mutual, authority.cert, alice)
    assert mutual.tls is not None
    assert mutual.tls._in_use[1] == renewed.cert


def test_files_that_cannot_be_used_end_the_start(files: ServerFiles, authority: Authority) -> None:
    """Each with a sentence that names the flag and the file; no key is ever shown."""
    cert, key, client_ca = files.paths
    other, junk, missing = files.folder / "other.pem", files.folder / "junk.pem", files.folder / "missing.pem"
    other.write_bytes(authority.server().key)
    junk.write_text("no certificate")
    for paths, hint in (
        ((cert, other, client_ca), rf"--tls-cert {cert} and --tls-key {other} do not belong together"),
        ((junk, key, client_ca), rf"--tls-cert {junk} and --tls-key {key} are not a usable PEM pair"),
        ((cert, junk, client_ca), rf"--tls-key {junk} are not a usable PEM pair"),
        ((missing, key, client_ca), rf"--tls-cert {missing}: No such file"),
        ((cert, missing, client_ca), rf"--tls-key {missing}: No such file"),
        ((cert, key, junk), rf"--tls-client-ca {junk}: holds no certificate in PEM"),
        ((cert, key, missing), rf"--tls-client-ca {missing}: No such file"),
    ):
        with pytest.raises(ConfigError, match=hint) as caught:
            TlsFiles(*paths)
        assert "PRIVATE KEY" not in str(caught.value)


def test_a_key_with_a_password_is_refused_without_asking(files: ServerFiles, authority: Authority) -> None:
    """A server has nobody to ask."""
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
        load_pem_private_key,
    )

    cert, key, _ = files.paths
    encrypted = load_pem_private_key(key.read_bytes(), None).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
    )
    key.write_bytes(encrypted)
    with pytest.raises(ConfigError, match="has a password; a server needs a key without one"):
        TlsFiles(cert, key, None)


def test_settings_name_the_files(files: ServerFiles) -> None:
    """And nothing shows what is in them."""
    cert, key, client_ca = files.paths
    assert tls_of(ServerConfig()) is None
    tls = tls_of(ServerConfig(tls_cert=cert, tls_key=key, tls_client_ca=client_ca))
    assert tls is not None
    assert repr(tls) == f"TlsFiles({str(cert)!r}, client_ca={str(client_ca)!r})"
    assert os.fspath(key) not in repr(tls)


# ---- what clients are told ------------------------------------------------------------------------------------------


def _told(server: RunningServer, tls: TlsConfig | None) -> str:
    """Return what the Python client says when it cannot use a server."""
    with Client(server.address.target, tls=tls, max_retries=0) as client:
        with pytest.raises(UnavailableError) as caught:
            client.status()
        assert caught.value.reason == "CONNECTION_FAILED"
        return str(caught.value)


def test_a_client_is_told_what_a_failed_handshake_may_mean(mutual: RunningServer, authority: Authority) -> None:
    """What gRPC says is little more than that the socket was closed."""
    alice, stranger = authority.client("alice"), Authority("stranger").client("alice")
    for tls in (
        None,
        TlsConfig(authority.cert),
        TlsConfig(authority.cert, stranger.key, stranger.cert),
    ):
        assert "it hung up; it may require TLS, or a client certificate that is valid" in _told(mutual, tls)
    assert "its certificate is not trusted; no authority that was named (root_certificates" in _told(
        mutual, TlsConfig(Authority("x").cert)
    )
    elsewhere = TlsConfig(authority.cert, alice.key, alice.cert, server_name="elsewhere")
    assert "its certificate is for another name; connect by the name in it" in _told(mutual, elsewhere)
    assert "--tls-server-name" in _told(mutual, elsewhere)
    with RunningServer() as plain:
        assert "it does not speak TLS; connect without tls" in _told(plain, TlsConfig(authority.cert))


def test_the_client_speaks_mutual_tls(mutual: RunningServer, authority: Authority) -> None:
    """With the same objects as always."""
    alice = authority.client("alice")
    tls = TlsConfig(authority.cert, alice.key, alice.cert)
    with Client(mutual.address.target, tls=tls) as client, client.prefill([1, 2, 3]) as cache:
        assert cache.length == 3
