"""Whole sequences through a model at once, in any precision: what steps on the kernels are compared with."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.plain_model import rms_norm, rope_angles, turned
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.tensors import LayerWeights, ModelWeights


@dataclass
class Trace:
    """What a model computes for the last tokens of every sequence.

    Attributes:
        logits: float32 [batch, last, vocab_size].
        buffers: By the name that the runner's buffers have: the last layer's, [batch, last, width].
        kv: K after the rotation, then V, of every layer: [layers, 2, batch, last, num_kv_heads, head_dim].
    """

    logits: Tensor
    buffers: dict[str, Tensor] = field(default_factory=dict)
    kv: Tensor = field(default_factory=lambda: torch.empty(0))


@torch.no_grad()
def traced(config: ModelConfig, weights: ModelWeights, token_ids: Tensor, last: int, dtype: torch.dtype) -> Trace:
    """Return the trace of sequences, the weights converted to ``dtype`` one layer at a time.

    Args:
        config: Of the model.
        weights: On the device that is to compute.
        token_ids: int64 [batch, tokens].
        last: Tokens of each sequence that are wanted.
        dtype: Of everything; float32 is the reference.
    """
    device, length = token_ids.device, token_ids.shape[1]
    angles = rope_angles(config, length).to(device)
    rotation = (torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1))
    hidden = F.embedding(token_ids, weights.embedding).to(dtype)
    trace, kv = Trace(torch.empty(0)), []
    for layer in weights.layers:
        hidden, trace.buffers, key_value = _layer(config, layer, hidden, rotation, dtype)
        kv.append(key_value[:, :, -last:])
    trace.kv = torch.stack(kv)
    trace.buffers = {name: values[:, -last:] for name, values in {**trace.buffers, "hidden": hidden}.items()}
    normed = rms_norm(hidden[:, -last:], weights.final_norm, config.norm_eps)
    trace.logits = torch.stack([F.linear(rows, weights.head.to(dtype)).float() for rows in normed])
    return trace


def _layer(
    config: ModelConfig, weights: LayerWeights, hidden: Tensor, rotation: tuple[Tensor, Tensor], dtype: torch.dtype
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Return the residual stream behind a layer, what its buffers hold, and its K and V."""
    normed = rms_norm(hidden, weights["attention_norm"], config.norm_eps)
    qkv = F.linear(normed, weights["qkv"].to(dtype))
    query, key, value = _heads(config, weights, qkv, rotation)
    made = [
        F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        for q, k, v in zip(query, key, value, strict=True)
    ]
    attended = torch.stack(made).transpose(1, 2).flatten(2)
    hidden = hidden + F.linear(attended, weights["attention_out"].to(dtype))
    normed = rms_norm(hidden, weights["mlp_norm"], config.norm_eps)
    gate, up = F.linear(normed, weights["gate_up"].to(dtype)).chunk(2, -1)
    gated = F.silu(gate) * up
    hidden = hidden + F.linear(gated, weights["down"].to(dtype))
    return hidden, {"qkv": qkv, "attended": attended, "gated": gated}, torch.stack((key, value)).transpose(2, 3)


def _heads(
    config: ModelConfig, weights: LayerWeights, qkv: Tensor, rotation: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value, each [batch, its heads, tokens, head_dim], the first two rotated."""
    heads = qkv.view(*qkv.shape[:2], -1, config.head_dim).transpose(1, 2)
    query, key, value = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], 1)
    if "q_norm" in weights:
        query = rms_norm(query, weights["q_norm"], config.norm_eps)
        key = rms_norm(key, weights["k_norm"], config.norm_eps)
    return turned(query, rotation), turned(key, rotation), value
