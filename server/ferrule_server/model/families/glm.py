"""GLM-4 9B (``Glm``) and GLM-4-0414 (``Glm4``), dense.

As Llama but: half of each head is rotated, in pairs of neighbouring values; biases of queries, keys and values; one
tensor holds gate and up. Glm4 has norms after attention and feed-forward part too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ferrule_server.model.families.family import Family

GLM: Final = Family(
    "GlmForCausalLM",
    "glm",
    {
        "head_dim": 128,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1.5625e-07,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
    network={"has_attention_out_bias": False},
    is_interleaved=True,
    tensors={"gate_up": ("mlp.gate_up_proj",)},
    models="GLM-4 9B",
    differs="half of each head is rotated, in neighbouring pairs; biases of queries, keys and values",
    example="zai-org/glm-4-9b-hf",
)
GLM4: Final = replace(
    GLM,
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    network={**GLM.network, "has_norm_after": True},
    tensors={
        **GLM.tensors,
        "attention_out_norm": ("post_self_attn_layernorm",),
        "mlp_out_norm": ("post_mlp_layernorm",),
    },
    models="GLM-4-0414, dense",
    differs="as GLM-4, norms after attention and feed-forward part too",
    example="zai-org/GLM-4-9B-0414",
)
