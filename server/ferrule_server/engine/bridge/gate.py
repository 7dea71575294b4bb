"""The gate and the inbox after it: jobs on their way to the engine thread.

The gate refuses excess jobs at once, so that a refusal never waits for a step::

    any thread --> admit --> put --> arrived (a queue) --> waiting, by principal --> next --> engine thread

An admitted job stays counted until its outcome is delivered; for a Generate or Forward, its last frame. There are three
bounds, checked in this order; a job that fails one has changed no count::

    QUEUE_FULL           jobs accepted and not finished, of all principals
    QUOTA_QUEUED_ROWS    rows of them, of one principal; of a Generate its prompt and a row for each branch
    QUOTA_PREFILL_RATE   prompt tokens per second, of one principal
"""

from __future__ import annotations

import contextlib
import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from ferrule_server.engine.jobs import (
    AppendResult,
    Entry,
    ForwardFrame,
    GenerateFrame,
    GenerateJob,
    HostCall,
    Job,
    Outcome,
    QueuedJob,
    Sink,
)
from ferrule_server.errors import QueueFull, QuotaExceeded, ResourceExhausted
from ferrule_server.fairness.bucket import Meter
from ferrule_server.fairness.places import Company, Places
from ferrule_server.fairness.queue import FairQueue
from ferrule_server.kv.per_principal import PerPrincipal
from ferrule_server.quotas import LimitsOf, unlimited

MAX_HOST_CALLS: Final = 1024
"""Most host calls of one principal that are not carried out yet: many times what arrives during a step. They have
places of their own: a full queue must not prevent releases, renewals and views."""

_HEADROOM: Final = 8
"""While other principals are active, a principal may hold this many times the places that are left."""
_MIN_RETRY_S: Final = 0.02
_MAX_RETRY_S: Final = 5.0
_UNKNOWN_RETRY_S: Final = 0.1
_MIN_RATE: Final = 0.1

Finished = tuple[Job[object], Sink, Outcome]


