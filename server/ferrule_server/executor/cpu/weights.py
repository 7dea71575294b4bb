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

from ferrule_server.kernels.cpu.dot import GROUP
from ferrule_server.kernels.cpu.pack import pack_scratch_bytes
from ferrule_server.kernels.cpu.plan import MatrixKind, Plan
from ferrule_server.kernels.cpu.processor import QUANTISERS
from ferrule_server.model.config import LayerKind, ModelConfig
from ferrule_server.model.memory import new_tensor
from ferrule_server.model.tensors import ModelWeights, TensorSpec, specs

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
    """

    num_heads: int
    heads: int
    groups: int
    stride: int

    @staticmethod
    def of(config: ModelConfig, kind: LayerKind) -> HeadUnits:
        """Return the units of a layer; one that reads the K and V of another has queries alone."""
        num_kv = 0 if kind.kv_layer is not None else kind.num_kv_heads * (1 if kind.is_value_key else 2)
        num_heads, width = config.num_heads + num_kv, kind.head_dim
        if GROUP % width == 0:
            heads = GROUP // width
            return HeadUnits(num_heads, heads, 1, width)
        groups = -(-width // GROUP)
        return HeadUnits(num_heads, 1, groups, groups * GROUP)


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """The matrix of a linear layer as the kernels read it.

    Attributes:
        kind: How it is packed.
        num_inputs: Of a row.
        data: uint8.
    """

    kind: MatrixKind
    num_inputs: int
    data: Tensor


Packed = dict[str, Tensor | PackedMatrix]
"""Weights by the names of their parts (``model/tensors.py``): the matrices of linear layers packed, the rows of
embeddings as they were, all others float32, biases as long as the packed rows."""


@dataclass(frozen=True, slots=True)
class PackedModel:
    """The weights of a model as the kernels read them.

    Attributes:
        parts: Those outside the layers; a tied embedding is the packed head.
        layers: In order.
    """

    parts: Packed
    layers: list[Packed]


def kind_of(plan: Plan, spec: TensorSpec) -> MatrixKind:  # noqa: ARG001  (all matrices are of one kind today)
    """Return how a matrix is packed."""
    return plan.kind


def packed_bytes(config: ModelConfig, plan: Plan, spec: TensorSpec) -> int:
    """Return the bytes of a matrix once it is packed."""
    rows = in_units(config, spec, torch.empty(spec.shape, device="meta"))
    return kind_of(plan, spec).packed_bytes(*rows.shape)


def in_units(config: ModelConfig, spec: TensorSpec, values: Tensor) -> Tensor:
    """Return the rows of a matrix, or the numbers of its bias, in whole units."""
    name = spec.part.name.removesuffix("_bias")
    if name == "qkv":
        kind = config.layers[spec.layer]
        return _by_units(HeadUnits.of(config, kind), values, kind.head_dim)
    return _interleaved(values) if name == "gate_up" and config.is_gated else _padded(values, GROUP)


def _padded(values: Tensor, step: int) -> Tensor:
    """Return a matrix or vector with rows of zeros at its end, up to a multiple of ``step``."""
    missing = -len(values) % step
    return values if not missing else F.pad(values, (0, 0, 0, missing) if values.dim() == 2 else (0, missing))


def _by_units(units: HeadUnits, values: Tensor, head_dim: int) -> Tensor:
    """Return rows of heads in whole units."""
    if units.stride != head_dim:
        heads = values.view(-1, head_dim, *values.shape[1:])
        padding = (0, 0, 0, units.stride - head_dim) if values.dim() == 2 else (0, units.stride - head_dim)
        values = F.pad(heads, padding).flatten(0, 1)
    return _padded(values, units.groups * GROUP)


def _interleaved(values: Tensor) -> Tensor:
    """Return rows of gate, then up, as units of 32 rows of gate and the same 32 rows of up."""
    gate, up = (_padded(part, _HALF).view(-1, _HALF, *values.shape[1:]) for part in values.chunk(2))
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
        num_bytes = sum(packed_bytes(config, plan, spec) for spec in specs(config) if spec.is_linear)
        self._arena = new_tensor((num_bytes,), torch.uint8)
        self._used = 0
        self.name = f"{plan.weights}/{QUANTISERS[plan.weights]}" if plan.is_quantised else ""
        self.name += " inputs int8" if plan.has_int8_inputs else ""

    def encode(self, spec: TensorSpec, matrix: Tensor) -> Tensor:
        """Return a matrix packed, uint8."""
        rows = in_units(self._config, spec, matrix).contiguous()
        size = kind_of(self._plan, spec).packed_bytes(*rows.shape)
        packed = self._arena[self._used : self._used + size]
        assert len(packed) == size, f"{spec.names}: the arena is full"
        self._used += size
        scratch = torch.empty(pack_scratch_bytes(rows.shape[1]) + _ALIGNMENT, dtype=torch.uint8)
        addresses = packed.data_ptr(), scratch.data_ptr()
        self._pack(None, rows.data_ptr(), rows.stride(0) * rows.itemsize, *rows.shape, *addresses)
        return packed

    def finish(self, weights: ModelWeights) -> PackedModel:
        """Return the model, when all matrices have been packed."""
        model = PackedModel({}, [{} for _ in weights.layers])
        for spec in specs(self._config):
            holder = model.parts if spec.layer < 0 else model.layers[spec.layer]
            holder[spec.part.name] = self._finish(spec, weights.holder(spec.layer)[spec.part.name])
        return model

    def _finish(self, spec: TensorSpec, values: Tensor) -> Tensor | PackedMatrix:
        if spec.is_linear:
            assert spec.inputs is not None
            return PackedMatrix(kind_of(self._plan, spec), spec.inputs, values)
        if spec.part.kind == "embedding":
            return values
        return (in_units(self._config, spec, values) if spec.part.kind == "bias" else values).float().contiguous()
