"""Pack a matrix as linear layers read it, and quantise it on the way: the layouts of ``dot`` and ``dot_quantised``.

int8: the largest magnitude of a row becomes 127. int4: the number with the largest magnitude among 32 becomes -8 or, if
the squared error is smaller, -7, so that the range is used on the side where it is needed. Scales are rounded to
bfloat16 (int4) before integers are; integers are rounded to nearest, halves to even. A row or 32 inputs of which one is
not finite get a scale of NaN, so that outputs are not finite either.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ferrule_server.kernels.cpu.activations import load_element
from ferrule_server.kernels.cpu.kernel import Lanes, kernel
from ferrule_server.kernels.cpu.lanes import (
    LANES,
    add,
    divide,
    fma,
    load,
    max_of,
    maximum,
    multiply,
    rint,
    round_to_bfloat16,
    splat,
    store,
    store_int8,
    subtract,
    sum_of,
)
from ferrule_server.kernels.cpu.plan import Plan
from ferrule_server.kernels.cpu.scalars import (
    read_bfloat16,
    read_float32,
    read_int32,
    write_bfloat16,
    write_float32,
    write_int32,
)

_ROWS: Final = 64
_TILE: Final = 32
_WORD_BYTES: Final = 4 * _ROWS
"""From one int32 word of an output to its next."""
_SMALLEST: Final = np.float32(2e-36)
"""Rows and blocks of smaller numbers are zeros: their scale might not be a normal number."""


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
    group_bytes = num_tiles * plan.tile_bytes + plan.group_end_bytes
    for row in range(num_rows):
        here, place = source + row * row_bytes, out + row // _ROWS * group_bytes
        if not plan.is_quantised:
            _copy(plan, here, num_inputs, place + 4 * (row % _ROWS))
            continue
        _widen(plan, here, num_inputs, num_tiles * _TILE, scratch)
        if plan.group_end_bytes:
            _pack_int8(plan, scratch, num_tiles, place, row % _ROWS)
        else:
            _pack_int4(plan, scratch, num_tiles, place, row % _ROWS)
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
    whole = num_inputs // LANES * LANES
    for k in range(0, whole, LANES):
        store(out + 4 * k, load_element(plan, row, k))
    for k in range(whole, width):
        value = np.float32(0)
        if k < num_inputs:
            value = read_bfloat16(row + 2 * k) if plan.is_bfloat16 else read_float32(row + 4 * k)
        write_float32(out + 4 * k, value)


@kernel
def _pack_int8(plan: Plan, row: int, num_tiles: int, group: int, n: int) -> None:
    width, zero = num_tiles * _TILE, splat(np.float32(0))
    top, invalid = zero, zero
    for k in range(0, width, LANES):
        x = load(row + 4 * k)
        top = maximum(maximum(x, subtract(zero, x)), top)
        invalid = fma(x, zero, invalid)
    largest = max_of(top)
    scale = largest / np.float32(127) if largest >= _SMALLEST else np.float32(0)
    divisor = splat(scale if scale > 0 else np.float32(np.inf))
    integers = row + 4 * width
    for k in range(0, width, LANES):
        store_int8(integers + k, divide(load(row + 4 * k), divisor))
    for q in range(width // 4):
        word = read_int32(integers + 4 * q)
        difference = ((word >> 8) ^ word) & 0xFF00
        write_int32(group + q * _WORD_BYTES + 4 * n, word ^ difference ^ (difference << 8))
    write_float32(group + num_tiles * plan.tile_bytes + 4 * n, scale + sum_of(invalid))


@kernel
def _pack_int4(plan: Plan, row: int, num_tiles: int, group: int, n: int) -> None:
    zero, integers = splat(np.float32(0)), row + 4 * num_tiles * _TILE
    for tile in range(num_tiles):
        block, place = row + 4 * _TILE * tile, group + tile * plan.tile_bytes
        x, y = load(block), load(block + 4 * LANES)
        highest = max_of(maximum(x, y))
        lowest = -max_of(maximum(subtract(zero, x), subtract(zero, y)))
        extreme = lowest if -lowest > highest else highest
        scale, error = _choose_scale(x, y, extreme, np.float32(-8))
        other, other_error = _choose_scale(x, y, extreme, np.float32(-7))
        if other_error < error:
            scale = other
        store_int8(integers, _nibble(x, scale))
        store_int8(integers + LANES, _nibble(y, scale))
        for i in range(4):
            first = read_int32(integers + 8 * i) & 0x0F0F0F0F
            second = read_int32(integers + 8 * i + 4) & 0x0F0F0F0F
            first, second = first | first >> 12, second | second >> 12
            low = (first & 0xFF) | (second & 0xFF) << 8
            write_int32(place + i * _WORD_BYTES + 4 * n, low | (first & 0xFF00) << 8 | (second & 0xFF00) << 16)
        invalid = sum_of(fma(x, zero, multiply(y, zero)))
        write_bfloat16(place + 4 * _WORD_BYTES + 2 * n, scale + invalid)


@kernel
def _choose_scale(x: Lanes, y: Lanes, extreme: np.float32, level: np.float32) -> tuple[np.float32, np.float32]:
    """Return the scale with which a number becomes a level, and the squared error of 32 numbers with it."""
    if abs(extreme) < _SMALLEST:
        return np.float32(0), np.float32(0)
    scales = round_to_bfloat16(splat(extreme / level))
    scale = max_of(scales)
    first = subtract(multiply(_nibble(x, scale), scales), x)
    second = subtract(multiply(_nibble(y, scale), scales), y)
    return scale, sum_of(add(multiply(first, first), multiply(second, second)))


@kernel
def _nibble(x: Lanes, scale: np.float32) -> Lanes:
    """Return numbers divided by a scale, rounded, from -8 to 7."""
    zero = splat(np.float32(0))
    if scale == 0:
        return zero
    integers = maximum(rint(divide(x, splat(scale))), splat(np.float32(-8)))
    return subtract(zero, maximum(subtract(zero, integers), splat(np.float32(-7))))
