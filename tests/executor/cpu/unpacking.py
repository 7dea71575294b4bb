"""The way back from packed weights, to compare with those that were packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from ferrule_server.executor.cpu.weights import HeadUnits, PackedLayer, PackedModel
from ferrule_server.kernels.cpu.dot import GROUP, TILE_INPUTS
from ferrule_server.kernels.cpu.plan import Plan
from ferrule_server.model.config import LayerKind, ModelConfig
from ferrule_server.model.tensors import LayerWeights, ModelWeights

_HALF: Final = GROUP // 2
_VECTORS: Final = (
    *("attention_norm", "attention_norm_bias", "attention_out_norm", "mlp_norm", "mlp_norm_bias", "mlp_out_norm"),
    *("q_norm", "k_norm", "input_norm"),
)
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


def _as_rows(plan: Plan, packed: Tensor, inputs: int) -> Tensor:
    """Return the matrix [whole groups, inputs] of packed memory."""
    if plan.is_quantised:
        return unpack_quantised(plan, packed, inputs).to(_dtype(plan))
    width = -(-inputs // TILE_INPUTS) * TILE_INPUTS
    values = packed.view(_dtype(plan))
    blocks = values.view(-1, width // 2, GROUP, 2) if plan.is_bfloat16 else values.view(-1, width, GROUP)
    return blocks.transpose(1, 2).reshape(-1, width)[:, :inputs]


def _dtype(plan: Plan) -> torch.dtype:
    return torch.bfloat16 if plan.is_bfloat16 else torch.float32


def _norm_dtype(config: ModelConfig, plan: Plan) -> torch.dtype:
    """Return the type of norms: sums with an offset are kept as they are."""
    return torch.float32 if config.norm_offset else _dtype(plan)


def unpack_model(config: ModelConfig, plan: Plan, packed: PackedModel) -> ModelWeights:
    """Return the weights as they were before; the layers of ``packed`` are freed one by one.

    Quantised ones are what their integers and scales stand for, rounded to the type of the others.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    head = _as_rows(plan, packed.head, hidden)[:vocab].contiguous()
    is_tied = packed.embedding is packed.head
    embedding = head if is_tied else packed.embedding.view(vocab, hidden).clone()
    dtype = _dtype(plan)
    weights = ModelWeights(embedding, head, packed.final_norm.to(_norm_dtype(config, plan)))
    weights.final_norm_bias = _narrow(packed.final_norm_bias, dtype)
    weights.input_embedding, weights.input_norm = packed.input_embedding, _narrow(packed.input_norm, dtype)
    if config.per_layer_input is not None:
        weights.input_projection = _rows_of(
            plan, packed.input_projection, config.num_layers * config.per_layer_input.size, hidden
        )
    for kind in config.layers:
        weights.layers.append(_unpack_layer(config, kind, plan, packed.layers.pop(0)))
    return weights


def _narrow(values: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if values is None else values.to(dtype)


def _rows_of(plan: Plan, packed: Tensor | None, num_rows: int, inputs: int) -> Tensor | None:
    """Return the matrix [num_rows, inputs] of packed memory."""
    return None if packed is None else _as_rows(plan, packed, inputs)[:num_rows].contiguous()


def _unpack_layer(config: ModelConfig, kind: LayerKind, plan: Plan, layer: PackedLayer) -> LayerWeights:
    units, dtype = HeadUnits.of(config, kind), _dtype(plan)
    hidden, query, inner = config.hidden_size, config.num_heads * kind.head_dim, kind.intermediate_size
    size = 0 if config.per_layer_input is None else config.per_layer_input.size

    def vector(name: str) -> Tensor | None:
        return _narrow(getattr(layer, name), _norm_dtype(config, plan) if name.endswith("norm") else dtype)

    def heads(values: Tensor) -> Tensor:
        parts = values.view(-1, units.stride, *values.shape[1:])[: units.num_heads, : kind.head_dim]
        return parts.flatten(0, 1).contiguous()

    def gate_up(values: Tensor) -> Tensor:
        if not config.is_gated:
            return values[:inner].contiguous()
        parts = values.view(-1, 2, _HALF, *values.shape[1:])
        halves = [parts[:, i].flatten(0, 1)[:inner] for i in range(2)]
        return torch.cat(halves)

    def bias(values: Tensor | None, place: Callable[[Tensor], Tensor]) -> Tensor | None:
        return None if values is None else place(values).to(dtype)

    return LayerWeights(
        qkv=heads(_as_rows(plan, layer.qkv, hidden)),
        attention_out=_as_rows(plan, layer.out, query)[:hidden].contiguous(),
        gate_up=gate_up(_as_rows(plan, layer.gate_up, hidden)),
        down=_as_rows(plan, layer.down, inner)[:hidden].contiguous(),
        input_gate=_rows_of(plan, layer.input_gate, size, hidden),
        input_projection=_rows_of(plan, layer.input_projection, hidden, size),
        scale=layer.scale,
        **{name: vector(name) for name in _VECTORS},
        qkv_bias=bias(layer.qkv_bias, heads),
        attention_out_bias=bias(layer.out_bias, lambda values: values[:hidden]),
        gate_up_bias=bias(layer.gate_up_bias, gate_up),
        down_bias=bias(layer.down_bias, lambda values: values[:hidden]),
    )
