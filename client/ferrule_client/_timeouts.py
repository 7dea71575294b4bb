"""Time limits of calls."""

from __future__ import annotations

import grpc

from ferrule_client.errors import DeadlineExceededError

__all__ = ["CLOSE_S", "USE_DEFAULT", "Timeout", "Until", "UseDefault", "too_late"]

CLOSE_S = 2.0
"""How long a stream that is closed waits for the server's own end of it."""


class UseDefault:
    """Says that a call takes the client's own timeout; None would mean no limit."""

    def __repr__(self) -> str:
        return "<the client's timeout>"


class Until:
    """A moment that several calls keep together, on the clock of ``time.monotonic``."""

    __slots__ = ("end_s",)

    def __init__(self, end_s: float) -> None:
        self.end_s = end_s


USE_DEFAULT = UseDefault()

Timeout = float | None | UseDefault | Until


def too_late(timeout: float | None) -> DeadlineExceededError:
    """Return the error for a stream on which nothing came in time."""
    text = f"no frame came on the stream within {timeout:.3g} s; give the call a longer timeout"
    return DeadlineExceededError(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", text)
