"""Pieces of batches read: positions, chunks that are not final, how a sequence is kept, and the limits of a batch."""

from __future__ import annotations

from typing import Any

import pytest

from ferrule.v1 import cache_pb2, executor_pb2, policy_pb2, types_pb2
from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.requests.planned import PlannedAppend
from ferrule_server.errors import FerruleError
from ferrule_server.executor.base import OutputSpec
from ferrule_server.kv.handle import StalePolicy
from tests.api.reading import field_refused, make_reader

Item = executor_pb2.UnifiedBatchItem
Options = executor_pb2.CacheOptions

HANDLE = types_pb2.KvCacheHandle(cache_id="i.e.s", length=3, lineage=bytes(16))
GREEDY = policy_pb2.LogitsReturnPolicy(greedy_argmax=policy_pb2.GreedyArgmax())
AT = "batch.items[2]."


def _piece(**fields: Any) -> PlannedAppend:  # of UnifiedBatchItem
    return make_reader().unified(Item(**{"q_tokens": [1, 2], "logits_policy": GREEDY, **fields}), AT, "alice")


def _prefill(limits: ApiLimits | None = None, **fields: Any) -> PlannedAppend:  # of PrefillInput
    message = executor_pb2.PrefillInput(**{"input_ids": [1, 2], "logits_policy": GREEDY, **fields})
    return make_reader(limits=limits).prefill(message, "inputs[3].", "alice")


# ---- pieces ---------------------------------------------------------------------------------------------------------


def test_a_piece_is_an_append() -> None:
    """Of a new sequence or of one that lives."""
    new = _piece(request_id="r").job
    assert (new.token_ids, new.handle, new.request_id) == ((1, 2), None, "r")
    assert new.output.spec == OutputSpec(greedy=True)
    old = _piece(kv_cache=HANDLE, pos_offset=3, on_stale=types_pb2.STALE_POLICY_FORK, q_tokens=[]).job
    assert old.handle is not None
    assert (old.token_ids, old.on_stale) == ((), StalePolicy.FORK)


def test_a_piece_that_is_not_final_has_no_rows() -> None:
    """Whatever its policy says, which is that of the last piece."""
    planned = _piece(is_final_chunk=False, logits_positions=types_pb2.LOGITS_POSITIONS_ALL)
    assert planned.job.output.spec is None
    assert planned.reply_bytes < 1000
    assert _piece(is_final_chunk=True).job.output.spec is not None


