"""The barrier: outcomes that show state of durable sequences wait until the journal has that state on the disk."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from ferrule_server.engine.bridge.gate import Finished


class Barrier:
    """Holds outcomes, each until a group of records is on the disk.

    Invariant: outcomes are released in the order in which they came, and none before its group is synced. Both threads
    deliver with the lock held, so no outcome overtakes an earlier one of the same job.

    Args:
        deliver: Takes outcomes that may be sent; any thread.
    """

    def __init__(self, deliver: Callable[[list[Finished]], None]) -> None:
        self._deliver = deliver
        self._lock = threading.Lock()
        self._held: deque[tuple[int, Finished]] = deque()
        self._synced = 0

    def __len__(self) -> int:
        return len(self._held)

    def pass_on(self, outcomes: list[tuple[int, Finished]]) -> None:
        """Deliver outcomes whose groups are synced, and hold the others; engine thread.

        Args:
            outcomes: Each with the number of the group that it depends on; these never decrease for one job.
        """
        with self._lock:
            free = [finished for group, finished in outcomes if group <= self._synced]
            self._held += [each for each in outcomes if each[0] > self._synced]
            if free:
                self._deliver(free)

    def release(self, synced: int) -> None:
        """Deliver what waited for groups up to ``synced``; journal thread."""
        with self._lock:
            self._synced = synced
            free: list[Finished] = []
            while self._held and self._held[0][0] <= synced:
                free.append(self._held.popleft()[1])
            if free:
                self._deliver(free)

    def take_all(self) -> list[Finished]:
        """Return what is held and hold nothing, after the journal has failed."""
        with self._lock:
            held, self._held = self._held, deque()
            return [finished for _, finished in held]
