"""config.json and generation_config.json become one validated :class:`ModelConfig`, or one clear error.

Both dialects of Hugging Face transformers are read: version 4 (``rope_theta``, ``rope_scaling``, ``torch_dtype``) and
version 5 (``rope_parameters``, ``dtype``). Whatever would change the result and is not implemented (sliding windows,
other rope types, partial rotary, quantised weights, other activations) is refused by name, never approximated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ferrule_server.errors import ModelError
from ferrule_server.model_files import MAX_CONFIG_BYTES, FileMissing, read_object, shown

__all__ = ["Llama3Scaling", "ModelConfig", "parse_config", "read_config"]

# What the transformers classes assume where config.json is silent.
_DEFAULT_ROPE_THETA = 10_000.0
_DEFAULT_NORM_EPS = 1e-6
_QWEN3_HEAD_DIM = 128

_FAMILIES = ("LlamaForCausalLM", "Qwen3ForCausalLM")

# Far beyond any model of these families. Loading takes time and memory in proportion to these sizes before a single
# weight is read, so a folder of strangers must not choose them freely.
_MOST = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1024,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 4096,
    "max_position_embeddings": 1 << 27,
    "original_max_position_embeddings": 1 << 27,
    "max_window_layers": 1 << 27,
}
_LEAST_NUMBER, _MOST_NUMBER = 1e-30, 1e30  # float32 holds these and what is computed from them


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretching of the rotary frequencies ("The Llama 3 Herd of Models", Grattafiori et al., 2024).

    Attributes:
        factor: Low frequencies are divided by it.
        low_freq_factor: Wavelengths above ``original_max_positions / low_freq_factor`` count as low frequencies.
        high_freq_factor: Wavelengths below ``original_max_positions / high_freq_factor`` are kept as they are.
        original_max_positions: Context length in tokens before the stretching.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything that decides the network; ``num_kv_heads`` divides ``num_heads`` and ``head_dim`` is even.

    Attributes:
        architecture: Class name as in config.json.
        vocab_size: Rows of the embedding; may exceed the tokenizer's.
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the feed-forward part.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of one head.
        max_positions: Longest sequence in tokens the model was made for.
        norm_eps: Added to the mean square in every RMSNorm.
        rope_theta: Base of the rotary frequencies.
        rope_scaling: None for plain rope.
        is_tied: The output head is the embedding.
        has_qk_norm: Query and key heads are normalised before the rotation (Qwen3).
        has_attention_bias: The four attention projections carry biases.
        has_mlp_bias: The three feed-forward projections carry biases.
        eos_ids: Tokens that end a text, generation_config.json first.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Scaling | None
    is_tied: bool
    has_qk_norm: bool
    has_attention_bias: bool
    has_mlp_bias: bool
    eos_ids: tuple[int, ...]


def read_config(folder: Path) -> ModelConfig:
    """Return the configuration of a model folder.

    Args:
        folder: Holds config.json and perhaps generation_config.json.

    Raises:
        ModelError: A file is missing or broken, or the model is one this server cannot run exactly.
    """
    try:
        raw = read_object(folder / "config.json", MAX_CONFIG_BYTES)
    except FileMissing as error:
        path = folder / "config.json"
        raise ModelError(f"{path} is missing; a model folder holds config.json and *.safetensors") from error
    try:
        generation = read_object(folder / "generation_config.json", MAX_CONFIG_BYTES)
    except FileMissing:
        generation = {}
    return parse_config(raw, generation)


def parse_config(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    """Return the configuration for the contents of config.json and generation_config.json.

    Args:
        raw: Parsed config.json.
        generation: Parsed generation_config.json, empty where there is none.

    Raises:
        ModelError: A value is missing, malformed or not supported; the message names it.
    """
    architecture = _architecture(raw)
    _refuse_unsupported(raw)
    num_heads = _count(raw, "num_attention_heads")
    hidden_size = _count(raw, "hidden_size")
    vocab_size = _count(raw, "vocab_size")
    rope = _rope_parameters(raw)
    max_positions = _count(raw, "max_position_embeddings")
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_count(raw, "intermediate_size"),
        num_layers=_count(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(raw, num_heads),
        head_dim=_head_dim(raw, architecture, hidden_size, num_heads),
        max_positions=max_positions,
        norm_eps=_positive(raw, "rms_norm_eps", _DEFAULT_NORM_EPS),
        rope_theta=_positive(rope, "rope_theta", _DEFAULT_ROPE_THETA),
        rope_scaling=_rope_scaling(rope, max_positions),
        is_tied=_flag(raw, "tie_word_embeddings"),
        has_qk_norm=architecture == "Qwen3ForCausalLM",
        has_attention_bias=_flag(raw, "attention_bias"),
        has_mlp_bias=architecture == "LlamaForCausalLM" and _flag(raw, "mlp_bias"),
        eos_ids=_eos_ids(raw, generation, vocab_size),
    )


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in _FAMILIES:
        raise ModelError(f"config.json: architectures is {shown(names)}; supported: {', '.join(_FAMILIES)}")
    return str(names[0])


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"config.json: hidden_act {shown(activation)} is not supported, only 'silu'")
    if raw.get("quantization_config") is not None:
        raise ModelError("config.json: quantization_config is present; quantised checkpoints are not supported")
    if _has_sliding_layers(raw):
        raise ModelError("config.json: sliding-window attention is in use and not supported, only full attention")


def _has_sliding_layers(raw: Mapping[str, Any]) -> bool:
    """Return whether any layer attends to a window only, as transformers derives it for Qwen3."""
    kinds = raw.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        raise ModelError(f"config.json: layer_types is {shown(kinds)}, a list is expected")
    if kinds is not None:
        return any(kind != "full_attention" for kind in kinds)
    if raw.get("use_sliding_window") is None or not _flag(raw, "use_sliding_window"):
        return False
    first_sliding = _count(raw, "max_window_layers", 0, least=0)
    return raw.get("sliding_window") is not None and first_sliding < _count(raw, "num_hidden_layers")


def _rope_parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return one flat dict of rope settings from either dialect; version 5's keys win where both are present."""
    merged: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        part = raw.get(key)
        if part is None:
            continue
        if not isinstance(part, dict) or any(isinstance(value, dict) for value in part.values()):
            raise ModelError(f"config.json: {key} {shown(part)} is not supported; one flat object is expected")
        merged.update(part)
    if merged.get("rope_theta") is None:
        merged["rope_theta"] = raw.get("rope_theta")
    factor = merged.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if factor not in (None, 1):
        raise ModelError(f"config.json: partial_rotary_factor {shown(factor)} is not supported, only 1.0")
    return merged


