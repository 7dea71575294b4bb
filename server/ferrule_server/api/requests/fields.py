"""Fields that many requests have, such as handles, token ids, request ids and leases. Each is checked here, once."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.duration_pb2 import Duration
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from google.protobuf.message import Message

from ferrule.v1 import executor_pb2, types_pb2
from ferrule_server.api.limits import ApiLimits
from ferrule_server.engine.jobs import AppendJob, GenerateJob
from ferrule_server.errors import ContextExceeded, FeatureUnsupported, InvalidRequest, ReplyTooLarge, TokenOutOfVocab
from ferrule_server.kv.handle import Handle, StalePolicy
from ferrule_server.kv.new_sequence import NewSequence

_LINEAGE_BYTES: Final = 16
_REPLY_OVERHEAD_BYTES: Final = 640
"""Upper bound of the size of a result on the wire, without its rows and its request_id."""
LEVELS: Final[Mapping[bool, types_pb2.Durability]] = {
    False: types_pb2.DURABILITY_NONE,
    True: types_pb2.DURABILITY_JOURNALED,
}
"""The level of a sequence in replies, by whether it is durable."""
_DURABILITIES: Final[Mapping[int, bool]] = {level: is_durable for is_durable, level in LEVELS.items()}

WIRE_TYPES: Final[Mapping[int, np.dtype[np.generic]]] = {
    types_pb2.DATA_TYPE_FLOAT32: np.dtype("<f4"),
    types_pb2.DATA_TYPE_BFLOAT16: np.dtype("<u2"),
    types_pb2.DATA_TYPE_FLOAT16: np.dtype("<f2"),
}
"""The types of the elements of a Tensor, as numpy stores them; it has no bfloat16, which is held as its bits."""
_T = TypeVar("_T")
_Member = TypeVar("_Member", bound=enum.Enum)


def by_number(contract: EnumTypeWrapper, members: Iterable[_Member], unset: _Member) -> dict[int, _Member]:
    """Return members of an enum of the engine by the numbers of the contract.

    Args:
        contract: The enum of the contract; after its prefix, the names are those of the members.
        members: What it has a number for.
        unset: What its value UNSPECIFIED means.

    Raises:
        ValueError: The contract has no name for a member.
    """
    prefix = contract.Name(0).removesuffix("UNSPECIFIED")
    return {0: unset} | {contract.Value(f"{prefix}{member.name}"): member for member in members}


_STALE_POLICIES: Final = by_number(types_pb2.StalePolicy, StalePolicy, StalePolicy.FAIL)


@dataclass(frozen=True, slots=True)
class FieldReader:
    """Reads the fields that many requests have, for one model.

    ``at`` is the path of a message in its request with a dot at the end, such as ``items[3].decode.``. The path of a
    field is built only if the field is invalid.

    Args:
        vocab_size: Number of token ids of the model.
        max_context: Longest sequence in tokens. An input with more tokens is refused unread.
        limits: The limits of messages.
        attention_window: Tokens that a row attends to in any layer; 0: some layer attends to all.
        is_durable: The server has a journal.
    """

    vocab_size: int
    max_context: int
    limits: ApiLimits
    attention_window: int
    is_durable: bool = False

    def handle(self, message: types_pb2.KvCacheHandle, at: str) -> Handle:
        """Return the handle in the field ``kv_cache``; its length and lineage count.

        Raises:
            InvalidRequest: No server ever returns a handle like this one.
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

    def prompt(
        self, message: Any, at: str, ids_field: str = "input_ids", *, is_new: bool = True
    ) -> tuple[Handle | None, tuple[int, ...], StalePolicy, str]:
        """Return the handle of a request that appends, its tokens, the policy for a stale handle, and the request id.

        Runs for every decoded token, so the usual case takes few calls.

        Args:
            message: The request.
            at: Its path, with a dot at the end.
            ids_field: The field of its tokens.
            is_new: It may create a sequence.

        Raises:
            InvalidRequest: One of them is not valid, or the request id is not; a new sequence needs a token.
            ContextExceeded: There are more tokens than a sequence can hold.
        """
        handle = self.handle(message.kv_cache, at) if message.HasField("kv_cache") else None
        if handle is None and not is_new:
            raise InvalidRequest(f"{at}kv_cache", "must be set")
        sent = getattr(message, ids_field)
        if len(sent) == 1 and (token_id := sent[0]) < self.vocab_size:
            token_ids: tuple[int, ...] = (token_id,)
        else:
            token_ids = self.token_ids(sent, at, ids_field, 0 if handle is None else handle.length)
        if handle is None and not token_ids:
            raise InvalidRequest(f"{at}{ids_field}", "must have at least one token for a new sequence")
        on_stale = StalePolicy.FAIL
        if message.on_stale:
            on_stale = choice(_STALE_POLICIES, message.on_stale, f"{at}on_stale", "StalePolicy")
        request_id = message.request_id
        if request_id:
            self.check_request_id(request_id, at)
        return handle, token_ids, on_stale, request_id

    def token_ids(self, token_ids: Sequence[int], at: str, field: str, length: int = 0) -> tuple[int, ...]:
        """Return the tokens of an input after a check of their number and values.

        Args:
            token_ids: The field.
            at: Path of its message, with a dot at the end.
            field: Its name.
            length: Number of tokens before them in the sequence.

        Raises:
            ContextExceeded: There are more tokens than a sequence can hold.
            TokenOutOfVocab: A token is not in the vocabulary.
        """
        if len(token_ids) > self.max_context:  # 4 MiB hold 4 million: reading them takes 0.4 s of the event loop
            raise ContextExceeded(length + len(token_ids), self.max_context)
        return self.in_vocabulary(token_ids, f"{at}{field}")

    def in_vocabulary(self, token_ids: Sequence[int], path: str) -> tuple[int, ...]:
        """Return token ids after a check that all are in the vocabulary; ``path`` is that of the field.

        Raises:
            TokenOutOfVocab: A token is not in the vocabulary.
        """
        read = tuple(token_ids)
        if read and max(read) >= self.vocab_size:
            index, token_id = next((i, t) for i, t in enumerate(read) if t >= self.vocab_size)
            raise TokenOutOfVocab(f"{path}[{index}]", token_id, self.vocab_size)
        return read

    def check_request_id(self, request_id: str, at: str) -> None:
        """Check the length of a request id.

        Raises:
            InvalidRequest: It is too long.
        """
        if len(request_id.encode()) > self.limits.max_request_id_bytes:
            raise InvalidRequest(f"{at}request_id", f"is longer than {self.limits.max_request_id_bytes} bytes")

    def reply_bytes(self, num_rows: int, row_bytes: int, request_id: str, at: str) -> int:
        """Return an upper bound of the size of a result on the wire.

        Raises:
            ReplyTooLarge: The result may not fit into a message.
        """
        id_bytes = self.limits.max_request_id_bytes if request_id else 0
        num_bytes = num_rows * row_bytes + _REPLY_OVERHEAD_BYTES + id_bytes
        if num_bytes > self.limits.max_reply_bytes:
            raise ReplyTooLarge(f"{at}logits_policy", num_bytes, self.limits.max_reply_bytes)
        return num_bytes

    def keep(self, job: AppendJob | GenerateJob, options: executor_pb2.CacheOptions, at: str) -> None:
        """Write into a job how its sequence is kept; for an existing sequence only the lease counts.

        Raises:
            InvalidRequest: The lease or the durability is invalid, or ``reserve_length`` is less than the input needs.
            FeatureUnsupported: The sequence must be durable, and the server has no journal; or blocks outside windows
                are to be dropped, and a layer of the model has no window.
        """
        if options.drop_outside_window and not self.attention_window:
            text = "drop_outside_window needs a model whose layers all have a window; this one has attention_window 0"
            raise FeatureUnsupported("drop_outside_window", text)
        job.ttl_s = lease(options.ttl, f"{at}cache.ttl")
        if job.handle is not None:
            return
        length, num_tokens = options.reserve_length, len(job.token_ids)
        if 0 < length < num_tokens:
            path = f"{at}cache.reserve_length"
            raise InvalidRequest(path, f"{length} is less than the {num_tokens} tokens of the input")
        job.new = NewSequence(
            reserved_length=length,
            reuse_prefix=not options.skip_prefix_reuse,
            publish_prefix=not options.skip_prefix_publish,
            is_durable=self._durability(options.durability, at) if options.durability else self.is_durable,
            attention_window=self.attention_window if options.drop_outside_window else 0,
        )

    def _durability(self, value: int, at: str) -> bool:
        """Return whether a new sequence is durable, where the request says so."""
        is_durable = choice(_DURABILITIES, value, f"{at}cache.durability", "Durability")
        if is_durable and not self.is_durable:
            raise FeatureUnsupported("durability", "this server has no journal (--durable); leave durability out")
        return is_durable


