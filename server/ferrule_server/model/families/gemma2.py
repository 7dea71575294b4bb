"""Gemma 2: 2B, 9B and 27B.

As Llama but: the embedding is multiplied by the root of ``hidden_size``; norms multiply by one plus their weight, and
stand before and after attention and feed-forward part; GELU in place of SiLU; scores and logits are capped by a tanh;
every second layer attends to a window.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ferrule_server.model.config import ModelConfig
from ferrule_server.model.families.family import Family
from ferrule_server.model.families.values import ConfigValues
from ferrule_server.model.families.windows import layer_types, with_windows

__all__ = ["GEMMA2", "GEMMA_TENSORS", "gemma_network"]

GEMMA_TENSORS: Final = {
    "attention_out_norm": ("post_attention_layernorm",),
    "mlp_norm": ("pre_feedforward_layernorm",),
    "mlp_out_norm": ("post_feedforward_layernorm",),
}
"""The names of the norms from Gemma 2 on."""


def gemma_network(config: ModelConfig, values: ConfigValues) -> ModelConfig:
    """Return what all versions from Gemma 2 on have in common."""
    caps = [
        0.0 if values.get(key) in (None, 0) else values.number(key)
        for key in ("attn_logit_softcapping", "final_logit_softcapping")
    ]
    return replace(
        config,
        activation="gelu_tanh",
        embedding_scale=config.hidden_size**0.5,
        has_norm_after=True,
        score_softcap=caps[0],
        logit_softcap=caps[1],
    )


def _refine(config: ModelConfig, values: ConfigValues) -> ModelConfig:
    scale = values.number("query_pre_attn_scalar") ** -0.5
    layers = tuple(replace(kind, score_scale=scale) for kind in config.layers)
    network = replace(gemma_network(config, values), layers=layers, norm_offset=1.0)
    return with_windows(network, values, layer_types(values, every=2))


GEMMA2: Final = Family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    defaults={
        "head_dim": 256,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "layer_types": None,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    refine=_refine,
    only={"hidden_activation": "gelu_pytorch_tanh"},
    tensors=GEMMA_TENSORS,
    without_effect=frozenset({"hidden_act", "sliding_window_size"}),
)
