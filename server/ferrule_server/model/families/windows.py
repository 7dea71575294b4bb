"""Which layers attend to a window of the last tokens only, and which are rotated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ferrule_server.errors import ModelError
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.families.rotary import read_rope
from ferrule_server.model.families.values import ConfigValues
from ferrule_server.model_files import shown

_FULL, _SLIDING = "full_attention", "sliding_attention"
_LONGEST = "max_position_embeddings"


def layer_types(values: ConfigValues, *, every: int) -> list[str]:
    """Return the type of each layer: those of ``layer_types``, by default every n-th full and the others sliding.

    Raises:
        ModelError: There are other types, or another number of them than there are layers.
    """
    count, found = values.count("num_hidden_layers"), values.get("layer_types")
    if found is None:
        return [_SLIDING if (index + 1) % every else _FULL for index in range(count)]
    if not isinstance(found, list) or len(found) != count or any(kind not in (_FULL, _SLIDING) for kind in found):
        raise ModelError(
            f"config.json: layer_types is {shown(found)}, {count} of {_FULL!r} or {_SLIDING!r} are expected"
        )
    return list(found)


def change_layers(config: ModelConfig, types: Sequence[str], changes: Mapping[str, Mapping[str, Any]]) -> ModelConfig:
    """Return the network with other layers.

    Args:
        config: The network.
        types: Of each layer.
        changes: For a type, the fields of :class:`LayerKind` that its layers have instead; other types stay.
    """
    pairs = zip(config.layers, types, strict=True)
    return replace(config, layers=tuple(replace(kind, **changes.get(layer_type, {})) for kind, layer_type in pairs))


def with_windows(config: ModelConfig, values: ConfigValues, types: Sequence[str]) -> ModelConfig:
    """Return the network with the window of ``sliding_window`` in layers of the sliding type.

    A window that no sequence reaches is none.

    Raises:
        ModelError: There is such a layer, and no window.
    """
    if _SLIDING not in types:
        return config
    window = values.count("sliding_window")
    return change_layers(config, types, {_SLIDING: {"window": window if window < config.max_positions else 0}})


def with_ropes(
    config: ModelConfig, values: ConfigValues, types: Sequence[str], *, sliding_theta: str = "rope_theta"
) -> ModelConfig:
    """Return the network with a rotation for each type of layer; settings of the older dialect scale full layers only.

    Args:
        config: The network.
        values: Of config.json.
        types: Of each layer.
        sliding_theta: The setting of the older dialect that is the base of the frequencies in sliding layers.

    Raises:
        ModelError: A setting is not supported.
    """
    nested = values.get("rope_parameters")
    if nested and not (isinstance(nested, dict) and set(nested) <= {_FULL, _SLIDING}):
        raise ModelError(f"config.json: rope_parameters is {shown(nested)}; one object for each layer type is expected")
    own = {"rope_parameters": nested, "rope_theta": values.get(sliding_theta), _LONGEST: values.get(_LONGEST)}
    ropes = {
        _FULL: {"rope": read_rope(values, config.head_dim, kind=_FULL)},
        _SLIDING: {"rope": read_rope(ConfigValues(own, {}), config.head_dim, kind=_SLIDING)},
    }
    return change_layers(config, types, ropes)


def window_everywhere(config: ModelConfig, values: ConfigValues) -> ModelConfig:
    """Return the network with the window of ``sliding_window`` in every layer; null and 0 are none."""
    if values.get("sliding_window") in (None, 0):
        return config
    return with_windows(config, values, [_SLIDING] * config.num_layers)


def late_windows(config: ModelConfig, values: ConfigValues) -> ModelConfig:
    """Return the network with windows as in Qwen2 and Qwen3: if they are used, from layer ``max_window_layers`` on."""
    count, kinds = config.num_layers, values.get("layer_types")
    if kinds is None and values.flag("use_sliding_window") and values.get("sliding_window") is not None:
        first = values.count("max_window_layers", least=0)
        return with_windows(config, values, [_FULL if index < first else _SLIDING for index in range(count)])
    if kinds is None:
        return config
    types = layer_types(values, every=1)
    if _SLIDING in types and not values.flag("use_sliding_window"):
        raise ModelError(f"config.json: layer_types is {shown(kinds)}, but use_sliding_window is false")
    return with_windows(config, values, types)
