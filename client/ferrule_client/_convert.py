"""Messages of ``ferrule.v1`` to and from the values of ``types`` and ``policy``. Pure functions, no calls."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from datetime import UTC
from typing import Any, TypeVar, cast

import numpy as np
from google.protobuf import duration_pb2, timestamp_pb2
from google.protobuf.message import Message

from ferrule.v1 import admin_pb2, cache_pb2, executor_pb2, info_pb2, policy_pb2, types_pb2
from ferrule_client import _check
from ferrule_client import types as t
from ferrule_client import views as v
from ferrule_client.items import DraftDistributions
from ferrule_client.masks import MaskLike, as_mask
from ferrule_client.policy import Policy, Sampling, check_policy

_T = TypeVar("_T")

_DTYPES: dict[str, types_pb2.DataType] = {
    "float32": types_pb2.DATA_TYPE_FLOAT32,
    "bfloat16": types_pb2.DATA_TYPE_BFLOAT16,
    "float16": types_pb2.DATA_TYPE_FLOAT16,
}
_STALE: dict[str, types_pb2.StalePolicy] = {
    "fail": types_pb2.STALE_POLICY_FAIL,
    "fork": types_pb2.STALE_POLICY_FORK,
    "rewind": types_pb2.STALE_POLICY_REWIND,
}
_ACCEPTANCE: dict[str, executor_pb2.AcceptanceRule] = {
    "none": executor_pb2.ACCEPTANCE_RULE_NONE,
    "greedy": executor_pb2.ACCEPTANCE_RULE_EXACT,
    "exact": executor_pb2.ACCEPTANCE_RULE_EXACT,
    "rejection": executor_pb2.ACCEPTANCE_RULE_REJECTION,
}
_DURABILITY: dict[str, types_pb2.Durability] = {
    "none": types_pb2.DURABILITY_NONE,
    "journaled": types_pb2.DURABILITY_JOURNALED,
}
_POOLING: dict[str, executor_pb2.HiddenPooling] = {
    "mean": executor_pb2.HIDDEN_POOLING_MEAN,
    "last": executor_pb2.HIDDEN_POOLING_LAST,
}
_NESTED: dict[type, type] = {
    admin_pb2.PrincipalView: v.PrincipalView,
    admin_pb2.WarmupStep: t.WarmStep,
    cache_pb2.CacheMetrics: t.CacheMetrics,
    cache_pb2.Lease: t.Lease,
    info_pb2.ExecutorStatus: t.Status,
    info_pb2.MemoryUsage: t.MemoryUsage,
}
"""Messages that stand in fields of others, and the dataclass of each."""

_RETURNED = [field.name for field in dataclasses.fields(Policy) if field.name not in ("selection", "logits")]
_SAMPLED = [field.name for field in dataclasses.fields(Sampling) if field.name not in ("logit_bias", "mask")]
_MAX_DURATION_S = 315_576_000_000.0

AnyOutput = executor_pb2.PrefillOutput | executor_pb2.DecodeOutput | executor_pb2.VerifyOutput


def handle_to_message(handle: t.Handle) -> types_pb2.KvCacheHandle:
    """Return the wire form of a handle; raise TypeError for what is none."""
    check_handle(handle)
    return types_pb2.KvCacheHandle(
        cache_id=handle.cache_id,
        length=handle.length,
        lineage=handle.lineage,
        instance=handle.instance,
        handle_id=handle.handle_id,
    )


def check_handle(value: object) -> None:
    """Raise TypeError if an argument is not a handle."""
    if not isinstance(value, t.Handle):
        hint = "make it with Handle.from_string" if isinstance(value, str) else "take cache.handle or cache.detach()"
        raise TypeError(f"a Handle is needed, got {type(value).__name__}; {hint}")


def summary_from_message(message: cache_pb2.CacheSummary) -> t.CacheSummary:
    """Return one line of a list of sequences."""
    handle = handle_from_message(message.kv_cache) if message.HasField("kv_cache") else None
    return value(t.CacheSummary, message, handle=handle)


def handle_from_message(message: types_pb2.KvCacheHandle) -> t.Handle:
    """Return the value that a wire handle stands for."""
    return t.Handle(message.cache_id, message.length, message.lineage, message.instance, message.handle_id)


def duration(seconds: float | None) -> duration_pb2.Duration | None:
    """Return a lease as a Duration, or None, which leaves a field unset; raise ValueError if none can be that long."""
    if seconds is None:
        return None
    _check.number("ttl", seconds, 0, _MAX_DURATION_S)
    message = duration_pb2.Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def stale_to_message(on_stale: t.OnStale) -> types_pb2.StalePolicy:
    """Return the wire form of a stale policy, written in any case; raise ValueError for another word."""
    return _STALE[_check.choice("on_stale", on_stale, _STALE)]


def acceptance_to_message(acceptance: t.Acceptance) -> executor_pb2.AcceptanceRule:
    """Return the wire form of an acceptance rule, written in any case; raise ValueError for another word."""
    return _ACCEPTANCE[_check.choice("acceptance", acceptance, _ACCEPTANCE)]


def durability_to_message(durability: t.Durability | None) -> types_pb2.Durability:
    """Return the wire form of a level, written in any case, or of none; raise ValueError for another word."""
    if durability is None:
        return types_pb2.DURABILITY_UNSPECIFIED
    return _DURABILITY[_check.choice("durability", durability, _DURABILITY)]


def pooling_to_message(pooling: t.Pooling | None) -> executor_pb2.HiddenPooling:
    """Return the wire form of a pooling, written in any case, or of none; raise ValueError for another word."""
    if pooling is None:
        return executor_pb2.HIDDEN_POOLING_UNSPECIFIED
    return _POOLING[_check.choice("pooling", pooling, _POOLING)]


def policy_to_message(policy: Policy | None) -> policy_pb2.LogitsReturnPolicy | None:
    """Return the wire form of a policy, or None, which leaves a field unset; raise TypeError for anything else."""
    check_policy(policy)
    if policy is None:
        return None
    message = policy_pb2.LogitsReturnPolicy(**{name: getattr(policy, name) for name in _RETURNED})
    if policy.logits is not None:
        message.full_logits.dtype = _DTYPES[policy.logits.lower()]
    if policy.selection is not None:
        _select(message, policy.selection)
    return message


def _select(message: policy_pb2.LogitsReturnPolicy, chosen: Sampling) -> None:
    """Write how a token is chosen; the contract has a message of its own for the most likely one."""
    mask = None if chosen.mask is None else mask_to_message(chosen.mask)
    counts = chosen.frequency_penalty is not None or chosen.presence_penalty is not None
    if chosen.is_greedy and not counts and not chosen.logit_bias:
        penalties = {name: getattr(chosen, name) for name in ("repetition_penalty", "penalty_start")}
        message.greedy_argmax.CopyFrom(policy_pb2.GreedyArgmax(token_mask=mask, **penalties))
    else:
        settings = {name: getattr(chosen, name) for name in _SAMPLED}
        biases = dict(chosen.logit_bias)
        message.sample.CopyFrom(policy_pb2.Sample(token_mask=mask, logit_bias=biases, **settings))


def mask_to_message(mask: MaskLike) -> policy_pb2.TokenMask:
    """Return the wire form of a mask; a registered one goes by its fingerprint. Raises as ``as_mask``."""
    mask = as_mask(mask)
    if mask.fingerprint is not None:
        return policy_pb2.TokenMask(fingerprint=mask.fingerprint)
    if mask.bits is not None:
        return policy_pb2.TokenMask(inline_bits=mask.bits)
    return policy_pb2.TokenMask(allowed_ids=policy_pb2.TokenIdList(token_ids=mask.allowed_ids))


def tensor_to_array(tensor: types_pb2.Tensor) -> t.FloatArray:
    """Return a float tensor as float32 in its shape, a read-only view where it can; raise ValueError for others."""
    shape = tuple(tensor.shape)
    if tensor.dtype == types_pb2.DATA_TYPE_FLOAT32:
        return np.frombuffer(tensor.data, dtype="<f4").reshape(shape)
    if tensor.dtype == types_pb2.DATA_TYPE_FLOAT16:
        return np.frombuffer(tensor.data, dtype="<f2").astype(np.float32).reshape(shape)
    if tensor.dtype == types_pb2.DATA_TYPE_BFLOAT16:  # the upper half of a float32
        widened = np.frombuffer(tensor.data, dtype="<u2").astype(np.uint32) << 16
        return widened.view(np.float32).reshape(shape)
    raise ValueError(f"cannot read a tensor of {types_pb2.DataType.Name(tensor.dtype)}")


def draft_probs_to_message(distributions: DraftDistributions) -> executor_pb2.DraftProbs:
    """Return an array [drafts, vocab_size] as a float32 tensor, mappings without zeros; raise ValueError for NaN."""
    if isinstance(distributions, np.ndarray):
        array = np.ascontiguousarray(distributions, dtype="<f4")
        if not np.isfinite(array).all():
            raise ValueError("draft_probs must be finite numbers")
        tensor = types_pb2.Tensor(dtype=types_pb2.DATA_TYPE_FLOAT32, shape=array.shape, data=array.tobytes())
        return executor_pb2.DraftProbs(dense=tensor)
    for place, distribution in enumerate(distributions):
        for token, prob in distribution.items():
            _check.number(f"draft_probs[{place}] of token {token}", prob, 0)
    rows = [{token: prob for token, prob in distribution.items() if prob > 0} for distribution in distributions]
    sparse = executor_pb2.SparseProbs(
        row_sizes=map(len, rows),
        token_ids=[token for row in rows for token in row],
        probs=[prob for row in rows for prob in row.values()],
    )
    return executor_pb2.DraftProbs(sparse=sparse)


def output_from_message(message: AnyOutput) -> t.Output:
    """Return what an append brought; lists that were not asked for come out empty, arrays as None."""
    return _output(
        message.outputs,
        message.kv_cache,
        message.timing,
        replayed=message.replayed,
        recomputed=message.recomputed,
        cached_tokens=getattr(message, "cached_tokens", 0),
        request_id=message.request_id,
    )


def drawn_from_message(message: executor_pb2.GenerateResponse, output: executor_pb2.GenerateOutput) -> list[t.Output]:
    """Return the outputs of the tokens that a frame brought for one branch, one by one; their handle is the frame's."""
    rows = _output(
        output.outputs,
        output.resume_from,
        message.timing,
        replayed=output.replayed,
        cached_tokens=output.cached_tokens,
        request_id=message.request_id,
    )
    return [rows] if len(rows.tokens) == 1 else [rows.row(index) for index in range(len(rows.tokens))]


