"""Single numbers in memory, by address."""

from __future__ import annotations

from llvmlite import ir
from numba import types

from ferrule_server.kernels.cpu.kernel import operation
from ferrule_server.kernels.cpu.lanes import F32, F64, I8, I16, I32, I64, Builder, Value, read, write


@operation(types.int64, types.int64)
def read_int32(builder: Builder, address: Value) -> Value:
    """Return the int32 number at an address as int64."""
    return builder.sext(read(builder, address, I32, 4), I64)


@operation(types.int64, types.int64)
def read_int16(builder: Builder, address: Value) -> Value:
    """Return the int16 number at an address as int64."""
    return builder.sext(read(builder, address, I16, 2), I64)


@operation(types.int64, types.int64)
def read_int8(builder: Builder, address: Value) -> Value:
    """Return the int8 number at an address as int64."""
    return builder.sext(read(builder, address, I8, 1), I64)


@operation(types.int64, types.int64)
def read_int64(builder: Builder, address: Value) -> Value:
    """Return the int64 number at an address."""
    return read(builder, address, I64, 8)


@operation(types.float32, types.int64)
def read_float32(builder: Builder, address: Value) -> Value:
    """Return the float32 number at an address."""
    return read(builder, address, F32, 4)


@operation(types.float64, types.int64)
def read_float64(builder: Builder, address: Value) -> Value:
    """Return the float64 number at an address."""
    return read(builder, address, F64, 8)


@operation(types.float32, types.int64)
def read_float16(builder: Builder, address: Value) -> Value:
    """Return the float16 number at an address as float32."""
    return builder.fpext(read(builder, address, ir.HalfType(), 2), F32)


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
def write_float16(builder: Builder, address: Value, value: Value) -> None:
    """Write a number, rounded to float16, to an address."""
    write(builder, builder.fptrunc(value, ir.HalfType()), address, 2)


@operation(types.void, types.int64, types.float32)
def write_bfloat16(builder: Builder, address: Value, value: Value) -> None:
    """Write the upper half of a float32 number to an address."""
    bits = builder.lshr(builder.bitcast(value, I32), ir.Constant(I32, 16))
    write(builder, builder.trunc(bits, I16), address, 2)


@operation(types.void, types.int64, types.float32)
def write_float32(builder: Builder, address: Value, value: Value) -> None:
    """Write a float32 number to an address."""
    write(builder, value, address, 4)


@operation(types.void, types.int64, types.float64)
def write_float64(builder: Builder, address: Value, value: Value) -> None:
    """Write a float64 number to an address."""
    write(builder, value, address, 4)


@operation(types.void, types.int64, types.int64)
def write_int32(builder: Builder, address: Value, value: Value) -> None:
    """Write an int64 number to an address as int32."""
    write(builder, builder.trunc(value, I32), address, 4)
