"""The weights of a model as the kernels read them: packed, one after the other, in one arena of huge pages.

Linear layers are packed as ``kernels.cpu.dot`` says. Their rows come in units, each with whole groups of 64::

    qkv       one head, or as many as 64 rows hold; a head of another width is padded to whole groups
    gate_up   32 rows of gate, the same 32 rows of up
    others    64 rows

Quantised matrices come as rows of bytes (``quantised``) and are packed by the same units. A matrix is packed into the
arena and freed before the next one is, so there is never a second copy of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ferrule_server.executor.cpu.quantised import pack_rows, packed_bytes, unpack_rows
from ferrule_server.kernels.cpu.dot import GROUP, TILE_INPUTS
from ferrule_server.kernels.cpu.plan import WeightKind
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.memory import new_tensor
from ferrule_server.model.weights import LayerWeights, ModelWeights

__all__ = ["HeadUnits", "PackedLayer", "PackedModel", "pack_model", "unpack_model"]

_HALF: Final = GROUP // 2
_ALIGNMENT: Final = 64

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class HeadUnits:
    """How the rows of ``qkv`` form units.

    Attributes:
        heads: Query, key and value heads of a unit.
        groups: Groups of 64 rows of a unit.
        stride: Rows from one head of a unit to the next.
        count: Units.
    """

    heads: int
    groups: int
    stride: int
    count: int

    @staticmethod
    def of(config: ModelConfig) -> HeadUnits:
        """Return the units of a model."""
        num_heads, width = config.num_heads + 2 * config.num_kv_heads, config.head_dim
        if GROUP % width == 0:
            heads = GROUP // width
            return HeadUnits(heads, 1, width, -(-num_heads // heads))
        groups = -(-width // GROUP)
        return HeadUnits(1, groups, groups * GROUP, num_heads)


@dataclass(slots=True)
class PackedLayer:
    """The weights of a layer in the arena; linear layers packed, all others float32; None: the layer has none."""

    input_norm: Tensor
    qkv: Tensor
    out: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(slots=True)
class PackedModel:
    """The weights of a model in the arena.

    Attributes:
        embedding: The packed head itself if they are tied, else [vocab_size, hidden_size].
        head: Packed.
        final_norm: float32 [hidden_size].
        layers: In order.
        dtype: Of linear layers that are not quantised, and of an embedding that is not tied.
        kind: Whether and how linear layers are quantised.
    """

    embedding: Tensor
    head: Tensor
    final_norm: Tensor
    layers: list[PackedLayer]
    dtype: torch.dtype
    kind: WeightKind


class _Arena:
    """One mapping that is filled from its begin.

    Args:
        num_bytes: Its size.
        kind: Whether and how matrices are quantised.
        on_progress: Called with the filled share after each tensor.
    """

    def __init__(self, num_bytes: int, kind: WeightKind, on_progress: Progress) -> None:
        self._kind = kind
        self._bytes = new_tensor((num_bytes,), torch.uint8)
        self._used = 0
        self._on_progress = on_progress

    def take(self, num_values: int, dtype: torch.dtype) -> Tensor:
        """Return the next values: zeros, at an address that is a multiple of 64."""
        end = self._used + num_values * dtype.itemsize
        values = self._bytes[self._used : end].view(dtype)
        self._used = -(-end // _ALIGNMENT) * _ALIGNMENT
        self._on_progress(self._used / len(self._bytes))
        return values

    def pack(self, weight: Tensor, num_inputs: int) -> Tensor:
        """Return a matrix [whole groups, inputs], packed."""
        if self._kind != "float":
            packed = self.take(packed_bytes(self._kind, len(weight), num_inputs), torch.uint8)
            pack_rows(weight, self._kind, num_inputs, packed)
            return packed
        inputs = -(-weight.shape[1] // TILE_INPUTS) * TILE_INPUTS
        packed = self.take(weight.shape[0] * inputs, weight.dtype)
        whole = weight if inputs == weight.shape[1] else F.pad(weight, (0, inputs - weight.shape[1]))
        _blocks(packed, inputs).copy_(_as_blocks(whole))
        return packed

    def keep(self, values: Tensor) -> Tensor:
        """Return a vector as float32."""
        kept = self.take(values.numel(), torch.float32)
        kept.copy_(values)
        return kept


def _blocks(packed: Tensor, inputs: int) -> Tensor:
    """Return packed memory as [groups, pairs of inputs, 64, 2], or as [groups, inputs, 64] in float32."""
    if packed.dtype == torch.float32:
        return packed.view(-1, inputs, GROUP)
    return packed.view(-1, inputs // 2, GROUP, 2)


def _as_blocks(weight: Tensor) -> Tensor:
    """Return a view of a matrix [whole groups, inputs] in the order of :func:`_blocks`."""
    groups, inputs = weight.shape[0] // GROUP, weight.shape[1]
    if weight.dtype == torch.float32:
        return weight.reshape(groups, GROUP, inputs).transpose(1, 2)
    return weight.reshape(groups, GROUP, inputs // 2, 2).transpose(1, 2)


def _as_rows(model: PackedModel, packed: Tensor, inputs: int) -> Tensor:
    """Return the matrix [whole groups, inputs] of packed memory."""
    if model.kind != "float":
        return unpack_rows(packed, model.kind, inputs).to(model.dtype)
    width = -(-inputs // TILE_INPUTS) * TILE_INPUTS
    return _blocks(packed, width).transpose(1, 2).reshape(-1, width)[:, :inputs]


def _padded(values: Tensor, num_rows: int) -> Tensor:
    """Return a matrix or vector with rows of zeros at its end."""
    missing = num_rows - values.shape[0]
    return values if not missing else F.pad(values, (0, 0, 0, missing) if values.dim() == 2 else (0, missing))


def _whole_groups(values: Tensor) -> Tensor:
    return _padded(values, -(-values.shape[0] // GROUP) * GROUP)


def _by_units(units: HeadUnits, values: Tensor, head_dim: int) -> Tensor:
    """Return rows of heads in whole units."""
    if units.stride != head_dim:
        heads = values.view(-1, head_dim, *values.shape[1:])
        padding = (0, 0, 0, units.stride - head_dim) if values.dim() == 2 else (0, units.stride - head_dim)
        values = F.pad(heads, padding).flatten(0, 1)
    return _padded(values, units.count * units.groups * GROUP)


def _interleaved(values: Tensor) -> Tensor:
    """Return rows of gate, then up, as units of 32 rows of gate and the same 32 rows of up."""
    half = values.shape[0] // 2
    rows = -(-half // _HALF) * _HALF
    gate, up = (_padded(part, rows).view(-1, _HALF, *values.shape[1:]) for part in torch.split(values, half))
    return torch.cat((gate, up), 1).flatten(0, 1)


def pack_model(
    config: ModelConfig, weights: ModelWeights, on_progress: Progress, kind: WeightKind = "float"
) -> PackedModel:
    """Return the weights of a model, packed.

    Args:
        config: Its network.
        weights: Taken over: each matrix is freed when it is packed.
        on_progress: Called with the packed share, from 0 to 1.
        kind: Whether and how the matrices of ``weights`` are quantised, all but an embedding that is not tied.

    Raises:
        MemoryError, OSError: There is no memory for the arena.
    """
    arena = _Arena(_arena_bytes(config, weights, kind), kind, on_progress)
    dtype = weights.final_norm.dtype
    is_tied = weights.head is weights.embedding
    head = arena.pack(_whole_groups(weights.head), config.hidden_size)
    del weights.head
    embedding = head if is_tied else arena.take(weights.embedding.numel(), dtype).copy_(weights.embedding.flatten())
    del weights.embedding
    final_norm = arena.keep(weights.final_norm)
    layers = []
    while weights.layers:
        layers.append(_pack_layer(config, weights.layers.pop(0), arena))
    return PackedModel(embedding, head, final_norm, layers, dtype, kind)


def _pack_layer(config: ModelConfig, layer: LayerWeights, arena: _Arena) -> PackedLayer:
    units = HeadUnits.of(config)
    vectors = {
        "q_norm": layer.q_norm,
        "k_norm": layer.k_norm,
        "qkv_bias": None if layer.qkv_bias is None else _by_units(units, layer.qkv_bias, config.head_dim),
        "out_bias": None if layer.attention_out_bias is None else _whole_groups(layer.attention_out_bias),
        "gate_up_bias": None if layer.gate_up_bias is None else _interleaved(layer.gate_up_bias),
        "down_bias": None if layer.down_bias is None else _whole_groups(layer.down_bias),
    }
    return PackedLayer(
        input_norm=arena.keep(layer.input_norm),
        qkv=arena.pack(_by_units(units, layer.qkv, config.head_dim), config.hidden_size),
        out=arena.pack(_whole_groups(layer.attention_out), config.num_heads * config.head_dim),
        post_norm=arena.keep(layer.post_attention_norm),
        gate_up=arena.pack(_interleaved(layer.gate_up), config.hidden_size),
        down=arena.pack(_whole_groups(layer.down), config.intermediate_size),
        **{name: arena.keep(vector) for name, vector in vectors.items() if vector is not None},
    )


def _arena_bytes(config: ModelConfig, weights: ModelWeights, kind: WeightKind) -> int:
    """Return the size of the arena."""
    units = HeadUnits.of(config)
    dtype = weights.final_norm.dtype

    def matrix(num_rows: int, num_inputs: int) -> int:
        if kind != "float":
            return packed_bytes(kind, num_rows, num_inputs)
        return num_rows * -(-num_inputs // TILE_INPUTS) * TILE_INPUTS * dtype.itemsize

    hidden, query = config.hidden_size, config.num_heads * config.head_dim
    out, vocab = (-(-size // GROUP) * GROUP for size in (hidden, config.vocab_size))
    qkv, gate_up = units.count * units.groups * GROUP, 2 * -(-config.intermediate_size // _HALF) * _HALF
    layer = matrix(qkv, hidden) + matrix(gate_up, hidden) + matrix(out, query) + matrix(out, config.intermediate_size)
    vectors = 4 * (qkv + gate_up + 8 * out + 4 * config.head_dim) + 16 * _ALIGNMENT
    embedding = 0 if weights.head is weights.embedding else weights.embedding.numel() * dtype.itemsize
    return config.num_layers * layer + matrix(vocab, hidden) + embedding + (config.num_layers + 2) * vectors


def unpack_model(config: ModelConfig, packed: PackedModel) -> ModelWeights:
    """Return the weights as they were before :func:`pack_model`; the layers of ``packed`` are freed one by one.

    Quantised ones are what their integers and scales stand for, rounded to the type of the others.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    head = _as_rows(packed, packed.head, hidden)[:vocab].contiguous()
    is_tied = packed.embedding is packed.head
    embedding = head if is_tied else packed.embedding.view(vocab, hidden).clone()
    weights = ModelWeights(embedding, head, packed.final_norm.to(packed.dtype))
    while packed.layers:
        weights.layers.append(_unpack_layer(config, packed.layers.pop(0), packed))
    return weights


