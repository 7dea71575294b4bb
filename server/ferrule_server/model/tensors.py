"""The tensors of a model in memory, and where each tensor of a checkpoint goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain

import torch

from ferrule_server.model.config import ModelConfig
from ferrule_server.model.parts import TensorSpec, specs
from ferrule_server.model.rope import stored_order
from ferrule_server.model.stored import LAYOUTS

New = Callable[[Sequence[int], torch.dtype], torch.Tensor]
LayerWeights = dict[str, torch.Tensor]
"""The weights of one decoder layer by the names of ``LAYER_PARTS``; what the layer does not have is missing."""


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix whose rows are kept as they are in the file, until they are packed.

    Attributes:
        parts: Rows that follow each other: uint8 [rows, row_bytes] of blocks, or floats.
    """

    parts: tuple[torch.Tensor, ...]

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """Return rows of one part, or of several of the same form."""
        begin, found = 0, []
        for part in self.parts:
            found.append(part[max(0, rows.start - begin) : max(0, rows.stop - begin)])
            begin += len(part)
        found = [part for part in found if len(part)]
        return found[0] if len(found) == 1 else torch.cat(found)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)


@dataclass(slots=True)
class ModelWeights:
    """Every tensor of a model, all of one dtype; norms of a network with ``norm_offset`` are float32.

    Attributes:
        parts: Those outside the layers, by the names of ``MODEL_PARTS``.
        layers: In order.
        stored: Matrices that are not there yet, because they wait to be packed.
    """

    parts: dict[str, torch.Tensor] = field(default_factory=dict)
    layers: list[LayerWeights] = field(default_factory=list)
    stored: dict[TensorSpec, StoredMatrix] = field(default_factory=dict)

    @property
    def embedding(self) -> torch.Tensor:
        """[vocab_size, hidden_size]."""
        return self.parts["embedding"]

    @property
    def head(self) -> torch.Tensor:
        """[vocab_size, hidden_size]; if tied, the embedding itself."""
        return self.parts.get("head", self.parts["embedding"])

    @property
    def final_norm(self) -> torch.Tensor:
        """[hidden_size]."""
        return self.parts["final_norm"]

    def holder(self, layer: int) -> dict[str, torch.Tensor]:
        """Return the tensors of a layer; -1: those outside the layers."""
        return self.parts if layer < 0 else self.layers[layer]

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor once."""
        return chain.from_iterable(holder.values() for holder in (self.parts, *self.layers))


@dataclass(slots=True)
class Place:
    """Where a tensor of the checkpoint goes, and what is done to it there once it has been read.

    Attributes:
        tensor: It is read into this.
        order: For the rows of a head, where the checkpoint keeps each; None: in the same order.
        num_ordered: The first rows to which that applies.
        offset: Added to every value.
    """

    tensor: torch.Tensor
    order: list[int] | None = None
    num_ordered: int = 0
    offset: float = 0.0

    def finish(self) -> None:
        """Bring the values that were read into the form that the decoder uses."""
        if self.order is not None and self.num_ordered:
            rows = self.tensor[: self.num_ordered]
            heads = rows.reshape(-1, len(self.order), *rows.shape[1:])
            rows.copy_(heads[:, self.order].reshape(rows.shape))
        if self.offset:
            self.tensor.add_(self.offset)


def allocate(
    config: ModelConfig, dtype: torch.dtype, new: New, kept: Set[str] = frozenset()
) -> tuple[ModelWeights, dict[str, Place]]:
    """Return empty weights, and where each tensor of the checkpoint goes, by its name.

    Args:
        config: The network.
        dtype: Of the weights.
        new: Makes a tensor of a shape and dtype.
        kept: The tensors of matrices whose blocks are kept as they are. If there are any, routers and all that is not a
            matrix have float32.
    """
    weights = ModelWeights(layers=[{} for _ in config.layers])
    places: dict[str, Place] = {}
    for spec in specs(config):
        is_matrix = spec.inputs is not None
        is_exact = (spec.part.kind == "norm" and config.norm_offset) or (
            kept and (not is_matrix or spec.part.kind == "router")
        )
        own_dtype = torch.float32 if is_exact else dtype
        if is_matrix and not kept.isdisjoint(spec.names):
            parts = list(_stored_parts(config, spec, dtype, new, kept))
            weights.stored[spec] = StoredMatrix(tuple(parts))
        else:
            tensor = new(spec.shape, own_dtype)
            weights.holder(spec.layer)[spec.key] = tensor
            parts = list(torch.split(tensor, list(spec.rows)))
        places.update(zip(spec.names, _places(config, spec, parts), strict=True))
    return weights, places


def _stored_parts(
    config: ModelConfig, spec: TensorSpec, dtype: torch.dtype, new: New, kept: Set[str]
) -> Iterator[torch.Tensor]:
    """Yield memory for the stored tensors of a matrix: uint8 [rows, row_bytes] if its blocks are kept."""
    assert spec.inputs is not None
    for name, num_rows in zip(spec.names, spec.rows, strict=True):
        num_values, num_bytes = LAYOUTS[config.blocks[name]] if name in kept else (1, 0)
        row = spec.inputs // num_values * num_bytes
        yield new((num_rows, row), torch.uint8) if row else new((num_rows, spec.inputs), dtype)


def on_meta(config: ModelConfig, dtype: torch.dtype = torch.float32) -> tuple[ModelWeights, dict[str, Place]]:
    """Return what :func:`allocate` does, with weights that have shapes and no memory."""
    return allocate(config, dtype, lambda shape, dtype: torch.empty(*shape, dtype=dtype, device="meta"))


def _places(config: ModelConfig, spec: TensorSpec, parts: Sequence[torch.Tensor]) -> Iterator[Place]:
    """Yield the places of the stored tensors: rows of queries and keys are ordered, norms may have an offset."""
    offset = config.norm_offset if spec.part.kind == "norm" and not config.names.has_whole_norms else 0.0
    order, left = None, 0
    if spec.part.is_rotated:
        kind = config.layers[spec.layer]
        order, left = stored_order(kind.rope, kind.head_dim), sum(spec.rows)
        if spec.part.kind != "norm":  # not the values
            left = (config.num_heads + (kind.num_kv_heads if kind.kv_layer is None else 0)) * kind.head_dim
    for part in parts:
        num_ordered = min(len(part), left)
        left -= num_ordered
        yield Place(part, order, num_ordered, offset)
