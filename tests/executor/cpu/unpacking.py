"""The way back from packed weights, to compare with those that were packed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from ferrule_server.executor.cpu.units import GROUP, HeadUnits
from ferrule_server.executor.cpu.weights import Packed, PackedMatrix, PackedModel
from ferrule_server.kernels.matrix_kinds import TILE_INPUTS, MatrixKind
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.parts import TensorSpec, specs
from ferrule_server.model.tensors import ModelWeights, on_meta

_HALF: Final = GROUP // 2
_WORDS: Final = 4
"""int32 words of 32 inputs in int4."""
_TILE_BYTES: Final = _WORDS * 4 * GROUP


def unpack_rows(kind: MatrixKind, packed: Tensor, num_inputs: int) -> Tensor:
    """Return the matrix [whole groups, inputs] of packed memory, uint8: float32 if it is quantised."""
    num_tiles = -(-num_inputs // TILE_INPUTS)
    return _UNPACK[kind.name](packed, num_tiles)[:, :num_inputs]


def _unpack_bfloat16(packed: Tensor, num_tiles: int) -> Tensor:
    pairs = packed.view(torch.bfloat16).view(-1, num_tiles * TILE_INPUTS // 2, GROUP, 2)
    return pairs.transpose(1, 2).reshape(-1, num_tiles * TILE_INPUTS)


def _unpack_float32(packed: Tensor, num_tiles: int) -> Tensor:
    values = packed.view(torch.float32).view(-1, num_tiles * TILE_INPUTS, GROUP)
    return values.transpose(1, 2).reshape(-1, num_tiles * TILE_INPUTS)


def _unpack_int8(packed: Tensor, num_tiles: int) -> Tensor:
    width = num_tiles * TILE_INPUTS
    groups = packed.view(-1, GROUP * (width + 4))
    words = groups[:, : GROUP * width].view(torch.int8).reshape(len(groups), -1, GROUP, 2, 2)
    integers = words.permute(0, 2, 1, 4, 3).reshape(-1, width)
    scales = groups[:, GROUP * width :].contiguous().view(torch.float32)
    return torch.mul(integers, scales.view(-1, 1))


def _unpack_codes(packed: Tensor, num_tiles: int) -> Tensor:
    tiles = packed.view(-1, num_tiles, _TILE_BYTES + 4 * GROUP)
    words = tiles[:, :, :_TILE_BYTES].reshape(len(tiles), num_tiles, _WORDS, GROUP, 2, 2)
    bytes_ = words.permute(0, 3, 1, 2, 5, 4)  # [groups, 64, tiles, words, inputs 0-3 or 4-7, even or odd]
    codes = torch.stack((bytes_ & 15, bytes_ >> 4), 5).flatten(3)
    halves = tiles[:, :, _TILE_BYTES:].contiguous().view(torch.float16).view(len(tiles), num_tiles, 2, GROUP)
    scales, offsets = halves.float().permute(2, 0, 3, 1).unsqueeze(4)
    values: Tensor = codes * scales + offsets
    return values.flatten(0, 1).flatten(1)


_UNPACK: Final[Mapping[str, Callable[[Tensor, int], Tensor]]] = {
    "int8": _unpack_int8,
    "codes4/32+offset": _unpack_codes,
    "bfloat16": _unpack_bfloat16,
    "float32": _unpack_float32,
}


def unpack_model(config: ModelConfig, packed: PackedModel, dtype: torch.dtype) -> ModelWeights:
    """Return the weights as they were before.

    Quantised ones are what their integers and scales stand for, rounded to the type of the others.
    """
    like, _ = on_meta(config, dtype)
    weights = ModelWeights(layers=[{} for _ in packed.layers])
    holders: list[Packed] = [*packed.layers, packed.parts]  # that of the model is the last, at -1
    for spec in specs(config):
        name = spec.key
        found = _unpack(config, spec, holders[spec.layer].pop(name))
        weights.holder(spec.layer)[name] = found.to(like.holder(spec.layer)[name].dtype)
    assert not any(holders)
    return weights


def _unpack(config: ModelConfig, spec: TensorSpec, found: Tensor | list[PackedMatrix]) -> Tensor:
    if isinstance(found, list):
        pieces = [_unpack_piece(config, spec, piece) for piece in found]
        return torch.cat(pieces)
    if spec.inputs is not None:
        return found.clone()
    name = spec.part.name.removesuffix("_bias")
    if name == "qkv":
        return _heads(config, spec, found)[: spec.shape[0]]
    return _rows(config, spec, found, spec.shape[0])


def _unpack_piece(config: ModelConfig, spec: TensorSpec, piece: PackedMatrix) -> Tensor:
    values, num_rows = unpack_rows(piece.kind, piece.data, piece.num_inputs), piece.piece.num_rows
    return _heads(config, spec, values)[:num_rows] if spec.part.name == "qkv" else _rows(config, spec, values, num_rows)


def _heads(config: ModelConfig, spec: TensorSpec, values: Tensor) -> Tensor:
    """Return the rows of heads without what fills their units; rows of zeros may follow."""
    width = config.layers[spec.layer].head_dim
    return values.view(-1, HeadUnits.of(width).stride, *values.shape[1:])[:, :width].flatten(0, 1)


def _rows(config: ModelConfig, spec: TensorSpec, values: Tensor, num_rows: int) -> Tensor:
    if spec.part.name.removesuffix("_bias").endswith("gate_up") and config.is_gated and num_rows == spec.shape[0]:
        parts = values.view(-1, 2, _HALF, *values.shape[1:])
        return torch.cat([parts[:, i].flatten(0, 1)[: num_rows // 2] for i in range(2)])
    return values[:num_rows].clone()
