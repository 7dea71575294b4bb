"""ModelInfo, ExecutorCapabilities, CallerInfo, ExecutorStatus and CacheMetrics, from the parts that are running."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from typing import Any, Final

from google.protobuf.message import Message

from ferrule.v1 import cache_pb2, info_pb2, types_pb2
from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.responses.times import duration, timestamp
from ferrule_server.api.rpc.state import Phase, ServerState, Serving
from ferrule_server.api.security.principal import Caller
from ferrule_server.engine.masks import MaskRegistry
from ferrule_server.engine.metrics.counters import EngineCounters, EngineSnapshot, OwnCounters, OwnFigures
from ferrule_server.executor.base import ExecutorInfo, ExecutorState
from ferrule_server.host import Host
from ferrule_server.kv.metrics import KvMetrics
from ferrule_server.quotas import QuotaLimits

_ALWAYS: Final = (
    info_pb2.FEATURE_BATCH_PREFILL,
    info_pb2.FEATURE_BATCH_DECODE,
    info_pb2.FEATURE_STREAM_DECODE,
    info_pb2.FEATURE_UNIFIED_DECODE,
    info_pb2.FEATURE_FORWARD_VERIFY,
    info_pb2.FEATURE_FORWARD,
    info_pb2.FEATURE_GENERATE,
    info_pb2.FEATURE_FORK,
    info_pb2.FEATURE_TRUNCATE,
    info_pb2.FEATURE_RESERVE,
    info_pb2.FEATURE_TOKEN_MASKS,
    info_pb2.FEATURE_PENALTIES,
    info_pb2.FEATURE_LOGIT_BIAS,
    info_pb2.FEATURE_LOGPROB_TOKEN_IDS,
    info_pb2.FEATURE_TARGET_LOGPROBS,
    info_pb2.FEATURE_ENTROPY,
    info_pb2.FEATURE_HIDDEN_STATE,
    info_pb2.FEATURE_ALL_POSITIONS,
    info_pb2.FEATURE_CACHE_METRICS,
    info_pb2.FEATURE_ADMIN,
    info_pb2.FEATURE_REQUEST_ID,
)
"""Features of every server; trees of drafts are of none."""
_SHARED_FIELDS: Final = ("shared_blocks", "tombstones", "num_prefix_evictions", "num_exhausted")
"""Fields of GetCacheMetrics that only an administrator sees: the pool counts them for all principals together."""
_COUNTED_APPENDS: Final = ("prefills", "decodes", "verifies", "generates")
_COUNTED_TOKENS: Final = ("prefill_tokens", "decode_tokens", "draft_tokens", "accepted_tokens")
"""Counters of appends and of their tokens that a status shows, with num_ before the name."""
_HOST: Final = Host()
_CPU_NAME: Final = _HOST.processor_name()
"""Read once, before the event loop runs: the file has a page for each core."""


def same_fields(message: type[Message], *records: object) -> dict[str, Any]:
    """Return the attributes of records that a message has a field for, under the same name; the last record wins."""
    return {
        name: getattr(record, name)
        for record in records
        for name in shared_names(message, type(record))  # type: ignore[arg-type]  # to mypy, classes have no hash
    }


@cache
def shared_names(message: type[Message], record: type) -> tuple[str, ...]:
    """Return the fields of a message that are also names of a class of records, which must declare all it has."""
    declared = frozenset(dir(record))
    return tuple(name for name in message.DESCRIPTOR.fields_by_name if name in declared)


def model_info(serving: Serving) -> info_pb2.ModelInfo:
    """Return the description of the loaded model."""
    info, tokenizer = serving.engine.info, serving.inputs.tokenizer
    model, config = info.model, info.model.config
    own = {
        "max_sequence_length": min(model.max_context, (info.num_blocks - 1) * info.block_size),
        "dtype": _dtype(model.dtype),
        "kv_dtype": _dtype(info.kv_dtype),
        "device_type": _device_type(info),
        "device_name": _device_name(info),
        "eos_token_ids": config.eos_ids,
        "stop_token_ids": serving.inputs.stop_ids,
        "bos_token_id": None if tokenizer is None else next(iter(tokenizer.begin_ids), None),
    }
    return info_pb2.ModelInfo(**same_fields(info_pb2.ModelInfo, info, model, config) | own)


def capabilities(serving: Serving, limits: ApiLimits, caller: info_pb2.CallerInfo) -> info_pb2.ExecutorCapabilities:
    """Return what this server supports."""
    info = serving.engine.info
    return info_pb2.ExecutorCapabilities(
        features=_features(serving),
        caller=caller,
        max_batch_size=serving.inputs.max_step_rows,
        max_step_rows=serving.inputs.max_step_rows,
        **same_fields(info_pb2.ExecutorCapabilities, limits),
        block_size=info.block_size,
        total_blocks=info.num_blocks - 1,
        min_ttl=duration(limits.min_ttl_s),
        max_ttl=duration(limits.max_ttl_s),
        default_ttl=duration(min(limits.default_ttl_s, limits.max_ttl_s)),
        supported_dtypes=list(map(_dtype, info.supported_dtypes)),
        memory_requirements=info_pb2.MemoryRequirements(
            parameter_bytes=info.model.weights_bytes,
            kv_bytes_per_token=info.bytes_per_block // info.block_size,
            kv_pool_bytes=info.bytes_per_block * info.num_blocks,
        ),
    )


def _features(serving: Serving) -> list[info_pb2.Feature]:
    """Return the features of this server. The calls of any other one answer FEATURE_UNSUPPORTED."""
    bits = serving.is_deterministic or bool(serving.engine.info.kernel_set)
    depends = {
        info_pb2.FEATURE_TOKENIZER: serving.inputs.tokenizer is not None,
        info_pb2.FEATURE_CHAT_TEMPLATE: serving.chat_template is not None,
        info_pb2.FEATURE_PREFIX_CACHE: serving.has_prefix_cache,
        info_pb2.FEATURE_DETERMINISTIC: bits,
        info_pb2.FEATURE_DURABLE_HANDLES: serving.engine.is_durable,
    }
    return [*_ALWAYS, *(feature for feature, is_served in depends.items() if is_served)]


def caller_info(caller: Caller, quotas: QuotaLimits) -> info_pb2.CallerInfo:
    """Return what the server knows of the caller; 0 means no limit."""
    limits = {name.replace("_per_s", "_per_second"): limit or 0 for name, limit in asdict(quotas).items()}
    return info_pb2.CallerInfo(
        principal=caller.principal, is_admin=caller.is_admin, quotas=info_pb2.QuotaLimits(**limits)
    )


def seen_by(caller: Caller) -> str | None:
    """Return the principal whose counters a caller may see; None: it may see those of all."""
    return None if caller.is_admin else caller.principal


def status(
    state: ServerState, snapshot: EngineSnapshot | None = None, principal: str | None = None
) -> info_pb2.ExecutorStatus:
    """Return the state and the counters of the server, also while it loads.

    Args:
        state: The server.
        snapshot: The engine at the moment to describe; None: now.
        principal: Return the counters of this principal alone, so that they reveal nothing about other principals.
            The message still shows the current load of others: the state, waiting jobs, sequences in a step, open
            streams and free blocks. Clients need it to choose a server and to pace themselves. It holds no lengths in
            tokens and no counters of steps, since a step has rows of several principals.
    """
    message = info_pb2.ExecutorStatus(
        state=info_pb2.EXECUTOR_STATE_STARTING,
        instance=state.instance,
        epoch=state.epoch,
        server_version=state.version,
        start_time=timestamp(state.start_ns),
        memory=_memory_usage(),
    )
    serving = state.serving
    if serving is None:
        message.load_progress = state.load_progress
        message.load_stage = state.load_stage
        return message
    snapshot = snapshot or serving.engine.snapshot()
    message.load_progress = 1.0
    message.state = _executor_state(state.phase, snapshot)
    message.is_ready = message.state in (info_pb2.EXECUTOR_STATE_READY, info_pb2.EXECUTOR_STATE_BUSY)
    executor_state = serving.executor_state()
    _fill_executor(message, serving.engine.info, executor_state)
    message.queue_depth = snapshot.num_waiting
    message.free_blocks = snapshot.free_blocks
    message.current_batch_size = snapshot.counters.last_step_seqs
    message.active_streams = snapshot.num_streams
    if (is_lost := serving.engine.is_journal_lost) is not None:
        message.debug["journal"] = "lost" if is_lost else "healthy"
    if principal is not None:
        _fill_appends(message, serving.engine.own_figures(principal))
        return message
    _fill_appends(message, snapshot)
    _fill_steps(message, snapshot.counters, executor_state)
    message.debug.update({"tokenizer": "none"} if serving.inputs.tokenizer is None else {})
    return message


def own_cache_metrics(serving: Serving, principal: str | None) -> cache_pb2.CacheMetrics:
    """Return the counters of the KV pool and of the masks for one principal; None: for all of them.

    Every caller sees how many blocks of the pool are empty, cached or used: schedulers need these numbers.
    """
    metrics = cache_metrics(serving)
    if principal is not None:
        _narrow_metrics(metrics, serving.engine.own_figures(principal), serving.inputs.masks, principal)
    return metrics


def cache_metrics(
    serving: Serving, snapshot: EngineSnapshot | None = None, kv: KvMetrics | None = None
) -> cache_pb2.CacheMetrics:
    """Return the counters of the KV pool and of the masks for all principals, from the arguments or as of now."""
    snapshot, masks = snapshot or serving.engine.snapshot(), serving.inputs.masks
    return cache_pb2.CacheMetrics(
        **same_fields(cache_pb2.CacheMetrics, kv or serving.engine.kv_metrics()),
        num_replays=snapshot.counters.replays,
        num_stale=snapshot.refused.get("HANDLE_STALE", 0),
        token_masks=masks.num_masks,
        token_mask_bytes=masks.memory.num_held,
    )


def _narrow_metrics(message: cache_pb2.CacheMetrics, own: OwnFigures, masks: MaskRegistry, principal: str) -> None:
    """Replace the counters of all principals by those of one."""
    for name in _SHARED_FIELDS:
        message.ClearField(name)
    for name, count in asdict(own.kv).items():
        setattr(message, name, count)
    message.num_replays = own.counters.replays
    message.num_stale = own.refused.get("HANDLE_STALE", 0)
    message.token_masks, message.token_mask_bytes = masks.held_by(principal)


def _fill_executor(message: info_pb2.ExecutorStatus, info: ExecutorInfo, state: ExecutorState | None) -> None:
    """Write which executor runs the steps and why; only an executor that prepares kernels has a state."""
    message.executor = info.name if state is None else state.name
    message.fallback_reason = info.fallback_reason if state is None else state.fallback_reason
    debug: dict[str, object] = {"kernel_set": info.kernel_set, "kernel_set_reason": info.kernel_set_reason}
    if state is not None:
        debug["preparation"] = state.preparation
        debug["captured_batch_sizes"] = ",".join(map(str, state.captured_batch_sizes))
        message.memory.MergeFrom(info_pb2.MemoryUsage(**same_fields(info_pb2.MemoryUsage, state)))
        if state.memory is not None:
            debug |= {f"memory_plan.{name}_bytes": max(0, size) for name, size in asdict(state.memory).items()}
            message.memory.device_total_bytes = state.memory.total
    message.debug.update({name: str(value) for name, value in debug.items() if value != ""})


def _fill_steps(message: info_pb2.ExecutorStatus, counters: EngineCounters, state: ExecutorState | None) -> None:
    if counters.last_step_unix_ns:
        message.last_step_time.CopyFrom(timestamp(counters.last_step_unix_ns))
    message.num_steps = counters.steps
    debug = {"queued_steps": counters.queued_steps, "discarded_rows": counters.discarded_rows}
    if state is not None:
        debug["graph_steps"] = state.num_graph_steps
        debug["launched_steps"] = state.num_launched_steps
        debug["torch_steps"] = state.num_torch_steps
    message.debug.update({name: str(count) for name, count in debug.items()})


def _fill_appends(message: info_pb2.ExecutorStatus, figures: EngineSnapshot | OwnFigures) -> None:
    """Write the counters of sequences and appends, of all principals or of one."""
    counters: OwnCounters = figures.counters
    message.live_sequences = figures.num_sequences
    for name in (*_COUNTED_APPENDS, *_COUNTED_TOKENS):
        setattr(message, f"num_{name}", getattr(counters, name))
    message.num_errors = sum(figures.refused.values())
    message.avg_prefill_ns = counters.prefill_ns // max(1, counters.prefills)
    message.avg_decode_ns = counters.decode_ns // max(1, counters.decodes)


def _executor_state(phase: Phase, snapshot: EngineSnapshot) -> info_pb2.ExecutorState:
    if snapshot.is_failed or phase is Phase.FAILED:
        return info_pb2.EXECUTOR_STATE_FAILED
    if phase in (Phase.DRAINING, Phase.CLOSING):
        return info_pb2.EXECUTOR_STATE_DRAINING
    is_busy = snapshot.num_running or snapshot.num_waiting
    return info_pb2.EXECUTOR_STATE_BUSY if is_busy else info_pb2.EXECUTOR_STATE_READY


def _memory_usage() -> info_pb2.MemoryUsage:
    """Return the memory of the process as Linux counts it; zeros on other systems."""
    sizes = _HOST.own_sizes()
    return info_pb2.MemoryUsage(host_resident_bytes=sizes.get("VmRSS", 0), host_peak_bytes=sizes.get("VmHWM", 0))


def _dtype(name: str) -> str:
    """Return the name in the contract of a type."""
    return f"DATA_TYPE_{name.upper()}"


def _device_type(info: ExecutorInfo) -> types_pb2.DeviceType:
    return types_pb2.DEVICE_TYPE_CUDA if info.device.startswith("cuda") else types_pb2.DEVICE_TYPE_CPU


def _device_name(info: ExecutorInfo) -> str:
    """Return the name of the device as its driver reports it, or the name of the CPU as the system reports it."""
    return info.device_name or (_CPU_NAME if info.device == "cpu" else info.device)
