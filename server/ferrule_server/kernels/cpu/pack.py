"""Pack a matrix as linear layers read it, and quantise it on the way: the layouts of ``dot`` and ``dot_quantised``.

int8: the largest magnitude of a row becomes 127. Codes of 4 bits with an offset: of some scales for 32 numbers, each
with the offset that suits its codes best (least squares), those whose squared error is the smallest. They are rounded
to float16 before codes are chosen. Integers are rounded to nearest, halves to even. A row or 32 inputs of which one is
not finite get a scale of NaN, so that outputs are not finite either.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ferrule_server.kernels.cpu import lanes as simd
from ferrule_server.kernels.cpu.activations import load_element
from ferrule_server.kernels.cpu.kernel import Lanes, kernel
from ferrule_server.kernels.cpu.plan import Plan
from ferrule_server.kernels.cpu.scalars import (
    read_bfloat16,
    read_float32,
    read_int32,
    round_to_float16,
    write_bfloat16,
    write_float16,
    write_float32,
    write_int32,
)

_ROWS: Final = 64
_TILE: Final = 32
_WORD_BYTES: Final = 4 * _ROWS
"""From one int32 word of an output to its next."""
_SMALLEST: Final = np.float32(2e-36)
"""Rows and blocks of smaller numbers are zeros: their scale might not be a normal number."""
_NUM_FITS: Final = 12
"""Scales that are tried for 32 numbers: the range as 15 steps, and as somewhat fewer or more."""
_FIT_STEP: Final = np.float32(0.5)


def pack_scratch_bytes(num_inputs: int) -> int:
    """Return the bytes of scratch memory for :func:`pack`."""
    return 5 * (-(-num_inputs // _TILE) * _TILE)


@kernel
def pack(plan: Plan, source: int, row_bytes: int, num_rows: int, num_inputs: int, out: int, scratch: int) -> int:
    """Pack a matrix.

    Args:
        plan: Of the kernels that will read it; its ``is_bfloat16`` is the type of the matrix too.
        source: Address of the first row, in steps of ``row_bytes``.
        row_bytes: From one row to the next.
        num_rows: A multiple of 64.
        num_inputs: Of a row.
        out: Address of zeros, a multiple of 64.
        scratch: Address of ``pack_scratch_bytes``.
    """
    num_tiles = (num_inputs + _TILE - 1) // _TILE
    group_bytes = num_tiles * plan.kind.tile_bytes + plan.kind.group_end_bytes
    for row in range(num_rows):
        here, place = source + row * row_bytes, out + row // _ROWS * group_bytes
        if not plan.is_quantised:
            _copy(plan, here, num_inputs, place + 4 * (row % _ROWS))
            continue
        _widen(plan, here, num_inputs, num_tiles * _TILE, scratch)
        if plan.kind.group_end_bytes:
            _pack_int8(plan, scratch, num_tiles, place, row % _ROWS)
        else:
            _pack_codes(plan, scratch, num_tiles, place, row % _ROWS)
    return 0


@kernel
def _copy(plan: Plan, row: int, num_inputs: int, place: int) -> None:
    """Copy the words of a row: pairs of bfloat16, or single float32."""
    if not plan.is_bfloat16:
        for k in range(num_inputs):
            write_int32(place + k * _WORD_BYTES, read_int32(row + 4 * k))
        return
    for p in range(num_inputs // 2):
        write_int32(place + p * _WORD_BYTES, read_int32(row + 4 * p))
    if num_inputs % 2:
        last = num_inputs - 1
        write_bfloat16(place + last // 2 * _WORD_BYTES, read_bfloat16(row + 2 * last))


@kernel
def _widen(plan: Plan, row: int, num_inputs: int, width: int, out: int) -> None:
    """Write a row as float32, with zeros at its end."""
    whole = num_inputs // simd.LANES * simd.LANES
    for k in range(0, whole, simd.LANES):
        simd.store(out + 4 * k, load_element(plan, row, k))
    for k in range(whole, width):
        value = np.float32(0)
        if k < num_inputs:
            value = read_bfloat16(row + 2 * k) if plan.is_bfloat16 else read_float32(row + 4 * k)
        write_float32(out + 4 * k, value)


@kernel
def _pack_int8(plan: Plan, row: int, num_tiles: int, group: int, n: int) -> None:
    width, zero = num_tiles * _TILE, simd.splat(np.float32(0))
    top, invalid = zero, zero
    for k in range(0, width, simd.LANES):
        x = simd.load(row + 4 * k)
        top = simd.maximum(simd.maximum(x, simd.subtract(zero, x)), top)
        invalid = simd.fma(x, zero, invalid)
    largest = simd.max_of(top)
    scale = largest / np.float32(127) if largest >= _SMALLEST else np.float32(0)
    divisor = simd.splat(scale if scale > 0 else np.float32(np.inf))
    integers = row + 4 * width
    for k in range(0, width, simd.LANES):
        simd.store_int8(integers + k, simd.divide(simd.load(row + 4 * k), divisor))
    for q in range(width // 4):
        word = read_int32(integers + 4 * q)
        difference = ((word >> 8) ^ word) & 0xFF00
        write_int32(group + q * _WORD_BYTES + 4 * n, word ^ difference ^ (difference << 8))
    write_float32(group + num_tiles * plan.kind.tile_bytes + 4 * n, scale + simd.sum_of(invalid))


@kernel
def _pack_codes(plan: Plan, row: int, num_tiles: int, group: int, n: int) -> None:
    zero, codes = simd.splat(np.float32(0)), row + 4 * num_tiles * _TILE
    for tile in range(num_tiles):
        block, place = row + 4 * _TILE * tile, group + tile * plan.kind.tile_bytes
        x, y = simd.load(block), simd.load(block + 4 * simd.LANES)
        scale, begin = _fit(x, y)
        simd.store_int8(codes, _codes_of(x, scale, begin))
        simd.store_int8(codes + simd.LANES, _codes_of(y, scale, begin))
        for i in range(4):
            first, second = read_int32(codes + 8 * i), read_int32(codes + 8 * i + 4)
            first, second = first | first >> 12, second | second >> 12
            low = (first & 0xFF) | (second & 0xFF) << 8
            write_int32(place + i * _WORD_BYTES + 4 * n, low | (first & 0xFF00) << 8 | (second & 0xFF00) << 16)
        invalid = simd.sum_of(simd.fma(x, zero, simd.multiply(y, zero)))
        scales = place + plan.kind.code_bytes + 2 * n
        write_float16(scales, scale + invalid)
        write_float16(scales + plan.kind.scale_bytes, begin)


@kernel
def _fit(x: Lanes, y: Lanes) -> tuple[np.float32, np.float32]:
    """Return the scale and the offset with which 32 numbers become codes of the smallest squared error."""
    zero = simd.splat(np.float32(0))
    highest = simd.max_of(simd.maximum(x, y))
    lowest = -simd.max_of(simd.maximum(simd.subtract(zero, x), simd.subtract(zero, y)))
    width = highest - lowest
    begin = round_to_float16(lowest)
    if not width >= _SMALLEST:
        return np.float32(0), begin
    scale, error = np.float32(0), np.float32(np.inf)
    total = simd.sum_of(simd.add(x, y))
    for i in range(_NUM_FITS):
        steps = np.float32(15) + (np.float32(i) - np.float32(_NUM_FITS // 3)) * _FIT_STEP
        first, second = _codes_of(x, width / steps, lowest), _codes_of(y, width / steps, lowest)
        sums = simd.sum_of(simd.add(first, second))
        squares = simd.sum_of(simd.fma(first, first, simd.multiply(second, second)))
        products = simd.sum_of(simd.fma(first, x, simd.multiply(second, y)))
        spread = np.float32(32) * squares - sums * sums
        if spread > 0:
            own = round_to_float16((np.float32(32) * products - sums * total) / spread)
            own_begin = round_to_float16((squares * total - sums * products) / spread)
            found = _error(x, y, own, own_begin)
            if found < error:
                scale, begin, error = own, own_begin, found
    return scale, begin


@kernel
def _error(x: Lanes, y: Lanes, scale: np.float32, begin: np.float32) -> np.float32:
    """Return the squared error of 32 numbers as codes."""
    scales, begins = simd.splat(scale), simd.splat(begin)
    first = simd.subtract(simd.fma(_codes_of(x, scale, begin), scales, begins), x)
    second = simd.subtract(simd.fma(_codes_of(y, scale, begin), scales, begins), y)
    return np.float32(simd.sum_of(simd.fma(first, first, simd.multiply(second, second))))


@kernel
def _codes_of(x: Lanes, scale: np.float32, begin: np.float32) -> Lanes:
    """Return the codes of numbers, from 0 to 15."""
    zero = simd.splat(np.float32(0))
    if scale == 0:
        return zero
    codes = simd.maximum(simd.rint(simd.divide(simd.subtract(x, simd.splat(begin)), simd.splat(scale))), zero)
    return simd.subtract(zero, simd.maximum(simd.subtract(zero, codes), simd.splat(np.float32(-15))))
