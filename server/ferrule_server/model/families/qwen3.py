"""Qwen3, the dense models from 0.6B to 32B, and their 2507 versions.

Attention: as Llama, but each query and key head passes its own RMSNorm before the rotation. ``head_dim`` is
independent of ``hidden_size``. Biases: ``attention_bias`` adds one to all four projections of attention. Weights have
the names of the table in ``tensors.py``, with ``q_norm`` and ``k_norm``.

Not supported: partial rotation, activations other than SiLU, quantised checkpoints, Qwen3-MoE, Qwen3-Next and Qwen3-VL.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ferrule_server.model.config import ModelConfig
from ferrule_server.model.families.family import Family
from ferrule_server.model.families.values import ConfigValues
from ferrule_server.model.families.windows import late_windows

__all__ = ["QWEN3"]


def _refine(config: ModelConfig, values: ConfigValues) -> ModelConfig:
    return late_windows(replace(config, qk_norm="head"), values)


QWEN3: Final = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
    },
    refine=_refine,
    only={"use_qk_norm": True},
)
