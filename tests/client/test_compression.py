"""The client sends no compressed message, asks for none, and refuses one that comes nevertheless."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import pytest

from ferrule import AsyncClient, Client, FerruleError
from tests.api.hostile import http2
from tests.hostile.servers import MemoryWatch

BOMB_MIB = 48
"""As many as fit into the window of a stream; less than the largest reply that the client takes."""
MAX_GROWTH_MIB = 24.0
PROMPT = [1] * 4000


@dataclass
class CompressingServer:
    """Answers the first call with a compressed message, and keeps what it was sent.

    Attributes:
        target: Its address.
        headers: Of the call. data: what came after them. is_asked: whether all of it came.
    """

    target: str = ""
    headers: bytes = b""
    data: bytes = b""
    is_asked: bool = False

    def serve(self, listener: socket.socket) -> None:
        """Take one connection and answer its first call; the client hangs up as soon as it has refused the answer."""
        connection, _ = listener.accept()
        with connection, contextlib.suppress(ConnectionError):
            connection.sendall(http2.settings())
            for kind, flags, stream, payload in http2.received(connection):
                if kind == http2.HEADERS:
                    self.headers += payload
                elif kind == http2.DATA:
                    self.data += payload
                    if flags & http2.END_STREAM:
                        self.is_asked = True
                        connection.sendall(_answer(stream))


def _answer(stream: int) -> bytes:
    """Return the frames of a reply that is one bomb, and an OK."""
    fields = {":status": "200", "content-type": "application/grpc", "grpc-encoding": "gzip"}
    message = http2.grpc_message(http2.bomb(BOMB_MIB), flag=1)
    parts = [message[at : at + http2.MAX_FRAME] for at in range(0, len(message), http2.MAX_FRAME)]
    return b"".join(
        (
            http2.frame(http2.HEADERS, http2.END_HEADERS, stream, http2.header_block(fields)),
            *(http2.frame(http2.DATA, 0, stream, part) for part in parts),
            http2.frame(
                http2.HEADERS,
                http2.END_HEADERS | http2.END_STREAM,
                stream,
                http2.header_block({"grpc-status": "0"}),
            ),
        )
    )


@contextmanager
def _compressing() -> Iterator[CompressingServer]:
    server = CompressingServer()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server.target = f"127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=server.serve, args=(listener,))
        thread.start()
        yield server
    thread.join(10)
    assert not thread.is_alive()


def _prefill(target: str) -> None:
    with Client(target, timeout=10, max_retries=0) as client:
        client.prefill(PROMPT)


def _prefill_aio(target: str) -> None:
    async def run() -> None:
        async with AsyncClient(target, timeout=10, max_retries=0) as client:
            await client.prefill(PROMPT)

    asyncio.run(run())


@pytest.mark.parametrize("prefill", [_prefill, _prefill_aio], ids=["sync", "aio"])
def test_nothing_is_compressed_on_either_way(prefill: Callable[[str], None]) -> None:
    """A prompt that would shrink to nothing is sent as it is, and a bomb for an answer is an error of ours."""
    with _compressing() as server, MemoryWatch(psutil.Process()) as watch, pytest.raises(FerruleError):
        prefill(server.target)
    assert server.is_asked
    assert b"grpc-accept-encoding\x08identity" in server.headers
    assert b"gzip" not in server.headers
    assert b"grpc-encoding" not in server.headers
    assert server.data[0] == 0
    assert len(server.data) > len(PROMPT)
    assert watch.grown_mib < MAX_GROWTH_MIB
