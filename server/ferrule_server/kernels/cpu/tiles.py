"""The product of rows of inputs and a group of 64 outputs with the tiles of AMX, and the configuration of the tiles.

A tile is a register of 16 rows of 64 bytes. Sixteen rows of 32 inputs are a tile as they lie in memory, and so are the
packed weights of 16 outputs; their product adds to a tile of float32 sums, 16 rows and 16 outputs::

    up to 16 rows     4 sums (16 rows x 64 outputs), 1 of inputs, 2 of weights in turn
    up to 32 rows     twice: 4 sums (32 rows x 32 outputs), 2 of inputs, 2 of weights

Rows beyond the given ones are computed too and ignored: the memory of inputs and sums must have them. The processor
treats numbers below the smallest normal one as zero. This code has been checked by its assembly, and its bits through
the emulation in ``dot``; it has not been run on a processor that has AMX.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from llvmlite import ir
from numba import types
from numba.core import cgutils

from ferrule_server.kernels.cpu.kernel import operation
from ferrule_server.kernels.cpu.lanes import I8, I16, I64, Builder, Value, advance, call, offset, pointer, write
from ferrule_server.kernels.cpu.loops import LINE, loop, prefetch_lines
from ferrule_server.kernels.cpu.operands import Operands
from ferrule_server.kernels.cpu.plan import Plan, PlanType

TILE_ROWS: Final = 16
_TILE_BYTES: Final = 1024
_ROW_BYTES: Final = 64
_WEIGHT_BYTES: Final = 256
"""From the weights of one pair of inputs to those of the next."""
_NUM_TILES: Final = 8
_GROUP_TILES: Final = 4
_PALETTE: Final = 1


def _tile(number: int) -> Value:
    return ir.Constant(I8, number)


def _call(builder: Builder, name: str, args: list[Value]) -> None:
    call(builder, f"llvm.x86.{name}", ir.VoidType(), args)


def _load(builder: Builder, tile: int, address: Value, row_bytes: Value) -> None:
    _call(builder, "tileloadd64", [_tile(tile), pointer(builder, address, I8), row_bytes])


def _add_product(builder: Builder, total: int, inputs: int, weight: int) -> None:
    _call(builder, "tdpbf16ps", [_tile(total), _tile(inputs), _tile(weight)])


@operation(types.void, PlanType)
def begin_tiles(builder: Builder, plan: Plan) -> None:
    """Configure the tiles of this thread, all of the full size; nothing without AMX."""
    if not plan.has_tiles:
        return
    room = cgutils.alloca_once(builder, ir.ArrayType(I64, 8))
    address = builder.ptrtoint(room, I64)
    for i in range(8):
        write(builder, ir.Constant(I64, 0), offset(builder, address, 8 * i), 8)
    write(builder, ir.Constant(I8, _PALETTE), address, 1)
    for tile in range(_NUM_TILES):
        write(builder, ir.Constant(I16, _ROW_BYTES), offset(builder, address, 16 + 2 * tile), 2)
        write(builder, ir.Constant(I8, TILE_ROWS), offset(builder, address, 48 + tile), 1)
    _call(builder, "ldtilecfg", [pointer(builder, address, I8)])


@operation(types.void, PlanType)
def end_tiles(builder: Builder, plan: Plan) -> None:
    """Give the tiles of this thread back, so that the system need not keep them for it; nothing without AMX."""
    if plan.has_tiles:
        _call(builder, "tilerelease", [])


def sweep_of_lines(builder: Builder, given: Operands, first: int, at_once: int) -> Callable[[Value, Value, int], None]:
    """Return what writes the code that prefetches cache lines during one of the sweeps over the tiles of a group.

    Args:
        builder: Writes the code.
        given: Which lines, for all sweeps together.
        first: Of the four tiles, where this sweep begins.
        at_once: How many it has.

    Returns:
        Called with the number of the tile of inputs, and with a piece of it and how many pieces it has.
    """
    count = builder.udiv(given.num_lines, ir.Constant(I64, _GROUP_TILES // at_once))
    num_bytes = builder.mul(count, ir.Constant(I64, LINE))
    begin = advance(builder, given.ahead, builder.mul(num_bytes, given.num_tiles), first // at_once)

    def emit(k: Value, piece: Value, num_pieces: int) -> None:
        in_piece = builder.udiv(count, ir.Constant(I64, num_pieces))
        here = builder.add(
            builder.add(begin, builder.mul(k, num_bytes)),
            builder.mul(piece, builder.mul(in_piece, ir.Constant(I64, LINE))),
        )
        prefetch_lines(builder, here, in_piece)

    return emit


def emit_tile_product(builder: Builder, num_rows: int, given: Operands) -> None:
    """Write the code of ``dot.dot_group`` for up to 16 or up to 32 rows; the builder is positioned after it."""
    halves = range(-(-num_rows // TILE_ROWS))
    at_once = _GROUP_TILES // len(halves)

    def emit_sweep(first: int) -> None:
        sums = {(half, t): half * at_once + t for half in halves for t in range(at_once)}
        lines = sweep_of_lines(builder, given, first, at_once)
        out, out_row_bytes = given.out, given.out_row_bytes
        addresses = [
            offset(builder, advance(builder, out, out_row_bytes, TILE_ROWS * half), _ROW_BYTES * (first + t))
            for half, t in sums
        ]
        for tile, address in zip(sums.values(), addresses, strict=True):
            _load(builder, tile, address, out_row_bytes)

        def step(k: Value, _: list[Value]) -> list[Value]:
            start = advance(builder, given.weight, k, _GROUP_TILES * _TILE_BYTES)
            column = advance(builder, given.inputs, k, _ROW_BYTES)
            lines(k, ir.Constant(I64, 0), 1)
            for half in halves:
                row = advance(builder, column, given.row_bytes, TILE_ROWS * half)
                _load(builder, 4 + half, row, given.row_bytes)
            for t in range(at_once):
                place = 6 + t % 2
                weights = offset(builder, start, (first + t) * _ROW_BYTES)
                _load(builder, place, weights, ir.Constant(I64, _WEIGHT_BYTES))
                for half in halves:
                    _add_product(builder, sums[half, t], 4 + half, place)
            return []

        loop(builder, given.num_tiles, [], step)
        for tile, address in zip(sums.values(), addresses, strict=True):
            _call(builder, "tilestored64", [_tile(tile), pointer(builder, address, I8), out_row_bytes])

    for first in range(0, _GROUP_TILES, at_once):
        emit_sweep(first)
