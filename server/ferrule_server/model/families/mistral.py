"""Mistral 7B, Nemo and Small, Ministral 8B, and Ministral 3.

Attention: as Llama, without biases. ``head_dim`` is independent of ``hidden_size``. ``sliding_window`` is a window in
every layer of Mistral and Ministral 3, and in those of ``layer_types`` in Ministral. Ministral 3 lets queries grow with
their position.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ferrule_server.model.config import ModelConfig, QueryTemperature
from ferrule_server.model.families.family import Family
from ferrule_server.model.families.values import ConfigValues
from ferrule_server.model.families.windows import layer_types, window_everywhere, with_windows

_DEFAULTS: Final = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
}


def _by_layer(config: ModelConfig, values: ConfigValues) -> ModelConfig:
    if values.get("layer_types") is None:
        return window_everywhere(config, values)
    return with_windows(config, values, layer_types(values, every=1))


_SCALED_QUERIES: Final = "llama_4_scaling_beta"
_MINISTRAL3_ROPE: Final = {
    "type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    _SCALED_QUERIES: 0.1,
}


def _with_temperature(config: ModelConfig, values: ConfigValues) -> ModelConfig:
    rope = ConfigValues(values.get("rope_parameters"), {})
    temperature = None
    if beta := rope.number_or_zero(_SCALED_QUERIES):
        length = rope.count("original_max_position_embeddings", default=values.count("max_position_embeddings"))
        temperature = QueryTemperature(beta, length)
    return window_everywhere(replace(config, query_temperature=temperature), values)


MISTRAL: Final = Family(
    "MistralForCausalLM",
    "mistral",
    _DEFAULTS,
    window_everywhere,
    models="Mistral 7B, Nemo, Small",
    differs="windows in every layer (7B v0.1)",
    example="mistralai/Mistral-7B-Instruct-v0.3",
    usual={"sliding_window": None},
)
MINISTRAL: Final = Family(
    "MinistralForCausalLM",
    "ministral",
    {**_DEFAULTS, "layer_types": None},
    _by_layer,
    models="Ministral 8B",
    differs="windows in some layers",
    example="mistralai/Ministral-8B-Instruct-2410",
)
MINISTRAL3: Final = Family(
    "Ministral3ForCausalLM",
    "ministral3",
    {**_DEFAULTS, "head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": None, "rope_parameters": _MINISTRAL3_ROPE},
    _with_temperature,
    rope_extra=frozenset({_SCALED_QUERIES, "max_position_embeddings"}),
    models="Ministral 3",
    differs="yarn; queries grow with their position",
)
