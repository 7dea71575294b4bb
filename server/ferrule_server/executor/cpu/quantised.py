"""Quantised matrices: how they are kept from loading to packing, a row of bytes for each row of the weight.

    int8   [inputs] int8, [1] float32            a scale for the row
    int4   [inputs / 2] bytes, [inputs / 32] bfloat16    a scale for every 32 inputs

The integers are in the order of ``kernels.cpu.dot_quantised``. Rows can be moved, padded with zeros and put together as
those of the weight itself. A matrix is quantised as soon as it has been read, so there is never a second copy of the
model in memory.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ferrule_server.kernels.cpu.dot import GROUP, TILE_INPUTS
from ferrule_server.kernels.cpu.plan import WeightKind
from ferrule_server.kernels.quantise import quantise_blocks, quantise_rows
from ferrule_server.model.weights import Encoding

__all__ = ["decode", "encode", "encoding_of", "pack_rows", "packed_bytes", "unpack_rows"]

_VERSION: Final = 1
"""Raised whenever the same weights are quantised to other integers or scales than before."""

_ROWS_AT_ONCE: Final = 256
_WORDS: Final = 4
"""int32 words of 32 inputs in int4."""
_TILE_BYTES: Final = _WORDS * 4 * GROUP


def _width(num_inputs: int) -> int:
    return -(-num_inputs // TILE_INPUTS) * TILE_INPUTS


def _row_bytes(kind: WeightKind, width: int) -> tuple[int, int]:
    """Return the bytes of the integers of a row, and of its scales."""
    return (width, 4) if kind == "int8" else (width // 2, width // TILE_INPUTS * 2)


def packed_bytes(kind: WeightKind, num_rows: int, num_inputs: int) -> int:
    """Return the bytes of a packed matrix with whole groups of rows."""
    return num_rows * sum(_row_bytes(kind, _width(num_inputs)))


def encoding_of(kind: WeightKind) -> Encoding | None:
    """Return the form in which matrices are kept; None if they are not quantised."""
    return None if kind == "float" else Encoding(f"{kind}/{_VERSION}", lambda weight: encode(weight, kind))


def encode(weight: Tensor, kind: WeightKind) -> Tensor:
    """Return a matrix [rows, inputs] as rows of bytes."""
    width = _width(weight.shape[1])
    sizes = _row_bytes(kind, width)
    rows = torch.empty((weight.shape[0], sum(sizes)), dtype=torch.uint8)
    for begin in range(0, len(weight), _ROWS_AT_ONCE):
        part = weight[begin : begin + _ROWS_AT_ONCE].float()
        if width != weight.shape[1]:
            part = F.pad(part, (0, width - weight.shape[1]))
        integers, scales = _encode_int8(part) if kind == "int8" else _encode_int4(part)
        rows[begin : begin + _ROWS_AT_ONCE] = torch.cat((integers, scales), 1)
    return rows


def _encode_int8(part: Tensor) -> tuple[Tensor, Tensor]:
    integers, scales = quantise_rows(part)
    return _exchange(integers.view(torch.int32)).view(torch.uint8), scales.view(-1, 1).view(torch.uint8)


def _exchange(words: Tensor) -> Tensor:
    """Return int32 words with the two bytes in their middle exchanged."""
    difference = ((words >> 8) ^ words) & 0xFF00
    return words ^ difference ^ (difference << 8)


def _encode_int4(part: Tensor) -> tuple[Tensor, Tensor]:
    integers, scales = quantise_blocks(part, TILE_INPUTS)
    nibbles = integers.view(torch.int32) & 0x0F0F0F0F
    nibbles |= nibbles >> 12  # the low bytes: inputs 0 | 2 and 1 | 3, or 4 | 6 and 5 | 7
    first, second = nibbles[:, ::2], nibbles[:, 1::2]
    ordered = (first & 0xFF) | (second & 0xFF) << 8 | (first & 0xFF00) << 8 | (second & 0xFF00) << 16
    return ordered.view(torch.uint8), scales.view(torch.uint8)


def decode(rows: Tensor, kind: WeightKind, num_inputs: int) -> Tensor:
    """Return the matrix [rows, inputs] that rows of bytes stand for: float32."""
    width = _width(num_inputs)
    size, _ = _row_bytes(kind, width)
    integers, scales = rows[:, :size].contiguous(), rows[:, size:].contiguous()
    if kind == "int8":
        natural = _exchange(integers.view(torch.int32)).view(torch.int8)
        return (natural.float() * scales.view(torch.float32))[:, :num_inputs]
    halves = integers.view(torch.int8).view(len(rows), -1, 2, 2).transpose(2, 3)
    low, high = ((halves & 15) ^ 8) - 8, halves >> 4
    natural = torch.stack((low, high), 3).view(len(rows), -1, TILE_INPUTS)
    return (natural.float() * scales.view(torch.bfloat16).float().unsqueeze(2)).flatten(1)[:, :num_inputs]


def _views(packed: Tensor, kind: WeightKind, width: int) -> tuple[Tensor, Tensor]:
    """Return the integers and the scales of packed memory, both [groups, 64, ...] in the order of rows of bytes."""
    if kind == "int8":
        groups = packed.view(-1, GROUP * (width + 4))
        words = groups[:, : GROUP * width].view(torch.int32).unflatten(1, (-1, GROUP))
        scales = groups[:, GROUP * width :].view(torch.float32).unsqueeze(2)
        return words.transpose(1, 2), scales
    tiles = packed.view(-1, width // TILE_INPUTS, _TILE_BYTES + 2 * GROUP)
    words = tiles[:, :, :_TILE_BYTES].view(torch.int32).unflatten(2, (_WORDS, GROUP))
    scales = tiles[:, :, _TILE_BYTES:].view(torch.bfloat16)
    return words.permute(0, 3, 1, 2), scales.transpose(1, 2)


def pack_rows(rows: Tensor, kind: WeightKind, num_inputs: int, packed: Tensor) -> None:
    """Write rows of bytes, whole groups of 64, into packed memory."""
    width = _width(num_inputs)
    size, _ = _row_bytes(kind, width)
    for target, source in zip(_views(packed, kind, width), (rows[:, :size], rows[:, size:]), strict=True):
        target.copy_(source.contiguous().view(target.dtype).view(target.shape))


def unpack_rows(packed: Tensor, kind: WeightKind, num_inputs: int) -> Tensor:
    """Return the matrix [whole groups, inputs] of packed memory: float32."""
    width = _width(num_inputs)
    parts = [
        view.flatten(2).flatten(0, 1).contiguous().view(torch.uint8) for view in _views(packed, kind, width)
    ]
    return decode(torch.cat(parts, 1), kind, num_inputs)
