"""SmolLM3: as Llama, but every fourth layer does not rotate queries and keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from ferrule_server.errors import ModelError
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.families.family import Family
from ferrule_server.model.families.values import ConfigValues
from ferrule_server.model.families.windows import layer_types, with_windows
from ferrule_server.model_files import shown


def _refine(config: ModelConfig, values: ConfigValues) -> ModelConfig:
    rotated = _rotated_layers(config.num_layers, values)
    pairs = zip(config.layers, rotated, strict=True)
    layers = tuple(kind if is_rotated else replace(kind, rope=None) for kind, is_rotated in pairs)
    network = replace(config, layers=layers)
    if not values.flag("use_sliding_window") or values.get("sliding_window") is None:
        return network
    if values.get("layer_types") is not None:
        return with_windows(network, values, layer_types(values, every=1))
    types = ["full_attention" if is_rotated else "sliding_attention" for is_rotated in rotated]
    return with_windows(network, values, types)


def _rotated_layers(count: int, values: ConfigValues) -> list[bool]:
    found = values.get("no_rope_layers")
    if found is None:
        every = values.count("no_rope_layer_interval")
        return [(index + 1) % every != 0 for index in range(count)]
    if not isinstance(found, list) or len(found) < count or any(flag not in (0, 1) for flag in found):
        raise ModelError(
            f"config.json: no_rope_layers is {shown(found)}, 0 or 1 is expected for each of {count} layers"
        )
    return [flag == 1 for flag in found[:count]]


SMOLLM3: Final = Family(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    defaults={
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 2_000_000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
    },
    refine=_refine,
    models="SmolLM3",
    differs="no rotation in every fourth layer",
    example="HuggingFaceTB/SmolLM3-3B",
    without_effect=frozenset({"max_window_layers"}),
)
