"""The records that describe a network: what loader, decoder, KV pool, memory plan and kernels read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field, fields, replace
from typing import Literal

from ferrule_server.model.rope import LongScaling, Rope

Activation = Literal["silu", "gelu_tanh"]
"""``gelu_tanh`` is the approximation of GELU by a tanh."""


Gate = Literal["softmax", "softmax_of_used", "sigmoid"]
"""How the scores of experts become weights: over all experts, over those that are used, or each by itself."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture: each row passes the few feed-forward parts that score highest for it; of equal ones, the first.

    Attributes:
        count: How many there are.
        used: How many of them a row passes.
        width: Width inside each.
        gate: How scores become weights.
        is_normalised: The weights of a row are divided by their sum.
        scale: Multiplies the weights.
        has_shared_gate: What the feed-forward part beside them returns is multiplied by the sigmoid of a projection.
    """

    count: int
    used: int
    width: int
    gate: Gate = "softmax"
    is_normalised: bool = True
    scale: float = 1.0
    has_shared_gate: bool = False


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What may differ between the layers of one network.

    Attributes:
        head_dim: Width of one head.
        num_kv_heads: Key and value heads; divides the query heads.
        intermediate_size: Width inside the feed-forward part that every row passes; 0: there is none.
        experts: Others, of which each row passes some; their outputs are added. None: there are none.
        score_scale: Multiplies the products of queries and keys.
        rope: The rotation of queries and keys; None: there is none.
        window: How many tokens a row attends to, itself included; 0: all.
        chunk: Tokens of a chunk: a row attends to its own chunk only, up to itself; 0: there are no chunks.
        has_sinks: One stored score per query head joins the softmax and has no value.
        kv_layer: The earlier layer whose K and V this one reads; None: it has its own.
        is_value_key: The layer has no projection of values; it uses the projected keys, before norm and rotation.
    """

    head_dim: int
    num_kv_heads: int
    intermediate_size: int = 0
    score_scale: float = 1.0
    rope: Rope | None = None
    window: int = 0
    chunk: int = 0
    has_sinks: bool = False
    kv_layer: int | None = None
    is_value_key: bool = False
    experts: Experts | None = None

    @property
    def reach(self) -> int:
        """How many tokens a row attends to at most, itself included; 0: all."""
        return min(filter(None, (self.window, self.chunk)), default=0)


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """The product of the feed-forward part is ``(up + 1) * gate * sigmoid(alpha * gate)``, of clamped values (GPT-OSS).

    Attributes:
        limit: The most that ``gate`` may be, and the most that ``up`` may be away from 0.
        alpha: Multiplies ``gate`` inside the sigmoid.
    """

    limit: float
    alpha: float


@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """Queries grow with their position: times ``1 + beta * log(1 + floor(position / length))``.

    Attributes:
        beta: How fast.
        length: Positions below it are not changed.
    """

    beta: float
    length: int


@dataclass(frozen=True, slots=True)
class PerLayerInput:
    """A second embedding, of which every layer adds its own part to the residual stream (Gemma 3n and 4).

    Attributes:
        vocab_size: Rows of that embedding.
        size: Values of a token for each layer.
    """

    vocab_size: int
    size: int


