"""The weights of a model as the kernels read them: packed, one after the other, in one arena of huge pages.

Linear layers are packed as soon as they have been read, and freed then, so there is never a second copy of the model.
What is packed in the file keeps its numbers (``layout``); floats are copied or quantised (``kernels.cpu.pack``).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from ferrule_server.executor.cpu.layout import lay_out
from ferrule_server.executor.cpu.units import GROUP, in_units, row_parts
from ferrule_server.kernels.cpu.compiled import Wanted
from ferrule_server.kernels.cpu.pack import pack_scratch_bytes
from ferrule_server.kernels.cpu.plan import Plan, WeightKind
from ferrule_server.kernels.cpu.processor import QUANTISERS
from ferrule_server.kernels.matrix_kinds import CODES4_OFFSET, FLOAT32, INT8, TILE_INPUTS, MatrixKind
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.gguf.blocks import BLOCKS
from ferrule_server.model.memory import new_tensor
from ferrule_server.model.parts import TensorSpec, specs
from ferrule_server.model.tensors import ModelWeights, StoredMatrix

_ALIGNMENT: Final = 64
_AT_ONCE: Final = 1 << 18
"""Numbers in blocks, or 64 rows if they are more, so that what is between a file and its layout stays in the cache."""
_QUANTISED: Final[Mapping[WeightKind, MatrixKind]] = {"int8": INT8, "int4": CODES4_OFFSET}
_IN_INT8: Final = frozenset({("qkv", 2), ("down", 0), ("expert_down", 0), ("head", 0), ("embedding", 0)})
"""Parts that keep 8 bits if others have codes of 4 bits: values, the last layer of a block and the head lose most."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a matrix that are packed in the same way.

    Attributes:
        kind: How.
        begin: The first of them.
        num_rows: How many there are.
        block: The type of their blocks in the file; empty: they are floats there.
    """

    kind: MatrixKind
    begin: int
    num_rows: int
    block: str = ""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A piece of the matrix of a linear layer as the kernels read it.

    Attributes:
        piece: Which rows.
        num_inputs: Of a row.
        data: uint8.
    """

    piece: Piece
    num_inputs: int
    data: Tensor

    @property
    def kind(self) -> MatrixKind:
        """How it is packed."""
        return self.piece.kind

    @property
    def num_tiles(self) -> int:
        """Tiles of a row."""
        return -(-self.num_inputs // TILE_INPUTS)

    @property
    def num_packed_rows(self) -> int:
        """Rows of all units."""
        return GROUP * len(self.data) // self.kind.packed_bytes(GROUP, self.num_inputs)


Packed = dict[str, Tensor | list[PackedMatrix]]
"""Weights by the names of their parts (``model/tensors.py``): the matrices of linear layers packed, the rows of
embeddings packed or as they were, all others float32, biases as long as the packed rows."""


@dataclass(frozen=True, slots=True)
class PackedModel:
    """The weights of a model as the kernels read them.

    Attributes:
        parts: Those outside the layers; a tied embedding is the packed head.
        layers: In order; the matrices of experts follow each other in memory, and so do their biases.
    """

    parts: Packed
    layers: list[Packed]


def block_types(config: ModelConfig) -> tuple[str, ...]:
    """Return the types of blocks in the file of a model, the most frequent first."""
    return tuple(name for name, _ in Counter(config.blocks.values()).most_common())


def packed_kind(config: ModelConfig, weights: WeightKind) -> MatrixKind | None:
    """Return how most matrices are packed; None: they are floats."""
    if not config.blocks:
        return _QUANTISED.get(weights)
    return BLOCKS[block_types(config)[0]].kind


def forms_of(config: ModelConfig, weights: WeightKind) -> str:
    """Return the names of how matrices are packed, for people, the most frequent first; empty: they are floats."""
    return "+".join(block_types(config)) or (weights if weights in _QUANTISED else "")


def is_packed(config: ModelConfig, spec: TensorSpec) -> bool:
    """Return whether a tensor is packed: the matrices of linear layers, and an embedding that is packed in the file."""
    return spec.is_linear or (spec.part.name == "embedding" and spec.names[0] in config.blocks)


def pieces_of(config: ModelConfig, plan: Plan, spec: TensorSpec) -> list[Piece]:
    """Return the pieces of a matrix, in order; neighbours that are packed alike are one piece."""
    pieces: list[Piece] = []
    begin = 0
    for number, num_rows in enumerate(row_parts(config, spec)):
        block = config.blocks.get(spec.names[min(number, len(spec.names) - 1)], "")
        kind = BLOCKS[block].kind if block else _kind_of_floats(config, plan, spec, number)
        if pieces and (pieces[-1].kind, pieces[-1].block) == (kind, block):
            before = pieces.pop()
            pieces.append(replace(before, num_rows=before.num_rows + num_rows))
        else:
            pieces.append(Piece(kind, begin, num_rows, block))
        begin += num_rows
    return pieces


def _kind_of_floats(config: ModelConfig, plan: Plan, spec: TensorSpec, number: int) -> MatrixKind:
    """Return how a part of the rows is packed that are floats in the file: as the plan says, but beside others."""
    is_router = spec.part.kind == "router"
    if config.blocks or is_router:
        return FLOAT32 if config.blocks and is_router else plan.plain_kind
    is_wider = plan.packed == CODES4_OFFSET and (spec.part.name, number) in _IN_INT8
    return INT8 if is_wider else plan.kind


def _all_pieces(config: ModelConfig, plan: Plan) -> Iterator[tuple[TensorSpec, Piece]]:
    """Yield the pieces of all matrices."""
    for spec in specs(config):
        if is_packed(config, spec):
            yield from ((spec, piece) for piece in pieces_of(config, plan, spec))


def wanted_kernels(config: ModelConfig, plan: Plan) -> Wanted:
    """Return which kernels a model needs."""
    pieces = list(_all_pieces(config, plan))
    kinds = dict.fromkeys(piece.kind for _, piece in pieces)
    packed = dict.fromkeys(piece.kind for _, piece in pieces if not piece.block)
    looked_up = dict.fromkeys(piece.kind for spec, piece in pieces if spec.part.name == "embedding")
    head_dims = sorted({kind.head_dim for kind in config.layers})
    return Wanted(tuple(kinds), tuple(packed), tuple(looked_up), tuple(head_dims))


def packed_bytes(config: ModelConfig, plan: Plan, spec: TensorSpec) -> int:
    """Return the bytes of a matrix once it is packed."""
    return sum(_piece_bytes(config, spec, piece) for piece in pieces_of(config, plan, spec))


def _piece_bytes(config: ModelConfig, spec: TensorSpec, piece: Piece) -> int:
    rows = torch.empty((piece.num_rows, 1), device="meta")
    assert spec.inputs is not None
    return piece.kind.packed_bytes(len(in_units(config, spec, rows)), spec.inputs)


class Packer:
    """Packs the matrices of a model, in whatever order they are read.

    Args:
        config: The network.
        plan: Of the kernels.
        pack: ``Kernels.pack``.

    Attributes:
        name: Names the form of quantised matrices and its version, and that of their inputs; empty: not quantised.
        kept: The tensors whose blocks are packed as they are in the file.

    Raises:
        MemoryError, OSError: There is no memory for the arena.
    """

    def __init__(self, config: ModelConfig, plan: Plan, pack: Mapping[MatrixKind, Callable[..., int]]) -> None:
        self._config, self._plan, self._pack = config, plan, pack
        packed = [spec for spec in specs(config) if is_packed(config, spec)]
        ends = list(accumulate((packed_bytes(config, plan, spec) for spec in packed), initial=0))
        self._begins = {(spec.layer, spec.key): begin for spec, begin in zip(packed, ends, strict=False)}
        self._arena = new_tensor((ends[-1],), torch.uint8)
        self._pool = ThreadPoolExecutor(torch.get_num_threads(), "pack")
        self.name = _name_of(config, plan)
        self.kept: Set[str] = config.blocks.keys() & {name for spec in packed for name in spec.names}

    def takes(self, spec: TensorSpec) -> bool:
        """Return whether a tensor is packed."""
        return is_packed(self._config, spec)

    def encode(self, spec: TensorSpec, matrix: Tensor | StoredMatrix) -> Tensor:
        """Return a matrix packed, uint8; those of experts follow each other."""
        for packed in self._split(spec):
            piece = packed.piece
            rows = in_units(self._config, spec, matrix[piece.begin : piece.begin + piece.num_rows])
            if piece.block:
                self._lay_out(piece.block, rows, packed.data)
            else:
                self._copy(piece.kind, rows.contiguous(), packed.data)
        begin = self._begins[spec.layer, spec.key]
        return self._arena[begin : begin + packed_bytes(self._config, self._plan, spec)]

    def _lay_out(self, block: str, rows: Tensor, out: Tensor) -> None:
        """Pack rows of blocks, uint8 [rows, row_bytes], some at a time with each thread."""

        def pack(some: Tensor, place: Tensor) -> None:
            lay_out(kind.codes(some.numpy()), place.view(-1).numpy())

        kind = BLOCKS[block]
        num_groups = max(1, _AT_ONCE // GROUP * kind.num_bytes // (rows.shape[1] * kind.num_values))
        pieces = torch.split(rows, num_groups * GROUP), torch.split(out.view(len(rows) // GROUP, -1), num_groups)
        deque(self._pool.map(pack, *pieces), maxlen=0)

    def _copy(self, kind: MatrixKind, rows: Tensor, out: Tensor) -> None:
        """Pack rows of floats, quantised if their kind is."""
        scratch = torch.empty(pack_scratch_bytes(rows.shape[1]) + _ALIGNMENT, dtype=torch.uint8)
        addresses = out.data_ptr(), scratch.data_ptr()
        self._pack[kind](None, rows.data_ptr(), rows.stride(0) * rows.itemsize, *rows.shape, *addresses)

    def finish(self, weights: ModelWeights) -> PackedModel:
        """Return the model, when all matrices have been packed."""
        self._pool.shutdown()
        model = PackedModel({}, [{} for _ in weights.layers])
        matrix = None
        for spec in specs(self._config):
            matrix = spec if spec.inputs is not None else matrix  # a bias follows its matrix
            holder = model.parts if spec.layer < 0 else model.layers[spec.layer]
            values = weights.holder(spec.layer)[spec.key]
            if is_packed(self._config, spec):
                holder[spec.key] = list(self._split(spec))
            elif spec.part.kind == "bias" and matrix is not None:
                holder[spec.key] = self._bias(matrix, values)
            else:
                holder[spec.part.name] = values if spec.part.kind == "embedding" else values.float().contiguous()
        for layer, kind in zip(model.layers, self._config.layers, strict=True):
            _join_biases(layer, 0 if kind.experts is None else kind.experts.count)
        return model

    def _split(self, spec: TensorSpec) -> Iterator[PackedMatrix]:
        begin = self._begins[spec.layer, spec.key]
        assert spec.inputs is not None
        for piece in pieces_of(self._config, self._plan, spec):
            end = begin + _piece_bytes(self._config, spec, piece)
            yield PackedMatrix(piece, spec.inputs, self._arena[begin:end])
            begin = end

    def _bias(self, matrix: TensorSpec, values: Tensor) -> Tensor:
        pieces = pieces_of(self._config, self._plan, matrix)
        parts = [values[piece.begin : piece.begin + piece.num_rows] for piece in pieces]
        return torch.cat([in_units(self._config, matrix, part) for part in parts]).float()


def _join_biases(layer: Packed, count: int) -> None:
    """Have the biases of experts follow each other in memory."""
    for name in ("expert_gate_up_bias", "expert_down_bias"):
        keys = [f"{name}.{expert}" for expert in range(count)]
        if biases := [bias for key in keys if isinstance(bias := layer.get(key), Tensor)]:
            layer.update(zip(keys, torch.stack(biases), strict=True))


def _name_of(config: ModelConfig, plan: Plan) -> str:
    if not plan.is_quantised:
        return ""
    kinds = {piece.kind for _, piece in _all_pieces(config, plan) if piece.kind.is_quantised}
    forms = sorted(kind.name if config.blocks else f"{kind.name}/{QUANTISERS[kind]}" for kind in kinds)
    return " ".join([*forms, "inputs int8"] if plan.has_int8_inputs else forms)
