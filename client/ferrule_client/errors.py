"""What can become of a call: one tree of errors, rooted in ``FerruleError``.

``except FerruleError`` catches everything that a server, the network or a timeout can do to a call. Mistakes of the
program are Python's own errors, raised before anything is sent: TypeError and ValueError for an argument
(``PendingTokenError`` is a ValueError), RuntimeError for a cache that was released or a stream used by two threads.

::

    FerruleError                   code, reason, message, metadata
    +- InvalidRequestError          INVALID_FIELD; .field names the field
    |  +- TokenOutOfVocabError      TOKEN_OUT_OF_VOCAB
    |  +- RequestIdReusedError      REQUEST_ID_REUSED
    |  +- ReplyTooLargeError        REPLY_TOO_LARGE
    |  +- RequestTooLargeError      REQUEST_TOO_LARGE; .num_bytes and .limit_bytes
    +- AuthError                    TOKEN_MISSING, TOKEN_INVALID, ROLE_REQUIRED
    +- HandleNotFoundError          HANDLE_UNKNOWN; the rule: prefill again .token_ids
    |  +- HandleExpiredError        HANDLE_EXPIRED
    |  +- EpochChangedError         EPOCH_CHANGED
    |  +- HandleLostError           HANDLE_LOST
    +- MaskUnknownError             MASK_UNKNOWN
    +- WrongInstanceError           WRONG_INSTANCE; .instance names the right one
    +- HandleStaleError             HANDLE_STALE; .tip_length is where the sequence is
    +- OutOfRangeError
    |  +- TruncateBeyondError       TRUNCATE_BEYOND
    |  +- ContextExceededError      CONTEXT_EXCEEDED
    |  +- ExceedsPoolError          EXCEEDS_POOL
    |  +- KvGivenBackError          KV_GIVEN_BACK; .lowest_length and .tokens_to_recompute
    +- ResourceExhaustedError       .retry_after_s
    |  +- QuotaExceededError        QUOTA_*; .quota, .used and .limit
    |  +- BlocksExhaustedError      KV_BLOCKS_EXHAUSTED
    |  +- QueueFullError            QUEUE_FULL
    |  +- SlowConsumerError         SLOW_CONSUMER
    |  +- MessageTooLargeError      MESSAGE_TOO_LARGE *
    +- UnavailableError             CONNECTION_FAILED *, CONNECTION_LOST *; .retry_after_s; also a ConnectionError
    |  +- InstanceUnreachableError  INSTANCE_UNREACHABLE *; .instance cannot be reached by the proxy in front of it
    |  +- StartingError             STARTING
    |  +- DrainingError             DRAINING
    |  +- RestoringError            RESTORING; .tokens_to_recompute
    |  +- DurabilityLostError       DURABILITY_LOST
    +- UnsupportedError             FEATURE_UNSUPPORTED, RPC_UNKNOWN *
    +- NonFiniteLogitsError         NON_FINITE_LOGITS
    +- DeadlineExceededError        DEADLINE_EXCEEDED *; also a TimeoutError
    |  +- RequestTimeoutError       REQUEST_TIMEOUT
    +- CallCancelledError           CANCELLED *
    +- InternalError                ENGINE_FAULT

Reasons marked * are the client's own: gRPC itself answers these cases, without ``google.rpc.ErrorInfo``, and the
client names them so that every error has a reason. A reason that a newer server invents falls back to the class of
its status code, with the reason kept readable.
"""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from ferrule_client._public import publish

__all__ = [
    "AuthError",
    "BlocksExhaustedError",
    "CallCancelledError",
    "ContextExceededError",
    "DeadlineExceededError",
    "DrainingError",
    "DurabilityLostError",
    "EpochChangedError",
    "ExceedsPoolError",
    "FerruleError",
    "HandleExpiredError",
    "HandleLostError",
    "HandleNotFoundError",
    "HandleStaleError",
    "InstanceUnreachableError",
    "InternalError",
    "InvalidRequestError",
    "KvGivenBackError",
    "MaskUnknownError",
    "MessageTooLargeError",
    "NonFiniteLogitsError",
    "OutOfRangeError",
    "PendingTokenError",
    "QueueFullError",
    "QuotaExceededError",
    "ReplyTooLargeError",
    "RequestIdReusedError",
    "RequestTimeoutError",
    "RequestTooLargeError",
    "ResourceExhaustedError",
    "RestoringError",
    "SlowConsumerError",
    "StartingError",
    "TokenOutOfVocabError",
    "TruncateBeyondError",
    "UnavailableError",
    "UnsupportedError",
    "WrongInstanceError",
]


