"""Domain errors, in the terms of the contract and without gRPC.

Each class has a ``REASON``, the machine-readable name that is sent as ``google.rpc.ErrorInfo.reason``, and most have a
``TEXT``, their message. The values in the message are in ``metadata`` too. ``api/rpc/status.py`` holds the one table
from class to status code. The tree::

    FerruleError
    +- InvalidRequest            INVALID_FIELD
    |  +- TokenOutOfVocab        TOKEN_OUT_OF_VOCAB
    |  +- RequestIdReused        REQUEST_ID_REUSED
    |  +- ReplyTooLarge          REPLY_TOO_LARGE
    |  +- RequestTooLarge        REQUEST_TOO_LARGE
    +- TokenMissing, TokenInvalid, RoleRequired
    +- HandleUnknown             HANDLE_UNKNOWN
    |  +- HandleExpired          HANDLE_EXPIRED
    |  +- EpochChanged           EPOCH_CHANGED
    |  +- HandleLost             HANDLE_LOST
    +- MaskUnknown               MASK_UNKNOWN
    +- WrongInstance             WRONG_INSTANCE
    |  +- CallElsewhere          WRONG_INSTANCE
    +- HandleStale               HANDLE_STALE
    |  +- HandleRewritten        HANDLE_STALE
    +- OutOfRange
    |  +- TruncateBeyond, ContextExceeded, ExceedsPool, KvGivenBack
    +- ResourceExhausted
    |  +- QuotaExceeded          QUOTA_*
    |  +- BlocksExhausted        KV_BLOCKS_EXHAUSTED
    |  +- QueueFull              QUEUE_FULL
    |  +- SlowConsumer           SLOW_CONSUMER
    +- Unavailable
    |  +- Starting, Draining, Restoring, DurabilityLost
    +- RequestTimeout            REQUEST_TIMEOUT
    +- FeatureUnsupported        FEATURE_UNSUPPORTED
    +- Cancelled                 CANCELLED (the caller is gone; gRPC itself answers, so it is never sent)
    +- SeedRequired              INVALID_FIELD (`api/` names the field)
    +- NonFiniteLogits           NON_FINITE_LOGITS
    +- EngineFault               ENGINE_FAULT

``ConfigError`` and ``ModelError`` are not part of the tree: they end the start-up with exit code 2 and are never sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final


class ConfigError(Exception):
    """A setting or an argument is unusable; the message names it and a usable value."""


class ModelError(Exception):
    """A model folder cannot be loaded; the message names every missing, unexpected or mis-shaped part."""


class FerruleError(Exception):
    """Root of every error that a caller can get.

    Args:
        message: What happened, the numbers, and what to do; None: ``TEXT`` with the values of the metadata.
        metadata: The values in the message, as text, without secrets.

    Attributes:
        retry_after_s: Earliest time for a retry, in seconds, which becomes google.rpc.RetryInfo; None: waiting alone
            does not help, or nobody knows how long to wait.
    """

    REASON: ClassVar[str] = "ENGINE_FAULT"
    TEXT: ClassVar[str] = ""
    retry_after_s: float | None = None

    def __init__(self, message: str | None = None, **metadata: object) -> None:
        self.message = self.TEXT.format(**metadata) if message is None else message
        super().__init__(self.message)
        self.metadata = {key: str(value) for key, value in metadata.items()}

    @property
    def reason(self) -> str:
        """The machine-readable reason, such as ``HANDLE_STALE`` or ``QUOTA_KV_TOKENS``."""
        return self.REASON


def without_refusals(failure: BaseException) -> BaseException:
    """Remove refusals from the chain of exceptions that a traceback of ``failure`` shows, and return ``failure``.

    Their messages are for the client and contain what it sent, such as token ids. Python chains an exception to the one
    that was being handled, and a log shows the whole chain.
    """
    seen, rest = {id(failure)}, [failure]
    while rest:
        one = rest.pop()
        if isinstance(one.__cause__, FerruleError):
            one.__cause__ = None
        if isinstance(one.__context__, FerruleError):
            one.__context__ = None
        for other in (one.__cause__, one.__context__):
            if other is not None and id(other) not in seen:
                seen.add(id(other))
                rest.append(other)
    return failure


class InvalidRequest(FerruleError):
    """A field of the request is out of its range.

    Args:
        field: Path of the field in the request message, such as ``input.input_ids[3]``.
        description: What is wrong with it, with the numbers in question; None: ``TEXT``, as for every error.
    """

    REASON = "INVALID_FIELD"

    def __init__(self, field: str, description: str | None = None, **metadata: object) -> None:
        self.field = field
        self.description = self.TEXT.format(**metadata) if description is None else description
        super().__init__(f"{field}: {self.description}", field=field, **metadata)


class TokenOutOfVocab(InvalidRequest):
    """A token id is not in the model's vocabulary."""

    REASON = "TOKEN_OUT_OF_VOCAB"
    TEXT = "token {token_id} is not in the vocabulary of {vocab_size} tokens"

    def __init__(self, field: str, token_id: int, vocab_size: int) -> None:
        super().__init__(field, token_id=token_id, vocab_size=vocab_size)