def _output(
    rows: policy_pb2.Outputs, handle: types_pb2.KvCacheHandle, timing: types_pb2.Timing, **facts: Any
) -> t.Output:
    return t.Output(
        handle=handle_from_message(handle),
        tokens=tuple(rows.tokens),
        logprobs=tuple(rows.model_logprobs),
        sampled_logprobs=tuple(rows.sampled_logprobs),
        top_logprobs=_top_logprobs(rows),
        arrays=_arrays(rows),
        seed=rows.seed if rows.HasField("seed") else None,
        timing=_timing(timing),
        **facts,
    )


def _timing(message: types_pb2.Timing) -> t.Timing:
    return t.Timing(message.queue_ns, message.run_ns, message.step_rows)


def finish_from_message(reason: executor_pb2.FinishReason) -> t.FinishReason | None:
    """Return why a branch ended, or None while it goes on."""
    if reason == executor_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    return cast("t.FinishReason", _enum_word(executor_pb2.FinishReason.DESCRIPTOR, reason))


def forward_from_message(message: executor_pb2.ForwardResponse) -> t.ForwardChunk:
    """Return the rows of a stretch of positions."""
    rows, arrays = message.outputs, _arrays(message.outputs)
    if message.HasField("pooled_hidden_state"):
        arrays["pooled_hidden_state"] = tensor_to_array(message.pooled_hidden_state)
    return t.ForwardChunk(
        first_position=message.first_position,
        num_rows=rows.num_rows,
        tokens=tuple(rows.tokens),
        top_logprobs=_top_logprobs(rows),
        arrays=arrays,
        timing=_timing(message.timing),
        is_last=message.is_last,
    )


