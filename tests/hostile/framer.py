"""The attacker on frames: ``python -m tests.hostile.framer SPEC``, HTTP/2 by hand on several connections.

SPEC is the JSON of a :class:`Spec`. Like the flooder it connects, prints ``up``, waits for a line on stdin, attacks,
and prints one line of JSON. Kinds:

    bomb           calls whose messages are 256 MiB of zeros, compressed; the next as soon as the last has ended
    ping           PING frames
    window_update  WINDOW_UPDATE frames of the connection
    empty_data     empty DATA frames of a call that has not ended
    continuation   CONTINUATION frames of a header block that never ends, with a small field each
    one_field      the same, all of it one field

Frames are sent as fast as the socket takes them. What the server sends is read and ignored, GOAWAY too; if it hangs up,
the attacker connects again.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from tests.api.hostile import http2
from tests.hostile.flooder import NICENESS

BOMB_MIB = 256
_CHUNK_BYTES = 1 << 16
_PATIENCE_S = 5.0
_PAUSE_S = 0.001
_FIELD = b"\x00\x01x" + bytes([100]) + b"y" * 100
_LONG_FIELD = b"\x00\x01x\x7f\x80\xff\xff\xff\x07" + b"y" * 100  # a literal of 2 GiB begins


@dataclass(frozen=True, slots=True)
class Spec:
    """What to do.

    Attributes:
        kind: See the module.
        port: Of the server, on this machine.
        path: Of the method that is called.
        connections: How many. seconds: and for how long.
        token: Bearer token; empty for none.
        encoding: Of bombs. messages: bombs in a call.
    """

    kind: str
    port: int
    path: str
    connections: int
    seconds: float
    token: str = ""
    encoding: str = "gzip"
    messages: int = 1

    def headers(self) -> bytes:
        """Return the header block of its calls."""
        token = {"authorization": f"Bearer {self.token}"} if self.token else {}
        encoding = {"grpc_encoding": self.encoding} if self.kind == "bomb" else {}
        return http2.call_headers(self.path, **token, **encoding)

    def opening(self) -> bytes:
        """Return what a flooding connection sends once."""
        if self.kind == "empty_data":
            return http2.frame(http2.HEADERS, http2.END_HEADERS, 1, self.headers())
        if self.kind in ("continuation", "one_field"):
            start = _LONG_FIELD if self.kind == "one_field" else b""
            return http2.frame(http2.HEADERS, 0, 1, self.headers() + start)
        return b""

    def chunk(self) -> bytes:
        """Return what it sends again and again: as many frames as about 64 KiB hold."""
        frame = {
            "ping": http2.frame(http2.PING, payload=bytes(8)),
            "window_update": http2.frame(http2.WINDOW_UPDATE, payload=b"\0\0\0\1"),
            "empty_data": http2.frame(http2.DATA, 0, 1),
            "continuation": http2.frame(http2.CONTINUATION, 0, 1, _FIELD),
            "one_field": http2.frame(http2.CONTINUATION, 0, 1, b"y" * len(_FIELD)),
        }[self.kind]
        return frame * (_CHUNK_BYTES // len(frame))


class Attack:
    """An attack of several threads, each with a connection of its own.

    Attributes:
        counts: Statuses of calls, or frames and repeated connections.
        num_bytes: What was sent.
    """

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._ends_at = 0.0
        self._message = b""
        if spec.kind == "bomb":
            self._message = http2.grpc_message(http2.bomb(BOMB_MIB, spec.encoding), flag=1) * spec.messages
        self.counts: Counter[str] = Counter()
        self.num_bytes = 0

    def run(self) -> dict[str, Any]:
        """Get ready, wait for the word, and attack; returns what was done."""
        work = self._bomb if self._spec.kind == "bomb" else self._flood
        go = threading.Event()
        threads = [threading.Thread(target=work, args=(go,), daemon=True) for _ in range(self._spec.connections)]
        for thread in threads:
            thread.start()
        sys.stdout.write("up\n")
        sys.stdout.flush()
        sys.stdin.readline()
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        self._ends_at = began_s + self._spec.seconds
        go.set()
        for thread in threads:
            thread.join(max(0.0, self._ends_at - time.monotonic()))
        return {
            "span_s": (began_s, time.monotonic()),
            "cpu_s": time.process_time() - began_cpu_s,
            "num_bytes": self.num_bytes,
            "counts": dict(self.counts),
        }

    def _is_over(self) -> bool:
        return time.monotonic() >= self._ends_at

    def _bomb(self, go: threading.Event) -> None:
        headers = self._spec.headers()
        caller = http2.Caller("127.0.0.1", self._spec.port)
        go.wait()
        while not self._is_over():
            try:
                status = caller.call(headers, self._message)
            except OSError as error:
                status = type(error).__name__
            self.counts[status] += 1
            self.num_bytes += len(headers)
            if status in ("closed", "TimeoutError"):
                caller = http2.Caller("127.0.0.1", self._spec.port)

    def _flood(self, go: threading.Event) -> None:
        opening, chunk = self._spec.opening(), self._spec.chunk()
        sock = self._connected()
        go.wait()
        while not self._is_over():
            try:
                sock.sendall(opening)
                while not self._is_over():
                    sock.sendall(chunk)
                    self.num_bytes += len(chunk)
            except OSError:
                self.counts["connected again"] += 1
                time.sleep(_PAUSE_S)
                sock = self._connected()

    def _connected(self) -> socket.socket:
        """Connect, acknowledge the settings, and leave a thread that reads and ignores what comes."""
        peer = http2.Peer("127.0.0.1", self._spec.port)
        for kind, flags, _, _ in peer.frames():
            if kind == http2.SETTINGS and not flags & http2.ACK:
                peer.send(http2.frame(http2.SETTINGS, http2.ACK))
                break
        peer.socket.settimeout(_PATIENCE_S)
        threading.Thread(target=_ignore, args=(peer.socket,), daemon=True).start()
        return peer.socket


def _ignore(sock: socket.socket) -> None:
    buffer = bytearray(1 << 18)
    while True:
        try:
            if not sock.recv_into(buffer):
                return
        except TimeoutError:
            continue
        except OSError:
            return


def main() -> None:
    """Attack as the spec on the command line says."""
    os.nice(NICENESS)
    done = Attack(Spec(**json.loads(sys.argv[1]))).run()
    print(json.dumps(done), flush=True)
    os._exit(0)  # connections break off


if __name__ == "__main__":
    main()