class RequestIdReused(InvalidRequest):
    """A request_id was used again with other content.

    Args:
        request_id: The id.
        at: Path of the message that contains it, with a dot at the end; empty: the request itself.
    """

    REASON = "REQUEST_ID_REUSED"

    def __init__(self, request_id: str, at: str = "") -> None:
        text = f"request_id {request_id!r} was used with other content"
        super().__init__(f"{at}request_id", text, request_id=request_id)
        self.request_id = request_id


class ReplyTooLarge(InvalidRequest):
    """The reply would exceed what the server sends or the client accepts; nothing was run."""

    REASON = "REPLY_TOO_LARGE"
    TEXT = "holds up to {reply_bytes} bytes, ferrule-max-reply-bytes is {limit_bytes}; ask logits_policy for less"

    def __init__(self, field: str, num_bytes: int, limit_bytes: int) -> None:
        super().__init__(field, reply_bytes=num_bytes, limit_bytes=limit_bytes)


class RequestTooLarge(InvalidRequest):
    """The request message has more bytes than its method can use. It was refused before it was parsed."""

    REASON = "REQUEST_TOO_LARGE"
    TEXT = "has {num_bytes} bytes, the limit of this method is {limit_bytes}; send less, or several requests"

    def __init__(self, num_bytes: int, limit_bytes: int) -> None:
        super().__init__("request", num_bytes=num_bytes, limit_bytes=limit_bytes)


class TokenMissing(FerruleError):
    """The call carries no credentials."""

    REASON = "TOKEN_MISSING"


class TokenInvalid(FerruleError):
    """The credentials are not accepted."""

    REASON = "TOKEN_INVALID"


class RoleRequired(FerruleError):
    """The principal lacks the role that this call requires."""

    REASON = "ROLE_REQUIRED"
    TEXT = "this call needs the role {role!r}"

    def __init__(self, role: str) -> None:
        super().__init__(role=role)


class HandleUnknown(FerruleError):
    """The handle was never issued, was released, or belongs to another principal. The answers are identical."""

    REASON = "HANDLE_UNKNOWN"
    TEXT = "handle {handle_id} is unknown or released; prefill again"

    def __init__(self, handle_id: str) -> None:
        super().__init__(handle_id=handle_id)


class HandleExpired(HandleUnknown):
    """The handle belongs to the caller, and its lease ended."""

    REASON = "HANDLE_EXPIRED"
    TEXT = "the lease of handle {handle_id} ran out; prefill again, with a longer ttl"


class EpochChanged(HandleUnknown):
    """The handle is of an earlier run of this server, or of another server with the same name."""

    REASON = "EPOCH_CHANGED"
    TEXT = (
        "handle {handle_id} is of an earlier run of this server, of one with another --durable, or of another "
        "server with the same --instance; prefill again"
    )


class HandleLost(HandleUnknown):
    """The KV of the handle was lost to a device fault."""

    REASON = "HANDLE_LOST"
    TEXT = "the KV of handle {handle_id} was lost to a device fault; prefill again"


class MaskUnknown(FerruleError):
    """The token mask with this fingerprint is not registered here, or was dropped."""

    REASON = "MASK_UNKNOWN"
    TEXT = "token mask {fingerprint} is not registered here; register it again"

    def __init__(self, fingerprint: bytes) -> None:
        super().__init__(fingerprint=fingerprint[:16].hex())


class WrongInstance(FerruleError):
    """The handle belongs to another server instance, which the metadata names."""

    REASON = "WRONG_INSTANCE"
    TEXT = "handle {handle_id} belongs to instance {instance!r}; send it there"

    def __init__(self, handle_id: str, instance: str) -> None:
        super().__init__(handle_id=handle_id, instance=instance)


class CallElsewhere(WrongInstance):
    """The metadata of the call names another server instance than the one that it reached; nothing was done."""

    REASON = "WRONG_INSTANCE"
    TEXT = "the call is for instance {instance!r}, but this is {answered_by!r}; send it there"

    def __init__(self, instance: str, answered_by: str) -> None:
        FerruleError.__init__(self, instance=instance, answered_by=answered_by)


class HandleStale(FerruleError):
    """The handle names a state that cannot be appended to: its sequence has moved on or was rewritten."""

    REASON = "HANDLE_STALE"
    TEXT = (
        "handle {handle_id} is stale at length {length}, the sequence is at {tip_length}; "
        "use on_stale=FORK, on_stale=REWIND or the newest handle"
    )

    def __init__(self, handle_id: str, length: int, tip_length: int) -> None:
        super().__init__(handle_id=handle_id, length=length, tip_length=tip_length)


