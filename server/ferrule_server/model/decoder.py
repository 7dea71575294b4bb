"""The decoder in torch. Rows of many sequences pass the linear layers together; attention is by sequence."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ferrule_server.kernels import reference
from ferrule_server.model.attention import StepAttention
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.linear import (
    AddLinear,
    Embed,
    Linear,
    MakeLinear,
    adding,
    can_pack,
    fused_adding,
    packed_linear,
    plain_embedding,
    plain_linear,
    tied_ends,
)
from ferrule_server.model.rope import inverse_frequencies
from ferrule_server.model.weights import LayerWeights, ModelWeights

__all__ = ["Decoder"]

# Where each operation is a launch that costs the host more than the device: few large operations run there, whose
# rounding may differ.
_LAUNCHING_DEVICE = "cuda"
# Rows that pass the linear layers at a time: enough to be fast, few enough to bound the memory of activations. The plan
# of a GPU's memory covers all rows of a step.
_TILE_ROWS = 512
# Rows normalised and rotated at a time: bounds their float32 copies, but leaves each thread enough work.
_ROTATED_ROWS = 256
_ALL_ROWS = 1 << 30


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer, ready to run; ``qk_norm`` is [num_heads + num_kv_heads, head_dim], or None."""

    input_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    attention_out: AddLinear
    post_attention_norm: Tensor
    gate_up: Linear
    down: AddLinear


class _NoAttention:
    """Implements ``StepAttention`` without a pool: every row attends to itself alone."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # noqa: ARG002  (no pool)
        """Return the value of each row for every query head that shares it."""
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).flatten(1)


class Decoder:
    """Runs the network of a :class:`ModelConfig` over weights that it owns; it holds no state between steps.

    Args:
        config: The network.
        weights: The decoder takes them over and removes the layers one by one as they are packed.
        device: The weights are moved there.
        is_plain: Use ``kernels.reference`` for every linear layer, as the definition to compare with.
    """

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, *, device: torch.device, is_plain: bool = False
    ) -> None:
        self._config = config
        self._is_fused = device.type == _LAUNCHING_DEVICE and not is_plain
        self._tile_rows, self._rotated_rows = (_ALL_ROWS,) * 2 if self._is_fused else (_TILE_ROWS, _ROTATED_ROWS)
        self._frequencies = inverse_frequencies(config).to(device)
        self._final_norm = weights.final_norm.to(device)
        make: MakeLinear = plain_linear if is_plain or not can_pack(self._final_norm.unsqueeze(0)) else packed_linear
        ends = _take_ends(weights, device)
        self._plain = replace(ends) if make is plain_linear else None
        self._embed, self._head = _prepare_ends(ends, make)
        self._layers = []
        while weights.layers:
            layer = _moved(weights.layers.pop(0), device)
            if self._plain is not None:
                self._plain.layers.append(replace(layer))
            self._layers.append(_prepare_layer(config, layer, make, is_fused=self._is_fused))

    @property
    def plain_weights(self) -> ModelWeights | None:
        """The tensors that this decoder reads, on its device; None if they are packed."""
        return self._plain

    def forward(self, token_ids: Tensor, positions: Tensor, attention: StepAttention, output_rows: Tensor) -> Tensor:
        """Run a step: write the KV of its rows through ``attention``, and return the hidden states of some rows.

        Args:
            token_ids: int64 [num_rows].
            positions: int64 [num_rows].
            attention: Reads and writes the KV pool for this step.
            output_rows: int64 [num_outputs], the rows to return.

        Returns:
            [num_outputs, hidden_size] after the final norm, as :meth:`head` takes them.
        """
        hidden = self._embed(token_ids)
        rotation = _rotation(positions, self._frequencies)
        for index in range(len(self._layers)):
            self._run_layer(index, hidden, rotation, attention)
        return self._norm(hidden.index_select(0, output_rows), self._final_norm)

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states.

        Args:
            hidden: [rows, hidden_size] after the final norm, at least one row.

        Returns:
            float32 [rows, vocab_size].
        """
        return self._head(hidden).float()

    def _run_layer(self, index: int, hidden: Tensor, rotation: Tensor, attention: StepAttention) -> None:
        """Replace the rows of ``hidden`` by what a layer makes of them."""
        layer = self._layers[index]
        query, key, value = self._project(layer, hidden, rotation)
        attended = attention.attend(index, query, key, value)
        for tile in _tiles(len(hidden), self._tile_rows):
            self._feed_forward(layer, hidden[tile], attended[tile])

    def _project(self, layer: _Layer, hidden: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value [rows, heads, head_dim]; query and key are normalised and rotated."""
        config = self._config
        tiles = _tiles(len(hidden), self._tile_rows)
        parts = [layer.qkv(self._norm(hidden[tile], layer.input_norm)) for tile in tiles]
        qkv = parts[0] if len(parts) == 1 else torch.cat(parts)
        heads = qkv.view(len(qkv), -1, config.head_dim)
        num_rotated = config.num_heads + config.num_kv_heads
        rotated, value = heads[:, :num_rotated], heads[:, num_rotated:]
        if len(heads) <= self._rotated_rows:
            rotated = self._rotate(layer, rotated, rotation)
        else:
            for tile in _tiles(len(heads), self._rotated_rows):
                rotated[tile] = self._rotate(layer, rotated[tile], rotation[:, tile])
        return rotated[:, : config.num_heads], rotated[:, config.num_heads :], value

    def _rotate(self, layer: _Layer, heads: Tensor, rotation: Tensor) -> Tensor:
        """Return heads [rows, num_heads + num_kv_heads, head_dim], normalised if the family does so, and rotated.

        It computes in float32. ``roll`` swaps the halves; the sine carries the sign of the first half.
        """
        wide = heads.float()
        if layer.qk_norm is not None:
            wide = self._scaled(wide).mul_(layer.qk_norm)
        swapped = torch.roll(wide, wide.shape[-1] // 2, -1)
        return torch.addcmul(wide * rotation[0], swapped, rotation[1]).to(heads.dtype)

    def _scaled(self, wide: Tensor) -> Tensor:
        """Return float32 heads scaled to mean square 1."""
        if self._is_fused:
            return F.rms_norm(wide, wide.shape[-1:], eps=self._config.norm_eps)
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._config.norm_eps)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return what ``reference.rms_norm`` does; if fused, rounded once, after the multiplication."""
        if self._is_fused:
            return F.rms_norm(x, weight.shape, weight, self._config.norm_eps)
        return reference.rms_norm(x, weight, self._config.norm_eps)

    def _feed_forward(self, layer: _Layer, hidden: Tensor, attended: Tensor) -> None:
        """Add the output of attention to ``hidden`` in place, then that of the feed-forward part."""
        layer.attention_out(hidden, attended)
        normed = self._norm(hidden, layer.post_attention_norm)
        layer.down(hidden, reference.swiglu(layer.gate_up(normed)))


def _tiles(num_rows: int, size: int) -> list[slice]:
    return [slice(begin, begin + size) for begin in range(0, num_rows, size)]


def _rotation(positions: Tensor, frequencies: Tensor) -> Tensor:
    """Return the cosine and the signed sine of every row over the whole head: float32 [2, rows, 1, head_dim]."""
    cos, sin = reference.rope_angles(positions, frequencies)
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))).unsqueeze(2)


