"""The largest useful request of each method, in bytes; a larger one is refused before it is parsed.

A bound is computed from the message type: every field at its largest, as the least compact encoder writes it. Lists,
strings and bytes have a row in :func:`lengths`. A field without one fails a test, so none can be forgotten.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from ferrule_server.api.limits import ApiLimits

SLACK_BYTES: Final = 64 << 10
"""Room for fields that only newer clients know, and for values that are refused with an error of their own."""

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
    """The sizes of the model that bound the lengths of lists, besides the limits.

    Attributes:
        vocab_size: Number of token ids.
        max_context: Longest sequence, in tokens.
        max_step_rows: Most rows in one step, and most items in one batch.
    """

    vocab_size: int
    max_context: int
    max_step_rows: int


def lengths(limits: ApiLimits, model: ModelSizes) -> dict[str, int]:
    """Return the most entries of each list, or bytes of each string.

    A row is named by message and field, or by the field alone if it means the same in every message.
    """
    draft_probs = limits.max_draft_tokens * model.vocab_size
    return {
        "input_ids": model.max_context,
        "inputs": model.max_step_rows,
        "kv_caches": limits.max_handles_per_request,
        "request_id": limits.max_request_id_bytes,
        "GenerateRequest.stop_sequences": limits.max_stops,
        "GenerateRequest.stop_strings": limits.max_stops,
        "GenerateRequest.stop_token_ids": limits.max_stops,
        "KvCacheHandle.cache_id": 4 * limits.max_cache_id_chars,
        "KvCacheHandle.handle_id": 64,
        "KvCacheHandle.instance": 64,
        "KvCacheHandle.lineage": 64,
        "ListCachesRequest.page_token": 64,
        "LogitsReturnPolicy.logprob_token_ids": limits.max_logprob_token_ids,
        "PrefillInput.attention_mask": model.max_context,
        "PrefillInput.position_ids": model.max_context,
        "RegisterTokenMaskRequest.masks": limits.max_masks_per_request,
        "ReserveKvSlotsRequest.requests": limits.max_handles_per_request,
        "Sample.logit_bias": limits.max_logit_biases,
        "SparseProbs.probs": draft_probs,
        "SparseProbs.row_sizes": limits.max_draft_tokens,
        "SparseProbs.token_ids": draft_probs,
        "StreamDecodeRequest.items": limits.max_items_per_frame,
        "StreamDecodeRequest.release": limits.max_handles_per_request,
        "Tensor.data": 4 * draft_probs,
        "Tensor.shape": 64,
        "TokenIdList.token_ids": model.vocab_size,
        "TokenMask.fingerprint": 64,
        "TokenMask.inline_bits": _mask_bytes(model),
        "UnifiedBatch.items": model.max_step_rows,
        "UnifiedBatchItem.q_tokens": model.max_context,
        "VerifyInput.draft_ids": limits.max_draft_tokens,
        "VerifyInput.parents": limits.max_draft_tokens,
        "VerifyInput.token_masks": limits.max_draft_tokens + 1,
        "TokenizeRequest.text": limits.max_text_bytes,
        "ExtensionRequest.containing_type": 1024,
        "ServerReflectionRequest.all_extension_numbers_of_type": 1024,
        "ServerReflectionRequest.file_by_filename": 1024,
        "ServerReflectionRequest.file_containing_symbol": 1024,
        "ServerReflectionRequest.host": 1024,
        "ServerReflectionRequest.list_services": 1024,
        "HealthCheckRequest.service": 1024,
        "WarmupRequest.batch_sizes": 1024,
        "DetokenizeRequest.token_ids": limits.max_text_tokens,
    }


def element_lengths(limits: ApiLimits, model: ModelSizes) -> dict[str, int]:
    """Return the most bytes of an entry of lists of strings or bytes, and of messages whose own lists are shorter."""
    return {
        "GenerateRequest.stop_strings": limits.max_stop_bytes,
        "GenerateRequest.stop_sequences": 6 * limits.max_stop_tokens,
        "RegisterTokenMaskRequest.masks": _mask_bytes(model),
    }


WHOLE: Final = frozenset({"ApplyChatTemplateRequest"})
"""Messages that are bounded as a whole, by the longest text. So only distributions and masks make a request longer."""


@functools.cache
def request_bound(message: Descriptor, limits: ApiLimits, model: ModelSizes) -> int:
    """Return the most bytes that a useful request of a type takes.

    Raises:
        KeyError: A list, string or bytes field has no row in :func:`lengths`.
    """
    if message.name in WHOLE:
        size = limits.max_text_bytes
    else:
        size = _message_bytes(message, lengths(limits, model), element_lengths(limits, model))
    return min(size + SLACK_BYTES, limits.max_request_bytes)


def _message_bytes(message: Descriptor, counts: Mapping[str, int], elements: Mapping[str, int]) -> int:
    """Return the largest encoding of a message, without its own tag and length; of a oneof every member counts."""
    return sum(_field_bytes(field, counts, elements) for field in message.fields)


def _field_bytes(field: Any, counts: Mapping[str, int], elements: Mapping[str, int]) -> int:
    """Return the largest encoding of a field; Any: there are two descriptor classes."""
    name = f"{field.containing_type.name}.{field.name}"
    tag_bytes = 1 if field.number < 16 else 2
    is_text = field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
    length = length_of(field, counts) if is_text or field.is_repeated else 1
    count = length if field.is_repeated else 1
    if not is_text and field.type != FieldDescriptor.TYPE_MESSAGE:
        return count * (tag_bytes + _SCALAR_BYTES.get(field.type, _VARINT_BYTES))
    if is_text or name in elements:
        element_bytes = elements[name] if field.is_repeated else length
    else:
        element_bytes = _message_bytes(field.message_type, counts, elements)
    return count * (tag_bytes + _LENGTH_BYTES + element_bytes)


def length_of(field: Any, counts: Mapping[str, int]) -> int:
    """Return the row of a field in :func:`lengths`; Any as above.

    Raises:
        KeyError: There is none.
    """
    name = f"{field.containing_type.name}.{field.name}"
    return counts[name if name in counts else field.name]


def _mask_bytes(model: ModelSizes) -> int:
    return -(-model.vocab_size // 8)
