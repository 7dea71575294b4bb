"""Refuses layers that attend to a window of the last tokens only, which the decoder does not compute."""

from __future__ import annotations

from ferrule_server.errors import ModelError
from ferrule_server.model.families.values import ConfigValues
from ferrule_server.model_files import shown

__all__ = ["check_full_layers", "check_no_window"]


def check_full_layers(values: ConfigValues) -> None:
    """Refuse a layer with a window, by the rule of transformers' ``Qwen2Config`` and ``Qwen3Config``.

    Raises:
        ModelError: Some layer has a window; the message names the setting.
    """
    kinds, window = values.get("layer_types"), values.get("sliding_window")
    if kinds is not None and not (isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)):
        raise ModelError(f"config.json: layer_types is {shown(kinds)}; sliding-window attention is not supported")
    if kinds is not None or not values.flag("use_sliding_window") or window is None:
        return
    first = 0 if values.get("max_window_layers") is None else values.count("max_window_layers", least=0)
    if first < values.count("num_hidden_layers"):
        raise ModelError(f"config.json: sliding_window is {shown(window)}; sliding-window attention is not supported")


def check_no_window(values: ConfigValues) -> None:
    """Refuse a window in every layer that is shorter than the longest sequence; a longer one has no effect.

    An absent ``sliding_window`` is the default of the family, null is none.

    Raises:
        ModelError: There is such a window.
    """
    if values.get("sliding_window") is None:
        return
    window, longest = values.count("sliding_window"), values.count("max_position_embeddings")
    if window < longest:
        raise ModelError(
            f"config.json: sliding_window is {window} and max_position_embeddings {longest}; sliding-window attention "
            f"is not supported. With max_position_embeddings {window} the model loads, and is exact up to there"
        )
