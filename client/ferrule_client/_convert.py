"""Messages of ``ferrule.v1`` to and from the values of ``types`` and ``policy``. Pure functions, no calls."""

from __future__ import annotations

import dataclasses
import re
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
from ferrule_client.masks import MaskLike, TokenMask, as_mask
from ferrule_client.policy import DType, Policy, Sampling, check_policy

__all__ = [
    "acceptance_to_message",
    "cache_info_from_message",
    "capabilities_from_message",
    "check_handle",
    "draft_probs_to_message",
    "drawn_from_message",
    "duration",
    "finish_from_message",
    "forward_from_message",
    "granted_ttl_s",
    "handle_from_message",
    "handle_to_message",
    "lease_from_message",
    "mask_to_message",
    "metrics_from_message",
    "model_info_from_message",
    "output_from_message",
    "policy_to_message",
    "pooling_to_message",
    "reservation_from_message",
    "rows_from_message",
    "stale_to_message",
    "status_from_message",
    "summary_from_message",
    "tensor_to_array",
    "timing_from_message",
    "verification_from_message",
    "warmed_from_message",
]

_T = TypeVar("_T")

_DTYPES: dict[DType, types_pb2.DataType] = {
    "float32": types_pb2.DATA_TYPE_FLOAT32,
    "bfloat16": types_pb2.DATA_TYPE_BFLOAT16,
    "float16": types_pb2.DATA_TYPE_FLOAT16,
}
_STALE: dict[t.OnStale, types_pb2.StalePolicy] = {
    "fail": types_pb2.STALE_POLICY_FAIL,
    "fork": types_pb2.STALE_POLICY_FORK,
    "rewind": types_pb2.STALE_POLICY_REWIND,
}
_ACCEPTANCE: dict[t.Acceptance, executor_pb2.AcceptanceRule] = {
    "none": executor_pb2.ACCEPTANCE_RULE_NONE,
    "greedy": executor_pb2.ACCEPTANCE_RULE_EXACT,
    "exact": executor_pb2.ACCEPTANCE_RULE_EXACT,
    "rejection": executor_pb2.ACCEPTANCE_RULE_REJECTION,
}
_POOLING: dict[t.Pooling, executor_pb2.HiddenPooling] = {
    "mean": executor_pb2.HIDDEN_POOLING_MEAN,
    "last": executor_pb2.HIDDEN_POOLING_LAST,
}
_MAX_DURATION_S = 315_576_000_000.0

AnyOutput = executor_pb2.PrefillOutput | executor_pb2.DecodeOutput | executor_pb2.VerifyOutput


def handle_to_message(handle: t.Handle) -> types_pb2.KvCacheHandle:
    """Return the wire form of a handle.

    Raises:
        TypeError: It is not a handle.
    """
    check_handle(handle)
    return types_pb2.KvCacheHandle(
        cache_id=handle.cache_id,
        length=handle.length,
        lineage=handle.lineage,
        instance=handle.instance,
        handle_id=handle.handle_id,
    )


def check_handle(value: object) -> None:
    """Make sure that an argument is a handle.

    Raises:
        TypeError: It is not.
    """
    if not isinstance(value, t.Handle):
        hint = (
            "; make it with Handle.from_string" if isinstance(value, str) else "; take cache.handle or cache.detach()"
        )
        raise TypeError(f"a Handle is needed, got {type(value).__name__}{hint}")


def handle_from_message(message: types_pb2.KvCacheHandle) -> t.Handle:
    """Return the value that a wire handle stands for."""
    return t.Handle(message.cache_id, message.length, message.lineage, message.instance, message.handle_id)


def duration(seconds: float | None) -> duration_pb2.Duration | None:
    """Return a lease in seconds as a Duration; None stays None, which leaves a field unset.

    Raises:
        ValueError: It is negative, not a number, or longer than a Duration can be.
    """
    if seconds is None:
        return None
    _check.number("ttl", seconds, 0, _MAX_DURATION_S)
    message = duration_pb2.Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def stale_to_message(on_stale: t.OnStale) -> types_pb2.StalePolicy:
    """Return the wire form of a stale policy, written in any case.

    Raises:
        ValueError: It is not one of the three.
    """
    return _STALE[cast("t.OnStale", _check.choice("on_stale", on_stale, _STALE))]


