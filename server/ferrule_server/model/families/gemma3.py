"""Gemma 3, the text models: 270M and 1B, and those inside 4B, 12B and 27B.

As Gemma 2 but: no capped scores or logits; each query and key head is normed; five layers with a window follow each
other, then a full one; layers with a window have rotary frequencies of their own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ferrule_server.model.config import ModelConfig
from ferrule_server.model.families.family import Family
from ferrule_server.model.families.gemma2 import GEMMA_TENSORS, gemma_network
from ferrule_server.model.families.values import ConfigValues
from ferrule_server.model.families.windows import layer_types, with_ropes, with_windows

__all__ = ["GEMMA3"]


def _refine(config: ModelConfig, values: ConfigValues) -> ModelConfig:
    scale = values.number("query_pre_attn_scalar") ** -0.5
    layers = tuple(replace(kind, score_scale=scale) for kind in config.layers)
    network = replace(gemma_network(config, values), layers=layers, norm_offset=1.0, qk_norm="head")
    types = layer_types(values, every=values.count("sliding_window_pattern"))
    return with_windows(with_ropes(network, values, types, sliding_theta="rope_local_base_freq"), values, types)


GEMMA3: Final = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    defaults={
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "layer_types": None,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
    },
    refine=_refine,
    only={"hidden_activation": "gelu_pytorch_tanh"},
    without_effect=frozenset({"hidden_act"}),
    tensors=GEMMA_TENSORS,
    has_scaled_length=True,
)
