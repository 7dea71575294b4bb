"""The messages between the server and a process that runs its chat templates, over a socket pair.

The server sends requests, each a frame of JSON. The process answers each with an outcome and a text. The process runs
code of the model, so the server parses nothing in an answer::

    request   length (4 bytes) | JSON: {"compile": {...}} or {"render": ..., "variables": {...}}
    answer    outcome (1 byte) | length (4 bytes) | text in UTF-8
"""

from __future__ import annotations

import enum
import socket
import struct
import time
from typing import Final

_LENGTH: Final = struct.Struct("!I")
_HEAD: Final = struct.Struct("!BI")


class Outcome(enum.IntEnum):
    """The outcome of a request."""

    DONE = 0
    """The text is the answer."""
    REFUSED = 1
    """The template failed; the text is its message, or that of Python."""
    TOO_LONG = 2
    """The text would be longer than the limit."""
    NOT_UTF8 = 3
    """The text contains half a surrogate pair."""
    OUT_OF_MEMORY = 4
    """The process has no memory left and ends after this answer."""


class Ended(Exception):
    """The other end is gone, or does not follow the protocol."""


def send_request(link: socket.socket, content: bytes, deadline_s: float) -> None:
    """Send a request.

    Raises:
        TimeoutError: It was not sent before ``deadline_s`` of ``time.monotonic()``.
        Ended: The process is gone.
    """
    link.settimeout(_left(deadline_s))
    try:
        link.sendall(_LENGTH.pack(len(content)) + content)
    except ConnectionError as error:
        raise Ended from error


def receive_request(link: socket.socket) -> bytes:
    """Wait for the next request, without a limit, and return it.

    Raises:
        Ended: The server is gone.
    """
    (length,) = _LENGTH.unpack(_receive(link, _LENGTH.size, None))
    return _receive(link, length, None)


def send_answer(link: socket.socket, outcome: Outcome, text: str) -> None:
    """Send an answer."""
    content = text.encode("utf-8", "replace")
    link.sendall(_HEAD.pack(outcome, len(content)) + content)


def receive_answer(link: socket.socket, max_bytes: int, deadline_s: float) -> tuple[Outcome, str]:
    """Return the next answer.

    Raises:
        TimeoutError: It did not arrive before ``deadline_s`` of ``time.monotonic()``.
        Ended: The process is gone, or sent something other than an answer of at most ``max_bytes``.
    """
    kind, length = _HEAD.unpack(_receive(link, _HEAD.size, deadline_s))
    if length > max_bytes:
        raise Ended
    try:
        return Outcome(kind), _receive(link, length, deadline_s).decode("utf-8")
    except ValueError as error:
        raise Ended from error


def _receive(link: socket.socket, num_bytes: int, deadline_s: float | None) -> bytes:
    content = bytearray(num_bytes)
    view, filled = memoryview(content), 0
    while filled < num_bytes:
        link.settimeout(None if deadline_s is None else _left(deadline_s))
        try:
            num_received = link.recv_into(view[filled:])
        except ConnectionError as error:
            raise Ended from error
        if not num_received:
            raise Ended
        filled += num_received
    return bytes(content)


def _left(deadline_s: float) -> float:
    """Return the seconds until a deadline.

    Raises:
        TimeoutError: It has passed.
    """
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
