"""Addresses in settings: where the server listens, and where it sends traces."""

from __future__ import annotations

import errno
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from ferrule_server.errors import ConfigError
from ferrule_server.settings import parse_path

_DEFAULT_OTLP_PORT: Final = 4317
"""The port of OTLP over gRPC."""
_MAX_UNIX_PATH_BYTES: Final = 107


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Where the server listens: a TCP host and port, or a unix socket path.

    Attributes:
        host: IP address or name; empty for a unix socket.
        port: 0 lets the system choose.
        path: Path of the unix socket; None for TCP.
    """

    host: str = ""
    port: int = 0
    path: Path | None = None

    @property
    def target(self) -> str:
        """The address as gRPC writes it, such as ``127.0.0.1:50051``, ``[::1]:50051`` or ``unix:/run/f.sock``."""
        if self.path is not None:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.path is not None:
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def cannot_listen(target: str, error: Exception, flag: str = "") -> ConfigError:
    """Return the error for an address that cannot be bound.

    Args:
        target: The address.
        error: The reason.
        flag: The flag that set the address.
    """
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    hint = "; another server uses it: stop it or choose another port" if in_use else ""
    return ConfigError(f"{flag and flag + ': '}cannot listen on {target}: {reason}{hint}")


def parse_listen(text: str) -> ListenAddress:
    """Return the address that ``HOST:PORT`` or ``unix:PATH`` names.

    Raises:
        ValueError: The text is neither.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if path.startswith("//"):
            path = path[2:]
        if not path or path.endswith("/"):
            raise ValueError("unix: needs the path of a socket, such as unix:/tmp/ferrule.sock")
        path = str(parse_path(path))
        if len(os.fsencode(path)) > _MAX_UNIX_PATH_BYTES:
            raise ValueError(f"a unix socket path holds at most {_MAX_UNIX_PATH_BYTES} bytes")
        return ListenAddress(path=Path(path))
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError("must be HOST:PORT, such as 127.0.0.1:50051 or [::1]:50051, or unix:PATH")
    # The name has several addresses, and gRPC would accept any of them that is free.
    return ListenAddress("127.0.0.1" if host == "localhost" else host, int(port))


def parse_metrics_listen(text: str) -> ListenAddress:
    """Return the address that ``HOST:PORT`` names.

    Raises:
        ValueError: The text is not such an address.
    """
    if text.startswith("unix:"):
        raise ValueError("must be HOST:PORT, such as 127.0.0.1:9464: HTTP clients do not know unix: paths")
    try:
        return parse_listen(text)
    except ValueError:
        raise ValueError("must be HOST:PORT, such as 127.0.0.1:9464 or [::1]:9464") from None


def parse_otlp_endpoint(text: str) -> str:
    """Return the URL of a collector, with its port.

    Raises:
        ValueError: OTLP over gRPC cannot be sent to the URL.
        ConfigError: The URL contains credentials, which the message does not repeat.
    """
    advice = "must be http://HOST:PORT, or https:// for TLS, such as http://127.0.0.1:4317"
    try:
        url = urlsplit(text)
        port = url.port or _DEFAULT_OTLP_PORT
    except ValueError:
        raise ValueError(advice) from None
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(advice)
    if url.path not in ("", "/") or url.query or url.fragment:
        raise ValueError(f"{advice}; OTLP over gRPC has no path, and OTLP over HTTP is not supported")
    if url.username is not None:
        raise ConfigError("--otlp-endpoint contains credentials: put them in OTEL_EXPORTER_OTLP_HEADERS")
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    return f"{url.scheme}://{host}:{port}"
