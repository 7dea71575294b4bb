"""Read the settings of rotary positions, in both dialects and for each kind of layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from ferrule_server.errors import ModelError
from ferrule_server.model.families.harmless import OFF
from ferrule_server.model.families.values import ConfigValues
from ferrule_server.model.rope import LinearScaling, Llama3Scaling, LongScaling, Rope, Scaling, YarnScaling
from ferrule_server.model_files import name_of, shown

ROPE_KEYS: Final = ("rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor")
"""Keys of config.json that are read here."""

Note = Callable[..., None]
"""Takes a warning as ``logging`` does: a format and its arguments."""

_COMMON: Final = frozenset({"type", "rope_type", "rope_theta", "partial_rotary_factor", "finetuned"})
_ONE: Final = ("attn_factor", "extrapolation_factor")
"""Multipliers of older yarn, which change nothing if they are 1."""
_ORIGINAL: Final = "original_max_position_embeddings"
_LONGEST: Final = "max_position_embeddings"
_LENGTHENS: Final = ("linear", "yarn")
"""Kinds of scaling by which sequences may be longer than ``max_position_embeddings``."""
_KINDS: Final = ("full_attention", "sliding_attention")


def rope_problems(values: ConfigValues, extra: frozenset[str]) -> list[str]:
    """Return the settings of rotary positions that are not supported, each with its value, for people.

    Args:
        values: Of config.json.
        extra: Keys inside the settings that the family reads itself.

    Raises:
        ModelError: The settings are no objects.
    """
    problems: dict[str, None] = {}
    for kind in _KINDS:
        merged = _merged(values, kind)
        name = _type_of(merged)
        if name not in _READERS:
            problems[f"rope type is {shown(name)} (only {', '.join(_READERS)})"] = None
            continue
        allowed = _COMMON | _READERS[name][0] | extra
        for key in merged.keys() - allowed:
            if merged[key] not in OFF and not (key in _ONE and merged[key] == 1):
                problems[f"rope type {name} has {name_of(key)} {shown(merged[key])}"] = None
    return list(problems)


def longest_sequence(values: ConfigValues, note: Note, *, has_scaled_length: bool) -> int:
    """Return the tokens of the longest sequence that the model computes, scaling included.

    Yarn multiplies ``original_max_position_embeddings``. Linear scaling multiplies that too if it is given, else
    ``max_position_embeddings``, where derivatives of Llama 2 left the length before scaling (4096 and factor 4 are
    16384 tokens). Some of them wrote the length after scaling, which the file does not reveal; their limit is then too
    generous, and the numbers are right. Families that scale some of their layers only (Gemma 3, OLMo 3) write the
    length after scaling: ``has_scaled_length``. So do files with llama3 and longrope.

    Dynamic scaling begins beyond ``max_position_embeddings``, and that is the limit: its frequencies depend on the
    length of a sequence, so each new token would change the keys of all earlier ones. ``note`` is called with this.

    Raises:
        ModelError: A size is missing or malformed, or the product is beyond the largest size.
    """
    stated, merged = values.count(_LONGEST), _merged(values, _KINDS[0])
    part, name = ConfigValues(merged, {_ORIGINAL: values.get(_ORIGINAL) or stated}), _type_of(merged)
    if name == "dynamic":
        note(
            "event=dynamic_positions longest=%d (dynamic scaling would change the KV of earlier tokens beyond)", stated
        )
    if name not in _LENGTHENS or part.is_absent("factor") or (name == "linear" and has_scaled_length):
        return stated
    longest = int(part.number("factor") * part.count(_ORIGINAL))
    return max(stated, ConfigValues({_LONGEST: max(longest, 1)}, {}).count(_LONGEST))


def _type_of(merged: Mapping[str, Any]) -> str:
    """Return the kind of scaling; of anything but a text, its text."""
    return str(merged.get("rope_type") or merged.get("type") or "default")


def read_rope(values: ConfigValues, head_dim: int, *, kind: str = "full_attention") -> Rope:
    """Return the rotation of the layers of one kind.

    Args:
        values: Of config.json, in which :func:`rope_problems` finds none; its defaults say what the family assumes for
            ``rope_theta`` and others.
        head_dim: Width of one head.
        kind: As in ``layer_types``, for a configuration that has settings for each kind.

    Raises:
        ModelError: A setting is missing or malformed.
    """
    merged = _merged(values, kind)
    name = _type_of(merged)
    _, read = _READERS[name]
    defaults = {key: values.get(key) for key in ("rope_theta", "partial_rotary_factor", _ORIGINAL)}
    defaults[_ORIGINAL] = defaults[_ORIGINAL] or values.count(_LONGEST)
    part = ConfigValues(merged, defaults)
    share = 1.0 if part.is_absent("partial_rotary_factor") else part.number("partial_rotary_factor")
    num_rotated = int(head_dim * share)
    if share != 1 and not values.has_default("partial_rotary_factor"):
        raise ModelError(f"config.json: partial_rotary_factor is {share:g}, which is not supported, only 1")
    if share > 1 or num_rotated < 2 or num_rotated % 2:
        raise ModelError(f"config.json: partial_rotary_factor {share:g} rotates {num_rotated} of {head_dim} values")
    width = head_dim if name == "proportional" else num_rotated
    scaling = read(part, values.count(_LONGEST), num_rotated // 2)
    return Rope(part.number("rope_theta"), num_rotated // 2, width, scaling)


def _merged(values: ConfigValues, kind: str) -> dict[str, Any]:
    """Return the settings of one kind of layer; if both dialects are present, version 5 has precedence."""
    merged: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        part = values.get(key)
        if isinstance(part, dict) and any(name in part for name in _KINDS):
            part = part.get(kind)
        if part is None:
            continue
        if not isinstance(part, dict):
            raise ModelError(f"config.json: {key} {shown(part)} is not supported; one flat object is expected")
        merged.update(part)
    return merged


def _plain(_part: ConfigValues, _longest: int, _pairs: int) -> None:
    """Read nothing: also right for dynamic scaling, which begins beyond the longest sequence of the model."""


def _linear(part: ConfigValues, _longest: int, _pairs: int) -> LinearScaling:
    return LinearScaling(part.number("factor"))


def _proportional(part: ConfigValues, _longest: int, _pairs: int) -> LinearScaling | None:
    return None if part.is_absent("factor") else LinearScaling(part.number("factor"))


def _llama3(part: ConfigValues, _longest: int, _pairs: int) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=part.number("factor"),
        low_freq_factor=part.number("low_freq_factor"),
        high_freq_factor=part.number("high_freq_factor"),
        original_max_positions=part.count(_ORIGINAL),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ModelError("config.json: high_freq_factor must be above low_freq_factor")
    return scaling


def _yarn(part: ConfigValues, longest: int, _pairs: int) -> YarnScaling:
    original = part.count(_ORIGINAL)
    factor = longest / original if part.is_absent("factor") else part.number("factor")
    scales = [part.number_or_zero(key) for key in ("mscale", "mscale_all_dim")]
    magnitude = _yarn_magnitude(factor)
    if all(scales):
        magnitude = _yarn_magnitude(factor, scales[0]) / _yarn_magnitude(factor, scales[1])
    return YarnScaling(
        factor=factor,
        original_max_positions=original,
        magnitude=magnitude if part.is_absent("attention_factor") else part.number("attention_factor"),
        beta_fast=32.0 if part.is_absent("beta_fast") else part.number("beta_fast"),
        beta_slow=1.0 if part.is_absent("beta_slow") else part.number("beta_slow"),
        is_truncated=part.is_absent("truncate") or part.flag("truncate"),
    )


def _yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _long(part: ConfigValues, longest: int, pairs: int) -> LongScaling:
    original = part.count(_ORIGINAL)
    return LongScaling(
        short_factors=_factors(part, "short_factor", pairs),
        long_factors=_factors(part, "long_factor", pairs),
        original_max_positions=original,
        magnitude=_long_magnitude(part, longest, original),
    )


def _long_magnitude(part: ConfigValues, longest: int, original: int) -> float:
    if not part.is_absent("attention_factor"):
        return part.number("attention_factor")
    factor = longest / original if part.is_absent("factor") else part.number("factor")
    return 1.0 if factor <= 1 or original == 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _factors(part: ConfigValues, key: str, pairs: int) -> tuple[float, ...]:
    found = part.get(key)
    if not isinstance(found, list) or len(found) != pairs:
        raise ModelError(f"config.json: {key} is {shown(found)}; {pairs} numbers are expected, one for each pair")
    return tuple(ConfigValues({key: value}, {}).number(key) for value in found)


_SCALED: Final = frozenset({"factor", _ORIGINAL})
_LLAMA3: Final = _SCALED | {"low_freq_factor", "high_freq_factor"}
_YARN: Final = _SCALED | {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"}
_LONG: Final = _SCALED | {"short_factor", "long_factor", "attention_factor"}
_READERS: Final[Mapping[str, tuple[frozenset[str], Callable[[ConfigValues, int, int], Scaling | None]]]] = {
    "default": (_SCALED, _plain),
    "linear": (_SCALED, _linear),
    "dynamic": (_SCALED, _plain),
    "llama3": (_LLAMA3, _llama3),
    "yarn": (_YARN, _yarn),
    "longrope": (_LONG, _long),
    "su": (_LONG, _long),
    "proportional": (_SCALED, _proportional),
}
