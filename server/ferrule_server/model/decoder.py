"""The decoder in torch. Rows of many sequences pass the linear layers together; attention is by sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ferrule_server.kernels import reference
from ferrule_server.model.attention import Kv, LayerAttention
from ferrule_server.model.config import Experts, LayerKind, ModelConfig
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
from ferrule_server.model.parts import LAYER_PARTS, LINEAR
from ferrule_server.model.rope import rotation_table
from ferrule_server.model.tensors import LayerWeights, ModelWeights

# Where each operation is a launch that costs the host more than the device: few large operations run there, whose
# rounding may differ.
_LAUNCHING_DEVICE = "cuda"
# Rows that pass the linear layers at a time: enough to be fast, few enough to bound the memory of activations. The plan
# of a GPU's memory covers all rows of a step.
_TILE_ROWS = 512
# Rows normalised and rotated at a time: bounds their float32 copies, but leaves each thread enough work.
_ROTATED_ROWS = 256
_ALL_ROWS = 1 << 30
_NORMS = {part.name for part in LAYER_PARTS if part.kind == "norm"} - {"q_norm", "k_norm"}
_LINEARS = {part.name for part in LAYER_PARTS if part.kind in LINEAR and not part.is_of_experts}
_ADDERS = {"attention_out": "attention_out_norm", "down": "mlp_out_norm"}
"""The linear layers that add to the residual stream, each with the norm after it."""


Norm = Callable[[Tensor], Tensor]
"""Maps [rows, hidden_size] to the same shape and dtype."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """One decoder layer, ready to run.

    Attributes:
        kind: What it computes.
        rotation: The number of its table.
        linears: By the names of their matrices; those that add to the residual stream are in ``adders``.
        adders: ``attention_out`` and ``down``, each with the norm after it.
        experts: Of each expert, what becomes gate and up, and what follows them.
        norms: Of the residual stream, by name.
        head_norms: Of single heads: one weight [query and key heads, head_dim]; of rows: one for all query heads, and
            one for all key heads.
        rest: The other tensors.
    """

    kind: LayerKind
    rotation: int
    linears: dict[str, Linear]
    adders: dict[str, AddLinear]
    experts: list[tuple[Linear, Linear]]
    norms: dict[str, Norm]
    head_norms: tuple[Tensor, ...]
    rest: LayerWeights


class Decoder:
    """Runs the network of a :class:`ModelConfig` over weights that it owns; it holds no state between steps.

    Args:
        config: The network.
        weights: The decoder takes them over and removes the layers one by one as they are packed.
        device: The weights are moved there.
        is_plain: Use ``kernels.reference`` for every linear layer, as the definition to compare with.

    Attributes:
        plain_weights: The tensors that this decoder reads, on its device; None if they are packed.
    """

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, *, device: torch.device, is_plain: bool = False
    ) -> None:
        self._config = config
        self._is_fused = device.type == _LAUNCHING_DEVICE and not is_plain
        self._tile_rows, self._rotated_rows = (_ALL_ROWS,) * 2 if self._is_fused else (_TILE_ROWS, _ROTATED_ROWS)
        ropes = list(dict.fromkeys((kind.rope, kind.head_dim) for kind in config.layers))
        self._tables = [rotation_table(rope, head_dim).to(device) for rope, head_dim in ropes]
        parts = _moved(weights.parts, device)
        weights.parts.clear()
        final_norm = parts["final_norm"]
        self._final_norm = self._make_norm(final_norm, parts.get("final_norm_bias"))
        can_be_packed = not is_plain and can_pack(final_norm.to(parts["embedding"].dtype).unsqueeze(0))
        self._make: MakeLinear = packed_linear if can_be_packed else plain_linear
        self.plain_weights = ModelWeights(dict(parts)) if self._make is plain_linear else None
        self._embed, self._head = _prepare_ends(parts, self._make)
        self._parts = parts
        self._scale = torch.tensor(config.embedding_scale, dtype=final_norm.dtype, device=device)
        self._layers = []
        for kind in config.layers:
            layer = _moved(weights.layers.pop(0), device)
            if self.plain_weights is not None:
                self.plain_weights.layers.append(dict(layer))
            self._layers.append(self._prepare(kind, layer, ropes.index((kind.rope, kind.head_dim))))

    def forward(self, token_ids: Tensor, positions: Tensor, attention: LayerAttention, output_rows: Tensor) -> Tensor:
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
        inputs = self._layer_inputs(token_ids, hidden)
        rotations = [_rotation(positions, table) for table in self._tables]
        temperature = _temperature(self._config, positions)
        for index, layer in enumerate(self._layers):
            query, kv = self._project(layer, hidden, rotations[layer.rotation])
            if temperature is not None:
                query = (query * temperature).to(query.dtype)
            attended = attention.attend(index, query, kv, sinks=layer.rest.get("sinks"))
            for tile in _tiles(len(hidden), self._tile_rows):
                self._feed_forward(layer, hidden[tile], attended[tile])
            if inputs is not None and "input_norm" in layer.norms:
                self._add_input(layer, hidden, inputs[:, index])
            if "scale" in layer.rest:
                hidden *= layer.rest["scale"]
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

    def _layer_inputs(self, token_ids: Tensor, hidden: Tensor) -> Tensor | None:
        """Return the part of the second embedding for each layer ("Gemma 3n", 2025); None: there is none.

        Args:
            token_ids: int64 [rows].
            hidden: [rows, hidden_size], their embeddings.

        Returns:
            [rows, num_layers, size].
        """
        second, parts = self._config.per_layer_input, self._parts
        if second is None:
            return None
        embedding, shape = parts["input_embedding"], (len(hidden), -1, second.size)
        scale = torch.tensor(second.size**0.5, dtype=embedding.dtype)
        own = (F.embedding(token_ids, embedding) * scale.to(hidden.device)).view(shape)
        projected = F.linear(hidden, parts["input_projection"]) * hidden.shape[-1] ** -0.5
        normed = reference.rms_norm(projected.view(shape), parts["input_norm"], self._config.norm_eps)
        out: Tensor = (normed + own) * 2.0**-0.5
        return out

    def _project(self, layer: _Layer, hidden: Tensor, rotation: Tensor) -> tuple[Tensor, Kv]:
        """Return queries and K and V [rows, heads, head_dim], normalised and rotated; None for K and V of others."""
        config, kind = self._config, layer.kind
        tiles = _tiles(len(hidden), self._tile_rows)
        norm, qkv_of = layer.norms.get("attention_norm", _unchanged), layer.linears["qkv"]
        parts = [qkv_of(norm(hidden[tile])) for tile in tiles]
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
            return rotated, None
        if config.has_v_norm:
            value = self._scaled(value.float(), 1).to(value.dtype)
        return rotated[:, : config.num_heads], (rotated[:, config.num_heads :], value)

    def _rotate(self, layer: _Layer, heads: Tensor, rotation: Tensor) -> Tensor:
        """Return heads [rows, num_heads + num_kv_heads, head_dim], normalised if the network does so, and rotated.

        It computes in float32. ``roll`` swaps the halves; the sine carries the sign of the first half.
        """
        wide = heads.float()
        if layer.head_norms and self._config.qk_norm == "head":
            wide = self._scaled(wide, 1).mul_(layer.head_norms[0])
        elif layer.head_norms:
            num_heads = self._config.num_heads
            parts = zip((wide[:, :num_heads], wide[:, num_heads:]), layer.head_norms, strict=True)
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
        norms = layer.norms
        normed = norms["attention_norm"](hidden) if self._config.is_parallel and "attention_norm" in norms else None
        layer.adders["attention_out"](hidden, attended)
        if normed is None:
            normed = norms.get("mlp_norm", _unchanged)(hidden)
        if layer.kind.experts is not None:
            hidden += self._mixture(layer, layer.kind.experts, normed)
        if "down" in layer.adders:
            activated = self._activate(layer.linears["gate_up"](normed))
            if "shared_gate" in layer.linears:
                activated *= torch.sigmoid(layer.linears["shared_gate"](normed))
            layer.adders["down"](hidden, activated)

    def _mixture(self, layer: _Layer, experts: Experts, normed: Tensor) -> Tensor:
        """Return what the experts of each row return, weighted and added: [rows, hidden_size]."""
        scores = layer.linears["router"](normed).float()
        weights, ids = reference.route(
            scores, experts.used, experts.gate, is_normalised=experts.is_normalised, scale=experts.scale
        )
        by_expert = torch.sort(ids.flatten(), stable=True).indices
        counts = torch.bincount(ids.flatten(), minlength=experts.count).tolist()
        out = normed.new_empty((len(by_expert), normed.shape[1]))
        begin = 0
        for (gate_up, down), count in zip(layer.experts, counts, strict=True):
            if count:
                pairs = by_expert[begin : begin + count]
                out[pairs] = down(self._activate(gate_up(normed[pairs // experts.used])))
                begin += count
        each = out.view(len(normed), experts.used, -1).float() * weights.unsqueeze(2)
        return (each.sum(1) * self._config.residual_scale).to(normed.dtype)

    def _activate(self, projected: Tensor) -> Tensor:
        """Return what the feed-forward part computes between its projections."""
        clamped = self._config.clamped_swiglu
        if clamped is not None:
            return reference.clamped_swiglu(projected, clamped.limit, clamped.alpha)
        return reference.activate(projected, self._config.activation, is_gated=self._config.is_gated)

    def _add_input(self, layer: _Layer, hidden: Tensor, values: Tensor) -> None:
        """Add the layer's part of the second embedding to ``hidden`` in place."""
        gate = reference.activate(layer.linears["input_gate"](hidden), self._config.activation, is_gated=False)
        hidden += layer.norms["input_norm"](layer.linears["input_projection"](gate * values))

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
        scale = self._config.residual_scale
        norms = {name: self._make_norm(weights[name], weights.get(f"{name}_bias")) for name in _NORMS & weights.keys()}

        def linear(name: str) -> Linear:
            part, dot, expert = name.partition(".")
            return self._make(weights.pop(name), weights.get(f"{part}_bias{dot}{expert}"))

        def add(name: str, out_norm: Norm | None) -> AddLinear:
            if out_norm is None and self._is_fused and scale == 1:
                return fused_adding(weights.pop(name), weights.get(f"{name}_bias"))
            return adding(linear(name), out_norm, scale)

        adders = {name: add(name, norms.get(norm)) for name, norm in _ADDERS.items() if name in weights}
        count = 0 if kind.experts is None else kind.experts.count
        experts = [(linear(f"expert_gate_up.{i}"), linear(f"expert_down.{i}")) for i in range(count)]
        linears = {name: linear(name) for name in sorted(_LINEARS & weights.keys())}
        rest: LayerWeights = {name: weights[name] for name in ("scale", "sinks") if name in weights}
        return _Layer(kind, rotation, linears, adders, experts, norms, _head_norms(self._config, kind, weights), rest)