class Gate:
    """Counts jobs in and out, and refuses excess ones at once and from any thread.

    The places of the queue are shared by a dynamic threshold (:class:`~ferrule_server.fairness.places.Places`): a
    principal that floods leaves some places to the next one, and a principal that is alone may take them all.

    The prefill rate may be overdrawn (:class:`~ferrule_server.fairness.bucket.Meter`): a prompt of any length is
    admitted while the principal is less than a burst ahead of its rate, and the next ones wait. Charges for tokens that
    were not run (refused later, cancelled, answered from a record, joined) are refunded.

    Invariant: every count is that of the jobs admitted and not yet finished, and only principals with jobs hold rows.

    Args:
        max_jobs: Most jobs accepted and not finished.
        limits_of: The quotas of a principal; called with the gate's lock held.
        clock: Monotonic seconds.

    Attributes:
        refused: Jobs refused here, by reason; a new mapping with each refusal, so that readers need no lock.
    """

    def __init__(
        self, max_jobs: int, limits_of: LimitsOf = unlimited, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits_of = limits_of
        self._clock = clock
        self._lock = threading.Lock()
        self._jobs = Places(max_jobs)
        self._rows = Places()
        self._host_calls = Places()
        self._prefills = Meter("PREFILL_RATE", lambda principal: limits_of(principal).prefill_tokens_per_s, clock)
        self._company = Company()
        self._finished = _Finished()
        self.refused: Mapping[str, int] = {}
        self._refused_of: PerPrincipal[dict[str, int]] = PerPrincipal(dict)

    @property
    def num_jobs(self) -> int:
        """Jobs admitted and not finished."""
        return self._jobs.num_held

    def refused_of(self, principal: str) -> dict[str, int]:
        """Return how many jobs of one principal were refused here, by reason; a copy."""
        with self._lock:
            return self._refused_of.look(principal).copy()

    def admit(self, entries: list[Entry]) -> tuple[list[Entry], list[Finished]]:
        """Admit the jobs that arrived together, in order, as far as there is room.

        If a job is refused, the ones after it on the same sequence are refused for the same reason: if they overtook
        it, tokens would be appended in another order than they were sent.

        Returns:
            The admitted entries, each to be reported to :meth:`finish` once; and the refused ones with their errors.
        """
        admitted: list[Entry] = []
        refused: list[Finished] = []
        blocked: dict[str, ResourceExhausted] = {}
        with self._lock:
            now = self._clock()
            for entry in entries:
                job, sink = entry
                error = (blocked.get(_sequence_of(job)) if blocked else None) or self._enter(job, now)
                if error is None:
                    admitted.append(entry)
                    continue
                if cache_id := _sequence_of(job):
                    blocked[cache_id] = error
                self._count_refused(job.principal, error.reason)
                refused.append((job, sink, error))
        return admitted, refused

    def finish(self, finished: Iterable[Finished]) -> None:
        """Free the places of admitted jobs whose outcome is delivered now."""
        num_jobs = num_rows = 0
        with self._lock:
            now = self._clock()
            for job, _, outcome in finished:
                if isinstance(job, QueuedJob) and (type(outcome) is AppendResult or is_last(outcome)):
                    num_jobs += 1
                    num_rows += self._leave(job)
                elif isinstance(job, GenerateJob) and not job.has_begun:
                    self._begin(job)
                elif isinstance(job, HostCall):
                    self._host_calls.give_back(job.principal)
            if num_jobs:
                self._finished.add(num_jobs, num_rows, now)

    def pending(self) -> dict[str, tuple[int, int]]:
        """Return the number of unfinished jobs of each principal, and of their rows, without principals that have none.

        This takes 0.1 us for each of them.
        """
        with self._lock:
            return {name: (num_jobs, self._rows.of(name)) for name, num_jobs in self._jobs.held.items()}

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariant of the class holds."""
        with self._lock:
            for places in (self._jobs, self._rows, self._host_calls):
                places.check_integrity()
            self._prefills.check_integrity()
            assert self._rows.held.keys() <= self._jobs.held.keys(), f"rows of no job: {self._rows.held}"

    # ---- with the lock held -----------------------------------------------------------------------------------------

    def _enter(self, job: Job[object], now: float) -> ResourceExhausted | None:
        """Count one job in, or return why not; a warm-up is not counted."""
        if not isinstance(job, QueuedJob):
            return self._enter_host(job.principal, now) if isinstance(job, HostCall) else None
        principal, num_rows, num_tokens = job.principal, job.num_rows, job.num_prompt_tokens
        headroom = _HEADROOM if self._company.joins(principal, now) else math.inf
        if not self._jobs.has_room(principal, 1, headroom):
            wait_s = self._finished.wait_s(self.num_jobs, self._finished.num_jobs, now)
            return QueueFull(*self._jobs.bound(principal, 1, headroom), wait_s)
        max_rows = self._limits_of(principal).queued_rows
        if max_rows is not None and self._rows.of(principal) + num_rows > max_rows:
            return self._too_many_rows(principal, num_rows, max_rows, now)
        if num_tokens:
            if (error := self._prefills.excess(principal)) is not None:
                return error
            self._prefills.charge(principal, num_tokens)
        self._jobs.take(principal)
        if num_rows:
            self._rows.take(principal, num_rows)
        return None

    def _enter_host(self, principal: str, now: float) -> QueueFull | None:
        """Count one host call in, or return why not."""
        self._company.joins(principal, now)
        if (num_host_calls := self._host_calls.of(principal)) >= MAX_HOST_CALLS:
            return QueueFull(num_host_calls, MAX_HOST_CALLS)
        self._host_calls.take(principal)
        return None

    def _count_refused(self, principal: str, reason: str) -> None:
        self.refused = {**self.refused, reason: self.refused.get(reason, 0) + 1}
        own = self._refused_of.of(principal)
        own[reason] = own.get(reason, 0) + 1

    def _too_many_rows(self, principal: str, num_rows: int, max_rows: int, now: float) -> QuotaExceeded:
        """Return an error that says when the rows of a job would fit; never, if they are more than the quota."""
        held = self._rows.of(principal)
        wait_s = None
        if num_rows <= max_rows:
            wait_s = self._finished.wait_s(held + num_rows - max_rows, self._finished.num_rows, now)
        return QuotaExceeded("QUEUED_ROWS", held, max_rows, wait_s, needed=num_rows)

    def _leave(self, job: QueuedJob[object]) -> int:
        """Count one job out, and return its rows."""
        principal, num_rows = job.principal, job.num_rows
        self._jobs.give_back(principal)
        if num_rows:
            self._rows.give_back(principal, num_rows)
        if self._prefills.buckets and not (isinstance(job, GenerateJob) and job.has_begun):
            self._refund(job)
        return num_rows

    def _begin(self, job: GenerateJob) -> None:
        """Count a Generate whose prompt has been run as one row for each branch, however long it continues."""
        self._refund(job)
        self._rows.give_back(job.principal, job.num_rows)
        job.has_begun = True
        self._rows.take(job.principal, job.num_rows)

    def _refund(self, job: QueuedJob[object]) -> None:
        """Return what was charged for prompt tokens that were not run."""
        if (num_tokens := job.num_prompt_tokens - job.rows_run) > 0:
            self._prefills.refund(job.principal, num_tokens)


class _Finished:
    """Jobs and rows that were finished per second, over about the last second."""

    def __init__(self) -> None:
        self.num_jobs = self.num_rows = self._at = 0.0

    def add(self, num_jobs: int, num_rows: int, now: float) -> None:
        """Count what was finished at ``now``."""
        kept = math.exp(self._at - now)
        self.num_jobs = self.num_jobs * kept + num_jobs
        self.num_rows = self.num_rows * kept + num_rows
        self._at = now

    def wait_s(self, amount: int, level: float, now: float) -> float:
        """Return how long ``amount`` takes at one of these rates, within bounds; a guess if there is none."""
        rate = level * math.exp(min(0.0, self._at - now))
        return min(max(amount / rate, _MIN_RETRY_S), _MAX_RETRY_S) if rate > _MIN_RATE else _UNKNOWN_RETRY_S


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


def _sequence_of(job: Job[object]) -> str:
    """Return the cache id of the sequence that a job appends to, or an empty string."""
    return job.handle.cache_id if isinstance(job, QueuedJob) and job.handle is not None else ""


def is_last(outcome: Outcome) -> bool:
    """Return whether the job has no further outcome."""
    return not isinstance(outcome, GenerateFrame | ForwardFrame) or outcome.is_last
