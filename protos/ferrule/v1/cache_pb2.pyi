import datetime

from ferrule.v1 import types_pb2 as _types_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.rpc import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ForkCacheRequest(_message.Message):
    __slots__ = ("kv_cache", "count", "request_id", "length", "ttl")
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    kv_cache: _types_pb2.KvCacheHandle
    count: int
    request_id: str
    length: int
    ttl: _duration_pb2.Duration
    def __init__(self, kv_cache: _Optional[_Union[_types_pb2.KvCacheHandle, _Mapping]] = ..., count: _Optional[int] = ..., request_id: _Optional[str] = ..., length: _Optional[int] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ForkCacheResponse(_message.Message):
    __slots__ = ("kv_caches", "ttl", "replayed")
    KV_CACHES_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    kv_caches: _containers.RepeatedCompositeFieldContainer[_types_pb2.KvCacheHandle]
    ttl: _duration_pb2.Duration
    replayed: bool
    def __init__(self, kv_caches: _Optional[_Iterable[_Union[_types_pb2.KvCacheHandle, _Mapping]]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., replayed: _Optional[bool] = ...) -> None: ...

class TruncateKvRequest(_message.Message):
    __slots__ = ("kv_cache", "new_length")
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    NEW_LENGTH_FIELD_NUMBER: _ClassVar[int]
    kv_cache: _types_pb2.KvCacheHandle
    new_length: int
    def __init__(self, kv_cache: _Optional[_Union[_types_pb2.KvCacheHandle, _Mapping]] = ..., new_length: _Optional[int] = ...) -> None: ...

class TruncateKvResponse(_message.Message):
    __slots__ = ("kv_cache", "freed_blocks")
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    FREED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    kv_cache: _types_pb2.KvCacheHandle
    freed_blocks: int
    def __init__(self, kv_cache: _Optional[_Union[_types_pb2.KvCacheHandle, _Mapping]] = ..., freed_blocks: _Optional[int] = ...) -> None: ...

class ReserveKvSlotsRequest(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[KvSlotRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[KvSlotRequest, _Mapping]]] = ...) -> None: ...

class KvSlotRequest(_message.Message):
    __slots__ = ("kv_cache", "target_length", "admission_target_length")
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    TARGET_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ADMISSION_TARGET_LENGTH_FIELD_NUMBER: _ClassVar[int]
    kv_cache: _types_pb2.KvCacheHandle
    target_length: int
    admission_target_length: int
    def __init__(self, kv_cache: _Optional[_Union[_types_pb2.KvCacheHandle, _Mapping]] = ..., target_length: _Optional[int] = ..., admission_target_length: _Optional[int] = ...) -> None: ...

class ReserveKvSlotsResponse(_message.Message):
    __slots__ = ("reservation",)
    RESERVATION_FIELD_NUMBER: _ClassVar[int]
    reservation: KvSlotReservation
    def __init__(self, reservation: _Optional[_Union[KvSlotReservation, _Mapping]] = ...) -> None: ...

class KvSlotReservation(_message.Message):
    __slots__ = ("block_size", "total_blocks", "free_blocks_before", "free_blocks_after", "allocations")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_AFTER_FIELD_NUMBER: _ClassVar[int]
    ALLOCATIONS_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    total_blocks: int
    free_blocks_before: int
    free_blocks_after: int
    allocations: _containers.RepeatedCompositeFieldContainer[KvSlotAllocation]
    def __init__(self, block_size: _Optional[int] = ..., total_blocks: _Optional[int] = ..., free_blocks_before: _Optional[int] = ..., free_blocks_after: _Optional[int] = ..., allocations: _Optional[_Iterable[_Union[KvSlotAllocation, _Mapping]]] = ...) -> None: ...

class KvSlotAllocation(_message.Message):
    __slots__ = ("blocks_before", "blocks_after", "new_blocks")
    BLOCKS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_AFTER_FIELD_NUMBER: _ClassVar[int]
    NEW_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks_before: int
    blocks_after: int
    new_blocks: int
    def __init__(self, blocks_before: _Optional[int] = ..., blocks_after: _Optional[int] = ..., new_blocks: _Optional[int] = ...) -> None: ...

class ReleaseCacheRequest(_message.Message):
    __slots__ = ("kv_caches",)
    KV_CACHES_FIELD_NUMBER: _ClassVar[int]
    kv_caches: _containers.RepeatedCompositeFieldContainer[_types_pb2.KvCacheHandle]
    def __init__(self, kv_caches: _Optional[_Iterable[_Union[_types_pb2.KvCacheHandle, _Mapping]]] = ...) -> None: ...

class ReleaseCacheResponse(_message.Message):
    __slots__ = ("results", "freed_blocks")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    FREED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ReleaseResult]
    freed_blocks: int
    def __init__(self, results: _Optional[_Iterable[_Union[ReleaseResult, _Mapping]]] = ..., freed_blocks: _Optional[int] = ...) -> None: ...

