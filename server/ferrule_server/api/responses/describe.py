"""What the server says about itself: ModelInfo, ExecutorCapabilities, ExecutorStatus, all from live parts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from ferrule.v1 import cache_pb2, info_pb2, types_pb2
from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.rpc.state import Phase, ServerState, Serving
from ferrule_server.api.security.principal import Caller
from ferrule_server.engine.masks import MaskRegistry
from ferrule_server.engine.metrics.counters import EngineSnapshot, OwnCounters, OwnFigures
from ferrule_server.executor.base import ExecutorInfo, ExecutorState, MemoryPlan, ModelDescription
from ferrule_server.kv.metrics import KvCounters, KvMetrics
from ferrule_server.quotas import QuotaLimits

_DTYPES: Final = {
    "float32": types_pb2.DATA_TYPE_FLOAT32,
    "bfloat16": types_pb2.DATA_TYPE_BFLOAT16,
    "float16": types_pb2.DATA_TYPE_FLOAT16,
    "int8": types_pb2.DATA_TYPE_INT8,
}
_STEP_FIELDS: Final = (
    "last_step_time",
    "num_steps",
    "num_graph_steps",
    "num_launched_steps",
    "num_torch_steps",
    "num_queued_steps",
    "num_discarded_rows",
)
"""Counters of steps in GetStatus, which callers without the role do not see: steps have rows of several principals."""
_SHARED_FIELDS: Final = ("shared_blocks", "tombstones", "num_prefix_evictions", "num_exhausted")
"""Counters of the pool in GetCacheMetrics that are kept for all together, which callers without the role do not see."""
_PROC_STATUS: Final = Path("/proc/self/status")
_CPUINFO: Final = Path("/proc/cpuinfo")


def model_info(serving: Serving) -> info_pb2.ModelInfo:
    """Return the description of the loaded model."""
    info = serving.engine.info
    model, config = info.model, info.model.config
    return info_pb2.ModelInfo(
        model_id=model.model_id,
        architecture=config.architecture,
        num_parameters=model.num_parameters,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        max_sequence_length=model.max_context,
        dtype=_DTYPES[model.dtype],
        kv_dtype=_DTYPES[info.kv_dtype],
        device_type=_device_type(info),
        device_name=_device_name(info),
        fingerprint=model.fingerprint,
        eos_token_ids=config.eos_ids,
        stop_token_ids=serving.inputs.stop_ids,
        bos_token_id=None if serving.tokenizer is None else serving.tokenizer.bos_id,
        has_tokenizer=serving.tokenizer is not None,
        has_chat_template=serving.chat_template is not None,
    )


def capabilities(serving: Serving, limits: ApiLimits, caller: info_pb2.CallerInfo) -> info_pb2.ExecutorCapabilities:
    """Return what this server serves. A flag that is left out here is false: the call answers FEATURE_UNSUPPORTED."""
    info, state = serving.engine.info, serving.executor_state()
    return info_pb2.ExecutorCapabilities(
        caller=caller,
        executor=info.name if state is None else state.name,
        max_batch_size=serving.max_step_rows,
        max_step_rows=serving.max_step_rows,
        max_sequence_length=info.model.max_context,
        max_fork_count=limits.max_fork_count,
        max_top_logprobs=limits.max_top_logprobs,
        max_page_size=limits.max_page_size,
        max_request_bytes=limits.max_request_bytes,
        max_reply_bytes=limits.max_reply_bytes,
        max_handles_per_request=limits.max_handles_per_request,
        max_items_per_frame=limits.max_items_per_frame,
        max_text_bytes=limits.max_text_bytes,
        max_text_tokens=limits.max_text_tokens,
        block_size=info.block_size,
        total_blocks=info.num_blocks - 1,
        min_ttl=_duration(limits.min_ttl_s),
        max_ttl=_duration(limits.max_ttl_s),
        default_ttl=_duration(min(limits.default_ttl_s, limits.max_ttl_s)),
        attention_mechanisms=[info_pb2.ATTENTION_MECHANISM_PAGED, _attention(info.model)],
        supported_dtypes=[_DTYPES[name] for name in info.supported_dtypes],
        supported_devices=[_device_type(info)],
        memory_requirements=_memory_requirements(info, state),
        max_draft_tokens=limits.max_draft_tokens,
        max_masks_per_request=limits.max_masks_per_request,
        max_logprob_token_ids=limits.max_logprob_token_ids,
        max_logit_biases=limits.max_logit_biases,
        max_stops=limits.max_stops,
        max_stop_length=limits.max_stop_length,
        supports_batch_prefill=True,
        supports_batch_decode=True,
        supports_stream_decode=True,
        supports_unified_decode=True,
        supports_forward_verify=True,
        supports_forward=True,
        supports_generate=True,
        supports_fork=True,
        supports_truncate=True,
        supports_reserve=True,
        supports_token_masks=True,
        supports_penalties=True,
        supports_logit_bias=True,
        supports_logprob_token_ids=True,
        supports_target_logprobs=True,
        supports_entropy=True,
        supports_hidden_state=True,
        supports_all_positions=True,
        supports_prefix_cache=serving.has_prefix_cache,
        supports_request_id=True,
        supports_chat_template=serving.chat_template is not None,
        supports_deterministic=serving.is_deterministic,
        supports_cache_metrics=True,
        supports_admin=True,
    )


def caller_info(caller: Caller, quotas: QuotaLimits) -> info_pb2.CallerInfo:
    """Return who the caller is to this server; no limit is written as 0."""
    limits = info_pb2.QuotaLimits(
        handles=quotas.handles or 0,
        kv_tokens=quotas.kv_tokens or 0,
        queued_rows=quotas.queued_rows or 0,
        prefill_tokens_per_second=quotas.prefill_tokens_per_s or 0,
        retained_bytes=quotas.retained_bytes or 0,
        mask_bytes=quotas.mask_bytes or 0,
        calls_per_second=quotas.calls_per_s or 0,
        request_bytes_per_second=quotas.request_bytes_per_s or 0,
        text_bytes_per_second=quotas.text_bytes_per_s or 0,
    )
    return info_pb2.CallerInfo(principal=caller.principal, is_admin=caller.is_admin, quotas=limits)


def seen_by(caller: Caller) -> str | None:
    """Return the principal whose counters a caller may see; None: those of all."""
    return None if caller.is_admin else caller.principal


def status(
    state: ServerState, snapshot: EngineSnapshot | None = None, principal: str | None = None
) -> info_pb2.ExecutorStatus:
    """Return how the server is doing, also while it loads.

    Args:
        state: The server.
        snapshot: How its engine was at another moment; None: as it is now.
        principal: Whose counters to give instead of those of all, so that nothing tells of the prompts of others.
    """
    message = info_pb2.ExecutorStatus(
        state=info_pb2.EXECUTOR_STATE_STARTING,
        instance=state.instance,
        epoch=state.epoch,
        server_version=state.version,
        start_time=_timestamp(state.start_ns),
        memory=_memory_usage(),
    )
    serving = state.serving
    if serving is None:
        message.load_progress = state.load_progress
        message.load_stage = state.load_stage
        return message
    snapshot = snapshot or serving.engine.snapshot()
    message.state = _executor_state(state.phase, snapshot)
    message.is_ready = message.state in (info_pb2.EXECUTOR_STATE_READY, info_pb2.EXECUTOR_STATE_BUSY)
    _fill_executor(message, serving.engine.info, serving.executor_state())
    _fill_counters(message, snapshot)
    if principal is not None:
        _narrow_status(message, serving.engine.own_figures(principal))
    return message


def own_cache_metrics(serving: Serving, principal: str | None) -> cache_pb2.CacheMetrics:
    """Return what is counted of the KV pool and of the masks of one principal; None: of all.

    How many blocks of the pool are empty, cached or used is told to everybody: schedulers need it.
    """
    metrics = cache_metrics(serving)
    if principal is not None:
        _narrow_metrics(metrics, serving.engine.own_figures(principal), serving.inputs.masks, principal)
    return metrics


def cache_metrics(
    serving: Serving, snapshot: EngineSnapshot | None = None, kv: KvMetrics | None = None
) -> cache_pb2.CacheMetrics:
    """Return what is counted of the KV pool and of the masks; what is given of it is taken from there."""
    snapshot, masks = snapshot or serving.engine.snapshot(), serving.inputs.masks
    kv = kv or serving.engine.kv_metrics()
    message = cache_pb2.CacheMetrics(
        block_size=kv.block_size,
        total_blocks=kv.total_blocks,
        empty_blocks=kv.empty_blocks,
        cached_blocks=kv.cached_blocks,
        used_blocks=kv.used_blocks,
        shared_blocks=kv.shared_blocks,
        live_sequences=kv.live_sequences,
        tombstones=kv.tombstones,
        num_prefix_evictions=kv.num_prefix_evictions,
        num_exhausted=kv.num_exhausted,
        num_replays=snapshot.counters.replays,
        num_stale=snapshot.refused().get("HANDLE_STALE", 0),
        token_masks=masks.num_masks,
        token_mask_bytes=masks.num_bytes,
    )
    _fill_sequences(message, kv)
    return message


def _narrow_status(message: info_pb2.ExecutorStatus, own: OwnFigures) -> None:
    """Replace what counts the work of all by what was done for one principal; steps are shared, so they are left out.

    What remains of others is the load at the moment: the state, jobs that wait, sequences in a step, streams under way,
    and free blocks. Clients need it to choose a server and to pace themselves, and it holds no lengths in tokens.
    """
    for name in _STEP_FIELDS:
        message.ClearField(name)
    message.live_sequences = own.num_sequences
    _fill_appends(message, own.counters, own.refused())


def _narrow_metrics(message: cache_pb2.CacheMetrics, own: OwnFigures, masks: MaskRegistry, principal: str) -> None:
    """Replace what counts the work of all by what was done for one principal; see :func:`_narrow_status`."""
    for name in _SHARED_FIELDS:
        message.ClearField(name)
    message.live_sequences = own.num_sequences
    _fill_sequences(message, own.kv)
    message.num_replays = own.counters.replays
    message.num_stale = own.refused().get("HANDLE_STALE", 0)
    message.token_masks, message.token_mask_bytes = masks.held_by(principal)


def _fill_sequences(message: cache_pb2.CacheMetrics, kv: KvCounters) -> None:
    """Write what was done to sequences: to all of them, or to those of one principal."""
    message.num_created = kv.num_created
    message.num_forks = kv.num_forks
    message.num_truncates = kv.num_truncates
    message.num_released = kv.num_released
    message.num_expired = kv.num_expired
    message.num_block_copies = kv.num_block_copies
    message.num_prefix_lookup_tokens = kv.num_prefix_lookup_tokens
    message.num_prefix_hit_tokens = kv.num_prefix_hit_tokens


def _fill_executor(message: info_pb2.ExecutorStatus, info: ExecutorInfo, state: ExecutorState | None) -> None:
    """Say what runs steps at the moment, and why it does; only an executor that prepares things has a state."""
    message.executor = info.name if state is None else state.name
    message.fallback_reason = info.fallback_reason if state is None else state.fallback_reason
    if state is None:
        return
    message.preparation = state.preparation
    message.captured_batch_sizes.extend(state.captured_batch_sizes)
    message.num_graph_steps = state.num_graph_steps
    message.num_launched_steps = state.num_launched_steps
    message.num_torch_steps = state.num_torch_steps
    message.memory.device_allocated_bytes = state.device_allocated_bytes
    message.memory.device_peak_bytes = state.device_peak_bytes
    if state.memory is not None:
        message.memory_plan.CopyFrom(_memory_plan(state.memory))
        message.memory.device_total_bytes = state.memory.total


def _memory_plan(plan: MemoryPlan) -> info_pb2.MemoryPlan:
    return info_pb2.MemoryPlan(
        total_bytes=plan.total,
        weights_bytes=plan.weights,
        kv_pool_bytes=plan.kv_pool,
        buffer_bytes=plan.buffers,
        workspace_bytes=plan.workspace,
        graph_bytes=plan.graphs,
        free_bytes=max(0, plan.free),
    )


def _fill_counters(message: info_pb2.ExecutorStatus, snapshot: EngineSnapshot) -> None:
    counters = snapshot.counters
    message.live_sequences = snapshot.num_sequences
    message.queue_depth = snapshot.num_waiting
    message.total_blocks = snapshot.total_blocks
    message.free_blocks = snapshot.free_blocks
    message.current_batch_size = counters.last_step_seqs
    if counters.last_step_unix_ns:
        message.last_step_time.CopyFrom(_timestamp(counters.last_step_unix_ns))
    message.num_steps = counters.steps
    _fill_appends(message, counters, snapshot.refused())
    message.active_streams = snapshot.num_streams
    message.num_queued_steps = counters.queued_steps
    message.num_discarded_rows = counters.discarded_rows


def _fill_appends(message: info_pb2.ExecutorStatus, counters: OwnCounters, refused: Mapping[str, int]) -> None:
    """Write what was done for all principals, or for one."""
    message.num_prefills = counters.prefills
    message.num_decodes = counters.decodes
    message.num_verifies = counters.verifies
    message.num_prefill_tokens = counters.prefill_tokens
    message.num_decode_tokens = counters.decode_tokens
    message.num_draft_tokens = counters.draft_tokens
    message.num_accepted_tokens = counters.accepted_tokens
    message.num_generates = counters.generates
    message.num_errors = sum(refused.values())
    message.avg_prefill_ns = counters.prefill_ns // max(1, counters.prefills)
    message.avg_decode_ns = counters.decode_ns // max(1, counters.decodes)


def _executor_state(phase: Phase, snapshot: EngineSnapshot) -> info_pb2.ExecutorState:
    if snapshot.is_failed or phase is Phase.FAILED:
        return info_pb2.EXECUTOR_STATE_FAILED
    if phase in (Phase.DRAINING, Phase.CLOSING):
        return info_pb2.EXECUTOR_STATE_DRAINING
    is_busy = snapshot.num_running or snapshot.num_waiting
    return info_pb2.EXECUTOR_STATE_BUSY if is_busy else info_pb2.EXECUTOR_STATE_READY


def _memory_requirements(info: ExecutorInfo, state: ExecutorState | None) -> info_pb2.MemoryRequirements:
    plan = None if state is None else state.memory
    return info_pb2.MemoryRequirements(
        parameter_bytes=info.model.weights_bytes,
        activation_bytes_per_row=info.activation_bytes_per_row,
        kv_bytes_per_token=info.bytes_per_block // info.block_size,
        kv_pool_bytes=info.bytes_per_block * info.num_blocks,
        overhead_bytes=0 if plan is None else plan.buffers + plan.workspace,
    )


def _memory_usage() -> info_pb2.MemoryUsage:
    """Return the memory of the process as Linux counts it; zeros elsewhere."""
    usage = info_pb2.MemoryUsage()
    for line in _lines_of(_PROC_STATUS):
        if line.startswith("VmRSS:"):
            usage.host_resident_bytes = int(line.split()[1]) << 10
        elif line.startswith("VmHWM:"):
            usage.host_peak_bytes = int(line.split()[1]) << 10
    return usage


def _device_type(info: ExecutorInfo) -> types_pb2.DeviceType:
    return types_pb2.DEVICE_TYPE_CUDA if info.device.startswith("cuda") else types_pb2.DEVICE_TYPE_CPU


def _device_name(info: ExecutorInfo) -> str:
    """Return what the driver calls the device; for the processor what the system calls it."""
    return info.device_name or (_CPU_NAME if info.device == "cpu" else info.device)


def _attention(model: ModelDescription) -> info_pb2.AttentionMechanism:
    """Return how query heads share the heads of K and V."""
    if model.config.num_kv_heads == model.config.num_heads:
        return info_pb2.ATTENTION_MECHANISM_MULTI_HEAD
    if model.config.num_kv_heads == 1:
        return info_pb2.ATTENTION_MECHANISM_MULTI_QUERY
    return info_pb2.ATTENTION_MECHANISM_GROUPED_QUERY


def _lines_of(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _read_cpu_name() -> str:
    names = (line.partition(":")[2].strip() for line in _lines_of(_CPUINFO) if line.startswith("model name"))
    return next(names, "cpu")


_CPU_NAME: Final = _read_cpu_name()
"""Read once, before the event loop runs: the file has a page for each core."""


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration


def _timestamp(unix_ns: int) -> Timestamp:
    stamp = Timestamp()
    stamp.FromNanoseconds(unix_ns)
    return stamp
