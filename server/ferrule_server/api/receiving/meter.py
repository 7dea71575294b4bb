"""A meter: what each principal has spent of a rate, and whether it may spend more now."""

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


@dataclass(slots=True)
class _Debt:
    """By how much a principal is ahead of its rate, at the time ``at`` on the meter's clock."""

    amount: float
    at: float
    rate: int

    def settle(self, rate: int, now: float) -> None:
        """Let the debt shrink by what the rate allowed since the last time."""
        self.amount = max(0.0, self.amount - rate * (now - self.at))
        self.at, self.rate = now, rate

    def is_paid(self, now: float) -> bool:
        """Whether forgetting it changes nothing."""
        return self.amount <= self.rate * (now - self.at)


class Meter:
    """Measures one rate of every principal. Pure state for one thread; nothing waits.

    The rate is a bucket that may be overdrawn: while a principal is less than ``BURST_S`` ahead of its rate, it may
    spend, whatever the amount; after that it is refused until the debt has shrunk. The prefill rate of the engine's
    gate works in the same way.

    Invariant: every debt is at least 0. Principals without a limit are never remembered. Principals without a debt are
    forgotten whenever twice as many are remembered as were left over the last time.

    Args:
        quota: Name of the quota in the error, such as ``CALL_RATE``.
        rate_of: The rate of a principal; asked each time, so that a new limit holds at once.
        clock: Monotonic seconds.
    """

    def __init__(self, quota: str, rate_of: RateOf, clock: Callable[[], float] = time.monotonic) -> None:
        self._quota = quota
        self._rate_of = rate_of
        self._clock = clock
        self._debts: dict[str, _Debt] = {}
        self._sweep_at = _MIN_SWEEP

    @property
    def num_principals(self) -> int:
        """Principals that are remembered."""
        return len(self._debts)

    def check(self, principal: str) -> None:
        """Return if the principal may spend now; nothing is charged.

        Raises:
            QuotaExceeded: It is ahead of its rate by ``BURST_S`` or more; the error says when to try again.
        """
        debt = self._settled(principal)
        if debt is not None and debt.amount >= debt.rate * BURST_S:
            retry_after_s = _excess_s(debt) + _MIN_RETRY_S if debt.rate else None
            raise QuotaExceeded(self._quota, math.ceil(debt.amount), debt.rate, retry_after_s)

    def charge(self, principal: str, amount: int) -> None:
        """Add to what the principal has spent. It is never refused, so check first."""
        rate = self._rate_of(principal)
        if rate is None:
            return
        debt = self._settled(principal)
        if debt is not None:
            debt.amount += amount
            return
        now = self._clock()
        self._sweep(now)
        self._debts[principal] = _Debt(float(amount), now, rate)

    def refund(self, principal: str, amount: int) -> None:
        """Take back a charge for something that did not happen."""
        debt = self._settled(principal)
        if debt is not None:
            debt.amount = max(0.0, debt.amount - amount)

    def wait_s(self, principal: str) -> float:
        """Return after how many seconds :meth:`check` would let the principal spend; 0.0: now."""
        debt = self._settled(principal)
        if debt is None or debt.amount < debt.rate * BURST_S:
            return 0.0
        return _excess_s(debt) + _MIN_RETRY_S if debt.rate else math.inf

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariant of the class holds."""
        assert all(debt.amount >= 0.0 for debt in self._debts.values()), f"a debt is negative: {self._debts}"
        assert len(self._debts) <= self._sweep_at, f"{len(self._debts)} principals are remembered"

    def _settled(self, principal: str) -> _Debt | None:
        """Return the debt of a principal as of now; None: it has none, or no limit any more."""
        debt = self._debts.get(principal)
        if debt is None:
            return None
        rate = self._rate_of(principal)
        if rate is None:
            del self._debts[principal]
            return None
        debt.settle(rate, self._clock())
        return debt

    def _sweep(self, now: float) -> None:
        """Forget principals that owe nothing, each time there are twice as many as were left over the last time."""
        if len(self._debts) >= self._sweep_at:
            self._debts = {name: debt for name, debt in self._debts.items() if not debt.is_paid(now)}
            self._sweep_at = max(_MIN_SWEEP, 2 * len(self._debts))


def _excess_s(debt: _Debt) -> float:
    """Return how many seconds it takes until a principal is only ``BURST_S`` ahead of its rate."""
    return (debt.amount - debt.rate * BURST_S) / debt.rate
