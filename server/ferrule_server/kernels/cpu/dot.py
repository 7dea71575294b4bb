"""The product of a few rows of inputs and 64 rows of a weight, some tiles at a time: what linear layers are made of.

Weights are packed so that a group of 64 outputs is one stream in memory, read from its begin to its end, whatever its
width: the processor prefetches such a stream automatically. Every 16 outputs of a pair of inputs are what AVX512-BF16
loads, and every 16 outputs of 32 inputs are a tile of AMX::

    weight[64 g + n][2 p + i]  at  packed[g][p][n][i]       bfloat16, by pairs of inputs
    weight[64 g + n][p]        at  packed[g][p][n]          float32

Every output is summed by itself, in an order that its place among other rows and columns cannot change:

    fma, avx512-bf16   by pairs of inputs, the odd one first, each product fused into the sum
    amx-bf16           by 32 inputs: the even and the odd products from 0 each, their sum added to the total
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from llvmlite import ir
from numba import types

from ferrule_server.kernels.cpu import lanes as simd
from ferrule_server.kernels.cpu.dot_quantised import emit_quantised_product
from ferrule_server.kernels.cpu.kernel import operation
from ferrule_server.kernels.cpu.lanes import Builder, Value
from ferrule_server.kernels.cpu.loops import for_each_count, loop
from ferrule_server.kernels.cpu.operands import Operands
from ferrule_server.kernels.cpu.plan import Plan, PlanType
from ferrule_server.kernels.cpu.tiles import TILE_ROWS, emit_tile_product, sweep_of_lines
from ferrule_server.kernels.matrix_kinds import TILE_INPUTS

GROUP: Final = 64
"""Outputs of a group."""
LINES_OF_TILES: Final = 64
"""Cache lines of the weights of 32 inputs, if they are bfloat16."""
_TILES: Final = 4
_TILE_BYTES: Final = 64
"""From the weights of 16 outputs to those of the next 16."""
_PAIRS: Final = TILE_INPUTS // 2
_PAIRS_AT_ONCE: Final = 2


def _tiles_at_once(plan: Plan, num_rows: int) -> int:
    """Return how many tiles are multiplied together, so that all sums stay in registers."""
    sums = 2 * plan.rows_at_once if plan.rows_at_once > 5 else 5
    return max(num for num in (1, 2, 4) if num == 1 or num * num_rows <= sums)


@operation(types.void, PlanType, *[types.int64] * 10)
def dot_group(
    builder: Builder, plan: Plan, weight: Value, num_tiles: Value, num_rows: Value, inputs: Value, row_bytes: Value,
    scales: Value, out: Value, out_row_bytes: Value, ahead: Value, num_lines: Value,
) -> None:  # fmt: skip
    """Add the products of rows of inputs and some tiles of a group of 64 rows of a weight to sums.

    Args:
        plan: How to multiply.
        weight: Address of the first tile.
        num_tiles: Tiles of 32 inputs.
        num_rows: From 1 to ``plan.rows_at_once``.
        inputs: Address of the first row of inputs.
        row_bytes: From one row of inputs to the next.
        scales: Address of the scale of the first row's inputs, float32, if weights are quantised; it lies in the row.
        out: Address of the sums, float32 [num_rows, 64].
        out_row_bytes: From one row of sums to the next.
        ahead: Address of weights that are multiplied later; they are prefetched meanwhile.
        num_lines: How many cache lines of them for each tile of inputs; a multiple of 32 unless weights are quantised.
    """
    given = Operands(weight, num_tiles, inputs, row_bytes, scales, out, out_row_bytes, ahead, num_lines)

    def write_code(count: int) -> None:
        if plan.is_quantised:
            emit_quantised_product(builder, plan, count, given)
            return
        at_once = _tiles_at_once(plan, count)
        for first in range(0, _TILES, at_once):
            _Group(builder, plan, count, range(first, first + at_once)).emit(given)

    if plan.has_tiles:
        _emit_with_tiles(builder, num_rows, given)
    else:
        for_each_count(builder, num_rows, plan.rows_at_once, write_code)


def _emit_with_tiles(builder: Builder, num_rows: Value, given: Operands) -> None:
    """Write the code for one or two tiles of rows, and the choice between them."""
    is_one = builder.icmp_signed("<=", num_rows, ir.Constant(simd.I64, TILE_ROWS))
    with builder.if_else(is_one) as (one, two):
        for branch, rows in ((one, TILE_ROWS), (two, 2 * TILE_ROWS)):
            with branch:
                emit_tile_product(builder, rows, given)


class _Group:
    """Writes the code that multiplies ``num_rows`` rows and some tiles of a group, with every sum in a register."""

    def __init__(self, builder: Builder, plan: Plan, num_rows: int, tiles: Sequence[int]) -> None:
        self._builder = builder
        self._plan = plan
        self._num_rows = num_rows
        self._tiles = tiles
        self._pair_bytes = 256 if plan.is_bfloat16 else 512
        self._is_tile_sum = plan.instructions == "amx-bf16"

    def emit(self, given: Operands) -> None:
        """Write the code; the builder is positioned after it."""
        builder = self._builder
        lines = sweep_of_lines(builder, given, self._tiles[0], len(self._tiles))
        rows = given.input_rows(builder, self._num_rows)
        places = [
            simd.offset(builder, simd.advance(builder, given.out, given.out_row_bytes, m), 64 * t)
            for m in range(self._num_rows)
            for t in self._tiles
        ]

        def tile(k: Value, sums: list[Value]) -> list[Value]:
            start = simd.advance(builder, given.weight, k, _PAIRS * self._pair_bytes)
            columns = [simd.advance(builder, row, k, self._input_bytes(TILE_INPUTS)) for row in rows]
            multiply = self._tile_sums if self._is_tile_sum else self._chain
            return multiply(start, columns, sums, lambda piece: lines(k, piece, _PAIRS // _PAIRS_AT_ONCE))

        sums = loop(builder, given.num_tiles, [simd.read(builder, place, simd.F32X16, 4) for place in places], tile)
        for total, place in zip(sums, places, strict=True):
            simd.write(builder, total, place, 4)

    def _input_bytes(self, count: int) -> int:
        return count * (4 if self._plan.has_wide_inputs else 2)

    def _chain(
        self, start: Value, rows: list[Value], sums: list[Value], prefetch: Callable[[Value], None]
    ) -> list[Value]:
        """Add the products of one tile of inputs to the sums, pair by pair."""
        step = _PAIRS_AT_ONCE

        def pairs(i: Value, sums: list[Value]) -> list[Value]:
            at = simd.advance(self._builder, start, i, step * self._pair_bytes)
            x = [simd.advance(self._builder, row, i, self._input_bytes(2 * step)) for row in rows]
            prefetch(i)
            for u in range(step):
                weights = [
                    self._weights(simd.offset(self._builder, at, _TILE_BYTES * t + u * self._pair_bytes))
                    for t in self._tiles
                ]
                for m in range(self._num_rows):
                    sums = self._add_pair(sums, m, weights, simd.offset(self._builder, x[m], self._input_bytes(2 * u)))
            return sums

        return loop(self._builder, ir.Constant(simd.I64, _PAIRS // step), sums, pairs)

    def _weights(self, address: Value) -> tuple[Value, ...]:
        """Return what is multiplied with a pair of inputs: packed pairs for AVX512-BF16, else the odd and the even."""
        builder = self._builder
        if not self._plan.is_bfloat16:
            odd = simd.offset(builder, address, self._pair_bytes // 2)
            return simd.read(builder, odd, simd.F32X16, 64), simd.read(builder, address, simd.F32X16, 64)
        pairs = simd.read(builder, address, simd.I32X16, 64)
        if self._has_dot:
            return (pairs,)
        return simd.odd_halves(builder, pairs), simd.even_halves(builder, pairs)

    @property
    def _has_dot(self) -> bool:
        return self._plan.instructions == "avx512-bf16" and not self._plan.is_emulated

    def _inputs(self, address: Value) -> tuple[Value, ...]:
        """Return a pair of inputs in all lanes, in the form of :meth:`_weights`."""
        builder = self._builder
        if self._plan.has_wide_inputs:
            places = (simd.offset(builder, address, 4), address)
            return tuple(simd.spread(builder, simd.read(builder, place, simd.F32, 4), simd.F32X16) for place in places)
        pairs = simd.spread(builder, simd.read(builder, address, simd.I32, 4), simd.I32X16)
        if self._has_dot:
            return (pairs,)
        return simd.odd_halves(builder, pairs), simd.even_halves(builder, pairs)

    def _add_pair(self, sums: list[Value], m: int, weights: list[tuple[Value, ...]], address: Value) -> list[Value]:
        inputs = self._inputs(address)
        sums = list(sums)
        for i, parts in enumerate(weights):
            place = m * len(weights) + i
            for weight, value in zip(parts, inputs, strict=True):
                sums[place] = self._multiply_add(weight, value, sums[place])
        return sums

    def _multiply_add(self, weight: Value, value: Value, total: Value) -> Value:
        if self._has_dot:
            return emit_bfloat16_dot(self._builder, total, weight, value)
        return simd.fma.emit(self._builder, weight, value, total)

    def _tile_sums(
        self, start: Value, rows: list[Value], sums: list[Value], prefetch: Callable[[Value], None]
    ) -> list[Value]:
        """Add the products of one tile of inputs to the sums as the tiles of AMX do."""
        builder = self._builder
        count = len(sums)

        def pair(p: Value, parts: list[Value]) -> list[Value]:
            prefetch(builder.udiv(p, ir.Constant(simd.I64, _PAIRS_AT_ONCE)))
            at = simd.advance(builder, start, p, self._pair_bytes)
            weights = [self._weights(simd.offset(builder, at, _TILE_BYTES * t)) for t in self._tiles]
            x = [simd.advance(builder, row, p, self._input_bytes(2)) for row in rows]
            parts = list(parts)
            for m in range(self._num_rows):
                odd, even = self._inputs(x[m])
                for i, (odd_weights, even_weights) in enumerate(weights):
                    place = m * len(weights) + i
                    parts[place] = simd.fma.emit(builder, even_weights, even, parts[place])
                    parts[count + place] = simd.fma.emit(builder, odd_weights, odd, parts[count + place])
            return parts

        parts = loop(builder, ir.Constant(simd.I64, _PAIRS), [simd.constant(0.0)] * (2 * count), pair)
        return [builder.fadd(total, builder.fadd(parts[i], parts[count + i])) for i, total in enumerate(sums)]


class _BFloat(ir.types.Type):
    """The type that llvmlite lacks; it is only ever printed."""

    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"

    _to_string = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def emit_bfloat16_dot(builder: Builder, total: Value, x: Value, y: Value) -> Value:
    """Return ``vdpbf16ps``: float32 sums plus the products of pairs of bfloat16, in int32 vectors, odd ones first."""
    kind = ir.VectorType(_BFloat(), 32)
    args = [total, builder.bitcast(x, kind), builder.bitcast(y, kind)]
    return simd.call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", simd.F32X16, args)