def _take_ends(weights: ModelWeights, device: torch.device) -> ModelWeights:
    """Move embedding, output head and final norm to the device; remove the matrices from ``weights``."""
    embedding = weights.embedding.to(device)
    head = embedding if weights.head is weights.embedding else weights.head.to(device)
    del weights.embedding, weights.head
    return ModelWeights(embedding, head, weights.final_norm.to(device))


def _prepare_ends(ends: ModelWeights, make: MakeLinear) -> tuple[Embed, Linear]:
    """Return embedding and output head, ready to run; remove the plain matrices from ``ends``."""
    embedding, head = ends.embedding, ends.head
    del ends.embedding, ends.head
    if head is not embedding:
        return plain_embedding(embedding), make(head, None)
    return (plain_embedding(embedding), plain_linear(embedding, None)) if make is plain_linear else tied_ends(embedding)


def _moved(layer: LayerWeights, device: torch.device) -> LayerWeights:
    """Return the layer with its tensors on the device."""
    tensors = {field.name: getattr(layer, field.name) for field in fields(layer)}
    return replace(layer, **{name: tensor.to(device) for name, tensor in tensors.items() if tensor is not None})


def _prepare_layer(config: ModelConfig, weights: LayerWeights, make: MakeLinear, *, is_fused: bool) -> _Layer:
    """Return a layer that is ready to run; each plain weight is dropped as soon as it is packed."""

    def linear(name: str) -> Linear:
        weight, bias = getattr(weights, name), getattr(weights, f"{name}_bias")
        setattr(weights, name, None)
        return make(weight, bias)

    def add(name: str) -> AddLinear:
        if is_fused:
            return fused_adding(getattr(weights, name), getattr(weights, f"{name}_bias"))
        return adding(linear(name))

    return _Layer(
        input_norm=weights.input_norm,
        qkv=linear("qkv"),
        qk_norm=_stack_norms(config, weights),
        attention_out=add("attention_out"),
        post_attention_norm=weights.post_attention_norm,
        gate_up=linear("gate_up"),
        down=add("down"),
    )


def _stack_norms(config: ModelConfig, weights: LayerWeights) -> Tensor | None:
    """Return the norm of heads, repeated for each query and key head, so that one norm covers all; None if none."""
    if weights.q_norm is None or weights.k_norm is None:
        return None
    q_norm = weights.q_norm.expand(config.num_heads, -1)
    return torch.cat((q_norm, weights.k_norm.expand(config.num_kv_heads, -1)))
