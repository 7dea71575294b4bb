"""Twins of the instructions that only compute: on Python floats, rounded where bits of them are used."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tools.cuda_simulator.errors import PromiseBroken

__all__ = ["BF16", "PURE", "from_bf16", "to_bf16"]

BF16: list[float] = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32).tolist()
"""The value of each bf16, by its bits."""

_WORD = bytearray(4)
_AS_FLOAT, _AS_BITS = memoryview(_WORD).cast("f"), memoryview(_WORD).cast("I")
_U32, _U64 = (1 << 32) - 1, (1 << 64) - 1
_BF16_NAN = 0x7FFF


def to_bf16(values: NDArray[np.floating]) -> NDArray[np.uint16]:
    """Return the bits of values rounded to bf16, to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(_BF16_NAN), rounded)


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Return the values of bf16 bits as float32."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def f32(value: float) -> float:
    """Round to float32."""
    _AS_FLOAT[0] = value
    return _AS_FLOAT[0]


def i32(value: int) -> int:
    """Check the promise that a value fits a signed 32-bit integer."""
    if -0x80000000 <= value <= 0x7FFFFFFF:
        return value
    raise PromiseBroken(f"i32({value}) does not fit 32 bits")


def u32(value: int) -> int:
    """Check the promise that a value fits an unsigned 32-bit integer."""
    if 0 <= value <= _U32:
        return value
    raise PromiseBroken(f"u32({value}) does not fit 32 bits")


def float_bits(value: float) -> int:
    """Return the bits of a float32."""
    _AS_FLOAT[0] = value
    return _AS_BITS[0]


def bits_float(bits: int) -> float:
    """Return the float32 of these bits."""
    _AS_BITS[0] = u32(bits)
    return _AS_FLOAT[0]


def bf16_low(word: int) -> float:
    """Return the lower bf16 of a word."""
    return BF16[word & 0xFFFF]


def bf16_high(word: int) -> float:
    """Return the upper bf16 of a word."""
    return BF16[word >> 16]


def _bf16_bits(value: float) -> int:
    if value != value:  # noqa: PLR0124  (NaN, without a call)
        return _BF16_NAN
    _AS_FLOAT[0] = value
    bits: int = _AS_BITS[0]
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def pack_bf16(low: float, high: float) -> int:
    """Return two values rounded to bf16 in one word."""
    return _bf16_bits(low) | _bf16_bits(high) << 16


def round_bf16(value: float) -> float:
    """Return the value rounded to bf16."""
    return BF16[_bf16_bits(value)]


def fma(a: float, b: float, c: float) -> float:
    """Return a * b + c."""
    return a * b + c


def dot_bf16(total: float, a: tuple[int, ...], b: tuple[int, ...]) -> float:
    """Return ``total`` plus eight products of bf16 values, in order."""
    for first, second in zip(a, b, strict=True):
        total = BF16[first & 0xFFFF] * BF16[second & 0xFFFF] + total
        total = BF16[first >> 16] * BF16[second >> 16] + total
    return total


def exp2(value: float) -> float:
    """Return 2 to the power of the value; below the normal numbers 0, as the device does."""
    if value < -126.0:
        return 0.0
    return math.inf if value >= 128.0 else math.exp2(value)


def log2(value: float) -> float:
    """Return the binary logarithm."""
    if value > 0.0:
        return math.log2(value)
    return -math.inf if value == 0.0 else math.nan


def reciprocal(value: float) -> float:
    """Return 1 / value."""
    return 1.0 / value if value else math.copysign(math.inf, value)


def reciprocal_sqrt(value: float) -> float:
    """Return 1 / sqrt(value)."""
    if value > 0.0:
        return 1.0 / math.sqrt(value)
    return math.inf if value == 0.0 else math.nan


def select_f32(condition: int, chosen: float, otherwise: float) -> float:
    """Return one of two values."""
    return chosen if condition else otherwise


def max_f32(a: float, b: float) -> float:
    """Return the larger; of a number and NaN the number."""
    return a if a >= b or b != b else b  # noqa: PLR0124


def permute_bytes(a: int, b: int, selector: int) -> int:
    """Return four of the eight bytes of (a, b)."""
    both = u32(a) | u32(b) << 32
    word = 0
    for index in range(4):
        nibble = selector >> 4 * index & 15
        byte = both >> 8 * (nibble & 7) & 255
        if nibble & 8:
            byte = 255 if byte & 128 else 0
        word |= byte << 8 * index
    return word


def float_of(value: int) -> float:
    """Return the integer as a float32."""
    return f32(i32(value))


def round_u64(value: float) -> int:
    """Return the nearest unsigned 64-bit integer."""
    if not value > 0.0:
        return 0
    return _U64 if value >= 2.0**64 else round(f32(value))


def float_of_u64(value: int) -> float:
    """Return the unsigned integer as a float32."""
    return f32(value & _U64)


def multiply_high(a: int, b: int) -> int:
    """Return the upper 32 bits of the product."""
    return u32(a) * u32(b) >> 32


def multiply_low(a: int, b: int) -> int:
    """Return the lower 32 bits of the product."""
    return u32(a) * u32(b) & _U32


def multiply_high_u64(a: int, b: int) -> int:
    """Return the upper 64 bits of the product, as the signed integer that kernels hold."""
    high = (a & _U64) * (b & _U64) >> 64
    return high - (1 << 64) if high >> 63 else high


def add_wrapping(a: int, b: int) -> int:
    """Return the lower 32 bits of the sum."""
    return a + b & _U32


def order_key(bits: int) -> int:
    """Return a key that rises with the float of these bits; -0 and 0 have the same."""
    if bits == 0x80000000:
        return bits
    return u32(bits) ^ (_U32 if bits >> 31 else 0x80000000)


PURE: dict[str, Callable[..., object]] = {
    twin.__name__: twin
    for twin in (
        f32, i32, u32, float_bits, bits_float, bf16_low, bf16_high, pack_bf16, round_bf16, fma,
        dot_bf16, exp2, log2, reciprocal, select_f32,
        reciprocal_sqrt, max_f32, permute_bytes, float_of, round_u64, float_of_u64, multiply_high, multiply_low,
        multiply_high_u64, add_wrapping, order_key,
    )
}  # fmt: skip
"""Twins that need no thread, by name."""
