"""How long live handles are still served by a server that drains."""

from __future__ import annotations

import time


class Grace:
    """A stretch of time that can be set anew while it runs; before it is set for the first time it is over."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._end_s = 0.0

    @property
    def is_over(self) -> bool:
        """Whether it has passed."""
        return time.monotonic() >= self._end_s

    def extend(self, seconds: float) -> None:
        """Begin anew, and last so many seconds from now."""
        self.seconds = seconds
        self._end_s = time.monotonic() + seconds
