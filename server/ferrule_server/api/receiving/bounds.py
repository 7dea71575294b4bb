"""The largest request that each method can make use of, in bytes: what is larger is refused before it is parsed.

A bound is computed from the message type: every field at its largest, as the least compact encoder writes it. Lists,
strings and bytes have a row in :data:`LENGTHS`; a field without one fails at start, so none can be forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from ferrule_server.api.limits import ApiLimits

SLACK_BYTES: Final = 64 << 10
"""For fields that only newer clients know, and for values that are refused with an error of their own."""

_VARINT_BYTES: Final = 10
_SCALAR_BYTES: Final[Mapping[int, int]] = {
    FieldDescriptor.TYPE_UINT32: 5,
    FieldDescriptor.TYPE_FLOAT: 4,
    FieldDescriptor.TYPE_DOUBLE: 8,
    FieldDescriptor.TYPE_BOOL: 1,
    FieldDescriptor.TYPE_ENUM: 5,
}
_LENGTH_BYTES: Final = 5


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What the lengths of lists depend on besides the limits.

    Attributes:
        vocab_size: Token ids of the model.
        max_context: Longest sequence, in tokens.
        max_step_rows: Most rows in one step, and most items in one batch.
    """

    vocab_size: int
    max_context: int
    max_step_rows: int


_Length = Callable[[ApiLimits, ModelSizes], int]


def _context(_: ApiLimits, model: ModelSizes) -> int:
    return model.max_context


def _vocabulary(_: ApiLimits, model: ModelSizes) -> int:
    return model.vocab_size


def _batch(_: ApiLimits, model: ModelSizes) -> int:
    return model.max_step_rows


