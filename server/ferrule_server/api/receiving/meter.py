"""Rates of each principal: calls, and the bytes of their requests."""

from __future__ import annotations

import time
from collections.abc import Callable

from ferrule_server.fairness.bucket import Meter
from ferrule_server.quotas import LimitsOf


class CallRates:
    """Limits how many calls, and how many bytes of requests, each principal may send per second.

    Call :meth:`admit` once for each call, after its credentials are accepted and before its request is read or parsed.
    Call :meth:`charge_bytes` for each message that arrives: the one request of a unary call, every frame of a stream.
    The quota of bytes may be overdrawn, since the size of a message is only known when it has arrived; the next calls
    are then refused. A frame cannot be refused without ending its stream, so let a stream sleep as long
    as :meth:`charge_bytes` says before its next frame is read: HTTP/2 flow control then slows the sender.

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
        return len(self._calls.buckets) + len(self._bytes.buckets)

    def admit(self, principal: str) -> None:
        """Count one call, or refuse it; a refused call is not counted.

        Raises:
            QuotaExceeded: ``CALL_RATE`` or ``REQUEST_BYTES``, with the time after which a call would be admitted.
        """
        self._calls.check(principal)
        self._bytes.check(principal)
        self._calls.charge(principal, 1)

    def charge_bytes(self, principal: str, num_bytes: int) -> float:
        """Count the bytes of a request or frame that has arrived; never refuses.

        Returns:
            How long a stream of the principal should wait before it reads another frame, in seconds; often 0.
        """
        return self._bytes.charge(principal, num_bytes)
