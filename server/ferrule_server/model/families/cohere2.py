"""Command R7B and Command A (Cohere2): attention and feed-forward part read the same normed rows.

As Llama but: LayerNorm without biases; pairs of neighbouring values are rotated; three of four layers attend to a
window, and the full ones are not rotated; the logits are multiplied.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ferrule_server.model.config import ModelConfig
from ferrule_server.model.families.family import Family
from ferrule_server.model.families.values import ConfigValues
from ferrule_server.model.families.windows import change_layers, layer_types, with_windows


def _refine(config: ModelConfig, values: ConfigValues) -> ModelConfig:
    types = layer_types(values, every=values.count("sliding_window_pattern"))
    network = change_layers(config, types, {"full_attention": {"rope": None}})
    return with_windows(replace(network, logit_scale=values.number("logit_scale")), values, types)


COHERE2: Final = Family(
    architecture="Cohere2ForCausalLM",
    model_type="cohere2",
    defaults={
        "layer_norm_eps": 1e-5,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "logit_scale": 0.0625,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "layer_types": None,
    },
    refine=_refine,
    network={"has_layer_norm": True, "is_parallel": True},
    is_interleaved=True,
    models="Command R7B, Command A",
    differs=(
        "LayerNorm, parallel parts, neighbouring pairs, windows with rotation and full layers without, logit scale"
    ),
    example="CohereLabs/c4ai-command-r7b-12-2024",
    norm_eps_key="layer_norm_eps",
    only={
        "use_parallel_block": True,
        "use_gated_activation": True,
        "use_qk_norm": False,
        "use_embedding_sharing": True,
        "position_embedding_type": "rope_gptj",
        "order_of_interleaved_layers": "local_attn_first",
        "rotary_pct": 1.0,
    },
    without_effect=frozenset({"layer_switch", "use_parallel_embedding"}),
)
