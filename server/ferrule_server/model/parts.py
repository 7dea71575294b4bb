"""The tensors of a model: one table of their parts, and what a checkpoint calls each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, Literal

from ferrule_server.model.config import LayerKind, ModelConfig

EMBEDDING: Final = "model.embed_tokens.weight"
HEAD: Final = "lm_head.weight"

PartKind = Literal["linear", "router", "bias", "embedding", "norm", "vector"]
"""The matrix of a linear layer, one that is never quantised, a bias, rows by token, a norm's weight, other numbers."""
LINEAR: Final = ("linear", "router")
"""Those that are matrices of linear layers."""


def _sizes(config: ModelConfig, kind: LayerKind) -> dict[str, int]:
    """Return the sizes that parts name; 0: there is no such thing in this network, or in this layer."""
    query, kv = config.num_heads * kind.head_dim, kind.num_kv_heads * kind.head_dim
    has_kv = kind.kv_layer is None
    second, hidden = config.per_layer_input, config.hidden_size
    head_norms = {"none": (0, 0), "head": (kind.head_dim, kind.head_dim), "row": (query, kv)}[config.qk_norm]
    return {
        "hidden": hidden,
        "vocab": config.vocab_size,
        "own head": 0 if config.is_tied else config.vocab_size,
        "query": query,
        "key": kv if has_kv else 0,
        "value": kv if has_kv and not kind.is_value_key else 0,
        "inner": kind.intermediate_size,
        "inner hidden": hidden if kind.intermediate_size else 0,
        "gated": kind.intermediate_size if config.is_gated else 0,
        "norm before": hidden if config.has_norm_before else 0,
        "second norm before": hidden if config.has_norm_before and not config.is_parallel else 0,
        "norm after": hidden if config.has_norm_after else 0,
        "query norm": head_norms[0],
        "key norm": head_norms[1] if has_kv else 0,
        "sinks": config.num_heads if kind.has_sinks else 0,
        "scale": 1 if config.has_layer_scale else 0,
        **_sizes_of_experts(config, kind),
        "input": 0 if second is None else second.size,
        "inputs": 0 if second is None else config.num_layers * second.size,
        "input vocab": 0 if second is None else second.vocab_size,
        "input hidden": 0 if second is None else hidden,
    }


