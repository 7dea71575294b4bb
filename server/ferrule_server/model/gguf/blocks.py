"""The block types of GGUF: how many bytes a block has, and how its numbers are read as codes with scales.

The layouts are those of ggml (``ggml-common.h``, MIT licence). A K block has 256 values, with scales of 6 bits or 8 for
each 16 or 32 of them; other blocks have 32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ferrule_server.kernels.matrix_kinds import CODES4_OFFSET, SIGNED_LEVELS, MatrixKind
from ferrule_server.model.packed import Array, Codes, Float32Array

Bytes = npt.NDArray[np.uint8]
_Parts = tuple[Array, ...] | tuple[Array, Array, None, Array]

_IQ4: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_LOW_NIBBLES: Final = np.uint64(0x0F0F0F0F0F0F0F0F)
_FLOAT_SCALES: Final = MatrixKind("codes8/32", 8, 32, "float16")
_SIGNED_NIBBLES: Final = MatrixKind("codes4/32", 4, 32, "float16", levels=SIGNED_LEVELS)


@dataclass(frozen=True, slots=True)
class BlockType:
    """A block type.

    Attributes:
        num_values: Of a block.
        num_bytes: Of a block.
        kind: The form in which its numbers are packed.
        read: Returns the fields of :class:`Codes` after ``kind`` for blocks, uint8 [n, num_bytes]; each [n, any].
    """

    num_values: int
    num_bytes: int
    kind: MatrixKind
    read: Callable[[Bytes], _Parts]

    def codes(self, rows: Bytes) -> Codes:
        """Return the codes of rows of blocks, uint8 [rows, row_bytes]."""
        parts = self.read(rows.reshape(-1, self.num_bytes))
        return Codes(self.kind, *(None if part is None else part.reshape(len(rows), -1) for part in parts))  # type: ignore[arg-type]


def dequantise(name: str, rows: Bytes) -> Float32Array:
    """Return the numbers of rows of blocks, float32 [rows, inputs].

    Args:
        name: The block type.
        rows: uint8 [rows, row_bytes].
    """
    return BLOCKS[name].codes(rows).unpack()


def _halves(blocks: Bytes, begin: int) -> Array:
    """Return a float16 of each block, [n, 1]."""
    return blocks[:, begin : begin + 2].copy().view(np.float16)


def _nibbles(blocks: Bytes) -> Array:
    """Return the low nibbles, then the high ones, along the last axis, which has a multiple of 8 bytes."""
    words = np.ascontiguousarray(blocks).view(np.uint64)
    nibbles = np.stack((words & _LOW_NIBBLES, words >> 4 & _LOW_NIBBLES), -2)
    return nibbles.reshape(*blocks.shape[:-1], -1).view(np.uint8)


def _pairs(blocks: Bytes) -> Array:
    """Return the four pairs of bits of bytes [n, 64], the 32 lowest pairs of each half first: [n, 256]."""
    halves = blocks.reshape(-1, 2, 1, 32)
    return (halves >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(-1, 256)


def _bits(blocks: Bytes) -> Array:
    """Return the bits of bytes [n, 32], the 32 lowest first: [n, 256]."""
    return (blocks[:, None] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(-1, 256)


def _five_bits(blocks: Bytes, begin: int) -> Array:
    """Return values of 5 bits: 32 high bits, then nibbles."""
    high = np.unpackbits(blocks[:, begin : begin + 4], axis=1, bitorder="little")
    codes: Array = _nibbles(blocks[:, begin + 4 : begin + 20]) | high << 4
    return codes


def _read_q4_0(blocks: Bytes) -> _Parts:
    return _nibbles(blocks[:, 2:]), _halves(blocks, 0)


def _read_q4_1(blocks: Bytes) -> _Parts:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _read_q5_0(blocks: Bytes) -> _Parts:
    return _five_bits(blocks, 2).view(np.int8) - np.int8(16), _halves(blocks, 0)


def _read_q5_1(blocks: Bytes) -> _Parts:
    return _five_bits(blocks, 4).view(np.int8), _halves(blocks, 0), _halves(blocks, 2)


def _read_q8_0(blocks: Bytes) -> _Parts:
    return blocks[:, 2:].view(np.int8), _halves(blocks, 0)


def _read_q2_k(blocks: Bytes) -> _Parts:
    scales, offsets = (each.view(np.int8) for each in (blocks[:, :16] & 15, blocks[:, :16] >> 4))
    return _pairs(blocks[:, 16:80]), scales, offsets, _halves(blocks, 80), -_halves(blocks, 82)


def _read_q3_k(blocks: Bytes) -> _Parts:
    low = _nibbles(blocks[:, 96:104])
    high = (blocks[:, None, 104:108] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(-1, 16)
    codes = _pairs(blocks[:, 32:96]).view(np.int8) - (np.int8(4) - (_bits(blocks[:, :32]) << 2).view(np.int8))
    return codes, (low | high << 4).view(np.int8) - np.int8(32), None, _halves(blocks, 108)


def _scales_of_six_bits(blocks: Bytes) -> tuple[Array, Array]:
    """Return 8 scales and 8 offsets of bytes [n, 12]."""
    first, second, third = (blocks[:, i : i + 4] for i in (0, 4, 8))
    scales = np.concatenate((first & 63, third & 15 | first >> 6 << 4), 1)
    offsets = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), 1)
    return scales.view(np.int8), offsets.view(np.int8)


def _read_q4_k(blocks: Bytes) -> _Parts:
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256)
    return codes, *_scales_of_six_bits(blocks[:, 4:16]), _halves(blocks, 0), -_halves(blocks, 2)


def _read_q5_k(blocks: Bytes) -> _Parts:
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 256) | _bits(blocks[:, 16:48]) << 4
    return codes.view(np.int8), *_scales_of_six_bits(blocks[:, 4:16]), _halves(blocks, 0), -_halves(blocks, 2)


def _read_q6_k(blocks: Bytes) -> _Parts:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
    codes = (low | _pairs(blocks[:, 128:192]) << 4).view(np.int8) - np.int8(32)
    return codes, blocks[:, 192:208].view(np.int8), None, _halves(blocks, 208)


def _read_iq4_xs(blocks: Bytes) -> _Parts:
    low = np.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), -1).reshape(-1, 8)
    high = blocks[:, 2:4].copy().view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = (low | high.astype(np.uint8) << 4).view(np.int8) - np.int8(32)
    return _nibbles(blocks[:, 8:].reshape(-1, 8, 16)).reshape(-1, 256), scales, None, _halves(blocks, 0)


def _read_mxfp4(blocks: Bytes) -> _Parts:
    return _nibbles(blocks[:, 1:]), blocks[:, :1]


BLOCKS: Final[Mapping[str, BlockType]] = {
    "Q4_0": BlockType(32, 18, _SIGNED_NIBBLES, _read_q4_0),
    "Q4_1": BlockType(32, 20, CODES4_OFFSET, _read_q4_1),
    "Q5_0": BlockType(32, 22, _FLOAT_SCALES, _read_q5_0),
    "Q5_1": BlockType(32, 24, MatrixKind("codes8/32+offset", 8, 32, "float16", has_offset=True), _read_q5_1),
    "Q8_0": BlockType(32, 34, _FLOAT_SCALES, _read_q8_0),
    "Q2_K": BlockType(256, 84, MatrixKind("codes4/16+offset/256", 4, 16, "int8", has_offset=True), _read_q2_k),
    "Q3_K": BlockType(256, 110, MatrixKind("codes8/16/256", 8, 16, "int8"), _read_q3_k),
    "Q4_K": BlockType(256, 144, MatrixKind("codes4/32+offset/256", 4, 32, "int8", has_offset=True), _read_q4_k),
    "Q5_K": BlockType(256, 176, MatrixKind("codes8/32+offset/256", 8, 32, "int8", has_offset=True), _read_q5_k),
    "Q6_K": BlockType(256, 210, MatrixKind("codes8/16/256", 8, 16, "int8"), _read_q6_k),
    "IQ4_NL": BlockType(32, 18, MatrixKind("table4/32", 4, 32, "float16", levels=_IQ4), _read_q4_0),
    "IQ4_XS": BlockType(256, 136, MatrixKind("table4/32/256", 4, 32, "int8", levels=_IQ4), _read_iq4_xs),
    "MXFP4": BlockType(32, 17, MatrixKind("fp4/32", 4, 32, "exponent", levels=_FP4), _read_mxfp4),
}
"""Every type of blocks that is read, by its name in ggml."""
