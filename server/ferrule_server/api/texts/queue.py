"""The queue of jobs on texts: bounded in jobs and bytes, with turns between principals. It runs no jobs.

There are three lanes, each with one worker, so that a short text never waits for a long one. Within a lane principals
take turns by the seconds of work done for them.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from ferrule_server.errors import QueueFull
from ferrule_server.fairness.places import Company, Places
from ferrule_server.fairness.queue import FairQueue

_HEADROOM_ALONE: Final = 8
"""A principal that is alone may hold this many times the places that are left."""
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
class _Lane(Generic[_Item]):
    """The turns of one worker, and its job; None: the worker is idle."""

    waiting: FairQueue[Ticket[_Item]] = field(default_factory=FairQueue)
    running: Ticket[_Item] | None = None


class TextQueue(Generic[_Item]):
    """Decides which jobs on texts are accepted, and which one is next. For one thread.

    Places for jobs and for bytes are shared by dynamic thresholds (:class:`~ferrule_server.fairness.places.Places`).
    While several principals are active, one that holds as many jobs, or as many bytes, as are free gets no more. A
    flood of one principal therefore leaves about half of the places, and that of two a third. A principal that is alone
    may hold eight times as many as are free, so that the next principal finds a place.

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
        self._jobs = Places(max_jobs)
        self._bytes = Places(max_bytes)
        self._clock = clock
        self._lanes: dict[TextLane, _Lane[_Item]] = {lane: _Lane() for lane in TextLane}
        self._company = Company()
        self._mean_s = 0.0

    @property
    def num_jobs(self) -> int:
        """Jobs that wait or run."""
        return self._jobs.num_held

    @property
    def num_bytes(self) -> int:
        """Bytes of their texts."""
        return self._bytes.num_held

    def put(self, principal: str, lane: TextLane, num_bytes: int, item: _Item) -> Ticket[_Item]:
        """Accept a job, and return its ticket for :meth:`drop` and :meth:`done`.

        Raises:
            QueueFull: There is no place for the job, or the principal holds its part of the places.
        """
        self._check(principal, num_bytes)
        ticket = Ticket(principal, lane, num_bytes, item)
        self._jobs.take(principal)
        if num_bytes:
            self._bytes.take(principal, num_bytes)
        self._lanes[lane].waiting.add(principal, ticket)
        return ticket

    def take(self, name: TextLane) -> Ticket[_Item] | None:
        """Return the job to begin on a lane now; None if a job runs there, or none waits."""
        lane = self._lanes[name]
        if lane.running is not None or (taken := lane.waiting.take()) is None:
            return None
        lane.running = taken[1]
        return lane.running

    def done(self, ticket: Ticket[_Item], seconds: float) -> None:
        """Free the places of a job that has ended, and charge its duration to its principal."""
        lane = self._lanes[ticket.lane]
        assert lane.running is ticket, "the ticket is not that of the running job"
        lane.running = None
        lane.waiting.charge(ticket.principal, max(seconds, _MIN_COST_S))
        self._mean_s += _SMOOTHING * (seconds - self._mean_s)
        self._free(ticket)

    def drop(self, ticket: Ticket[_Item]) -> bool:
        """Forget a waiting job and free its places; return False if the job is running or has ended."""
        if not self._lanes[ticket.lane].waiting.remove(ticket.principal, ticket):
            return False
        self._free(ticket)
        return True

    def check_integrity(self) -> None:
        """Raise AssertionError unless the countable invariants of the class hold."""
        tickets = [lane.running for lane in self._lanes.values() if lane.running is not None]
        for name, lane in self._lanes.items():
            lane.waiting.check_integrity()
            assert all(ticket.lane is name for ticket in lane.waiting), f"a ticket is not in its lane {name}"
            tickets.extend(lane.waiting)
        for places, counted in ((self._jobs, len(tickets)), (self._bytes, sum(each.num_bytes for each in tickets))):
            places.check_integrity()
            assert places.num_held == counted <= places.total, f"{counted} were counted, {places.num_held} are held"

    def _check(self, principal: str, num_bytes: int) -> None:
        """Raise QueueFull unless the principal may hold one more job of so many bytes."""
        is_shared = self._company.joins(principal, self._clock()) or self._jobs.of(principal) < self.num_jobs
        headroom = 1 if is_shared else _HEADROOM_ALONE
        retry_after_s = min(max(self._mean_s, _MIN_RETRY_S), _MAX_RETRY_S)
        if not self._jobs.has_room(principal, 1, headroom):
            raise QueueFull(*self._jobs.bound(principal, 1, headroom), retry_after_s)
        if num_bytes > self._bytes.num_free or not self._bytes.has_room(principal, min(num_bytes, 1), headroom):
            held_bytes, limit = self._bytes.bound(principal, num_bytes, headroom)
            num_jobs = self.num_jobs if num_bytes > self._bytes.num_free else self._jobs.of(principal)
            raise QueueFull(num_jobs, limit, retry_after_s, num_bytes=held_bytes)

    def _free(self, ticket: Ticket[_Item]) -> None:
        self._jobs.give_back(ticket.principal)
        if ticket.num_bytes:
            self._bytes.give_back(ticket.principal, ticket.num_bytes)
