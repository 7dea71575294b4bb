"""Turns on the event loop: who works on a large request lets others run now and then."""

from __future__ import annotations

import asyncio
from typing import Final

from ferrule_server.api.limits import LOOP_SLICE

READ_BYTES: Final = 64 << 10
"""So much of a request is read in a few milliseconds, whatever its fields are."""
WRITE_BYTES: Final = 4 << 20
"""So much of a reply is written in a few milliseconds."""


class Turns:
    """Gives others their turn each time so many bytes, or ``LOOP_SLICE`` pieces, have been worked on.

    Args:
        limit_bytes: How many.
    """

    __slots__ = ("_limit_bytes", "_num_bytes", "_num_pieces")

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._num_bytes = self._num_pieces = 0

    async def spend(self, num_bytes: int) -> None:
        """Count one piece of work."""
        self._num_bytes += num_bytes
        self._num_pieces += 1
        if self._num_bytes >= self._limit_bytes or self._num_pieces >= LOOP_SLICE:
            self._num_bytes = self._num_pieces = 0
            await asyncio.sleep(0)