class FerruleError(Exception):
    """A call failed. Root of all errors of this package.

    Args:
        code: gRPC status code.
        reason: Machine-readable name in upper case, such as ``HANDLE_STALE``.
        message: What happened, the numbers, and what to do.
        metadata: The values that vary in the message, as text.
    """

    def __init__(
        self, code: grpc.StatusCode, reason: str, message: str, metadata: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.metadata: dict[str, str] = dict(metadata or {})

    def __str__(self) -> str:
        return f"{self.message} ({self.reason})"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.code, self.reason, self.message, self.metadata), self.__dict__

    @property
    def handle_id(self) -> str | None:
        """Loggable id of the handle the error is about, or None."""
        return self.metadata.get("handle_id")

    def _number(self, name: str) -> int | None:
        text = self.metadata.get(name, "")
        return int(text) if text.isdecimal() else None


class InvalidRequestError(FerruleError):
    """A field of the request is out of its range; sending it again cannot help."""

    @property
    def field(self) -> str | None:
        """Path of the field in the request message, such as ``input.input_ids[3]``, or None."""
        return self.metadata.get("field")


class TokenOutOfVocabError(InvalidRequestError):
    """A token id is not in the model's vocabulary."""


class RequestIdReusedError(InvalidRequestError):
    """A request_id came again with other content."""


class ReplyTooLargeError(InvalidRequestError):
    """The reply would pass the server's message limit; nothing was run. Ask for fewer rows or a selection."""


class RequestTooLargeError(InvalidRequestError):
    """The request has more bytes than the server accepts for this method; nothing was run. Send it in several parts."""

    @property
    def num_bytes(self) -> int | None:
        """Bytes of the request, or None if the server does not say."""
        return self._number("num_bytes")

    @property
    def limit_bytes(self) -> int | None:
        """Most bytes that the server accepts, or None if it does not say."""
        return self._number("limit_bytes")


class AuthError(FerruleError):
    """Credentials are missing, not accepted, or lack the role the call needs."""


class HandleNotFoundError(FerruleError):
    """The handle names nothing: never issued, released, or another principal's. The one rule: prefill again.

    Where a ``Cache`` raises it, or a stream for one, the error has what that takes::

        except HandleNotFoundError as error:
            cache = client.prefill([*error.token_ids, *error.pending])

    A cache of ``client.prefill(..., recover=True)`` does it automatically.

    Attributes:
        token_ids: Token ids that the lost handle covered. None: some never passed through this cache, because it was
            adopted (``cache.info(token_ids=True)`` in time makes them known), or the error is of no cache.
        pending: The token that had been handed out and follows those: none or one.
    """

    token_ids: list[int] | None = None
    pending: tuple[int, ...] = ()


class HandleExpiredError(HandleNotFoundError):
    """The lease of the caller's own handle ran out. Prefill again, with a longer ttl."""


class EpochChangedError(HandleNotFoundError):
    """The handle is of an earlier run of the server. Prefill again."""


class HandleLostError(HandleNotFoundError):
    """The KV of the handle was lost to a device fault. Prefill again."""


class MaskUnknownError(FerruleError):
    """The server does not know a mask's fingerprint: register it again, as the client does for masks that are kept."""


class WrongInstanceError(FerruleError):
    """The handle belongs to another server instance, or the whole call was for another one than it has reached."""

    @property
    def instance(self) -> str | None:
        """Name of the instance that has the sequence, or that was asked for."""
        return self.metadata.get("instance")


class HandleStaleError(FerruleError):
    """The sequence moved on or was rewritten since the handle was made, by somebody else; nothing changed.

    ``cache.truncate(cache.length)`` or ``on_stale="rewind"`` drops what they appended, ``on_stale="fork"`` branches.
    If the sequence was rewritten below the handle, as the message says, only a newer handle or a prefill helps.
    """

    @property
    def tip_length(self) -> int | None:
        """Length of the sequence now, in tokens."""
        return self._number("tip_length")


class OutOfRangeError(FerruleError):
    """A length is beyond what the handle, the context or the pool can hold."""


class TruncateBeyondError(OutOfRangeError):
    """Truncate asked for more tokens than the handle holds, or for fewer than one."""


class ContextExceededError(OutOfRangeError):
    """The sequence would pass the longest context that the server serves."""


class ExceedsPoolError(OutOfRangeError):
    """The request needs more blocks than the whole pool has; waiting would not help."""


class KvGivenBackError(OutOfRangeError):
    """The sequence gave back KV outside its window that the call needs; nothing changed, and the sequence lives on.

    To have that state again, prefill its first ``tokens_to_recompute`` tokens::

        except KvGivenBackError as error:
            cache = client.prefill(token_ids[: error.tokens_to_recompute])
    """

    @property
    def lowest_length(self) -> int | None:
        """The lowest length at which the sequence can be continued, or None if the server does not say."""
        return self._number("lowest_length")

    @property
    def tokens_to_recompute(self) -> int | None:
        """Tokens of the prefill that makes the state again; the prefix cache may know some. None: not said."""
        return self._number("tokens_to_recompute")


class ResourceExhaustedError(FerruleError):
    """Something is full now; nothing was run.

    Attributes:
        retry_after_s: Seconds after which the server suggests to try again, or None.
    """

    retry_after_s: float | None = None