def acceptance_to_message(acceptance: t.Acceptance) -> executor_pb2.AcceptanceRule:
    """Return the wire form of an acceptance rule, written in any case.

    Raises:
        ValueError: It is not one of the three.
    """
    return _ACCEPTANCE[cast("t.Acceptance", _check.choice("acceptance", acceptance, _ACCEPTANCE))]


def policy_to_message(policy: Policy | None) -> policy_pb2.LogitsReturnPolicy | None:
    """Return the wire form of a policy; None, which asks for nothing, leaves the field unset.

    Raises:
        TypeError: It is not a policy.
    """
    check_policy(policy)
    if policy is None:
        return None
    message = policy_pb2.LogitsReturnPolicy(
        logprobs=policy.logprobs,
        top_logprobs=policy.top_logprobs,
        logprob_token_ids=policy.logprob_token_ids,
        target_logprobs=policy.target_logprobs,
        entropy=policy.entropy,
        hidden_state=policy.hidden_state,
    )
    if policy.logits is not None:
        message.full_logits.dtype = _DTYPES[cast("DType", policy.logits.lower())]
    if policy.selection is not None:
        _select(message, policy.selection)
    return message


def _select(message: policy_pb2.LogitsReturnPolicy, chosen: Sampling) -> None:
    """Write how a token is chosen; the contract has a message of its own for the most likely one."""
    counts = chosen.frequency_penalty is not None or chosen.presence_penalty is not None
    if chosen.is_greedy and not counts and not chosen.logit_bias:
        message.greedy_argmax.CopyFrom(
            policy_pb2.GreedyArgmax(
                token_mask=_mask(chosen.mask),
                repetition_penalty=chosen.repetition_penalty,
                penalty_start=chosen.penalty_start,
            )
        )
    else:
        message.sample.CopyFrom(_sampling_to_message(chosen))


def _sampling_to_message(sampling: Sampling) -> policy_pb2.Sample:
    return policy_pb2.Sample(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        penalty_start=sampling.penalty_start,
        logit_bias=dict(sampling.logit_bias),
        token_mask=_mask(sampling.mask),
    )


def _mask(mask: TokenMask | None) -> policy_pb2.TokenMask | None:
    return None if mask is None else mask_to_message(mask)


def mask_to_message(mask: MaskLike) -> policy_pb2.TokenMask:
    """Return the wire form of a mask; a registered one goes by its fingerprint.

    Raises:
        TypeError: It is not a mask.
        ValueError: It allows nothing.
    """
    mask = as_mask(mask)
    if mask.fingerprint is not None:
        return policy_pb2.TokenMask(fingerprint=mask.fingerprint)
    if mask.bits is not None:
        return policy_pb2.TokenMask(inline_bits=mask.bits)
    return policy_pb2.TokenMask(allowed_ids=policy_pb2.TokenIdList(token_ids=mask.allowed_ids))


def tensor_to_array(tensor: types_pb2.Tensor) -> t.FloatArray:
    """Return a float tensor as float32, in its shape.

    Returns:
        A read-only view of the message's bytes for float32, else a new array.

    Raises:
        ValueError: The element type is not a float this client knows.
    """
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
    """Return the distributions of drafts: an array [drafts, vocab_size] as a float32 tensor, mappings without zeros.

    Raises:
        ValueError: A probability is not a finite number, or negative.
    """
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
    return rows_from_message(
        message.outputs,
        handle=handle_from_message(message.kv_cache),
        timing=timing_from_message(message.timing),
        replayed=message.replayed,
        recomputed=message.recomputed,
        cached_tokens=getattr(message, "cached_tokens", 0),
        request_id=message.request_id,
    )


def timing_from_message(message: types_pb2.Timing) -> t.Timing:
    """Return where the time of a request went."""
    return t.Timing(message.queue_ns, message.run_ns, message.step_rows)