def lease(ttl: Duration, path: str) -> float | None:
    """Return a lease in seconds; None if it is unset or 0, which mean the same.

    Raises:
        InvalidRequest: The duration is invalid or negative.
    """
    return seconds(ttl, path) or None


def seconds(ttl: Duration, path: str) -> float:
    """Return a duration in seconds.

    Raises:
        InvalidRequest: The duration is invalid or negative.
    """
    if abs(ttl.nanos) >= 1_000_000_000:
        raise InvalidRequest(path, f"is not a valid Duration: {ttl.nanos} nanos are a second or more")
    value = ttl.seconds + ttl.nanos * 1e-9
    if value < 0.0:
        raise InvalidRequest(path, f"must not be negative, got {value} s")
    return value


def choice(table: Mapping[int, _T], value: int, path: str, enum: str) -> _T:
    """Return the entry of a table for the value of an enum.

    Raises:
        InvalidRequest: The table has no such value.
    """
    if value not in table:
        raise InvalidRequest(path, f"{value} is not a {enum}")
    return table[value]


def id_array(token_ids: Sequence[int], vocab_size: int, path: str) -> npt.NDArray[np.int64]:
    """Return token ids as an array, after a check that all are in the vocabulary.

    Raises:
        TokenOutOfVocab: A token is not in the vocabulary.
    """
    ids = np.fromiter(token_ids, np.int64, len(token_ids))  # np.array takes twice as long: it reads each by its index
    if (out := np.flatnonzero(ids >= vocab_size)).size:
        raise TokenOutOfVocab(f"{path}[{out[0]}]", int(ids[out[0]]), vocab_size)
    return ids


def check_count(path: str, count: int, limit: int, advice: str = "") -> None:
    """Check the number of entries of a list.

    Raises:
        InvalidRequest: There are more than the limit; ``advice`` says what to do instead.
    """
    if count > limit:
        text = f"has {count} entries, the limit is {limit}" + (f"; {advice}" if advice else "")
        raise InvalidRequest(path, text, count=count, limit=limit)


def require(message: Message, field: str, at: str = "") -> None:
    """Check that the field ``field`` is set.

    Raises:
        InvalidRequest: It is not set.
    """
    if not message.HasField(field):
        raise InvalidRequest(f"{at}{field}", "must be set")
