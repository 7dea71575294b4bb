"""Results as messages. The hot path, one greedy token, sets only a handful of fields."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ferrule.v1 import cache_pb2, executor_pb2, policy_pb2, types_pb2
from ferrule_server.api.requests.caches import page_token
from ferrule_server.api.requests.fields import LEVELS, WIRE_TYPES
from ferrule_server.api.requests.planned import PlannedAppend
from ferrule_server.api.requests.policy import OutputPlan
from ferrule_server.api.responses.describe import same_fields
from ferrule_server.api.responses.times import duration, timestamp
from ferrule_server.api.rpc.status import to_status
from ferrule_server.engine.jobs import AppendResult, CacheInfo, ForkResult, Lease, ListResult
from ferrule_server.errors import FerruleError
from ferrule_server.executor.base import Float32Array, OutputSpec, RowOutput
from ferrule_server.fairness.turns import Turns
from ferrule_server.kv.handle import Handle, names_of
from ferrule_server.kv.reserved_slots import SlotReservation

AppendOutput = executor_pb2.PrefillOutput | executor_pb2.DecodeOutput | executor_pb2.VerifyOutput
"""The output message of any append."""


def fill_append(output: AppendOutput, result: AppendResult, planned: PlannedAppend) -> None:
    """Write the fields that all appends return into a fresh message: handle, rows, timing."""
    if planned.job.request_id:
        output.request_id = planned.job.request_id
    handle, sent = result.handle, output.kv_cache  # as fill_handle, without the call
    sent.cache_id, sent.length, sent.lineage = handle
    sent.instance, sent.handle_id = names_of(handle.cache_id)
    if result.replayed:
        output.replayed = True
        output.recomputed = result.recomputed
    if not result.replayed or result.recomputed:  # otherwise no step was run, and all times are zero
        timing, measured = output.timing, result.timing
        timing.queue_ns = measured.queue_ns
        timing.run_ns = measured.run_ns
        timing.step_rows = measured.step_rows
    if result.rows:
        fill_rows(output.outputs, result.rows, result.seed, planned.plan)


def fill_prefill(output: executor_pb2.PrefillOutput, result: AppendResult, planned: PlannedAppend) -> None:
    """Write the output of a Prefill, or of one item of a unified batch, into a fresh message."""
    fill_append(output, result, planned)
    output.cached_tokens = result.cached_tokens
    output.ttl.CopyFrom(duration(result.ttl_s))


def fill_verify(output: executor_pb2.VerifyOutput, result: AppendResult, planned: PlannedAppend) -> None:
    """Write the output of a verify into a fresh message."""
    fill_append(output, result, planned)
    verified = result.verified
    assert verified is not None
    if verified.accepted_count:
        output.accepted_count = verified.accepted_count
        output.accepted_indices.extend(range(1, verified.accepted_count + 1))
    if verified.next_token is not None:
        output.next_token = verified.next_token
    output.row_handles.extend(map(handle_message, verified.row_handles))


def fork_response(result: ForkResult) -> cache_pb2.ForkCacheResponse:
    """Return the branches of a ForkCache."""
    handles = map(handle_message, result.handles)
    return cache_pb2.ForkCacheResponse(kv_caches=handles, ttl=duration(result.ttl_s), replayed=result.replayed)


def handle_message(handle: Handle) -> types_pb2.KvCacheHandle:
    """Return a handle as a message."""
    message = types_pb2.KvCacheHandle()
    fill_handle(message, handle)
    return message


def fill_handle(message: types_pb2.KvCacheHandle, handle: Handle) -> None:
    """Write a handle into a fresh message. Replies alone have the last two fields."""
    message.cache_id, message.length, message.lineage = handle
    message.instance, message.handle_id = names_of(handle.cache_id)


def release_results(handles: Sequence[Handle], freed: Sequence[int | None]) -> list[cache_pb2.ReleaseResult]:
    """Return the result for each handle of a release; ``freed`` is None if there was nothing to release."""
    return [
        cache_pb2.ReleaseResult(handle_id=handle.handle_id, released=num_blocks is not None)
        for handle, num_blocks in zip(handles, freed, strict=True)
    ]


async def keep_alive_response(leases: Sequence[Lease | FerruleError]) -> cache_pb2.KeepAliveResponse:
    """Return the renewed leases. There may be thousands, so other tasks get turns on the event loop."""
    response = cache_pb2.KeepAliveResponse()
    turns = Turns()
    for lease in leases:
        await turns.pause()
        entry = response.results.add()
        if isinstance(lease, FerruleError):
            entry.error.CopyFrom(to_status(lease))
        else:
            entry.lease.CopyFrom(lease_message(lease))
    return response


def cache_info(info: CacheInfo, *, with_blocks: bool) -> cache_pb2.CacheInfo:
    """Return one sequence as its owner may see it."""
    summary = cache_summary(info, time.time_ns(), info.num_shared_blocks)
    message = cache_pb2.CacheInfo(summary=summary, token_ids=info.token_ids or ())
    if info.tip is not None:
        fill_handle(message.kv_cache, info.tip)
    if with_blocks:
        message.block_ids.extend(info.block_ids)
        message.block_ref_counts.extend(info.block_refcounts)
    return message


async def list_response(result: ListResult) -> cache_pb2.ListCachesResponse:
    """Return one page of sequences, by loggable id and with what handles there are. Other tasks get turns meanwhile."""
    response = cache_pb2.ListCachesResponse(next_page_token=page_token(result.next_after))
    turns, unix_ns = Turns(), time.time_ns()
    for info in result.caches:
        await turns.pause()
        response.caches.append(cache_summary(info, unix_ns, info.num_shared_blocks))
        if info.tip is not None:
            fill_handle(response.caches[-1].kv_cache, info.tip)
    return response


def cache_summary(info: CacheInfo, unix_ns: int, num_shared_blocks: int) -> cache_pb2.CacheSummary:
    """Return what lists and views show of one sequence.

    Args:
        info: The sequence; its own ``num_shared_blocks`` is not read, because views have none.
        unix_ns: When it was as old as ``info`` says, by the wall clock.
        num_shared_blocks: Blocks of its tokens that other sequences use too.
    """
    own = {
        "lease": lease_message(info.lease),
        "create_time": timestamp(unix_ns - round(info.age_s * 1e9)),
        "num_shared_blocks": num_shared_blocks,
        "durability": LEVELS[info.is_durable],
    }
    return cache_pb2.CacheSummary(**same_fields(cache_pb2.CacheSummary, info) | own)


def slot_reservation(evidence: SlotReservation, block_size: int, total_blocks: int) -> cache_pb2.KvSlotReservation:
    """Return what a reservation took."""
    message = cache_pb2.KvSlotAllocation
    allocations = [message(**same_fields(message, each)) for each in evidence.allocations]
    same = same_fields(cache_pb2.KvSlotReservation, evidence) | {"allocations": allocations}
    return cache_pb2.KvSlotReservation(**same, block_size=block_size, total_blocks=total_blocks)


def fill_rows(outputs: policy_pb2.Outputs, rows: Sequence[RowOutput], seed: int | None, plan: OutputPlan) -> None:
    """Write rows into a fresh message; fields that were not requested stay empty.

    Args:
        outputs: The message to write to.
        rows: At least one.
        seed: The seed that tokens were sampled with; None: it is not returned.
        plan: The requested fields.
    """
    spec = plan.output.spec
    assert spec is not None
    outputs.num_rows = len(rows)
    if spec.greedy or spec.sample is not None:
        tokens = outputs.tokens
        for row in rows:
            if row.token is not None:
                tokens.append(row.token)
        if seed is not None:
            outputs.seed = seed
        if spec.logprobs:
            outputs.model_logprobs.extend([row.model_logprob for row in rows if row.model_logprob is not None])
            outputs.sampled_logprobs.extend([row.sampled_logprob for row in rows if row.sampled_logprob is not None])
    if spec.full_logits:
        _fill_tensor(outputs.logits, [row.logits for row in rows if row.logits is not None], plan.dtype)
    if spec.num_top_logprobs:
        _fill_top(outputs, rows)
    if plan.output.wants_targets:
        outputs.target_logprobs.extend([row.target_logprob for row in rows if row.target_logprob is not None])
    if spec.logprob_ids or spec.entropy or spec.hidden_state:
        _fill_rare(outputs, rows, spec)


def _fill_rare(outputs: policy_pb2.Outputs, rows: Sequence[RowOutput], spec: OutputSpec) -> None:
    """Write the fields that few requests ask for. Other requests pay one check for all of them."""
    if spec.logprob_ids:
        for row in rows:
            if row.requested_logprobs is not None:
                outputs.requested_logprobs.extend(row.requested_logprobs.tolist())
    if spec.entropy:
        outputs.entropies.extend([row.entropy for row in rows if row.entropy is not None])
    if spec.hidden_state:
        states = [row.hidden_state for row in rows if row.hidden_state is not None]
        _fill_tensor(outputs.hidden_state, states, types_pb2.DATA_TYPE_FLOAT32)


def _fill_top(outputs: policy_pb2.Outputs, rows: Sequence[RowOutput]) -> None:
    for row in rows:
        if row.top_ids is not None and row.top_logprobs is not None:
            outputs.top_token_ids.extend(row.top_ids.tolist())
            outputs.top_logprobs.extend(row.top_logprobs.tolist())


def _fill_tensor(tensor: types_pb2.Tensor, rows: Sequence[Float32Array], dtype: int) -> None:
    """Write rows of one width into one tensor [rows, width]."""
    tensor.dtype = dtype  # type: ignore[assignment]
    tensor.shape.extend((len(rows), len(rows[0])))
    tensor.data = encoded(rows[0], dtype) if len(rows) == 1 else b"".join([encoded(row, dtype) for row in rows])


def encoded(row: Float32Array, dtype: int) -> bytes:
    """Return the bytes of one row in a wire type, little-endian."""
    values = _bfloat16_bits(row) if dtype == types_pb2.DATA_TYPE_BFLOAT16 else row
    with np.errstate(over="ignore"):  # above 65504 a float16 is infinite: the caller has chosen the type
        return values.astype(WIRE_TYPES[dtype], copy=False).tobytes()


def _bfloat16_bits(row: Float32Array) -> npt.NDArray[np.uint32]:
    """Return finite float32 values rounded to the nearest bfloat16, ties to even, as its bits."""
    bits = row.view(np.uint32)
    return (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)


def lease_message(lease: Lease) -> cache_pb2.Lease:
    """Return a lease as a message."""
    return cache_pb2.Lease(ttl=duration(lease.ttl_s), expires_in=duration(max(0.0, lease.expires_in_s)))
