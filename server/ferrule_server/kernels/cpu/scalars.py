"""Single numbers in memory, by address."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ferrule_server.kernels.cpu.lanes import F32, I8, I16, I32, I64, Builder, Value, read, write


@intrinsic
def read_int32(typing: Any, address: Any) -> Any:
    """Return the int32 number at an address as int64."""
    return types.int64(types.int64), lambda _c, b, _s, a: b.sext(read(b, a[0], I32, 4), I64)


@intrinsic
def read_int8(typing: Any, address: Any) -> Any:
    """Return the int8 number at an address as int64."""
    return types.int64(types.int64), lambda _c, b, _s, a: b.sext(read(b, a[0], I8, 1), I64)


@intrinsic
def read_int64(typing: Any, address: Any) -> Any:
    """Return the int64 number at an address."""
    return types.int64(types.int64), lambda _c, b, _s, a: read(b, a[0], I64, 8)


@intrinsic
def read_float32(typing: Any, address: Any) -> Any:
    """Return the float32 number at an address."""
    return types.float32(types.int64), lambda _c, b, _s, a: read(b, a[0], F32, 4)


@intrinsic
def read_bfloat16(typing: Any, address: Any) -> Any:
    """Return the bfloat16 number at an address as float32."""

    def emit(_context: Any, builder: Builder, _signature: Any, args: Any) -> Value:
        bits = builder.zext(read(builder, args[0], I16, 2), I32)
        return builder.bitcast(builder.shl(bits, ir.Constant(I32, 16)), F32)

    return types.float32(types.int64), emit


@intrinsic
def write_bfloat16(typing: Any, address: Any, value: Any) -> Any:
    """Write the upper half of a float32 number to an address."""

    def emit(context: Any, builder: Builder, _signature: Any, args: Any) -> Value:
        bits = builder.lshr(builder.bitcast(args[1], I32), ir.Constant(I32, 16))
        write(builder, builder.trunc(bits, I16), args[0], 2)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), emit


@intrinsic
def write_float32(typing: Any, address: Any, value: Any) -> Any:
    """Write a float32 number to an address."""
    return types.void(types.int64, types.float32), _write


@intrinsic
def write_float64(typing: Any, address: Any, value: Any) -> Any:
    """Write a float64 number to an address."""
    return types.void(types.int64, types.float64), _write


@intrinsic
def write_int32(typing: Any, address: Any, value: Any) -> Any:
    """Write an int64 number to an address as int32."""

    def emit(context: Any, builder: Builder, signature: Any, args: Any) -> Value:
        return _write(context, builder, signature, (args[0], builder.trunc(args[1], I32)))

    return types.void(types.int64, types.int64), emit


def _write(context: Any, builder: Builder, _signature: Any, args: Any) -> Value:
    write(builder, args[1], args[0], 4)
    return context.get_dummy_value()
