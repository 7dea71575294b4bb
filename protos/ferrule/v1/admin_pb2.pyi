import datetime

from ferrule.v1 import cache_pb2 as _cache_pb2
from ferrule.v1 import info_pb2 as _info_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JournalState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOURNAL_STATE_UNSPECIFIED: _ClassVar[JournalState]
    JOURNAL_STATE_HEALTHY: _ClassVar[JournalState]
    JOURNAL_STATE_LOST: _ClassVar[JournalState]
JOURNAL_STATE_UNSPECIFIED: JournalState
JOURNAL_STATE_HEALTHY: JournalState
JOURNAL_STATE_LOST: JournalState

class WarmupRequest(_message.Message):
    __slots__ = ("batch_sizes",)
    BATCH_SIZES_FIELD_NUMBER: _ClassVar[int]
    batch_sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, batch_sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class WarmupResponse(_message.Message):
    __slots__ = ("batch_sizes", "steps")
    BATCH_SIZES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    batch_sizes: _containers.RepeatedScalarFieldContainer[int]
    steps: _containers.RepeatedCompositeFieldContainer[WarmupStep]
    def __init__(self, batch_sizes: _Optional[_Iterable[int]] = ..., steps: _Optional[_Iterable[_Union[WarmupStep, _Mapping]]] = ...) -> None: ...

