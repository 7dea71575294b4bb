"""Qwen2, Qwen2.5 and Qwen3, the dense text models, and what has their architecture: QwQ, DeepSeek-R1-Distill-Qwen.

As Llama but: the projections of queries, keys and values of Qwen2 always carry biases, and the one after attention
never does. Each query and key head of Qwen3 passes its own RMSNorm before the rotation, ``head_dim`` is independent of
``hidden_size``, and ``attention_bias`` adds a bias to all four projections of attention. Weights have the names of the
table in ``tensors.py``, with ``q_norm`` and ``k_norm``.

Not supported: partial rotation, activations other than SiLU, quantised checkpoints, and the variants MoE, Next and VL.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ferrule_server.model.families.family import Family
from ferrule_server.model.families.windows import late_windows

QWEN2: Final = Family(
    "Qwen2ForCausalLM",
    "qwen2",
    {
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "layer_types": None,
    },
    late_windows,
    network={"has_qkv_bias": True},
    models="Qwen2, Qwen2.5, QwQ, DeepSeek-R1-Distill-Qwen",
    differs="biases of queries, keys and values",
    example="Qwen/Qwen2.5-7B-Instruct",
)
QWEN3: Final = replace(
    QWEN2,
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    defaults={**QWEN2.defaults, "head_dim": 128, "attention_bias": False},
    network={"qk_norm": "head"},
    only={"use_qk_norm": True},
    models="Qwen3, dense, 0.6B to 32B, and their 2507 versions",
    differs="a norm of each query and key head",
    example="Qwen/Qwen3-8B",
)