class HandleRewritten(HandleStale):
    """The sequence does not hold the tokens of the handle any more, so no ``on_stale`` can continue from them."""

    REASON = "HANDLE_STALE"
    TEXT = (
        "handle {handle_id} is stale at length {length}: its tokens were dropped or replaced, and the sequence is at "
        "{tip_length}; use the newest handle, or prefill the tokens into a new sequence"
    )


class OutOfRange(FerruleError):
    """A length exceeds the handle, the context or the pool."""


class TruncateBeyond(OutOfRange):
    """TruncateKv asked for more tokens than the handle holds, or for fewer than one."""

    REASON = "TRUNCATE_BEYOND"
    TEXT = "new_length {new_length} is outside [1, {length}], the length of handle {handle_id}"

    def __init__(self, handle_id: str, new_length: int, length: int) -> None:
        super().__init__(handle_id=handle_id, new_length=new_length, length=length)


class ContextExceeded(OutOfRange):
    """The sequence would exceed the context length of the model or the server's --max-context."""

    REASON = "CONTEXT_EXCEEDED"
    TEXT = "the sequence would hold {length} tokens, the context is {max_context}; truncate or send fewer"

    def __init__(self, length: int, max_context: int) -> None:
        super().__init__(length=length, max_context=max_context)


class ExceedsPool(OutOfRange):
    """The request needs more blocks than the whole pool has, so a later retry cannot succeed."""

    REASON = "EXCEEDS_POOL"
    TEXT = "the request needs {needed_blocks} blocks, the whole pool has {total_blocks}; start with more --kv-memory"

    def __init__(self, needed_blocks: int, total_blocks: int) -> None:
        super().__init__(needed_blocks=needed_blocks, total_blocks=total_blocks)


class KvGivenBack(OutOfRange):
    """The sequence has given back KV outside its window that the request would read; the sequence is as it was.

    Args:
        handle_id: The sequence.
        length: Tokens at which the request would continue, fork, truncate or compute again.
        lowest_length: The lowest length at which it could.
    """

    REASON = "KV_GIVEN_BACK"
    TEXT = (
        "the KV that handle {handle_id} needs at length {length} was given back, the lowest length is {lowest_length}; "
        "prefill its {tokens_to_recompute} tokens again"
    )

    def __init__(self, handle_id: str, length: int, lowest_length: int) -> None:
        super().__init__(handle_id=handle_id, length=length, lowest_length=lowest_length, tokens_to_recompute=length)


class ResourceExhausted(FerruleError):
    """A resource is used up now."""


_RATES: Final[Mapping[str, str]] = {
    "PREFILL_RATE": "prompt tokens",
    "CALL_RATE": "calls",
    "REQUEST_BYTES": "bytes of requests",
    "TEXT_RATE": "bytes of text",
}
"""Quotas that are rates, and the unit of each."""


class QuotaExceeded(ResourceExhausted):
    """A quota of the principal is used up.

    Args:
        quota: ``HANDLES``, ``KV_TOKENS``, ``QUEUED_ROWS``, ``MASK_BYTES``, or a rate: ``PREFILL_RATE``,
            ``CALL_RATE``, ``REQUEST_BYTES`` or ``TEXT_RATE``.
        used: The amount in use, in the unit of the quota.
        limit: The limit, in the same unit.
        retry_after_s: Earliest time for a retry, in seconds; None: the request alone is too large, so none can succeed.
        needed: Amount that the request needs in addition, if known. If it can never fit, the whole amount, which is
            above ``limit``.
    """

    def __init__(
        self, quota: str, used: int, limit: int, retry_after_s: float | None = 1.0, needed: int | None = None
    ) -> None:
        message, more = f"quota {quota}: {used} in use of {limit}", {} if needed is None else {"needed": needed}
        if quota in _RATES:
            message = f"quota {quota}: {used} {_RATES[quota]} to make up for at {limit} per second; wait"
        elif needed is not None:
            way_out = "wait for earlier requests" if quota == "QUEUED_ROWS" else "release handles"
            large = f"{needed} in all, more than the quota; ask for less"
            message += f", the request needs {large if needed > limit else f'{needed}; {way_out}'}"
        super().__init__(message, quota=quota, used=used, limit=limit, **more)
        self.quota = quota
        self.retry_after_s = retry_after_s

    @property
    def reason(self) -> str:
        """The machine-readable reason, which names the quota."""
        return f"QUOTA_{self.quota}"


class BlocksExhausted(ResourceExhausted):
    """The pool has too few free blocks now; nothing was reserved."""

    REASON = "KV_BLOCKS_EXHAUSTED"
    TEXT = "the request needs {needed_blocks} blocks, {free_blocks} are free; release handles or retry later"
    retry_after_s = 1.0

    def __init__(self, needed_blocks: int, free_blocks: int) -> None:
        super().__init__(needed_blocks=needed_blocks, free_blocks=free_blocks)


