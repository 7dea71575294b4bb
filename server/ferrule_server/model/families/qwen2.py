"""Qwen2 and Qwen2.5, the dense text models, and what has their architecture: QwQ, DeepSeek-R1-Distill-Qwen.

Attention: as Llama, but the projections of queries, keys and values always carry biases, and the one after attention
never does. Weights have the names of the table in ``tensors.py``.

Not supported: partial rotation, activations other than SiLU, quantised checkpoints, Qwen2-MoE and Qwen2-VL.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ferrule_server.model.config import ModelConfig
from ferrule_server.model.families.family import Family
from ferrule_server.model.families.values import ConfigValues
from ferrule_server.model.families.windows import late_windows

__all__ = ["QWEN2"]


def _refine(config: ModelConfig, values: ConfigValues) -> ModelConfig:
    return late_windows(replace(config, has_qkv_bias=True), values)


QWEN2: Final = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    defaults={
        "head_dim": None,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
    },
    refine=_refine,
)
