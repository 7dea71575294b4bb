"""The product of a few rows and 64 outputs of a quantised weight, some tiles at a time.

Inputs are integers too: int16 with one float32 scale for every 512 of a row (``activations.quantise_row``), which is
finer than bfloat16, or int8 if that was asked for, which is coarser and up to twice as fast (``vpdpbusd``). Products of
integers are added as integers, so a sum has the same bits on every processor, in whatever order; only the scales are
multiplied in float32, in the order of the inputs.

Weights are packed as streams of 64 outputs, like others (``dot``)::

    int8   [inputs / 4][64][4]                        bytes of a weight: inputs 0, 2, 1, 3
           [64] float32                               then one scale for each output
    int4   [inputs / 32] of  [4][64][8]               two to a byte, low one first: inputs 0, 2, 4, 6, 1, 3, 5, 7
                             [64] bfloat16            then one scale for each output and 32 inputs

The order within a weight is that in which shifts of 16-bit lanes yield pairs of neighbours, which the processor
multiplies with a pair of inputs and adds to one 32-bit lane (``vpdpwssd`` of AVX512-VNNI, ``vpmaddwd`` of AVX2).
"""

from __future__ import annotations

from typing import Final

from llvmlite import ir

from ferrule_server.kernels.cpu.lanes import (
    F32,
    F32X16,
    I16X16,
    I16X32,
    I32,
    I32X16,
    I64,
    Builder,
    Value,
    advance,
    call,
    constant,
    fma,
    integers,
    offset,
    read,
    spread,
    widen,
    write,
)
from ferrule_server.kernels.cpu.loops import LINE, loop, prefetch_lines
from ferrule_server.kernels.cpu.operands import Operands
from ferrule_server.kernels.cpu.plan import TILE_INPUTS, Plan
from ferrule_server.kernels.cpu.processor import target_features

_TILES: Final = 4
"""Times 16 outputs in a group."""
_READ_BYTES: Final = 256
"""Weights of 4 inputs in int8, of 8 in int4."""
_INT4_SCALES: Final = 1024
"""Where the scales of a tile are."""


def emit_quantised_product(builder: Builder, plan: Plan, num_rows: int, given: Operands) -> None:
    """Write the code of ``dot.dot_group`` for a number of rows; the builder is positioned after it."""
    at_once = _tiles_at_once(plan, num_rows)
    sweeps = _TILES // at_once
    num_lines = _ceil(builder, given.num_lines, sweeps)
    swept_bytes = builder.mul(builder.mul(num_lines, given.num_tiles), ir.Constant(I64, LINE))
    product = _Product(builder, plan, given, num_rows, at_once)
    begins = product.begins()

    def sweep(number: Value, _: list[Value]) -> list[Value]:
        column = builder.mul(number, ir.Constant(I64, 64 * at_once))
        here = builder.add(given.ahead, builder.mul(swept_bytes, number))
        sums = product.emit(column, begins, here, num_lines)
        product.add_to(sums, builder.add(given.out, column))
        return []

    loop(builder, ir.Constant(I64, sweeps), [], sweep)


def _tiles_at_once(plan: Plan, num_rows: int) -> int:
    """Return for how many times 16 outputs all sums stay in registers; int4 has sums of floats too."""
    most = 24 if plan.rows_at_once > 5 else 5
    most = most if plan.weights == "int8" else most // 2
    return max(num for num in (1, 2, 4) if num == 1 or num * num_rows <= most)


def _ceil(builder: Builder, value: Value, divisor: int) -> Value:
    return builder.udiv(offset(builder, value, divisor - 1), ir.Constant(I64, divisor))


