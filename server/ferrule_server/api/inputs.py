"""Messages to jobs: every field of a request checked, with the path of the one that is wrong."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from ferrule.v1 import cache_pb2, executor_pb2, types_pb2
from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.policy import OutputPlan, PolicyReader
from ferrule_server.engine.jobs import (
    AppendJob,
    ForkJob,
    InfoJob,
    KeepAliveJob,
    ListJob,
    ReleaseJob,
    ReserveJob,
    SlotsWanted,
    TruncateJob,
)
from ferrule_server.errors import (
    ContextExceeded,
    FerruleError,
    InvalidRequest,
    ReplyTooLarge,
    TokenOutOfVocab,
)
from ferrule_server.kv.handle import Handle, StalePolicy

_LINEAGE_BYTES: Final = 16
_REPLY_OVERHEAD_BYTES: Final = 512
_STALE_POLICIES: Final = {
    types_pb2.STALE_POLICY_UNSPECIFIED: StalePolicy.FAIL,
    types_pb2.STALE_POLICY_FAIL: StalePolicy.FAIL,
    types_pb2.STALE_POLICY_FORK: StalePolicy.FORK,
    types_pb2.STALE_POLICY_REWIND: StalePolicy.REWIND,
}


class _Duration(Protocol):
    """The part of google.protobuf.Duration that is read here."""

    seconds: int
    nanos: int


@dataclass(eq=False, slots=True)
class PlannedAppend:
    """An append ready for the engine, and how its result is written. Not frozen: that would double its cost.

    Attributes:
        job: For the engine.
        plan: For ``outputs``.
        reply_bytes: Upper bound of what the result takes on the wire.
        at: Path of the input in its request, with a dot behind it.
        seq: The client's number of a stream item.
    """

    job: AppendJob
    plan: OutputPlan
    reply_bytes: int
    at: str
    seq: int = 0


class InputReader:
    """Turns request messages into jobs for one model.

    ``at`` is the path of a message in its request with a dot behind it, such as ``items[3].decode.``: the path of a
    field is put together only when the field is wrong.

    Args:
        vocab_size: Token ids of the model; every id sent is below it.
        max_context: Longest sequence in tokens; an input that holds more is not even looked at.
        limits: What a message may hold.
    """

    def __init__(self, vocab_size: int, max_context: int, limits: ApiLimits) -> None:
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._limits = limits
        self._policies = PolicyReader(vocab_size, limits.max_top_logprobs)

    def prefill(self, request: executor_pb2.PrefillRequest, principal: str) -> PlannedAppend:
        """Return the job of a Prefill.

        Raises:
            InvalidRequest, TokenOutOfVocab, ReplyTooLarge, ContextExceeded: A field is out of its range.
            FeatureUnsupported: It asks for something not served here.
        """
        require(request, "input")
        message = request.input
        handle = self.handle(message.kv_cache, "input.") if message.HasField("kv_cache") else None
        if handle is None and not message.input_ids:
            raise InvalidRequest("input.input_ids", "a new sequence needs at least one token")
        planned = self._append(
            message,
            "input.",
            principal,
            handle,
            all_positions=_wants_all_positions(message.logits_positions, "input.logits_positions"),
        )
        self._check_positions(message, handle)
        options = message.cache  # reuse_prefix and publish_prefix are hints that change no answer
        if options.HasField("ttl"):
            planned.job.ttl_s = _seconds(options.ttl, "input.cache.ttl")
        if handle is None and options.HasField("reserve_length"):
            planned.job.reserved_length = _reserve_length(options.reserve_length, len(message.input_ids))
        return planned

    def decode(self, message: executor_pb2.DecodeInput, at: str, principal: str) -> PlannedAppend:
        """Return the job of a Decode, or of one decode item of a stream. Raises as :meth:`prefill`."""
        if not message.HasField("kv_cache"):
            raise InvalidRequest(f"{at}kv_cache", "must be set: Decode appends to a sequence")
        return self._append(message, at, principal, self.handle(message.kv_cache, at))

    def fork(self, request: cache_pb2.ForkCacheRequest, principal: str) -> ForkJob:
        """Return the job of a ForkCache."""
        require(request, "kv_cache")
        self._check_request_id(request.request_id, "")
        handle = self.handle(request.kv_cache, "")
        count = request.count if request.HasField("count") else 1
        if not 1 <= count <= self._limits.max_fork_count:
            raise InvalidRequest("count", f"{count} is outside [1, {self._limits.max_fork_count}]")
        length = request.length if request.HasField("length") else handle.length
        if not 1 <= length <= handle.length:
            raise InvalidRequest("length", f"{length} is outside [1, {handle.length}], the handle's length")
        ttl_s = _seconds(request.ttl, "ttl") if request.HasField("ttl") else None
        return ForkJob(principal, handle, length, count, ttl_s, request.request_id)

    def truncate(self, request: cache_pb2.TruncateKvRequest, principal: str) -> TruncateJob:
        """Return the job of a TruncateKv; the engine judges ``new_length``."""
        require(request, "kv_cache")
        return TruncateJob(principal, self.handle(request.kv_cache, ""), request.new_length)

    def reserve(self, request: cache_pb2.ReserveKvSlotsRequest, principal: str) -> ReserveJob:
        """Return the job of a ReserveKvSlots."""
        num_requests, limit = len(request.requests), self._limits.max_handles_per_request
        if num_requests > limit:
            raise InvalidRequest("requests", f"has {num_requests} entries, the limit is {limit}; send several requests")
        return ReserveJob(principal, tuple(self._wanted(each, index) for index, each in enumerate(request.requests)))

    def keep_alive(self, request: cache_pb2.KeepAliveRequest, principal: str) -> KeepAliveJob:
        """Return the job of a KeepAlive."""
        ttl_s = _seconds(request.ttl, "ttl") if request.HasField("ttl") else None
        return KeepAliveJob(principal, self.named(request.kv_caches, "kv_caches"), ttl_s)

    def release(self, handles: Sequence[types_pb2.KvCacheHandle], path: str, principal: str) -> ReleaseJob:
        """Return the job that ends the sequences in the list ``path``; a handle that names nothing is no error."""
        return ReleaseJob(principal, self.named(handles, path))

    def cache_info(self, request: cache_pb2.GetCacheInfoRequest, principal: str) -> InfoJob:
        """Return the job of a GetCacheInfo."""
        require(request, "kv_cache")
        handle = self._named(request.kv_cache, "kv_cache")
        return InfoJob(principal, handle, request.include_token_ids)

    def list_caches(self, request: cache_pb2.ListCachesRequest, principal: str) -> ListJob:
        """Return the job of a ListCaches."""
        limit = min(request.page_size or self._limits.default_page_size, self._limits.max_page_size)
        return ListJob(principal, _after_handle_id(request.page_token), limit)

    def handle(self, message: types_pb2.KvCacheHandle, at: str) -> Handle:
        """Return the handle in the field ``kv_cache``, whose length and lineage count.

        Raises:
            InvalidRequest: No handle was ever given out that looks like this one.
        """
        cache_id, length, lineage = message.cache_id, message.length, message.lineage
        if not cache_id or len(cache_id) > self._limits.max_cache_id_chars:
            limit = self._limits.max_cache_id_chars
            raise InvalidRequest(f"{at}kv_cache.cache_id", f"has {len(cache_id)} characters, not 1 to {limit}")
        if length < 1:
            raise InvalidRequest(f"{at}kv_cache.length", "must be at least 1, got 0")
        if len(lineage) != _LINEAGE_BYTES:
            raise InvalidRequest(f"{at}kv_cache.lineage", f"must have {_LINEAGE_BYTES} bytes, got {len(lineage)}")
        return Handle(cache_id, length, lineage)

    def named(self, handles: Sequence[types_pb2.KvCacheHandle], path: str) -> tuple[Handle, ...]:
        """Return the handles in the list ``path``, of which only the ``cache_id`` counts.

        Raises:
            InvalidRequest: There are too many, or one was never given out because it is too long.
        """
        limit = self._limits.max_handles_per_request
        if len(handles) > limit:
            raise InvalidRequest(path, f"has {len(handles)} handles, the limit is {limit}; send several requests")
        return tuple(self._named(handle, f"{path}[{index}]") for index, handle in enumerate(handles))

    def echoed_id(self, item: executor_pb2.StreamItem) -> str:
        """Return the id of whichever input an item has; empty where it is longer than ids may be."""
        kind = item.WhichOneof("input")
        request_id = getattr(item, kind).request_id if kind is not None else ""
        return request_id if self._is_short(request_id) else ""

    def check_items(self, frame: executor_pb2.StreamDecodeRequest) -> None:
        """Return if a stream frame has no more items than are taken.

        Raises:
            InvalidRequest: It has more.
        """
        num_items, limit = len(frame.items), self._limits.max_items_per_frame
        if num_items > limit:
            raise InvalidRequest("items", f"has {num_items} entries, the limit is {limit}; send several frames")

    def _wanted(self, message: cache_pb2.KvSlotRequest, index: int) -> SlotsWanted:
        path = f"requests[{index}].kv_cache"
        if not message.HasField("kv_cache"):
            raise InvalidRequest(path, "must be set")
        return SlotsWanted(self._named(message.kv_cache, path), message.target_length, message.admission_target_length)

    def _named(self, message: types_pb2.KvCacheHandle, path: str) -> Handle:
        cache_id, limit = message.cache_id, self._limits.max_cache_id_chars
        if len(cache_id) > limit:
            raise InvalidRequest(f"{path}.cache_id", f"has {len(cache_id)} characters, the limit is {limit}")
        return Handle(cache_id, message.length, message.lineage)

    def _append(
        self,
        message: executor_pb2.PrefillInput | executor_pb2.DecodeInput,
        at: str,
        principal: str,
        handle: Handle | None,
        all_positions: bool = False,
    ) -> PlannedAppend:
        """Return the job of any append. Runs for every token decoded: what is usual costs no call of its own."""
        input_ids = message.input_ids
        if len(input_ids) > self._max_context:  # 16 MiB hold 16 million: 1.5 s of the event loop, if they were read
            raise ContextExceeded((handle.length if handle is not None else 0) + len(input_ids), self._max_context)
        token_ids = (input_ids[0],) if len(input_ids) == 1 else tuple(input_ids)
        if token_ids and max(token_ids) >= self._vocab_size:
            raise self._out_of_vocab(token_ids, at)
        on_stale = _STALE_POLICIES.get(message.on_stale)
        if on_stale is None:
            raise InvalidRequest(f"{at}on_stale", f"{message.on_stale} is no StalePolicy")
        request_id = message.request_id
        if request_id:
            self._check_request_id(request_id, at)
        plan = self._policies.read(message.logits_policy, at, all_positions)
        num_rows = len(token_ids) or 1 if all_positions else 1
        reply_bytes = num_rows * plan.row_bytes + _REPLY_OVERHEAD_BYTES
        if reply_bytes > self._limits.max_reply_bytes:
            raise ReplyTooLarge(f"{at}logits_policy", reply_bytes, self._limits.max_reply_bytes)
        job = AppendJob(principal, token_ids, handle, plan.output, on_stale, None, request_id)
        return PlannedAppend(job, plan, reply_bytes, at)

    def _out_of_vocab(self, token_ids: Sequence[int], at: str) -> TokenOutOfVocab:
        """Return the error that names the first bad token."""
        index, token_id = next((i, t) for i, t in enumerate(token_ids) if t >= self._vocab_size)
        return TokenOutOfVocab(f"{at}input_ids[{index}]", token_id, self._vocab_size)

    def _check_request_id(self, request_id: str, at: str) -> None:
        if not self._is_short(request_id):
            raise InvalidRequest(f"{at}request_id", f"is longer than {self._limits.max_request_id_bytes} bytes")

    def _is_short(self, request_id: str) -> bool:
        return len(request_id.encode()) <= self._limits.max_request_id_bytes

    def _check_positions(self, message: executor_pb2.PrefillInput, handle: Handle | None) -> None:
        """Refuse anything but the trivial attention mask and positions: they are never silently ignored."""
        num_tokens = len(message.input_ids)
        if message.attention_mask:
            _check_equal(message.attention_mask, [1] * num_tokens, "input.attention_mask")
        if message.position_ids:
            start = handle.length if handle is not None else 0
            _check_equal(message.position_ids, range(start, start + num_tokens), "input.position_ids")


def placed(error: FerruleError, at: str) -> FerruleError:
    """Return an error of the engine with its field, if it names one, below the path ``at`` of the input.

    The engine knows the fields of an input and not where in its request that stood. The error belongs to one job, so
    it is changed in place.
    """
    if isinstance(error, InvalidRequest):
        error.field = f"{at}{error.field}"
        error.message = f"{error.field}: {error.description}"
        error.metadata["field"] = error.field
    return error


def page_token(handle_id: str) -> str:
    """Return the opaque token of the page that begins after ``handle_id``; empty for an empty one."""
    return base64.urlsafe_b64encode(f"1{handle_id}".encode()).decode() if handle_id else ""


def require(
    request: executor_pb2.PrefillRequest
    | executor_pb2.DecodeRequest
    | cache_pb2.ForkCacheRequest
    | cache_pb2.TruncateKvRequest
    | cache_pb2.GetCacheInfoRequest,
    field: str,
) -> None:
    """Return if the message ``field`` is set.

    Raises:
        InvalidRequest: It is not.
    """
    if not request.HasField(field):
        raise InvalidRequest(field, "must be set")


def _after_handle_id(token: str) -> str:
    if not token:
        return ""
    try:
        text = base64.b64decode(token, altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, UnicodeError, ValueError):
        text = ""
    if len(text) != 17 or text[0] != "1" or not set(text[1:]) <= set("0123456789abcdef"):
        raise InvalidRequest("page_token", "is no next_page_token of this server")
    return text[1:]


def _wants_all_positions(positions: int, path: str) -> bool:
    if positions not in (
        types_pb2.LOGITS_POSITIONS_UNSPECIFIED,
        types_pb2.LOGITS_POSITIONS_LAST,
        types_pb2.LOGITS_POSITIONS_ALL,
    ):
        raise InvalidRequest(path, f"{positions} is no LogitsPositions")
    return positions == types_pb2.LOGITS_POSITIONS_ALL


def _check_equal(given: Sequence[int], expected: Sequence[int], path: str) -> None:
    """Refuse a list that differs from its trivial value."""
    if len(given) != len(expected):
        raise InvalidRequest(
            path, f"has {len(given)} entries for {len(expected)} tokens; only the trivial value is served"
        )
    if list(given) == list(expected):
        return
    index = next(i for i, (value, wanted) in enumerate(zip(given, expected, strict=True)) if value != wanted)
    raise InvalidRequest(
        f"{path}[{index}]", f"is {given[index]}, only {expected[index]}, the trivial value, is served here"
    )


def _reserve_length(length: int, num_tokens: int) -> int:
    """Return the length up to which room is reserved with a new sequence of ``num_tokens`` tokens."""
    if length < num_tokens:
        raise InvalidRequest("input.cache.reserve_length", f"{length} is below the {num_tokens} tokens of the input")
    return length


def _seconds(ttl: _Duration, path: str) -> float:
    """Return a lease in seconds; the engine clamps it."""
    if abs(ttl.nanos) >= 1_000_000_000:
        raise InvalidRequest(path, f"is no Duration: {ttl.nanos} nanos are a second or more")
    seconds = ttl.seconds + ttl.nanos * 1e-9
    if seconds < 0.0:
        raise InvalidRequest(path, f"must not be negative, got {seconds} s")
    return seconds


__all__ = ["InputReader", "PlannedAppend", "page_token", "placed", "require"]
