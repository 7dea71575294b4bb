import datetime

from ferrule.v1 import types_pb2 as _types_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Feature(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FEATURE_UNSPECIFIED: _ClassVar[Feature]
    FEATURE_BATCH_PREFILL: _ClassVar[Feature]
    FEATURE_BATCH_DECODE: _ClassVar[Feature]
    FEATURE_STREAM_DECODE: _ClassVar[Feature]
    FEATURE_UNIFIED_DECODE: _ClassVar[Feature]
    FEATURE_FORWARD_VERIFY: _ClassVar[Feature]
    FEATURE_TREE_VERIFY: _ClassVar[Feature]
    FEATURE_FORWARD: _ClassVar[Feature]
    FEATURE_GENERATE: _ClassVar[Feature]
    FEATURE_FORK: _ClassVar[Feature]
    FEATURE_TRUNCATE: _ClassVar[Feature]
    FEATURE_RESERVE: _ClassVar[Feature]
    FEATURE_TOKEN_MASKS: _ClassVar[Feature]
    FEATURE_PENALTIES: _ClassVar[Feature]
    FEATURE_LOGIT_BIAS: _ClassVar[Feature]
    FEATURE_LOGPROB_TOKEN_IDS: _ClassVar[Feature]
    FEATURE_TARGET_LOGPROBS: _ClassVar[Feature]
    FEATURE_ENTROPY: _ClassVar[Feature]
    FEATURE_HIDDEN_STATE: _ClassVar[Feature]
    FEATURE_ALL_POSITIONS: _ClassVar[Feature]
    FEATURE_CACHE_METRICS: _ClassVar[Feature]
    FEATURE_ADMIN: _ClassVar[Feature]
    FEATURE_TOKENIZER: _ClassVar[Feature]
    FEATURE_CHAT_TEMPLATE: _ClassVar[Feature]
    FEATURE_PREFIX_CACHE: _ClassVar[Feature]
    FEATURE_REQUEST_ID: _ClassVar[Feature]
    FEATURE_DETERMINISTIC: _ClassVar[Feature]
    FEATURE_DURABLE_HANDLES: _ClassVar[Feature]

class ExecutorState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXECUTOR_STATE_UNSPECIFIED: _ClassVar[ExecutorState]
    EXECUTOR_STATE_STARTING: _ClassVar[ExecutorState]
    EXECUTOR_STATE_READY: _ClassVar[ExecutorState]
    EXECUTOR_STATE_BUSY: _ClassVar[ExecutorState]
    EXECUTOR_STATE_DRAINING: _ClassVar[ExecutorState]
    EXECUTOR_STATE_FAILED: _ClassVar[ExecutorState]
FEATURE_UNSPECIFIED: Feature
FEATURE_BATCH_PREFILL: Feature
FEATURE_BATCH_DECODE: Feature
FEATURE_STREAM_DECODE: Feature
FEATURE_UNIFIED_DECODE: Feature
FEATURE_FORWARD_VERIFY: Feature
FEATURE_TREE_VERIFY: Feature
FEATURE_FORWARD: Feature
FEATURE_GENERATE: Feature
FEATURE_FORK: Feature
FEATURE_TRUNCATE: Feature
FEATURE_RESERVE: Feature
FEATURE_TOKEN_MASKS: Feature
FEATURE_PENALTIES: Feature
FEATURE_LOGIT_BIAS: Feature
FEATURE_LOGPROB_TOKEN_IDS: Feature
FEATURE_TARGET_LOGPROBS: Feature
FEATURE_ENTROPY: Feature
FEATURE_HIDDEN_STATE: Feature
FEATURE_ALL_POSITIONS: Feature
FEATURE_CACHE_METRICS: Feature
FEATURE_ADMIN: Feature
FEATURE_TOKENIZER: Feature
FEATURE_CHAT_TEMPLATE: Feature
FEATURE_PREFIX_CACHE: Feature
FEATURE_REQUEST_ID: Feature
FEATURE_DETERMINISTIC: Feature
FEATURE_DURABLE_HANDLES: Feature
EXECUTOR_STATE_UNSPECIFIED: ExecutorState
EXECUTOR_STATE_STARTING: ExecutorState
EXECUTOR_STATE_READY: ExecutorState
EXECUTOR_STATE_BUSY: ExecutorState
EXECUTOR_STATE_DRAINING: ExecutorState
EXECUTOR_STATE_FAILED: ExecutorState

class ModelInfo(_message.Message):
    __slots__ = ("model_id", "architecture", "num_parameters", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "max_sequence_length", "dtype", "kv_dtype", "device_type", "device_name", "fingerprint", "eos_token_ids", "stop_token_ids", "bos_token_id", "kernel_set", "numerics_fingerprint", "attention_window", "packed_types")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    KERNEL_SET_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_WINDOW_FIELD_NUMBER: _ClassVar[int]
    PACKED_TYPES_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    architecture: str
    num_parameters: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_sequence_length: int
    dtype: _types_pb2.DataType
    kv_dtype: _types_pb2.DataType
    device_type: _types_pb2.DeviceType
    device_name: str
    fingerprint: bytes
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bos_token_id: int
    kernel_set: str
    numerics_fingerprint: bytes
    attention_window: int
    packed_types: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model_id: _Optional[str] = ..., architecture: _Optional[str] = ..., num_parameters: _Optional[int] = ..., hidden_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_heads: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_sequence_length: _Optional[int] = ..., dtype: _Optional[_Union[_types_pb2.DataType, str]] = ..., kv_dtype: _Optional[_Union[_types_pb2.DataType, str]] = ..., device_type: _Optional[_Union[_types_pb2.DeviceType, str]] = ..., device_name: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., bos_token_id: _Optional[int] = ..., kernel_set: _Optional[str] = ..., numerics_fingerprint: _Optional[bytes] = ..., attention_window: _Optional[int] = ..., packed_types: _Optional[_Iterable[str]] = ...) -> None: ...

