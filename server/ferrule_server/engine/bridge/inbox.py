"""Jobs on their way to the engine: lists that arrived together; principals take turns.

any thread --> put --> arrived (a queue) --> waiting, by principal --> next --> engine thread
"""

from __future__ import annotations

import contextlib
import itertools
import queue

from ferrule_server.engine.jobs import Entry
from ferrule_server.fairness.queue import FairQueue


class Inbox:
    """Lists of jobs; the lists of one principal come out in the order in which they were put in.

    A list is never divided: its jobs are judged in their order and share a step if they can. Principals take turns by
    the time that their jobs take, so a principal that floods delays others by one list.

    A list that arrives while no other waits is taken directly, and its time is charged to no principal.

    Invariant: each list that was put in comes out once.
    """

    def __init__(self) -> None:
        self._arrived: queue.SimpleQueue[list[Entry] | None] = queue.SimpleQueue()
        self._waiting: FairQueue[list[Entry]] = FairQueue()
        self._principal: str | None = None  # that of the last returned list, if it had to wait

    def put(self, entries: list[Entry] | None) -> None:
        """Add jobs that arrived together, an empty list only to wake the engine, or None to stop it; any thread."""
        self._arrived.put(entries)

    def __len__(self) -> int:
        """Return how many lists wait; from any thread, approximate."""
        return self._arrived.qsize() + self._waiting.num_items

    # ---- engine thread ----------------------------------------------------------------------------------------------

    def next(self, patience_s: float) -> list[Entry] | None:
        """Return the next list; None: the engine must stop.

        Args:
            patience_s: How long to wait if there is none.

        Raises:
            queue.Empty: There is none.
        """
        if not self._waiting.num_items:
            entries = self._arrived.get(timeout=patience_s) if patience_s > 0.0 else self._arrived.get_nowait()
            if not entries or self._arrived.empty():
                self._principal = None
                return entries
            self._waiting.add(entries[0][0].principal, entries)
        while not self._arrived.empty():
            entries = self._arrived.get_nowait()
            if not entries:
                return entries
            self._waiting.add(entries[0][0].principal, entries)
        taken = self._waiting.take()
        if taken is None:
            raise queue.Empty
        self._principal, entries = taken
        return entries

    def charge(self, work_ns: int) -> None:
        """Count the time that the last returned list has taken."""
        if self._principal is not None:
            self._waiting.charge(self._principal, work_ns)

    def earliest_ns(self) -> int | None:
        """Return when the oldest of the waiting lists was submitted; None: no list waits."""
        return min((entries[0][0].submitted_ns for entries in self._waiting.heads()), default=None)

    def drain(self) -> list[Entry]:
        """Return the jobs of every list of a closed engine, from any thread; each job comes out once."""
        entries = list(itertools.chain.from_iterable(self._waiting.drain()))
        with contextlib.suppress(queue.Empty):
            while True:
                entries.extend(self._arrived.get_nowait() or ())
        return entries
