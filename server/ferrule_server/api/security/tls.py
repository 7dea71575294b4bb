"""The certificates of the server, read again when their files change; the next handshake uses the new ones."""

from __future__ import annotations

import logging
import ssl
import threading
from pathlib import Path

import grpc

from ferrule_server.api.security.file_watch import FileWatch, read_small
from ferrule_server.config import ServerConfig
from ferrule_server.errors import ConfigError

_LOG = logging.getLogger(__name__)


class TlsFiles:
    """A certificate chain, its key, and the authorities of clients, all in PEM.

    Invariant: the key and the chain in use belong together. Connections made before a change stay open.

    Args:
        cert: The server's certificate, followed by those between it and its authority.
        key: Its private key, without a password.
        client_ca: Authorities; every client must then have a certificate of one of them. None: clients need none.

    Raises:
        ConfigError: A file cannot be read or has the wrong contents, or key and certificate do not match.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        self._cert = cert
        self._key = key
        self._client_ca = client_ca
        paths = (cert, key, *([client_ca] if client_ca else ()))
        self._watch = FileWatch(paths, self._read, "certificates refused, the ones read before stay in use")
        self._lock = threading.Lock()
        self._in_use = self._read()

    def __repr__(self) -> str:
        return f"TlsFiles({str(self._cert)!r}, client_ca={str(self._client_ca)!r})"

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials with which gRPC binds a port."""
        credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            _configuration(self._in_use),
            self._changed,  # type: ignore[arg-type]  # None is allowed, says its documentation
            require_client_authentication=self._client_ca is not None,
        )
        return credentials

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return a new configuration, or None for no change; gRPC calls this at every handshake, on its threads.

        An unusable change is logged once and the old pair stays in use: a key that arrives after its certificate must
        not disconnect a server from its clients.
        """
        with self._lock:
            found = self._watch.read_if_changed()
            if found is None or found == self._in_use:
                return None
            self._in_use = found
            _LOG.info("certificates read path=%s", self._cert)
            return _configuration(found)

    def _read(self) -> tuple[bytes, bytes, bytes | None]:
        """Return key, chain and authorities, checked.

        OpenSSL checks paths only, so the files are read again after the check to prove that these bytes were checked.
        """
        for _ in range(3):
            found = self._contents()
            self._check()
            if self._contents() == found:
                return found
        raise ConfigError(f"--tls-cert {self._cert}: the files change while they are read")

    def _contents(self) -> tuple[bytes, bytes, bytes | None]:
        key, cert = _bytes_of("--tls-key", self._key), _bytes_of("--tls-cert", self._cert)
        return key, cert, _bytes_of("--tls-client-ca", self._client_ca) if self._client_ca else None

    def _check(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self._cert, self._key, password=_no_password)
        except ssl.SSLError as error:
            is_mismatch = error.reason == "KEY_VALUES_MISMATCH"
            text = "do not belong together" if is_mismatch else f"are not a usable PEM pair ({error.reason or error})"
            raise ConfigError(f"--tls-cert {self._cert} and --tls-key {self._key} {text}") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"--tls-key {self._key}: {error}") from None
        try:
            if self._client_ca is not None:
                context.load_verify_locations(self._client_ca)
        except OSError:
            raise ConfigError(f"--tls-client-ca {self._client_ca}: holds no certificate in PEM") from None


def tls_of(config: ServerConfig) -> TlsFiles | None:
    """Return the certificates that the settings name; None: plain text. Raises as :class:`TlsFiles`."""
    if config.tls_cert is None or config.tls_key is None:
        return None
    return TlsFiles(config.tls_cert, config.tls_key, config.tls_client_ca)


def _configuration(found: tuple[bytes, bytes, bytes | None]) -> grpc.ServerCertificateConfiguration:
    key, cert, client_ca = found
    configuration: grpc.ServerCertificateConfiguration = grpc.ssl_server_certificate_configuration(
        [(key, cert)], client_ca
    )
    return configuration


def _bytes_of(flag: str, path: Path) -> bytes:
    try:
        return read_small(path)
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror or error}") from None


def _no_password() -> str:
    """Replace the prompt that OpenSSL would show on the terminal."""
    raise ValueError("has a password; a server needs a key without one")
