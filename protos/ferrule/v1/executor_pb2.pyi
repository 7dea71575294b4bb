import datetime

from ferrule.v1 import cache_pb2 as _cache_pb2
from ferrule.v1 import info_pb2 as _info_pb2
from ferrule.v1 import policy_pb2 as _policy_pb2
from ferrule.v1 import types_pb2 as _types_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.rpc import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AcceptanceRule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACCEPTANCE_RULE_UNSPECIFIED: _ClassVar[AcceptanceRule]
    ACCEPTANCE_RULE_NONE: _ClassVar[AcceptanceRule]
    ACCEPTANCE_RULE_EXACT: _ClassVar[AcceptanceRule]
    ACCEPTANCE_RULE_REJECTION: _ClassVar[AcceptanceRule]

class HiddenPooling(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HIDDEN_POOLING_UNSPECIFIED: _ClassVar[HiddenPooling]
    HIDDEN_POOLING_MEAN: _ClassVar[HiddenPooling]
    HIDDEN_POOLING_LAST: _ClassVar[HiddenPooling]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_EOS: _ClassVar[FinishReason]
    FINISH_REASON_STOP_TOKEN: _ClassVar[FinishReason]
    FINISH_REASON_STOP_SEQUENCE: _ClassVar[FinishReason]
    FINISH_REASON_MAX_TOKENS: _ClassVar[FinishReason]
    FINISH_REASON_CONTEXT_FULL: _ClassVar[FinishReason]
    FINISH_REASON_KV_BLOCKS_EXHAUSTED: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
ACCEPTANCE_RULE_UNSPECIFIED: AcceptanceRule
ACCEPTANCE_RULE_NONE: AcceptanceRule
ACCEPTANCE_RULE_EXACT: AcceptanceRule
ACCEPTANCE_RULE_REJECTION: AcceptanceRule
HIDDEN_POOLING_UNSPECIFIED: HiddenPooling
HIDDEN_POOLING_MEAN: HiddenPooling
HIDDEN_POOLING_LAST: HiddenPooling
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_EOS: FinishReason
FINISH_REASON_STOP_TOKEN: FinishReason
FINISH_REASON_STOP_SEQUENCE: FinishReason
FINISH_REASON_MAX_TOKENS: FinishReason
FINISH_REASON_CONTEXT_FULL: FinishReason
FINISH_REASON_KV_BLOCKS_EXHAUSTED: FinishReason
FINISH_REASON_ERROR: FinishReason

class PrefillInput(_message.Message):
    __slots__ = ("request_id", "input_ids", "kv_cache", "attention_mask", "position_ids", "logits_policy", "logits_positions", "cache", "on_stale")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_MASK_FIELD_NUMBER: _ClassVar[int]
    POSITION_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGITS_POLICY_FIELD_NUMBER: _ClassVar[int]
    LOGITS_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    ON_STALE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    input_ids: _containers.RepeatedScalarFieldContainer[int]
    kv_cache: _types_pb2.KvCacheHandle
    attention_mask: _containers.RepeatedScalarFieldContainer[int]
    position_ids: _containers.RepeatedScalarFieldContainer[int]
    logits_policy: _policy_pb2.LogitsReturnPolicy
    logits_positions: _types_pb2.LogitsPositions
    cache: CacheOptions
    on_stale: _types_pb2.StalePolicy
    def __init__(self, request_id: _Optional[str] = ..., input_ids: _Optional[_Iterable[int]] = ..., kv_cache: _Optional[_Union[_types_pb2.KvCacheHandle, _Mapping]] = ..., attention_mask: _Optional[_Iterable[int]] = ..., position_ids: _Optional[_Iterable[int]] = ..., logits_policy: _Optional[_Union[_policy_pb2.LogitsReturnPolicy, _Mapping]] = ..., logits_positions: _Optional[_Union[_types_pb2.LogitsPositions, str]] = ..., cache: _Optional[_Union[CacheOptions, _Mapping]] = ..., on_stale: _Optional[_Union[_types_pb2.StalePolicy, str]] = ...) -> None: ...

class CacheOptions(_message.Message):
    __slots__ = ("ttl", "skip_prefix_reuse", "skip_prefix_publish", "reserve_length", "drop_outside_window", "durability")
    TTL_FIELD_NUMBER: _ClassVar[int]
    SKIP_PREFIX_REUSE_FIELD_NUMBER: _ClassVar[int]
    SKIP_PREFIX_PUBLISH_FIELD_NUMBER: _ClassVar[int]
    RESERVE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DROP_OUTSIDE_WINDOW_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    ttl: _duration_pb2.Duration
    skip_prefix_reuse: bool
    skip_prefix_publish: bool
    reserve_length: int
    drop_outside_window: bool
    durability: _types_pb2.Durability
    def __init__(self, ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., skip_prefix_reuse: _Optional[bool] = ..., skip_prefix_publish: _Optional[bool] = ..., reserve_length: _Optional[int] = ..., drop_outside_window: _Optional[bool] = ..., durability: _Optional[_Union[_types_pb2.Durability, str]] = ...) -> None: ...

class PrefillOutput(_message.Message):
    __slots__ = ("request_id", "kv_cache", "outputs", "timing", "replayed", "recomputed", "cached_tokens", "ttl")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    kv_cache: _types_pb2.KvCacheHandle
    outputs: _policy_pb2.Outputs
    timing: _types_pb2.Timing
    replayed: bool
    recomputed: bool
    cached_tokens: int
    ttl: _duration_pb2.Duration
    def __init__(self, request_id: _Optional[str] = ..., kv_cache: _Optional[_Union[_types_pb2.KvCacheHandle, _Mapping]] = ..., outputs: _Optional[_Union[_policy_pb2.Outputs, _Mapping]] = ..., timing: _Optional[_Union[_types_pb2.Timing, _Mapping]] = ..., replayed: _Optional[bool] = ..., recomputed: _Optional[bool] = ..., cached_tokens: _Optional[int] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DecodeInput(_message.Message):
    __slots__ = ("request_id", "input_ids", "kv_cache", "logits_policy", "on_stale")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    LOGITS_POLICY_FIELD_NUMBER: _ClassVar[int]
    ON_STALE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    input_ids: _containers.RepeatedScalarFieldContainer[int]
    kv_cache: _types_pb2.KvCacheHandle
    logits_policy: _policy_pb2.LogitsReturnPolicy
    on_stale: _types_pb2.StalePolicy
    def __init__(self, request_id: _Optional[str] = ..., input_ids: _Optional[_Iterable[int]] = ..., kv_cache: _Optional[_Union[_types_pb2.KvCacheHandle, _Mapping]] = ..., logits_policy: _Optional[_Union[_policy_pb2.LogitsReturnPolicy, _Mapping]] = ..., on_stale: _Optional[_Union[_types_pb2.StalePolicy, str]] = ...) -> None: ...

class DecodeOutput(_message.Message):
    __slots__ = ("request_id", "kv_cache", "outputs", "timing", "replayed", "recomputed")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    kv_cache: _types_pb2.KvCacheHandle
    outputs: _policy_pb2.Outputs
    timing: _types_pb2.Timing
    replayed: bool
    recomputed: bool
    def __init__(self, request_id: _Optional[str] = ..., kv_cache: _Optional[_Union[_types_pb2.KvCacheHandle, _Mapping]] = ..., outputs: _Optional[_Union[_policy_pb2.Outputs, _Mapping]] = ..., timing: _Optional[_Union[_types_pb2.Timing, _Mapping]] = ..., replayed: _Optional[bool] = ..., recomputed: _Optional[bool] = ...) -> None: ...

class UnifiedBatchItem(_message.Message):
    __slots__ = ("request_id", "q_tokens", "kv_cache", "pos_offset", "is_final_chunk", "logits_policy", "on_stale", "logits_positions", "cache")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    Q_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    POS_OFFSET_FIELD_NUMBER: _ClassVar[int]
    IS_FINAL_CHUNK_FIELD_NUMBER: _ClassVar[int]
    LOGITS_POLICY_FIELD_NUMBER: _ClassVar[int]
    ON_STALE_FIELD_NUMBER: _ClassVar[int]
    LOGITS_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    q_tokens: _containers.RepeatedScalarFieldContainer[int]
    kv_cache: _types_pb2.KvCacheHandle
    pos_offset: int
    is_final_chunk: bool
    logits_policy: _policy_pb2.LogitsReturnPolicy
    on_stale: _types_pb2.StalePolicy
    logits_positions: _types_pb2.LogitsPositions
    cache: CacheOptions
    def __init__(self, request_id: _Optional[str] = ..., q_tokens: _Optional[_Iterable[int]] = ..., kv_cache: _Optional[_Union[_types_pb2.KvCacheHandle, _Mapping]] = ..., pos_offset: _Optional[int] = ..., is_final_chunk: _Optional[bool] = ..., logits_policy: _Optional[_Union[_policy_pb2.LogitsReturnPolicy, _Mapping]] = ..., on_stale: _Optional[_Union[_types_pb2.StalePolicy, str]] = ..., logits_positions: _Optional[_Union[_types_pb2.LogitsPositions, str]] = ..., cache: _Optional[_Union[CacheOptions, _Mapping]] = ...) -> None: ...

class UnifiedBatch(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[UnifiedBatchItem]
    def __init__(self, items: _Optional[_Iterable[_Union[UnifiedBatchItem, _Mapping]]] = ...) -> None: ...

class VerifyInput(_message.Message):
    __slots__ = ("request_id", "input_ids", "kv_cache", "logits_policy", "on_stale", "draft_ids", "parents", "acceptance", "draft_probs", "token_masks", "return_row_handles")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    LOGITS_POLICY_FIELD_NUMBER: _ClassVar[int]
    ON_STALE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PROBS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_MASKS_FIELD_NUMBER: _ClassVar[int]
    RETURN_ROW_HANDLES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    input_ids: _containers.RepeatedScalarFieldContainer[int]
    kv_cache: _types_pb2.KvCacheHandle
    logits_policy: _policy_pb2.LogitsReturnPolicy
    on_stale: _types_pb2.StalePolicy
    draft_ids: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    acceptance: AcceptanceRule
    draft_probs: DraftProbs
    token_masks: _containers.RepeatedCompositeFieldContainer[_policy_pb2.TokenMask]
    return_row_handles: bool
    def __init__(self, request_id: _Optional[str] = ..., input_ids: _Optional[_Iterable[int]] = ..., kv_cache: _Optional[_Union[_types_pb2.KvCacheHandle, _Mapping]] = ..., logits_policy: _Optional[_Union[_policy_pb2.LogitsReturnPolicy, _Mapping]] = ..., on_stale: _Optional[_Union[_types_pb2.StalePolicy, str]] = ..., draft_ids: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., acceptance: _Optional[_Union[AcceptanceRule, str]] = ..., draft_probs: _Optional[_Union[DraftProbs, _Mapping]] = ..., token_masks: _Optional[_Iterable[_Union[_policy_pb2.TokenMask, _Mapping]]] = ..., return_row_handles: _Optional[bool] = ...) -> None: ...

class DraftProbs(_message.Message):
    __slots__ = ("dense", "sparse")
    DENSE_FIELD_NUMBER: _ClassVar[int]
    SPARSE_FIELD_NUMBER: _ClassVar[int]
    dense: _types_pb2.Tensor
    sparse: SparseProbs
    def __init__(self, dense: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ..., sparse: _Optional[_Union[SparseProbs, _Mapping]] = ...) -> None: ...

class SparseProbs(_message.Message):
    __slots__ = ("row_sizes", "token_ids", "probs")
    ROW_SIZES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROBS_FIELD_NUMBER: _ClassVar[int]
    row_sizes: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    probs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, row_sizes: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., probs: _Optional[_Iterable[float]] = ...) -> None: ...

class VerifyOutput(_message.Message):
    __slots__ = ("request_id", "kv_cache", "outputs", "timing", "replayed", "recomputed", "accepted_count", "accepted_indices", "next_token", "row_handles")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_INDICES_FIELD_NUMBER: _ClassVar[int]
    NEXT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ROW_HANDLES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    kv_cache: _types_pb2.KvCacheHandle
    outputs: _policy_pb2.Outputs
    timing: _types_pb2.Timing
    replayed: bool
    recomputed: bool
    accepted_count: int
    accepted_indices: _containers.RepeatedScalarFieldContainer[int]
    next_token: int
    row_handles: _containers.RepeatedCompositeFieldContainer[_types_pb2.KvCacheHandle]
    def __init__(self, request_id: _Optional[str] = ..., kv_cache: _Optional[_Union[_types_pb2.KvCacheHandle, _Mapping]] = ..., outputs: _Optional[_Union[_policy_pb2.Outputs, _Mapping]] = ..., timing: _Optional[_Union[_types_pb2.Timing, _Mapping]] = ..., replayed: _Optional[bool] = ..., recomputed: _Optional[bool] = ..., accepted_count: _Optional[int] = ..., accepted_indices: _Optional[_Iterable[int]] = ..., next_token: _Optional[int] = ..., row_handles: _Optional[_Iterable[_Union[_types_pb2.KvCacheHandle, _Mapping]]] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: _info_pb2.ModelInfo
    def __init__(self, info: _Optional[_Union[_info_pb2.ModelInfo, _Mapping]] = ...) -> None: ...

class GetCapabilitiesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetCapabilitiesResponse(_message.Message):
    __slots__ = ("capabilities",)
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    capabilities: _info_pb2.ExecutorCapabilities
    def __init__(self, capabilities: _Optional[_Union[_info_pb2.ExecutorCapabilities, _Mapping]] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: _info_pb2.ExecutorStatus
    def __init__(self, status: _Optional[_Union[_info_pb2.ExecutorStatus, _Mapping]] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("input",)
    INPUT_FIELD_NUMBER: _ClassVar[int]
    input: PrefillInput
    def __init__(self, input: _Optional[_Union[PrefillInput, _Mapping]] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("output",)
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    output: PrefillOutput
    def __init__(self, output: _Optional[_Union[PrefillOutput, _Mapping]] = ...) -> None: ...

class BatchPrefillRequest(_message.Message):
    __slots__ = ("inputs",)
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    inputs: _containers.RepeatedCompositeFieldContainer[PrefillInput]
    def __init__(self, inputs: _Optional[_Iterable[_Union[PrefillInput, _Mapping]]] = ...) -> None: ...

class BatchPrefillResponse(_message.Message):
    __slots__ = ("results", "free_blocks")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[PrefillResult]
    free_blocks: int
    def __init__(self, results: _Optional[_Iterable[_Union[PrefillResult, _Mapping]]] = ..., free_blocks: _Optional[int] = ...) -> None: ...

class PrefillResult(_message.Message):
    __slots__ = ("output", "error")
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    output: PrefillOutput
    error: _status_pb2.Status
    def __init__(self, output: _Optional[_Union[PrefillOutput, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("input",)
    INPUT_FIELD_NUMBER: _ClassVar[int]
    input: DecodeInput
    def __init__(self, input: _Optional[_Union[DecodeInput, _Mapping]] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("output",)
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    output: DecodeOutput
    def __init__(self, output: _Optional[_Union[DecodeOutput, _Mapping]] = ...) -> None: ...

class BatchDecodeRequest(_message.Message):
    __slots__ = ("inputs",)
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    inputs: _containers.RepeatedCompositeFieldContainer[DecodeInput]
    def __init__(self, inputs: _Optional[_Iterable[_Union[DecodeInput, _Mapping]]] = ...) -> None: ...

class BatchDecodeResponse(_message.Message):
    __slots__ = ("results", "free_blocks")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[DecodeResult]
    free_blocks: int
    def __init__(self, results: _Optional[_Iterable[_Union[DecodeResult, _Mapping]]] = ..., free_blocks: _Optional[int] = ...) -> None: ...

class DecodeResult(_message.Message):
    __slots__ = ("output", "error")
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    output: DecodeOutput
    error: _status_pb2.Status
    def __init__(self, output: _Optional[_Union[DecodeOutput, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class StreamDecodeRequest(_message.Message):
    __slots__ = ("items", "release")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[StreamItem]
    release: _containers.RepeatedCompositeFieldContainer[_types_pb2.KvCacheHandle]
    def __init__(self, items: _Optional[_Iterable[_Union[StreamItem, _Mapping]]] = ..., release: _Optional[_Iterable[_Union[_types_pb2.KvCacheHandle, _Mapping]]] = ...) -> None: ...

class StreamItem(_message.Message):
    __slots__ = ("seq", "decode", "verify", "unified")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    UNIFIED_FIELD_NUMBER: _ClassVar[int]
    seq: int
    decode: DecodeInput
    verify: VerifyInput
    unified: UnifiedBatchItem
    def __init__(self, seq: _Optional[int] = ..., decode: _Optional[_Union[DecodeInput, _Mapping]] = ..., verify: _Optional[_Union[VerifyInput, _Mapping]] = ..., unified: _Optional[_Union[UnifiedBatchItem, _Mapping]] = ...) -> None: ...

class StreamDecodeResponse(_message.Message):
    __slots__ = ("results", "releases", "free_blocks")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[StreamResult]
    releases: _containers.RepeatedCompositeFieldContainer[_cache_pb2.ReleaseResult]
    free_blocks: int
    def __init__(self, results: _Optional[_Iterable[_Union[StreamResult, _Mapping]]] = ..., releases: _Optional[_Iterable[_Union[_cache_pb2.ReleaseResult, _Mapping]]] = ..., free_blocks: _Optional[int] = ...) -> None: ...

class StreamResult(_message.Message):
    __slots__ = ("seq", "decode", "verify", "unified", "error")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    UNIFIED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    seq: int
    decode: DecodeOutput
    verify: VerifyOutput
    unified: PrefillOutput
    error: _status_pb2.Status
    def __init__(self, seq: _Optional[int] = ..., decode: _Optional[_Union[DecodeOutput, _Mapping]] = ..., verify: _Optional[_Union[VerifyOutput, _Mapping]] = ..., unified: _Optional[_Union[PrefillOutput, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class UnifiedDecodeRequest(_message.Message):
    __slots__ = ("batch",)
    BATCH_FIELD_NUMBER: _ClassVar[int]
    batch: UnifiedBatch
    def __init__(self, batch: _Optional[_Union[UnifiedBatch, _Mapping]] = ...) -> None: ...

class UnifiedDecodeResponse(_message.Message):
    __slots__ = ("results", "free_blocks")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[PrefillResult]
    free_blocks: int
    def __init__(self, results: _Optional[_Iterable[_Union[PrefillResult, _Mapping]]] = ..., free_blocks: _Optional[int] = ...) -> None: ...

class ForwardVerifyRequest(_message.Message):
    __slots__ = ("input",)
    INPUT_FIELD_NUMBER: _ClassVar[int]
    input: VerifyInput
    def __init__(self, input: _Optional[_Union[VerifyInput, _Mapping]] = ...) -> None: ...

class ForwardVerifyResponse(_message.Message):
    __slots__ = ("output",)
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    output: VerifyOutput
    def __init__(self, output: _Optional[_Union[VerifyOutput, _Mapping]] = ...) -> None: ...

class ForwardRequest(_message.Message):
    __slots__ = ("request_id", "input_ids", "logits_policy", "hidden_pooling")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGITS_POLICY_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_POOLING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    input_ids: _containers.RepeatedScalarFieldContainer[int]
    logits_policy: _policy_pb2.LogitsReturnPolicy
    hidden_pooling: HiddenPooling
    def __init__(self, request_id: _Optional[str] = ..., input_ids: _Optional[_Iterable[int]] = ..., logits_policy: _Optional[_Union[_policy_pb2.LogitsReturnPolicy, _Mapping]] = ..., hidden_pooling: _Optional[_Union[HiddenPooling, str]] = ...) -> None: ...

class ForwardResponse(_message.Message):
    __slots__ = ("request_id", "first_position", "outputs", "timing", "is_last", "pooled_hidden_state")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    POOLED_HIDDEN_STATE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    first_position: int
    outputs: _policy_pb2.Outputs
    timing: _types_pb2.Timing
    is_last: bool
    pooled_hidden_state: _types_pb2.Tensor
    def __init__(self, request_id: _Optional[str] = ..., first_position: _Optional[int] = ..., outputs: _Optional[_Union[_policy_pb2.Outputs, _Mapping]] = ..., timing: _Optional[_Union[_types_pb2.Timing, _Mapping]] = ..., is_last: _Optional[bool] = ..., pooled_hidden_state: _Optional[_Union[_types_pb2.Tensor, _Mapping]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "input_ids", "kv_cache", "logits_policy", "on_stale", "cache", "max_tokens", "n", "stop_token_ids", "stop_sequences", "stop_strings", "ignore_eos", "return_text", "skip_special_tokens", "include_stop_text")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    LOGITS_POLICY_FIELD_NUMBER: _ClassVar[int]
    ON_STALE_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    RETURN_TEXT_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_TEXT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    input_ids: _containers.RepeatedScalarFieldContainer[int]
    kv_cache: _types_pb2.KvCacheHandle
    logits_policy: _policy_pb2.LogitsReturnPolicy
    on_stale: _types_pb2.StalePolicy
    cache: CacheOptions
    max_tokens: int
    n: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop_sequences: _containers.RepeatedCompositeFieldContainer[_policy_pb2.TokenIdList]
    stop_strings: _containers.RepeatedScalarFieldContainer[str]
    ignore_eos: bool
    return_text: bool
    skip_special_tokens: bool
    include_stop_text: bool
    def __init__(self, request_id: _Optional[str] = ..., input_ids: _Optional[_Iterable[int]] = ..., kv_cache: _Optional[_Union[_types_pb2.KvCacheHandle, _Mapping]] = ..., logits_policy: _Optional[_Union[_policy_pb2.LogitsReturnPolicy, _Mapping]] = ..., on_stale: _Optional[_Union[_types_pb2.StalePolicy, str]] = ..., cache: _Optional[_Union[CacheOptions, _Mapping]] = ..., max_tokens: _Optional[int] = ..., n: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., stop_sequences: _Optional[_Iterable[_Union[_policy_pb2.TokenIdList, _Mapping]]] = ..., stop_strings: _Optional[_Iterable[str]] = ..., ignore_eos: _Optional[bool] = ..., return_text: _Optional[bool] = ..., skip_special_tokens: _Optional[bool] = ..., include_stop_text: _Optional[bool] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "outputs", "timing")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    TIMING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    outputs: _containers.RepeatedCompositeFieldContainer[GenerateOutput]
    timing: _types_pb2.Timing
    def __init__(self, request_id: _Optional[str] = ..., outputs: _Optional[_Iterable[_Union[GenerateOutput, _Mapping]]] = ..., timing: _Optional[_Union[_types_pb2.Timing, _Mapping]] = ...) -> None: ...

class GenerateOutput(_message.Message):
    __slots__ = ("index", "resume_from", "outputs", "finish_reason", "error", "cached_tokens", "text", "replayed")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    RESUME_FROM_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    index: int
    resume_from: _types_pb2.KvCacheHandle
    outputs: _policy_pb2.Outputs
    finish_reason: FinishReason
    error: _status_pb2.Status
    cached_tokens: int
    text: str
    replayed: bool
    def __init__(self, index: _Optional[int] = ..., resume_from: _Optional[_Union[_types_pb2.KvCacheHandle, _Mapping]] = ..., outputs: _Optional[_Union[_policy_pb2.Outputs, _Mapping]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., text: _Optional[str] = ..., replayed: _Optional[bool] = ...) -> None: ...