class WarmupStep(_message.Message):
    __slots__ = ("num_sequences", "num_rows", "run_ns")
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    RUN_NS_FIELD_NUMBER: _ClassVar[int]
    num_sequences: int
    num_rows: int
    run_ns: int
    def __init__(self, num_sequences: _Optional[int] = ..., num_rows: _Optional[int] = ..., run_ns: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace",)
    GRACE_FIELD_NUMBER: _ClassVar[int]
    grace: _duration_pb2.Duration
    def __init__(self, grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("live_sequences", "pending_jobs")
    LIVE_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PENDING_JOBS_FIELD_NUMBER: _ClassVar[int]
    live_sequences: int
    pending_jobs: int
    def __init__(self, live_sequences: _Optional[int] = ..., pending_jobs: _Optional[int] = ...) -> None: ...

class ShutdownRequest(_message.Message):
    __slots__ = ("grace",)
    GRACE_FIELD_NUMBER: _ClassVar[int]
    grace: _duration_pb2.Duration
    def __init__(self, grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ShutdownResponse(_message.Message):
    __slots__ = ("live_sequences",)
    LIVE_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    live_sequences: int
    def __init__(self, live_sequences: _Optional[int] = ...) -> None: ...

class GetServerViewRequest(_message.Message):
    __slots__ = ("max_cells", "max_sequences", "max_principals")
    MAX_CELLS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_PRINCIPALS_FIELD_NUMBER: _ClassVar[int]
    max_cells: int
    max_sequences: int
    max_principals: int
    def __init__(self, max_cells: _Optional[int] = ..., max_sequences: _Optional[int] = ..., max_principals: _Optional[int] = ...) -> None: ...

class GetServerViewResponse(_message.Message):
    __slots__ = ("view",)
    VIEW_FIELD_NUMBER: _ClassVar[int]
    view: ServerView
    def __init__(self, view: _Optional[_Union[ServerView, _Mapping]] = ...) -> None: ...

class ServerView(_message.Message):
    __slots__ = ("time", "uptime", "status", "cache_metrics", "running_appends", "queued_jobs", "num_step_rows", "step_ns", "num_refused", "block_map", "sequences", "principals", "known_principals", "step_times", "queue_times", "first_token_times", "inter_token_times", "decode_times", "journal_state", "durable_sequences", "cold_sequences", "tokens_to_recompute", "sync_times")
    class NumRefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TIME_FIELD_NUMBER: _ClassVar[int]
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    CACHE_METRICS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_APPENDS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_JOBS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEP_ROWS_FIELD_NUMBER: _ClassVar[int]
    STEP_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_MAP_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PRINCIPALS_FIELD_NUMBER: _ClassVar[int]
    KNOWN_PRINCIPALS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIMES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_TIMES_FIELD_NUMBER: _ClassVar[int]
    INTER_TOKEN_TIMES_FIELD_NUMBER: _ClassVar[int]
    DECODE_TIMES_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_STATE_FIELD_NUMBER: _ClassVar[int]
    DURABLE_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    COLD_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_TO_RECOMPUTE_FIELD_NUMBER: _ClassVar[int]
    SYNC_TIMES_FIELD_NUMBER: _ClassVar[int]
    time: _timestamp_pb2.Timestamp
    uptime: _duration_pb2.Duration
    status: _info_pb2.ExecutorStatus
    cache_metrics: _cache_pb2.CacheMetrics
    running_appends: int
    queued_jobs: int
    num_step_rows: int
    step_ns: int
    num_refused: _containers.ScalarMap[str, int]
    block_map: BlockMap
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceView]
    principals: _containers.RepeatedCompositeFieldContainer[PrincipalView]
    known_principals: int
    step_times: Histogram
    queue_times: Histogram
    first_token_times: Histogram
    inter_token_times: Histogram
    decode_times: Histogram
    journal_state: JournalState
    durable_sequences: int
    cold_sequences: int
    tokens_to_recompute: int
    sync_times: Histogram
    def __init__(self, time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., uptime: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., status: _Optional[_Union[_info_pb2.ExecutorStatus, _Mapping]] = ..., cache_metrics: _Optional[_Union[_cache_pb2.CacheMetrics, _Mapping]] = ..., running_appends: _Optional[int] = ..., queued_jobs: _Optional[int] = ..., num_step_rows: _Optional[int] = ..., step_ns: _Optional[int] = ..., num_refused: _Optional[_Mapping[str, int]] = ..., block_map: _Optional[_Union[BlockMap, _Mapping]] = ..., sequences: _Optional[_Iterable[_Union[SequenceView, _Mapping]]] = ..., principals: _Optional[_Iterable[_Union[PrincipalView, _Mapping]]] = ..., known_principals: _Optional[int] = ..., step_times: _Optional[_Union[Histogram, _Mapping]] = ..., queue_times: _Optional[_Union[Histogram, _Mapping]] = ..., first_token_times: _Optional[_Union[Histogram, _Mapping]] = ..., inter_token_times: _Optional[_Union[Histogram, _Mapping]] = ..., decode_times: _Optional[_Union[Histogram, _Mapping]] = ..., journal_state: _Optional[_Union[JournalState, str]] = ..., durable_sequences: _Optional[int] = ..., cold_sequences: _Optional[int] = ..., tokens_to_recompute: _Optional[int] = ..., sync_times: _Optional[_Union[Histogram, _Mapping]] = ...) -> None: ...

class BlockMap(_message.Message):
    __slots__ = ("cell_blocks", "cells", "fill", "num_shared")
    CELL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    FILL_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARED_FIELD_NUMBER: _ClassVar[int]
    cell_blocks: int
    cells: bytes
    fill: bytes
    num_shared: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, cell_blocks: _Optional[int] = ..., cells: _Optional[bytes] = ..., fill: _Optional[bytes] = ..., num_shared: _Optional[_Iterable[int]] = ...) -> None: ...

class SequenceView(_message.Message):
    __slots__ = ("summary", "parent_handle_id", "principal", "num_pending", "is_appending")
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    PARENT_HANDLE_ID_FIELD_NUMBER: _ClassVar[int]
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    NUM_PENDING_FIELD_NUMBER: _ClassVar[int]
    IS_APPENDING_FIELD_NUMBER: _ClassVar[int]
    summary: _cache_pb2.CacheSummary
    parent_handle_id: str
    principal: str
    num_pending: int
    is_appending: bool
    def __init__(self, summary: _Optional[_Union[_cache_pb2.CacheSummary, _Mapping]] = ..., parent_handle_id: _Optional[str] = ..., principal: _Optional[str] = ..., num_pending: _Optional[int] = ..., is_appending: _Optional[bool] = ...) -> None: ...

class PrincipalView(_message.Message):
    __slots__ = ("principal", "live_sequences", "kv_tokens", "queued_jobs", "queued_rows", "num_appends", "num_tokens", "queue_ns", "run_ns")
    PRINCIPAL_FIELD_NUMBER: _ClassVar[int]
    LIVE_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_JOBS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_APPENDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    RUN_NS_FIELD_NUMBER: _ClassVar[int]
    principal: str
    live_sequences: int
    kv_tokens: int
    queued_jobs: int
    queued_rows: int
    num_appends: int
    num_tokens: int
    queue_ns: int
    run_ns: int
    def __init__(self, principal: _Optional[str] = ..., live_sequences: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., queued_jobs: _Optional[int] = ..., queued_rows: _Optional[int] = ..., num_appends: _Optional[int] = ..., num_tokens: _Optional[int] = ..., queue_ns: _Optional[int] = ..., run_ns: _Optional[int] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("upper_bounds_ns", "counts", "sum_ns")
    UPPER_BOUNDS_NS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_NS_FIELD_NUMBER: _ClassVar[int]
    upper_bounds_ns: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum_ns: int
    def __init__(self, upper_bounds_ns: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., sum_ns: _Optional[int] = ...) -> None: ...
