"""Just enough HTTP/2 to be rude with: frames over a plain socket, headers written out in full (RFC 9113, RFC 7541)."""

from __future__ import annotations

import re
import socket
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
ENHANCE_YOUR_CALM = 11
CANCEL = 8
INITIAL_WINDOW_SIZE = 4

DEFAULT_WINDOW = 65_535
MAX_FRAME = 16_384

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
    return header_block(fields)


def header_block(fields: Mapping[str, str]) -> bytes:
    """Return a header block of these fields."""
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in fields.items())


def received(connection: socket.socket) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield the frames of a client that has connected, until it hangs up."""
    with connection.makefile("rb") as file:
        file.read(len(_PREFACE))
        while len(head := file.read(9)) == 9:
            kind, flags, stream = struct.unpack(">BBI", head[3:])
            yield kind, flags, stream, file.read(int.from_bytes(head[:3], "big"))


def grpc_message(data: bytes, length: int | None = None, flag: int = 0) -> bytes:
    """Return a message as gRPC frames it, or as it does not: with a length that is not its own, or a strange flag."""
    return struct.pack(">BI", flag, len(data) if length is None else length) + data


def settings(**values: int) -> bytes:
    """Return the first frame of a client; ``window`` is what it takes of each stream before it asks for more."""
    payload = struct.pack(">HI", INITIAL_WINDOW_SIZE, values["window"]) if "window" in values else b""
    return frame(SETTINGS, payload=payload)


def bomb(num_mib: int, encoding: str = "gzip") -> bytes:
    """Return so many MiB of zeros compressed to about 1 KiB each, as ``gzip`` or ``deflate``."""
    zeros, checksum = bytes(1 << 20), 0 if encoding == "gzip" else 1
    for _ in range(num_mib):
        checksum = zlib.crc32(zeros, checksum) if encoding == "gzip" else zlib.adler32(zeros, checksum)
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = compressor.compress(zeros) + compressor.flush(zlib.Z_FULL_FLUSH)
    data = block * num_mib + b"\3\0"  # an empty last block
    if encoding == "gzip":
        return b"\x1f\x8b\x08\0\0\0\0\0\2\xff" + data + struct.pack("<II", checksum, num_mib << 20)
    return b"\x78\xda" + data + struct.pack(">I", checksum)


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


class Caller(Peer):
    """A client that makes one call after the other, within flow control."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port)
        self._received = self.frames()
        self._window, self._stream_window, self._windows = DEFAULT_WINDOW, DEFAULT_WINDOW, dict[int, int]()
        self._next_stream = 1

    def call(self, headers: bytes, message: bytes) -> str:
        """Send a call and return its status: the number of a code, ``reset``, ``closed``, or ``?`` if it is unreadable.

        What is left of the message when the status comes is not sent.
        """
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        self._windows = {stream: self._stream_window}
        self.send(frame(HEADERS, END_HEADERS, stream, headers))
        left = memoryview(message)
        while True:
            while size := max(0, min(len(left), self._window, self._windows[stream], MAX_FRAME)):
                self._window -= size
                self._windows[stream] -= size
                self.send(frame(DATA, END_STREAM if size == len(left) else 0, stream, bytes(left[:size])))
                left = left[size:]
            if (status := self._take(stream)) is not None:
                return status

    def _take(self, stream: int) -> str | None:
        """Act on the next frame; returns the status if the call has ended with it."""
        kind, flags, owner, payload = next(self._received, (GOAWAY, 0, 0, b""))
        if kind == GOAWAY:
            return "closed"
        if owner == stream and kind == RST_STREAM:
            return "reset"
        if owner == stream and kind in (HEADERS, DATA) and flags & END_STREAM:
            found = re.search(rb"grpc-status[\x01\x02](\d{1,2})", payload)
            return found[1].decode() if found else "?"
        self._answer(kind, flags, owner, payload)
        return None

    def _answer(self, kind: int, flags: int, owner: int, payload: bytes) -> None:
        if kind == WINDOW_UPDATE and owner == 0:
            self._window += int.from_bytes(payload, "big")
        elif kind == WINDOW_UPDATE and owner in self._windows:
            self._windows[owner] += int.from_bytes(payload, "big")
        elif kind in (SETTINGS, PING) and not flags & ACK:
            self.send(frame(kind, ACK, 0, payload if kind == PING else b""))
            for at in range(0, len(payload) if kind == SETTINGS else 0, 6):
                self._set(*struct.unpack(">HI", payload[at : at + 6]))

    def _set(self, name: int, value: int) -> None:
        if name == INITIAL_WINDOW_SIZE:
            self._windows = {stream: window + value - self._stream_window for stream, window in self._windows.items()}
            self._stream_window = value


@contextmanager
def peer(host: str, port: int, window: int | None = None) -> Iterator[Peer]:
    """Connect, and hang up at the end."""
    connected = Peer(host, port, window)
    try:
        yield connected
    finally:
        connected.socket.close()


@contextmanager
def caller(host: str, port: int) -> Iterator[Caller]:
    """Connect a client that makes calls, and hang up at the end."""
    connected = Caller(host, port)
    try:
        yield connected
    finally:
        connected.socket.close()
