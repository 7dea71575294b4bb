"""The control: what it costs on this machine that somebody sends so many bytes and takes so much CPU, with no server.

``python -m tests.hostile.control PORT`` connects to a sink, prints ``up``, waits for a line of JSON on stdin with
``seconds``, ``bytes_per_s`` and ``cpu_per_s``, and does just that, at the niceness of an attacker.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from types import TracebackType

from tests.hostile.flooder import NICENESS

_SLICE_S = 0.005
_CHUNK = bytes(1 << 20)


class Sink:
    """Takes connections on this machine and reads what they send, while it is entered."""

    def __enter__(self) -> Sink:
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=_drain, args=(connection,), daemon=True).start()


def _drain(connection: socket.socket) -> None:
    buffer = bytearray(1 << 18)
    with connection:
        try:
            while connection.recv_into(buffer):
                pass
        except ConnectionResetError:
            return


def burn(connection: socket.socket, seconds: float, bytes_per_s: float, cpu_per_s: float) -> int:
    """Send bytes and spend CPU time at these rates; returns how many bytes were sent."""
    began_s, began_cpu_s, num_bytes = time.monotonic(), time.process_time(), 0
    while (elapsed_s := time.monotonic() - began_s) < seconds:
        while num_bytes < bytes_per_s * elapsed_s:
            num_bytes += connection.send(_CHUNK[: max(1, min(len(_CHUNK), int(bytes_per_s * _SLICE_S)))])
        while time.process_time() - began_cpu_s < cpu_per_s * elapsed_s and time.monotonic() < began_s + seconds:
            sum(range(200))
        time.sleep(_SLICE_S)
    return num_bytes


def main() -> None:
    """Connect, wait for the word, and burn."""
    os.nice(NICENESS)
    with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
        print("up", flush=True)
        wanted = json.loads(sys.stdin.readline())
        began_s = time.monotonic()
        num_bytes = burn(connection, **wanted)
        print(json.dumps({"span_s": (began_s, time.monotonic()), "num_bytes": num_bytes}), flush=True)


if __name__ == "__main__":
    main()
