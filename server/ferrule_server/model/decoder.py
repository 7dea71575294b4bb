"""The decoder in torch. Rows of many sequences pass the linear layers together; attention is by sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ferrule_server.kernels import reference
from ferrule_server.model.attention import StepAttention
from ferrule_server.model.config import LayerKind, ModelConfig
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
from ferrule_server.model.rope import Rope, inverse_frequencies, magnitudes
from ferrule_server.model.tensors import LayerWeights, ModelWeights

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


_Holder = TypeVar("_Holder", LayerWeights, ModelWeights)

Norm = Callable[[Tensor], Tensor]
"""Maps [rows, hidden_size] to the same shape and dtype."""


@dataclass(frozen=True, slots=True)
class _PerLayerInput:
    """How a layer adds its part of the second embedding to the residual stream."""

    gate: Linear
    projection: Linear
    norm: Norm


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer, ready to run. What is None does not exist.

    ``head_norm`` is [query and key heads, head_dim]; ``row_norms`` are one weight for all query heads of a row, and one
    for all key heads. ``rotation`` is the number of its table.
    """

    kind: LayerKind
    rotation: int
    attention_norm: Norm | None
    qkv: Linear
    head_norm: Tensor | None
    row_norms: tuple[Tensor, ...]
    attention_out: AddLinear
    mlp_norm: Norm | None
    gate_up: Linear
    down: AddLinear
    per_layer_input: _PerLayerInput | None
    scale: Tensor | None
    sinks: Tensor | None


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
        ropes = list(dict.fromkeys((kind.rope, kind.head_dim) for kind in config.layers))
        self._tables = [_rotation_table(rope, head_dim).to(device) for rope, head_dim in ropes]
        ends = _take_ends(weights, device)
        self._final_norm = self._make_norm(ends.final_norm, ends.final_norm_bias)
        can_be_packed = not is_plain and can_pack(ends.final_norm.to(ends.embedding.dtype).unsqueeze(0))
        self._make: MakeLinear = packed_linear if can_be_packed else plain_linear
        self._plain = replace(ends) if self._make is plain_linear else None
        self._inputs = _InputEmbedding(config, ends) if config.per_layer_input is not None else None
        self._embed, self._head = _prepare_ends(ends, self._make)
        self._scale = torch.tensor(config.embedding_scale, dtype=ends.final_norm.dtype, device=device)
        self._layers = []
        for kind in config.layers:
            layer = _moved(weights.layers.pop(0), device)
            if self._plain is not None:
                self._plain.layers.append(replace(layer))
            self._layers.append(self._prepare(kind, layer, ropes.index((kind.rope, kind.head_dim))))

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
        if self._config.embedding_scale != 1:
            hidden = hidden * self._scale.to(hidden.dtype)
        inputs = None if self._inputs is None else self._inputs.of(token_ids, hidden)
        rotations = [_rotation(positions, table) for table in self._tables]
        temperature = _temperature(self._config, positions)
        for index, layer in enumerate(self._layers):
            query, key, value = self._project(layer, hidden, rotations[layer.rotation])
            if temperature is not None:
                query = (query * temperature).to(query.dtype)
            attended = attention.attend(index, query, key, value, sinks=layer.sinks)
            for tile in _tiles(len(hidden), self._tile_rows):
                self._feed_forward(layer, hidden[tile], attended[tile])
            if layer.per_layer_input is not None and inputs is not None:
                self._add_input(layer.per_layer_input, hidden, inputs[:, index])
            if layer.scale is not None:
                hidden *= layer.scale
        return self._final_norm(hidden.index_select(0, output_rows))

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states.

        Args:
            hidden: [rows, hidden_size] after the final norm, at least one row.

        Returns:
            float32 [rows, vocab_size].
        """
        logits = self._head(hidden).float()
        config = self._config
        if config.logit_scale != 1:
            logits *= config.logit_scale
        return reference.softcap(logits, config.logit_softcap) if config.logit_softcap else logits

    def _project(self, layer: _Layer, hidden: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return query, key and value [rows, heads, head_dim], normalised and rotated; None for K and V of others."""
        config, kind = self._config, layer.kind
        tiles = _tiles(len(hidden), self._tile_rows)
        norm = layer.attention_norm
        parts = [layer.qkv(hidden[tile] if norm is None else norm(hidden[tile])) for tile in tiles]
        qkv = parts[0] if len(parts) == 1 else torch.cat(parts)
        heads = qkv.view(len(qkv), -1, kind.head_dim)
        num_keys = kind.num_kv_heads if kind.kv_layer is None else 0
        num_rotated = config.num_heads + num_keys
        rotated = heads[:, :num_rotated]
        value = rotated[:, config.num_heads :].clone() if kind.is_value_key else heads[:, num_rotated:]
        if len(heads) <= self._rotated_rows:
            rotated = self._rotate(layer, rotated, rotation)
        else:
            for tile in _tiles(len(heads), self._rotated_rows):
                rotated[tile] = self._rotate(layer, rotated[tile], rotation[:, tile])
        if not num_keys:
            return rotated, None, None
        if config.has_v_norm:
            value = self._scaled(value.float(), 1).to(value.dtype)
        return rotated[:, : config.num_heads], rotated[:, config.num_heads :], value

    def _rotate(self, layer: _Layer, heads: Tensor, rotation: Tensor) -> Tensor:
        """Return heads [rows, num_heads + num_kv_heads, head_dim], normalised if the network does so, and rotated.

        It computes in float32. ``roll`` swaps the halves; the sine carries the sign of the first half.
        """
        wide = heads.float()
        if layer.head_norm is not None:
            wide = self._scaled(wide, 1).mul_(layer.head_norm)
        elif layer.row_norms:
            num_heads = self._config.num_heads
            parts = zip((wide[:, :num_heads], wide[:, num_heads:]), layer.row_norms, strict=True)
            wide = torch.cat([self._scaled(part, 2).mul_(weight.view(part.shape[1:])) for part, weight in parts], 1)
        swapped = torch.roll(wide, wide.shape[-1] // 2, -1)
        return torch.addcmul(wide * rotation[0], swapped, rotation[1]).to(heads.dtype)

    def _scaled(self, wide: Tensor, num_axes: int) -> Tensor:
        """Return float32 heads scaled to mean square 1 over the last axes."""
        axes = tuple(range(-num_axes, 0))
        if self._is_fused:
            return F.rms_norm(wide, wide.shape[-num_axes:], eps=self._config.norm_eps)
        return wide * torch.rsqrt(wide.square().mean(axes, keepdim=True) + self._config.norm_eps)

    def _feed_forward(self, layer: _Layer, hidden: Tensor, attended: Tensor) -> None:
        """Add the output of attention to ``hidden`` in place, then that of the feed-forward part."""
        config = self._config
        normed = layer.attention_norm(hidden) if config.is_parallel and layer.attention_norm is not None else None
        layer.attention_out(hidden, attended)
        if normed is None:
            normed = hidden if layer.mlp_norm is None else layer.mlp_norm(hidden)
        layer.down(hidden, self._activate(layer.gate_up(normed)))

    def _activate(self, projected: Tensor) -> Tensor:
        """Return what the feed-forward part computes between its projections."""
        clamped = self._config.clamped_swiglu
        if clamped is not None:
            return reference.clamped_swiglu(projected, clamped.limit, clamped.alpha)
        return reference.activate(projected, self._config.activation, is_gated=self._config.is_gated)

    def _add_input(self, part: _PerLayerInput, hidden: Tensor, values: Tensor) -> None:
        gate = reference.activate(part.gate(hidden), self._config.activation, is_gated=False)
        hidden += part.norm(part.projection(gate * values))

    def _make_norm(self, weight: Tensor, bias: Tensor | None = None) -> Norm:
        """Return a norm over the residual stream; if fused, rounded once, after the multiplication."""
        eps = self._config.norm_eps
        if self._config.has_layer_norm:
            return lambda x: reference.layer_norm(x, weight, bias, eps)
        if self._is_fused and weight.dtype != torch.float32:
            return lambda x: F.rms_norm(x, weight.shape, weight, eps)
        return lambda x: reference.rms_norm(x, weight, eps)

    def _prepare(self, kind: LayerKind, weights: LayerWeights, rotation: int) -> _Layer:
        """Return a layer that is ready to run; each plain weight is dropped as soon as it is packed."""

        def linear(name: str) -> Linear:
            weight, bias = getattr(weights, name), getattr(weights, f"{name}_bias", None)
            setattr(weights, name, None)
            return self._make(weight, bias)

        def norm(name: str) -> Norm | None:
            weight = getattr(weights, name)
            return None if weight is None else self._make_norm(weight, getattr(weights, f"{name}_bias", None))

        def add(name: str, out_norm: Norm | None) -> AddLinear:
            if out_norm is None and self._is_fused and self._config.residual_scale == 1:
                return fused_adding(getattr(weights, name), getattr(weights, f"{name}_bias"))
            return adding(linear(name), out_norm, self._config.residual_scale)

        input_norm = norm("input_norm")
        return _Layer(
            kind=kind,
            rotation=rotation,
            attention_norm=norm("attention_norm"),
            qkv=linear("qkv"),
            head_norm=_stack_norms(self._config, kind, weights) if self._config.qk_norm == "head" else None,
            row_norms=_present(weights.q_norm, weights.k_norm) if self._config.qk_norm == "row" else (),
            attention_out=add("attention_out", norm("attention_out_norm")),
            mlp_norm=norm("mlp_norm"),
            gate_up=linear("gate_up"),
            down=add("down", norm("mlp_out_norm")),
            per_layer_input=None
            if input_norm is None
            else _PerLayerInput(linear("input_gate"), linear("input_projection"), input_norm),
            scale=weights.scale,
            sinks=None if weights.sinks is None else weights.sinks.float(),
        )


class _InputEmbedding:
    """The second embedding, of which every layer has its own part ("Gemma 3n", 2025)."""

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        assert config.per_layer_input is not None
        assert weights.input_embedding is not None
        assert weights.input_projection is not None
        assert weights.input_norm is not None
        self._size, self._eps = config.per_layer_input.size, config.norm_eps
        self._embedding, self._projection, self._norm = (
            weights.input_embedding,
            weights.input_projection,
            weights.input_norm,
        )

    def of(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Return what each layer reads: [rows, num_layers, size], given embeddings [rows, hidden_size]."""
        scale = torch.tensor(self._size**0.5, dtype=self._embedding.dtype)
        own = (F.embedding(token_ids, self._embedding) * scale.to(hidden.device)).view(len(hidden), -1, self._size)
        projected = F.linear(hidden, self._projection) * hidden.shape[-1] ** -0.5
        normed = reference.rms_norm(projected.view(len(hidden), -1, self._size), self._norm, self._eps)
        out: Tensor = (normed + own) * 2.0**-0.5
        return out


def _present(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(tensor for tensor in tensors if tensor is not None)


def _stack_norms(config: ModelConfig, kind: LayerKind, weights: LayerWeights) -> Tensor | None:
    """Return the norm of heads, repeated for each query and key head, so that one norm covers all."""
    counts = (config.num_heads, kind.num_kv_heads)
    norms = _present(weights.q_norm, weights.k_norm)
    return torch.cat([norm.expand(count, -1) for norm, count in zip(norms, counts, strict=False)]) if norms else None


def _temperature(config: ModelConfig, positions: Tensor) -> Tensor | None:
    """Return what multiplies the queries of each row: float32 [rows, 1, 1]; None: nothing."""
    rule = config.query_temperature
    if rule is None:
        return None
    return (1 + rule.beta * torch.log(1 + torch.floor(positions.float() / rule.length))).view(-1, 1, 1)


def _tiles(num_rows: int, size: int) -> list[slice]:
    return [slice(begin, begin + size) for begin in range(0, num_rows, size)]


def _rotation_table(rope: Rope | None, head_dim: int) -> Tensor:
    """Return frequency and magnitude of each pair: float32 [2, head_dim / 2]."""
    return torch.stack((inverse_frequencies(rope, head_dim), magnitudes(rope, head_dim)))


def _rotation(positions: Tensor, table: Tensor) -> Tensor:
    """Return the cosine and the signed sine of every row over the whole head: float32 [2, rows, 1, head_dim]."""
    cos, sin = reference.rope_angles(positions, table[0])
    cos, sin = cos * table[1], sin * table[1]
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))).unsqueeze(2)


def _take_ends(weights: ModelWeights, device: torch.device) -> ModelWeights:
    """Move everything but the layers to the device; remove the matrices from ``weights``."""
    is_tied = weights.head is weights.embedding
    moved = _moved(replace(weights, layers=[]), device)
    if is_tied:
        moved.head = moved.embedding
    del weights.embedding, weights.head
    return moved


def _prepare_ends(ends: ModelWeights, make: MakeLinear) -> tuple[Embed, Linear]:
    """Return embedding and output head, ready to run; remove the plain matrices from ``ends``."""
    embedding, head = ends.embedding, ends.head
    del ends.embedding, ends.head
    if head is not embedding:
        return plain_embedding(embedding), make(head, None)
    return (plain_embedding(embedding), plain_linear(embedding, None)) if make is plain_linear else tied_ends(embedding)


def _moved(holder: _Holder, device: torch.device) -> _Holder:
    """Return the holder with its tensors on the device."""
    tensors = {field.name: getattr(holder, field.name) for field in fields(holder)}
    moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    return replace(holder, **moved)