def _unchanged(hidden: Tensor) -> Tensor:
    """Return the rows: the norm of a layer that has none."""
    return hidden


def _head_norms(config: ModelConfig, kind: LayerKind, weights: LayerWeights) -> tuple[Tensor, ...]:
    """Return the norms of queries and keys; those of single heads as one, repeated for each head."""
    norms = tuple(weights[name] for name in ("q_norm", "k_norm") if name in weights)
    if not norms or config.qk_norm == "row":
        return norms
    counts = (config.num_heads, kind.num_kv_heads)
    return (torch.cat([norm.expand(count, -1) for norm, count in zip(norms, counts, strict=False)]),)


def _temperature(config: ModelConfig, positions: Tensor) -> Tensor | None:
    """Return what multiplies the queries of each row: float32 [rows, 1, 1]; None: nothing."""
    rule = config.query_temperature
    if rule is None:
        return None
    return (1 + rule.beta * torch.log(1 + torch.floor(positions.float() / rule.length))).view(-1, 1, 1)


def _tiles(num_rows: int, size: int) -> list[slice]:
    return [slice(begin, begin + size) for begin in range(0, num_rows, size)]


def _rotation(positions: Tensor, table: Tensor) -> Tensor:
    """Return the cosine and the signed sine of every row over the whole head: float32 [2, rows, 1, head_dim]."""
    cos, sin = reference.rope_angles(positions, table[0])
    cos, sin = cos * table[1], sin * table[1]
    return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))).unsqueeze(2)


def _prepare_ends(parts: dict[str, Tensor], make: MakeLinear) -> tuple[Embed, Linear]:
    """Return embedding and output head, ready to run; remove the plain matrices from ``parts``."""
    embedding, head = parts.pop("embedding"), parts.pop("head", None)
    if head is not None:
        return plain_embedding(embedding), make(head, None)
    return (plain_embedding(embedding), plain_linear(embedding, None)) if make is plain_linear else tied_ends(embedding)


def _moved(weights: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return tensors on the device."""
    return {name: tensor.to(device) for name, tensor in weights.items()}
