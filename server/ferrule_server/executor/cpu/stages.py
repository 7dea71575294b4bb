"""The list of stages of a model: what the kernels do in a step, in order.

A layer of another shape, a mixture or an adapter is other entries here, and no branch in the kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ferrule_server.executor.cpu.memory import StepMemory
from ferrule_server.executor.cpu.weights import HeadUnits, Packed, PackedMatrix, PackedModel
from ferrule_server.kernels.cpu.compiled import Kernels
from ferrule_server.kernels.cpu.dot import GROUP
from ferrule_server.kernels.cpu.kinds import Kind
from ferrule_server.kernels.cpu.plan import TILE_INPUTS
from ferrule_server.kernels.cpu.records import STAGE
from ferrule_server.model.config import ModelConfig


def address_of(weight: Tensor | PackedMatrix | None) -> int:
    """Return where a weight is; 0: there is none."""
    tensor = weight.data if isinstance(weight, PackedMatrix) else weight
    return 0 if tensor is None else tensor.data_ptr()


def list_stages(
    config: ModelConfig, packed: PackedModel, layers: npt.NDArray[Any], kernels: Kernels, memory: StepMemory
) -> tuple[npt.NDArray[Any], int]:
    """Return the stages of a step and how many of them are before those of the head.

    Args:
        config: The network.
        packed: Its weights; kept by the caller, as all that follows.
        layers: LAYER [num_layers].
        kernels: The machine code.
        memory: What is between the stages.

    Returns:
        STAGE [n], and the number of the first stage of the head.
    """
    stages = _Stages(config, kernels, memory)
    stages.rows(Kind.EMBED)
    if "input_projection" in packed.parts:
        stages.rows(Kind.COPY)
        stages.linear(Kind.KEEP_INPUTS, packed.parts, "input_projection", "normed")
        weight = address_of(packed.parts["input_norm"])
        stages.rows(Kind.MIX_INPUTS, weight=weight, factor=config.hidden_size**-0.5)
    for index, layer in enumerate(packed.layers):
        stages.layer = layers[index : index + 1].ctypes.data
        _list_layer(stages, config, index, layer)
    first_of_head = len(stages.entries)
    stages.is_of_outputs = True
    stages.norm(packed.parts, "final_norm")
    stages.rows(Kind.CLEAR_OUTPUT)
    stages.linear(Kind.READ_LOGITS, packed.parts, "embedding" if config.is_tied else "head", "normed")
    stages.rows(Kind.MERGE_OUTPUT)
    stages.rows(Kind.CHOOSE, kernel=kernels.choose)
    return stages.finish(), first_of_head


def _list_layer(stages: _Stages, config: ModelConfig, index: int, layer: Packed) -> None:
    kind, second = config.layers[index], config.per_layer_input
    is_row_norm = config.qk_norm == "row"
    stages.norm(layer, "attention_norm")
    num_groups = HeadUnits.of(config, kind).groups
    stages.linear(Kind.KEEP_HEADS if is_row_norm else Kind.PROJECT, layer, "qkv", "normed", num_groups)
    if is_row_norm:
        stages.rows(Kind.NORM_HEADS)
    stages.attention(kind.head_dim)
    stages.add(layer, "attention_out", "attended", "attention_out_norm")
    if not config.is_parallel:
        stages.norm(layer, "mlp_norm")
    stages.linear(Kind.ACTIVATE, layer, "gate_up", "normed")
    stages.add(layer, "down", "activated", "mlp_out_norm")
    if second is not None:
        stages.rows(Kind.COPY)
        stages.linear(Kind.GATE_INPUT, layer, "input_gate", "normed", offset=index * second.size)
        stages.add(layer, "input_projection", "activated", "input_norm", 1.0)
    scale = layer.get("scale")
    if isinstance(scale, Tensor) and scale.item() != 1:
        stages.rows(Kind.SCALE, factor=scale.item())


class _Stages:
    """A list that is being written.

    Attributes:
        entries: Fields of STAGE, of each stage.
        layer: Address of the LAYER of what is added.
        is_of_outputs: The rows of what is added are outputs.
    """

    def __init__(self, config: ModelConfig, kernels: Kernels, memory: StepMemory) -> None:
        self._config, self._kernels, self._memory = config, kernels, memory
        self.entries: list[dict[str, float]] = []
        self.layer = 0
        self.is_of_outputs = False

    def rows(self, kind: Kind, **fields: float) -> None:
        """Add a stage whose rows are shared out, or, with a ``kernel``, one whose work is claimed."""
        self.entries.append({"kind": kind, "layer": self.layer, "is_of_outputs": self.is_of_outputs, **fields})

    def norm(self, parts: Packed, name: str) -> None:
        """Add the norm of the residual stream; without a weight its rows are copied."""
        kind = Kind.LAYER_NORM if self._config.has_layer_norm else Kind.NORM
        weight, bias = (address_of(parts.get(each)) for each in (name, f"{name}_bias"))
        self.rows(kind if weight else Kind.COPY, weight=weight, bias=bias)

    def linear(self, kind: Kind, parts: Packed, name: str, inputs: str, num_groups: int = 1, **fields: float) -> None:
        """Add a linear layer; first its inputs become integers if its matrix is quantised.

        Args:
            kind: What becomes of its outputs.
            parts: With its matrix.
            name: Of the matrix.
            inputs: The rows that it reads, a field of STEP.
            num_groups: Groups of 64 outputs of a unit.
            fields: Others of STAGE.
        """
        matrix, bias = parts[name], parts.get(f"{name}_bias")
        assert isinstance(matrix, PackedMatrix)
        num_tiles = -(-matrix.num_inputs // TILE_INPUTS)
        unit_bytes = num_groups * matrix.kind.packed_bytes(GROUP, matrix.num_inputs)
        if matrix.kind.is_quantised:
            self.rows(Kind.QUANTISE, num_tiles=num_tiles, **self._memory.rows_of(inputs))
        self.rows(
            kind,
            kernel=self._kernels.linear[matrix.kind],
            weight=address_of(matrix),
            bias=address_of(bias),
            num_units=len(matrix.data) // unit_bytes,
            unit_bytes=unit_bytes,
            groups_at_once=num_groups,
            sum_bytes=4 * GROUP * num_groups,
            num_tiles=num_tiles,
            **self._memory.rows_of("quantised" if matrix.kind.is_quantised else inputs),
            **fields,
        )

    def attention(self, head_dim: int) -> None:
        """Add the attention of a layer."""
        attend, merge = self._kernels.attention[head_dim]
        self.rows(Kind.ATTEND, kernel=attend)
        self.rows(Kind.MERGE, kernel=merge)

    def add(self, parts: Packed, name: str, inputs: str, norm: str, factor: float | None = None) -> None:
        """Add a linear layer whose outputs, normed if there is such a norm, are added to the residual stream."""
        factor = self._config.residual_scale if factor is None else factor
        self.linear(Kind.KEEP_ADDED if norm in parts else Kind.ADD, parts, name, inputs, factor=factor)
        if norm in parts:
            self.rows(Kind.ADD_NORMED, weight=address_of(parts[norm]), factor=factor)

    def finish(self) -> npt.NDArray[Any]:
        """Return the list as the kernels read it: STAGE [n]."""
        records = np.zeros(len(self.entries), STAGE)
        for record, entry in zip(records, self.entries, strict=True):
            for name, value in entry.items():
                record[name] = value
        is_claimed = records["kernel"] != 0
        records["claim"] = np.cumsum(is_claimed) - 1
        _link(records)
        _join(records)
        return records


def _link(records: npt.NDArray[Any]) -> None:
    """Write which linear layer follows each stage: after the last one, the first one of the next step."""
    linear = np.flatnonzero(records["num_units"])
    following = linear[np.searchsorted(linear, np.arange(len(records)), side="right") % len(linear)]
    records["following"] = records.ctypes.data + following * STAGE.itemsize


def _join(records: npt.NDArray[Any]) -> None:
    """Write which stages are run together: those of the same rows that follow each other."""
    first = 0
    for number, record in enumerate(records):
        before = records[number - 1]
        is_joined = number and not record["kernel"] and not before["kernel"]
        if not is_joined or record["is_of_outputs"] != before["is_of_outputs"]:
            first = number
        records["num_together"][first] += 1
