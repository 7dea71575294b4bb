"""How long a call may take, and when it is tried again."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from ferrule_client._status import is_transport_break
from ferrule_client.errors import (
    DrainingError,
    FerruleError,
    InstanceUnreachableError,
    ResourceExhaustedError,
    RestoringError,
    StartingError,
)

# Refusals that pass without the caller, while the caller does nothing. The others of their kind (blocks, handles, KV
# tokens) end when somebody releases something, and that is the caller's to decide.
_PASSING = (
    "QUEUE_FULL",
    "QUOTA_CALL_RATE",
    "QUOTA_PREFILL_RATE",
    "QUOTA_QUEUED_ROWS",
    "QUOTA_REQUEST_BYTES",
    "QUOTA_TEXT_RATE",
)

# Reasons of the client's own, besides the names of status codes, behind which gRPC's error may say more.
_UNTOLD = ("CONNECTION_LOST", "MESSAGE_TOO_LARGE", "RPC_UNKNOWN")

# A server that goes down, or is out of reach: the end of its sequences, unless they outlive it.
_GONE = (DrainingError, InstanceUnreachableError)

_GROWTH = 4

# A server whose bound is too small for the masks of one request drops one as it takes the next.
_MAX_MASK_RESTORES = 3

# Wait before a sequence that is being restored is asked for again, where the server does not say how long.
_RESTORE_S = 1.0

# Looking whether a server is back costs nothing while nobody listens; the channel itself knocks once a second at most.
_LOOKOUT_S = 0.2


@dataclass(frozen=True, slots=True)
class RetrySettings:
    """When to try again, and how fast.

    Attributes:
        max_retries: Tries after the first that a broken connection or a full queue is worth. A server that is still
            loading its model, or computes the KV of a sequence again, is waited for until the deadline, whatever this
            says; so is one that is away, by a call on a sequence.
        first_backoff_s: Wait before the first retry, which grows fourfold each time. Most breaks are of a connection
            alone, and the next one is there at once.
        max_backoff_s: Longest wait, but for one that the server itself asks for.
    """

    max_retries: int = 5
    first_backoff_s: float = 0.005
    max_backoff_s: float = 1.0


class Attempts:
    """One call's deadline and its retries: decides, and leaves the waiting to the caller, sync or async.

    Tried again are a connection that broke (UNAVAILABLE; INTERNAL with RST_STREAM, which is what a proxy makes of a
    dead server; CANCELLED, though not by this side; all without details of ours), a request that did not arrive in time
    (REQUEST_TIMEOUT), a server that is still starting or restores the sequence, and a refusal that passes by itself and
    says when (a full queue, a rate). The last three certainly did not run. After a break nobody knows, so what is
    repeated must be safe to repeat: everything that only reads is, and so are appends, truncates and releases, which
    replay. A call that makes new sequences is if it carries a request id and the server honours those; otherwise it is
    repeated only if the connection was refused, so that it certainly never ran.

    A call on a sequence has one server that can answer it, and its sequences may outlive it. So where the connection is
    refused, and there is a deadline, it waits for the server until then, whatever ``max_retries`` says. It also waits
    for one that drains, or that a proxy does not reach, if sequences are known to outlive it.

    Args:
        settings: When to try again.
        timeout: Seconds for all attempts together; None means no limit.
        creates: True: the call makes new sequences.
        has_request_id: True: such a call carries an id, the same in all its attempts.
        is_patient: True: a server that went away or goes down is waited for until the deadline; but not an instance
            that a proxy does not reach, as another can take its place.
        on_sequence: True: the call is on a sequence that exists.
        is_durable: Whether sequences outlive their server; None: that is not known.

    Attributes:
        is_repeatable: Whether it may be sent again after a break; None: if the server honours request ids.
        is_durable: As given, until it is known.
        num_mask_restores: Times that masks were registered once more, or were about to be.
    """

    def __init__(
        self,
        settings: RetrySettings,
        timeout: float | None,
        *,
        creates: bool = False,
        has_request_id: bool = False,
        is_patient: bool = False,
        on_sequence: bool = False,
        is_durable: bool | None = None,
    ) -> None:
        self._settings = settings
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self.is_repeatable: bool | None = None if creates and has_request_id else not creates
        self.is_patient = is_patient
        self.is_durable = is_durable
        self._on_sequence = on_sequence
        self._num_retries = 0
        self.num_mask_restores = 0
        self._backoff_s = settings.first_backoff_s

    def remaining(self) -> float | None:
        """Return the seconds left, at least 0, or None without a limit."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def rest(self, *, creates: bool = False, has_request_id: bool = False) -> Attempts:
        """Return the retries of another call, as patient as this one, within the time that is left."""
        limit_s, is_patient = self.remaining(), self.is_patient
        return Attempts(self._settings, limit_s, creates=creates, has_request_id=has_request_id, is_patient=is_patient)

    def needs_to_know(self, error: FerruleError) -> bool:
        """Return whether a retry hangs on one thing: whether the server honours request ids."""
        return self.is_repeatable is None and _may_have_run(error)

    def needs_durability(self, error: FerruleError) -> bool:
        """Return whether a retry hangs on one thing: whether sequences outlive their server."""
        has_time, is_open = self._deadline is not None, self.is_durable is None and not self.is_patient
        return self._on_sequence and has_time and is_open and isinstance(error, _GONE)

    def waits_for(self, error: FerruleError) -> bool:
        """Return whether a call on a sequence waits for its server until the deadline; it certainly did nothing."""
        if not self._on_sequence or self._deadline is None:
            return False
        outlives = self.is_durable is True and not self.is_patient
        return error.reason == "CONNECTION_FAILED" or (outlives and isinstance(error, _GONE))

    def may_restore_masks(self) -> bool:
        """Return whether masks that the server has dropped may be registered once more; it may drop them again."""
        self.num_mask_restores += 1
        return self.num_mask_restores <= _MAX_MASK_RESTORES

    @property
    def has_tried_all(self) -> bool:
        """True: no attempt is left, however long the deadline is."""
        return self._num_retries > self._settings.max_retries

    def pause_s(self, error: FerruleError) -> float:
        """Return the seconds to wait before the next attempt.

        Raises:
            FerruleError: ``error``, if there is to be no further attempt; its cause is chained where that says more.
        """
        if not self._is_worth_retrying(error):
            raise error from _worth_showing(error)
        is_lookout = (self.is_patient or self.waits_for(error)) and error.reason == "CONNECTION_FAILED"
        longest_s = min(self._backoff_s, _LOOKOUT_S) if is_lookout else self._backoff_s
        pause_s = longest_s * random.uniform(0.5, 1.0)  # noqa: S311 - jitter needs no secrecy
        pause_s += wait_s(error) or 0.0
        self._backoff_s = min(_GROWTH * self._backoff_s, self._settings.max_backoff_s)
        remaining = self.remaining()
        if remaining is not None and remaining <= pause_s:
            raise error from _worth_showing(error)
        return pause_s

    def _is_worth_retrying(self, error: FerruleError) -> bool:
        if isinstance(error, (StartingError, RestoringError)):
            return True
        if _may_have_run(error) and not self.is_repeatable:
            return False
        is_dead = isinstance(error, InstanceUnreachableError)
        if self.is_patient and not is_dead and (is_transport_break(error) or isinstance(error, DrainingError)):
            return True
        if self.waits_for(error):
            return True
        self._num_retries += 1
        is_passing = is_transport_break(error) or wait_s(error) is not None
        return is_passing and self._num_retries <= self._settings.max_retries


def _may_have_run(error: FerruleError) -> bool:
    """Return whether a connection broke after the request may have left."""
    return error.reason == "CONNECTION_LOST"


def wait_s(result: object) -> float | None:
    """Return the seconds after which a passing refusal asks to try again, or None where something is none."""
    if isinstance(result, RestoringError):
        return _RESTORE_S if result.retry_after_s is None else result.retry_after_s
    if isinstance(result, ResourceExhaustedError) and result.reason in _PASSING:
        return result.retry_after_s
    return None


def _worth_showing(error: FerruleError) -> BaseException | None:
    """Return the cause of an error, where it says more than the error.

    What a server told of itself is in the error as a whole; where there is none, our one line says it. gRPC's thirty
    lines would hide either.
    """
    return error.__cause__ if error.reason in _UNTOLD or error.reason == error.code.name else None