def _arrays(rows: policy_pb2.Outputs) -> dict[str, t.FloatArray]:
    """Return the arrays of output rows that were asked for, by their names in ``Rows``."""
    arrays = {name: tensor_to_array(getattr(rows, name)) for name in ("logits", "hidden_state") if rows.HasField(name)}
    lists = {"target_logprobs": rows.target_logprobs, "entropies": rows.entropies}
    arrays |= {name: np.array(values, dtype=np.float32) for name, values in lists.items() if values}
    if rows.requested_logprobs:
        arrays["requested_logprobs"] = np.array(rows.requested_logprobs, np.float32).reshape(rows.num_rows, -1)
    return arrays


def _top_logprobs(rows: policy_pb2.Outputs) -> tuple[tuple[t.TokenLogprob, ...], ...]:
    if not rows.top_token_ids:
        return ()
    k = len(rows.top_token_ids) // rows.num_rows
    pairs = [t.TokenLogprob(*pair) for pair in zip(rows.top_token_ids, rows.top_logprobs, strict=True)]
    return tuple(tuple(pairs[at : at + k]) for at in range(0, len(pairs), k))


def verification_from_message(message: executor_pb2.VerifyOutput) -> t.Verification:
    """Return what became of draft tokens."""
    return t.Verification(
        output=output_from_message(message),
        accepted_count=message.accepted_count,
        accepted_indices=tuple(message.accepted_indices),
        has_next=message.HasField("next_token"),
        row_handles=tuple(handle_from_message(handle) for handle in message.row_handles),
    )


