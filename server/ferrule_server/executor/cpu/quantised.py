"""What packed integers stand for: the way back from ``kernels.cpu.pack``, for torch if it must take over."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ferrule_server.kernels.cpu.dot import GROUP, TILE_INPUTS
from ferrule_server.kernels.cpu.plan import Plan

__all__ = ["unpack_quantised"]

_WORDS: Final = 4
"""int32 words of 32 inputs in int4."""
_TILE_BYTES: Final = _WORDS * 4 * GROUP


def unpack_quantised(plan: Plan, packed: Tensor, num_inputs: int) -> Tensor:
    """Return the matrix [whole groups, inputs] of packed memory, uint8: float32."""
    num_tiles = -(-num_inputs // TILE_INPUTS)
    values = _unpack_int8(packed, num_tiles) if plan.weights == "int8" else _unpack_int4(packed, num_tiles)
    return values[:, :num_inputs]


def _unpack_int8(packed: Tensor, num_tiles: int) -> Tensor:
    width = num_tiles * TILE_INPUTS
    groups = packed.view(-1, GROUP * (width + 4))
    words = groups[:, : GROUP * width].view(torch.int8).reshape(len(groups), -1, GROUP, 2, 2)
    integers = words.permute(0, 2, 1, 4, 3).reshape(-1, width)
    scales = groups[:, GROUP * width :].contiguous().view(torch.float32)
    return torch.mul(integers, scales.view(-1, 1))


def _unpack_int4(packed: Tensor, num_tiles: int) -> Tensor:
    tiles = packed.view(-1, num_tiles, _TILE_BYTES + 2 * GROUP)
    words = tiles[:, :, :_TILE_BYTES].reshape(len(tiles), num_tiles, _WORDS, GROUP, 2, 2).view(torch.int8)
    bytes_ = words.permute(0, 3, 1, 2, 5, 4)  # [groups, 64, tiles, words, inputs 0-3 or 4-7, even or odd]
    integers = torch.stack((((bytes_ & 15) ^ 8) - 8, bytes_ >> 4), 5)
    scales = tiles[:, :, _TILE_BYTES:].contiguous().view(torch.bfloat16).transpose(1, 2)
    return (integers.flatten(3) * scales.float().unsqueeze(3)).flatten(0, 1).flatten(1)
