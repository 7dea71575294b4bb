"""Gemma 4, the dense text models: 31B, and those inside E2B and E4B.

As Gemma 3 but: norms multiply by their weight; scores are not scaled; values are normed; full layers have wider heads,
rotate a quarter of each, and in the larger models use their keys as values; the last layers of the smaller ones read
the K and V of earlier layers, and every layer adds its part of a second embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from ferrule_server.errors import ModelError
from ferrule_server.model.config import LayerKind, ModelConfig, PerLayerInput
from ferrule_server.model.families.family import Family
from ferrule_server.model.families.gemma import GEMMA_NETWORK, GEMMA_TENSORS, gemma_network
from ferrule_server.model.families.rotary import read_rope
from ferrule_server.model.families.values import ConfigValues
from ferrule_server.model.families.windows import layer_types, with_windows
from ferrule_server.model_files import shown

_FULL: Final = "full_attention"
_ROPES: Final[Mapping[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def _refine(config: ModelConfig, values: ConfigValues) -> ModelConfig:
    types = layer_types(values, every=6)
    types[-1] = _FULL
    num_shared = values.count("num_kv_shared_layers", least=0)
    size = values.count("hidden_size_per_layer_input", least=0)
    inputs = PerLayerInput(values.count("vocab_size_per_layer_input"), size) if size else None
    network = replace(
        gemma_network(config, values),
        layers=_shared(tuple(_kind(config, values, *item) for item in enumerate(types)), types, num_shared, values),
        per_layer_input=inputs,
    )
    return with_windows(network, values, types)


def _kind(config: ModelConfig, values: ConfigValues, index: int, layer_type: str) -> LayerKind:
    """Return a layer of a type: full ones have heads of their own, stated for all of them or for each."""
    plain, own = config.layers[0], _own_settings(values, index)
    head_dim, num_kv_heads, is_value_key = plain.head_dim, plain.num_kv_heads, False
    if layer_type == _FULL:
        head_dim, is_value_key = values.count("global_head_dim"), values.flag("attention_k_eq_v")
    if is_value_key:
        num_kv_heads = values.count("num_global_key_value_heads", default=num_kv_heads)
    head_dim = own.count("head_dim", default=head_dim)
    num_kv_heads = own.count("num_key_value_heads", default=num_kv_heads)
    if config.num_heads % num_kv_heads or head_dim % 2:
        sizes = f"{num_kv_heads} KV heads of {head_dim} values"
        raise ModelError(f"config.json: layer {index} has {sizes}, which do not fit {config.num_heads} query heads")
    kind = replace(plain, head_dim=head_dim, num_kv_heads=num_kv_heads, is_value_key=is_value_key, score_scale=1.0)
    return replace(kind, rope=read_rope(values, head_dim, kind=layer_type))


def _own_settings(values: ConfigValues, index: int) -> ConfigValues:
    """Return the entry of ``per_layer_config`` for a layer."""
    every = values.get("per_layer_config") or {}
    own = every.get(str(index), {}) if isinstance(every, dict) else every
    if not isinstance(own, dict) or not set(own) <= {"head_dim", "num_key_value_heads"}:
        raise ModelError(f"config.json: per_layer_config has {shown(own)}; head_dim and num_key_value_heads are known")
    return ConfigValues(own, {})


def _shared(
    kinds: tuple[LayerKind, ...], types: Sequence[str], num_shared: int, values: ConfigValues
) -> tuple[LayerKind, ...]:
    """Return layers of which the last ones read the K and V of the last one before them of their type."""
    first = len(kinds) - num_shared
    wider = 2 if values.flag("use_double_wide_mlp") else 1
    made = list(kinds[:first])
    for kind, layer_type in zip(kinds[first:], types[first:], strict=True):
        sources = [index for index in range(first) if types[index] == layer_type]
        if not sources:
            raise ModelError(f"config.json: num_kv_shared_layers is {num_shared}, which leaves no {layer_type} layer")
        made.append(replace(kind, kv_layer=sources[-1], intermediate_size=wider * kind.intermediate_size))
    return tuple(made)


GEMMA4: Final = Family(
    architecture="Gemma4ForCausalLM",
    model_type="gemma4_text",
    defaults={
        "vocab_size": 262_144,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
        "rms_norm_eps": 1e-6,
        "rope_parameters": _ROPES,
        "partial_rotary_factor": 1.0,
        "attention_bias": False,
        "sliding_window": 512,
        "layer_types": None,
        "per_layer_config": None,
        "final_logit_softcapping": None,
        "vocab_size_per_layer_input": 262_144,
        "hidden_size_per_layer_input": 256,
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "tie_word_embeddings": True,
    },
    refine=_refine,
    network={**GEMMA_NETWORK, "qk_norm": "head", "has_v_norm": True, "has_layer_scale": True},
    models="Gemma 4, dense text models",
    differs="norms of values, wider heads in full layers, a second embedding, shared K and V in some models",
    only={
        "hidden_activation": "gelu_pytorch_tanh",
        "enable_moe_block": False,
        "use_bidirectional_attention": (False, "vision"),
    },
    tensors=GEMMA_TENSORS,
    without_effect=frozenset({"hidden_act", "num_experts", "top_k_experts", "moe_intermediate_size"}),
    has_scaled_length=True,
)
