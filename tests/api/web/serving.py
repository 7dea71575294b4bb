"""A real server with its HTTP side, in this process."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Iterator
from typing import Any
from unittest.mock import patch

from ferrule_server.addresses import ListenAddress
from ferrule_server.api.web import events
from ferrule_server.api.web.assembly import listener_of
from ferrule_server.api.web.events import INTERVAL_S
from ferrule_server.api.web.listener import WebListener
from ferrule_server.config import ServerConfig
from tests.api.harness import RunningServer
from tests.api.web.plain_http import LOOPBACK, connect


@contextlib.contextmanager
def serving_web(
    server: RunningServer, address: ListenAddress = LOOPBACK, interval_s: float = INTERVAL_S
) -> Iterator[WebListener]:
    """Give the listener that shows a running server, as often as a test has time for."""

    async def make() -> WebListener:
        return listener_of(ServerConfig(metrics_listen=address), address, server.state, server.server.views)

    with patch.object(events, "INTERVAL_S", interval_s):
        listener = server.run(make())
        listener.start()
        try:
            yield listener
        finally:
            listener.close()


def messages(address: ListenAddress) -> Generator[dict[str, Any], None, None]:
    """Yield what the page is told, from now on."""
    with connect(address) as connection:
        connection.sendall(f"GET /ui/events HTTP/1.1\r\nHost: {address.target}\r\n\r\n".encode())
        received = b""
        while chunk := connection.recv(1 << 16):
            received += chunk
            *whole, received = received.split(b"\n\n")
            for event in whole:
                if b"data: " not in event:
                    continue
                yield json.loads(event.rpartition(b"data: ")[2])
