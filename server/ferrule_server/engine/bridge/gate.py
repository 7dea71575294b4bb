"""The gate: refuses excess jobs before they reach the engine thread, so that a refusal never waits for a step.

An admitted job stays counted until its outcome is delivered; for a Generate or Forward, its last frame. There are three
bounds, checked in this order; a job that fails one has changed no count::

    QUEUE_FULL           jobs accepted and not finished, of all principals
    QUOTA_QUEUED_ROWS    rows of them, of one principal; of a Generate its prompt and a row for each branch
    QUOTA_PREFILL_RATE   prompt tokens per second, of one principal
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
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
from ferrule_server.kv.per_principal import PerPrincipal
from ferrule_server.quotas import LimitsOf, QuotaLimits, unlimited

MAX_HOST_CALLS: Final = 1024
"""Most host calls of one principal that are not carried out yet: many times what arrives during a step. They have
places of their own: a full queue must not prevent releases, renewals and views."""

BURST_S: Final = 1.0
"""A principal that was idle may send this many seconds of its prefill rate at once."""

_HEADROOM: Final = 8
"""While other principals are active, a principal may hold this many times the places that are left."""
_ABOUT_S: Final = 60.0
"""Other principals are active if one of them was seen within this time."""
_MIN_RETRY_S: Final = 0.02
_MAX_RETRY_S: Final = 5.0
_UNKNOWN_RETRY_S: Final = 0.1
_MIN_RATE: Final = 0.1
_MIN_SWEEP: Final = 64

Finished = tuple[Job[object], Sink, Outcome]


@dataclass(slots=True)
class _Usage:
    """The unfinished jobs of one principal, and the tokens by which it is ahead of its prefill rate."""

    num_jobs: int = 0
    num_host_calls: int = 0
    rows: int = 0
    debt: float = 0.0
    debt_at: float = 0.0
    rate: int = 0

    def settle(self, rate: int | None, now: float) -> None:
        """Reduce the debt by what the rate has allowed since the last time."""
        self.debt = 0.0 if rate is None else max(0.0, self.debt - rate * (now - self.debt_at))
        self.debt_at, self.rate = now, rate or 0

    def is_idle(self, now: float) -> bool:
        """Return whether forgetting it changes nothing."""
        return not (self.num_jobs or self.num_host_calls) and self.debt <= self.rate * (now - self.debt_at)


class Gate:
    """Counts jobs in and out, and refuses excess ones at once and from any thread.

    The places of the queue are shared by dynamic thresholds (Choudhury and Hahne, "Dynamic queue length thresholds for
    shared-memory packet switches", 1998): while several principals are active, each may hold at most ``_HEADROOM``
    times the places that are left. So a principal that floods leaves some places to the next one. A principal that is
    alone may take them all.

    The prefill rate is a bucket that may be overdrawn: a prompt of any length is admitted while the principal is less
    than a burst ahead of its rate, and the next ones wait until the debt is worked off. Charges for tokens that were
    not run (refused later, cancelled, answered from a record, joined) are refunded.

    Invariant: ``num_jobs`` is the sum over principals, and every count is that of the jobs admitted and not yet
    finished. Principals without jobs and debt are forgotten once there are many.

    Args:
        max_jobs: Most jobs accepted and not finished.
        limits_of: The quotas of a principal; called with the gate's lock held.
        clock: Monotonic seconds.

    Attributes:
        num_jobs: Jobs admitted and not finished; read only.
        refused: Jobs refused here, by reason; a new mapping with each refusal, so that readers need no lock.
    """

    def __init__(
        self, max_jobs: int, limits_of: LimitsOf = unlimited, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_jobs = max_jobs
        self._limits_of = limits_of
        self._clock = clock
        self._lock = threading.Lock()
        self.num_jobs = 0
        self._usages: dict[str, _Usage] = {}
        self._sweep_at = _MIN_SWEEP
        self._last_principal: str | None = None
        self._shared_until = -math.inf
        self._finished_jobs = _Rate()
        self._finished_rows = _Rate()
        self.refused: Mapping[str, int] = {}
        self._refused_of: PerPrincipal[dict[str, int]] = PerPrincipal(dict)

    @property
    def num_principals(self) -> int:
        """Number of principals with a usage record."""
        return len(self._usages)

    def refused_of(self, principal: str) -> Mapping[str, int]:
        """Return how many jobs of one principal were refused here, by reason; a copy."""
        with self._lock:
            return dict(self._refused_of.look(principal))

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
                cache_id = job.handle.cache_id if isinstance(job, QueuedJob) and job.handle is not None else ""
                error = blocked.get(cache_id) or self._enter(job, now)
                if error is None:
                    admitted.append(entry)
                    continue
                if cache_id:
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
                    num_rows += self._leave(job, now)
                elif isinstance(job, GenerateJob) and not job.has_begun:
                    self._begin(job, now)
                elif isinstance(job, HostCall):
                    self._usages[job.principal].num_host_calls -= 1
            self.num_jobs -= num_jobs
            if num_jobs:
                self._finished_jobs.add(num_jobs, now)
                self._finished_rows.add(num_rows, now)

    def pending(self) -> dict[str, tuple[int, int]]:
        """Return the number of unfinished jobs of each principal, and of their rows, without principals that have none.

        This takes 0.1 us for each principal with a usage record.
        """
        with self._lock:
            return {name: (usage.num_jobs, usage.rows) for name, usage in self._usages.items() if usage.num_jobs}

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariant of the class holds."""
        with self._lock:
            total = sum(usage.num_jobs for usage in self._usages.values())
            assert total == self.num_jobs >= 0, f"{total} jobs of principals, {self.num_jobs} counted"
            for name, usage in self._usages.items():
                assert min(usage.num_jobs, usage.rows) >= 0 <= usage.debt, f"{name} has {usage}"
                assert usage.num_jobs or not usage.rows, f"{name} has rows of no job: {usage}"

    # ---- with the lock held -----------------------------------------------------------------------------------------

    def _enter(self, job: Job[object], now: float) -> ResourceExhausted | None:
        """Count one job in, or return why not; a warm-up is not counted."""
        if not isinstance(job, QueuedJob):
            return self._enter_host(job.principal, now) if isinstance(job, HostCall) else None
        usage = self._usage_of(job.principal, now)
        limits = self._limits_of(job.principal)
        num_rows, num_tokens = job.num_rows, job.num_prompt_tokens
        if num_tokens:
            usage.settle(limits.prefill_tokens_per_s, now)
        free = self._max_jobs - self.num_jobs
        if free <= 0 or (now < self._shared_until and usage.num_jobs >= _HEADROOM * free):
            return self._queue_full(usage, free, now)
        if (error := self._too_much(usage, limits, num_rows, num_tokens, now)) is not None:
            return error
        self.num_jobs += 1
        usage.num_jobs += 1
        usage.rows += num_rows
        if limits.prefill_tokens_per_s is not None:
            usage.debt += num_tokens
        return None

    def _count_refused(self, principal: str, reason: str) -> None:
        self.refused = {**self.refused, reason: self.refused.get(reason, 0) + 1}
        own = self._refused_of.of(principal)
        own[reason] = own.get(reason, 0) + 1

    def _enter_host(self, principal: str, now: float) -> QueueFull | None:
        """Count one host call in, or return why not."""
        usage = self._usage_of(principal, now)
        if usage.num_host_calls >= MAX_HOST_CALLS:
            return QueueFull(usage.num_host_calls, MAX_HOST_CALLS)
        usage.num_host_calls += 1
        return None

    def _queue_full(self, usage: _Usage, free: int, now: float) -> QueueFull:
        """Return an error with the bound that was hit: that of all jobs, or the principal's if it is not alone."""
        num_jobs, limit = (self.num_jobs, self._max_jobs) if free <= 0 else (usage.num_jobs, _HEADROOM * free)
        return QueueFull(num_jobs, limit, self._finished_jobs.wait_s(self.num_jobs, now))

    def _too_much(
        self, usage: _Usage, limits: QuotaLimits, num_rows: int, num_tokens: int, now: float
    ) -> QuotaExceeded | None:
        """Return the error of the first quota of the principal that the job exceeds, None if it fits."""
        max_rows, rate = limits.queued_rows, limits.prefill_tokens_per_s
        if max_rows is not None and num_rows > max_rows:
            return QuotaExceeded("QUEUED_ROWS", usage.rows, max_rows, None, needed=num_rows)
        if max_rows is not None and usage.rows + num_rows > max_rows:
            wait_s = self._finished_rows.wait_s(usage.rows + num_rows - max_rows, now)
            return QuotaExceeded("QUEUED_ROWS", usage.rows, max_rows, wait_s, needed=num_rows)
        if rate is not None and num_tokens and usage.debt >= rate * BURST_S:
            owed_s = (usage.debt - rate * BURST_S) / rate + _MIN_RETRY_S if rate else None
            return QuotaExceeded("PREFILL_RATE", math.ceil(usage.debt), rate, owed_s)
        return None

    def _leave(self, job: QueuedJob[object], now: float) -> int:
        """Count one job out, and return its rows."""
        usage, num_rows = self._usages[job.principal], job.num_rows
        usage.num_jobs -= 1
        usage.rows -= num_rows
        if usage.debt and not (isinstance(job, GenerateJob) and job.has_begun):
            _refund(usage, job, now)
        return num_rows

    def _begin(self, job: GenerateJob, now: float) -> None:
        """Count a Generate whose prompt has been run as one row for each branch, however long it continues."""
        usage = self._usages[job.principal]
        _refund(usage, job, now)
        usage.rows -= job.num_rows
        job.has_begun = True
        usage.rows += job.num_rows

    def _usage_of(self, principal: str, now: float) -> _Usage:
        if principal != self._last_principal:
            if self._last_principal is not None:
                self._shared_until = now + _ABOUT_S
            self._last_principal = principal
        usage = self._usages.get(principal)
        if usage is None:
            self._sweep(now)
            usage = self._usages[principal] = _Usage(debt_at=now)
        return usage

    def _sweep(self, now: float) -> None:
        """Forget idle principals when there are twice as many principals as the last sweep left."""
        if len(self._usages) >= self._sweep_at:
            self._usages = {name: usage for name, usage in self._usages.items() if not usage.is_idle(now)}
            self._sweep_at = max(_MIN_SWEEP, 2 * len(self._usages))


class _Rate:
    """A rate per second, over about the last second."""

    def __init__(self) -> None:
        self._level = 0.0
        self._at = 0.0

    def add(self, amount: int, now: float) -> None:
        """Count ``amount`` at ``now``."""
        self._level = self._level * math.exp(self._at - now) + amount
        self._at = now

    def wait_s(self, amount: int, now: float) -> float:
        """Return how long ``amount`` takes at this rate, within bounds; a guess if nothing was finished recently."""
        rate = self._level * math.exp(min(0.0, self._at - now))
        return min(max(amount / rate, _MIN_RETRY_S), _MAX_RETRY_S) if rate > _MIN_RATE else _UNKNOWN_RETRY_S


def _refund(usage: _Usage, job: QueuedJob[object], now: float) -> None:
    """Return what was charged for prompt tokens that were not run."""
    if usage.debt and job.num_prompt_tokens:
        usage.settle(usage.rate, now)
        usage.debt = max(0.0, usage.debt - max(0, job.num_prompt_tokens - job.rows_run))


def is_last(outcome: Outcome) -> bool:
    """Return whether the job has no further outcome."""
    return not isinstance(outcome, GenerateFrame | ForwardFrame) or outcome.is_last