def granted_ttl_s(message: executor_pb2.PrefillOutput | cache_pb2.ForkCacheResponse) -> float | None:
    """Return the lease that a new sequence was granted, in seconds, or None if the server does not say."""
    return message.ttl.ToNanoseconds() / 1e9 if message.HasField("ttl") else None


def cache_info_from_message(message: cache_pb2.CacheInfo) -> t.CacheInfo:
    """Return the state of a sequence."""
    return value(t.CacheInfo, message, message.summary, handle=handle_from_message(message.kv_cache))


def model_info_from_message(message: info_pb2.ModelInfo) -> t.ModelInfo:
    """Return the description of the model."""
    return value(t.ModelInfo, message)


def capabilities_from_message(message: info_pb2.ExecutorCapabilities) -> t.Capabilities:
    """Return what the server can do."""
    caller, quotas = message.caller, value(t.Quotas, message.caller.quotas)
    limits = {name: getattr(quotas, name) or None for name in t.Quotas.__annotations__}
    return value(
        t.Capabilities,
        message,
        message.memory_requirements,
        features=frozenset(_enum_word(info_pb2.Feature.DESCRIPTOR, one) for one in message.features),
        caller=value(t.Caller, caller, quotas=t.Quotas(**limits)) if message.HasField("caller") else None,
    )


def reservation_from_message(message: cache_pb2.KvSlotReservation) -> t.Reservation:
    """Return what was reserved."""
    return t.Reservation(tuple(one.new_blocks for one in message.allocations), message.free_blocks_after)


def server_view_from_message(message: admin_pb2.ServerView) -> v.ServerView:
    """Return the server at one moment."""
    names = [name for name in v.ServerView.__annotations__ if name.endswith("_seconds")]
    return value(
        v.ServerView,
        message,
        block_map=value(v.BlockMap, message.block_map) if message.HasField("block_map") else None,
        sequences=tuple(_sequence_view(one, message.time) for one in message.sequences),
        **{name: _histogram(getattr(message, name.removesuffix("seconds") + "times")) for name in names},
    )


def _histogram(message: admin_pb2.Histogram) -> v.Histogram:
    bounds = tuple(bound / 1e9 for bound in message.upper_bounds_ns)
    return v.Histogram(upper_bounds=bounds, counts=tuple(message.counts), sum=message.sum_ns / 1e9)


def _sequence_view(message: admin_pb2.SequenceView, now: timestamp_pb2.Timestamp) -> v.SequenceView:
    summary = message.summary
    age_s = (now.ToNanoseconds() - summary.create_time.ToNanoseconds()) / 1e9
    return value(v.SequenceView, message, summary, summary.lease, age_s=age_s)


def value(cls: type[_T], *messages: Message, **given: object) -> _T:
    """Build a dataclass from the fields of the same names in messages; a name that ends in ``_s`` is a Duration."""
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name not in given:
            names = (field.name, field.name.removesuffix("_s"))
            found = ((one, name) for one in messages for name in names if name in one.DESCRIPTOR.fields_by_name)
            given[field.name] = _plain(*next(found))
    return cls(**given)


def _plain(message: Message, name: str) -> Any:  # Any: the dataclass the value goes to states its type
    """Return a field as plain Python: enum names in lower case, unset as None or zeros, lists as tuples."""
    field, found = message.DESCRIPTOR.fields_by_name[name], getattr(message, name)
    if isinstance(found, Mapping):
        return dict(found)
    if isinstance(found, Sequence) and not isinstance(found, (str, bytes)):
        return tuple(_element(field, one) for one in found)
    can_be_none = field.has_presence and (isinstance(found, timestamp_pb2.Timestamp) or not isinstance(found, Message))
    return None if can_be_none and not message.HasField(name) else _element(field, found)


def _element(field: Any, found: Any) -> Any:  # Any: as in ``_plain``
    if isinstance(found, timestamp_pb2.Timestamp):
        return found.ToDatetime(tzinfo=UTC)
    if isinstance(found, duration_pb2.Duration):
        return found.ToNanoseconds() / 1e9
    if isinstance(found, Message):
        return value(_NESTED[type(found)], found)
    return _enum_word(field.enum_type, found) if field.enum_type else found


def _enum_word(enum: Any, number: int) -> str:  # Any: descriptors have no stubs worth the name
    """Return ``DATA_TYPE_BFLOAT16`` as ``bfloat16``; a number that this client does not know as its digits."""
    value = enum.values_by_number.get(number)
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper() + "_"
    return str(number) if value is None else value.name.removeprefix(prefix).lower()
