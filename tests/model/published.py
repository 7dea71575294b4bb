"""Settings of config.json as published models have them, sizes made small: one entry for each model of docs/models.md.

No file was copied: the keys are from memory and from lists of keys, the values stand for their kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["PUBLISHED", "config_json"]

_SIZES: Final = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu",
}  # fmt: skip
_USUAL: Final = {
    "_name_or_path": "some/where", "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "initializer_range": 0.02, "pad_token_id": 0, "rope_theta": 10000.0,
    "torch_dtype": "bfloat16", "transformers_version": "4.46.0", "use_cache": True,
}  # fmt: skip
_LLAMA: Final = {"mlp_bias": False, "pretraining_tp": 1, "rope_scaling": None, "tie_word_embeddings": False}
_LLAMA3: Final = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512,
    "rope_type": "llama3",
}  # fmt: skip
_QWEN: Final = {
    "max_window_layers": 2, "sliding_window": 32768, "use_sliding_window": False, "tie_word_embeddings": False,
}  # fmt: skip
_PHI: Final = {
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3"},
    "embd_pdrop": 0.0, "resid_pdrop": 0.0, "original_max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
_SU: Final = {"long_factor": [2.0] * 8, "short_factor": [1.0] * 8, "type": "longrope"}
_GEMMA: Final = {
    "cache_implementation": "hybrid", "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 16, "sliding_window": 512, "hidden_act": None,
}  # fmt: skip
_GEMMA3: Final = {
    **_GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None, "rope_local_base_freq": 10000.0,
}  # fmt: skip
_COHERE: Final = {
    "cache_implementation": "hybrid", "layer_norm_eps": 1e-5, "layer_switch": 4, "logit_scale": 0.25,
    "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj", "rotary_pct": 1.0,
    "sliding_window": 512, "sliding_window_pattern": 4, "use_embedding_sharing": True, "use_gated_activation": True,
    "use_parallel_block": True, "use_parallel_embedding": True, "use_qk_norm": False, "rms_norm_eps": None,
}  # fmt: skip
_OLMO3: Final = {
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512, "tie_word_embeddings": False,
    "rope_scaling": {
        "attention_factor": 1.2, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
        "original_max_position_embeddings": 512, "rope_type": "yarn",
    },
}  # fmt: skip
_MINISTRAL3: Final = {
    "head_dim": 16, "sliding_window": None, "rope_theta": None,
    "rope_parameters": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 256, "rope_theta": 1e6, "rope_type": "yarn",
        "type": "yarn",
    },
}  # fmt: skip
_EXPERTS_OFF: Final = {
    "num_experts": 0, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001, "output_router_logits": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
_EXPERTS: Final = {**_EXPERTS_OFF, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_QWEN3_MOE: Final = {
    **_QWEN, **_EXPERTS, "head_dim": 32, "max_window_layers": 48, "sliding_window": None, "rope_scaling": None,
}  # fmt: skip
_FROM_GGUF: Final = {
    "_model_name_or_path": "model.gguf", "unk_token_id": 0, "internal_version": "1", "max_sequence_length": 4096,
    "badwordsids": None, "seq_length": 4096, "_flash_attn_2_enabled": True, "attn_implementation": "sdpa",
}  # fmt: skip

PUBLISHED: Final[Mapping[str, tuple[str, str, Mapping[str, Any]]]] = {
    "Llama 2": ("Llama", "llama", _LLAMA),
    "Llama 2, 16k": ("Llama", "llama", {
        **_LLAMA, "max_sequence_length": 16384, "rope_scaling": {"type": "linear", "factor": 4.0},
    }),
    "Llama 2, yarn": ("Llama", "llama", {
        **_LLAMA, "auto_map": {"AutoConfig": "a.B"}, "rope_scaling": {
            "factor": 16.0, "finetuned": True, "original_max_position_embeddings": 4096, "type": "yarn",
        },
    }),
    "Llama 3": ("Llama", "llama", {**_LLAMA, "rope_theta": 500000.0}),
    "Llama 3.1": ("Llama", "llama", {**_LLAMA, "rope_scaling": _LLAMA3, "eos_token_id": [2, 3, 4]}),
    "Llama 3.2": ("Llama", "llama", {**_LLAMA, "rope_scaling": _LLAMA3, "head_dim": 16, "tie_word_embeddings": True}),
    "TinyLlama": ("Llama", "llama", _LLAMA),
    "SmolLM2": ("Llama", "llama", {
        **_LLAMA, "is_llama_config": True, "rope_interleaved": False, "tie_word_embeddings": True,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    }),
    "SmolLM2, from GGUF": ("Llama", "llama", {**_LLAMA, **_FROM_GGUF}),
    "Yi": ("Llama", "llama", {**_LLAMA, "rope_theta": 5e6}),
    "Falcon 3": ("Llama", "llama", {**_LLAMA, "activation": "swiglu", "head_dim": 16}),
    "DeepSeek-R1-Distill-Llama": ("Llama", "llama", {**_LLAMA, "rope_scaling": _LLAMA3}),
    "DeepSeek coder": ("Llama", "llama", {**_LLAMA, "rope_scaling": {"factor": 4.0, "type": "linear"}}),
    "InternLM as Llama": ("Llama", "llama", {
        **_LLAMA, "bias": False, "attn_implementation": "eager", "rope_scaling": {"factor": 2.0, "type": "dynamic"},
    }),
    "Phi-4 as Llama": ("Llama", "llama", {
        **_LLAMA, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "original_max_position_embeddings": 4096,
        "unsloth_fixed": True, "unsloth_version": "2025.1",
    }),
    "Qwen as Llama": ("Llama", "llama", {**_LLAMA, **_QWEN}),
    "a merge without its experts": ("Mistral", "mistral", {**_EXPERTS_OFF, "sliding_window": None}),
    "Mistral 7B v0.1": ("Mistral", "mistral", {"sliding_window": 512, "tie_word_embeddings": False}),
    "Mistral 7B v0.3": ("Mistral", "mistral", {"sliding_window": None, "tie_word_embeddings": False, "head_dim": 16}),
    "Mistral Nemo": ("Mistral", "mistral", {"sliding_window": None, "head_dim": 32, "sliding_window_pattern": 0}),
    "Mistral, trained in 4 bits": ("Mistral", "mistral", {
        "sliding_window": None, "quantization_config": {
            "load_in_4bit": False, "load_in_8bit": False, "quant_method": "bitsandbytes",
        },
    }),
    "Ministral 8B": ("Mistral", "mistral", {"sliding_window": 2048, "head_dim": 16}),
    "Ministral 8B, transformers 5": ("Ministral", "ministral", {
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 2048, "head_dim": 16,
    }),
    "Ministral 3": ("Ministral3", "ministral3", _MINISTRAL3),
    "Qwen2": ("Qwen2", "qwen2", _QWEN),
    "Qwen2.5": ("Qwen2", "qwen2", {**_QWEN, "use_mrope": False}),
    "Qwen2.5, yarn": ("Qwen2", "qwen2", {
        **_QWEN, "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 4096, "type": "yarn"},
    }),
    "QwQ": ("Qwen2", "qwen2", {**_QWEN, "rope_theta": 1e6}),
    "DeepSeek-R1-Distill-Qwen": ("Qwen2", "qwen2", {**_QWEN, "use_mrope": False}),
    "Qwen3": ("Qwen3", "qwen3", {**_QWEN, "head_dim": 32, "sliding_window": None, "rope_scaling": None}),
    "Qwen3 2507": ("Qwen3", "qwen3", {**_QWEN, "head_dim": 32, "sliding_window": None, "rope_theta": 5e6}),
    "Qwen1.5-MoE": ("Qwen2Moe", "qwen2_moe", {
        **_QWEN, **_EXPERTS, "num_experts": 6, "norm_topk_prob": False, "shared_expert_intermediate_size": 96,
        "max_window_layers": 2,
    }),
    "Qwen2-57B-A14B": ("Qwen2Moe", "qwen2_moe", {
        **_QWEN, **_EXPERTS, "norm_topk_prob": False, "shared_expert_intermediate_size": 96,
    }),
    "Qwen3-30B-A3B": ("Qwen3Moe", "qwen3_moe", _QWEN3_MOE),
    "Qwen3-235B-A22B": ("Qwen3Moe", "qwen3_moe", _QWEN3_MOE),
    "Qwen3-30B-A3B 2507": ("Qwen3Moe", "qwen3_moe", {**_QWEN3_MOE, "rope_theta": 1e7}),
    "Qwen3-Coder": ("Qwen3Moe", "qwen3_moe", {
        **_QWEN3_MOE, "qkv_bias": False, "use_qk_norm": True, "shared_expert_intermediate_size": 0,
    }),
    "Gemma 2": ("Gemma2", "gemma2", {
        **_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh",
    }),
    "Gemma 2 without caps": ("Gemma2", "gemma2", {
        **_GEMMA, "attn_logit_softcapping": 0, "final_logit_softcapping": 0.0,
    }),
    "Gemma 3 270M": ("Gemma3", "gemma3_text", {
        **_GEMMA3, "_sliding_window_pattern": 6, "use_bidirectional_attention": False,
        "layer_types": ["sliding_attention", "full_attention"],
    }),
    "Gemma 3 1B": ("Gemma3", "gemma3_text", {**_GEMMA3, "sliding_window_pattern": 6, "rope_scaling": None}),
    "Gemma 3 4B, its text model": ("Gemma3", "gemma3_text", {
        **_GEMMA3, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }),
    "Gemma 4": ("Gemma4", "gemma4_text", {
        "hidden_act": None, "hidden_activation": "gelu_pytorch_tanh", "head_dim": 16, "global_head_dim": 32,
        "enable_moe_block": False, "num_experts": None, "top_k_experts": None, "moe_intermediate_size": None,
        "use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0, "sliding_window": 512,
        "rope_theta": None, "layer_types": ["sliding_attention", "full_attention"],
    }),
    "Phi-3-mini-4k": ("Phi3", "phi3", {**_PHI, "rope_scaling": None, "sliding_window": 2047}),
    "Phi-3.5-mini": ("Phi3", "phi3", {**_PHI, "rope_scaling": _SU, "sliding_window": 262144}),
    "Phi-4": ("Phi3", "phi3", {**_PHI, "rope_scaling": None, "sliding_window": None}),
    "Phi-4-mini": ("Phi3", "phi3", {
        **_PHI, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False,
        "partial_rotary_factor": 0.75, "rope_scaling": {**_SU, "long_factor": [2.0] * 6, "short_factor": [1.0] * 6},
        "sliding_window": 262144,
    }),
    "SmolLM3": ("SmolLM3", "smollm3", {
        "layer_types": ["full_attention"] * 2, "max_window_layers": 28, "mlp_bias": False, "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 0], "pretraining_tp": 2, "sliding_window": None, "use_sliding_window": False,
    }),
    "OLMo 2": ("Olmo2", "olmo2", {"clip_qkv": None, "tie_word_embeddings": False}),
    "OLMo 3": ("Olmo3", "olmo3", _OLMO3),
    "GLM-4 9B": ("Glm", "glm", {"attention_bias": True, "head_dim": 16, "partial_rotary_factor": 0.5}),
    "GLM-4-0414": ("Glm4", "glm4", {"attention_bias": True, "head_dim": 16, "partial_rotary_factor": 0.5}),
    "Granite 3": ("Granite", "granite", {
        "attention_multiplier": 0.0625, "embedding_multiplier": 12.0, "logits_scaling": 8.0, "mlp_bias": False,
        "residual_multiplier": 0.22, "rope_scaling": None, "tie_word_embeddings": True,
    }),
    "Command R7B": ("Cohere2", "cohere2", _COHERE),
    "Command A": ("Cohere2", "cohere2", {**_COHERE, "_sliding_window_pattern": 4, "head_dim": 16}),
    "StarCoder2": ("Starcoder2", "starcoder2", {
        "activation_function": "gelu", "attention_softmax_in_fp32": True, "embedding_dropout": 0.1,
        "hidden_act": "gelu_pytorch_tanh", "layer_norm_epsilon": 1e-5, "mlp_type": "default", "norm_epsilon": 1e-5,
        "norm_type": "layer_norm", "residual_dropout": 0.1, "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True, "sliding_window": 512, "use_bias": True, "rms_norm_eps": None,
        "attention_bias": None,
    }),
}  # fmt: skip
"""By the name of the model: the architecture without its ending, ``model_type``, and what its file says."""


def config_json(name: str) -> dict[str, Any]:
    """Return a config.json like that of a published model; null stands for a key that it lacks."""
    stem, model_type, settings = PUBLISHED[name]
    found = {"architectures": [f"{stem}ForCausalLM"], "model_type": model_type, **_SIZES, **_USUAL, **settings}
    return {key: value for key, value in found.items() if value is not None or key == "rope_scaling"}
