"""The tensors of a model in memory, and where each tensor of a checkpoint goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields

import torch

from ferrule_server.model.config import LayerKind, ModelConfig
from ferrule_server.model.families import FAMILIES, WRAPPERS
from ferrule_server.model.families.family import Wrapper
from ferrule_server.model.rope import stored_order

__all__ = [
    "EMBEDDING",
    "HEAD",
    "INPUT_PROJECTION",
    "LayerWeights",
    "ModelWeights",
    "Place",
    "allocate",
    "layer_parts",
    "on_meta",
    "wrapper_of",
]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
INPUT_PROJECTION = "model.per_layer_model_projection.weight"

New = Callable[[Sequence[int], torch.dtype], torch.Tensor]


@dataclass(slots=True)
class LayerWeights:
    """The weights of one decoder layer, all of one dtype; norms of a network with ``norm_offset`` are float32.

    ``q`` stands for num_heads * head_dim, and ``kv`` for num_kv_heads * head_dim. A layer without K and V of its own
    has no rows for them, and ``up`` is missing if the feed-forward part has no gate. What is None does not exist.

    Attributes:
        qkv: [q + kv + kv, hidden_size]; rows of q, then k, then v.
        attention_out: [hidden_size, q].
        gate_up: [2 * intermediate_size, hidden_size]; rows of gate, then up.
        down: [hidden_size, intermediate_size].
        attention_norm: [hidden_size], before attention.
        attention_norm_bias: [hidden_size].
        q_norm: [head_dim], or [q] if all heads of a row are normed together.
        k_norm: [head_dim], or [kv].
        attention_out_norm: [hidden_size], after attention.
        mlp_norm: [hidden_size], before the feed-forward part.
        mlp_norm_bias: [hidden_size].
        mlp_out_norm: [hidden_size], after the feed-forward part.
        qkv_bias: [q + kv + kv].
        attention_out_bias: [hidden_size].
        gate_up_bias: [2 * intermediate_size].
        down_bias: [hidden_size].
        input_gate: [per_layer_input.size, hidden_size].
        input_projection: [hidden_size, per_layer_input.size].
        input_norm: [hidden_size], after ``input_projection``.
        scale: [1], multiplies the residual stream.
        sinks: [num_heads], one more score of each query head.
    """

    qkv: torch.Tensor
    attention_out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    attention_norm: torch.Tensor | None = None
    attention_norm_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    attention_out_norm: torch.Tensor | None = None
    mlp_norm: torch.Tensor | None = None
    mlp_norm_bias: torch.Tensor | None = None
    mlp_out_norm: torch.Tensor | None = None
    qkv_bias: torch.Tensor | None = None
    attention_out_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    input_gate: torch.Tensor | None = None
    input_projection: torch.Tensor | None = None
    input_norm: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


@dataclass(slots=True)
class ModelWeights:
    """Every tensor of a model.

    Attributes:
        embedding: [vocab_size, hidden_size].
        head: [vocab_size, hidden_size]; if tied, the tensor ``embedding`` itself.
        final_norm: [hidden_size].
        layers: In order.
        final_norm_bias: [hidden_size], or None.
        input_embedding: [per_layer_input.vocab_size, num_layers * per_layer_input.size], or None.
        input_projection: [num_layers * per_layer_input.size, hidden_size], or None.
        input_norm: [per_layer_input.size], or None.
    """

    embedding: torch.Tensor
    head: torch.Tensor
    final_norm: torch.Tensor
    layers: list[LayerWeights] = field(default_factory=list)
    final_norm_bias: torch.Tensor | None = None
    input_embedding: torch.Tensor | None = None
    input_projection: torch.Tensor | None = None
    input_norm: torch.Tensor | None = None

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor once."""
        holders: tuple[ModelWeights | LayerWeights, ...] = (self, *self.layers)
        for holder in holders:
            for item in fields(holder):
                tensor = getattr(holder, item.name)
                if isinstance(tensor, torch.Tensor) and not (item.name == "head" and tensor is self.embedding):
                    yield tensor


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