@dataclass(frozen=True, slots=True)
class CheckpointNames:
    """What the tensors of a checkpoint are called, where that is not what Llama calls them.

    Attributes:
        tensors: For each part of a layer with other names (``tensors.py``): those of the tensors that follow each other
            in it, without ``model.layers.N.`` and their ending.
        renamed: What the names of a text model inside another begin with, and with what those of the text model begin.
        left_out: What the names of tensors around the text model begin with, which are not loaded.
        has_whole_norms: Norms are stored with ``ModelConfig.norm_offset``.
    """

    tensors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    renamed: tuple[tuple[str, str], ...] = ()
    left_out: tuple[str, ...] = ()
    has_whole_norms: bool = False

    def parts_left_out(self, names: Collection[str] | None = None) -> tuple[str, ...]:
        """Return the parts that are not loaded: those with tensors among these names; None: all that there may be."""
        parts = [part for part in self.left_out if names is None or any(name.startswith(part) for name in names)]
        return tuple(dict.fromkeys(part.rstrip(".").rpartition(".")[2] for part in parts))


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The network of a model, and the one record of its sizes.

    Attributes:
        architecture: Class name as in config.json.
        vocab_size: Rows of the embedding; they may exceed the vocabulary of the tokenizer.
        hidden_size: Width of the residual stream.
        num_heads: Query heads.
        max_positions: Longest sequence in tokens for which the model was trained.
        layers: The kind of each decoder layer, in order.
        norm_eps: The number added to the mean square or the variance in every norm.
        norm_offset: Added to the stored weight of every norm except that of values, if it is not stored with it.
        has_layer_norm: The norms over the residual stream subtract the mean too (LayerNorm, not RMSNorm).
        has_norm_bias: Those norms carry biases.
        has_norm_before: Attention and feed-forward part read normed rows.
        has_norm_after: What they return is normed before it is added.
        is_parallel: Both read the same normed rows, and there is one norm.
        qk_norm: Queries and keys are normed before the rotation: each head, or all heads of a row together.
        has_v_norm: Each value head is normed, without a weight.
        activation: Of the feed-forward part.
        is_gated: The feed-forward part multiplies the activation of one projection by another projection.
        clamped_swiglu: Takes the place of that product and its activation; None: nothing does.
        score_softcap: Scores become ``cap * tanh(score / cap)``; 0: they do not.
        query_temperature: Queries grow with their position; None: they do not.
        embedding_scale: Multiplies the embedding of a token, rounded to the dtype of the weights.
        residual_scale: Multiplies what attention and feed-forward part return.
        logit_scale: Multiplies the logits.
        logit_softcap: Logits become ``cap * tanh(logit / cap)``, after ``logit_scale``; 0: they do not.
        has_layer_scale: Each layer multiplies the residual stream by a stored number at its end.
        per_layer_input: A second embedding that feeds every layer; None: there is none.
        is_tied: The output head is the embedding.
        has_qkv_bias: The projections of queries, keys and values carry biases.
        has_attention_out_bias: The projection after attention carries a bias.
        has_mlp_bias: The feed-forward projections carry biases.
        eos_ids: Tokens that end a text: those of generation_config.json, else those of config.json.
        names: Of the tensors in the checkpoint; no part of the network, and not compared.
        blocks: The types of blocks of those matrices in the checkpoint that are packed, by name; not compared either.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    max_positions: int
    layers: tuple[LayerKind, ...]
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    has_layer_norm: bool = False
    has_norm_bias: bool = False
    has_norm_before: bool = True
    has_norm_after: bool = False
    is_parallel: bool = False
    qk_norm: Literal["none", "head", "row"] = "none"
    has_v_norm: bool = False
    activation: Activation = "silu"
    is_gated: bool = True
    clamped_swiglu: ClampedSwiglu | None = None
    score_softcap: float = 0.0
    query_temperature: QueryTemperature | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    has_layer_scale: bool = False
    per_layer_input: PerLayerInput | None = None
    is_tied: bool = False
    has_qkv_bias: bool = False
    has_attention_out_bias: bool = False
    has_mlp_bias: bool = False
    eos_ids: tuple[int, ...] = ()
    names: CheckpointNames = field(default=CheckpointNames(), compare=False)
    blocks: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    @property
    def head_dim(self) -> int:
        """Width of the widest head; of all, if they are equal."""
        return max((kind.head_dim for kind in self.layers), default=0)

    @property
    def num_kv_heads(self) -> int:
        """The most key and value heads of a layer; of all, if they are equal."""
        return max((kind.num_kv_heads for kind in self.layers), default=0)

    @property
    def intermediate_size(self) -> int:
        """The largest width inside a feed-forward part that every row passes; of all, if they are equal."""
        return max((kind.intermediate_size for kind in self.layers), default=0)

    @property
    def experts(self) -> Experts | None:
        """The mixtures of the network, which are equal; None: it has none."""
        return next((kind.experts for kind in self.layers if kind.experts is not None), None)

    @property
    def kv_groups(self) -> tuple[tuple[int, ...], ...]:
        """The layers with K and V of their own, those of equal heads together: a pool is made for each group."""
        sizes = Counter((kind.num_kv_heads, kind.head_dim) for kind in self.layers)
        return tuple(tuple(index for index, kind in enumerate(self.layers) if _has_kv(kind, size)) for size in sizes)

    @property
    def kv_values(self) -> int:
        """Values of K and V together that a token leaves in the pool, in all layers."""
        return sum(2 * kind.num_kv_heads * kind.head_dim for kind in self.layers if kind.kv_layer is None)

    @property
    def attention_window(self) -> int:
        """The most tokens that a row attends to in any layer; 0: all tokens, in some layer.

        A chunk counts like a window: its rows see no more than the last ``chunk`` tokens.
        """
        reaches = [kind.reach for kind in self.layers]
        return max(reaches) if all(reaches) else 0

    def for_context(self, max_context: int) -> ModelConfig:
        """Return the network as a server computes it whose sequences are at most so long, in tokens."""
        layers = tuple(
            replace(
                kind,
                rope=_for_context(kind.rope, max_context),
                window=kind.window if kind.window < max_context else 0,
                chunk=kind.chunk if kind.chunk < max_context else 0,
            )
            for kind in self.layers
        )
        return replace(self, layers=layers)


def _has_kv(kind: LayerKind, size: tuple[int, int]) -> bool:
    return kind.kv_layer is None and (kind.num_kv_heads, kind.head_dim) == size


def _for_context(rope: Rope | None, max_context: int) -> Rope | None:
    if rope is None or not isinstance(rope.scaling, LongScaling):
        return rope
    return replace(rope, scaling=replace(rope.scaling, is_long=max_context > rope.scaling.original_max_positions))


def other_fields(record: ModelConfig | LayerKind, known: Set[str]) -> list[str]:
    """Return the fields that are not known and differ from their defaults."""
    others = [item for item in fields(record) if item.compare and item.name not in known]
    return [item.name for item in others if getattr(record, item.name) != item.default]


def unknown_features(config: ModelConfig, known: Set[str]) -> list[str]:
    """Return what a network needs that kernels for equal layers of full attention do not compute, for people.

    Args:
        config: The network.
        known: The fields that the kernels compute; any other must have its default.
    """
    reasons = [f"the default {name}, not {getattr(config, name)!r}" for name in other_fields(config, known)]
    kind = config.layers[0]
    has_other_scale = kind.score_scale != kind.head_dim**-0.5
    features = [
        (config.qk_norm == "row", "norms of single heads, not of all heads of a row"),
        (any(other != kind for other in config.layers), "equal layers"),
        (kind.window, f"attention to all tokens, not to the last {kind.window}"),
        (kind.chunk, f"attention to all tokens, not to chunks of {kind.chunk}"),
        (kind.has_sinks, "attention without sinks"),
        (kind.is_value_key, "a projection of values"),
        (config.experts is not None, "one feed-forward part for all rows, not experts"),
        (has_other_scale, f"scores divided by the root of head_dim, not times {kind.score_scale:g}"),
        (kind.rope is not None and kind.rope.magnitude != 1, "rotations that keep lengths"),
    ]
    return reasons + [reason for is_there, reason in features if is_there]
