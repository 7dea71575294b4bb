"""Read config.json and generation_config.json into one validated :class:`ModelConfig`.

Both dialects of Hugging Face transformers are read: version 4 (``rope_theta``, ``rope_scaling``, ``torch_dtype``) and
version 5 (``rope_parameters``, ``dtype``). The settings of each family stand in ``families/``. A setting that is not
listed there is refused by name, because ignoring it could change what the model computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ferrule_server.errors import ModelError
from ferrule_server.model.families import FAMILIES
from ferrule_server.model.families.family import Family, check_only
from ferrule_server.model.families.values import ConfigValues
from ferrule_server.model_files import MAX_CONFIG_BYTES, FileMissing, name_of, read_object, shown

__all__ = ["Llama3Scaling", "ModelConfig", "parse_config", "read_config"]

_SCALING_KEYS: Final = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_ROPE_KEYS: Final = ("type", "rope_type", "rope_theta", *_SCALING_KEYS)


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """How Llama 3.1 scales the rotary frequencies ("The Llama 3 Herd of Models", Grattafiori et al., 2024).

    Attributes:
        factor: Divides low frequencies.
        low_freq_factor: Wavelengths above ``original_max_positions / low_freq_factor`` are low frequencies.
        high_freq_factor: Wavelengths below ``original_max_positions / high_freq_factor`` are not scaled.
        original_max_positions: Context length in tokens before the scaling.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The network of a model, and the one record of its sizes; ``num_kv_heads`` divides ``num_heads``.

    Attributes:
        architecture: Class name as in config.json.
        vocab_size: Rows of the embedding; they may exceed the vocabulary of the tokenizer.
        hidden_size: Width of the residual stream.
        num_layers: Decoder layers.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of one head.
        max_positions: Longest sequence in tokens for which the model was trained.
        intermediate_size: Width inside the feed-forward part; 0: there is none.
        norm_eps: The number added to the mean square in every RMSNorm.
        rope_theta: Base of the rotary frequencies.
        rope_scaling: None for plain rope.
        is_tied: The output head is the embedding.
        has_qk_norm: Query and key heads are normalised before the rotation (Qwen3).
        has_qkv_bias: The projections of queries, keys and values carry biases.
        has_attention_out_bias: The projection after attention carries a bias.
        has_mlp_bias: The three feed-forward projections carry biases.
        eos_ids: Tokens that end a text: those of generation_config.json, else those of config.json.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    intermediate_size: int = 0
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Llama3Scaling | None = None
    is_tied: bool = False
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    has_attention_out_bias: bool = False
    has_mlp_bias: bool = False
    eos_ids: tuple[int, ...] = ()


def read_config(folder: Path) -> ModelConfig:
    """Return the configuration of a model folder.

    Args:
        folder: Holds config.json, and generation_config.json if the model has one.

    Raises:
        ModelError: A file is missing or broken, or this server cannot run the model exactly.
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
        generation: Parsed generation_config.json; empty if there is none.

    Raises:
        ModelError: A value is missing, malformed or not supported; the message names it.
    """
    family = _family(raw)
    values = family.read(raw)
    num_heads, vocab_size = values.count("num_attention_heads"), values.count("vocab_size")
    max_positions = values.count("max_position_embeddings")
    rope = _rope_values(values, max_positions)
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=vocab_size,
        hidden_size=values.count("hidden_size"),
        intermediate_size=values.count("intermediate_size"),
        num_layers=values.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(values, num_heads),
        head_dim=_head_dim(values, num_heads),
        max_positions=max_positions,
        norm_eps=values.number("rms_norm_eps"),
        rope_theta=rope.number("rope_theta"),
        rope_scaling=_rope_scaling(rope, family.rope_types),
        is_tied=values.flag("tie_word_embeddings"),
        has_qk_norm=family.has_qk_norm,
        has_qkv_bias=family.has_qkv_bias or values.flag("attention_bias"),
        has_attention_out_bias=values.flag("attention_bias"),
        has_mlp_bias=values.flag("mlp_bias"),
        eos_ids=_eos_ids(raw, generation, vocab_size),
    )


def _family(raw: Mapping[str, Any]) -> Family:
    names = raw.get("architectures")
    found = [family for family in FAMILIES if names == [family.architecture]]
    if not found:
        supported = ", ".join(family.architecture for family in FAMILIES)
        advice = "docs/models.md lists models of each; Qwen/Qwen3-0.6B is a small one"
        raise ModelError(f"config.json: architectures is {shown(names)}; supported: {supported}. {advice}")
    return found[0]


def _rope_values(values: ConfigValues, max_positions: int) -> ConfigValues:
    """Return the settings of rotary positions in either dialect; if both are present, version 5 has precedence."""
    merged: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        part = values.get(key)
        if part is None:
            continue
        if not isinstance(part, dict):
            raise ModelError(f"config.json: {key} {shown(part)} is not supported; one flat object is expected")
        for name, value in part.items():
            _check_rope_setting(key, name, value)
        merged.update(part)
    merged.setdefault("rope_type", merged.get("type", "default"))
    defaults = {"rope_theta": values.number("rope_theta"), "original_max_position_embeddings": max_positions}
    return ConfigValues(merged, defaults)


def _check_rope_setting(key: str, name: str, value: object) -> None:
    if name == "partial_rotary_factor" and value is not None:
        check_only(name, value)
    elif value is not None and name not in _ROPE_KEYS:
        raise ModelError(f"config.json: {key} has {name_of(name)} {shown(value)}, a setting that is not supported")


def _rope_scaling(rope: ConfigValues, supported: tuple[str, ...]) -> Llama3Scaling | None:
    kind = rope.get("rope_type")
    if kind not in supported:
        names = ", ".join(map(repr, supported))
        raise ModelError(f"config.json: rope type {shown(kind)} is not supported; supported: {names}")
    if kind == "default":
        return None
    scaling = Llama3Scaling(
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_positions=rope.count("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise ModelError("config.json: high_freq_factor must be above low_freq_factor")
    return scaling


def _num_kv_heads(values: ConfigValues, num_heads: int) -> int:
    num_kv_heads = values.count("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(
            f"config.json: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    return num_kv_heads


def _head_dim(values: ConfigValues, num_heads: int) -> int:
    """Return the width of a head, by default that of the family or the share of a head in the residual stream."""
    hidden_size = values.count("hidden_size")
    head_dim = values.count("head_dim", default=hidden_size // num_heads)
    if values.is_absent("head_dim") and hidden_size % num_heads:
        raise ModelError(f"config.json: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}")
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim {head_dim} is odd; rotary positions need pairs")
    return head_dim


def _eos_ids(raw: Mapping[str, Any], generation: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    found = generation.get("eos_token_id")
    if found is None:
        found = raw.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if any(type(token_id) is not int or not 0 <= token_id < vocab_size for token_id in ids):
        raise ModelError(f"eos_token_id {shown(found)} is not a token of the vocabulary of {vocab_size}")
    return tuple(ids)