def allocate(config: ModelConfig, dtype: torch.dtype, new: New) -> tuple[ModelWeights, dict[str, Place]]:
    """Return empty weights, and where each tensor of the checkpoint goes, by its name.

    Args:
        config: The network.
        dtype: Of the weights.
        new: Makes a tensor of a shape and dtype.
    """
    norm_dtype = torch.float32 if config.norm_offset else dtype
    shapes = {EMBEDDING: (config.vocab_size, config.hidden_size), HEAD: (config.vocab_size, config.hidden_size)}
    if config.is_tied:
        del shapes[HEAD]
    made = {name: new(shape, dtype) for name, shape in shapes.items()}
    places = {name: Place(tensor) for name, tensor in made.items()}
    embedding = made[EMBEDDING]
    weights = ModelWeights(embedding, made.get(HEAD, embedding), new((config.hidden_size,), norm_dtype))
    places["model.norm.weight"] = Place(weights.final_norm, offset=config.norm_offset)
    for field_name, (name, shape) in _model_parts(config).items():
        setattr(weights, field_name, new(shape, dtype))
        places[name] = Place(getattr(weights, field_name))
    for index, kind in enumerate(config.layers):
        tensors: dict[str, torch.Tensor] = {}
        for field_name, parts in layer_parts(config, kind).items():
            num_rows = [shape[0] for shape in parts.values()]
            is_norm = field_name.endswith("norm")
            shape = (sum(num_rows), *next(iter(parts.values()))[1:])
            tensors[field_name] = new(shape, norm_dtype if is_norm else dtype)
            pieces = torch.split(tensors[field_name], num_rows)
            for part, place in zip(parts, _places(config, kind, field_name, pieces), strict=True):
                places[f"model.layers.{index}.{part}"] = place
        weights.layers.append(LayerWeights(**tensors))
    return weights, places


def on_meta(config: ModelConfig, dtype: torch.dtype = torch.float32) -> tuple[ModelWeights, dict[str, Place]]:
    """Return what :func:`allocate` does, with weights that have shapes and no memory."""
    return allocate(config, dtype, lambda shape, dtype: torch.empty(*shape, dtype=dtype, device="meta"))