def _unpack_layer(config: ModelConfig, layer: PackedLayer, packed: PackedModel) -> LayerWeights:
    dtype = packed.dtype
    units = HeadUnits.of(config)
    hidden, query = config.hidden_size, config.num_heads * config.head_dim

    def vector(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.to(dtype)

    def heads(values: Tensor) -> Tensor:
        count = config.num_heads + 2 * config.num_kv_heads
        return values.view(-1, units.stride, *values.shape[1:])[:count, : config.head_dim].flatten(0, 1).contiguous()

    def gate_up(values: Tensor) -> Tensor:
        parts = values.view(-1, 2, _HALF, *values.shape[1:])
        halves = [parts[:, i].flatten(0, 1)[: config.intermediate_size] for i in range(2)]
        return torch.cat(halves)

    def bias(values: Tensor | None, place: Callable[[Tensor], Tensor]) -> Tensor | None:
        return None if values is None else place(values).to(dtype)

    return LayerWeights(
        input_norm=layer.input_norm.to(dtype),
        qkv=heads(_as_rows(packed, layer.qkv, hidden)),
        attention_out=_as_rows(packed, layer.out, query)[:hidden].contiguous(),
        post_attention_norm=layer.post_norm.to(dtype),
        gate_up=gate_up(_as_rows(packed, layer.gate_up, hidden)),
        down=_as_rows(packed, layer.down, config.intermediate_size)[:hidden].contiguous(),
        q_norm=vector(layer.q_norm),
        k_norm=vector(layer.k_norm),
        qkv_bias=bias(layer.qkv_bias, heads),
        attention_out_bias=bias(layer.out_bias, lambda values: values[:hidden]),
        gate_up_bias=bias(layer.gate_up_bias, gate_up),
        down_bias=bias(layer.down_bias, lambda values: values[:hidden]),
    )