class _Product:
    """Writes the code that multiplies ``num_rows`` rows and some times 16 outputs, with every sum in a register."""

    def __init__(self, builder: Builder, plan: Plan, given: Operands, num_rows: int, num_tiles: int) -> None:
        self._builder = builder
        self._plan = plan
        self._given = given
        self._num_rows = num_rows
        self._tiles = range(num_tiles)
        self._is_int8 = plan.weights == "int8"
        self._pieces = TILE_INPUTS // (4 if self._is_int8 and num_tiles > 1 else 8)

    def emit(self, column: Value, begins: list[Value], ahead: Value, num_lines: Value) -> list[Value]:
        """Return the products of some tiles of inputs, without the scales of inputs: float32, by rows.

        ``column`` is how many bytes of weights of 4 or 8 inputs come before the first output; ``begins`` is what the
        sums of each row begin with.
        """
        builder, given = self._builder, self._given
        rows = given.input_rows(builder, self._num_rows)
        count = self._num_rows * len(self._tiles)
        lines = _ceil(builder, num_lines, self._pieces)
        tile_bytes, input_bytes = self._plan.tile_bytes, self._plan.input_tile_bytes

        def place(k: Value) -> tuple[Value, list[Value], Value]:
            return (
                advance(builder, given.weight, k, tile_bytes),
                [advance(builder, row, k, input_bytes) for row in rows],
                advance(builder, ahead, builder.mul(k, num_lines), LINE),
            )

        def whole_tile(k: Value, sums: list[Value]) -> list[Value]:
            at, columns, here = place(k)
            return self._add_tile(builder.add(at, column), columns, here, lines, sums)

        def scaled_tile(k: Value, sums: list[Value]) -> list[Value]:
            at, columns, here = place(k)
            parts = self._add_tile(builder.add(at, column), columns, here, lines, [integers(0)] * count)
            scales = builder.add(at, builder.udiv(column, ir.Constant(I64, 2)))
            return self._add_scaled(offset(builder, scales, _INT4_SCALES), parts, sums)

        if self._is_int8:
            start = [begin for begin in begins for _ in self._tiles]
            totals = loop(builder, given.num_tiles, start, whole_tile)
            return [builder.sitofp(total, F32X16) for total in totals]
        return loop(builder, given.num_tiles, [constant(0.0)] * count, scaled_tile)

    def begins(self) -> list[Value]:
        """Return what the sums of each row begin with: int32 in all lanes."""
        if not self._plan.has_int8_inputs:
            return [integers(0)] * self._num_rows
        builder, given = self._builder, self._given
        rows = [advance(builder, given.scales, given.row_bytes, m) for m in range(self._num_rows)]
        return [spread(builder, read(builder, offset(builder, row, 4), I32, 4), I32X16) for row in rows]

    def add_to(self, sums: list[Value], out: Value) -> None:
        """Write the code that adds products, times the scales of the inputs, to sums in memory."""
        builder, given = self._builder, self._given
        for m in range(self._num_rows):
            place = advance(builder, given.scales, given.row_bytes, m)
            scale = spread(builder, read(builder, place, F32, 4), F32X16)
            row = advance(builder, out, given.out_row_bytes, m)
            for i, t in enumerate(self._tiles):
                at = offset(builder, row, 64 * t)
                total = read(builder, at, F32X16, 4)
                write(builder, fma.emit(builder, sums[m * len(self._tiles) + i], scale, total), at, 4)

    def _add_tile(self, start: Value, rows: list[Value], ahead: Value, lines: Value, sums: list[Value]) -> list[Value]:
        """Add the products of 32 inputs to sums of integers, some inputs at a time."""
        builder = self._builder
        words = self._plan.input_tile_bytes // 4 // self._pieces
        piece_bytes = (2048 if self._is_int8 else 1024) // self._pieces
        words_at_once = words * _READ_BYTES // piece_bytes

        def piece(i: Value, sums: list[Value]) -> list[Value]:
            upcoming = advance(builder, ahead, builder.mul(i, lines), LINE)
            prefetch_lines(builder, upcoming, lines)
            at = advance(builder, start, i, piece_bytes)
            columns = [advance(builder, row, i, 4 * words) for row in rows]
            sums = list(sums)
            for word in range(words):
                here = offset(builder, at, word // words_at_once * _READ_BYTES)
                weights = [self._weights(offset(builder, here, 64 * t), word % words_at_once) for t in self._tiles]
                for m, column in enumerate(columns):
                    x = self._inputs(offset(builder, column, 4 * word))
                    for t, values in enumerate(weights):
                        place = m * len(weights) + t
                        sums[place] = self._add_products(sums[place], values, x)
            return sums

        return loop(builder, ir.Constant(I64, self._pieces), sums, piece)

    def _add_scaled(self, scales: Value, parts: list[Value], sums: list[Value]) -> list[Value]:
        """Add sums of integers, times the scales of 32 inputs, to sums of floats."""
        builder = self._builder
        weights = [widen(builder, read(builder, offset(builder, scales, 32 * t), I16X16, 32)) for t in self._tiles]
        return [
            fma.emit(builder, builder.sitofp(part, F32X16), weights[i % len(weights)], total)
            for i, (part, total) in enumerate(zip(parts, sums, strict=True))
        ]

    def _weights(self, address: Value, pair: int) -> Value:
        """Return the weights of a pair of inputs and of 16 outputs, int16; or of 4, each 128 larger, as bytes."""
        builder = self._builder
        if self._plan.has_int8_inputs:
            return builder.xor(read(builder, address, I32X16, 64), integers(-0x7F7F7F80))
        bits = 8 if self._is_int8 else 4
        packed = read(builder, address, I16X32, 64)
        left = 16 - bits * (pair + 1)
        return builder.ashr(builder.shl(packed, _words(left)) if left else packed, _words(16 - bits))

    def _inputs(self, address: Value) -> Value:
        """Return a pair of int16 inputs, or four of int8, in all lanes."""
        words = spread(self._builder, read(self._builder, address, I32, 4), I32X16)
        return words if self._plan.has_int8_inputs else self._builder.bitcast(words, I16X32)

    def _add_products(self, total: Value, weights: Value, inputs: Value) -> Value:
        """Add the products of two pairs, or of four and four, to each 32-bit lane."""
        builder = self._builder
        if self._plan.has_int8_inputs:
            return self._add_products_of_bytes(total, weights, inputs)
        if self._plan.instructions == "avx512-vnni" and not self._plan.is_emulated:
            return call(builder, "llvm.x86.avx512.vpdpwssd.512", I32X16, [total, weights, inputs])
        if target_features().get("avx2") and not self._plan.is_emulated:
            return builder.add(total, self._multiply_halves(weights, inputs))
        products = []
        for first in (0, 1):
            lanes = ir.Constant(I32X16, list(range(first, 32, 2)))
            halves = [builder.sext(builder.shuffle_vector(x, x, lanes), I32X16) for x in (weights, inputs)]
            products.append(builder.mul(*halves))
        return builder.add(total, builder.add(*products))

    def _add_products_of_bytes(self, total: Value, weights: Value, inputs: Value) -> Value:
        builder = self._builder
        if not self._plan.is_emulated:
            return call(builder, "llvm.x86.avx512.vpdpbusd.512", I32X16, [total, weights, inputs])
        for i in range(4):
            weight = builder.and_(builder.lshr(weights, integers(8 * i)), integers(255))
            value = builder.ashr(builder.shl(inputs, integers(24 - 8 * i)), integers(24))
            total = builder.add(total, builder.mul(weight, value))
        return total

    def _multiply_halves(self, weights: Value, inputs: Value) -> Value:
        """Return the sums of the products of two pairs in each 32-bit lane, from two registers of AVX2."""
        builder = self._builder
        halves = []
        for first in (0, 16):
            lanes = ir.Constant(ir.VectorType(I32, 16), list(range(first, first + 16)))
            args = [builder.shuffle_vector(x, x, lanes) for x in (weights, inputs)]
            halves.append(call(builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(I32, 8), args))
        return builder.shuffle_vector(*halves, ir.Constant(I32X16, list(range(16))))


def _words(value: int) -> Value:
    return ir.Constant(I16X32, [value] * 32)
