"""Write the codes of a packed matrix as the kernels read them (``kernels.cpu.dot_quantised``)."""

from __future__ import annotations

import numpy as np

from ferrule_server.executor.cpu.units import GROUP
from ferrule_server.kernels.matrix_kinds import TILE_INPUTS, MatrixKind
from ferrule_server.model.packed import Array, Codes


def lay_out(codes: Codes, out: Array) -> None:
    """Write whole groups of 64 rows.

    Args:
        codes: Of a multiple of 64 rows, each with whole tiles.
        out: uint8 [bytes], all that their kind says; overwritten.
    """
    kind = codes.kind
    num_groups, num_supers = len(codes.codes) // GROUP, codes.codes.shape[1] // (TILE_INPUTS * kind.super_tiles)
    places = out.view(_record_of(kind)).reshape(num_groups, num_supers)
    words = _bytes_in_order(codes.codes) if kind.bits == 8 else _nibbles_in_order(codes.codes, kind)
    shape = (num_groups, GROUP, num_supers, kind.super_tiles, -1)
    places["tiles"]["codes"] = words.reshape(shape).transpose(0, 2, 3, 4, 1)
    for name, values, shared in (
        ("scales", codes.scales, codes.shared_scales),
        ("offsets", codes.offsets, codes.shared_offsets),
    ):
        if values is not None:
            places["tiles"][name] = values.reshape(shape).transpose(0, 2, 3, 4, 1)
        if shared is not None:
            places[f"shared_{name}"] = shared.reshape(num_groups, GROUP, num_supers).transpose(0, 2, 1)


def _record_of(kind: MatrixKind) -> np.dtype[np.void]:
    """Return the layout of the tiles that share float16 numbers, and of these numbers."""
    number = {"float16": np.float16, "int8": np.int8, "exponent": np.uint8}[kind.scale]
    scales = (number, (TILE_INPUTS // kind.group, GROUP))
    names = ("scales", "offsets") if kind.has_offset else ("scales",)
    tile = np.dtype([("codes", np.uint32, (kind.bits, GROUP)), *((name, *scales) for name in names)])
    shared = [(f"shared_{name}", np.float16, (GROUP,)) for name in names] if kind.super_bytes else []
    return np.dtype([("tiles", tile, (kind.super_tiles,)), *shared])


def _bytes_in_order(codes: Array) -> Array:
    """Return words of 4 codes: 0, 2, 1, 3."""
    words = np.ascontiguousarray(codes).view(np.uint32)
    return words & 0xFF0000FF | words >> 8 & 0xFF00 | words << 8 & 0xFF0000


def _nibbles_in_order(codes: Array, kind: MatrixKind) -> Array:
    """Return words of 8 codes: 0, 2, 4, 6, 1, 3, 5, 7."""
    signed = codes ^ np.uint8(kind.code_mask) if kind.code_mask else np.ascontiguousarray(codes)
    eights: Array = signed.view(np.uint64)
    eights = eights | eights >> 12  # bytes 0, 1, 4 and 5 hold two codes each
    eights = eights & 0xFF | eights >> 24 & 0xFF00 | eights << 8 & 0xFF0000 | eights >> 16 & 0xFF000000
    return eights.astype(np.uint32)
