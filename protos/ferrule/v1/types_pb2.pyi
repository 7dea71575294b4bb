from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_TYPE_UNSPECIFIED: _ClassVar[DataType]
    DATA_TYPE_FLOAT32: _ClassVar[DataType]
    DATA_TYPE_BFLOAT16: _ClassVar[DataType]
    DATA_TYPE_FLOAT16: _ClassVar[DataType]
    DATA_TYPE_INT8: _ClassVar[DataType]
    DATA_TYPE_INT4: _ClassVar[DataType]
    DATA_TYPE_FLOAT8_E4M3: _ClassVar[DataType]
    DATA_TYPE_UINT8: _ClassVar[DataType]
    DATA_TYPE_INT32: _ClassVar[DataType]
    DATA_TYPE_INT64: _ClassVar[DataType]

class StalePolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STALE_POLICY_UNSPECIFIED: _ClassVar[StalePolicy]
    STALE_POLICY_FAIL: _ClassVar[StalePolicy]
    STALE_POLICY_FORK: _ClassVar[StalePolicy]
    STALE_POLICY_REWIND: _ClassVar[StalePolicy]

class Durability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DURABILITY_UNSPECIFIED: _ClassVar[Durability]
    DURABILITY_NONE: _ClassVar[Durability]
    DURABILITY_JOURNALED: _ClassVar[Durability]

class LogitsPositions(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOGITS_POSITIONS_UNSPECIFIED: _ClassVar[LogitsPositions]
    LOGITS_POSITIONS_LAST: _ClassVar[LogitsPositions]
    LOGITS_POSITIONS_ALL: _ClassVar[LogitsPositions]

class DeviceType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DEVICE_TYPE_UNSPECIFIED: _ClassVar[DeviceType]
    DEVICE_TYPE_CPU: _ClassVar[DeviceType]
    DEVICE_TYPE_CUDA: _ClassVar[DeviceType]
DATA_TYPE_UNSPECIFIED: DataType
DATA_TYPE_FLOAT32: DataType
DATA_TYPE_BFLOAT16: DataType
DATA_TYPE_FLOAT16: DataType
DATA_TYPE_INT8: DataType
DATA_TYPE_INT4: DataType
DATA_TYPE_FLOAT8_E4M3: DataType
DATA_TYPE_UINT8: DataType
DATA_TYPE_INT32: DataType
DATA_TYPE_INT64: DataType
STALE_POLICY_UNSPECIFIED: StalePolicy
STALE_POLICY_FAIL: StalePolicy
STALE_POLICY_FORK: StalePolicy
STALE_POLICY_REWIND: StalePolicy
DURABILITY_UNSPECIFIED: Durability
DURABILITY_NONE: Durability
DURABILITY_JOURNALED: Durability
LOGITS_POSITIONS_UNSPECIFIED: LogitsPositions
LOGITS_POSITIONS_LAST: LogitsPositions
LOGITS_POSITIONS_ALL: LogitsPositions
DEVICE_TYPE_UNSPECIFIED: DeviceType
DEVICE_TYPE_CPU: DeviceType
DEVICE_TYPE_CUDA: DeviceType

class KvCacheHandle(_message.Message):
    __slots__ = ("cache_id", "length", "lineage", "instance", "handle_id")
    CACHE_ID_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    HANDLE_ID_FIELD_NUMBER: _ClassVar[int]
    cache_id: str
    length: int
    lineage: bytes
    instance: str
    handle_id: str
    def __init__(self, cache_id: _Optional[str] = ..., length: _Optional[int] = ..., lineage: _Optional[bytes] = ..., instance: _Optional[str] = ..., handle_id: _Optional[str] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[_Union[DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("queue_ns", "run_ns", "step_rows")
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    RUN_NS_FIELD_NUMBER: _ClassVar[int]
    STEP_ROWS_FIELD_NUMBER: _ClassVar[int]
    queue_ns: int
    run_ns: int
    step_rows: int
    def __init__(self, queue_ns: _Optional[int] = ..., run_ns: _Optional[int] = ..., step_rows: _Optional[int] = ...) -> None: ...
