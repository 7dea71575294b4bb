"""The architectures of llama.cpp that load: their families, and how their files differ from those of transformers.

Read in llama.cpp: ``conversion/`` for what a converter does to tensors, ``src/models/`` for what a missing key means
(MIT licence).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from ferrule_server.model.config import ModelConfig
from ferrule_server.model.families import FAMILIES
from ferrule_server.model.families.family import Family
from ferrule_server.model.gguf.container import Gguf

WINDOW: Final = "attention.sliding_window"


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture.

    Attributes:
        name: The entry of ``architectures`` in config.json.
        keys: What config.json calls the keys that few architectures have.
        has_neighbours: The rows of queries and keys are stored so that a rotated pair are neighbours, unlike there.
        has_whole_norms: Norms are stored with the 1 that the network adds to their weights.
        every: One of so many layers attends to all tokens and the others to a window; 0: there are no such layers.
        window: The window if the file states none; 0: all layers attend to all tokens then.
        has_two_ropes: Layers with a window have a rotation of their own.
        sliding_theta: Base of its frequencies if the file states none; None: that of the other layers.
        assumed: Settings that llama.cpp has in its code.
        shared_width: Layers of the one model whose scores are scaled by the share of a head in ``hidden_size`` and not
            by its width; None: the family states no scale.
    """

    name: str
    keys: Mapping[str, str] = field(default_factory=dict)
    has_neighbours: bool = False
    has_whole_norms: bool = False
    every: int = 0
    window: int = 0
    has_two_ropes: bool = False
    sliding_theta: float | None = None
    assumed: Mapping[str, Any] = field(default_factory=dict)
    shared_width: int | None = None

    @property
    def family(self) -> Family:
        """The family that reads the settings."""
        return next(family for family in FAMILIES if family.architecture == self.name)

    def parts(self, gguf: Gguf) -> dict[str, tuple[str, ...]]:
        """Return what the tensors of a file are called: as in the family, but one may hold queries, keys and values."""
        parts = dict(self.family.tensors)
        parts.pop("qkv", None)
        return parts | ({"qkv": ("self_attn.qkv_proj",)} if "blk.0.attn_qkv.weight" in gguf.tensors else {})


_CAPS: Final = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
_SCALES: Final = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
}  # fmt: skip
_EPS: Final = "attention.layer_norm_epsilon"
_EXPERTS: Final = {"expert_feed_forward_length": "moe_intermediate_size"}
_SHARED: Final = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
_WINDOWS: Final = {WINDOW: "sliding_window"}
_GEMMA2: Final = Architecture("Gemma2ForCausalLM", _CAPS, has_whole_norms=True, every=2, window=4096, shared_width=46)
_GEMMA3: Final = replace(
    _GEMMA2, name="Gemma3ForCausalLM", every=6, window=0, has_two_ropes=True, sliding_theta=1e4, shared_width=62
)
_ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture("LlamaForCausalLM", has_neighbours=True),
    "mistral3": Architecture("Ministral3ForCausalLM", _WINDOWS, has_neighbours=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", _EXPERTS | _SHARED),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", _EXPERTS, assumed={"norm_topk_prob": True}),
    "gemma2": _GEMMA2,
    "gemma3": _GEMMA3,
    "phi3": Architecture("Phi3ForCausalLM", _WINDOWS),
    "smollm3": Architecture("SmolLM3ForCausalLM", has_neighbours=True),
    "olmo2": Architecture("Olmo2ForCausalLM"),
    "olmo2 with a window": Architecture("Olmo3ForCausalLM", every=4, has_two_ropes=True),
    "chatglm": Architecture("GlmForCausalLM"),
    "glm4": Architecture("Glm4ForCausalLM"),
    "granite": Architecture("GraniteForCausalLM", _SCALES, has_neighbours=True),
    "cohere2": Architecture(
        "Cohere2ForCausalLM", {_EPS: "layer_norm_eps", "logit_scale": "logit_scale"}, every=4, window=4096
    ),
    "starcoder2": Architecture("Starcoder2ForCausalLM", {_EPS: "norm_epsilon"}),
}
"""By their names in llama.cpp, where OLMo 3 is an OLMo 2 with a window."""


def architecture_of(gguf: Gguf) -> Architecture | None:
    """Return the architecture of a file; None: it is not known."""
    name = str(gguf.metadata.get("general.architecture"))
    windowed = _ARCHITECTURES.get(f"{name} with a window") if gguf.metadata.get(f"{name}.{WINDOW}") else None
    return windowed or _ARCHITECTURES.get(name)


def as_stored(config: ModelConfig, gguf: Gguf) -> ModelConfig:
    """Return a network as it is read from a file, given one as it is read from a folder."""
    known = architecture_of(gguf)
    if known is None:
        return config
    layers = config.layers
    if known.has_neighbours:
        layers = tuple(replace(it, rope=it.rope and replace(it.rope, is_interleaved=True)) for it in layers)
    names = replace(config.names, tensors=known.parts(gguf), has_whole_norms=known.has_whole_norms)
    return replace(config, layers=layers, names=names)
