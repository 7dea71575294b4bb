"""The product of rows of inputs and a group of 64 outputs with the tiles of AMX, and the configuration of the tiles.

A tile is a register of 16 rows of 64 bytes. Sixteen rows of 32 inputs are a tile as they lie in memory, and so is a
packed tile of a weight; their product adds to a tile of float32 sums, 16 rows and 16 outputs::

    up to 16 rows     4 sums (16 rows x 64 outputs), 1 of inputs, 2 of weights in turn
    up to 32 rows     twice: 4 sums (32 rows x 32 outputs), 2 of inputs, 2 of weights

Rows beyond the given ones are computed too and ignored: the memory of inputs and sums must have them. The processor
treats numbers below the smallest normal one as zero. This code has been checked by its assembly, and its bits through
the emulation in ``dot``; it has not been run on a processor that has AMX.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ferrule_server.kernels.cpu.lanes import I8, I16, I64, Builder, Value, emit_prefetch, offset, pointer, write
from ferrule_server.kernels.cpu.loops import loop

__all__ = ["TILE_ROWS", "begin_tiles", "emit_tile_product", "end_tiles"]

TILE_ROWS: Final = 16
_TILE_BYTES: Final = 1024
_ROW_BYTES: Final = 64
_NUM_TILES: Final = 8
_GROUP_TILES: Final = 4
_PALETTE: Final = 1
_AHEAD: Final = 8192
"""How far ahead weights are brought near, in bytes."""


def _tile(number: int) -> Value:
    return ir.Constant(I8, number)


def _call(builder: Builder, name: str, args: list[Value]) -> None:
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), args)


def _load(builder: Builder, tile: int, address: Value, row_bytes: Value) -> None:
    _call(builder, "tileloadd64", [_tile(tile), pointer(builder, address, I8), row_bytes])


def _add_product(builder: Builder, total: int, inputs: int, weight: int) -> None:
    _call(builder, "tdpbf16ps", [_tile(total), _tile(inputs), _tile(weight)])


@intrinsic
def begin_tiles(typing: Any, plan: Any) -> Any:
    """Configure the tiles of this thread, all of the full size; nothing without AMX."""
    has_tiles = plan.plan.has_tiles

    def emit(context: Any, builder: Builder, _signature: Any, _args: Any) -> Value:
        if has_tiles:
            room = cgutils.alloca_once(builder, ir.ArrayType(I64, 8))
            address = builder.ptrtoint(room, I64)
            for i in range(8):
                write(builder, ir.Constant(I64, 0), offset(builder, address, 8 * i), 8)
            write(builder, ir.Constant(I8, _PALETTE), address, 1)
            for tile in range(_NUM_TILES):
                write(builder, ir.Constant(I16, _ROW_BYTES), offset(builder, address, 16 + 2 * tile), 2)
                write(builder, ir.Constant(I8, TILE_ROWS), offset(builder, address, 48 + tile), 1)
            _call(builder, "ldtilecfg", [pointer(builder, address, I8)])
        return context.get_dummy_value()

    return types.void(plan), emit


@intrinsic
def end_tiles(typing: Any, plan: Any) -> Any:
    """Give the tiles of this thread back, so that the system need not keep them for it; nothing without AMX."""
    has_tiles = plan.plan.has_tiles

    def emit(context: Any, builder: Builder, _signature: Any, _args: Any) -> Value:
        if has_tiles:
            _call(builder, "tilerelease", [])
        return context.get_dummy_value()

    return types.void(plan), emit


def emit_tile_product(
    builder: Builder,
    num_rows: int,
    weight: Value,
    num_tiles: Value,
    inputs: Value,
    row_bytes: Value,
    out: Value,
    out_row_bytes: Value,
) -> None:
    """Write the code of ``dot.dot_group`` for up to 16 or up to 32 rows; the builder is left behind it."""
    halves = [0] if num_rows <= TILE_ROWS else [0, 1]
    at_once = _GROUP_TILES // len(halves)
    for first in range(0, _GROUP_TILES, at_once):
        sums = {(half, t): half * at_once + t for half in halves for t in range(at_once)}
        for tile in sums.values():
            _call(builder, "tilezero", [_tile(tile)])

        def step(k: Value, _: list[Value], sums: dict[tuple[int, int], int] = sums, first: int = first) -> list[Value]:
            start = builder.add(weight, builder.mul(k, ir.Constant(I64, _GROUP_TILES * _TILE_BYTES)))
            column = builder.add(inputs, builder.mul(k, ir.Constant(I64, _ROW_BYTES)))
            if first == 0:
                for line in range(0, _GROUP_TILES * _TILE_BYTES, _ROW_BYTES):
                    emit_prefetch(builder, offset(builder, start, _AHEAD + line))
            for half in halves:
                row = builder.add(column, builder.mul(row_bytes, ir.Constant(I64, TILE_ROWS * half)))
                _load(builder, 4 + half, row, row_bytes)
            for t in range(at_once):
                place = 6 + t % 2
                _load(builder, place, offset(builder, start, (first + t) * _TILE_BYTES), ir.Constant(I64, _ROW_BYTES))
                for half in halves:
                    _add_product(builder, sums[half, t], 4 + half, place)
            return []

        loop(builder, num_tiles, [], step)
        for (half, t), tile in sums.items():
            row = builder.add(out, builder.mul(out_row_bytes, ir.Constant(I64, TILE_ROWS * half)))
            place = pointer(builder, offset(builder, row, _ROW_BYTES * (first + t)), I8)
            _call(builder, "tilestored64", [_tile(tile), place, out_row_bytes])
