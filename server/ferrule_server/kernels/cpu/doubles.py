"""Passes over 64 tokens of a row in float64, eight at a time: what a token weighs, and which tokens are kept.

A run of 64 tokens is summed in eight lanes, lane l the tokens l, l + 8, ... in ascending order; then lane l is added to
lane l + 4, l + 2 and l + 1. So a sum has the same bits on every processor, and in numpy (``executor.sampling``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from llvmlite import ir
from numba import types

from ferrule_server.kernels.cpu.kernel import kernel, operation
from ferrule_server.kernels.cpu.lanes import I16, I32, I64, Builder, Value, advance, call, fold, read, spread, write
from ferrule_server.kernels.cpu.loops import loop
from ferrule_server.kernels.cpu.scalars import read_float32, read_float64, read_int8, write_float64

_WIDTH: Final = 8
_RUN: Final = 64
_F64 = ir.DoubleType()
_F32X8, _F64X8 = (ir.VectorType(kind, _WIDTH) for kind in (ir.FloatType(), _F64))
_I16X8, _I32X8, _I64X8 = (ir.VectorType(kind, _WIDTH) for kind in (I16, I32, I64))
_LOWEST: Final = float("-inf")
_LOWEST_EXPONENT: Final = -700.0
WIDE: Final = -1
"""In the place of the address of a mask: the logits are float64, and what a mask forbids is -inf."""
LEAST: Final = 1e-300
"""What weighs less weighs nothing."""
_LOG2_E: Final = 1.4426950408889634
_LN2_HIGH: Final = float.fromhex("0x1.62e42feep-1")
"""The upper bits of log(2)."""
_LN2_LOW: Final = float.fromhex("0x1.a39ef35793c76p-33")
_TO_INTEGER: Final = 1.5 * 2.0**52
"""Added to a number it leaves the nearest integer in the low bits of the sum."""
_COEFFICIENTS: Final = tuple(map(float.fromhex, (
    "0x1.0000000000000p-1", "0x1.5555555555555p-3", "0x1.5555555555555p-5", "0x1.1111111110e6ap-7",
    "0x1.6c16c16c16a93p-10", "0x1.a01a01a4b322fp-13", "0x1.a01a01a2ba8c3p-16", "0x1.71de17e40edfep-19",
    "0x1.27e4e7c9c1412p-22", "0x1.af236aac51d05p-26", "0x1.1f5abc1998660p-29",
)))  # fmt: skip
"""Of (exp(r) - 1 - r) / r**2 from -log(2) / 2 to log(2) / 2: 1/2, 1/6, and a polynomial through points of Chebyshev."""
DIGIT_BITS: Final = 12
"""Bits by which tokens are sorted into bins at a time."""
_DISTANCE_SHIFT: Final = 44
"""What is left of a distance to the peak: its exponent and the first eight bits after the point."""
_LEAST_DISTANCE: Final = (1023 - 10) << 8
"""The first bin has all distances below 2**-10, and so the last one all from nearly 64 on."""


def _number(kind: Value, value: float) -> Value:
    """Return a constant of a type, in all lanes if it is a vector."""
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


@operation(types.float64, types.float64)
def exp(builder: Builder, x: Value) -> Value:
    """Return the exponential of numbers of at most 0, exact to one unit in the last place; of -700 for those below.

    It is 2**n times a polynomial in the rest of the exponent (Cody and Waite, 1980), whose pairs of terms do not wait
    for each other (Estrin, 1960).
    """
    kind, whole = (_F64X8, _I64X8) if isinstance(x.type, ir.VectorType) else (_F64, I64)

    def fma(x: Value, y: Value, z: Value) -> Value:
        return call(builder, "llvm.fma.v8f64" if kind is _F64X8 else "llvm.fma.f64", kind, [x, y, z])

    lowest, to_integer = _number(kind, _LOWEST_EXPONENT), _number(kind, _TO_INTEGER)
    x = builder.select(builder.fcmp_ordered(">", x, lowest), x, lowest)
    shifted = fma(x, _number(kind, _LOG2_E), to_integer)
    n = builder.fsub(shifted, to_integer)
    rest = fma(n, _number(kind, -_LN2_LOW), fma(n, _number(kind, -_LN2_HIGH), x))
    terms, power, one = [_number(kind, each) for each in _COEFFICIENTS], rest, _number(kind, 1.0)
    while len(terms) > 1:
        last = [terms.pop()] if len(terms) % 2 else []
        terms = [fma(odd, power, even) for even, odd in zip(terms[::2], terms[1::2], strict=True)] + last
        power = builder.fmul(power, power)
    result = fma(rest, fma(rest, terms[0], one), one)
    exponent = builder.shl(builder.bitcast(shifted, whole), _number(whole, 52))
    return builder.bitcast(builder.add(builder.bitcast(result, whole), exponent), kind)


@kernel
def logit_at(logits: int, mask: int, token: int) -> float:
    """Return the logit of a token in a row; the mask is as in :func:`_eight`."""
    if mask == WIDE:
        return read_float64(logits + 8 * token)
    is_allowed = mask == 0 or read_int8(mask + token // 8) >> token % 8 & 1 != 0
    return np.float64(read_float32(logits + 4 * token)) if is_allowed else -np.inf


@kernel
def exponentials(source: int, target: int, count: int) -> None:
    """Write the exponentials of float64 numbers of at most 0; 0 instead of less than 1e-300."""
    for i in range(count):
        x = exp(read_float64(source + 8 * i))
        write_float64(target + 8 * i, x if x >= LEAST else 0.0)


@operation(types.int64, types.float64)
def rank(builder: Builder, x: Value) -> Value:
    """Return integers whose bits, without a sign, rise with the numbers; 0.0 and -0.0 are equal."""
    kind, whole = (_F64X8, _I64X8) if isinstance(x.type, ir.VectorType) else (_F64, I64)
    bits = builder.bitcast(builder.fadd(x, _number(kind, 0.0)), whole)
    return builder.xor(bits, builder.or_(builder.ashr(bits, _number(whole, 63)), _number(whole, -(1 << 63))))


def _eight(builder: Builder, address: Value, number: Value, mask: Value = None) -> Value:
    """Return eight logits as float64, by their number in a row.

    Args:
        builder: LLVM's.
        address: Of the row.
        number: Of the eight.
        mask: Address of the bits of the row, which is float32: -inf is returned where they are 0. Or 0: all are 1. Or
            ``WIDE``, or None: the row is float64.
    """
    if mask is None:
        return read(builder, advance(builder, address, number, 8 * _WIDTH), _F64X8, 8)
    with builder.if_else(builder.icmp_signed("==", mask, ir.Constant(I64, WIDE))) as (wide, narrow):
        with wide:
            x, of_wide = _eight(builder, address, number), builder.block
        with narrow:
            y = builder.fpext(read(builder, advance(builder, address, number, 4 * _WIDTH), _F32X8, 4), _F64X8)
            plain = (y, builder.block)
            with builder.if_then(builder.icmp_signed("!=", mask, ir.Constant(I64, 0))):
                masked = (_allow(builder, y, builder.add(mask, number)), builder.block)
            y, of_narrow = _either(builder, plain, masked), builder.block
    return _either(builder, (x, of_wide), (y, of_narrow))


def _either(builder: Builder, *incoming: tuple[Value, Value]) -> Value:
    """Return the value that comes with the block before this one."""
    result = builder.phi(_F64X8)
    for value, block in incoming:
        result.add_incoming(value, block)
    return result


def _allow(builder: Builder, x: Value, mask: Value) -> Value:
    """Return the lanes whose bit of a byte is 1, and -inf in the others."""
    is_allowed = builder.bitcast(read(builder, mask, ir.IntType(8), 1), ir.VectorType(ir.IntType(1), _WIDTH))
    return builder.select(is_allowed, x, _number(_F64X8, _LOWEST))


def _sum(builder: Builder, weights: Value | None, weigh_eight: Callable[[Value], Value], floor: Value) -> Value:
    """Write 64 weights, 0 for those below a floor, and return their sum.

    Args:
        builder: LLVM's.
        weights: float64 [64], written; None: nothing is.
        weigh_eight: Returns the weights of eight tokens, of their number.
        floor: The least weight that is kept.
    """
    least = spread(builder, floor, _F64X8)

    def eight(number: Value, sums: list[Value]) -> list[Value]:
        found = weigh_eight(number)
        kept = builder.select(builder.fcmp_ordered(">=", found, least), found, _number(_F64X8, 0.0))
        if weights is not None:
            write(builder, kept, advance(builder, weights, number, 8 * _WIDTH), 8)
        return [builder.fadd(sums[0], kept)]

    (sums,) = loop(builder, ir.Constant(I64, _WIDTH), [_number(_F64X8, 0.0)], eight)
    return fold(builder, sums, builder.fadd)


@operation(types.void, *[types.int64] * 5, *[types.float64] * 3)
def weigh(
    builder: Builder, logits: Value, mask: Value, weights: Value, sums: Value, count: Value, peak: Value, factor: Value,
    floor: Value,
) -> None:  # fmt: skip
    """Write the weights of runs of 64 tokens, exp((logit - peak) * factor), or 0 below a floor; and their sums."""
    peak, factor = spread(builder, peak, _F64X8), spread(builder, factor, _F64X8)

    def run(number: Value, _: list[Value]) -> list[Value]:
        def eight(inner: Value) -> Value:
            place = builder.add(builder.mul(number, ir.Constant(I64, _WIDTH)), inner)
            below = builder.fsub(_eight(builder, logits, place, mask), peak)
            return exp.emit(builder, builder.fmul(below, factor))

        part = _sum(builder, advance(builder, weights, number, 8 * _RUN), eight, floor)
        write(builder, part, advance(builder, sums, number, 8), 8)
        return []

    loop(builder, count, [], run)


@operation(types.float64, *[types.int64] * 3, types.float64)
def sum_before(builder: Builder, weights: Value, bins: Value, border: Value, floor: Value) -> Value:
    """Return the sum of those of 64 weights that are not below a floor, and whose bin is before a border."""
    border = spread(builder, builder.trunc(border, I16), _I16X8)

    def eight(number: Value) -> Value:
        own = read(builder, advance(builder, bins, number, 2 * _WIDTH), _I16X8, 2)
        found = _eight(builder, weights, number)
        return builder.select(builder.icmp_signed("<", own, border), found, _number(_F64X8, 0.0))

    return _sum(builder, None, eight, floor)


@operation(types.float64, *[types.int64] * 3, *[types.float64] * 2, types.int64)
def keep(
    builder: Builder, logits: Value, mask: Value, weights: Value, floor: Value, border: Value, last: Value
) -> Value:
    """Set the weights of 64 tokens to 0 that rank after a border, or are below a floor; return the sum of the others.

    Args:
        builder: LLVM's.
        logits: Of the tokens.
        mask: As in :func:`_eight`.
        weights: float64 [64], changed.
        floor: The least weight of a token that is kept.
        border: The least logit.
        last: The last token with that logit, counted from the first of these.
    """
    border = spread(builder, border, _F64X8)

    def eight(number: Value) -> Value:
        x, found = _eight(builder, logits, number, mask), _eight(builder, weights, number)
        ahead = builder.sub(last, builder.mul(number, ir.Constant(I64, _WIDTH)))
        lanes = ir.Constant(_I32X8, list(range(_WIDTH)))
        is_among = builder.icmp_signed("<=", lanes, spread(builder, builder.trunc(ahead, I32), _I32X8))
        is_kept = builder.and_(builder.fcmp_ordered("==", x, border), is_among)
        is_kept = builder.or_(builder.fcmp_ordered(">", x, border), is_kept)
        return builder.select(is_kept, found, _number(_F64X8, 0.0))

    return _sum(builder, weights, eight, floor)


@operation(types.void, *[types.int64] * 2, types.float64, types.int64)
def digits(builder: Builder, logits: Value, mask: Value, peak: Value, out: Value) -> None:
    """Write the bins of 64 tokens as int16, by their distance to the largest logit of the row, the nearest first."""
    peak = spread(builder, peak, _F64X8)

    def bounded(x: Value, sign: str, bound: Value) -> Value:
        return builder.select(builder.icmp_signed(sign, x, bound), x, bound)

    def eight(number: Value, _: list[Value]) -> list[Value]:
        distance = builder.bitcast(builder.fsub(peak, _eight(builder, logits, number, mask)), _I64X8)
        found = builder.trunc(builder.ashr(distance, _number(_I64X8, _DISTANCE_SHIFT)), _I32X8)
        found = builder.sub(found, _number(_I32X8, _LEAST_DISTANCE))
        found = bounded(bounded(found, ">", _number(_I32X8, 0)), "<", _number(_I32X8, (1 << DIGIT_BITS) - 1))
        write(builder, builder.trunc(found, _I16X8), advance(builder, out, number, 2 * _WIDTH), 2)
        return []

    loop(builder, ir.Constant(I64, _WIDTH), [], eight)


@operation(types.int64, types.int64, types.int64)
def matches(builder: Builder, numbers: Value, wanted: Value) -> Value:
    """Return a bit for each of 64 int16 numbers, from the lowest on: whether it is the one wanted."""
    kind = ir.VectorType(I16, 64)
    same = spread(builder, builder.trunc(wanted, I16), kind)
    return builder.bitcast(builder.icmp_signed("==", read(builder, numbers, kind, 2), same), I64)


@operation(types.int64, types.int64)
def lowest_bit(builder: Builder, bits: Value) -> Value:
    """Return the number of the lowest bit that is 1; 64 if none is."""
    return call(builder, "llvm.cttz.i64", I64, [bits, ir.Constant(ir.IntType(1), 0)])


@operation(types.void, *[types.int64] * 3)
def widen(builder: Builder, logits: Value, mask: Value, out: Value) -> None:
    """Write 64 float32 logits as float64, -inf where the bit of a mask is 0."""

    def eight(number: Value, _: list[Value]) -> list[Value]:
        x = builder.fpext(read(builder, advance(builder, logits, number, 4 * _WIDTH), _F32X8, 4), _F64X8)
        x = _allow(builder, x, builder.add(mask, number))
        write(builder, x, advance(builder, out, number, 8 * _WIDTH), 8)
        return []

    loop(builder, ir.Constant(I64, _WIDTH), [], eight)


@operation(types.float64, *[types.int64] * 2)
def largest(builder: Builder, logits: Value, mask: Value) -> Value:
    """Return the largest of 64 logits."""

    def larger(x: Value, y: Value) -> Value:
        return builder.select(builder.fcmp_ordered(">", x, y), x, y)

    def eight(number: Value, best: list[Value]) -> list[Value]:
        return [larger(_eight(builder, logits, number, mask), best[0])]

    (best,) = loop(builder, ir.Constant(I64, _WIDTH), [_number(_F64X8, _LOWEST)], eight)
    return fold(builder, best, larger)