def _rope_scaling(rope: Mapping[str, Any], max_positions: int) -> Llama3Scaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelError(f"config.json: rope type {shown(kind)} is not supported; supported: 'default', 'llama3'")
    scaling = Llama3Scaling(
        factor=_positive(rope, "factor"),
        low_freq_factor=_positive(rope, "low_freq_factor"),
        high_freq_factor=_positive(rope, "high_freq_factor"),
        original_max_positions=_count(rope, "original_max_position_embeddings", max_positions),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ModelError("config.json: high_freq_factor must be above low_freq_factor")
    return scaling


def _num_kv_heads(raw: Mapping[str, Any], num_heads: int) -> int:
    num_kv_heads = _count(raw, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    return num_kv_heads


def _head_dim(raw: Mapping[str, Any], architecture: str, hidden_size: int, num_heads: int) -> int:
    if raw.get("head_dim") is not None:
        head_dim = _count(raw, "head_dim")
    elif architecture == "Qwen3ForCausalLM":
        head_dim = _QWEN3_HEAD_DIM
    elif hidden_size % num_heads:
        raise ModelError(f"config.json: hidden_size {hidden_size} is no multiple of num_attention_heads {num_heads}")
    else:
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim {head_dim} is odd; rotary positions need pairs")
    return head_dim


def _eos_ids(raw: Mapping[str, Any], generation: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    found = generation.get("eos_token_id")
    if found is None:
        found = raw.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if any(not _is_int(token_id) or not 0 <= token_id < vocab_size for token_id in ids):
        raise ModelError(f"eos_token_id {shown(found)} is not a token of the vocabulary of {vocab_size}")
    return tuple(ids)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _count(raw: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1) -> int:
    """Return a size, checked against ``_MOST``: the one place where sizes of a configuration are bounded."""
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json: {key} is missing")
    if not _is_int(value) or value < least:
        raise ModelError(f"config.json: {key} is {shown(value)}, a whole number of at least {least} is expected")
    if value > _MOST[key]:
        raise ModelError(f"config.json: {key} is {shown(value)}, at most {_MOST[key]} is supported")
    return int(value)


def _positive(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not _LEAST_NUMBER <= value <= _MOST_NUMBER:
        limits = f"from {_LEAST_NUMBER:g} to {_MOST_NUMBER:g}"
        raise ModelError(f"config.json: {key} is {shown(value)}, a number {limits} is expected")
    return float(value)


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key, False)
    if not isinstance(value, bool):
        raise ModelError(f"config.json: {key} is {shown(value)}, true or false is expected")
    return value
