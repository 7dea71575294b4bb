"""StarCoder2: LayerNorm with biases, biases in every projection, and a feed-forward part without a gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ferrule_server.model.config import ModelConfig
from ferrule_server.model.families.family import Family
from ferrule_server.model.families.values import ConfigValues
from ferrule_server.model.families.windows import window_everywhere


def _refine(config: ModelConfig, values: ConfigValues) -> ModelConfig:
    has_bias = values.flag("use_bias")
    network = replace(config, has_qkv_bias=has_bias, has_attention_out_bias=has_bias, has_mlp_bias=has_bias)
    return window_everywhere(network, values)


STARCODER2: Final = Family(
    architecture="Starcoder2ForCausalLM",
    model_type="starcoder2",
    defaults={
        "num_key_value_heads": 2,
        "norm_epsilon": 1e-5,
        "use_bias": True,
        "sliding_window": None,
        "tie_word_embeddings": True,
    },
    refine=_refine,
    network={"has_layer_norm": True, "has_norm_bias": True, "activation": "gelu_tanh", "is_gated": False},
    models="StarCoder2",
    differs="LayerNorm with biases, biases everywhere, no gate, windows",
    example="bigcode/starcoder2-3b",
    norm_eps_key="norm_epsilon",
    only={
        "hidden_act": "gelu_pytorch_tanh",
        "mlp_type": "default",
        "norm_type": "layer_norm",
    },
    without_effect=frozenset({"activation_function", "layer_norm_epsilon", "scale_attention_softmax_in_fp32"}),
    tensors={"gate_up": ("mlp.c_fc",), "down": ("mlp.c_proj",)},
)
