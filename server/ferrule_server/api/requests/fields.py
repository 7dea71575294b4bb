"""Fields that many requests have: handles, token ids, request ids, leases; each checked once, here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from ferrule.v1 import executor_pb2, types_pb2
from ferrule_server.api.limits import ApiLimits
from ferrule_server.errors import ContextExceeded, InvalidRequest, ReplyTooLarge, TokenOutOfVocab
from ferrule_server.kv.handle import Handle, StalePolicy

_LINEAGE_BYTES: Final = 16
REPLY_OVERHEAD_BYTES: Final = 512
"""What a result takes on the wire besides its rows and its request_id, at most."""
_STALE_POLICIES: Final[Mapping[int, StalePolicy]] = {
    types_pb2.STALE_POLICY_UNSPECIFIED: StalePolicy.FAIL,
    types_pb2.STALE_POLICY_FAIL: StalePolicy.FAIL,
    types_pb2.STALE_POLICY_FORK: StalePolicy.FORK,
    types_pb2.STALE_POLICY_REWIND: StalePolicy.REWIND,
}


class _Duration(Protocol):
    """The part of google.protobuf.Duration that is read here."""

    seconds: int
    nanos: int


class _HasField(Protocol):
    """A message."""

    def HasField(self, field_name: str) -> bool:  # noqa: N802  (protobuf's name)
        """Whether a field is set."""
        ...


@dataclass(frozen=True, slots=True)
class CacheChoice:
    """How a new sequence is kept: the contract's CacheOptions, read.

    Attributes:
        ttl_s: Lease in seconds; None: the default.
        reserved_length: Tokens up to which room is reserved; 0: the input's own need.
        reuse_prefix, publish_prefix: Whether the prefix cache is looked into, and added to.
    """

    ttl_s: float | None = None
    reserved_length: int = 0
    reuse_prefix: bool = True
    publish_prefix: bool = True


class FieldReader:
    """Reads the fields that many requests have, for one model.

    ``at`` is the path of a message in its request with a dot behind it, such as ``items[3].decode.``: the path of a
    field is put together only when the field is wrong.

    Args:
        vocab_size: Token ids of the model; every id sent is below it.
        max_context: Longest sequence in tokens; an input that holds more is not even looked at.
        limits: What a message may hold.
    """

    def __init__(self, vocab_size: int, max_context: int, limits: ApiLimits) -> None:
        self.vocab_size = vocab_size
        self.max_context = max_context
        self.limits = limits

    def handle(self, message: types_pb2.KvCacheHandle, at: str) -> Handle:
        """Return the handle in the field ``kv_cache``, whose length and lineage count.

        Raises:
            InvalidRequest: No handle was ever given out that looks like this one.
        """
        cache_id, length, lineage = message.cache_id, message.length, message.lineage
        if not cache_id or len(cache_id) > self.limits.max_cache_id_chars:
            limit = self.limits.max_cache_id_chars
            raise InvalidRequest(f"{at}kv_cache.cache_id", f"has {len(cache_id)} characters, not 1 to {limit}")
        if length < 1:
            raise InvalidRequest(f"{at}kv_cache.length", "must be at least 1, got 0")
        if len(lineage) != _LINEAGE_BYTES:
            raise InvalidRequest(f"{at}kv_cache.lineage", f"must have {_LINEAGE_BYTES} bytes, got {len(lineage)}")
        return Handle(cache_id, length, lineage)

    def token_ids(self, token_ids: Sequence[int], at: str, field: str, length: int = 0) -> tuple[int, ...]:
        """Return token ids that are all in the vocabulary.

        Args:
            token_ids: As they came.
            at: Path of the message that holds them, with a dot behind it.
            field: Their field in it.
            length: Tokens that are before them.

        Raises:
            ContextExceeded: There are more than any sequence holds.
            TokenOutOfVocab: One is not in the vocabulary.
        """
        if len(token_ids) > self.max_context:  # 4 MiB hold 4 million: 0.4 s of the event loop, if they were read
            raise ContextExceeded(length + len(token_ids), self.max_context)
        read = tuple(token_ids)
        if read and max(read) >= self.vocab_size:
            index, token_id = next((i, t) for i, t in enumerate(read) if t >= self.vocab_size)
            raise TokenOutOfVocab(f"{at}{field}[{index}]", token_id, self.vocab_size)
        return read

    def on_stale(self, value: int, at: str) -> StalePolicy:
        """Return what to do behind the tip.

        Raises:
            InvalidRequest: It is no StalePolicy.
        """
        on_stale = _STALE_POLICIES.get(value)
        if on_stale is None:
            raise InvalidRequest(f"{at}on_stale", f"{value} is no StalePolicy")
        return on_stale

    def check_request_id(self, request_id: str, at: str) -> None:
        """Return if an id is not too long.

        Raises:
            InvalidRequest: It is.
        """
        if not self.is_short(request_id):
            raise InvalidRequest(f"{at}request_id", f"is longer than {self.limits.max_request_id_bytes} bytes")

    def is_short(self, request_id: str) -> bool:
        """Whether an id is short enough to be taken."""
        return len(request_id.encode()) <= self.limits.max_request_id_bytes

    def check_reply(self, num_bytes: int, path: str) -> None:
        """Return if a reply fits into a message; ``path`` is that of the field that makes it large.

        Raises:
            ReplyTooLarge: It does not.
        """
        if num_bytes > self.limits.max_reply_bytes:
            raise ReplyTooLarge(path, num_bytes, self.limits.max_reply_bytes)

    def reply_bytes(self, num_rows: int, row_bytes: int, request_id: str) -> int:
        """Return an upper bound of what a result takes on the wire; its id comes twice on streams and in batches."""
        return num_rows * row_bytes + REPLY_OVERHEAD_BYTES + (2 * self.limits.max_request_id_bytes if request_id else 0)

    def cache(self, options: executor_pb2.CacheOptions, at: str, num_tokens: int, *, is_new: bool) -> CacheChoice:
        """Return how a sequence is kept; of an existing one only the lease counts.

        Raises:
            InvalidRequest: The lease is none, or less room is wanted than the input itself needs.
        """
        ttl_s = seconds(options.ttl, f"{at}cache.ttl") if options.HasField("ttl") else None
        if not is_new:
            return CacheChoice(ttl_s)
        length = options.reserve_length
        if options.HasField("reserve_length") and length < num_tokens:
            path = f"{at}cache.reserve_length"
            raise InvalidRequest(path, f"{length} is below the {num_tokens} tokens of the input")
        return CacheChoice(
            ttl_s,
            length,
            options.reuse_prefix if options.HasField("reuse_prefix") else True,
            options.publish_prefix if options.HasField("publish_prefix") else True,
        )


def seconds(ttl: _Duration, path: str) -> float:
    """Return the seconds of a duration, such as a lease.

    Raises:
        InvalidRequest: It is no valid duration, or a negative one.
    """
    if abs(ttl.nanos) >= 1_000_000_000:
        raise InvalidRequest(path, f"is no Duration: {ttl.nanos} nanos are a second or more")
    value = ttl.seconds + ttl.nanos * 1e-9
    if value < 0.0:
        raise InvalidRequest(path, f"must not be negative, got {value} s")
    return value


def require(message: _HasField, field: str, at: str = "") -> None:
    """Return if the message ``field`` is set.

    Raises:
        InvalidRequest: It is not.
    """
    if not message.HasField(field):
        raise InvalidRequest(f"{at}{field}", "must be set")
