"""Single numbers in memory, by address."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from ferrule_server.kernels.cpu.kernel import operation
from ferrule_server.kernels.cpu.lanes import F32, F64, I8, I16, I32, I64, Builder, Value, read, write


def _reader(kind: ir.Type, num_bytes: int, wide: ir.Type = I64, result: types.Type = types.int64) -> Any:
    """Return what reads a number from an address and widens it."""

    @operation(result, types.int64)
    def read_number(builder: Builder, address: Value) -> Value:
        widen = builder.sext if isinstance(kind, ir.IntType) else builder.fpext
        return widen(read(builder, address, kind, num_bytes), wide)

    return read_number


def _writer(kind: ir.Type, num_bytes: int, given: types.Type) -> Any:
    """Return what writes a number to an address after it has been narrowed, rounded to nearest even."""

    @operation(types.void, types.int64, given)
    def write_number(builder: Builder, address: Value, value: Value) -> None:
        narrow = builder.trunc if isinstance(kind, ir.IntType) else builder.fptrunc
        write(builder, narrow(value, kind), address, num_bytes)

    return write_number


read_int8, read_int16, read_int32, read_int64 = (_reader(*kind) for kind in ((I8, 1), (I16, 2), (I32, 4), (I64, 8)))
read_float16, read_float32 = (_reader(*kind, F32, types.float32) for kind in ((ir.HalfType(), 2), (F32, 4)))
read_float64 = _reader(F64, 8, F64, types.float64)
write_int32 = _writer(I32, 4, types.int64)
write_float16, write_float32 = (_writer(*kind, types.float32) for kind in ((ir.HalfType(), 2), (F32, 4)))
write_float64 = _writer(F64, 4, types.float64)


@operation(types.float32, types.int64)
def read_bfloat16(builder: Builder, address: Value) -> Value:
    """Return the bfloat16 number at an address as float32."""
    bits = builder.zext(read(builder, address, I16, 2), I32)
    return builder.bitcast(builder.shl(bits, ir.Constant(I32, 16)), F32)


@operation(types.float32, types.float32)
def round_to_float16(builder: Builder, value: Value) -> Value:
    """Return a number rounded to float16, to nearest even; infinite beyond its range."""
    return builder.fpext(builder.fptrunc(value, ir.HalfType()), F32)


@operation(types.void, types.int64, types.float32)
def write_bfloat16(builder: Builder, address: Value, value: Value) -> None:
    """Write the upper half of a float32 number to an address."""
    bits = builder.lshr(builder.bitcast(value, I32), ir.Constant(I32, 16))
    write(builder, builder.trunc(bits, I16), address, 2)