def _model_parts(config: ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return name and shape in the checkpoint of the tensors that only some models have outside their layers."""
    parts: dict[str, tuple[str, tuple[int, ...]]] = {}
    if config.has_norm_bias:
        parts["final_norm_bias"] = ("model.norm.bias", (config.hidden_size,))
    if config.per_layer_input is not None:
        size = config.per_layer_input.size
        width = config.num_layers * size
        parts["input_embedding"] = (
            "model.embed_tokens_per_layer.weight",
            (config.per_layer_input.vocab_size, width),
        )
        parts["input_projection"] = (INPUT_PROJECTION, (width, config.hidden_size))
        parts["input_norm"] = ("model.per_layer_projection_norm.weight", (size,))
    return parts


def _places(config: ModelConfig, kind: LayerKind, field_name: str, pieces: Sequence[torch.Tensor]) -> Iterator[Place]:
    """Yield the places of the parts of a field: rows of queries and keys are ordered, norms may have an offset."""
    order = stored_order(kind.rope, kind.head_dim) if field_name in _ROTATED else None
    left = len(pieces[0]) * len(pieces)
    if field_name in ("qkv", "qkv_bias"):
        left = (config.num_heads + (kind.num_kv_heads if kind.kv_layer is None else 0)) * kind.head_dim
    for piece in pieces:
        num_ordered = min(len(piece), left)
        left -= num_ordered
        yield Place(piece, order, num_ordered, config.norm_offset if field_name.endswith("norm") else 0.0)


_ROTATED = ("qkv", "qkv_bias", "q_norm", "k_norm")
_NAMES = {
    "attention_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "q_norm": ("self_attn.q_norm",),
    "k_norm": ("self_attn.k_norm",),
    "attention_out": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
    "input_gate": ("per_layer_input_gate",),
    "input_projection": ("per_layer_projection",),
    "input_norm": ("post_per_layer_input_norm",),
}
"""The names that Llama uses, and those of parts that it does not have; ``Family.tensors`` replaces some."""


def layer_parts(config: ModelConfig, kind: LayerKind) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return, for each field of :class:`LayerWeights`, the shapes of its parts by their names in the checkpoint.

    The rows of the parts follow each other in the field.
    """
    names = {**_NAMES, **_family_tensors(config)}
    parts: dict[str, dict[str, tuple[int, ...]]] = {}
    for field_name, (rows, width, has_bias) in _matrices(config, kind).items():
        stored = _rows_by_name(names[field_name], rows)
        parts[field_name] = {f"{name}.weight": (num_rows, width) for name, num_rows in stored.items()}
        if has_bias:
            parts[f"{field_name}_bias"] = {f"{name}.bias": (num_rows,) for name, num_rows in stored.items()}
    for field_name, (size, has_bias) in _norms(config, kind).items():
        (name,) = names[field_name]
        parts[field_name] = {f"{name}.weight": (size,)}
        if has_bias:
            parts[f"{field_name}_bias"] = {f"{name}.bias": (size,)}
    if config.has_layer_scale:
        parts["scale"] = {"layer_scalar": (1,)}
    if kind.has_sinks:
        parts["sinks"] = {"self_attn.sinks": (config.num_heads,)}
    return parts


def _rows_by_name(names: Sequence[str], rows: Sequence[int]) -> dict[str, int]:
    """Return the rows of each stored tensor; one tensor may hold all parts."""
    return {names[0]: sum(rows)} if len(names) == 1 else dict(zip(names, rows, strict=False))


def _matrices(config: ModelConfig, kind: LayerKind) -> dict[str, tuple[tuple[int, ...], int, bool]]:
    """Return, for each matrix: the rows of its parts, its inputs, and whether it has a bias."""
    hidden, inner = config.hidden_size, kind.intermediate_size
    num_q, num_kv = config.num_heads * kind.head_dim, kind.num_kv_heads * kind.head_dim
    qkv: tuple[int, ...] = (num_q,)
    if kind.kv_layer is None:
        qkv = (num_q, num_kv) if kind.is_value_key else (num_q, num_kv, num_kv)
    matrices = {
        "qkv": (qkv, hidden, config.has_qkv_bias),
        "attention_out": ((hidden,), num_q, config.has_attention_out_bias),
        "gate_up": ((inner, inner) if config.is_gated else (inner,), hidden, config.has_mlp_bias),
        "down": ((hidden,), inner, config.has_mlp_bias),
    }
    if config.per_layer_input is not None:
        matrices["input_gate"] = ((config.per_layer_input.size,), hidden, False)
        matrices["input_projection"] = ((hidden,), config.per_layer_input.size, False)
    return matrices


def _norms(config: ModelConfig, kind: LayerKind) -> dict[str, tuple[int, bool]]:
    """Return the size of each norm, and whether it has a bias."""
    hidden = config.hidden_size
    sizes: dict[str, int] = {}
    if config.has_norm_before:
        sizes |= {"attention_norm": hidden} if config.is_parallel else {"attention_norm": hidden, "mlp_norm": hidden}
    if config.has_norm_after:
        sizes |= {"attention_out_norm": hidden, "mlp_out_norm": hidden}
    if config.qk_norm != "none":
        is_row = config.qk_norm == "row"
        sizes["q_norm"] = kind.head_dim * (config.num_heads if is_row else 1)
        if kind.kv_layer is None:
            sizes["k_norm"] = kind.head_dim * (kind.num_kv_heads if is_row else 1)
    if config.per_layer_input is not None:
        sizes["input_norm"] = hidden
    has_bias = config.has_norm_bias
    return {name: (size, has_bias and name in ("attention_norm", "mlp_norm")) for name, size in sizes.items()}


def _family_tensors(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Return the names of the family, or of the families that a model of several modalities may hold, which agree."""
    wrapper = wrapper_of(config)
    architectures = (config.architecture,)
    found = [
        family.tensors
        for family in FAMILIES
        if family.architecture in architectures or (wrapper is not None and family.model_type in wrapper.model_types)
    ]
    return dict(found[0]) if found else {}


def wrapper_of(config: ModelConfig) -> Wrapper | None:
    """Return what surrounds the text model in the checkpoint; None: nothing."""
    return next((wrapper for wrapper in WRAPPERS if wrapper.architecture == config.architecture), None)
