"""How long a call may take, and when it is tried again."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import grpc

from ferrule_client._status import is_transport_break
from ferrule_client.errors import ExecutorError, StartingError

__all__ = ["Attempts", "RetrySettings"]


@dataclass(frozen=True, slots=True)
class RetrySettings:
    """When to try again, and how fast.

    Attributes:
        max_retries: Tries after the first that a broken connection is worth. A server that is still loading its
            model is waited for until the deadline, whatever this says.
        first_backoff_s: Wait before the first retry, in seconds; it doubles each time.
        max_backoff_s: Longest wait, in seconds.
    """

    max_retries: int = 5
    first_backoff_s: float = 0.05
    max_backoff_s: float = 1.0


class Attempts:
    """One call's deadline and its retries: decides, and leaves the waiting to the caller, sync or async.

    Only two things are tried again: a connection that broke (UNAVAILABLE, or INTERNAL with RST_STREAM, which is what
    a proxy makes of a dead server, both without details of ours), and a server that is still starting. Both are safe
    for everything that only reads, and for appends, truncates and releases, which replay. A call that makes a new
    sequence is only tried again when it certainly never ran: the connection was refused, or the server says it is
    starting.

    Args:
        settings: When to try again.
        timeout: Seconds for all attempts together; None means no limit.
        creates: True: the call makes new sequences.
    """

    def __init__(self, settings: RetrySettings, timeout: float | None, *, creates: bool) -> None:
        self._settings = settings
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._creates = creates
        self._num_retries = 0
        self._backoff_s = settings.first_backoff_s

    def remaining(self) -> float | None:
        """Return the seconds left, at least 0, or None without a limit."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def pause_s(self, error: ExecutorError, cause: grpc.RpcError | None = None) -> float:
        """Return the seconds to wait before the next attempt.

        Args:
            error: What the attempt failed with.
            cause: The gRPC error behind it, chained when ``error`` is raised, unless nobody listened at all.

        Raises:
            ExecutorError: ``error``, if there is to be no further attempt.
        """
        if not self._is_worth_retrying(error):
            raise error from _worth_showing(error, cause)
        pause_s = self._backoff_s * random.uniform(0.5, 1.0)  # noqa: S311 - jitter needs no secrecy
        self._backoff_s = min(2 * self._backoff_s, self._settings.max_backoff_s)
        remaining = self.remaining()
        if remaining is not None and remaining <= pause_s:
            raise error from _worth_showing(error, cause)
        return pause_s

    def _is_worth_retrying(self, error: ExecutorError) -> bool:
        if isinstance(error, StartingError):
            return True
        self._num_retries += 1
        if not is_transport_break(error) or self._num_retries > self._settings.max_retries:
            return False
        return not self._creates or error.reason == "CONNECTION_FAILED"


def _worth_showing(error: ExecutorError, cause: grpc.RpcError | None) -> grpc.RpcError | None:
    """Return the cause to chain; where there is no server, our one line says it and gRPC's thirty would hide it."""
    return None if error.reason == "CONNECTION_FAILED" else cause