def _mask_bytes(_: ApiLimits, model: ModelSizes) -> int:
    return -(-model.vocab_size // 8)


def _handles(limits: ApiLimits, _: ModelSizes) -> int:
    return limits.max_handles_per_request


def _request_id(limits: ApiLimits, _: ModelSizes) -> int:
    return limits.max_request_id_bytes


def _drafts(limits: ApiLimits, _: ModelSizes) -> int:
    return limits.max_draft_tokens


def _draft_probs(limits: ApiLimits, model: ModelSizes) -> int:
    return limits.max_draft_tokens * model.vocab_size


def _stops(limits: ApiLimits, _: ModelSizes) -> int:
    return limits.max_stops


def _text(limits: ApiLimits, _: ModelSizes) -> int:
    return limits.max_text_bytes


def _short(_: ApiLimits, __: ModelSizes) -> int:
    return 64


LENGTHS: Final[Mapping[str, _Length]] = {
    "BatchDecodeRequest.inputs": _batch,
    "BatchPrefillRequest.inputs": _batch,
    "DecodeInput.input_ids": _context,
    "DecodeInput.request_id": _request_id,
    "ForkCacheRequest.request_id": _request_id,
    "ForwardRequest.input_ids": _context,
    "ForwardRequest.request_id": _request_id,
    "GenerateRequest.input_ids": _context,
    "GenerateRequest.request_id": _request_id,
    "GenerateRequest.stop_sequences": _stops,
    "GenerateRequest.stop_strings": _stops,
    "GenerateRequest.stop_token_ids": _stops,
    "KeepAliveRequest.kv_caches": _handles,
    "KvCacheHandle.cache_id": lambda limits, _: 4 * limits.max_cache_id_chars,
    "KvCacheHandle.lineage": _short,
    "ListCachesRequest.page_token": _short,
    "LogitsReturnPolicy.logprob_token_ids": lambda limits, _: limits.max_logprob_token_ids,
    "PrefillInput.attention_mask": _context,
    "PrefillInput.input_ids": _context,
    "PrefillInput.position_ids": _context,
    "PrefillInput.request_id": _request_id,
    "RegisterTokenMaskRequest.masks": lambda limits, _: limits.max_masks_per_request,
    "ReleaseCacheRequest.kv_caches": _handles,
    "ReserveKvSlotsRequest.requests": _handles,
    "Sample.logit_bias": lambda limits, _: limits.max_logit_biases,
    "SparseProbs.probs": _draft_probs,
    "SparseProbs.row_sizes": _drafts,
    "SparseProbs.token_ids": _draft_probs,
    "StreamDecodeRequest.items": lambda limits, _: limits.max_items_per_frame,
    "StreamDecodeRequest.release": _handles,
    "Tensor.data": lambda limits, model: 4 * _draft_probs(limits, model),
    "Tensor.shape": _short,
    "TokenIdList.token_ids": _vocabulary,
    "TokenMask.fingerprint": _short,
    "TokenMask.inline_bits": _mask_bytes,
    "UnifiedBatch.items": _batch,
    "UnifiedBatchItem.q_tokens": _context,
    "UnifiedBatchItem.request_id": _request_id,
    "VerifyInput.draft_ids": _drafts,
    "VerifyInput.input_ids": _context,
    "VerifyInput.parents": _drafts,
    "VerifyInput.request_id": _request_id,
    "VerifyInput.token_masks": lambda limits, _: limits.max_draft_tokens + 1,
    "EncodeRequest.text": _text,
    "ExtensionRequest.containing_type": lambda _, __: 1024,
    "ServerReflectionRequest.all_extension_numbers_of_type": lambda _, __: 1024,
    "ServerReflectionRequest.file_by_filename": lambda _, __: 1024,
    "ServerReflectionRequest.file_containing_symbol": lambda _, __: 1024,
    "ServerReflectionRequest.host": lambda _, __: 1024,
    "ServerReflectionRequest.list_services": lambda _, __: 1024,
    "HealthCheckRequest.service": lambda _, __: 1024,
    "WarmupRequest.batch_sizes": lambda _, __: 1024,
    "TokenizerServiceDecodeRequest.token_ids": lambda limits, _: limits.max_text_tokens,
}
"""Entries of a list, or bytes of a string, at most; by the name of its message and its own."""

ELEMENT_LENGTHS: Final[Mapping[str, _Length]] = {
    "GenerateRequest.stop_strings": lambda limits, _: limits.max_stop_length,
    "GenerateRequest.stop_sequences": lambda limits, _: 6 * limits.max_stop_length,
    "RegisterTokenMaskRequest.masks": _mask_bytes,
}
"""Bytes of each entry: of every list of strings or bytes, and of messages whose own lists are shorter there."""

WHOLE: Final[Mapping[str, _Length]] = {
    "ApplyChatTemplateRequest": _text,
}
"""Messages that are bounded as a whole."""


def request_bound(message: Descriptor, limits: ApiLimits, model: ModelSizes) -> int:
    """Return the most bytes that a useful request of a type takes.

    Raises:
        KeyError: A list, string or bytes field has no row in :data:`LENGTHS`.
    """
    whole = WHOLE.get(message.name)
    size = _message_bytes(message, limits, model) if whole is None else 2 * whole(limits, model)
    return min(size + SLACK_BYTES, limits.max_request_bytes)


def _message_bytes(message: Descriptor, limits: ApiLimits, model: ModelSizes) -> int:
    """Return the largest encoding of a message, without its own tag and length; of a oneof every member counts."""
    return sum(_field_bytes(field, limits, model) for field in message.fields)


def _field_bytes(field: Any, limits: ApiLimits, model: ModelSizes) -> int:  # Any: the two descriptor classes
    name = f"{field.containing_type.name}.{field.name}"
    tag_bytes = 1 if field.number < 16 else 2
    is_text = field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
    count = LENGTHS[name](limits, model) if field.is_repeated else 1
    if not is_text and field.type != FieldDescriptor.TYPE_MESSAGE:
        return count * (tag_bytes + _SCALAR_BYTES.get(field.type, _VARINT_BYTES))
    if is_text or name in ELEMENT_LENGTHS:
        element_bytes = (ELEMENT_LENGTHS if field.is_repeated else LENGTHS)[name](limits, model)
    else:
        element_bytes = _message_bytes(field.message_type, limits, model)
    return count * (tag_bytes + _LENGTH_BYTES + element_bytes)
