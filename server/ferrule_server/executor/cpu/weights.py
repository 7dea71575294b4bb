"""The weights of a model as the kernels read them: packed, one after the other, in one arena of huge pages.

Linear layers are packed by ``kernels.cpu.pack``, as soon as they have been read, and freed then, so there is never a
second copy of the model. Their rows come in units, each with whole groups of 64::

    qkv       one head, or as many as 64 rows hold; a head of another width is padded to whole groups
    gate_up   32 rows of gate, the same 32 rows of up; without a gate as others
    others    64 rows
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ferrule_server.kernels.cpu.dot import GROUP, TILE_INPUTS
from ferrule_server.kernels.cpu.pack import pack_scratch_bytes
from ferrule_server.kernels.cpu.plan import Plan
from ferrule_server.kernels.cpu.processor import QUANTISERS
from ferrule_server.model.config import LayerKind, ModelConfig
from ferrule_server.model.memory import new_tensor
from ferrule_server.model.tensors import LayerWeights, ModelWeights

__all__ = ["HeadUnits", "PackedLayer", "PackedModel", "Packer", "matrices", "packed_bytes"]

_VECTORS: Final = (
    *("attention_norm", "attention_norm_bias", "attention_out_norm", "mlp_norm", "mlp_norm_bias", "mlp_out_norm"),
    *("q_norm", "k_norm", "input_norm"),
)
"""Fields of a layer that have the same name and shape when they are packed."""
_HALF: Final = GROUP // 2
_ALIGNMENT: Final = 64


@dataclass(frozen=True, slots=True)
class HeadUnits:
    """How the rows of ``qkv`` form units.

    Attributes:
        num_heads: Query, key and value heads of ``qkv``.
        heads: Those of a unit.
        groups: Groups of 64 rows of a unit.
        stride: Rows from one head of a unit to the next.
        count: Units.
    """

    num_heads: int
    heads: int
    groups: int
    stride: int
    count: int

    @staticmethod
    def of(config: ModelConfig, kind: LayerKind) -> HeadUnits:
        """Return the units of a layer; one that reads the K and V of another has queries alone."""
        num_kv = 0 if kind.kv_layer is not None else kind.num_kv_heads * (1 if kind.is_value_key else 2)
        num_heads, width = config.num_heads + num_kv, kind.head_dim
        if GROUP % width == 0:
            heads = GROUP // width
            return HeadUnits(num_heads, heads, 1, width, -(-num_heads // heads))
        groups = -(-width // GROUP)
        return HeadUnits(num_heads, 1, groups, groups * GROUP, num_heads)


@dataclass(slots=True)
class PackedLayer:
    """The weights of a layer: linear layers packed, all others but ``scale`` float32; None: the layer has none."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    attention_norm: Tensor | None = None
    attention_norm_bias: Tensor | None = None
    attention_out_norm: Tensor | None = None
    mlp_norm: Tensor | None = None
    mlp_norm_bias: Tensor | None = None
    mlp_out_norm: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    input_gate: Tensor | None = None
    input_projection: Tensor | None = None
    input_norm: Tensor | None = None
    scale: Tensor | None = None


@dataclass(slots=True)
class PackedModel:
    """The weights of a model as the kernels read them.

    Attributes:
        embedding: The packed head itself if they are tied, else [vocab_size, hidden_size].
        head: Packed.
        final_norm: float32 [hidden_size].
        layers: In order.
        final_norm_bias: float32 [hidden_size], or None.
        input_embedding: As in ``ModelWeights``, or None.
        input_projection: Packed, or None.
        input_norm: float32 [per_layer_input.size], or None.
    """

    embedding: Tensor
    head: Tensor
    final_norm: Tensor
    layers: list[PackedLayer]
    final_norm_bias: Tensor | None = None
    input_embedding: Tensor | None = None
    input_projection: Tensor | None = None
    input_norm: Tensor | None = None


def matrices(config: ModelConfig) -> list[tuple[str, int]]:
    """Return the matrices that are packed: each field, and its layer; -1: a field of the whole model."""
    names, ends = ["qkv", "attention_out", "gate_up", "down"], ["head"]
    if config.per_layer_input is not None:
        names, ends = [*names, "input_gate", "input_projection"], [*ends, "input_projection"]
    layers = range(config.num_layers)
    return [(name, -1) for name in ends] + [(name, layer) for layer in layers for name in names]