def rows_from_message(
    rows: policy_pb2.Outputs,
    *,
    handle: t.Handle,
    timing: t.Timing,
    replayed: bool = False,
    recomputed: bool = False,
    cached_tokens: int = 0,
    request_id: str = "",
) -> t.Output:
    """Return output rows as one value, with what is known of the call they are from."""
    return t.Output(
        handle=handle,
        tokens=tuple(rows.tokens),
        logprobs=tuple(rows.model_logprobs),
        sampled_logprobs=tuple(rows.sampled_logprobs),
        top_logprobs=_top_logprobs(rows),
        arrays=_arrays(rows),
        seed=rows.seed if rows.HasField("seed") else None,
        timing=timing,
        replayed=replayed,
        recomputed=recomputed,
        cached_tokens=cached_tokens,
        request_id=request_id,
    )


def drawn_from_message(message: executor_pb2.GenerateResponse, output: executor_pb2.GenerateOutput) -> list[t.Output]:
    """Return the outputs of the tokens that a frame brought for one branch, one by one; their handle is the frame's."""
    rows = rows_from_message(
        output.outputs,
        handle=handle_from_message(output.resume_from),
        timing=timing_from_message(message.timing),
        replayed=output.replayed,
        cached_tokens=output.cached_tokens,
        request_id=message.request_id,
    )
    return [rows] if len(rows.tokens) == 1 else [rows.row(index) for index in range(len(rows.tokens))]


def finish_from_message(reason: executor_pb2.FinishReason) -> t.FinishReason | None:
    """Return why a branch ended, or None while it goes on."""
    if reason == executor_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    word = _enum_word(executor_pb2.FinishReason.DESCRIPTOR, reason)
    return cast("t.FinishReason", word)


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
        timing=timing_from_message(message.timing),
        is_last=message.is_last,
    )


def pooling_to_message(pooling: t.Pooling | None) -> executor_pb2.HiddenPooling:
    """Return the wire form of a pooling, written in any case; None: there is none.

    Raises:
        ValueError: It is not one of the two.
    """
    if pooling is None:
        return executor_pb2.HIDDEN_POOLING_UNSPECIFIED
    return _POOLING[cast("t.Pooling", _check.choice("pooling", pooling, _POOLING))]


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


def lease_from_message(message: cache_pb2.Lease) -> t.Lease:
    """Return a lease."""
    return _copy(t.Lease, message)


def cache_info_from_message(message: cache_pb2.CacheInfo) -> t.CacheInfo:
    """Return the state of a sequence."""
    return _copy(
        t.CacheInfo,
        message.summary,
        handle=handle_from_message(message.kv_cache),
        token_ids=tuple(message.token_ids),
        block_ids=tuple(message.block_ids),
        block_ref_counts=tuple(message.block_ref_counts),
        lease=lease_from_message(message.summary.lease),
    )


def summary_from_message(message: cache_pb2.CacheSummary) -> t.CacheSummary:
    """Return one line of a list of sequences."""
    return _copy(t.CacheSummary, message, lease=lease_from_message(message.lease))


def model_info_from_message(message: info_pb2.ModelInfo) -> t.ModelInfo:
    """Return the description of the model."""
    return _copy(t.ModelInfo, message)


def capabilities_from_message(message: info_pb2.ExecutorCapabilities) -> t.Capabilities:
    """Return what the server can do."""
    memory = message.memory_requirements
    return _copy(
        t.Capabilities,
        message,
        features=frozenset(_enum_word(info_pb2.Feature.DESCRIPTOR, one) for one in message.features),
        parameter_bytes=memory.parameter_bytes,
        kv_bytes_per_token=memory.kv_bytes_per_token,
        kv_pool_bytes=memory.kv_pool_bytes,
        caller=_caller_from_message(message.caller) if message.HasField("caller") else None,
    )


def _caller_from_message(message: info_pb2.CallerInfo) -> t.Caller:
    quotas = {field.name: getattr(message.quotas, field.name) or None for field in dataclasses.fields(t.Quotas)}
    return _copy(t.Caller, message, quotas=t.Quotas(**quotas))


def reservation_from_message(message: cache_pb2.KvSlotReservation) -> t.Reservation:
    """Return what was reserved."""
    return t.Reservation(tuple(one.new_blocks for one in message.allocations), message.free_blocks_after)


