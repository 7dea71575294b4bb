"""OLMo 2 and OLMo 3: norms only after attention and feed-forward part, and all heads of a row are normed together.

OLMo 3 adds windows in three of four layers; scaling for long contexts is for full layers only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ferrule_server.model.config import ModelConfig
from ferrule_server.model.families.family import Family
from ferrule_server.model.families.values import ConfigValues
from ferrule_server.model.families.windows import layer_types, with_ropes, with_windows

OLMO2: Final = Family(
    "Olmo2ForCausalLM",
    "olmo2",
    {"rms_norm_eps": 1e-5, "attention_bias": False},
    network={"has_norm_before": False, "has_norm_after": True, "qk_norm": "row"},
    tensors={
        "attention_out_norm": ("post_attention_layernorm",),
        "mlp_out_norm": ("post_feedforward_layernorm",),
    },
    models="OLMo 2",
    differs="norms after attention and feed-forward part alone; norms of all heads of a row",
    example="allenai/OLMo-2-1124-7B-Instruct",
)


def _refine_3(config: ModelConfig, values: ConfigValues) -> ModelConfig:
    types = layer_types(values, every=4)
    return with_windows(with_ropes(config, values, types), values, types)


OLMO3: Final = replace(
    OLMO2,
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    defaults={**OLMO2.defaults, "rope_theta": 500_000.0, "sliding_window": 4096, "layer_types": None},
    refine=_refine_3,
    has_scaled_length=True,
    models="OLMo 3",
    differs="as OLMo 2, windows in three of four layers",
    example="allenai/Olmo-3-1025-7B",
)
