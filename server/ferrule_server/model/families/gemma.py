"""Gemma 2 (2B, 9B and 27B) and Gemma 3, the text models: 270M and 1B, and those inside 4B, 12B and 27B.

As Llama but: the embedding is multiplied by the root of ``hidden_size``; norms multiply by one plus their weight, and
stand before and after attention and feed-forward part; GELU in place of SiLU; scores and logits are capped by a tanh;
every second layer attends to a window.

Gemma 3 is as Gemma 2 but: no capped scores or logits; each query and key head is normed; five layers with a window
follow each other, then a full one; layers with a window have rotary frequencies of their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from ferrule_server.model.config import ModelConfig
from ferrule_server.model.families.family import Family
from ferrule_server.model.families.values import ConfigValues
from ferrule_server.model.families.windows import layer_types, with_ropes, with_windows

GEMMA_TENSORS: Final = {
    "attention_out_norm": ("post_attention_layernorm",),
    "mlp_norm": ("pre_feedforward_layernorm",),
    "mlp_out_norm": ("post_feedforward_layernorm",),
}
"""The names of the norms from Gemma 2 on."""
GEMMA_NETWORK: Final[dict[str, Any]] = {"activation": "gelu_tanh", "has_norm_after": True}
"""What is the same from Gemma 2 on."""


def gemma_network(config: ModelConfig, values: ConfigValues) -> ModelConfig:
    """Return the network with the factor of the embedding and the caps, from Gemma 2 on."""
    score, logit = map(values.number_or_zero, ("attn_logit_softcapping", "final_logit_softcapping"))
    return replace(config, embedding_scale=config.hidden_size**0.5, score_softcap=score, logit_softcap=logit)


def _scaled(config: ModelConfig, values: ConfigValues) -> ModelConfig:
    scale = values.number("query_pre_attn_scalar") ** -0.5
    return replace(gemma_network(config, values), layers=tuple(replace(it, score_scale=scale) for it in config.layers))


def _refine_2(config: ModelConfig, values: ConfigValues) -> ModelConfig:
    return with_windows(_scaled(config, values), values, layer_types(values, every=2))


def _refine_3(config: ModelConfig, values: ConfigValues) -> ModelConfig:
    types = layer_types(values, every=values.count("sliding_window_pattern"))
    network = with_ropes(_scaled(config, values), values, types, sliding_theta="rope_local_base_freq")
    return with_windows(network, values, types)


GEMMA2: Final = Family(
    "Gemma2ForCausalLM",
    "gemma2",
    {
        "head_dim": 256,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "layer_types": None,
        "tie_word_embeddings": True,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    _refine_2,
    network={**GEMMA_NETWORK, "norm_offset": 1.0},
    only={"hidden_activation": "gelu_pytorch_tanh"},
    tensors=GEMMA_TENSORS,
    without_effect=frozenset({"hidden_act", "sliding_window_size"}),
    models="Gemma 2",
    differs="norms of 1 + w before and after, GELU, softcaps, windows in every second layer",
    example="google/gemma-2-2b-it",
)
GEMMA3: Final = replace(
    GEMMA2,
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    defaults={
        **GEMMA2.defaults,
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": 6,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    refine=_refine_3,
    network={**GEMMA2.network, "qk_norm": "head"},
    without_effect=frozenset({"hidden_act"}),
    has_scaled_length=True,
    models="Gemma 3, 270M and 1B; 4B, 12B and 27B inside Gemma3ForConditionalGeneration",
    differs="as Gemma 2 without softcaps, norms of heads, windows in five of six layers, two rotations",
    example="google/gemma-3-1b-it",
)
