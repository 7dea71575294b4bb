"""Reads the requests that append tokens; every field is checked, and an error has the path of its field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from ferrule.v1 import cache_pb2, executor_pb2, types_pb2
from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.requests.caches import CacheReader
from ferrule_server.api.requests.fields import FieldReader, check_count, choice
from ferrule_server.api.requests.masks import MaskReader
from ferrule_server.api.requests.planned import PlannedAppend
from ferrule_server.api.requests.policy import NO_ROWS, OutputPlan, PolicyReader
from ferrule_server.api.requests.streaming import StreamReader, stop_ids_of
from ferrule_server.api.requests.verify import VerifyReader
from ferrule_server.engine.jobs import AppendJob
from ferrule_server.engine.masks import MaskRegistry
from ferrule_server.errors import InvalidRequest
from ferrule_server.executor.base import ModelDescription, TokenMask
from ferrule_server.kv.handle import Handle

if TYPE_CHECKING:
    from ferrule_server.text.tokenizer import Tokenizer

_WANTS_ALL_POSITIONS: Final[Mapping[int, bool]] = {
    types_pb2.LOGITS_POSITIONS_UNSPECIFIED: False,
    types_pb2.LOGITS_POSITIONS_LAST: False,
    types_pb2.LOGITS_POSITIONS_ALL: True,
}


class InputReader:
    """Turns request messages into jobs for one model.

    ``at`` is the path of a message in its request with a dot at the end, such as ``items[3].decode.``. The path of a
    field is built only if the field is invalid.

    Args:
        model: Its vocabulary, context and stop tokens are used.
        limits: The limits of messages.
        max_step_rows: Most rows in one step.
        masks: Holds the masks that are named by fingerprint.
        tokenizer: The model's tokenizer; None: it has none.
        is_durable: The server has a journal, so new sequences are durable unless their requests say otherwise.

    Attributes:
        verifies: Reads verifies.
        streams: Reads Generate and Forward.
        caches: Reads the requests about sequences.
        max_step_rows, tokenizer, masks: As given.
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
        is_durable: bool = False,
    ) -> None:
        config = model.config
        self._fields = FieldReader(
            config.vocab_size, model.max_context, limits, config.attention_window, is_durable=is_durable
        )
        self.max_step_rows = max_step_rows
        self.tokenizer = tokenizer
        self.masks = masks
        self._masks = MaskReader(model.config.vocab_size, masks)
        self._policies = PolicyReader(self._fields, model.config.hidden_size, self._masks)
        self.verifies = VerifyReader(self._fields, self._policies, self._masks)
        self.stop_ids = stop_ids_of(model, tokenizer)
        self.streams = StreamReader(self._fields, self._policies, max_step_rows, frozenset(self.stop_ids), tokenizer)
        self.caches = CacheReader(self._fields)

    # ---- one append -------------------------------------------------------------------------------------------------

    def prefill(self, message: executor_pb2.PrefillInput, at: str, principal: str) -> PlannedAppend:
        """Return the job of one prompt, alone or in a batch.

        Raises:
            InvalidRequest, TokenOutOfVocab, ReplyTooLarge, ContextExceeded: A field is out of its range.
            MaskUnknown: A mask is not registered.
        """
        all_positions = _all_positions(message.logits_positions, at)
        planned = self._append(message, at, principal, all_positions=all_positions)
        _check_positions(message, planned.job.handle, at)
        self._fields.keep(planned.job, message.cache, at)
        return planned

    def decode(self, message: executor_pb2.DecodeInput, at: str, principal: str) -> PlannedAppend:
        """Return the job of a Decode, or of one decode item of a stream. Raises as :meth:`prefill`."""
        return self._append(message, at, principal, is_new=False)

    def unified(self, message: executor_pb2.UnifiedBatchItem, at: str, principal: str) -> PlannedAppend:
        """Return the job of one item that the client has scheduled. Raises as :meth:`prefill`."""
        is_final = message.is_final_chunk if message.HasField("is_final_chunk") else True
        planned = self._append(
            message,
            at,
            principal,
            ids_field="q_tokens",
            all_positions=_all_positions(message.logits_positions, at) and is_final,
            plan=None if is_final else NO_ROWS,
        )
        length = 0 if planned.job.handle is None else planned.job.handle.length
        if message.HasField("pos_offset") and message.pos_offset != length:
            raise InvalidRequest(f"{at}pos_offset", f"is {message.pos_offset}, the sequence continues at {length}")
        self._fields.keep(planned.job, message.cache, at)
        return planned

    # ---- batches ----------------------------------------------------------------------------------------------------

    def check_batch(self, num_items: int, path: str) -> None:
        """Check the number of items of a batch.

        Raises:
            InvalidRequest: There are more items than rows in a step.
        """
        check_count(path, num_items, self.max_step_rows, "send several batches")

    def check_unified(self, batch: executor_pb2.UnifiedBatch) -> None:
        """Check that the items of a batch fit into one step; a query is a row too.

        Raises:
            InvalidRequest: The items do not fit, or there are none.
        """
        if not batch.items:
            raise InvalidRequest("batch.items", "must not be empty")
        self.check_batch(len(batch.items), "batch.items")
        num_rows = sum(len(item.q_tokens) or 1 for item in batch.items)
        if num_rows > self.max_step_rows:
            raise InvalidRequest("batch.items", f"hold {num_rows} rows, one step holds {self.max_step_rows}")

    # ---- others -----------------------------------------------------------------------------------------------------

    def register_masks(
        self, request: cache_pb2.RegisterTokenMaskRequest, principal: str
    ) -> tuple[list[bytes], tuple[TokenMask, ...]]:
        """Register the masks of a RegisterTokenMask, all or none; return their fingerprints in order, and the masks.

        Raises:
            InvalidRequest: There are too many masks, or one has the wrong size or allows no token.
            QuotaExceeded: The masks exceed the quota of the principal.
        """
        check_count("masks", len(request.masks), self._fields.limits.max_masks_per_request, "send several requests")
        masks = [self._masks.packed(data, f"masks[{index}]") for index, data in enumerate(request.masks)]
        return self.masks.register(principal, masks), tuple(masks)

    def _append(
        self,
        message: executor_pb2.PrefillInput | executor_pb2.DecodeInput | executor_pb2.UnifiedBatchItem,
        at: str,
        principal: str,
        *,
        is_new: bool = True,
        ids_field: str = "input_ids",
        all_positions: bool = False,
        plan: OutputPlan | None = None,
    ) -> PlannedAppend:
        """Return the job of any append."""
        fields = self._fields
        handle, token_ids, on_stale, request_id = fields.prompt(message, at, ids_field, is_new=is_new)
        if plan is None:
            plan = self._policies.read(message.logits_policy, at, principal, all_positions)
        num_rows = len(token_ids) or 1 if all_positions else 1
        reply_bytes = fields.reply_bytes(num_rows, plan.row_bytes, request_id, at)
        job = AppendJob(principal, token_ids, handle, plan.output, on_stale, None, request_id)
        return PlannedAppend(job, plan, reply_bytes, at)


def _all_positions(value: int, at: str) -> bool:
    return choice(_WANTS_ALL_POSITIONS, value, f"{at}logits_positions", "LogitsPositions")


def _check_positions(message: executor_pb2.PrefillInput, handle: Handle | None, at: str) -> None:
    """Refuse any attention mask and positions but the trivial ones, instead of ignoring them."""
    num_tokens = len(message.input_ids)
    if message.attention_mask:
        _check_equal(message.attention_mask, [1] * num_tokens, f"{at}attention_mask")
    if message.position_ids:
        start = handle.length if handle is not None else 0
        _check_equal(message.position_ids, range(start, start + num_tokens), f"{at}position_ids")


def _check_equal(given: Sequence[int], expected: Sequence[int], path: str) -> None:
    """Check that a list has its trivial value."""
    if len(given) != len(expected):
        raise InvalidRequest(
            path, f"has {len(given)} entries for {len(expected)} tokens; only the trivial value is supported"
        )
    if list(given) == list(expected):
        return
    index = next(i for i, (value, wanted) in enumerate(zip(given, expected, strict=True)) if value != wanted)
    text = f"is {given[index]}, only the trivial value is supported, {expected[index]}"
    raise InvalidRequest(f"{path}[{index}]", text)