def packed_bytes(config: ModelConfig, plan: Plan, name: str, layer: int) -> int:
    """Return the bytes of a matrix that is packed."""
    num_rows, num_inputs = _packed_shape(config, name, layer)
    tiles = -(-num_inputs // TILE_INPUTS) * plan.tile_bytes
    return -(-num_rows // GROUP * (tiles + plan.group_end_bytes) // _ALIGNMENT) * _ALIGNMENT


def _packed_shape(config: ModelConfig, name: str, layer: int) -> tuple[int, int]:
    """Return the packed rows of a matrix, and its inputs."""
    kind, hidden = config.layers[layer], config.hidden_size
    size = 0 if config.per_layer_input is None else config.per_layer_input.size
    units = HeadUnits.of(config, kind)
    num_rows, num_inputs = {
        "head": (config.vocab_size, hidden),
        "qkv": (units.count * units.groups * GROUP, hidden),
        "attention_out": (hidden, config.num_heads * kind.head_dim),
        "gate_up": (_activated_rows(config, kind), hidden),
        "down": (hidden, kind.intermediate_size),
        "input_gate": (size, hidden),
        "input_projection": (config.num_layers * size, hidden) if layer < 0 else (hidden, size),
    }[name]
    return -(-num_rows // GROUP) * GROUP, num_inputs


def _activated_rows(config: ModelConfig, kind: LayerKind) -> int:
    """Return the rows of ``gate_up``; those of gate and up alternate."""
    return 2 * -(-kind.intermediate_size // _HALF) * _HALF if config.is_gated else kind.intermediate_size


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


class Packer:
    """Packs the matrices of a model, in whatever order they are read.

    Args:
        config: The network.
        plan: Of the kernels.
        pack: ``Kernels.pack``.

    Attributes:
        name: Names the form of quantised matrices and its version, and that of their inputs; empty: not quantised.

    Raises:
        MemoryError, OSError: There is no memory for the arena.
    """

    def __init__(self, config: ModelConfig, plan: Plan, pack: Callable[..., int]) -> None:
        self._config, self._plan, self._pack = config, plan, pack
        num_bytes = sum(packed_bytes(config, plan, *matrix) for matrix in matrices(config))
        self._arena = new_tensor((num_bytes,), torch.uint8)
        self._used = 0
        self.name = f"{plan.weights}/{QUANTISERS[plan.weights]}" if plan.is_quantised else ""
        self.name += " inputs int8" if plan.has_int8_inputs else ""

    def encode(self, name: str, layer: int, matrix: Tensor) -> Tensor:
        """Return a matrix packed, uint8; it is named by its field, and by its layer or -1."""
        shape, size = _packed_shape(self._config, name, layer), packed_bytes(self._config, self._plan, name, layer)
        rows = self._in_units(name, layer, matrix).contiguous()
        assert rows.shape == shape, (name, rows.shape)
        packed = self._arena[self._used : self._used + size]
        assert len(packed) == size, f"{name}: the arena is full"
        self._used += size
        scratch = torch.empty(pack_scratch_bytes(shape[1]) + _ALIGNMENT, dtype=torch.uint8)
        addresses = packed.data_ptr(), scratch.data_ptr()
        self._pack(None, rows.data_ptr(), rows.stride(0) * rows.itemsize, *shape, *addresses)
        return packed

    def _in_units(self, name: str, layer: int, values: Tensor) -> Tensor:
        """Return the rows of a matrix, or the numbers of a bias, in whole units."""
        if name == "qkv":
            kind = self._config.layers[layer]
            return _by_units(HeadUnits.of(self._config, kind), values, kind.head_dim)
        return _interleaved(values) if name == "gate_up" and self._config.is_gated else _whole_groups(values)

    def finish(self, weights: ModelWeights) -> PackedModel:
        """Return the model, when all matrices have been packed."""
        return PackedModel(
            embedding=weights.embedding,
            head=weights.head,
            final_norm=weights.final_norm.float(),
            layers=[self._finish_layer(index, layer) for index, layer in enumerate(weights.layers)],
            final_norm_bias=_wide(weights.final_norm_bias),
            input_embedding=weights.input_embedding,
            input_projection=weights.input_projection,
            input_norm=_wide(weights.input_norm),
        )

    def _finish_layer(self, index: int, layer: LayerWeights) -> PackedLayer:
        def bias(name: str, values: Tensor | None) -> Tensor | None:
            return None if values is None else self._in_units(name, index, values).float().contiguous()

        return PackedLayer(
            qkv=layer.qkv,
            out=layer.attention_out,
            gate_up=layer.gate_up,
            down=layer.down,
            **{name: _wide(getattr(layer, name)) for name in _VECTORS},
            qkv_bias=bias("qkv", layer.qkv_bias),
            out_bias=bias("attention_out", layer.attention_out_bias),
            gate_up_bias=bias("gate_up", layer.gate_up_bias),
            down_bias=bias("down", layer.down_bias),
            input_gate=layer.input_gate,
            input_projection=layer.input_projection,
            scale=layer.scale,
        )


def _wide(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.float()
