"""The product of a few rows and 64 outputs of a quantised weight, some tiles at a time.

Inputs are integers too: int16 with one float32 scale for every 512 of a row (``activations.quantise_row``), which is
finer than bfloat16, or int8 if that was asked for, which is coarser and up to twice as fast (``vpdpbusd``). Products of
integers are added as integers, so a sum has the same bits on every processor, in whatever order; only scales and
offsets are multiplied in float32, in the order of the inputs.

Weights are packed as streams of 64 outputs, like others (``dot``). A tile has the codes of 32 inputs::

    8 bits   [8][64][4]     bytes of a weight: inputs 0, 2, 1, 3
    4 bits   [4][64][8]     two to a byte, low one first: inputs 0, 2, 4, 6, 1, 3, 5, 7

The order within a weight is that in which shifts of 16-bit lanes yield pairs of neighbours, which the processor
multiplies with a pair of inputs and adds to one 32-bit lane (``vpdpwssd`` of AVX512-VNNI, ``vpmaddwd`` of AVX2). The
kind of the matrix (``kernels/matrix_kinds.py``) says what follows::

    scales of rows     [64] float32, after the last tile
    scales of groups   of each tile: [32 / group][64] scales, then as many offsets if there are any
    int8 scales        after 8 tiles [64] float16 that multiply their scales, and 64 for their offsets
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from llvmlite import ir

from ferrule_server.kernels.cpu import lanes as simd
from ferrule_server.kernels.cpu.activations import SUMS_BYTES, SUMS_OFFSET
from ferrule_server.kernels.cpu.lanes import Builder, Value
from ferrule_server.kernels.cpu.loops import LINE, loop, prefetch_lines
from ferrule_server.kernels.cpu.operands import Operands
from ferrule_server.kernels.cpu.plan import Plan
from ferrule_server.kernels.cpu.processor import target_features
from ferrule_server.kernels.matrix_kinds import TILE_INPUTS

_TILES: Final = 4
"""Times 16 outputs in a group."""
_READ_BYTES: Final = 256
"""Weights of 4 inputs in 8 bits, of 8 in 4 bits."""
_BYTES: Final = ir.VectorType(simd.I8, 64)
_HALF_BYTES: Final = ir.VectorType(simd.I8, 32)
_HALVES: Final = ir.VectorType(ir.HalfType(), 16)


def emit_quantised_product(builder: Builder, plan: Plan, num_rows: int, given: Operands) -> None:
    """Write the code of ``dot.dot_group`` for a number of rows; the builder is positioned after it."""
    at_once = _tiles_at_once(plan, num_rows)
    sweeps = _TILES // at_once
    num_lines = _ceil(builder, given.num_lines, sweeps)
    swept_bytes = builder.mul(builder.mul(num_lines, given.num_tiles), ir.Constant(simd.I64, LINE))
    product = _Product(builder, plan, given, num_rows, at_once)
    begins = product.begins()

    def sweep(number: Value, _: list[Value]) -> list[Value]:
        column = builder.mul(number, ir.Constant(simd.I64, 64 * at_once))
        here = builder.add(given.ahead, builder.mul(swept_bytes, number))
        sums = product.emit(column, begins, here, num_lines)
        product.add_to(sums, builder.add(given.out, column))
        return []

    loop(builder, ir.Constant(simd.I64, sweeps), [], sweep)


def _tiles_at_once(plan: Plan, num_rows: int) -> int:
    """Return for how many times 16 outputs all sums stay in registers; scales of groups need sums of floats too."""
    most = 24 if plan.rows_at_once > 5 else 5
    most = most // 2 if plan.kind.is_grouped else most
    return max(num for num in (1, 2, 4) if num == 1 or num * num_rows <= most)


def _ceil(builder: Builder, value: Value, divisor: int) -> Value:
    return builder.udiv(simd.offset(builder, value, divisor - 1), ir.Constant(simd.I64, divisor))


@dataclass(frozen=True, slots=True)
class _Tile:
    """Values of LLVM: where a tile is, where in the codes of 64 outputs to begin, and what to prefetch meanwhile."""

    start: Value
    column: Value
    number: Value
    ahead: Value
    lines: Value


class _Product:
    """Writes the code that multiplies ``num_rows`` rows and some times 16 outputs, with every sum in a register."""

    def __init__(self, builder: Builder, plan: Plan, given: Operands, num_rows: int, num_tiles: int) -> None:
        self._builder = builder
        self._plan = plan
        self._given = given
        self._num_rows = num_rows
        self._tiles = range(num_tiles)
        self._kind = plan.kind
        self._rows = given.input_rows(builder, num_rows)
        self._pieces = TILE_INPUTS // (4 if plan.kind.bits == 8 and num_tiles > 1 else 8)

    def emit(self, column: Value, begins: list[Value], ahead: Value, num_lines: Value) -> list[Value]:
        """Return the products of some tiles of inputs, without the scales of inputs: float32, by rows.

        ``column`` is how many bytes of weights of 4 or 8 inputs come before the first output; ``begins`` is what the
        sums of each row begin with.
        """
        builder, given, kind = self._builder, self._given, self._kind
        rows = self._rows
        lines = _ceil(builder, num_lines, self._pieces)
        input_bytes = self._plan.input_tile_bytes

        def whole_tile(k: Value, sums: list[Value]) -> list[Value]:
            at = builder.add(simd.advance(builder, given.weight, k, kind.own_bytes), column)
            columns = [simd.advance(builder, row, k, input_bytes) for row in rows]
            here = simd.advance(builder, ahead, builder.mul(k, num_lines), LINE)
            return self._add_pieces(at, columns, here, lines, sums, range(self._pieces))

        def super_tile(number: Value, sums: list[Value]) -> list[Value]:
            begin = simd.advance(builder, given.weight, number, kind.super_tiles * kind.tile_bytes)
            shared = self._shared(simd.offset(builder, begin, kind.super_tiles * kind.own_bytes), column)

            def tile(i: Value, sums: list[Value]) -> list[Value]:
                k = builder.add(builder.mul(number, ir.Constant(simd.I64, kind.super_tiles)), i)
                here = simd.advance(builder, ahead, builder.mul(k, num_lines), LINE)
                start = simd.advance(builder, begin, i, kind.own_bytes)
                return self._add_tile(_Tile(start, column, k, here, lines), shared, sums)

            return loop(builder, ir.Constant(simd.I64, kind.super_tiles), sums, tile)

        if not kind.is_grouped:
            start = [begin for begin in begins for _ in self._tiles]
            totals = loop(builder, given.num_tiles, start, whole_tile)
            return [builder.sitofp(total, simd.F32X16) for total in totals]
        count = builder.udiv(given.num_tiles, ir.Constant(simd.I64, kind.super_tiles))
        return loop(builder, count, [simd.constant(0.0)] * (self._num_rows * len(self._tiles)), super_tile)

    def begins(self) -> list[Value]:
        """Return what the sums of each row begin with: int32 in all lanes."""
        if not self._plan.has_int8_inputs:
            return [simd.integers(0)] * self._num_rows
        builder, given = self._builder, self._given
        rows = [simd.advance(builder, given.scales, given.row_bytes, m) for m in range(self._num_rows)]
        return [
            simd.spread(builder, simd.read(builder, simd.offset(builder, row, 4), simd.I32, 4), simd.I32X16)
            for row in rows
        ]

    def add_to(self, sums: list[Value], out: Value) -> None:
        """Write the code that adds products, times the scales of the inputs, to sums in memory."""
        builder, given = self._builder, self._given
        for m in range(self._num_rows):
            place = simd.advance(builder, given.scales, given.row_bytes, m)
            scale = simd.spread(builder, simd.read(builder, place, simd.F32, 4), simd.F32X16)
            row = simd.advance(builder, out, given.out_row_bytes, m)
            for i, t in enumerate(self._tiles):
                at = simd.offset(builder, row, 64 * t)
                total = simd.read(builder, at, simd.F32X16, 4)
                simd.write(builder, simd.fma.emit(builder, sums[m * len(self._tiles) + i], scale, total), at, 4)

    def _add_tile(self, tile: _Tile, shared: list[list[Value]], sums: list[Value]) -> list[Value]:
        """Add the products of a tile whose groups have scales to sums of floats."""
        builder, given, kind = self._builder, self._given, self._kind
        columns = [simd.advance(builder, row, tile.number, self._plan.input_tile_bytes) for row in self._rows]
        first_sums = simd.advance(builder, simd.offset(builder, given.scales, SUMS_OFFSET), tile.number, SUMS_BYTES)
        group_sums = [simd.advance(builder, first_sums, given.row_bytes, m) for m in range(self._num_rows)]
        at = builder.add(tile.start, tile.column)
        num_groups = TILE_INPUTS // kind.group
        pieces = self._pieces // num_groups
        for group in range(num_groups):
            place = 4 * group if num_groups > 1 else 8
            inputs = [
                simd.spread(builder, simd.read(builder, simd.offset(builder, x, place), simd.F32, 4), simd.F32X16)
                for x in group_sums
            ]
            parts = [simd.integers(0)] * len(sums)
            if self._plan.has_int8_inputs:
                begins = [builder.fptosi(builder.fmul(x, simd.constant(-128.0)), simd.I32X16) for x in inputs]
                parts = [begin for begin in begins for _ in self._tiles]
            parts = self._add_pieces(
                at, columns, tile.ahead, tile.lines, parts, range(group * pieces, (group + 1) * pieces)
            )
            factors = [builder.sitofp(part, simd.F32X16) for part in parts]
            sums = self._add_scaled(self._scales(tile, group, shared[0]), factors, sums)
            if kind.has_offset:
                factors = [x for x in inputs for _ in self._tiles]
                sums = self._add_scaled(self._scales(tile, num_groups + group, shared[1]), factors, sums)
        return sums

    def _add_pieces(
        self, start: Value, rows: list[Value], ahead: Value, lines: Value, sums: list[Value], pieces: range
    ) -> list[Value]:
        """Add the products of some pieces of 32 inputs to sums of integers."""
        builder, kind = self._builder, self._kind
        words = self._plan.input_tile_bytes // 4 // self._pieces
        piece_bytes = kind.code_bytes // self._pieces
        words_at_once = words * _READ_BYTES // piece_bytes

        def piece(number: Value, sums: list[Value]) -> list[Value]:
            i = simd.offset(builder, number, pieces.start)
            upcoming = simd.advance(builder, ahead, builder.mul(i, lines), LINE)
            prefetch_lines(builder, upcoming, lines)
            at = simd.advance(builder, start, i, piece_bytes)
            columns = [simd.advance(builder, row, i, 4 * words) for row in rows]
            sums = list(sums)
            for first in range(0, words, words_at_once):
                here = simd.offset(builder, at, first // words_at_once * _READ_BYTES)
                weights = [self._weights(simd.offset(builder, here, 64 * t), words_at_once) for t in self._tiles]
                for word in range(words_at_once):
                    for m, column in enumerate(columns):
                        x = self._inputs(simd.offset(builder, column, 4 * (first + word)))
                        for t, values in enumerate(weights):
                            place = m * len(weights) + t
                            sums[place] = self._add_products(sums[place], values[word], x)
            return sums

        return loop(builder, ir.Constant(simd.I64, len(pieces)), sums, piece)

    def _shared(self, place: Value, column: Value) -> list[list[Value]]:
        """Return the numbers that multiply the scales of some tiles, and those of their offsets."""
        builder, kind = self._builder, self._kind
        if not kind.super_bytes:
            return [[], []]
        here = builder.add(place, builder.udiv(column, ir.Constant(simd.I64, 2)))
        begins = [simd.offset(builder, here, 128 * i) for i in range(1 + kind.has_offset)]
        return [[self._halves(simd.offset(builder, begin, 32 * t)) for t in self._tiles] for begin in begins]

    def _halves(self, address: Value) -> Value:
        """Return 16 float16 numbers as float32."""
        return self._builder.fpext(simd.read(self._builder, address, _HALVES, 32), simd.F32X16)

    def _scales(self, tile: _Tile, number: int, shared: list[Value]) -> list[Value]:
        """Return the scales of a group of the inputs of a tile, or the offsets, which follow them."""
        builder, kind = self._builder, self._kind
        size = kind.scale_bytes // 64
        first = builder.add(tile.start, builder.udiv(tile.column, ir.Constant(simd.I64, 4 // size)))
        first = simd.offset(builder, first, kind.code_bytes + number * kind.scale_bytes)
        places = [simd.offset(builder, first, 16 * size * t) for t in self._tiles]
        if kind.scale == "float16":
            return [self._halves(place) for place in places]
        values = [simd.read(builder, place, ir.VectorType(simd.I8, 16), 16) for place in places]
        if kind.scale == "exponent":
            wide = [builder.zext(value, simd.I32X16) for value in values]
            return [self._power_of_two(builder.lshr(each, simd.integers(1)), each) for each in wide]
        numbers = [builder.sitofp(builder.sext(value, simd.I32X16), simd.F32X16) for value in values]
        return [builder.fmul(*pair) for pair in zip(numbers, shared, strict=True)]

    def _power_of_two(self, half: Value, exponent: Value) -> Value:
        """Return 2 to the power of exponents less 128, as two factors, since the smallest have no bits of their own."""
        builder = self._builder
        parts = (builder.add(part, simd.integers(63)) for part in (half, builder.sub(exponent, half)))
        return builder.fmul(*(builder.bitcast(builder.shl(part, simd.integers(23)), simd.F32X16) for part in parts))

    def _add_scaled(self, scales: list[Value], factors: list[Value], sums: list[Value]) -> list[Value]:
        """Add numbers of each row, times the scales of each tile, to sums."""
        return [
            simd.fma.emit(self._builder, factor, scales[i % len(scales)], total)
            for i, (factor, total) in enumerate(zip(factors, sums, strict=True))
        ]

    def _weights(self, address: Value, count: int) -> list[Value]:
        """Return the weights of pairs of inputs and of 16 outputs, int16; or of 4, each 128 larger, as bytes."""
        builder = self._builder
        if self._plan.has_int8_inputs:
            return [builder.xor(simd.read(builder, address, simd.I32X16, 64), simd.integers(-0x7F7F7F80))]
        packed = simd.read(builder, address, simd.I16X32, 64)
        if self._kind.bits == 8:
            return [self._low_bytes(packed), builder.ashr(packed, _words(8))]
        if self._kind.code_mask:
            return [self._signed(packed, 12 - 4 * i) for i in range(count)]
        if not self._kind.levels:
            return [builder.and_(builder.lshr(packed, _words(4 * i)), _words(15)) for i in range(count)]
        nibbles = (builder.and_(builder.lshr(packed, _words(bits)), _words(0x0F0F)) for bits in (0, 4))
        pairs = [self._look_up(each) for each in nibbles]
        return [*map(self._low_bytes, pairs), *(builder.ashr(each, _words(8)) for each in pairs)]

    def _signed(self, packed: Value, left: int) -> Value:
        """Return a nibble of each 16-bit lane, from -8 to 7."""
        builder = self._builder
        return builder.ashr(builder.shl(packed, _words(left)) if left else packed, _words(12))

    def _low_bytes(self, packed: Value) -> Value:
        """Return the low byte of each 16-bit lane, signed."""
        return self._builder.ashr(self._builder.shl(packed, _words(8)), _words(8))

    def _look_up(self, codes: Value) -> Value:
        """Return what the bytes of 16-bit lanes stand for, each from 0 to 15."""
        builder, levels = self._builder, [level & 255 for level in self._kind.levels]
        bytes_ = builder.bitcast(codes, _BYTES)
        if self._plan.instructions == "avx512-vnni" and not self._plan.is_emulated:
            found = simd.call(builder, "llvm.x86.avx512.pshuf.b.512", _BYTES, [ir.Constant(_BYTES, levels * 4), bytes_])
            return builder.bitcast(found, simd.I16X32)
        if self._plan.is_emulated or not target_features().get("avx2"):
            found = ir.Constant(_BYTES, [levels[0]] * 64)
            for code, level in enumerate(levels[1:], 1):
                is_code = builder.icmp_unsigned("==", bytes_, ir.Constant(_BYTES, [code] * 64))
                found = builder.select(is_code, ir.Constant(_BYTES, [level] * 64), found)
            return builder.bitcast(found, simd.I16X32)
        halves = []
        for first in (0, 32):
            half = builder.shuffle_vector(bytes_, bytes_, _lanes(first, 32))
            halves.append(
                simd.call(builder, "llvm.x86.avx2.pshuf.b", _HALF_BYTES, [ir.Constant(_HALF_BYTES, levels * 2), half])
            )
        return builder.bitcast(builder.shuffle_vector(*halves, _lanes(0, 64)), simd.I16X32)

    def _inputs(self, address: Value) -> Value:
        """Return a pair of int16 inputs, or four of int8, in all lanes."""
        words = simd.spread(self._builder, simd.read(self._builder, address, simd.I32, 4), simd.I32X16)
        return words if self._plan.has_int8_inputs else self._builder.bitcast(words, simd.I16X32)

    def _add_products(self, total: Value, weights: Value, inputs: Value) -> Value:
        """Add the products of two pairs, or of four and four, to each 32-bit lane."""
        builder = self._builder
        if self._plan.has_int8_inputs:
            return self._add_products_of_bytes(total, weights, inputs)
        if self._plan.instructions == "avx512-vnni" and not self._plan.is_emulated:
            return simd.call(builder, "llvm.x86.avx512.vpdpwssd.512", simd.I32X16, [total, weights, inputs])
        if target_features().get("avx2") and not self._plan.is_emulated:
            return builder.add(total, self._multiply_halves(weights, inputs))
        products = []
        for first in (0, 1):
            lanes = ir.Constant(simd.I32X16, list(range(first, 32, 2)))
            halves = [builder.sext(builder.shuffle_vector(x, x, lanes), simd.I32X16) for x in (weights, inputs)]
            products.append(builder.mul(*halves))
        return builder.add(total, builder.add(*products))

    def _add_products_of_bytes(self, total: Value, weights: Value, inputs: Value) -> Value:
        builder = self._builder
        if not self._plan.is_emulated:
            return simd.call(builder, "llvm.x86.avx512.vpdpbusd.512", simd.I32X16, [total, weights, inputs])
        for i in range(4):
            weight = builder.and_(builder.lshr(weights, simd.integers(8 * i)), simd.integers(255))
            value = builder.ashr(builder.shl(inputs, simd.integers(24 - 8 * i)), simd.integers(24))
            total = builder.add(total, builder.mul(weight, value))
        return total

    def _multiply_halves(self, weights: Value, inputs: Value) -> Value:
        """Return the sums of the products of two pairs in each 32-bit lane, from two registers of AVX2."""
        builder = self._builder
        halves = []
        for first in (0, 16):
            lanes = ir.Constant(ir.VectorType(simd.I32, 16), list(range(first, first + 16)))
            args = [builder.shuffle_vector(x, x, lanes) for x in (weights, inputs)]
            halves.append(simd.call(builder, "llvm.x86.avx2.pmadd.wd", ir.VectorType(simd.I32, 8), args))
        return builder.shuffle_vector(*halves, ir.Constant(simd.I32X16, list(range(16))))


def _lanes(first: int, count: int) -> Value:
    return ir.Constant(ir.VectorType(simd.I32, count), list(range(first, first + count)))


def _words(value: int) -> Value:
    return ir.Constant(simd.I16X32, [value] * 32)
