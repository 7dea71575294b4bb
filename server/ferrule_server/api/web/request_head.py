"""Reads the head of one HTTP request within bounds of time and size, whatever arrives."""

from __future__ import annotations

import socket
import time
from typing import Final

HEAD_S: Final = 10.0
"""How long a request may take to arrive, from the connection on: who sends a byte now and then gains nothing."""
MAX_HEAD_BYTES: Final = 16 << 10

_ENDS: Final = (b"\r\n\r\n", b"\n\n", b"\n\r\n")
_LONGEST_END: Final = 4
_RECEIVE_BYTES: Final = 4096


class BadHead(Exception):
    """What arrived is no request that can be answered.

    Args:
        status: The HTTP status it is answered with.
        message: What is wrong, for whoever sent it.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def read_head(connection: socket.socket, head_s: float = HEAD_S) -> bytes:
    """Return the request line and the headers, up to the empty line; empty if the client went away before.

    Raises:
        BadHead: It is too slow, too long, or not HTTP at all.
        OSError: The connection broke.
    """
    deadline = time.monotonic() + head_s
    head = bytearray()
    while True:
        chunk = _receive(connection, deadline)
        if not chunk:
            return b""
        searched = max(0, len(head) - _LONGEST_END)
        head += chunk
        if not head[:1].isalpha():
            raise BadHead(400, "this port speaks plain HTTP/1.1")
        found = [at + len(end) for end in _ENDS if (at := head.find(end, searched)) >= 0]
        if found and min(found) <= MAX_HEAD_BYTES:
            return bytes(head[: min(found)])
        if len(head) > MAX_HEAD_BYTES:
            raise BadHead(431, f"the request line and headers may take {MAX_HEAD_BYTES} bytes")


def _receive(connection: socket.socket, deadline: float) -> bytes:
    remaining_s = deadline - time.monotonic()
    try:
        if remaining_s <= 0.0:
            raise TimeoutError
        connection.settimeout(remaining_s)
        return connection.recv(_RECEIVE_BYTES)
    except TimeoutError:
        raise BadHead(408, "the request did not arrive in time") from None
