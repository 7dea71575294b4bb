"""A queue in which principals take turns by the measured cost of their items.

Start-time fair queueing (Goyal, Vin and Cheng, "Start-time fair queuing", SIGCOMM 1996). Each principal has a tag, the
cost of its items so far, and the principal with the lowest tag is next. The cost is charged after an item was served::

                              tag of A   tag of B
    A's first item is served    0.0        -     A has 50 more waiting
    B adds an item              0.0       0.0    B begins at the virtual time, the tag of the item taken last
    A's first item cost 2.3     2.3       0.0    B is next, however many items of A arrived before
"""

from __future__ import annotations

import contextlib
import heapq
from collections import deque
from collections.abc import Iterator
from typing import Final, Generic, TypeVar

_T = TypeVar("_T")

_MIN_SWEEP: Final = 64


class FairQueue(Generic[_T]):
    """Items by principal: those of one principal come out in order, and principals take turns by cost.

    A principal without a waiting item saves nothing up, and one that leaves while others wait stays behind them by what
    it has had. If nothing waits when a cost is charged, all costs are forgotten. Adding and taking an item each take
    time logarithmic in the number of principals that wait.

    Invariant: every principal in ``_waiting`` has an item, a tag of at least ``_now``, and exactly one entry in
    ``_heap``, whose tag is at most its own.

    Attributes:
        num_items: How many items wait; read only.
    """

    __slots__ = ("_heap", "_now", "_num_entries", "_sweep_at", "_tags", "_waiting", "num_items")

    def __init__(self) -> None:
        self._waiting: dict[str, deque[_T]] = {}
        self._tags: dict[str, float] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._num_entries = 0  # made so far; with equal tags the oldest entry is first
        self.num_items = 0
        self._now = 0.0
        self._sweep_at = _MIN_SWEEP

    def __iter__(self) -> Iterator[_T]:
        """Yield the items, those of one principal in order."""
        for items in self._waiting.values():
            yield from items

    def heads(self) -> Iterator[_T]:
        """Yield the next item of each principal."""
        return (items[0] for items in self._waiting.values())

    def add(self, principal: str, item: _T) -> None:
        """Add an item; a principal that had none begins at the virtual time at the earliest."""
        items = self._waiting.get(principal)
        if items is None:
            items = self._enter(principal)
        items.append(item)
        self.num_items += 1

    def take(self) -> tuple[str, _T] | None:
        """Take the next item out, and return it with its principal; None: nothing waits."""
        if not self._heap:
            return None
        heap, tags = self._heap, self._tags
        tag, _, principal = heap[0]
        while tag != tags[principal]:  # it was charged since it was entered
            self._num_entries += 1
            heapq.heapreplace(heap, (tags[principal], self._num_entries, principal))
            tag, _, principal = heap[0]
        self._now = tag
        items = self._waiting[principal]
        item = items.popleft()
        self.num_items -= 1
        if not items:
            del self._waiting[principal]
            heapq.heappop(heap)
        return principal, item

    def charge(self, principal: str, cost: float) -> None:
        """Count the cost of an item that was taken out, in any unit; with a cost of 0 its principal stays first."""
        if not self._waiting:
            self._tags.clear()
            self._now = 0.0
            return
        self._tags[principal] = self._tags.get(principal, self._now) + cost

    def remove(self, principal: str, item: _T) -> bool:
        """Take a waiting item out of turn; return False if it does not wait."""
        items = self._waiting.get(principal)
        if items is None or item not in items:
            return False
        items.remove(item)
        self.num_items -= 1
        if not items:
            del self._waiting[principal]
            self._heap = [entry for entry in self._heap if entry[2] != principal]
            heapq.heapify(self._heap)
        return True

    def drain(self) -> list[_T]:
        """Take all items out. Several threads may call this at once; each item then comes out once."""
        drained: list[_T] = []
        with contextlib.suppress(KeyError):  # another thread took the last one
            while self._waiting:
                drained.extend(self._waiting.popitem()[1])
        self._heap, self.num_items = [], 0
        return drained

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariant of the class holds."""
        assert all(self._waiting.values()), "a principal waits with nothing"
        assert self.num_items == sum(map(len, self._waiting.values())), f"{self.num_items} items are counted"
        assert sorted(name for _, _, name in self._heap) == sorted(self._waiting), "an entry for each that waits"
        for tag, _, name in self._heap:
            assert self._tags[name] >= max(tag, self._now), f"{name} has the tag {self._tags[name]} at {self._now}"

    def _enter(self, principal: str) -> deque[_T]:
        """Let a principal wait, and return the place of its items, which must get one."""
        if len(self._tags) >= self._sweep_at:
            self._sweep()
        items = self._waiting[principal] = deque()
        tag = self._tags[principal] = max(self._tags.get(principal, 0.0), self._now)
        self._num_entries += 1
        heapq.heappush(self._heap, (tag, self._num_entries, principal))
        return items

    def _sweep(self) -> None:
        """Forget tags without effect, whenever twice as many are kept as remained the last time."""
        self._tags = {name: tag for name, tag in self._tags.items() if tag > self._now or name in self._waiting}
        self._sweep_at = max(_MIN_SWEEP, 2 * len(self._tags))
