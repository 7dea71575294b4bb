"""The list of stages of a model: what the kernels do in a step, in order.

A layer of another shape, a mixture or an adapter is other entries here, and no branch in the kernels.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ferrule_server.executor.cpu.memory import StepMemory
from ferrule_server.executor.cpu.units import GROUP, HeadUnits
from ferrule_server.executor.cpu.weights import Packed, PackedMatrix, PackedModel
from ferrule_server.kernels.cpu.compiled import Kernels
from ferrule_server.kernels.cpu.kinds import Kind, Rows
from ferrule_server.kernels.cpu.records import STAGE
from ferrule_server.model.config import Experts, ModelConfig

_GATE_UP: Final = ("gate_up", "expert_gate_up.0")
"""Of the first expert; those of the others follow it."""
_DOWN: Final = "expert_down.0"


def keeps_ups(packed: PackedModel) -> bool:
    """Return whether some layers need the outputs of ``up`` before those of ``gate``."""
    return any(len(layer.get(name, ())) == 2 for layer in packed.layers for name in _GATE_UP)


def address_of(weight: Tensor | list[PackedMatrix] | None) -> int:
    """Return where a weight is, or its first piece; 0: there is none."""
    tensor = weight[0].data if isinstance(weight, list) else weight
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
        stages.linear(Kind.KEEP, packed.parts, "input_projection", "normed", **memory.kept_in("inputs"))
        weight = address_of(packed.parts["input_norm"])
        stages.rows(Kind.MIX_INPUTS, weight=weight, factor=config.hidden_size**-0.5)
    for index, layer in enumerate(packed.layers):
        stages.layer = layers[index : index + 1].ctypes.data
        _list_layer(stages, config, memory, index, layer)
    first_of_head = len(stages.entries)
    stages.rows_of = Rows.OUTPUTS
    stages.norm(packed.parts, "final_norm")
    stages.rows(Kind.CLEAR_OUTPUT)
    stages.linear(Kind.READ_LOGITS, packed.parts, "embedding" if config.is_tied else "head", "normed")
    stages.rows(Kind.MERGE_OUTPUT)
    stages.rows(Kind.CHOOSE, kernel=kernels.choose)
    return stages.finish(), first_of_head


def _list_layer(stages: _Stages, config: ModelConfig, memory: StepMemory, index: int, layer: Packed) -> None:
    kind, second = config.layers[index], config.per_layer_input
    is_row_norm = config.qk_norm == "row"
    stages.norm(layer, "attention_norm")
    stages.heads(Kind.KEEP_HEADS if is_row_norm else Kind.PROJECT, layer, kind.head_dim)
    if is_row_norm:
        stages.rows(Kind.NORM_HEADS)
    stages.attention(kind.head_dim)
    stages.add(layer, "attention_out", "attended", "attention_out_norm")
    if not config.is_parallel:
        stages.norm(layer, "mlp_norm")
    if kind.experts is not None:
        stages.experts(layer, kind.experts)
    if "down" in layer:
        stages.gate_up(layer, _GATE_UP[0])
        stages.gate_shared(layer, kind.intermediate_size)
        stages.add(layer, "down", "activated", "mlp_out_norm")
    if second is not None:
        stages.rows(Kind.COPY)
        kept = memory.kept_in("inputs", first=index * second.size, size=second.size)
        stages.linear(Kind.GATE, layer, "input_gate", "normed", **kept, **memory.written_in("activated"))
        stages.add(layer, "input_projection", "activated", "input_norm", 1.0)
    scale = layer.get("scale")
    if isinstance(scale, Tensor) and scale.item() != 1:
        stages.rows(Kind.SCALE, factor=scale.item())


def _quantised(inputs: str) -> str:
    """Return the name of the rows that hold inputs as integers."""
    return "pair_quantised" if inputs.startswith("pair_") else "quantised"


def _bias_of(name: str) -> str:
    """Return the name of the bias of a matrix, which may be that of an expert."""
    part, dot, expert = name.partition(".")
    return f"{part}_bias{dot}{expert}"


class _Stages:
    """A list that is being written.

    Attributes:
        entries: Fields of STAGE, of each stage.
        layer: Address of the LAYER of what is added.
        rows_of: Of what the rows of what is added are.
    """

    def __init__(self, config: ModelConfig, kernels: Kernels, memory: StepMemory) -> None:
        self._config, self._kernels, self._memory = config, kernels, memory
        self.entries: list[dict[str, float]] = []
        self.layer = 0
        self.rows_of = Rows.TOKENS

    def rows(self, kind: Kind, **fields: float) -> None:
        """Add a stage whose rows are shared out, or, with a ``kernel``, one whose work is claimed."""
        self.entries.append({"kind": kind, "layer": self.layer, "rows": self.rows_of, **fields})

    def norm(self, parts: Packed, name: str) -> None:
        """Add the norm of the residual stream; without a weight its rows are copied."""
        kind = Kind.LAYER_NORM if self._config.has_layer_norm else Kind.NORM
        weight, bias = (address_of(parts.get(each)) for each in (name, f"{name}_bias"))
        self.rows(kind if weight else Kind.COPY, weight=weight, bias=bias)

    def linear(self, kind: Kind, parts: Packed, name: str, inputs: str, **fields: float) -> None:
        """Add a linear layer whose matrix is one piece.

        Args:
            kind: What becomes of its outputs.
            parts: With its matrix.
            name: Of the matrix.
            inputs: The rows that it reads, a field of STEP.
            fields: Others of STAGE.
        """
        (piece,) = self._pieces(parts, name)
        self._quantise(piece, inputs)
        self._multiply(kind, piece, address_of(parts.get(f"{name}_bias")), inputs, num_groups=1, **fields)

    def heads(self, kind: Kind, parts: Packed, head_dim: int) -> None:
        """Add the projection of heads: no piece of it depends on another."""
        units = HeadUnits.of(head_dim)
        bias = address_of(parts.get("qkv_bias"))
        form: bool | None = None
        for number, piece in enumerate(self._pieces(parts, "qkv")):
            needed = self._is_int8(piece) if piece.kind.is_quantised else form
            if needed != form:
                self._quantise(piece, "normed")
            elif number:
                self.entries[-1]["is_open"] = True
            form, first = needed, piece.piece.begin // head_dim
            end = first + piece.piece.num_rows // head_dim
            self._multiply(kind, piece, bias, "normed", num_groups=units.groups, first_head=first, end_head=end)
            bias += bias and 4 * piece.num_packed_rows

    def gate_up(self, parts: Packed, name: str, prefix: str = "", **fields: float) -> None:
        """Add the first layer of a feed-forward part; if gate and up are packed differently, up is kept for gate.

        Args:
            parts: With its matrix.
            name: Of the matrix.
            prefix: ``pair_`` if its rows are pairs of rows and experts.
            fields: Others of STAGE.
        """
        pieces, bias = self._pieces(parts, name), address_of(parts.get(_bias_of(name)))
        inputs, out = f"{prefix}normed", self._memory.written_in(f"{prefix}activated")
        self._prepare(pieces[-1], prefix)
        if len(pieces) == 1:
            self._multiply(Kind.ACTIVATE, pieces[0], bias, inputs, num_groups=1, **out, **fields)
            return
        gate, up = pieces
        kept = self._memory.kept_in(f"{prefix}ups", size=up.piece.num_rows)
        up_bias = bias and bias + 4 * gate.num_packed_rows
        self._multiply(Kind.KEEP, up, up_bias, inputs, num_groups=1, **kept, **fields)
        if gate.kind.is_quantised != up.kind.is_quantised or self._is_int8(gate) != self._is_int8(up):
            self._prepare(gate, prefix)
        self._multiply(Kind.GATE, gate, bias, inputs, num_groups=1, **kept, **out, **fields)

    def _prepare(self, matrix: PackedMatrix, prefix: str) -> None:
        """Make the normed rows the inputs of a matrix; pairs copy those of their rows."""
        self.rows_of = Rows.TOKENS
        self._quantise(matrix, "normed")
        if prefix:
            self.rows_of = Rows.PAIRS
            name = _quantised("normed") if matrix.kind.is_quantised else "normed"
            self.rows(Kind.GATHER, **self._memory.rows_of(name), **self._memory.written_in(prefix + name))

    def experts(self, parts: Packed, experts: Experts) -> None:
        """Add a mixture: which experts each row passes, then their feed-forward parts for all that pass them."""
        memory, (down,) = self._memory, self._pieces(parts, _DOWN)
        self.linear(Kind.KEEP, parts, "router", "normed", **memory.kept_in("scores", size=experts.count))
        self.rows(Kind.ROUTE, **memory.rows_of("scores"))
        self.rows_of = Rows.ALL
        self.rows(Kind.GROUP_PAIRS)
        self.rows_of = Rows.TOKENS
        size = sum(len(piece.data) for piece in self._pieces(parts, _GATE_UP[1]))
        self.gate_up(parts, _GATE_UP[1], "pair_", expert_bytes=size)
        self._quantise(down, "pair_activated")
        bias, kept = address_of(parts.get(_bias_of(_DOWN))), memory.kept_in("pair_outs")
        self._multiply(Kind.KEEP, down, bias, "pair_activated", num_groups=1, expert_bytes=len(down.data), **kept)
        self.rows_of = Rows.TOKENS
        self.rows(Kind.ADD_EXPERTS, factor=self._config.residual_scale, **kept)

    def gate_shared(self, parts: Packed, size: int) -> None:
        """Multiply the inputs of the last layer, if there is a projection that says with what."""
        if "shared_gate" in parts:
            self.linear(Kind.KEEP, parts, "shared_gate", "normed", **self._memory.kept_in("scores", size=1))
            kept = self._memory.kept_in("scores", size=size)
            self.rows(Kind.GATE_SHARED, **kept, **self._memory.written_in("activated"))

    @staticmethod
    def _pieces(parts: Packed, name: str) -> list[PackedMatrix]:
        pieces = parts[name]
        assert isinstance(pieces, list)
        return pieces

    def _is_int8(self, matrix: PackedMatrix) -> bool:
        return self._kernels.plan.of(matrix.kind).has_int8_inputs

    def _quantise(self, matrix: PackedMatrix, inputs: str) -> None:
        """Make the inputs of a quantised matrix integers."""
        if matrix.kind.is_quantised:
            fields = self._memory.rows_of(inputs) | self._memory.written_in(_quantised(inputs))
            self.rows(Kind.QUANTISE, num_tiles=matrix.num_tiles, is_int8=self._is_int8(matrix), **fields)

    def _multiply(
        self, kind: Kind, matrix: PackedMatrix, bias: int, inputs: str, *, num_groups: int, **fields: float
    ) -> None:
        """Add the product of rows and a matrix, with units of some groups of 64 outputs."""
        unit_bytes = num_groups * matrix.kind.packed_bytes(GROUP, matrix.num_inputs)
        self.rows(
            kind, kernel=self._kernels.linear, multiply=self._kernels.multiply[matrix.kind],
            weight=matrix.data.data_ptr(), bias=bias, num_units=len(matrix.data) // unit_bytes, unit_bytes=unit_bytes,
            groups_at_once=num_groups, sum_bytes=4 * GROUP * num_groups, num_tiles=matrix.num_tiles,
            **self._memory.rows_of(_quantised(inputs) if matrix.kind.is_quantised else inputs), **fields,
        )  # fmt: skip

    def attention(self, head_dim: int) -> None:
        """Add the attention of a layer."""
        attend, merge = self._kernels.attention[head_dim]
        self.rows(Kind.ATTEND, kernel=attend)
        self.rows(Kind.MERGE, kernel=merge)

    def add(self, parts: Packed, name: str, inputs: str, norm: str, factor: float | None = None) -> None:
        """Add a linear layer whose outputs, normed if there is such a norm, are added to the residual stream."""
        factor = self._config.residual_scale if factor is None else factor
        if norm not in parts:
            self.linear(Kind.ADD, parts, name, inputs, factor=factor)
        else:
            self.linear(Kind.KEEP, parts, name, inputs, **self._memory.kept_in("added"))
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
        if not is_joined or record["rows"] != before["rows"]:
            first = number
        records["num_together"][first] += 1
