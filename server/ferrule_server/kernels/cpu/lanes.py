"""Vectors of 16 float32 lanes as a type of Numba: what the kernels compute with.

A vector is one register with AVX512, two with AVX2, four with NEON. Each operation here is one operation of LLVM on all
lanes, never a sum whose order the compiler may choose, so a kernel gives the same bits on every processor with fused
multiply-add. Addresses are int64: a kernel knows the layout of its memory, and a step unboxes no arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import models, register_model

from ferrule_server.kernels.cpu.kernel import operation

LANES: Final = 16

# LLVM's builder and Numba's typing have no types of their own.
Builder = Any
Value = Any

I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
F32 = ir.FloatType()
F64 = ir.DoubleType()
F32X16 = ir.VectorType(F32, LANES)
I16X16 = ir.VectorType(I16, LANES)
I16X32 = ir.VectorType(I16, 2 * LANES)
I32X16 = ir.VectorType(I32, LANES)


class LanesType(types.Type):
    """The Numba type of 16 float32 lanes."""

    def __init__(self) -> None:
        super().__init__("lanes")


lanes = LanesType()


@register_model(LanesType)
class _LanesModel(models.PrimitiveModel):
    """Lanes are one LLVM vector."""

    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, F32X16)


# ---- pieces of code, shared with the kernels that are written as LLVM code -------------------------------------------


def call(builder: Builder, name: str, result: Value, args: list[Value]) -> Value:
    """Return what an LLVM intrinsic returns for some values."""
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, [arg.type for arg in args]), name)
    return builder.call(function, args)


def pointer(builder: Builder, address: Value, kind: Value) -> Value:
    """Return an address as a pointer to a type.

    An address is a sum, and LLVM may take any part of it for the base of the pointer. If that part is 0, LLVM would
    drop the whole branch as an access to null, so the function says that null is an address like others. (llvmlite does
    not list this attribute of LLVM, hence the call past its check.)
    """
    set.add(builder.function.attributes, "null_pointer_is_valid")
    return builder.inttoptr(address, kind.as_pointer())


def offset(builder: Builder, address: Value, num_bytes: int) -> Value:
    """Return an address that is a fixed number of bytes further on."""
    return builder.add(address, ir.Constant(I64, num_bytes))


def advance(builder: Builder, address: Value, value: Value, times: int) -> Value:
    """Return an address that is a value times a fixed number further on."""
    return builder.add(address, builder.mul(value, ir.Constant(I64, times)))


def read(builder: Builder, address: Value, kind: Value, align: int) -> Value:
    """Return a value of some type in memory."""
    value = builder.load(pointer(builder, address, kind))
    value.align = align
    return value


def write(builder: Builder, value: Value, address: Value, align: int) -> None:
    """Write a value to memory."""
    builder.store(value, pointer(builder, address, value.type)).align = align


def constant(value: float) -> Value:
    """Return a vector with one number in all lanes."""
    return ir.Constant(F32X16, [value] * LANES)


def integers(value: int) -> Value:
    """Return an int32 vector with one number in all lanes."""
    return ir.Constant(I32X16, [value] * LANES)


def spread(builder: Builder, value: Value, kind: Value) -> Value:
    """Return a vector with one value in all lanes."""
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count))


def widen(builder: Builder, halves: Value) -> Value:
    """Return the float32 lanes of 16 bfloat16 numbers in an int16 vector; exact."""
    return builder.bitcast(builder.shl(builder.zext(halves, I32X16), integers(16)), F32X16)


def even_halves(builder: Builder, pairs: Value) -> Value:
    """Return the first of the two bfloat16 numbers in each lane of an int32 vector, as float32; exact."""
    return builder.bitcast(builder.shl(pairs, integers(16)), F32X16)


def odd_halves(builder: Builder, pairs: Value) -> Value:
    """Return the second of the two bfloat16 numbers in each lane of an int32 vector, as float32; exact."""
    return builder.bitcast(builder.and_(pairs, integers(-65536)), F32X16)


def _rounded_bits(builder: Builder, x: Value) -> Value:
    """Return the int32 bits of float32 lanes rounded to bfloat16, to nearest even; NaN stays NaN."""
    bits = builder.bitcast(x, I32X16)
    is_odd = builder.and_(builder.lshr(bits, integers(16)), integers(1))
    rounded = builder.add(bits, builder.add(is_odd, integers(0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", x, x)
    return builder.select(is_nan, builder.or_(bits, integers(0x400000)), rounded)


# ---- operations ------------------------------------------------------------------------------------------------------


@operation(lanes, types.int64)
def load(builder: Builder, address: Value) -> Value:
    """Return 16 float32 numbers at an address."""
    return read(builder, address, F32X16, 4)


@operation(lanes, types.int64)
def load_bfloat16(builder: Builder, address: Value) -> Value:
    """Return 16 bfloat16 numbers at an address."""
    return widen(builder, read(builder, address, I16X16, 2))


@operation(types.void, types.int64, lanes)
def store(builder: Builder, address: Value, x: Value) -> None:
    """Write 16 float32 numbers to an address."""
    write(builder, x, address, 4)


@operation(types.void, types.int64, lanes)
def store_past_caches(builder: Builder, address: Value, x: Value) -> None:
    """Write 16 float32 numbers to a cache line of which nothing is read before the next barrier."""
    done = builder.store(x, pointer(builder, address, F32X16))
    done.align = 64
    done.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(I32, 1)]))


@operation(types.void, types.int64, lanes)
def store_bfloat16(builder: Builder, address: Value, x: Value) -> None:
    """Write 16 numbers to an address, rounded to bfloat16."""
    write(builder, builder.trunc(builder.lshr(_rounded_bits(builder, x), integers(16)), I16X16), address, 2)


@operation(lanes, lanes)
def rint(builder: Builder, x: Value) -> Value:
    """Return the lanes rounded to integers, to nearest even."""
    return call(builder, "llvm.rint.v16f32", F32X16, [x])


def _write_integers(builder: Builder, address: Value, x: Value, kind: Value) -> None:
    """Write 16 numbers as integers of a type, rounded to nearest even; anything for those out of range."""
    whole = builder.fptosi(rint.emit(builder, x), I32X16)
    write(builder, builder.trunc(whole, ir.VectorType(kind, LANES)), address, kind.width // 8)


@operation(types.void, types.int64, lanes)
def store_int16(builder: Builder, address: Value, x: Value) -> None:
    """Write 16 numbers to an address, rounded to int16."""
    _write_integers(builder, address, x, I16)


@operation(types.void, types.int64, lanes)
def store_int8(builder: Builder, address: Value, x: Value) -> None:
    """Write 16 numbers to an address, rounded to int8."""
    _write_integers(builder, address, x, I8)


@operation(types.void, types.int64, lanes)
def store_int8_exchanged(builder: Builder, address: Value, x: Value) -> None:
    """Write 16 numbers to an address, rounded to int8; of every four the two in the middle change places."""
    order = ir.Constant(I32X16, [4 * (i // 4) + (0, 2, 1, 3)[i % 4] for i in range(LANES)])
    _write_integers(builder, address, builder.shuffle_vector(x, x, order), I8)


@operation(lanes, lanes)
def round_to_bfloat16(builder: Builder, x: Value) -> Value:
    """Return the lanes rounded to the precision of bfloat16, as float32."""
    return builder.bitcast(builder.and_(_rounded_bits(builder, x), integers(-65536)), F32X16)


@operation(lanes, types.float32)
def splat(builder: Builder, x: Value) -> Value:
    """Return a number in all lanes."""
    return spread(builder, x, F32X16)


@operation(lanes, lanes, lanes, lanes)
def fma(builder: Builder, x: Value, y: Value, z: Value) -> Value:
    """Return x * y + z, rounded once."""
    return call(builder, "llvm.fma.v16f32", F32X16, [x, y, z])


@operation(lanes, lanes, lanes)
def add(builder: Builder, x: Value, y: Value) -> Value:
    """Return x + y."""
    return builder.fadd(x, y)


@operation(lanes, lanes, lanes)
def subtract(builder: Builder, x: Value, y: Value) -> Value:
    """Return x - y."""
    return builder.fsub(x, y)


@operation(lanes, lanes, lanes)
def multiply(builder: Builder, x: Value, y: Value) -> Value:
    """Return x * y."""
    return builder.fmul(x, y)


@operation(lanes, lanes, lanes)
def divide(builder: Builder, x: Value, y: Value) -> Value:
    """Return x / y."""
    return builder.fdiv(x, y)


@operation(lanes, lanes, lanes)
def maximum(builder: Builder, x: Value, y: Value) -> Value:
    """Return the larger of x and y; y where one of them is NaN."""
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


@operation(lanes, types.int64, lanes, lanes)
def select_below(builder: Builder, count: Value, x: Value, y: Value) -> Value:
    """Return the first ``count`` lanes of x and the other lanes of y."""
    numbers = ir.Constant(I32X16, list(range(LANES)))
    limit = spread(builder, builder.trunc(count, I32), I32X16)
    return builder.select(builder.icmp_signed("<", numbers, limit), x, y)


@operation(lanes, types.int64, types.int64, lanes, lanes)
def select_within(builder: Builder, first: Value, count: Value, x: Value, y: Value) -> Value:
    """Return ``count`` lanes of x, from number ``first`` on, which may be negative, and the other lanes of y."""
    begin, limit = (spread(builder, builder.trunc(value, I32), I32X16) for value in (first, count))
    numbers = builder.sub(ir.Constant(I32X16, list(range(LANES))), begin)
    return builder.select(builder.icmp_unsigned("<", numbers, limit), x, y)


def fold(builder: Builder, x: Value, combine: Any) -> Value:
    """Return the combination of all lanes, halves first: of 16, lane i with lane i + 8, then i + 4, i + 2, i + 1."""
    count = x.type.count
    while count > 1:
        count //= 2
        first, second = (ir.Constant(ir.VectorType(I32, count), list(range(i, i + count))) for i in (0, count))
        x = combine(builder.shuffle_vector(x, x, first), builder.shuffle_vector(x, x, second))
    return builder.extract_element(x, ir.Constant(I32, 0))


def sum_all(builder: Builder, vectors: Sequence[Value]) -> Value:
    """Return the sums of the lanes of 16 vectors, each in the order of :func:`fold`, as the lanes of one."""
    width = LANES
    while width > 1:
        first = [begin + i for begin in range(0, 2 * LANES, width) for i in range(width // 2)]
        masks = [ir.Constant(I32X16, [lane + shift for lane in first]) for shift in (0, width // 2)]
        vectors = [
            builder.fadd(*(builder.shuffle_vector(x, y, mask) for mask in masks))
            for x, y in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        width //= 2
    return vectors[0]


@operation(types.float32, lanes)
def sum_of(builder: Builder, x: Value) -> Value:
    """Return the sum of all lanes, in the order of :func:`fold`."""
    return fold(builder, x, builder.fadd)


@operation(types.float32, lanes)
def max_of(builder: Builder, x: Value) -> Value:
    """Return the largest lane; undefined if a lane is NaN."""
    return fold(builder, x, partial(maximum.emit, builder))


_LOWEST_EXPONENT: Final = -87.0
"""``exp`` of less is 0 up to the smallest normal number."""
_HIGHEST_EXPONENT: Final = 88.0
"""``exp`` of more is that of 88, near the largest number."""
_LOG2_E: Final = 1.4426950408889634
_LN2_HIGH: Final = 0.693145751953125
_LN2_LOW: Final = 1.428606765330187e-06
_EXP_COEFFICIENTS: Final = (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0)


@operation(lanes, lanes)
def exp(builder: Builder, x: Value) -> Value:
    """Return the exponential with a relative error of at most 3e-7; x is limited to -87 .. 88, and NaN stays NaN.

    It is 2**n times a polynomial in the rest of the exponent (Cody and Waite, 1980).
    """
    is_nan = builder.fcmp_unordered("uno", x, x)
    given, x = x, maximum.emit(builder, x, constant(_LOWEST_EXPONENT))
    x = builder.select(builder.fcmp_ordered("<", x, constant(_HIGHEST_EXPONENT)), x, constant(_HIGHEST_EXPONENT))
    n = rint.emit(builder, builder.fmul(x, constant(_LOG2_E)))
    rest = fma.emit(builder, n, constant(-_LN2_HIGH), x)
    rest = fma.emit(builder, n, constant(-_LN2_LOW), rest)
    result = constant(_EXP_COEFFICIENTS[0])
    for coefficient in _EXP_COEFFICIENTS[1:]:
        result = fma.emit(builder, result, rest, constant(coefficient))
    exponent = builder.shl(builder.fptosi(n, I32X16), integers(23))
    result = builder.bitcast(builder.add(builder.bitcast(result, I32X16), exponent), F32X16)
    return builder.select(is_nan, given, result)


_TANH_LIMIT: Final = 0.625
"""Below it ``tanh`` is a polynomial, because the other formula subtracts numbers that are nearly equal."""
_TANH_COEFFICIENTS: Final = (-0.00570498872745, 0.0206390887954, -0.0537397155531, 0.133314422036, -0.333332819422)


@operation(lanes, lanes)
def tanh(builder: Builder, x: Value) -> Value:
    """Return the hyperbolic tangent with a relative error of at most 3e-7; NaN stays NaN.

    Near 0 it is an odd polynomial (Cephes, Moshier, 1989), else 1 - 2 / (1 + exp(2 |x|)) with the sign of x.
    """
    squared = builder.fmul(x, x)
    near = constant(_TANH_COEFFICIENTS[0])
    for coefficient in _TANH_COEFFICIENTS[1:]:
        near = fma.emit(builder, near, squared, constant(coefficient))
    near = fma.emit(builder, builder.fmul(near, squared), x, x)
    size = call(builder, "llvm.fabs.v16f32", F32X16, [x])
    grown = builder.fadd(exp.emit(builder, builder.fadd(size, size)), constant(1.0))
    far = builder.fsub(constant(1.0), builder.fdiv(constant(2.0), grown))
    far = call(builder, "llvm.copysign.v16f32", F32X16, [far, x])
    return builder.select(builder.fcmp_ordered("<", size, constant(_TANH_LIMIT)), near, far)


@operation(types.void, types.int64)
def prefetch(builder: Builder, address: Value) -> None:
    """Prefetch the cache line of an address into all caches, for reading; nothing happens if no memory is mapped."""
    hints = [ir.Constant(I32, value) for value in (0, 2, 1)]
    call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer(builder, address, I8), *hints])
