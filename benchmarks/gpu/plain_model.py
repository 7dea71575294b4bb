"""A plain torch model with a static KV cache: compiled, or captured in a graph by hand, it is two of the peers.

Written in the manner of gpt-fast (https://github.com/pytorch-labs/gpt-fast, BSD-3-Clause; no code taken): joint
projections, one cache of fixed length per layer, positions as tensors, so that nothing of a step depends on the host.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ferrule_server.model.config import ModelConfig
from ferrule_server.model.rope import rotation_table
from ferrule_server.model.tensors import LayerWeights, ModelWeights

_LENGTH_STEP: Final = 8


class PlainModel(nn.Module):
    """A decoder over shared weights, its cache for a fixed number of sequences and tokens.

    Args:
        config: Of the model.
        weights: bfloat16; used where they lie.
        batch: Sequences.
        length: Most tokens of one, rounded up.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, batch: int, length: int) -> None:
        super().__init__()
        self.config = config
        self.length = -(-length // _LENGTH_STEP) * _LENGTH_STEP
        device = weights.embedding.device
        self.register_buffer("embedding", weights.embedding)
        self.register_buffer("output_head", weights.head)
        self.register_buffer("final_norm", weights.final_norm)
        angles = rope_angles(config, self.length).to(device)
        self.register_buffer("cos", torch.cat((angles.cos(), angles.cos()), -1))
        self.register_buffer("sin", torch.cat((-angles.sin(), angles.sin()), -1))
        places = torch.arange(self.length, device=device)
        self.register_buffer("is_seen", places.unsqueeze(0) <= places.unsqueeze(1))
        self.layers = nn.ModuleList(PlainLayer(config, layer, batch, self.length) for layer in weights.layers)

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Append tokens to every sequence at the same positions and return the logits behind the last one.

        Args:
            token_ids: int64 [batch, tokens].
            positions: int64 [tokens].

        Returns:
            [batch, vocab_size].
        """
        hidden = F.embedding(token_ids, self.get_buffer("embedding"))
        rotation = (self.get_buffer("cos")[positions], self.get_buffer("sin")[positions])
        is_seen = self.get_buffer("is_seen")[positions]
        for layer in self.layers:
            hidden = layer(hidden, positions, rotation, is_seen)
        last = rms_norm(hidden[:, -1], self.get_buffer("final_norm"), self.config.norm_eps)
        return F.linear(last, self.get_buffer("output_head"))


class PlainLayer(nn.Module):
    """One layer and its part of the cache."""

    def __init__(self, config: ModelConfig, weights: LayerWeights, batch: int, length: int) -> None:
        super().__init__()
        self.config = config
        self.kind = config.layers[0]  # its sizes are plain numbers, as torch.compile needs them
        for name in ("attention_norm", "qkv", "attention_out", "mlp_norm", "gate_up", "down"):
            self.register_buffer(name, weights[name])
        self.register_buffer("q_norm", weights.get("q_norm"))
        self.register_buffer("k_norm", weights.get("k_norm"))
        size = (batch, self.kind.num_kv_heads, length, self.kind.head_dim)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(size, dtype=weights["qkv"].dtype, device=weights["qkv"].device))

    def forward(self, hidden: Tensor, positions: Tensor, rotation: tuple[Tensor, Tensor], is_seen: Tensor) -> Tensor:
        """Return the residual stream behind this layer: [batch, tokens, hidden_size]."""
        eps = self.config.norm_eps
        normed = rms_norm(hidden, self.get_buffer("attention_norm"), eps)
        hidden = hidden + F.linear(self._attend(normed, positions, rotation, is_seen), self.get_buffer("attention_out"))
        normed = rms_norm(hidden, self.get_buffer("mlp_norm"), eps)
        gate, up = F.linear(normed, self.get_buffer("gate_up")).chunk(2, -1)
        return hidden + F.linear(F.silu(gate) * up, self.get_buffer("down"))

    def _attend(self, normed: Tensor, positions: Tensor, rotation: tuple[Tensor, Tensor], is_seen: Tensor) -> Tensor:
        (batch, count, _), head_dim, num_kv_heads = normed.shape, self.kind.head_dim, self.kind.num_kv_heads
        heads = F.linear(normed, self.get_buffer("qkv")).view(batch, count, -1, head_dim).transpose(1, 2)
        query, key, value = torch.split(heads, [self.config.num_heads, num_kv_heads, num_kv_heads], 1)
        query = turned(self._head_norm(query, "q_norm"), rotation)
        key = turned(self._head_norm(key, "k_norm"), rotation)
        keys, values = self.get_buffer("keys"), self.get_buffer("values")
        keys.index_copy_(2, positions, key)
        values.index_copy_(2, positions, value)
        if count == 1:  # the heads of a group as rows: K and V are read once, by the kernels that take a mask
            query = query.view(batch, num_kv_heads, -1, head_dim)
            return F.scaled_dot_product_attention(query, keys, values, attn_mask=is_seen).reshape(batch, 1, -1)
        made = F.scaled_dot_product_attention(query, keys, values, attn_mask=is_seen, enable_gqa=True)
        return made.transpose(1, 2).reshape(batch, count, -1)

    def _head_norm(self, heads: Tensor, name: str) -> Tensor:
        return rms_norm(heads, self.get_buffer(name), self.config.norm_eps) if self.config.qk_norm == "head" else heads


def rms_norm(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return values over their root mean square, in float32, times a weight."""
    wide = values.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(values.dtype)


def rope_angles(config: ModelConfig, length: int) -> Tensor:
    """Return the radians by which each pair of a head turns at each position: float32 [length, head_dim / 2]."""
    frequencies, _ = rotation_table(config.layers[0].rope, config.head_dim)
    return torch.outer(torch.arange(length).float(), frequencies)


def turned(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate heads [batch, heads, tokens, head_dim]; ``roll`` swaps the halves, the sign is in the sine."""
    wide = heads.float()
    return (wide * rotation[0] + torch.roll(wide, wide.shape[-1] // 2, -1) * rotation[1]).to(heads.dtype)
