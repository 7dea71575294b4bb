"""Time limits of calls."""

from __future__ import annotations

__all__ = ["USE_DEFAULT", "Timeout", "Until", "UseDefault"]


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
