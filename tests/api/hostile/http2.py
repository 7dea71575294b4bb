"""Just enough HTTP/2 to be rude with: frames over a plain socket, headers written out in full (RFC 9113, RFC 7541)."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
ENHANCE_YOUR_CALM = 11
CANCEL = 8
INITIAL_WINDOW_SIZE = 4

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """Return one frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def call_headers(path: str, **changed: str) -> bytes:
    """Return the header block of a gRPC call: literals without indexing, no Huffman coding.

    Args:
        path: Of the method.
        changed: Other values, or further fields; ``_`` stands for ``-``, and ``method`` for ``:method``.
    """
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "test",
        "content-type": "application/grpc",
        "te": "trailers",
    }
    for name, value in changed.items():
        field = name.replace("_", "-")
        fields[f":{field}" if f":{field}" in fields else field] = value
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in fields.items())


def grpc_message(data: bytes, length: int | None = None, flag: int = 0) -> bytes:
    """Return a message as gRPC frames it, or as it does not: with a length that is not its own, or a strange flag."""
    return struct.pack(">BI", flag, len(data) if length is None else length) + data


def settings(**values: int) -> bytes:
    """Return the first frame of a client; ``window`` is what it takes of each stream before it asks for more."""
    payload = struct.pack(">HI", INITIAL_WINDOW_SIZE, values["window"]) if "window" in values else b""
    return frame(SETTINGS, payload=payload)


def _text(text: str) -> bytes:
    data = text.encode()
    assert len(data) < 127
    return bytes([len(data)]) + data


class Peer:
    """A client that says what it likes.

    Args:
        host, port: Of the server.
        window: What it takes of each stream; None: as usual.
    """

    def __init__(self, host: str, port: int, window: int | None = None) -> None:
        self.socket = socket.create_connection((host, port), timeout=10)
        self.socket.sendall(_PREFACE + (settings() if window is None else settings(window=window)))
        self._buffer = b""

    def send(self, *frames: bytes) -> None:
        """Send frames; what the server has hung up on is lost."""
        try:
            self.socket.sendall(b"".join(frames))
        except (BrokenPipeError, ConnectionResetError):
            return

    def frames(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Yield (kind, flags, stream, payload) until the server hangs up."""
        while (head := self._read(9)) is not None:
            length = int.from_bytes(head[:3], "big")
            kind, flags, stream = struct.unpack(">BBI", head[3:])
            payload = self._read(length)
            if payload is None:
                return
            yield kind, flags, stream, payload

    def _read(self, length: int) -> bytes | None:
        while len(self._buffer) < length:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._buffer += data
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        return taken


@contextmanager
def peer(host: str, port: int, window: int | None = None) -> Iterator[Peer]:
    """Connect, and hang up at the end."""
    connected = Peer(host, port, window)
    try:
        yield connected
    finally:
        connected.socket.close()
