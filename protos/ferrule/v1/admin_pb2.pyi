import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WarmupRequest(_message.Message):
    __slots__ = ("batch_sizes",)
    BATCH_SIZES_FIELD_NUMBER: _ClassVar[int]
    batch_sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, batch_sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class WarmupResponse(_message.Message):
    __slots__ = ("run_ns", "batch_sizes", "steps")
    RUN_NS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    run_ns: int
    batch_sizes: _containers.RepeatedScalarFieldContainer[int]
    steps: _containers.RepeatedCompositeFieldContainer[WarmupStep]
    def __init__(self, run_ns: _Optional[int] = ..., batch_sizes: _Optional[_Iterable[int]] = ..., steps: _Optional[_Iterable[_Union[WarmupStep, _Mapping]]] = ...) -> None: ...

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