class QuotaExceededError(ResourceExhaustedError):
    """A quota of the caller is used up.

    QUEUED_ROWS and the rates PREFILL_RATE, CALL_RATE, REQUEST_BYTES and TEXT_RATE recover with time, so the client
    waits and tries again, within its timeout. HANDLES and KV_TOKENS recover when the caller releases something;
    MASK_BYTES is for a mask that does not fit on its own.
    """

    @property
    def quota(self) -> str:
        """Which one, such as ``HANDLES`` or ``PREFILL_RATE``: the reason without ``QUOTA_``."""
        return self.metadata.get("quota", self.reason.removeprefix("QUOTA_"))

    @property
    def used(self) -> int | None:
        """The amount in use, in the unit of the quota, or None if the server does not say."""
        return self._number("used")

    @property
    def limit(self) -> int | None:
        """The most that may be in use, in the same unit, or None if the server does not say."""
        return self._number("limit")

    @property
    def needed(self) -> int | None:
        """What the request needs, or None if the server does not say; above ``limit`` it can never be had."""
        return self._number("needed")


class BlocksExhaustedError(ResourceExhaustedError):
    """The KV pool has too few free blocks now. Release handles or try later."""


class QueueFullError(ResourceExhaustedError):
    """Too many requests wait on the server."""


class SlowConsumerError(ResourceExhaustedError):
    """The server ended a stream whose replies were not read; what was under way ran. The next call opens it again."""


class MessageTooLargeError(ResourceExhaustedError):
    """A message is larger than one side accepts. gRPC refused it; nothing was run."""


class UnavailableError(FerruleError, ConnectionError):
    """The server cannot be reached, went away during the call, or does not take calls now.

    Attributes:
        retry_after_s: Seconds after which the server suggests to try again, or None.
    """

    retry_after_s: float | None = None


class InstanceUnreachableError(UnavailableError):
    """A proxy answers, and the instance that the call belongs to does not: nothing ran.

    The instance may come back, but a process that ended took its sequences along: prefill again, or let
    ``recover=True`` do it, which goes on at an instance that lives.

    Attributes:
        token_ids: As in ``HandleNotFoundError``.
        pending: As in ``HandleNotFoundError``.
    """

    token_ids: list[int] | None = None
    pending: tuple[int, ...] = ()

    @property
    def instance(self) -> str:
        """Name of the instance."""
        return self.metadata["instance"]


class StartingError(UnavailableError):
    """The server is still loading its model."""


class DrainingError(UnavailableError):
    """The server is going down and takes no new sequences; on a live one, its time for those is over too.

    A call on a cache waits for the server's next run until the timeout if the cache recovers, or if the server keeps
    durable handles. Other calls are not tried again.
    """


class RestoringError(UnavailableError):
    """The KV of a sequence is still being computed again after a restart of the server; nothing was done.

    The client waits and tries again until the timeout, so this means that the timeout was too short. The computation
    goes on: call again.
    """

    @property
    def tokens_to_recompute(self) -> int | None:
        """Tokens that were still to be computed, or None if the server does not say."""
        return self._number("tokens_to_recompute")


class DurabilityLostError(UnavailableError):
    """The disk of the server's journal failed, so it is unknown whether the operation happened.

    The handle stays good. Send the same request again after ``retry_after_s``: if it had happened, the answer is a
    replay. The client does not repeat it itself, since a disk may be away for long.
    """


class UnsupportedError(FerruleError):
    """This server, model or executor cannot do what was asked; its capabilities say so too."""


class NonFiniteLogitsError(FerruleError):
    """The logits of a row hold NaN or infinity; only that item failed and its handle is as it was."""


class DeadlineExceededError(FerruleError, TimeoutError):
    """The timeout passed. An append may or may not have happened on the server; the cache stands where it was.

    Send the same tokens again, which is safe, because it replays; or go on with other tokens, and the cache has the
    server drop what landed. ``cache.truncate(cache.length)`` drops it at once.
    """


class RequestTimeoutError(DeadlineExceededError):
    """The server did not receive the whole request in time: nothing was run. The client tries again."""


class CallCancelledError(FerruleError):
    """The call was cancelled, by closing the client or the stream."""


class InternalError(FerruleError):
    """A bug on the server; its log has the details under the id in the message."""


class PendingTokenError(ValueError):
    """The given tokens begin with an int equal to the pending token, which may be meant once or twice.

    What the server has chosen is sent first by the next append, so most often the tokens are to be given without it.
    Nothing was sent.

    Args:
        token: The pending token.
    """

    def __init__(self, token: int) -> None:
        super().__init__(
            f"token {int(token)} is pending already and is sent first: leave it out, or pass `output.token` itself, "
            "which confirms it. If the text has it twice, say pending='send'; to replace it, say pending='drop'"
        )
        self.token = int(token)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.token,)


publish(globals(), __all__, "ferrule.errors")