class QueueFull(ResourceExhausted):
    """Too many jobs are waiting; this one was not queued.

    Args:
        num_jobs: Jobs waiting or running.
        limit: Most such jobs; while several principals are active, most of this principal.
        retry_after_s: Earliest time for a retry, in seconds.
        num_bytes: Bytes of these jobs, if the limit is one on bytes; ``limit`` is then in bytes.
    """

    REASON = "QUEUE_FULL"

    def __init__(self, num_jobs: int, limit: int, retry_after_s: float = 0.1, *, num_bytes: int | None = None) -> None:
        size, more = ("", {}) if num_bytes is None else (f" of {num_bytes} bytes", {"num_bytes": num_bytes})
        text = f"{num_jobs} jobs{size} wait, the limit is {limit}{size and ' bytes'}; retry later"
        super().__init__(text, num_jobs=num_jobs, limit=limit, **more)
        self.retry_after_s = retry_after_s


class SlowConsumer(ResourceExhausted):
    """The reader of a stream left too many bytes unread. The stream ends; committed appends can be replayed."""

    REASON = "SLOW_CONSUMER"
    TEXT = "{queued_bytes} bytes wait for the reader, the limit is {limit_bytes}; read faster or open more streams"

    def __init__(self, queued_bytes: int, limit_bytes: int) -> None:
        super().__init__(queued_bytes=queued_bytes, limit_bytes=limit_bytes)


class Unavailable(FerruleError):
    """The server does not accept this call now."""


class Starting(Unavailable):
    """The model is still loading."""

    REASON = "STARTING"
    TEXT = "the server is starting, its model is still loading; retry soon"


class Draining(Unavailable):
    """The server is shutting down."""

    REASON = "DRAINING"
    TEXT = "the server is going down; use another instance"


class Restoring(Unavailable):
    """The KV of a restored sequence is being computed again; nothing was done, and the computation goes on.

    Args:
        handle_id: The sequence.
        tokens_to_recompute: Tokens that are still to be computed.
        retry_after_s: Earliest time for a retry, in seconds.
    """

    REASON = "RESTORING"
    TEXT = (
        "the KV of handle {handle_id} is computed again after a restart of the server, {tokens_to_recompute} tokens "
        "are left; send the same request again"
    )

    def __init__(self, handle_id: str, tokens_to_recompute: int, retry_after_s: float) -> None:
        super().__init__(handle_id=handle_id, tokens_to_recompute=tokens_to_recompute)
        self.retry_after_s = retry_after_s


class DurabilityLost(Unavailable):
    """The journal cannot be written, so the state of a durable sequence cannot be confirmed."""

    REASON = "DURABILITY_LOST"
    TEXT = (
        "the disk of the server's journal failed, so what this request has done, if anything, is not confirmed; "
        "send the same request again"
    )
    retry_after_s = 1.0


class RequestTimeout(FerruleError):
    """The request message did not arrive in time; nothing was run, so it is safe to send any request again."""

    REASON = "REQUEST_TIMEOUT"
    TEXT = "the request message did not arrive within {timeout_s} s; send it again"

    def __init__(self, timeout_s: float) -> None:
        super().__init__(timeout_s=f"{timeout_s:g}")


class FeatureUnsupported(FerruleError):
    """This model or executor does not support the request."""

    REASON = "FEATURE_UNSUPPORTED"
    TEXT = "{feature} is not supported by this server"

    def __init__(self, feature: str, message: str | None = None) -> None:
        super().__init__(message, feature=feature)


class Cancelled(FerruleError):
    """The caller disconnected before its rows were run. Nothing was appended, and this error is never sent."""

    REASON = "CANCELLED"
    TEXT = "the caller went away before the step; nothing was appended"


class SeedRequired(FerruleError):
    """A repeated append must be sampled again, but the request lacks the seed of the first answer."""

    REASON = "INVALID_FIELD"
    TEXT = "these tokens were appended before; sampling their rows again needs the seed that was returned then"


class NonFiniteLogits(FerruleError):
    """The logits of a row contain NaN or infinity. Only that item fails, and its handle does not change."""

    REASON = "NON_FINITE_LOGITS"
    TEXT = "the logits at position {position} are not finite"

    def __init__(self, position: int) -> None:
        super().__init__(position=position)


class EngineFault(FerruleError):
    """A bug in the server; the log has the traceback under ``fault_id``."""

    REASON = "ENGINE_FAULT"
    TEXT = "internal fault {fault_id}; the server's log has the details"

    def __init__(self, fault_id: str) -> None:
        super().__init__(fault_id=fault_id)
