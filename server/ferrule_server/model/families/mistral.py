"""Mistral 7B from v0.2 on, Mistral Nemo and Mistral Small 24B 2501: text models without a window.

Attention: as Llama, without biases. ``head_dim`` is independent of ``hidden_size``. Weights have the names of the table
in ``weights.py``.

Not supported: sliding windows, which v0.1 has: a window that is shorter than the longest sequence is refused. Nor are
linear, dynamic, yarn and longrope scaling, partial rotation, activations other than SiLU, quantised checkpoints,
Ministral, Mixtral, and the text models inside multimodal ones (Mistral Small 3.1 and later).
"""

from __future__ import annotations

from typing import Final

from ferrule_server.model.families.family import Family
from ferrule_server.model.families.windows import check_no_window

__all__ = ["MISTRAL"]

MISTRAL: Final = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    defaults={
        "head_dim": None,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
    },
    rope_types=("default", "llama3"),
    check=check_no_window,
)
