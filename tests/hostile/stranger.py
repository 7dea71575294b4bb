"""The attacker without credentials: ``python -m tests.hostile.stranger KIND --port PORT ...``, HTTP/2 written by hand.

It opens as many connections as the server takes and as many streams on each as the server allows, and does to each what
its kind says:

    fill         begins a message of 4 MiB less one byte and sends as much of it as flow control allows
    headers      sends the headers of a call and no message
    unary        sends the headers of a call and its whole message
    half         sends half a header block

With ``--again`` a stream that the server ends is opened again, with ``--reconnect`` a connection too. With ``--token``
calls have that token. With ``--wait`` it begins when it reads a line. At the end it prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.api.hostile import http2

MESSAGE_BYTES = (4 << 20) - 1
_MAX_CONCURRENT_STREAMS = 3
_DEFAULT_WINDOW = 65_535
_MAX_FRAME = 16_384
_CHUNK = bytes(_MAX_FRAME)
_OUTBOX_BYTES = 1 << 18
_GREETING_S = 2.0
_UNBOUNDED_STREAMS = 1024


@dataclass
class Upload:
    """One stream: what the server still takes of it, and what is left to send."""

    window: int
    left: int = MESSAGE_BYTES + 5
    is_begun: bool = False


@dataclass
class Hoarder:
    """One connection that opens streams and sends what it may.

    Attributes:
        host, port: Of the server.
        path: Of the method.
        kind: See the module.
        max_streams: What the server allows. opens_again: whether streams that the server ended are opened again.
        token: Bearer token; empty for none.
        num_opened: Streams opened. num_reset: of these ended by the server. offered_bytes: sent on them.
        num_sent_bytes: Sent in all.
        is_open: Whether the server still holds the connection. num_settings: frames of settings that came.
    """

    host: str
    port: int
    path: str
    kind: str
    max_streams: int = _UNBOUNDED_STREAMS
    opens_again: bool = False
    token: str = ""
    num_opened: int = 0
    num_reset: int = 0
    offered_bytes: int = 0
    num_sent_bytes: int = 0
    is_open: bool = False
    num_settings: int = 0
    _window: int = _DEFAULT_WINDOW
    _stream_window: int = _DEFAULT_WINDOW
    _next_stream: int = 1
    _inbox: bytearray = field(default_factory=bytearray)
    _outbox: bytearray = field(default_factory=bytearray)
    _uploads: dict[int, Upload] = field(default_factory=dict)

    def connect(self) -> bool:
        """Connect and read the settings; returns whether the server took the connection."""
        try:
            self.socket = http2.Peer(self.host, self.port).socket
        except OSError:
            return False
        self.socket.settimeout(_GREETING_S)
        self.is_open = True
        try:
            while self.is_open and not self.num_settings:
                self.receive()
        except TimeoutError:
            self.is_open = False
        self.socket.setblocking(False)
        return self.is_open

    def receive(self) -> None:
        """Read what there is and act on it."""
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except (ConnectionResetError, BrokenPipeError):
            data = b""
        if not data:
            self.is_open = False
            return
        self._inbox += data
        for kind, flags, stream, payload in self._frames():
            self._act(kind, flags, stream, payload)

    def _frames(self) -> Iterator[tuple[int, int, int, bytes]]:
        while len(self._inbox) >= 9:
            length = int.from_bytes(self._inbox[:3], "big")
            if len(self._inbox) < 9 + length:
                return
            kind, flags, stream = struct.unpack(">BBI", self._inbox[3:9])
            payload = bytes(self._inbox[9 : 9 + length])
            del self._inbox[: 9 + length]
            yield kind, flags, stream, payload

    def _act(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == http2.SETTINGS and not flags & http2.ACK:
            self._settle(payload)
        elif kind == http2.PING and not flags & http2.ACK:
            self._outbox += http2.frame(http2.PING, http2.ACK, 0, payload)
        elif kind == http2.WINDOW_UPDATE:
            self._widen(stream, int.from_bytes(payload, "big"))
        elif kind == http2.RST_STREAM or (kind == http2.HEADERS and flags & http2.END_STREAM):
            self.num_reset += self._uploads.pop(stream, None) is not None
        elif kind == http2.GOAWAY:
            self.is_open = False

    def _settle(self, payload: bytes) -> None:
        """Take the settings of the server and acknowledge them."""
        for at in range(0, len(payload), 6):
            name, value = struct.unpack(">HI", payload[at : at + 6])
            if name == _MAX_CONCURRENT_STREAMS:
                self.max_streams = value
            elif name == http2.INITIAL_WINDOW_SIZE:
                self._reset_windows(value)
        self.num_settings += 1
        self._outbox += http2.frame(http2.SETTINGS, http2.ACK)

    def _reset_windows(self, value: int) -> None:
        for upload in self._uploads.values():
            upload.window += value - self._stream_window
        self._stream_window = value

    def _widen(self, stream: int, value: int) -> None:
        if stream == 0:
            self._window += value
        elif stream in self._uploads:
            self._uploads[stream].window += value

    def open_streams(self) -> None:
        """Open streams up to what is allowed; a header block that is cut off lets only one be open."""
        limit = 1 - self.num_opened if self.kind == "half" else self.max_streams
        if not self.opens_again:
            limit -= self.num_reset
        while len(self._uploads) < limit and len(self._outbox) < _OUTBOX_BYTES:
            self._outbox += self._head(self._next_stream)
            self._uploads[self._next_stream] = Upload(self._stream_window)
            self._next_stream += 2
            self.num_opened += 1

    def _head(self, stream: int) -> bytes:
        fields = {"authorization": f"Bearer {self.token}"} if self.token else {}
        block = http2.call_headers(self.path, **fields)
        if self.kind == "half":
            return http2.frame(http2.HEADERS, 0, stream, block[: len(block) // 2])
        head = http2.frame(http2.HEADERS, http2.END_HEADERS, stream, block)
        if self.kind == "unary":
            head += http2.frame(http2.DATA, http2.END_STREAM, stream, http2.grpc_message(b""))
        return head

    def upload(self) -> None:
        """Put data of streams into the outbox, as far as flow control and the outbox have room."""
        if self.kind != "fill":
            return
        for stream, upload in list(self._uploads.items()):
            size = min(upload.left, upload.window, self._window, _MAX_FRAME - 5)
            if size > 0 and len(self._outbox) < _OUTBOX_BYTES:
                self._send_data(stream, upload, size)

    def _send_data(self, stream: int, upload: Upload, size: int) -> None:
        head = b"" if upload.is_begun else http2.grpc_message(b"", MESSAGE_BYTES)
        data = (head + _CHUNK)[:size]
        upload.is_begun = True
        upload.left -= size
        upload.window -= size
        self._window -= size
        self.offered_bytes += size
        self._outbox += http2.frame(http2.DATA, 0, stream, data)
        self._uploads[stream] = self._uploads.pop(stream)  # streams take turns: this one comes last the next time

    def flush(self) -> None:
        """Send as much of the outbox as the socket takes."""
        try:
            while self._outbox:
                num_bytes = self.socket.send(self._outbox)
                self.num_sent_bytes += num_bytes
                del self._outbox[:num_bytes]
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            self.is_open = False


def attack(args: argparse.Namespace) -> dict[str, Any]:
    """Carry out the attack; returns what was done."""
    sys.stdout.write("up\n")
    sys.stdout.flush()
    if args.wait:
        sys.stdin.readline()
    hoarders = connected(args)
    num_connections, began_s, began_cpu_s = len(hoarders), time.monotonic(), time.process_time()
    keep(hoarders, args)
    opened, reset = (sum(getattr(each, name) for each in hoarders) for name in ("num_opened", "num_reset"))
    return {
        "connections": num_connections,
        "connections_left": sum(each.is_open for each in hoarders),
        "reconnected": len(hoarders) - num_connections,
        "streams_allowed": max((each.max_streams for each in hoarders), default=0),
        "streams_opened": opened,
        "streams_reset": reset,
        "offered_bytes": sum(each.offered_bytes for each in hoarders),
        "seconds": round(time.monotonic() - began_s, 1),
        "span_s": (began_s, time.monotonic()),
        "cpu_s": time.process_time() - began_cpu_s,
        "num_bytes": sum(each.num_sent_bytes for each in hoarders),
        "counts": {"opened": opened, "ended by the server": reset, "reconnected": len(hoarders) - num_connections},
    }


def connected(args: argparse.Namespace) -> list[Hoarder]:
    """Open connections until the server refuses one."""
    hoarders: list[Hoarder] = []
    while len(hoarders) < args.connections:
        hoarder = new_hoarder(args)
        if not hoarder.connect():
            break
        hoarders.append(hoarder)
    return hoarders


def new_hoarder(args: argparse.Namespace) -> Hoarder:
    """Return a client that does what the command line says."""
    return Hoarder(args.host, args.port, args.path, args.kind, opens_again=args.again, token=args.token)


def keep(hoarders: list[Hoarder], args: argparse.Namespace) -> None:
    """Send and receive on all connections for as long as asked; those that are opened again join the list."""
    began_s = time.monotonic()
    selector = selectors.DefaultSelector()
    for hoarder in hoarders:
        selector.register(hoarder.socket, selectors.EVENT_READ, hoarder)
    while time.monotonic() < began_s + args.seconds:
        for key, _ in selector.select(0.01):
            key.data.receive()
        may_send = sum(each.offered_bytes for each in hoarders) < args.max_bytes
        for hoarder in list(hoarders):
            serve(hoarder, may_send=may_send)
            if not hoarder.is_open and hoarder.socket.fileno() >= 0:
                forget(selector, hoarder.socket)
                if args.reconnect and (another := new_hoarder(args)).connect():
                    hoarders.append(another)
                    selector.register(another.socket, selectors.EVENT_READ, another)


def serve(hoarder: Hoarder, *, may_send: bool) -> None:
    """Do for one connection what can be done now."""
    if hoarder.is_open:
        hoarder.open_streams()
        if may_send:
            hoarder.upload()
        hoarder.flush()


def forget(selector: selectors.BaseSelector, sock: socket.socket) -> None:
    """Stop watching a connection that the server closed."""
    selector.unregister(sock)
    sock.close()


def main() -> None:
    """Attack as the command line says."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("kind", choices=("fill", "headers", "half", "unary"))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--path", required=True)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--reconnect", action="store_true")
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("--token", default="")
    parser.add_argument("--connections", type=int, default=256)
    parser.add_argument("--max-bytes", type=int, default=2 << 30)
    parser.add_argument("--seconds", type=float, required=True)
    print(json.dumps(attack(parser.parse_args())), flush=True)


if __name__ == "__main__":
    main()
