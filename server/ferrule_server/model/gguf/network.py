"""The network of a GGUF file: its metadata, as config.json of transformers would say it.

The keys are those of llama.cpp (``gguf-py/gguf/constants.py``, MIT licence), and what a file lacks means what it means
there. A key of the architecture that is not known here keeps its name, so that the family refuses it. All other keys,
such as ``general.*``, are for people and the tokenizer.
"""

from __future__ import annotations

import math
from typing import Any, Final

from ferrule_server.errors import ModelError
from ferrule_server.model.families.others import refusal_of
from ferrule_server.model.families.values import ConfigValues
from ferrule_server.model.gguf.architectures import WINDOW, Architecture, architecture_of
from ferrule_server.model.gguf.container import Gguf, read_floats
from ferrule_server.model_files import shown

_SHARED: Final = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
}  # fmt: skip
_BIASES: Final = {
    "attention_bias": ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias"), "mlp_bias": ("blk.0.ffn_down.bias",),
    "use_bias": ("blk.0.attn_output.bias",),
}  # fmt: skip
"""Settings of biases, with tensors of which a model with biases has one."""
_ZERO_IS_OFF: Final = frozenset({
    WINDOW, "attention.clamp_kqv", "attention.max_alibi_bias", "leading_dense_block_count", "nextn_predict_layers",
    "expert_shared_feed_forward_length", "pooling_type", "rope.scaling.factor", "rope.scale_linear",
})  # fmt: skip
_WIDTHS: Final = frozenset({
    "attention.value_length", "attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa",
})  # fmt: skip
"""Keys that change nothing if they state the width of a head."""
_HARMLESS: Final = {
    "attention.causal": True, "rope.scaling.finetuned": True, "rope.scaling.type": "none",
    "rope.scaling.attn_factor": 1.0, "rope.scaling.yarn_ext_factor": 1.0, "rope.scaling.yarn_attn_factor": 1.0,
}  # fmt: skip
"""Keys that change nothing if they have this value."""
_YARN: Final = {
    "rope.scaling.factor": "factor", "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow", "rope.scaling.yarn_log_multiplier": "mscale_all_dim",
    "attention.temperature_scale": "llama_4_scaling_beta",
}  # fmt: skip
_LENGTH: Final = "max_position_embeddings"
_ORIGINAL: Final = f"original_{_LENGTH}"
_PATTERN: Final = "attention.sliding_window_pattern"
DIVISORS: Final = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that divide rotary frequencies; they are settings in config.json."""


def settings_of(gguf: Gguf) -> dict[str, Any]:
    """Return what config.json would hold. Whether that can run is for the family to say.

    Raises:
        ModelError: The architecture is not known, or a value is missing or of another type, without which the others
            have no meaning.
    """
    name, kind = (gguf.metadata.get(f"general.{key}") for key in ("architecture", "type"))
    if kind not in (None, "model") or not isinstance(name, str):
        raise ModelError(
            f"config.json: general.type is {shown(kind)}, general.architecture {shown(name)}; is it a model?"
        )
    known, prefix = architecture_of(gguf), f"{name}."
    left = {key.removeprefix(prefix): value for key, value in gguf.metadata.items() if key.startswith(prefix)}
    left = {key: value if key == _PATTERN else _one(value) for key, value in left.items()}
    raw: dict[str, Any] = {"architectures": [name if known is None else known.name]}
    raw |= {} if known is None else known.assumed
    raw |= {setting: left.pop(key) for key, setting in _SHARED.items() if key in left}
    if known is None:
        raise refusal_of(raw)
    raw |= {setting: left.pop(key) for key, setting in known.keys.items() if key in left}
    raw |= _shape(known, gguf, left, ConfigValues(raw, {}))
    rope = _rope(gguf, left, raw["head_dim"])
    if "attention.scale" in known.keys:
        raw.setdefault(known.keys["attention.scale"], raw["head_dim"] ** -0.5)
    if known.has_two_ropes:
        theta = left.pop("rope.freq_base_swa", known.sliding_theta or rope["rope_theta"])
        rope = {"full_attention": rope, "sliding_attention": {"rope_theta": theta}}
    raw["rope_parameters"] = rope
    is_long = rope.get("rope_type") == "longrope"
    raw[_ORIGINAL] = left.pop("rope.scaling.original_context_length", raw.get(_LENGTH) if is_long else None)
    return raw | {f"{prefix}{key}": value for key, value in left.items() if not _is_harmless(key, value, raw)}


def _shape(known: Architecture, gguf: Gguf, left: dict[str, Any], values: ConfigValues) -> dict[str, Any]:
    """Return the settings of sizes, biases and windows, without those that have other names only.

    Args:
        known: The architecture.
        gguf: The file.
        left: The keys of the architecture that have not been read; changed.
        values: What has been read.
    """
    hidden, heads, layers = map(values.count, ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    values.number(known.family.norm_eps_key)
    values.count("intermediate_size")
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or not embedding.shape:
        raise ModelError("config.json: tensor token_embd.weight is missing, or it is not a matrix")
    left.pop("vocab_size", None)  # also written for rows that were cut off
    found: dict[str, Any] = {
        "vocab_size": embedding.shape[0],
        "num_key_value_heads": left.pop("attention.head_count_kv", heads),
        "head_dim": left.pop("attention.key_length", hidden // heads),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
    }
    for setting in _BIASES.keys() & known.family.assumed.keys():
        found[setting] = any(name in gguf.tensors for name in _BIASES[setting])
    if known.shared_width is not None:
        found["query_pre_attn_scalar"] = hidden // heads if layers == known.shared_width else found["head_dim"]
    if known.every:
        window = found["sliding_window"] = left.pop(WINDOW, known.window)
        pattern = left.pop(f"{WINDOW}_pattern", known.every if window else 1)
        found["layer_types"] = _layer_types(pattern, layers)
    return found


def _layer_types(pattern: object, count: int) -> object:
    """Return the types of layers, of which a number says that each such one is full, and flags which have a window."""
    if type(pattern) is int and pattern > 0:
        pattern = [(i + 1) % pattern != 0 for i in range(count)]
    names = ("full_attention", "sliding_attention")
    return [names[bool(flag)] for flag in pattern] if isinstance(pattern, list) else pattern


def _rope(gguf: Gguf, left: dict[str, Any], head_dim: object) -> dict[str, Any]:
    """Return the settings of the rotation. Keys of a scaling that config.json cannot state stay in ``left``."""
    width = ConfigValues({"head_dim": head_dim}, {}).count("head_dim")
    rotated = ConfigValues({"rope.dimension_count": left.pop("rope.dimension_count", width)}, {})
    rope = {
        "rope_theta": left.pop("rope.freq_base", 10_000.0),
        "partial_rotary_factor": rotated.count("rope.dimension_count") / width,
    }
    kind, original = left.get("rope.scaling.type", "linear"), left.get("rope.scaling.original_context_length")
    divisors = [read_floats(gguf.tensors[name], width // 2) for name in DIVISORS if name in gguf.tensors]
    if divisors:
        if len(divisors) != 2 - (DIVISORS[0] in gguf.tensors):
            raise ModelError(f"config.json: {DIVISORS[0]} stands alone, or both of the others together")
        if kind in ("linear", "longrope"):
            left.pop("rope.scaling.type", None)
        rope |= {"rope_type": "longrope", "long_factor": divisors[0], "short_factor": divisors[-1]}
        rope |= {"attention_factor": left.pop("rope.scaling.attn_factor", 1.0)}
        return rope | ({_ORIGINAL: 1} if len(divisors) == 1 else {})
    if kind == "yarn":
        left.pop("rope.scaling.type")
        magnitude, factor = (left.get(f"rope.scaling.{key}") for key in ("yarn_attn_factor", "factor"))
        usual = 0.1 * math.log(factor) + 1 if isinstance(factor, float) and factor > 0 else math.inf
        if isinstance(magnitude, float) and math.isclose(magnitude, usual, rel_tol=1e-3):
            del left["rope.scaling.yarn_attn_factor"]  # as it is without the key
        rope |= {"rope_type": "yarn"} | ({} if original is None else {_ORIGINAL: original})
        rope |= {setting: left.pop(key) for key, setting in _YARN.items() if key in left}
        return rope | ({"mscale": 1.0} if rope.get("mscale_all_dim") else {})
    if kind == "linear":
        left.pop("rope.scaling.type", None)
        factors = [left.pop(key) for key in ("rope.scaling.factor", "rope.scale_linear") if left.get(key)]
        rope |= {"rope_type": "linear", "factor": factors[0]} if factors else {}
    return rope


def _one(value: object) -> object:
    """Return the one value that a list holds for every layer, or the value itself."""
    return value[0] if isinstance(value, list) and value and value.count(value[0]) == len(value) else value


def _is_harmless(key: str, value: object, raw: dict[str, Any]) -> bool:
    """Return whether a key that has not been read changes nothing."""
    is_off = key in _ZERO_IS_OFF and not value
    return is_off or (key in _WIDTHS and value == raw["head_dim"]) or (key in _HARMLESS and value == _HARMLESS[key])
