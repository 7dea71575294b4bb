"""Rates of each principal: a meter of one rate, and the rates of calls and bytes of requests."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ferrule_server.errors import QuotaExceeded
from ferrule_server.quotas import LimitsOf

BURST_S: Final = 1.0
"""A principal that was idle may spend this many seconds of its rate at once."""

_MIN_RETRY_S: Final = 0.02
_MIN_SWEEP: Final = 64

RateOf = Callable[[str], int | None]
"""Returns the rate of a principal per second; None: it has no limit."""


@dataclass(slots=True)
class _Debt:
    """How far a principal is ahead of its rate, at the time ``at`` on the meter's clock."""

    amount: float
    at: float
    rate: int

    def settle(self, rate: int, now: float) -> None:
        """Reduce the debt by what the rate has allowed since the last time."""
        self.amount = max(0.0, self.amount - rate * (now - self.at))
        self.at, self.rate = now, rate

    def is_paid(self, now: float) -> bool:
        """Whether the debt is paid, so that it can be forgotten."""
        return self.amount <= self.rate * (now - self.at)


class Meter:
    """Measures one rate of every principal. For one thread; no method waits.

    The rate is a bucket that may be overdrawn: while a principal is less than ``BURST_S`` ahead of its rate, it may
    spend, whatever the amount; after that it is refused until the debt has shrunk. The prefill rate of the engine's
    gate works in the same way.

    Invariant: every debt is at least 0. Principals without a limit are never remembered. Principals without a debt are
    forgotten whenever twice as many are remembered as remained the last time.

    Args:
        quota: Name of the quota in the error, such as ``CALL_RATE``.
        rate_of: Returns the rate of a principal; called each time, so that a new limit applies at once.
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
        """Check that the principal may spend now; nothing is charged.

        Raises:
            QuotaExceeded: It is ahead of its rate by ``BURST_S`` or more; the error says when to try again.
        """
        if (wait_s := self.wait_s(principal)) > 0.0:
            debt = self._debts[principal]
            raise QuotaExceeded(self._quota, math.ceil(debt.amount), debt.rate, wait_s if debt.rate else None)

    def charge(self, principal: str, amount: int) -> None:
        """Add to what the principal has spent. A charge is never refused, so call :meth:`check` first."""
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
        """Reverse a charge for work that was not done."""
        debt = self._settled(principal)
        if debt is not None:
            debt.amount = max(0.0, debt.amount - amount)

    def wait_s(self, principal: str) -> float:
        """Return the time until :meth:`check` allows the principal to spend, in seconds; 0.0: now."""
        debt = self._settled(principal)
        if debt is None or debt.amount < debt.rate * BURST_S:
            return 0.0
        return (debt.amount - debt.rate * BURST_S) / debt.rate + _MIN_RETRY_S if debt.rate else math.inf

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariant of the class holds."""
        assert all(debt.amount >= 0.0 for debt in self._debts.values()), f"a debt is negative: {self._debts}"
        assert len(self._debts) <= self._sweep_at, f"{len(self._debts)} principals are remembered"

    def _settled(self, principal: str) -> _Debt | None:
        """Return the current debt of a principal; None: it has no debt, or no longer a limit."""
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
        """Forget the principals without a debt, whenever twice as many are remembered as remained the last time."""
        if len(self._debts) >= self._sweep_at:
            self._debts = {name: debt for name, debt in self._debts.items() if not debt.is_paid(now)}
            self._sweep_at = max(_MIN_SWEEP, 2 * len(self._debts))


class CallRates:
    """Limits how many calls, and how many bytes of requests, each principal may send per second.

    Call :meth:`admit` once for each call, after its credentials are accepted and before its request is read or parsed.
    Call :meth:`charge_bytes` for each message that arrives: the one request of a unary call, every frame of a stream.
    The quota of bytes may be overdrawn, since the size of a message is only known when it has arrived; the next calls
    are then refused. A frame cannot be refused without ending its stream, so let a stream sleep for :meth:`delay_s`
    before its next frame is read: HTTP/2 flow control then slows the sender.

    Principals that have sent nothing lately are forgotten; nothing is kept for principals without these quotas.

    Args:
        limits_of: The quotas of a principal.
        clock: Monotonic seconds.
    """

    def __init__(self, limits_of: LimitsOf, clock: Callable[[], float] = time.monotonic) -> None:
        self._calls = Meter("CALL_RATE", lambda principal: limits_of(principal).calls_per_s, clock)
        self._bytes = Meter("REQUEST_BYTES", lambda principal: limits_of(principal).request_bytes_per_s, clock)

    @property
    def num_principals(self) -> int:
        """Principals that are remembered; one that both meters remember counts twice."""
        return self._calls.num_principals + self._bytes.num_principals

    def admit(self, principal: str) -> None:
        """Count one call, or refuse it; a refused call is not counted.

        Raises:
            QuotaExceeded: ``CALL_RATE`` or ``REQUEST_BYTES``, with the time after which a call would be admitted.
        """
        self._calls.check(principal)
        self._bytes.check(principal)
        self._calls.charge(principal, 1)

    def charge_bytes(self, principal: str, num_bytes: int) -> None:
        """Count the bytes of a request or frame that has arrived; never refuses."""
        self._bytes.charge(principal, num_bytes)

    def delay_s(self, principal: str) -> float:
        """Return how long a stream of the principal should wait before it reads another frame, in seconds; often 0."""
        return self._bytes.wait_s(principal)
