"""In which order the kernels compute the rows of a matrix: units, each with whole groups of 64.

qkv       one head, or as many as 64 rows hold; a head of another width is padded to whole groups
gate_up   32 rows of gate, the same 32 rows of up; without a gate as others
others    64 rows
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ferrule_server.model.config import LayerKind, ModelConfig
from ferrule_server.model.parts import TensorSpec

GROUP: Final = 64
"""Rows of a group."""
_HALF: Final = GROUP // 2
_GATE_UP: Final = ("gate_up", "expert_gate_up")


@dataclass(frozen=True, slots=True)
class HeadUnits:
    """How the rows of ``qkv`` form units.

    Attributes:
        heads: Those of a unit.
        groups: Groups of 64 rows of a unit.
        stride: Rows from one head of a unit to the next.
    """

    heads: int
    groups: int
    stride: int

    @staticmethod
    def of(head_dim: int) -> HeadUnits:
        """Return the units of heads of a width."""
        if GROUP % head_dim == 0:
            return HeadUnits(GROUP // head_dim, 1, head_dim)
        groups = -(-head_dim // GROUP)
        return HeadUnits(1, groups, groups * GROUP)


def row_parts(config: ModelConfig, spec: TensorSpec) -> list[int]:
    """Return the rows of the parts of a matrix, which may be packed differently: q, k and v; gate and up."""
    if spec.part.name == "qkv":
        kind = config.layers[spec.layer]
        return _qkv_parts(config, kind, sum(spec.rows))
    if spec.part.name in _GATE_UP and config.is_gated:
        return [sum(spec.rows) // 2] * 2
    return [sum(spec.rows)]


def _qkv_parts(config: ModelConfig, kind: LayerKind, num_rows: int) -> list[int]:
    query, kv = config.num_heads * kind.head_dim, kind.num_kv_heads * kind.head_dim
    return [part for part in (query, min(kv, num_rows - query), num_rows - query - kv) if part > 0]


def in_units(config: ModelConfig, spec: TensorSpec, values: Tensor) -> Tensor:
    """Return rows of a matrix, or the numbers of its bias, in whole units: all of them, or one of its parts."""
    if spec.part.name == "qkv":
        return _by_units(config.layers[spec.layer].head_dim, values)
    is_paired = spec.part.name in _GATE_UP and config.is_gated and len(values) == sum(spec.rows)
    return _interleaved(values) if is_paired else _padded(values, GROUP)


def _padded(values: Tensor, step: int) -> Tensor:
    """Return a matrix or vector with rows of zeros at its end, up to a multiple of ``step``."""
    missing = -len(values) % step
    return values if not missing else F.pad(values, (0, 0, 0, missing) if values.dim() == 2 else (0, missing))


def _by_units(head_dim: int, values: Tensor) -> Tensor:
    """Return rows of heads in whole units."""
    units = HeadUnits.of(head_dim)
    if units.stride != head_dim:
        heads = values.view(-1, head_dim, *values.shape[1:])
        padding = (0, 0, 0, units.stride - head_dim) if values.dim() == 2 else (0, units.stride - head_dim)
        values = F.pad(heads, padding).flatten(0, 1)
    return _padded(values, units.groups * GROUP)


def _interleaved(values: Tensor) -> Tensor:
    """Return rows of gate, then up, as units of 32 rows of gate and the same 32 rows of up."""
    gate, up = (_padded(part, _HALF).view(-1, _HALF, *values.shape[1:]) for part in values.chunk(2))
    return torch.cat((gate, up), 1).flatten(0, 1)
