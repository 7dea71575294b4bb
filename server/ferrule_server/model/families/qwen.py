"""Qwen2, Qwen2.5 and Qwen3, the dense text models, and what has their architecture: QwQ, DeepSeek-R1-Distill-Qwen.

As Llama but: the projections of queries, keys and values of Qwen2 always carry biases, and the one after attention
never does. Each query and key head of Qwen3 passes its own RMSNorm before the rotation, ``head_dim`` is independent of
``hidden_size``, and ``attention_bias`` adds a bias to all four projections of attention. Weights have the names of the
table in ``tensors.py``, with ``q_norm`` and ``k_norm``.

The mixtures have experts in the layers that ``decoder_sparse_step`` and ``mlp_only_layers`` name; those of Qwen2 also a
part that every row passes, multiplied by the sigmoid of a projection.

Not supported: partial rotation, activations other than SiLU, quantised checkpoints, and the variants Next and VL.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from ferrule_server.errors import ModelError
from ferrule_server.model.config import LayerKind, ModelConfig
from ferrule_server.model.families.experts import read_experts
from ferrule_server.model.families.family import Family
from ferrule_server.model.families.values import ConfigValues
from ferrule_server.model.families.windows import late_windows
from ferrule_server.model_files import shown


def _with_experts(config: ModelConfig, values: ConfigValues) -> ModelConfig:
    """Return the network with experts in every layer but those that are said to be dense."""
    width = values.count("shared_expert_intermediate_size", least=0, default=0)
    experts = replace(
        read_experts(values, width="moe_intermediate_size"),
        is_normalised=values.flag("norm_topk_prob"),
        has_shared_gate=width > 0,
    )
    step, listed = values.count("decoder_sparse_step"), values.get("mlp_only_layers") or []
    if not isinstance(listed, list) or any(type(index) is not int for index in listed):
        raise ModelError(f"config.json: mlp_only_layers is {shown(listed)}, a list of layers is expected")
    dense = set(listed)

    def kind(index: int, plain: LayerKind) -> LayerKind:
        is_dense = index in dense or (index + 1) % step != 0
        return plain if is_dense else replace(plain, intermediate_size=width, experts=experts)

    return replace(config, layers=tuple(kind(index, plain) for index, plain in enumerate(config.layers)))


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
_MIXTURE: Final[dict[str, Any]] = {
    "num_experts_per_tok": 8, "num_experts": 128, "num_local_experts": 128, "moe_intermediate_size": 768,
    "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "rms_norm_eps": 1e-6,
}  # fmt: skip
"""Without windows: transformers has other rules for them than in dense models, and no published mixture uses any."""
QWEN2_MOE: Final = replace(
    QWEN2,
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    defaults={
        **_MIXTURE, "num_key_value_heads": 16, "num_experts_per_tok": 4,
        "num_experts": 60, "num_local_experts": 60, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    refine=_with_experts,
    only={"qkv_bias": True},
    models="Qwen1.5-MoE, Qwen2-57B-A14B",
    differs="experts, one for every row beside them, biases of queries, keys and values",
    example="Qwen/Qwen1.5-MoE-A2.7B-Chat",
)  # fmt: skip
QWEN3_MOE: Final = replace(
    QWEN3,
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    defaults={**_MIXTURE, "attention_bias": False, "num_key_value_heads": 4},
    refine=_with_experts,
    models="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder, and their 2507 versions",
    differs="experts, a norm of each query and key head",
    example="Qwen/Qwen3-30B-A3B-Instruct-2507",
)
