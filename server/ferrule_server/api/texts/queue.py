"""The queue of jobs on texts: bounded in jobs and bytes, with turns between principals. It runs no jobs.

There are three lanes, each with one worker, so that a short text never waits for a long one. Within a lane
principals take turns by start-time fair queueing (Goyal, Vin and Cheng, "Start-time fair queuing", SIGCOMM 1996): each
principal has a tag, the seconds of work done for it, and the principal with the lowest tag is next::

    lane of long texts    tag of A   tag of B
    A's first text runs       0.0        -     A has 50 more waiting
    B sends a text            0.0       0.0    B begins at the lane's virtual time, the tag of the running text
    A's first text ends       2.3       0.0    B is next, however many texts of A arrived before
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from ferrule_server.errors import QueueFull

_HEADROOM_ALONE: Final = 8
"""A principal that is alone may hold this many times the places that are left."""
_RECENT_S: Final = 60.0
"""Several principals are active if another one holds a job, or was seen within this time."""
_MIN_COST_S: Final = 1e-4
"""Least cost of a job, so that principals with very short jobs take turns like any other."""
_MIN_RETRY_S: Final = 0.05
_MAX_RETRY_S: Final = 5.0
_SMOOTHING: Final = 0.2
"""Weight of the newest job in the mean time of a job."""

_Item = TypeVar("_Item")


class TextLane(enum.Enum):
    """The worker of a job."""

    SHORT = "short"
    LONG = "long"
    CHAT = "chat"


@dataclass(eq=False, slots=True)
class Ticket(Generic[_Item]):
    """One job in the queue.

    Attributes:
        principal: The principal that sent it.
        lane: The lane that it waits in.
        num_bytes: Bytes of its text.
        item: The item of the queue's owner; the queue does not read it.
    """

    principal: str
    lane: TextLane
    num_bytes: int
    item: _Item


@dataclass(slots=True)
class _Held:
    """The places of one principal, for jobs that wait or run."""

    num_jobs: int = 0
    num_bytes: int = 0


@dataclass(slots=True)
class _Lane(Generic[_Item]):
    """The turns of one worker.

    Attributes:
        waiting: The waiting jobs of each principal, oldest first; with equal tags the first principal is next.
        running: The job of the worker; None: the worker is idle.
        tags: Seconds of work done for each principal that waits, runs, or is ahead of ``now``.
        now: The virtual time of the lane: the tag of the job that began last.
    """

    waiting: dict[str, dict[Ticket[_Item], None]] = field(default_factory=dict)
    running: Ticket[_Item] | None = None
    tags: dict[str, float] = field(default_factory=dict)
    now: float = 0.0

    def add(self, ticket: Ticket[_Item]) -> None:
        """Add a waiting job; a principal that had none here begins at the virtual time at the earliest."""
        if ticket.principal not in self.waiting:
            self.waiting[ticket.principal] = {}
            self.tags[ticket.principal] = max(self.tags.get(ticket.principal, 0.0), self.now)
        self.waiting[ticket.principal][ticket] = None

    def begin(self) -> Ticket[_Item] | None:
        """Take the next job out; None if a job runs, or none waits."""
        if self.running is not None or not self.waiting:
            return None
        principal = min(self.waiting, key=self.tags.__getitem__)
        self.now = self.tags[principal]
        self.running = next(iter(self.waiting[principal]))
        self.remove(self.running)
        return self.running

    def remove(self, ticket: Ticket[_Item]) -> bool:
        """Take a waiting job out; return False if it does not wait."""
        tickets = self.waiting.get(ticket.principal, {})
        if ticket not in tickets:
            return False
        del tickets[ticket]
        if not tickets:
            del self.waiting[ticket.principal]
        return True

    def end(self, seconds: float) -> None:
        """Charge the running job to its principal; forget the tags that no longer matter."""
        assert self.running is not None, "no job runs"
        self.tags[self.running.principal] += max(seconds, _MIN_COST_S)
        self.running = None
        if not self.waiting:
            self.tags, self.now = {}, 0.0
            return
        self.tags = {name: tag for name, tag in self.tags.items() if tag > self.now or name in self.waiting}

    def tickets(self) -> Iterator[Ticket[_Item]]:
        """Yield every job that waits or runs."""
        for tickets in self.waiting.values():
            yield from tickets
        if self.running is not None:
            yield self.running


class TextQueue(Generic[_Item]):
    """Decides which jobs on texts are accepted, and which one is next. For one thread.

    The places are shared by dynamic thresholds, as in :class:`~ferrule_server.engine.bridge.gate.Gate`, but more
    strictly: while several principals are active, a principal that holds as many jobs, or as many bytes, as are free
    gets no more. A flood of one principal therefore leaves about half of the places, and that of two a third. A
    principal that is alone may hold eight times as many as are free, so that the next principal finds a place.

    Invariants:
        * ``num_jobs`` and ``num_bytes`` are the sums over all jobs that wait or run, at most ``max_jobs`` and
          ``max_bytes``;
        * each lane runs at most one job;
        * before the job of a principal that has had none in a lane since the lane was last empty, at most one waiting
          job of each other principal begins there.

    Args:
        max_jobs: Most jobs that wait or run, in all lanes.
        max_bytes: Most bytes of their texts; not smaller than the largest job.
        clock: Monotonic seconds.
    """

    def __init__(self, max_jobs: int, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_jobs = max_jobs
        self._max_bytes = max_bytes
        self._clock = clock
        self._lanes: dict[TextLane, _Lane[_Item]] = {lane: _Lane() for lane in TextLane}
        self._held: dict[str, _Held] = {}
        self._last_principal: str | None = None
        self._shared_until = -math.inf
        self._mean_s = 0.0
        self.num_jobs = 0
        self.num_bytes = 0

    def put(self, principal: str, lane: TextLane, num_bytes: int, item: _Item) -> Ticket[_Item]:
        """Accept a job, and return its ticket for :meth:`drop` and :meth:`done`.

        Raises:
            QueueFull: There is no place for the job, or the principal holds its part of the places.
        """
        self._check(principal, num_bytes)
        ticket = Ticket(principal, lane, num_bytes, item)
        held = self._held.setdefault(principal, _Held())
        self._count(held, 1, num_bytes)
        self._lanes[lane].add(ticket)
        return ticket

    def take(self, lane: TextLane) -> Ticket[_Item] | None:
        """Return the job to begin on a lane now; None if a job runs there, or none waits."""
        return self._lanes[lane].begin()

    def done(self, ticket: Ticket[_Item], seconds: float) -> None:
        """Free the places of a job that has ended, and charge its duration to its principal."""
        lane = self._lanes[ticket.lane]
        assert lane.running is ticket, "the ticket is not that of the running job"
        lane.end(seconds)
        self._mean_s += _SMOOTHING * (seconds - self._mean_s)
        self._free(ticket)

    def drop(self, ticket: Ticket[_Item]) -> bool:
        """Forget a waiting job and free its places; return False if the job is running or has ended."""
        if not self._lanes[ticket.lane].remove(ticket):
            return False
        self._free(ticket)
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError unless the countable invariants of the class hold."""
        held: dict[str, _Held] = {}
        for name, lane in self._lanes.items():
            for ticket in lane.tickets():
                assert ticket.lane is name, f"{ticket} is in lane {name}"
                each = held.setdefault(ticket.principal, _Held())
                each.num_jobs += 1
                each.num_bytes += ticket.num_bytes
            assert all(lane.waiting.values()), "a principal waits with nothing"
            assert lane.waiting.keys() <= lane.tags.keys(), "a principal waits without a tag"
        assert held == self._held, f"{held} was counted, {self._held} is kept"
        assert self.num_jobs == sum(each.num_jobs for each in held.values()) <= self._max_jobs
        assert self.num_bytes == sum(each.num_bytes for each in held.values()) <= self._max_bytes

    def _check(self, principal: str, num_bytes: int) -> None:
        """Raise QueueFull unless the principal may hold one more job of so many bytes."""
        now = self._clock()
        if principal != self._last_principal:
            if self._last_principal is not None:
                self._shared_until = now + _RECENT_S
            self._last_principal = principal
        held = self._held.get(principal, _Held())
        free_jobs, free_bytes = self._max_jobs - self.num_jobs, self._max_bytes - self.num_bytes
        is_shared = held.num_jobs < self.num_jobs or now < self._shared_until
        headroom = 1 if is_shared else _HEADROOM_ALONE
        retry_after_s = min(max(self._mean_s, _MIN_RETRY_S), _MAX_RETRY_S)
        if free_jobs < 1:
            raise QueueFull(self.num_jobs, self._max_jobs, retry_after_s)
        if held.num_jobs >= headroom * free_jobs:
            raise QueueFull(held.num_jobs, headroom * free_jobs, retry_after_s)
        if num_bytes > free_bytes:
            raise QueueFull(self.num_jobs, self._max_bytes, retry_after_s, num_bytes=self.num_bytes)
        if held.num_bytes >= headroom * free_bytes > 0:
            raise QueueFull(held.num_jobs, headroom * free_bytes, retry_after_s, num_bytes=held.num_bytes)

    def _free(self, ticket: Ticket[_Item]) -> None:
        held = self._held[ticket.principal]
        self._count(held, -1, -ticket.num_bytes)
        if not held.num_jobs:
            del self._held[ticket.principal]

    def _count(self, held: _Held, num_jobs: int, num_bytes: int) -> None:
        held.num_jobs += num_jobs
        held.num_bytes += num_bytes
        self.num_jobs += num_jobs
        self.num_bytes += num_bytes
