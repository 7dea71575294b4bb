"""Llama 2, 3, 3.1, 3.2 (text), 3.3, and what has their architecture: TinyLlama, SmolLM, Yi, DeepSeek-R1-Distill-Llama.

Attention: grouped queries, rotary positions; no norm of heads.
Biases: ``attention_bias`` adds one to all four projections of attention, ``mlp_bias`` to the three of the feed-forward
part. Weights have the names of the table in ``tensors.py``.

Not supported: activations other than SiLU, quantised checkpoints, text models inside multimodal ones.
"""

from __future__ import annotations

from typing import Final

from ferrule_server.model.families.family import Family

LLAMA: Final = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    defaults={
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
    },
    models="Llama 2, 3, 3.1, 3.2 (text), 3.3, TinyLlama, SmolLM, SmolLM2, Yi, Falcon 3, DeepSeek-R1-Distill-Llama",
    example="meta-llama/Llama-3.1-8B-Instruct",
)
