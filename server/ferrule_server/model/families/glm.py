"""GLM-4 9B (``Glm``) and GLM-4-0414 (``Glm4``), dense.

As Llama but: half of each head is rotated, in pairs of neighbouring values; biases of queries, keys and values; one
tensor holds gate and up. Glm4 has norms after attention and feed-forward part too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ferrule_server.model.config import ModelConfig
from ferrule_server.model.families.family import Family
from ferrule_server.model.families.values import ConfigValues

__all__ = ["GLM", "GLM4"]

_DEFAULTS: Final = {
    "head_dim": 128,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1.5625e-07,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "tie_word_embeddings": False,
}
_TENSORS: Final = {"gate_up": ("mlp.gate_up_proj",)}


def _refine(config: ModelConfig, _values: ConfigValues) -> ModelConfig:
    layers = tuple(
        kind if kind.rope is None else replace(kind, rope=replace(kind.rope, is_interleaved=True))
        for kind in config.layers
    )
    return replace(config, layers=layers, has_attention_out_bias=False)


def _refine_4(config: ModelConfig, values: ConfigValues) -> ModelConfig:
    return replace(_refine(config, values), has_norm_after=True)


GLM: Final = Family("GlmForCausalLM", "glm", _DEFAULTS, _refine, tensors=_TENSORS)
GLM4: Final = Family(
    "Glm4ForCausalLM",
    "glm4",
    _DEFAULTS,
    _refine_4,
    tensors={
        **_TENSORS,
        "attention_out_norm": ("post_self_attn_layernorm",),
        "mlp_out_norm": ("post_mlp_layernorm",),
    },
)