def status_from_message(message: info_pb2.ExecutorStatus) -> t.Status:
    """Return how the server is doing."""
    return _copy(t.Status, message, memory=_copy(t.MemoryUsage, message.memory), debug=dict(message.debug))


def metrics_from_message(message: cache_pb2.CacheMetrics) -> t.CacheMetrics:
    """Return the counters of the KV pool."""
    return _copy(t.CacheMetrics, message)


def warmed_from_message(message: admin_pb2.WarmupResponse) -> t.Warmed:
    """Return what warming up did."""
    return _copy(t.Warmed, message, steps=tuple(_copy(t.WarmStep, step) for step in message.steps))


def server_view_from_message(message: admin_pb2.ServerView) -> v.ServerView:
    """Return the server at one moment."""
    names = [field.name for field in dataclasses.fields(v.ServerView) if field.name.endswith("_seconds")]
    histograms = {name: _histogram(getattr(message, name.removesuffix("seconds") + "times")) for name in names}
    return _copy(
        v.ServerView,
        message,
        status=status_from_message(message.status),
        cache_metrics=metrics_from_message(message.cache_metrics),
        num_refused=dict(message.num_refused),
        block_map=_copy(v.BlockMap, message.block_map) if message.HasField("block_map") else None,
        sequences=tuple(_sequence_view(one, message.time) for one in message.sequences),
        principals=tuple(_copy(v.PrincipalView, one) for one in message.principals),
        **histograms,
    )


def _histogram(message: admin_pb2.Histogram) -> v.Histogram:
    bounds = tuple(bound / 1e9 for bound in message.upper_bounds_ns)
    return v.Histogram(upper_bounds=bounds, counts=tuple(message.counts), sum=message.sum_ns / 1e9)


def _sequence_view(message: admin_pb2.SequenceView, now: timestamp_pb2.Timestamp) -> v.SequenceView:
    summary = message.summary
    return _copy(
        v.SequenceView,
        summary,
        parent_handle_id=message.parent_handle_id,
        principal=message.principal,
        num_pending=message.num_pending,
        is_appending=message.is_appending,
        ttl_s=summary.lease.ttl.ToNanoseconds() / 1e9,
        expires_in_s=summary.lease.expires_in.ToNanoseconds() / 1e9,
        age_s=(now.ToNanoseconds() - summary.create_time.ToNanoseconds()) / 1e9,
    )


def _copy(cls: type[_T], message: Message, **given: object) -> _T:
    """Build a dataclass from the message's fields of the same names; a name that ends in ``_s`` is a Duration."""
    values = dict(given)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name not in values:
            known = field.name in message.DESCRIPTOR.fields_by_name
            values[field.name] = _plain(message, field.name if known else field.name.removesuffix("_s"))
    return cls(**values)


def _plain(message: Message, name: str) -> Any:  # Any: the dataclass the value goes to states its type
    """Return a field as plain Python: enum names in lower case, unset as None, lists as tuples, times as they are."""
    descriptor = message.DESCRIPTOR.fields_by_name[name]
    value = getattr(message, name)
    if descriptor.has_presence and not message.HasField(name):
        return 0.0 if isinstance(value, duration_pb2.Duration) else None
    if isinstance(value, timestamp_pb2.Timestamp):
        return value.ToDatetime(tzinfo=UTC)
    if isinstance(value, duration_pb2.Duration):
        return value.ToNanoseconds() / 1e9
    if isinstance(value, (str, bytes, bool, float)):
        return value
    if isinstance(value, int):
        return _enum_word(descriptor.enum_type, value) if descriptor.enum_type else value
    return tuple(_enum_word(descriptor.enum_type, one) if descriptor.enum_type else one for one in value)


def _enum_word(enum: Any, number: int) -> str:  # Any: descriptors have no stubs worth the name
    """Return ``DATA_TYPE_BFLOAT16`` as ``bfloat16``; a number that this client does not know as its digits."""
    value = enum.values_by_number.get(number)
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper() + "_"
    return str(number) if value is None else value.name.removeprefix(prefix).lower()
