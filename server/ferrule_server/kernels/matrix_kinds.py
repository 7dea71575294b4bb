"""The kinds of matrices: in which form the numbers of a linear layer are kept in memory.

A packed matrix holds *codes*, integers of 4 or 8 bits. A number is ``scale * level(code) + offset``; a group of
neighbours in a row shares scale and offset. These may be kept in two levels, as int8 times a float16 that 256 numbers
share. A new format is another entry of numbers here, not other code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

TILE_INPUTS: Final = 32
"""Inputs of a tile."""
_GROUP: Final = 64
"""Outputs of a tile."""
_SUPER_TILES: Final = 8
"""Tiles whose scales share a float16 if scales are int8."""
_SCALE_BYTES: Final = {"float16": 2, "int8": 1, "exponent": 1}

SIGNED_LEVELS: Final = tuple(range(-8, 8))

ScaleForm = Literal["", "float32", "float16", "int8", "exponent"]


@dataclass(frozen=True, slots=True)
class MatrixKind:
    """How the matrix of a linear layer is packed: groups of 64 outputs, each with tiles of 32 inputs.

    Attributes:
        name: Names the form, for people and for fingerprints.
        bits: Of a number: 32 and 16 are float32 and bfloat16, 8 and 4 are codes with scales.
        group: Inputs of a row that share a scale: 16 or 32; 0: all of them, which only int8 codes with float32 do.
        scale: How scales are kept, and offsets if there are any: as float32, as float16, as int8 times a float16 that
            256 inputs share, or as the exponent ``e`` of ``2 ** (e - 128)``. Empty: there are none.
        has_offset: A group has an offset too.
        levels: What the 16 codes of 4 bits stand for; empty: themselves, from 0 to 15. Codes of 8 bits are signed.
    """

    name: str
    bits: int
    group: int = 0
    scale: ScaleForm = ""
    has_offset: bool = False
    levels: tuple[int, ...] = ()

    @property
    def is_quantised(self) -> bool:
        """The weights are integers with scales, and so are the inputs."""
        return self.bits <= 8

    @property
    def is_grouped(self) -> bool:
        """Scales belong to groups of inputs, not to rows."""
        return self.group > 0

    @property
    def all_levels(self) -> tuple[int, ...]:
        """What the 16 codes of 4 bits stand for."""
        return self.levels or tuple(range(16))

    @property
    def code_mask(self) -> int:
        """What codes of 4 bits are exchanged by when they are packed: from -8 to 7, they become such integers."""
        return 8 if self.levels == SIGNED_LEVELS else 0

    @property
    def super_tiles(self) -> int:
        """Tiles whose scales share float16 numbers, which follow them; 1: there are no such numbers."""
        return _SUPER_TILES if self.scale == "int8" else 1

    @property
    def super_bytes(self) -> int:
        """Bytes of the float16 numbers after ``super_tiles`` tiles."""
        return 2 * _GROUP * (1 + self.has_offset) if self.scale == "int8" else 0

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a tile, or of its floats."""
        return _GROUP * TILE_INPUTS * self.bits // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a tile and one group of its inputs, and of its offsets."""
        return _GROUP * _SCALE_BYTES[self.scale] if self.is_grouped else 0

    @property
    def own_bytes(self) -> int:
        """Bytes of a tile without the float16 numbers that it shares."""
        if not self.is_grouped:
            return self.code_bytes
        return self.code_bytes + TILE_INPUTS // self.group * self.scale_bytes * (1 + self.has_offset)

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile, on average; exact for every multiple of ``super_tiles``."""
        return self.own_bytes + self.super_bytes // self.super_tiles

    @property
    def group_end_bytes(self) -> int:
        """Bytes after the last tile of a group of outputs: the scales of its rows."""
        return 4 * _GROUP if self.scale == "float32" else 0

    def packed_bytes(self, num_rows: int, num_inputs: int) -> int:
        """Return the bytes of a matrix whose rows are whole groups."""
        return num_rows // _GROUP * (-(-num_inputs // TILE_INPUTS) * self.tile_bytes + self.group_end_bytes)


FLOAT32: Final = MatrixKind("float32", 32)
BFLOAT16: Final = MatrixKind("bfloat16", 16)
INT8: Final = MatrixKind("int8", 8, 0, "float32")
CODES4_OFFSET: Final = MatrixKind("codes4/32+offset", 4, 32, "float16", has_offset=True)
