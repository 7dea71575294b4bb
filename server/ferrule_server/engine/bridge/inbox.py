"""Jobs on their way to the engine: lists that arrived together; principals take turns.

any thread --> put --> arrived (a queue) --> waiting, by principal --> next --> engine thread
"""

from __future__ import annotations

import contextlib
import itertools
import queue
from collections import OrderedDict, deque
from typing import Final

from ferrule_server.engine.jobs import Entry

_TURN_NS: Final = 200_000
"""Work on the jobs of one principal before the next one gets its turn."""


class _Waiting:
    """The waiting lists of one principal, and by how much its earlier lists have exceeded its turns."""

    __slots__ = ("lists", "owed_ns")

    def __init__(self) -> None:
        self.lists: deque[list[Entry]] = deque()
        self.owed_ns = 0


class Inbox:
    """Lists of jobs; the lists of one principal come out in the order in which they were put in.

    A list is never divided: its jobs are judged in their order and share a step if they can. Principals take turns by
    the time that their jobs take (deficit round robin: Shreedhar and Varghese, "Efficient fair queuing using deficit
    round robin", 1995). So a principal that floods delays others by one list.

    A list that arrives while no other waits is taken directly, and its time is charged to ``_unowed``, which is never
    read.

    Invariant: ``_waiting`` has no empty queue; each list that was put in comes out once.
    """

    def __init__(self) -> None:
        self._arrived: queue.SimpleQueue[list[Entry] | None] = queue.SimpleQueue()
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        self._num_waiting = 0
        self._unowed = _Waiting()
        self._current = self._unowed

    def put(self, entries: list[Entry] | None) -> None:
        """Add jobs that arrived together, an empty list only to wake the engine, or None to stop it; any thread."""
        self._arrived.put(entries)

    def __len__(self) -> int:
        """Return how many lists wait; from any thread, approximate."""
        return self._arrived.qsize() + self._num_waiting

    # ---- engine thread ----------------------------------------------------------------------------------------------

    def next(self, patience_s: float) -> list[Entry] | None:
        """Return the next list; None: the engine must stop.

        Args:
            patience_s: How long to wait if there is none.

        Raises:
            queue.Empty: There is none.
        """
        if not self._waiting:
            entries = self._arrived.get(timeout=patience_s) if patience_s > 0.0 else self._arrived.get_nowait()
            if not entries or self._arrived.empty():
                self._current = self._unowed
                return entries
            self._add(entries)
        while not self._arrived.empty():
            entries = self._arrived.get_nowait()
            if not entries:
                return entries
            self._add(entries)
        return self._take()

    def charge(self, work_ns: int) -> None:
        """Count the time that the last returned list has taken."""
        self._current.owed_ns += work_ns

    def earliest_ns(self) -> int | None:
        """Return when the oldest of the waiting lists was submitted; None: no list waits."""
        return min((each.lists[0][0][0].submitted_ns for each in self._waiting.values()), default=None)

    def drain(self) -> list[Entry]:
        """Return the jobs of every list of a closed engine, from any thread; each job comes out once."""
        entries: list[Entry] = []
        with contextlib.suppress(KeyError):  # another thread took the last one
            while self._waiting:
                entries.extend(itertools.chain.from_iterable(self._waiting.popitem()[1].lists))
        self._num_waiting = 0
        with contextlib.suppress(queue.Empty):
            while True:
                entries.extend(self._arrived.get_nowait() or ())
        return entries

    def _add(self, entries: list[Entry]) -> None:
        principal = entries[0][0].principal
        waiting = self._waiting.get(principal)
        if waiting is None:
            waiting = self._waiting[principal] = _Waiting()
        waiting.lists.append(entries)
        self._num_waiting += 1

    def _take(self) -> list[Entry]:
        """Return a list of the first principal that has not used up its turns."""
        while True:
            principal, waiting = next(iter(self._waiting.items()))
            if len(self._waiting) == 1:
                waiting.owed_ns = 0  # no other principal needed the time
            if waiting.owed_ns < _TURN_NS:
                break
            waiting.owed_ns -= _TURN_NS
            self._waiting.move_to_end(principal)
        self._current = waiting
        self._num_waiting -= 1
        entries = waiting.lists.popleft()
        if not waiting.lists:
            del self._waiting[principal]
        return entries
