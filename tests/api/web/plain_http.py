"""HTTP by hand, so that a test can send what no client library would."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from ferrule_server.addresses import ListenAddress
from ferrule_server.api.web import events
from ferrule_server.api.web import listener as web_listener
from ferrule_server.api.web.events import Events
from ferrule_server.api.web.listener import WebListener
from ferrule_server.api.web.site import Site

LOOPBACK = ListenAddress("127.0.0.1", 0)


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back: status, headers by lower-case name, body."""

    status: int
    headers: dict[str, str]
    body: bytes


def read_reply(connection: socket.socket) -> Reply:
    """Return everything up to the end of the connection as a reply."""
    received = b""
    while chunk := connection.recv(1 << 16):
        received += chunk
    head, _, body = received.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert len(headers) == len(lines), "no header comes twice"
    return Reply(int(status.split()[1]), {name.lower(): value for name, value in headers.items()}, body)


def connect(address: ListenAddress) -> socket.socket:
    """Return a connection to a listener."""
    return socket.create_connection((address.host, address.port), timeout=10)


def send(address: ListenAddress, sent: bytes) -> Reply:
    """Return the reply to some bytes."""
    with connect(address) as connection:
        connection.sendall(sent)
        return read_reply(connection)


def get(address: ListenAddress, path: str, *lines: str, method: str = "GET") -> Reply:
    """Return the reply to a request with these further header lines."""
    hosts = () if any(line.lower().startswith("host:") for line in lines) else (f"Host: {address.target}",)
    return send(address, "\r\n".join((f"{method} {path} HTTP/1.1", *hosts, *lines, "", "")).encode())


@contextlib.contextmanager
def listening(
    make: Callable[[], bytes] | None = lambda: b"data: {}\n\n",
    *,
    metrics: Callable[[str], tuple[str, bytes]] = lambda _: ("text/plain", b"up 1\n"),
    address: ListenAddress = LOOPBACK,
    host: str | None = None,
    **bounds: Any,
) -> Iterator[WebListener]:
    """Give a listener that serves.

    Args:
        make: Of the page's events; None: there is no page.
        metrics: What ``/metrics`` answers.
        address: Where to listen.
        host: Where the site believes to be.
        **bounds: Of the listener, by the names of its constants.
    """

    async def made() -> bytes:
        assert make is not None
        return make()

    async def rendered(accept: str) -> tuple[str, bytes]:
        return metrics(accept)

    shown = None if make is None else Events(made)
    listener = WebListener(address, Site(rendered, shown, host or address.host))
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(events, "INTERVAL_S", 0.05))
        for name, value in bounds.items():
            stack.enter_context(patch.object(web_listener, name, value))
        stack.callback(listener.close)
        listener.start()
        yield listener