def test_a_piece_may_want_all_its_rows() -> None:
    """As a prefill does."""
    planned = _piece(logits_positions=types_pb2.LOGITS_POSITIONS_ALL)
    assert planned.job.output.all_positions
    assert planned.reply_bytes > _piece().reply_bytes


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({"q_tokens": []}, "q_tokens"),
    "token out of the vocabulary": ({"q_tokens": [1, 97]}, "q_tokens[1]"),
    "offset of a new sequence": ({"pos_offset": 1}, "pos_offset"),
    "offset before the handle": ({"kv_cache": HANDLE, "pos_offset": 2}, "pos_offset"),
    "offset beyond the handle": ({"kv_cache": HANDLE, "pos_offset": 4}, "pos_offset"),
    "positions": ({"logits_positions": 9}, "logits_positions"),
    "handle": ({"kv_cache": types_pb2.KvCacheHandle()}, "kv_cache.cache_id"),
    "room": ({"cache": Options(reserve_length=1)}, "cache.reserve_length"),
    "policy": ({"logits_policy": policy_pb2.LogitsReturnPolicy(top_logprobs=9999)}, "logits_policy.top_logprobs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_piece_that_makes_no_sense_is_refused_by_its_path(name: str) -> None:
    """In the batch that it came with."""
    fields, field = REFUSED[name]
    assert field_refused(name, lambda: _piece(**fields)) == f"{AT}{field}"


# ---- how a sequence is kept -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [_piece, _prefill])
def test_how_a_new_sequence_is_kept_is_read(read: Any) -> None:
    """Unset hints are on; lease and room as asked for."""
    job = read().job
    assert (job.ttl_s, job.new.reserved_length, job.new.reuse_prefix, job.new.publish_prefix) == (None, 0, True, True)
    options = Options(ttl={"seconds": 7, "nanos": 500_000_000}, skip_prefix_reuse=True, reserve_length=9)
    job = read(cache=options).job
    assert (job.ttl_s, job.new.reserved_length, job.new.reuse_prefix, job.new.publish_prefix) == (7.5, 9, False, True)
    job = read(cache=Options(skip_prefix_publish=True)).job
    assert (job.new.reuse_prefix, job.new.publish_prefix) == (True, False)
    job = read(cache=options, kv_cache=HANDLE).job
    assert (job.ttl_s, job.new.reserved_length) == (7.5, 0)


BAD_PROMPTS: list[tuple[dict[str, Any], str]] = [
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": [1, 96, 97, 2**32 - 1]}, "input_ids[2]"),
    ({"attention_mask": [1]}, "attention_mask"),
    ({"attention_mask": [1] * 4096}, "attention_mask"),
    ({"attention_mask": [1, 0]}, "attention_mask[1]"),
    ({"attention_mask": [2, 1]}, "attention_mask[0]"),
    ({"position_ids": [1, 2]}, "position_ids[0]"),
    ({"position_ids": [0, 2]}, "position_ids[1]"),
    ({"position_ids": [0, 1, 2]}, "position_ids"),
    ({"cache": Options(ttl={"seconds": -1})}, "cache.ttl"),
    ({"cache": Options(reserve_length=1)}, "cache.reserve_length"),
    ({"logits_positions": 9}, "logits_positions"),
    ({"on_stale": 9}, "on_stale"),
    ({"request_id": "x" * 129}, "request_id"),
    ({"kv_cache": types_pb2.KvCacheHandle(length=1, lineage=bytes(16))}, "kv_cache.cache_id"),
    ({"kv_cache": types_pb2.KvCacheHandle(cache_id="x" * 129, length=1, lineage=bytes(16))}, "kv_cache.cache_id"),
    ({"kv_cache": types_pb2.KvCacheHandle(cache_id="x", lineage=bytes(16))}, "kv_cache.length"),
    ({"kv_cache": types_pb2.KvCacheHandle(cache_id="x", length=1, lineage=bytes(15))}, "kv_cache.lineage"),
]


@pytest.mark.parametrize(("fields", "path"), BAD_PROMPTS, ids=[path for _, path in BAD_PROMPTS])
def test_a_bad_prompt_is_refused_by_its_path(fields: dict[str, Any], path: str) -> None:
    """The path begins with that of the input."""
    name = "vocabulary" if path == "input_ids[2]" else path
    assert field_refused(name, lambda: _prefill(**fields)) == f"inputs[3].{path}"


def test_trivial_masks_and_positions_are_accepted() -> None:
    """All ones, and consecutive positions from the length of the handle on."""
    assert _prefill(attention_mask=[1, 1], position_ids=[0, 1]).job.token_ids == (1, 2)
    assert _prefill(attention_mask=[1, 1], position_ids=[3, 4], kv_cache=HANDLE).job.token_ids == (1, 2)


@pytest.mark.parametrize(
    ("dtype", "num_tokens"), [(types_pb2.DATA_TYPE_FLOAT32, 18), (types_pb2.DATA_TYPE_BFLOAT16, 30)]
)
def test_a_prompt_whose_reply_would_be_too_large_is_refused(dtype: types_pb2.DataType, num_tokens: int) -> None:
    """Rows of four bytes for each token, or of two."""
    limits = ApiLimits(max_reply_bytes=9000)
    policy = policy_pb2.LogitsReturnPolicy(full_logits=policy_pb2.FullLogits(dtype=dtype))
    wanted: dict[str, Any] = {"logits_policy": policy, "logits_positions": types_pb2.LOGITS_POSITIONS_ALL}
    assert _prefill(limits, input_ids=[1] * num_tokens, **wanted).reply_bytes <= 9000
    with pytest.raises(FerruleError) as caught:
        _prefill(limits, input_ids=[1] * num_tokens * 2, **wanted)
    assert caught.value.reason == "REPLY_TOO_LARGE"
    assert 9000 < int(caught.value.metadata["reply_bytes"]) < 18_000


# ---- batches --------------------------------------------------------------------------------------------------------


def test_a_batch_has_as_many_items_as_a_step_has_rows() -> None:
    """And no more."""
    reader = make_reader()
    reader.check_batch(32, "inputs")
    with pytest.raises(FerruleError, match="inputs: has 33 entries, the limit is 32"):
        reader.check_batch(33, "inputs")


def test_the_rows_of_a_scheduled_batch_fit_into_one_step() -> None:
    """A query is a row; a batch without items is none."""
    reader = make_reader()
    items = [Item(q_tokens=[1] * 16), Item(q_tokens=[1] * 15), Item(kv_cache=HANDLE)]
    reader.check_unified(executor_pb2.UnifiedBatch(items=items))
    for too_many in ([*items, Item(kv_cache=HANDLE)], [Item(q_tokens=[1] * 33)], [Item()] * 33, []):
        batch = executor_pb2.UnifiedBatch(items=too_many)
        assert field_refused("", lambda batch=batch: reader.check_unified(batch)) == "batch.items"  # type: ignore[misc]


# ---- masks ----------------------------------------------------------------------------------------------------------


def test_masks_are_registered_all_or_none() -> None:
    """One bad mask keeps nothing."""
    reader = make_reader()
    good = bytes([1, *[0] * 12])
    for masks, field in (([good, b"short"], "masks[1]"), ([bytes(13), good], "masks[0]"), ([good] * 65, "masks")):
        request = cache_pb2.RegisterTokenMaskRequest(masks=masks)
        assert field_refused(field, lambda request=request: reader.register_masks(request, "alice")) == field  # type: ignore[misc]
    assert reader.masks.num_masks == 0
    fingerprints, kept = reader.register_masks(cache_pb2.RegisterTokenMaskRequest(masks=[good] * 64), "alice")
    assert (len(fingerprints), len(set(fingerprints)), reader.masks.num_masks) == (64, 1, 1)
    assert [mask.fingerprint for mask in kept] == fingerprints