def _sizes_of_experts(config: ModelConfig, kind: LayerKind) -> dict[str, int]:
    experts = kind.experts
    width = 0 if experts is None else experts.width
    return {
        "experts": 0 if experts is None else experts.count,
        "shared gate": int(experts is not None and experts.has_shared_gate),
        "expert": width,
        "expert gated": width if config.is_gated else 0,
        "expert hidden": config.hidden_size if width else 0,
    }


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor that every layer may have, or the model as a whole.

    Attributes:
        name: Key of the tensor.
        kind: What it is for.
        stored: What Llama calls the tensors whose rows follow each other in it; ``ModelConfig.names`` replaces some.
            The names begin with ``model.layers.N.`` in a layer and end with ``ending``.
        rows: Sizes (``_sizes``) of each of them; without rows there is no such tensor.
        inputs: Size of a row; empty: each row is one number.
        bias: The flag of the network that says whether it has a bias, a part ``NAME_bias``; empty: it never has.
        is_rotated: Its rows are those of heads that are rotated.
        ending: Of the stored names.
        needs: A flag of the network without which there is no such tensor.
        is_of_experts: Every expert has one; ``{}`` in the stored names is its number.
    """

    name: str
    kind: PartKind
    stored: tuple[str, ...]
    rows: tuple[str, ...]
    inputs: str = ""
    bias: str = ""
    is_rotated: bool = False
    ending: str = ".weight"
    needs: str = ""
    is_of_experts: bool = False

    def with_bias(self) -> tuple[Part, ...]:
        """Return this part, and its bias if it may have one."""
        kind: PartKind = "bias" if self.kind in LINEAR else "vector"
        bias = replace(self, name=f"{self.name}_bias", kind=kind, inputs="", ending=".bias", needs=self.bias)
        return (self, bias) if self.bias else (self,)


def _with_biases(*parts: Part) -> tuple[Part, ...]:
    return tuple(chain.from_iterable(part.with_bias() for part in parts))


MODEL_PARTS: Final = _with_biases(
    Part("embedding", "embedding", ("model.embed_tokens",), ("vocab",), "hidden"),
    Part("head", "linear", ("lm_head",), ("own head",), "hidden"),
    Part("final_norm", "norm", ("model.norm",), ("hidden",), bias="has_norm_bias"),
    Part("input_embedding", "embedding", ("model.embed_tokens_per_layer",), ("input vocab",), "inputs"),
    Part("input_projection", "linear", ("model.per_layer_model_projection",), ("inputs",), "hidden"),
    Part("input_norm", "norm", ("model.per_layer_projection_norm",), ("input",)),
)
"""The tensors outside the layers. A tied head is the embedding, and no part of its own."""

_EXPERT: Final = tuple(f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "down"))
_QKV: Final = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
LAYER_PARTS: Final = _with_biases(
    Part("attention_norm", "norm", ("input_layernorm",), ("norm before",), bias="has_norm_bias"),
    Part("qkv", "linear", _QKV, ("query", "key", "value"), "hidden", bias="has_qkv_bias", is_rotated=True),
    Part("q_norm", "norm", ("self_attn.q_norm",), ("query norm",), is_rotated=True),
    Part("k_norm", "norm", ("self_attn.k_norm",), ("key norm",), is_rotated=True),
    Part("sinks", "vector", ("self_attn.sinks",), ("sinks",), ending=""),
    Part("attention_out", "linear", ("self_attn.o_proj",), ("hidden",), "query", bias="has_attention_out_bias"),
    Part("attention_out_norm", "norm", (), ("norm after",)),
    Part("mlp_norm", "norm", ("post_attention_layernorm",), ("second norm before",), bias="has_norm_bias"),
    Part("gate_up", "linear", ("mlp.gate_proj", "mlp.up_proj"), ("inner", "gated"), "hidden", bias="has_mlp_bias"),
    Part("down", "linear", ("mlp.down_proj",), ("inner hidden",), "inner", bias="has_mlp_bias"),
    Part("router", "router", ("mlp.gate",), ("experts",), "hidden", bias="has_mlp_bias"),
    Part(
        "expert_gate_up",
        "linear",
        _EXPERT[:2],
        ("expert", "expert gated"),
        "hidden",
        "has_mlp_bias",
        is_of_experts=True,
    ),
    Part("expert_down", "linear", _EXPERT[2:], ("expert hidden",), "expert", "has_mlp_bias", is_of_experts=True),
    Part("shared_gate", "router", ("mlp.shared_expert_gate",), ("shared gate",), "hidden"),
    Part("mlp_out_norm", "norm", (), ("norm after",)),
    Part("input_gate", "linear", ("per_layer_input_gate",), ("input",), "hidden"),
    Part("input_projection", "linear", ("per_layer_projection",), ("input hidden",), "input"),
    Part("input_norm", "norm", ("post_per_layer_input_norm",), ("input hidden",)),
    Part("scale", "vector", ("layer_scalar",), ("scale",), ending=""),
)
"""The tensors of a layer: ``qkv`` has the rows of q, then k, then v; ``gate_up`` those of gate, then up."""
BESIDE_EXPERTS: Final = {
    "gate_up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "down": ("mlp.shared_expert.down_proj",),
}
"""What the tensors of the feed-forward part are called beside experts; families may have ``shared_*`` of their own."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of a network.

    Attributes:
        part: Which.
        layer: Of which layer; -1: of the model as a whole.
        names: Of the tensors in the checkpoint whose rows follow each other in it.
        rows: Of each of those.
        inputs: Values of a row; None: each row is one number.
        is_linear: It is the matrix of a linear layer, such as the output head, which may be the embedding.
        expert: The number of its expert; -1: it is not that of an expert.
    """

    part: Part
    layer: int
    names: tuple[str, ...]
    rows: tuple[int, ...]
    inputs: int | None
    is_linear: bool
    expert: int = -1

    @property
    def key(self) -> str:
        """Its name among the tensors of its layer, or of the model."""
        return self.part.name if self.expert < 0 else f"{self.part.name}.{self.expert}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return (sum(self.rows),) if self.inputs is None else (sum(self.rows), self.inputs)


def specs(config: ModelConfig) -> Iterator[TensorSpec]:
    """Yield every tensor of a network, those of the model as a whole first."""
    holders = [(-1, LayerKind(0, 0), "", MODEL_PARTS)]
    holders += [(i, kind, f"model.layers.{i}.", LAYER_PARTS) for i, kind in enumerate(config.layers)]
    for layer, kind, prefix, parts in holders:
        sizes = _sizes(config, kind)
        for part in parts:
            rows = tuple(size for name in part.rows if (size := sizes[name]))
            if not rows or (part.needs and not getattr(config, part.needs)):
                continue
            others = config.names.tensors if layer >= 0 else {}
            stored = _stored_names(part, kind, others)
            names = tuple(f"{prefix}{name}{part.ending}" for name in stored[: len(rows)])
            spec = TensorSpec(
                part,
                layer,
                names,
                rows=(sum(rows),) if len(stored) == 1 else rows,  # one stored tensor may hold all of them
                inputs=sizes[part.inputs] if part.inputs else None,
                is_linear=part.kind in LINEAR or (part.name == "embedding" and config.is_tied),
            )
            yield from _of_experts(spec, sizes["experts"]) if part.is_of_experts else (spec,)


def _stored_names(part: Part, kind: LayerKind, others: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return what the tensors of a part are called: in a family, and beside experts."""
    name = part.name.removesuffix("_bias")
    if kind.experts is not None and name in BESIDE_EXPERTS:
        return others.get(f"shared_{name}", BESIDE_EXPERTS[name])
    return others.get(name, part.stored)


def _of_experts(spec: TensorSpec, count: int) -> Iterator[TensorSpec]:
    for expert in range(count):
        yield replace(spec, names=tuple(name.format(expert) for name in spec.names), expert=expert)