class ExecutorCapabilities(_message.Message):
    __slots__ = ("features", "max_batch_size", "max_step_rows", "max_fork_count", "max_top_logprobs", "max_draft_tokens", "max_request_bytes", "max_reply_bytes", "block_size", "total_blocks", "min_ttl", "max_ttl", "default_ttl", "supported_dtypes", "memory_requirements", "caller", "max_handles_per_request", "max_items_per_frame", "max_text_bytes", "max_text_tokens", "max_masks_per_request", "max_logprob_token_ids", "max_logit_biases", "max_stops", "max_stop_tokens", "max_stop_bytes")
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_STEP_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_FORK_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_REPLY_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MIN_TTL_FIELD_NUMBER: _ClassVar[int]
    MAX_TTL_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_TTL_FIELD_NUMBER: _ClassVar[int]
    SUPPORTED_DTYPES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_REQUIREMENTS_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    MAX_HANDLES_PER_REQUEST_FIELD_NUMBER: _ClassVar[int]
    MAX_ITEMS_PER_FRAME_FIELD_NUMBER: _ClassVar[int]
    MAX_TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_TEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_MASKS_PER_REQUEST_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGIT_BIASES_FIELD_NUMBER: _ClassVar[int]
    MAX_STOPS_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_BYTES_FIELD_NUMBER: _ClassVar[int]
    features: _containers.RepeatedScalarFieldContainer[Feature]
    max_batch_size: int
    max_step_rows: int
    max_fork_count: int
    max_top_logprobs: int
    max_draft_tokens: int
    max_request_bytes: int
    max_reply_bytes: int
    block_size: int
    total_blocks: int
    min_ttl: _duration_pb2.Duration
    max_ttl: _duration_pb2.Duration
    default_ttl: _duration_pb2.Duration
    supported_dtypes: _containers.RepeatedScalarFieldContainer[_types_pb2.DataType]
    memory_requirements: MemoryRequirements
    caller: CallerInfo
    max_handles_per_request: int
    max_items_per_frame: int
    max_text_bytes: int
    max_text_tokens: int
    max_masks_per_request: int
    max_logprob_token_ids: int
    max_logit_biases: int
    max_stops: int
    max_stop_tokens: int
    max_stop_bytes: int
    def __init__(self, features: _Optional[_Iterable[_Union[Feature, str]]] = ..., max_batch_size: _Optional[int] = ..., max_step_rows: _Optional[int] = ..., max_fork_count: _Optional[int] = ..., max_top_logprobs: _Optional[int] = ..., max_draft_tokens: _Optional[int] = ..., max_request_bytes: _Optional[int] = ..., max_reply_bytes: _Optional[int] = ..., block_size: _Optional[int] = ..., total_blocks: _Optional[int] = ..., min_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., default_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., supported_dtypes: _Optional[_Iterable[_Union[_types_pb2.DataType, str]]] = ..., memory_requirements: _Optional[_Union[MemoryRequirements, _Mapping]] = ..., caller: _Optional[_Union[CallerInfo, _Mapping]] = ..., max_handles_per_request: _Optional[int] = ..., max_items_per_frame: _Optional[int] = ..., max_text_bytes: _Optional[int] = ..., max_text_tokens: _Optional[int] = ..., max_masks_per_request: _Optional[int] = ..., max_logprob_token_ids: _Optional[int] = ..., max_logit_biases: _Optional[int] = ..., max_stops: _Optional[int] = ..., max_stop_tokens: _Optional[int] = ..., max_stop_bytes: _Optional[int] = ...) -> None: ...

class CallerInfo(_message.Message):
    __slots__ = ("principal", "is_admin", "quotas")
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    IS_ADMIN_FIELD_NUMBER: _ClassVar[int]
    QUOTAS_FIELD_NUMBER: _ClassVar[int]
    principal: str
    is_admin: bool
    quotas: QuotaLimits
    def __init__(self, principal: _Optional[str] = ..., is_admin: _Optional[bool] = ..., quotas: _Optional[_Union[QuotaLimits, _Mapping]] = ...) -> None: ...

