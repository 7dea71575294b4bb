"""Messages to jobs: every field of a request checked, with the path of the one that is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ferrule.v1 import cache_pb2, executor_pb2, types_pb2
from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.requests.caches import CacheReader, page_token
from ferrule_server.api.requests.fields import REPLY_OVERHEAD_BYTES, FieldReader, require
from ferrule_server.api.requests.forward import ForwardReader
from ferrule_server.api.requests.generate import GenerateReader, stop_ids_of
from ferrule_server.api.requests.masks import MaskReader
from ferrule_server.api.requests.planned import PlannedAppend, PlannedForward, PlannedGenerate
from ferrule_server.api.requests.policy import NO_ROWS, OutputPlan, PolicyReader
from ferrule_server.api.requests.verify import VerifyReader
from ferrule_server.engine.jobs import AppendJob
from ferrule_server.engine.masks import MaskRegistry
from ferrule_server.errors import InvalidRequest, ReplyTooLarge
from ferrule_server.executor.base import ModelDescription
from ferrule_server.kv.handle import Handle, StalePolicy

if TYPE_CHECKING:
    from ferrule_server.text.tokenizer import Tokenizer


class InputReader:
    """Turns request messages into jobs for one model.

    ``at`` is the path of a message in its request with a dot behind it, such as ``items[3].decode.``: the path of a
    field is put together only when the field is wrong.

    Args:
        model: Whose vocabulary, context and stop tokens count.
        limits: What a message may hold.
        max_step_rows: Most rows in one step.
        masks: Knows the masks that are named by fingerprint.
        tokenizer: Of the model; None: it has none.

    Attributes:
        caches: Reads the requests about sequences themselves.
        masks: As given.
        stop_ids: The model's own stop tokens.
    """

    def __init__(
        self,
        model: ModelDescription,
        limits: ApiLimits,
        *,
        max_step_rows: int,
        masks: MaskRegistry,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._fields = FieldReader(model.config.vocab_size, model.max_context, limits)
        self._limits = limits
        self._max_step_rows = max_step_rows
        self.masks = masks
        self._masks = MaskReader(model.config.vocab_size, masks)
        self._policies = PolicyReader(model.config.vocab_size, model.config.hidden_size, limits, self._masks)
        self._verifies = VerifyReader(self._fields, self._policies, self._masks)
        self.stop_ids = stop_ids_of(model, tokenizer)
        self._generates = GenerateReader(self._fields, self._policies, self.stop_ids, tokenizer)
        self._forwards = ForwardReader(self._fields, self._policies, max_step_rows)
        self.caches = CacheReader(self._fields)

    # ---- one append -------------------------------------------------------------------------------------------------

    def prefill(self, request: executor_pb2.PrefillRequest, principal: str) -> PlannedAppend:
        """Return the job of a Prefill.

        Raises:
            InvalidRequest, TokenOutOfVocab, ReplyTooLarge, ContextExceeded: A field is out of its range.
            MaskUnknown: A mask is not registered.
        """
        require(request, "input")
        return self.prefill_input(request.input, "input.", principal)

    def prefill_input(self, message: executor_pb2.PrefillInput, at: str, principal: str) -> PlannedAppend:
        """Return the job of one prompt, alone or in a batch. Raises as :meth:`prefill`."""
        handle = self._fields.handle(message.kv_cache, at) if message.HasField("kv_cache") else None
        if handle is None and not message.input_ids:
            raise InvalidRequest(f"{at}input_ids", "a new sequence needs at least one token")
        all_positions = _wants_all_positions(message.logits_positions, f"{at}logits_positions")
        planned = self._append(message, at, principal, handle, all_positions=all_positions)
        _check_positions(message, handle, at)
        self._keep(planned.job, message.cache, at)
        return planned

    def decode(self, message: executor_pb2.DecodeInput, at: str, principal: str) -> PlannedAppend:
        """Return the job of a Decode, or of one decode item of a stream. Raises as :meth:`prefill`."""
        if not message.HasField("kv_cache"):
            raise InvalidRequest(f"{at}kv_cache", "must be set: Decode appends to a sequence")
        handle = self._fields.handle(message.kv_cache, at)
        return self._append(message, at, principal, handle)

    def unified_item(self, message: executor_pb2.UnifiedBatchItem, at: str, principal: str) -> PlannedAppend:
        """Return the job of one piece that the client scheduled. Raises as :meth:`prefill`."""
        handle = self._fields.handle(message.kv_cache, at) if message.HasField("kv_cache") else None
        if handle is None and not message.q_tokens:
            raise InvalidRequest(f"{at}q_tokens", "a new sequence needs at least one token")
        length = 0 if handle is None else handle.length
        if message.HasField("pos_offset") and message.pos_offset != length:
            raise InvalidRequest(f"{at}pos_offset", f"is {message.pos_offset}, the sequence goes on at {length}")
        all_positions = _wants_all_positions(message.logits_positions, f"{at}logits_positions")
        is_final = message.is_final_chunk if message.HasField("is_final_chunk") else True
        plan = None if is_final else NO_ROWS
        planned = self._append(
            message, at, principal, handle, ids_field="q_tokens", all_positions=all_positions and is_final, plan=plan
        )
        self._keep(planned.job, message.cache, at)
        return planned

    def verify(self, message: executor_pb2.VerifyInput, at: str, principal: str) -> PlannedAppend:
        """Return the job of a ForwardVerify, or of one verify item of a stream.

        Raises:
            InvalidRequest, TokenOutOfVocab, ReplyTooLarge, ContextExceeded: A field is out of its range.
            MaskUnknown: A mask is not registered.
            FeatureUnsupported: The drafts are a tree.
        """
        return self._verifies.read(message, at, principal)

    # ---- batches ----------------------------------------------------------------------------------------------------

    def check_batch(self, num_items: int, path: str) -> None:
        """Return if a batch has no more items than are taken.

        Raises:
            InvalidRequest: It has more.
        """
        if num_items > self._max_step_rows:
            limit = self._max_step_rows
            raise InvalidRequest(path, f"has {num_items} entries, the limit is {limit}; send several batches")

    def check_unified(self, batch: executor_pb2.UnifiedBatch) -> None:
        """Return if the items of a batch fit into one step; a query is a row too.

        Raises:
            InvalidRequest: They do not, or there are none.
        """
        if not batch.items:
            raise InvalidRequest("batch.items", "must not be empty")
        self.check_batch(len(batch.items), "batch.items")
        num_rows = sum(len(item.q_tokens) or 1 for item in batch.items)
        if num_rows > self._max_step_rows:
            raise InvalidRequest("batch.items", f"hold {num_rows} rows, one step holds {self._max_step_rows}")

    # ---- answered in many pieces ------------------------------------------------------------------------------------

    def generate(self, request: executor_pb2.GenerateRequest, principal: str) -> PlannedGenerate:
        """Return the job of a Generate.

        Raises:
            InvalidRequest, TokenOutOfVocab, ReplyTooLarge, ContextExceeded: A field is out of its range.
            MaskUnknown: A mask is not registered.
            FeatureUnsupported: It needs a tokenizer, and there is none.
        """
        return self._generates.read(request, principal)

    def forward(self, request: executor_pb2.ForwardRequest, principal: str) -> PlannedForward:
        """Return the job of a Forward. Raises as :meth:`prefill`."""
        return self._forwards.read(request, principal)

    # ---- others -----------------------------------------------------------------------------------------------------

    def register_masks(self, request: cache_pb2.RegisterTokenMaskRequest, principal: str) -> list[bytes]:
        """Keep the masks of a RegisterTokenMask, all or none, and return their fingerprints in order.

        Raises:
            InvalidRequest: There are too many, or one is of another size or empty.
            QuotaExceeded: They are larger than what the principal may keep.
        """
        count, limit = len(request.masks), self._limits.max_masks_per_request
        if count > limit:
            raise InvalidRequest("masks", f"has {count} entries, the limit is {limit}; send several requests")
        masks = [self._masks.packed(data, f"masks[{index}]") for index, data in enumerate(request.masks)]
        return self.masks.register(principal, masks)

    def echoed_id(self, item: executor_pb2.StreamItem) -> str:
        """Return the id of whichever input an item has; empty where it is longer than ids may be."""
        kind = item.WhichOneof("input")
        return self.short_id(getattr(item, kind).request_id) if kind is not None else ""

    def short_id(self, request_id: str) -> str:
        """Return an id as it is echoed with an error: empty where it is longer than ids may be."""
        return request_id if self._fields.is_short(request_id) else ""

    def check_items(self, frame: executor_pb2.StreamDecodeRequest) -> None:
        """Return if a stream frame has no more items than are taken.

        Raises:
            InvalidRequest: It has more.
        """
        num_items, limit = len(frame.items), self._limits.max_items_per_frame
        if num_items > limit:
            text = f"has {num_items} entries, the limit is {limit}; send several frames"
            raise InvalidRequest("items", text, count=num_items, limit=limit)

    def _append(
        self,
        message: executor_pb2.PrefillInput | executor_pb2.DecodeInput | executor_pb2.UnifiedBatchItem,
        at: str,
        principal: str,
        handle: Handle | None,
        *,
        ids_field: str = "input_ids",
        all_positions: bool = False,
        plan: OutputPlan | None = None,
    ) -> PlannedAppend:
        """Return the job of any append. Runs for every token decoded: what is usual costs no call of its own."""
        fields = self._fields
        sent = getattr(message, ids_field)
        if len(sent) == 1 and sent[0] < fields.vocab_size:
            token_ids: tuple[int, ...] = (sent[0],)
        else:
            token_ids = fields.token_ids(sent, at, ids_field, 0 if handle is None else handle.length)
        on_stale = fields.on_stale(message.on_stale, at) if message.on_stale else StalePolicy.FAIL
        request_id = message.request_id
        if request_id:
            fields.check_request_id(request_id, at)
        if plan is None:
            plan = self._policies.read(message.logits_policy, at, principal, all_positions)
        num_rows = len(token_ids) or 1 if all_positions else 1
        reply_bytes = num_rows * plan.row_bytes + REPLY_OVERHEAD_BYTES
        if request_id:
            reply_bytes = fields.reply_bytes(num_rows, plan.row_bytes, request_id)
        if reply_bytes > self._limits.max_reply_bytes:
            raise ReplyTooLarge(f"{at}logits_policy", reply_bytes, self._limits.max_reply_bytes)
        job = AppendJob(principal, token_ids, handle, plan.output, on_stale, None, request_id)
        return PlannedAppend(job, plan, reply_bytes, at)

    def _keep(self, job: AppendJob, options: executor_pb2.CacheOptions, at: str) -> None:
        """Write into a job how its sequence is kept."""
        cache = self._fields.cache(options, at, len(job.token_ids), is_new=job.handle is None)
        job.ttl_s, job.reserved_length = cache.ttl_s, cache.reserved_length
        job.reuse_prefix, job.publish_prefix = cache.reuse_prefix, cache.publish_prefix


def _wants_all_positions(positions: int, path: str) -> bool:
    if positions not in (
        types_pb2.LOGITS_POSITIONS_UNSPECIFIED,
        types_pb2.LOGITS_POSITIONS_LAST,
        types_pb2.LOGITS_POSITIONS_ALL,
    ):
        raise InvalidRequest(path, f"{positions} is no LogitsPositions")
    return positions == types_pb2.LOGITS_POSITIONS_ALL


def _check_positions(message: executor_pb2.PrefillInput, handle: Handle | None, at: str) -> None:
    """Refuse anything but the trivial attention mask and positions: they are never silently ignored."""
    num_tokens = len(message.input_ids)
    if message.attention_mask:
        _check_equal(message.attention_mask, [1] * num_tokens, f"{at}attention_mask")
    if message.position_ids:
        start = handle.length if handle is not None else 0
        _check_equal(message.position_ids, range(start, start + num_tokens), f"{at}position_ids")


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


__all__ = [
    "InputReader",
    "PlannedAppend",
    "PlannedForward",
    "PlannedGenerate",
    "page_token",
    "require",
]
