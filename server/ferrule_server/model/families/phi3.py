"""Phi-3, Phi-3.5 and Phi-4, the dense text models, mini ones included.

As Llama but: one tensor holds the projections of queries, keys and values, and one those of gate and up; long contexts
divide each rotary frequency by a factor of its own; Phi-4-mini rotates three quarters of each head.
"""

from __future__ import annotations

from typing import Final

from ferrule_server.model.families.family import Family
from ferrule_server.model.families.windows import window_everywhere

PHI3: Final = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    defaults={
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": 4096,
        "sliding_window": None,
    },
    refine=window_everywhere,
    only={"attention_bias": False, "lm_head_bias": False, "full_attn_mod": 1, "interpolate_factor": 1},
    models="Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
    differs="fused projections; longrope and partial rotation (mini)",
    example="microsoft/Phi-4-mini-instruct",
    tensors={"qkv": ("self_attn.qkv_proj",), "gate_up": ("mlp.gate_up_proj",)},
)
