"""Certificates for tests: authorities, servers and clients, made in a few milliseconds each."""

from __future__ import annotations

import datetime as dt
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from ferrule_server.api.security.tls import TlsFiles

_DAY = dt.timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate and its key, in PEM."""

    cert: bytes
    key: bytes


class Authority:
    """Signs certificates.

    Args:
        name: Its common name.
    """

    def __init__(self, name: str = "test authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        self.cert = self._sign(self._key.public_key(), self._name, _DAY, [], is_authority=True)

    def client(
        self,
        name: str | Sequence[str] = "",
        uris: Sequence[str] = (),
        valid_for: dt.timedelta = _DAY,
        dns: Sequence[str] = (),
    ) -> Identity:
        """Return an identity with one common name or several, and with alternative names."""
        names = [*(x509.UniformResourceIdentifier(uri) for uri in uris), *(x509.DNSName(host) for host in dns)]
        return self._issue(name, names, valid_for)

    def server(self, name: str = "server") -> Identity:
        """Return the identity of a server on this machine."""
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        return self._issue(name, names, _DAY)

    def of_subject(self, subject: x509.Name, names: Sequence[x509.GeneralName] = ()) -> bytes:
        """Return a certificate with any subject and any alternative names; each call signs a new one."""
        return self._sign(self._key.public_key(), subject, _DAY, names)

    def _issue(self, name: str | Sequence[str], names: Sequence[x509.GeneralName], valid_for: dt.timedelta) -> Identity:
        key = ec.generate_private_key(ec.SECP256R1())
        cert = self._sign(key.public_key(), _name(name), valid_for, names)
        return Identity(cert, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))

    def _sign(
        self,
        key: ec.EllipticCurvePublicKey,
        subject: x509.Name,
        valid_for: dt.timedelta,
        names: Sequence[x509.GeneralName],
        *,
        is_authority: bool = False,
    ) -> bytes:
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 9 * _DAY)
            .not_valid_after(now + valid_for)
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)


@dataclass(frozen=True, slots=True)
class ServerFiles:
    """The files that a server with TLS is given."""

    folder: Path

    @property
    def paths(self) -> tuple[Path, Path, Path]:
        """Of certificate, key and the authorities of clients."""
        return self.folder / "cert.pem", self.folder / "key.pem", self.folder / "ca.pem"

    def write(self, identity: Identity, client_ca: bytes) -> None:
        """Write all of them, the key first, each by renaming."""
        for path, data in zip(self.paths, (identity.cert, identity.key, client_ca), strict=True):
            beside = path.with_suffix(".new")
            beside.write_bytes(data)
            beside.chmod(0o600)
            beside.rename(path)

    def load(self, *, is_mutual: bool = True) -> TlsFiles:
        """Return them as the server reads them."""
        cert, key, client_ca = self.paths
        return TlsFiles(cert, key, client_ca if is_mutual else None)


def _name(names: str | Sequence[str]) -> x509.Name:
    given = [names] if isinstance(names, str) else names
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in given if name])
