"""Places that principals share, so that none can take all of them from the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

RECENT_S: Final = 60.0
"""Several principals are active if another one was seen within this time."""


class Places:
    """Places of one kind (jobs, bytes), counted by principal, with a dynamic threshold.

    A principal may hold at most ``headroom`` times the places that are left (Choudhury and Hahne, "Dynamic queue length
    thresholds for shared-memory packet switches", 1998), but always one piece that fits. With a headroom of 1, a flood
    of one principal leaves half of the places, and that of two a third; with 8, a ninth.

    Invariant: ``num_held`` is the sum over principals, each of which holds at least 1. Only :meth:`take` without
    :meth:`has_room` before it can exceed ``total``; then there is no room until enough is given back.

    Args:
        total: All places; infinite to count them only.

    Attributes:
        num_held: Places that are taken; read only.
        held: The same by principal; read only.
    """

    __slots__ = ("_held", "held", "num_held", "total")

    def __init__(self, total: float = math.inf) -> None:
        self.total = total
        self.num_held = 0
        self._held: dict[str, int] = {}
        self.held: Mapping[str, int] = self._held

    @property
    def num_free(self) -> float:
        """Places that are left; negative if ``total`` is exceeded."""
        return self.total - self.num_held

    def of(self, principal: str) -> int:
        """Return how many places a principal holds."""
        return self._held.get(principal, 0)

    def has_room(self, principal: str, num_places: int = 1, headroom: float = 1.0) -> bool:
        """Return whether a principal may take this many more places."""
        num_free = self.total - self.num_held
        if num_places > num_free:
            return False
        held = self._held.get(principal)
        return held is None or held + num_places <= headroom * num_free

    def bound(self, principal: str, num_places: int, headroom: float) -> tuple[int, int]:
        """Return the bound that keeps a principal from more places: how many are held, and the limit, for an error."""
        if num_places > self.num_free:
            return self.num_held, int(self.total)
        return self._held.get(principal, 0), int(headroom * self.num_free)

    def take(self, principal: str, num_places: int = 1) -> None:
        """Take places, at least 1; this never fails."""
        held = self._held
        held[principal] = held[principal] + num_places if principal in held else num_places
        self.num_held += num_places

    def give_back(self, principal: str, num_places: int = 1) -> None:
        """Give back places that were taken."""
        held = self._held
        if held[principal] == num_places:
            del held[principal]
        else:
            held[principal] -= num_places
        self.num_held -= num_places

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariant of the class holds."""
        assert all(held > 0 for held in self._held.values()), f"a principal holds less than 1: {self._held}"
        assert self.num_held == sum(self._held.values()), f"{self.num_held} are counted, {self._held} are held"


class Company:
    """Whether a principal is alone: no other one was seen within ``RECENT_S``.

    Invariant: ``_shared_until`` is at most ``RECENT_S`` after the newest ``now``.
    """

    __slots__ = ("_last", "_shared_until")

    def __init__(self) -> None:
        self._last: str | None = None
        self._shared_until = -math.inf

    def joins(self, principal: str, now: float) -> bool:
        """Note a principal that is seen at ``now``, in seconds, and return whether others are active."""
        if principal != self._last:
            if self._last is not None:
                self._shared_until = now + RECENT_S
            self._last = principal
        return now < self._shared_until
