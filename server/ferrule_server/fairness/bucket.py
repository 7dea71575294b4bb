"""Rates that may be overdrawn: a bucket, and a meter with one for each principal.

The size of a piece of work is often known only afterwards, and a piece may be larger than any burst. So a piece of any
size is admitted while the level is below the burst; the next ones wait until the rate has worked the excess off (the
continuous-state leaky bucket of the generic cell rate algorithm, ITU-T I.371)::

    level |      .
          |    . |   .
    burst |....|.......  .............. admitted again
          |  . |             .
        0 |____|____________________________ time
             a large piece
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ferrule_server.errors import QuotaExceeded

BURST_S: Final = 1.0
"""A principal that was idle may spend this many seconds of its rate at once."""

_MIN_RETRY_S: Final = 0.02
_MIN_SWEEP: Final = 64

RateOf = Callable[[str], int | None]
"""Returns the rate of a principal per second; None: it has no limit."""


@dataclass(eq=False, slots=True)
class Bucket:
    """How far the work is ahead of a rate. Times are in one unit, and the rate is per that unit.

    Invariant: ``level`` is at least 0.

    Attributes:
        at: The time of ``level``; while nothing was poured, any earlier time will do.
        rate: The rate since ``at``.
        level: Work done beyond what the rate has allowed.
    """

    at: float = 0.0
    rate: float = 1.0
    level: float = 0.0

    def settle(self, now: float) -> float:
        """Reduce the level by what the rate has allowed since the last time, and return it."""
        self.level = max(0.0, self.level - self.rate * (now - self.at))
        self.at = now
        return self.level

    def pour(self, amount: float, now: float) -> None:
        """Count work; a negative amount takes back what was not done, down to nothing."""
        self.level = max(0.0, self.settle(now) + amount)

    def is_empty(self, now: float) -> bool:
        """Return whether nothing is left at ``now``, so that the bucket can be forgotten."""
        return self.level <= self.rate * (now - self.at)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariant of the class holds."""
        assert self.level >= 0.0, f"the level is {self.level}"


class Meter:
    """Measures one rate of every principal. For one thread, or under the owner's lock; no method waits.

    While a principal is less than ``BURST_S`` ahead of its rate, it may spend, whatever the amount; after that it is
    refused until its bucket has sunk. With a rate of 0 it is always refused.

    Invariant: principals without a limit are never remembered. Principals with an empty bucket are forgotten whenever
    twice as many are remembered as remained the last time.

    Args:
        quota: Name of the quota in the error, such as ``CALL_RATE``.
        rate_of: Returns the rate of a principal; called each time, so that a new limit applies at once.
        clock: Monotonic seconds.

    Attributes:
        buckets: Those of the principals that are remembered; read only.
    """

    def __init__(self, quota: str, rate_of: RateOf, clock: Callable[[], float] = time.monotonic) -> None:
        self._quota = quota
        self._rate_of = rate_of
        self._clock = clock
        self.buckets: dict[str, Bucket] = {}
        self._sweep_at = _MIN_SWEEP

    def check(self, principal: str) -> None:
        """Check that the principal may spend now; nothing is charged.

        Raises:
            QuotaExceeded: It is ahead of its rate by ``BURST_S`` or more; the error says when to try again.
        """
        if (error := self.excess(principal)) is not None:
            raise error

    def excess(self, principal: str) -> QuotaExceeded | None:
        """Return the error that :meth:`check` raises, or None."""
        wait_s = self.wait_s(principal)
        if not wait_s:
            return None
        bucket = self.buckets[principal]
        retry_after_s = None if math.isinf(wait_s) else wait_s
        return QuotaExceeded(self._quota, math.ceil(bucket.level), int(bucket.rate), retry_after_s)

    def charge(self, principal: str, amount: int) -> float:
        """Add to what the principal has spent, and return the time until it may spend more, in seconds; 0.0: now.

        A charge is never refused, so call :meth:`check` first.
        """
        bucket = self._settled(principal)
        if bucket is None:
            return 0.0
        bucket.pour(amount, bucket.at)
        return _wait_s(bucket)

    def refund(self, principal: str, amount: int) -> None:
        """Reverse a charge for work that was not done."""
        if principal in self.buckets and (bucket := self._settled(principal)) is not None:
            bucket.pour(-amount, bucket.at)

    def wait_s(self, principal: str) -> float:
        """Return the time until :meth:`check` allows the principal to spend, in seconds; 0.0: now."""
        bucket = self._settled(principal)
        return 0.0 if bucket is None else _wait_s(bucket)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariant of the class holds."""
        for bucket in self.buckets.values():
            bucket.check_integrity()
        assert len(self.buckets) <= self._sweep_at, f"{len(self.buckets)} principals are remembered"

    def _settled(self, principal: str) -> Bucket | None:
        """Return the bucket of a principal as of now; None: it has no limit."""
        rate = self._rate_of(principal)
        if rate is None:
            self.buckets.pop(principal, None)
            return None
        now = self._clock()
        bucket = self.buckets.get(principal)
        if bucket is None:
            self._sweep(now)
            bucket = self.buckets[principal] = Bucket(now)
        bucket.rate = rate
        bucket.settle(now)
        return bucket

    def _sweep(self, now: float) -> None:
        """Forget the empty buckets, whenever twice as many are remembered as remained the last time."""
        if len(self.buckets) >= self._sweep_at:
            self.buckets = {name: bucket for name, bucket in self.buckets.items() if not bucket.is_empty(now)}
            self._sweep_at = max(_MIN_SWEEP, 2 * len(self.buckets))


def _wait_s(bucket: Bucket) -> float:
    """Return the time until the level is below a burst, and a little more."""
    if bucket.level < bucket.rate * BURST_S:
        return 0.0
    return (bucket.level - bucket.rate * BURST_S) / bucket.rate + _MIN_RETRY_S if bucket.rate else math.inf