class ReleaseResult(_message.Message):
    __slots__ = ("handle_id", "released")
    HANDLE_ID_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    handle_id: str
    released: bool
    def __init__(self, handle_id: _Optional[str] = ..., released: _Optional[bool] = ...) -> None: ...

class KeepAliveRequest(_message.Message):
    __slots__ = ("kv_caches", "ttl")
    KV_CACHES_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    kv_caches: _containers.RepeatedCompositeFieldContainer[_types_pb2.KvCacheHandle]
    ttl: _duration_pb2.Duration
    def __init__(self, kv_caches: _Optional[_Iterable[_Union[_types_pb2.KvCacheHandle, _Mapping]]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class KeepAliveResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[KeepAliveResult]
    def __init__(self, results: _Optional[_Iterable[_Union[KeepAliveResult, _Mapping]]] = ...) -> None: ...

class KeepAliveResult(_message.Message):
    __slots__ = ("lease", "error")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    lease: Lease
    error: _status_pb2.Status
    def __init__(self, lease: _Optional[_Union[Lease, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("ttl", "expires_in")
    TTL_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_FIELD_NUMBER: _ClassVar[int]
    ttl: _duration_pb2.Duration
    expires_in: _duration_pb2.Duration
    def __init__(self, ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., expires_in: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class GetCacheInfoRequest(_message.Message):
    __slots__ = ("kv_cache", "include_token_ids", "include_blocks")
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    kv_cache: _types_pb2.KvCacheHandle
    include_token_ids: bool
    include_blocks: bool
    def __init__(self, kv_cache: _Optional[_Union[_types_pb2.KvCacheHandle, _Mapping]] = ..., include_token_ids: _Optional[bool] = ..., include_blocks: _Optional[bool] = ...) -> None: ...

class GetCacheInfoResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: CacheInfo
    def __init__(self, info: _Optional[_Union[CacheInfo, _Mapping]] = ...) -> None: ...

class CacheInfo(_message.Message):
    __slots__ = ("summary", "kv_cache", "token_ids", "block_ids", "block_ref_counts")
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_REF_COUNTS_FIELD_NUMBER: _ClassVar[int]
    summary: CacheSummary
    kv_cache: _types_pb2.KvCacheHandle
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    block_ref_counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, summary: _Optional[_Union[CacheSummary, _Mapping]] = ..., kv_cache: _Optional[_Union[_types_pb2.KvCacheHandle, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., block_ids: _Optional[_Iterable[int]] = ..., block_ref_counts: _Optional[_Iterable[int]] = ...) -> None: ...

class ListCachesRequest(_message.Message):
    __slots__ = ("page_size", "page_token", "with_handles")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    WITH_HANDLES_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    with_handles: bool
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., with_handles: _Optional[bool] = ...) -> None: ...

class ListCachesResponse(_message.Message):
    __slots__ = ("caches", "next_page_token")
    CACHES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    caches: _containers.RepeatedCompositeFieldContainer[CacheSummary]
    next_page_token: str
    def __init__(self, caches: _Optional[_Iterable[_Union[CacheSummary, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class CacheSummary(_message.Message):
    __slots__ = ("handle_id", "length", "num_blocks", "num_shared_blocks", "kv_bytes", "reserved_length", "lease", "create_time", "first_position", "lowest_length", "durability", "tokens_to_recompute", "kv_cache")
    HANDLE_ID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    CREATE_TIME_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    LOWEST_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_TO_RECOMPUTE_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_FIELD_NUMBER: _ClassVar[int]
    handle_id: str
    length: int
    num_blocks: int
    num_shared_blocks: int
    kv_bytes: int
    reserved_length: int
    lease: Lease
    create_time: _timestamp_pb2.Timestamp
    first_position: int
    lowest_length: int
    durability: _types_pb2.Durability
    tokens_to_recompute: int
    kv_cache: _types_pb2.KvCacheHandle
    def __init__(self, handle_id: _Optional[str] = ..., length: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_shared_blocks: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., reserved_length: _Optional[int] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ..., create_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., first_position: _Optional[int] = ..., lowest_length: _Optional[int] = ..., durability: _Optional[_Union[_types_pb2.Durability, str]] = ..., tokens_to_recompute: _Optional[int] = ..., kv_cache: _Optional[_Union[_types_pb2.KvCacheHandle, _Mapping]] = ...) -> None: ...

class RegisterTokenMaskRequest(_message.Message):
    __slots__ = ("masks",)
    MASKS_FIELD_NUMBER: _ClassVar[int]
    masks: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, masks: _Optional[_Iterable[bytes]] = ...) -> None: ...

class RegisterTokenMaskResponse(_message.Message):
    __slots__ = ("fingerprints",)
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    fingerprints: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, fingerprints: _Optional[_Iterable[bytes]] = ...) -> None: ...

class GetCacheMetricsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetCacheMetricsResponse(_message.Message):
    __slots__ = ("metrics",)
    METRICS_FIELD_NUMBER: _ClassVar[int]
    metrics: CacheMetrics
    def __init__(self, metrics: _Optional[_Union[CacheMetrics, _Mapping]] = ...) -> None: ...

class CacheMetrics(_message.Message):
    __slots__ = ("empty_blocks", "cached_blocks", "used_blocks", "shared_blocks", "tombstones", "num_created", "num_forks", "num_truncates", "num_released", "num_expired", "num_block_copies", "num_prefix_lookup_tokens", "num_prefix_hit_tokens", "num_prefix_evictions", "num_exhausted", "num_replays", "num_stale", "token_masks", "token_mask_bytes", "num_given_back")
    EMPTY_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOMBSTONES_FIELD_NUMBER: _ClassVar[int]
    NUM_CREATED_FIELD_NUMBER: _ClassVar[int]
    NUM_FORKS_FIELD_NUMBER: _ClassVar[int]
    NUM_TRUNCATES_FIELD_NUMBER: _ClassVar[int]
    NUM_RELEASED_FIELD_NUMBER: _ClassVar[int]
    NUM_EXPIRED_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCK_COPIES_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_LOOKUP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXHAUSTED_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLAYS_FIELD_NUMBER: _ClassVar[int]
    NUM_STALE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_MASKS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_MASK_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_GIVEN_BACK_FIELD_NUMBER: _ClassVar[int]
    empty_blocks: int
    cached_blocks: int
    used_blocks: int
    shared_blocks: int
    tombstones: int
    num_created: int
    num_forks: int
    num_truncates: int
    num_released: int
    num_expired: int
    num_block_copies: int
    num_prefix_lookup_tokens: int
    num_prefix_hit_tokens: int
    num_prefix_evictions: int
    num_exhausted: int
    num_replays: int
    num_stale: int
    token_masks: int
    token_mask_bytes: int
    num_given_back: int
    def __init__(self, empty_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., used_blocks: _Optional[int] = ..., shared_blocks: _Optional[int] = ..., tombstones: _Optional[int] = ..., num_created: _Optional[int] = ..., num_forks: _Optional[int] = ..., num_truncates: _Optional[int] = ..., num_released: _Optional[int] = ..., num_expired: _Optional[int] = ..., num_block_copies: _Optional[int] = ..., num_prefix_lookup_tokens: _Optional[int] = ..., num_prefix_hit_tokens: _Optional[int] = ..., num_prefix_evictions: _Optional[int] = ..., num_exhausted: _Optional[int] = ..., num_replays: _Optional[int] = ..., num_stale: _Optional[int] = ..., token_masks: _Optional[int] = ..., token_mask_bytes: _Optional[int] = ..., num_given_back: _Optional[int] = ...) -> None: ...