class QuotaLimits(_message.Message):
    __slots__ = ("handles", "kv_tokens", "queued_rows", "prefill_tokens_per_second", "retained_bytes", "mask_bytes", "calls_per_second", "request_bytes_per_second", "text_bytes_per_second")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_ROWS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    RETAINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MASK_BYTES_FIELD_NUMBER: _ClassVar[int]
    CALLS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    REQUEST_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    TEXT_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    handles: int
    kv_tokens: int
    queued_rows: int
    prefill_tokens_per_second: int
    retained_bytes: int
    mask_bytes: int
    calls_per_second: int
    request_bytes_per_second: int
    text_bytes_per_second: int
    def __init__(self, handles: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., queued_rows: _Optional[int] = ..., prefill_tokens_per_second: _Optional[int] = ..., retained_bytes: _Optional[int] = ..., mask_bytes: _Optional[int] = ..., calls_per_second: _Optional[int] = ..., request_bytes_per_second: _Optional[int] = ..., text_bytes_per_second: _Optional[int] = ...) -> None: ...

class MemoryRequirements(_message.Message):
    __slots__ = ("parameter_bytes", "kv_bytes_per_token", "kv_pool_bytes")
    PARAMETER_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    KV_POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    parameter_bytes: int
    kv_bytes_per_token: int
    kv_pool_bytes: int
    def __init__(self, parameter_bytes: _Optional[int] = ..., kv_bytes_per_token: _Optional[int] = ..., kv_pool_bytes: _Optional[int] = ...) -> None: ...

class ExecutorStatus(_message.Message):
    __slots__ = ("state", "is_ready", "load_progress", "load_stage", "executor", "fallback_reason", "instance", "epoch", "server_version", "start_time", "live_sequences", "queue_depth", "free_blocks", "current_batch_size", "num_steps", "num_prefills", "num_decodes", "num_verifies", "num_prefill_tokens", "num_decode_tokens", "num_errors", "avg_prefill_ns", "avg_decode_ns", "memory", "last_step_time", "num_draft_tokens", "num_accepted_tokens", "num_generates", "active_streams", "debug")
    class DebugEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    IS_READY_FIELD_NUMBER: _ClassVar[int]
    LOAD_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    LOAD_STAGE_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_REASON_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    LIVE_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_DEPTH_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CURRENT_BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILLS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODES_FIELD_NUMBER: _ClassVar[int]
    NUM_VERIFIES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ERRORS_FIELD_NUMBER: _ClassVar[int]
    AVG_PREFILL_NS_FIELD_NUMBER: _ClassVar[int]
    AVG_DECODE_NS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_TIME_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATES_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_STREAMS_FIELD_NUMBER: _ClassVar[int]
    DEBUG_FIELD_NUMBER: _ClassVar[int]
    state: ExecutorState
    is_ready: bool
    load_progress: float
    load_stage: str
    executor: str
    fallback_reason: str
    instance: str
    epoch: str
    server_version: str
    start_time: _timestamp_pb2.Timestamp
    live_sequences: int
    queue_depth: int
    free_blocks: int
    current_batch_size: int
    num_steps: int
    num_prefills: int
    num_decodes: int
    num_verifies: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_errors: int
    avg_prefill_ns: int
    avg_decode_ns: int
    memory: MemoryUsage
    last_step_time: _timestamp_pb2.Timestamp
    num_draft_tokens: int
    num_accepted_tokens: int
    num_generates: int
    active_streams: int
    debug: _containers.ScalarMap[str, str]
    def __init__(self, state: _Optional[_Union[ExecutorState, str]] = ..., is_ready: _Optional[bool] = ..., load_progress: _Optional[float] = ..., load_stage: _Optional[str] = ..., executor: _Optional[str] = ..., fallback_reason: _Optional[str] = ..., instance: _Optional[str] = ..., epoch: _Optional[str] = ..., server_version: _Optional[str] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., live_sequences: _Optional[int] = ..., queue_depth: _Optional[int] = ..., free_blocks: _Optional[int] = ..., current_batch_size: _Optional[int] = ..., num_steps: _Optional[int] = ..., num_prefills: _Optional[int] = ..., num_decodes: _Optional[int] = ..., num_verifies: _Optional[int] = ..., num_prefill_tokens: _Optional[int] = ..., num_decode_tokens: _Optional[int] = ..., num_errors: _Optional[int] = ..., avg_prefill_ns: _Optional[int] = ..., avg_decode_ns: _Optional[int] = ..., memory: _Optional[_Union[MemoryUsage, _Mapping]] = ..., last_step_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., num_generates: _Optional[int] = ..., active_streams: _Optional[int] = ..., debug: _Optional[_Mapping[str, str]] = ...) -> None: ...

class MemoryUsage(_message.Message):
    __slots__ = ("host_resident_bytes", "host_peak_bytes", "device_allocated_bytes", "device_peak_bytes", "device_total_bytes")
    HOST_RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ALLOCATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    host_resident_bytes: int
    host_peak_bytes: int
    device_allocated_bytes: int
    device_peak_bytes: int
    device_total_bytes: int
    def __init__(self, host_resident_bytes: _Optional[int] = ..., host_peak_bytes: _Optional[int] = ..., device_allocated_bytes: _Optional[int] = ..., device_peak_bytes: _Optional[int] = ..., device_total_bytes: _Optional[int] = ...) -> None: ...
