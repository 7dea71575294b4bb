"""The decoder in torch: rows of many sequences through the linears together, attention by sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ferrule_server.kernels import reference
from ferrule_server.model.attention import StepAttention
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.linear import Linear, MakeLinear, can_pack, packed_linear, plain_linear
from ferrule_server.model.rope import inverse_frequencies
from ferrule_server.model.weights import LayerWeights, ModelWeights

__all__ = ["Decoder"]


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer, ready to run; ``qk_norm`` is [num_heads + num_kv_heads, head_dim], or None."""

    input_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    attention_out: Linear
    post_attention_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """Qwen3 or Llama over weights it owns; holds no state between steps.

    Args:
        config: What decides the network.
        weights: Taken over: the layers are removed from it one by one as they are packed.
        device: Where the weights are moved to.
        is_plain: Use ``kernels.reference`` for every linear, as the definition to compare with.
    """

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, *, device: torch.device, is_plain: bool = False
    ) -> None:
        self._config = config
        self._frequencies = inverse_frequencies(config).to(device)
        self._embedding = weights.embedding.to(device)
        self._final_norm = weights.final_norm.to(device)
        make: MakeLinear = plain_linear if is_plain or not can_pack(self._final_norm.unsqueeze(0)) else packed_linear
        head = self._embedding if weights.head is weights.embedding else weights.head.to(device)
        self._head = plain_linear(head, None) if config.is_tied else make(head, None)
        self._layers = []
        while weights.layers:
            self._layers.append(_prepare_layer(config, weights.layers.pop(0), make, device))

    def forward(self, token_ids: Tensor, positions: Tensor, attention: StepAttention, output_rows: Tensor) -> Tensor:
        """Run a step: write the rows' KV through ``attention`` and return logits of the rows asked for.

        Args:
            token_ids: int64 [num_rows].
            positions: int64 [num_rows].
            attention: Of this step.
            output_rows: int64 [num_outputs].

        Returns:
            float32 [num_outputs, vocab_size].
        """
        config = self._config
        hidden = F.embedding(token_ids, self._embedding)
        rotation = reference.rope_angles(positions, self._frequencies)
        for index, layer in enumerate(self._layers):
            query, key, value = self._project(layer, hidden, rotation)
            hidden = hidden + layer.attention_out(attention.attend(index, query, key, value))
            normed = reference.rms_norm(hidden, layer.post_attention_norm, config.norm_eps)
            hidden = hidden + layer.down(reference.swiglu(layer.gate_up(normed)))
        rows = hidden.index_select(0, output_rows)
        if not len(rows):
            return rows.new_empty((0, config.vocab_size), dtype=torch.float32)
        return self._head(reference.rms_norm(rows, self._final_norm, config.norm_eps)).float()

    def _project(self, layer: _Layer, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value, each [rows, its heads, head_dim], the first two normalised and rotated."""
        config = self._config
        qkv = layer.qkv(reference.rms_norm(hidden, layer.input_norm, config.norm_eps))
        heads = qkv.view(len(qkv), -1, config.head_dim)
        rotated, value = torch.split(heads, [config.num_heads + config.num_kv_heads, config.num_kv_heads], dim=1)
        if layer.qk_norm is not None:
            rotated = reference.rms_norm(rotated, layer.qk_norm, config.norm_eps)
        rotated = reference.apply_rope(rotated, *rotation)
        return rotated[:, : config.num_heads], rotated[:, config.num_heads :], value


def _prepare_layer(config: ModelConfig, weights: LayerWeights, make: MakeLinear, device: torch.device) -> _Layer:
    """Return a layer ready to run; each plain weight is let go of as soon as it is packed."""

    def linear(name: str) -> Linear:
        weight, bias = getattr(weights, name).to(device), getattr(weights, f"{name}_bias")
        setattr(weights, name, None)
        return make(weight, None if bias is None else bias.to(device))

    return _Layer(
        input_norm=weights.input_norm.to(device),
        qkv=linear("qkv"),
        qk_norm=_stack_norms(config, weights, device),
        attention_out=linear("attention_out"),
        post_attention_norm=weights.post_attention_norm.to(device),
        gate_up=linear("gate_up"),
        down=linear("down"),
    )


def _stack_norms(config: ModelConfig, weights: LayerWeights, device: torch.device) -> Tensor | None:
    """Return the head norms repeated for every query and key head, so that one norm covers both."""
    if weights.q_norm is None or weights.k_norm is None:
        return None
    q_norm = weights.q_norm.expand(config.num_heads, -1)
    return torch.cat((q_norm, weights.k_norm.expand(config.num_kv_heads, -1))).to(device)
