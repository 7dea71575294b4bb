"""The way back from packed weights, to compare with those that were packed."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ferrule_server.executor.cpu.weights import HeadUnits, Packed, PackedMatrix, PackedModel
from ferrule_server.kernels.cpu.dot import GROUP
from ferrule_server.kernels.cpu.plan import TILE_INPUTS, MatrixKind
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.tensors import ModelWeights, TensorSpec, on_meta, specs

_HALF: Final = GROUP // 2
_WORDS: Final = 4
"""int32 words of 32 inputs in int4."""
_TILE_BYTES: Final = _WORDS * 4 * GROUP


def unpack_rows(kind: MatrixKind, packed: Tensor, num_inputs: int) -> Tensor:
    """Return the matrix [whole groups, inputs] of packed memory, uint8: float32 if it is quantised."""
    num_tiles = -(-num_inputs // TILE_INPUTS)
    unpack = {"int8": _unpack_int8, "int4": _unpack_int4, "bfloat16": _unpack_bfloat16, "float32": _unpack_float32}
    return unpack[kind.name](packed, num_tiles)[:, :num_inputs]


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


def _unpack_int4(packed: Tensor, num_tiles: int) -> Tensor:
    tiles = packed.view(-1, num_tiles, _TILE_BYTES + 2 * GROUP)
    words = tiles[:, :, :_TILE_BYTES].reshape(len(tiles), num_tiles, _WORDS, GROUP, 2, 2).view(torch.int8)
    bytes_ = words.permute(0, 3, 1, 2, 5, 4)  # [groups, 64, tiles, words, inputs 0-3 or 4-7, even or odd]
    integers = torch.stack((((bytes_ & 15) ^ 8) - 8, bytes_ >> 4), 5)
    scales = tiles[:, :, _TILE_BYTES:].contiguous().view(torch.bfloat16).transpose(1, 2)
    return (integers.flatten(3) * scales.float().unsqueeze(3)).flatten(0, 1).flatten(1)


def unpack_model(config: ModelConfig, packed: PackedModel, dtype: torch.dtype) -> ModelWeights:
    """Return the weights as they were before.

    Quantised ones are what their integers and scales stand for, rounded to the type of the others.
    """
    like, _ = on_meta(config, dtype)
    weights = ModelWeights(layers=[{} for _ in packed.layers])
    holders: list[Packed] = [*packed.layers, packed.parts]  # that of the model is the last, at -1
    for spec in specs(config):
        name = spec.part.name
        found = _unpack(config, spec, holders[spec.layer].pop(name))
        weights.holder(spec.layer)[name] = found.to(like.holder(spec.layer)[name].dtype)
    assert not any(holders)
    return weights


def _unpack(config: ModelConfig, spec: TensorSpec, found: Tensor | PackedMatrix) -> Tensor:
    if spec.inputs is not None and isinstance(found, PackedMatrix):
        found = unpack_rows(found.kind, found.data, spec.inputs)
    assert isinstance(found, Tensor)
    name = spec.part.name.removesuffix("_bias")
    if name == "qkv":
        units, width = HeadUnits.of(config, config.layers[spec.layer]), config.layers[spec.layer].head_dim
        parts = found.view(-1, units.stride, *found.shape[1:])[: units.num_heads, :width]
        return parts.flatten(0, 1).contiguous()
    if name == "gate_up" and config.is_gated:
        parts = found.view(-1, 2, _HALF, *found.shape[1:])
        return torch.cat([parts[:, i].flatten(0, 1)[: spec.shape[0] // 2] for i in range(2)])
    return found[: spec.shape[0]].view(spec.shape).clone()
