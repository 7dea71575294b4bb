"""Read config.json and generation_config.json into one validated :class:`ModelConfig`.

Both dialects of Hugging Face transformers are read: version 4 (``rope_theta``, ``rope_scaling``, ``torch_dtype``) and
version 5 (``rope_parameters``, ``dtype``). The settings of each family stand in ``families/``. A setting that is not
listed there is refused by name, because ignoring it could change what the model computes. An operator who knows that
it does not can name it: such a key counts as absent.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ferrule_server.errors import ModelError
from ferrule_server.model.config import CheckpointNames, LayerKind, ModelConfig
from ferrule_server.model.families import FAMILIES, WRAPPERS
from ferrule_server.model.families.family import Family, Wrapper
from ferrule_server.model.families.others import NotSupported, check_not_quantised, no_model, refusal_of
from ferrule_server.model.families.rotary import Note, longest_sequence, read_rope
from ferrule_server.model.families.values import ConfigValues
from ferrule_server.model.gguf.architectures import as_stored
from ferrule_server.model.gguf.files import opened
from ferrule_server.model.gguf.names import blocks_of
from ferrule_server.model_files import MAX_CONFIG_BYTES, FileMissing, is_file, name_of, shown
from ferrule_server.model_folder import read_object

_MAX_FILES: Final = 1000
"""Of a folder without config.json that are looked at."""
_HOLDERS: Final = frozenset({"text_config", "rope_scaling", "rope_parameters", "full_attention", "sliding_attention"})
"""Keys of objects inside which keys are ignored too."""
_DEPTH: Final = 3
"""Of such objects in one another."""


def _unheard(_form: str, *_values: object) -> None:
    """Forget a warning."""


def read_config(folder: Path, ignored: Collection[str] = (), note: Note = _unheard) -> ModelConfig:
    """Return the configuration of a model.

    Args:
        folder: Holds config.json, and generation_config.json if the model has one; or a GGUF file.
        ignored: Keys of config.json that count as absent.
        note: Called with each warning.

    Raises:
        ModelError: A file is missing or broken, or this server cannot run the model exactly.
    """
    try:
        config = _read_config(folder, ignored, note)
        if not is_file(folder):
            return config
        gguf = opened(folder)
        return replace(as_stored(config, gguf), blocks=blocks_of(gguf))
    except ModelError as error:
        if is_file(folder):
            told = name_of(folder.name)
            error.args = (str(error).replace("config.json: ", f"{told}: ", 1),)
            if isinstance(error, NotSupported):
                error.reason = error.reason.replace("config.json: ", f"{told}: ", 1)
        raise


def _read_config(folder: Path, ignored: Collection[str], note: Note) -> ModelConfig:
    try:
        raw = read_object(folder, "config.json", MAX_CONFIG_BYTES)
    except FileMissing as error:
        raise _no_config(folder) from error
    try:
        generation = read_object(folder, "generation_config.json", MAX_CONFIG_BYTES)
    except FileMissing:
        generation = {}
    return parse_config(raw, generation, ignored, note)


def _no_config(folder: Path) -> ModelError:
    """Return the error of a folder without config.json: what it holds instead, if that is known."""
    text = f"{folder / 'config.json'} is missing; a model folder holds config.json and *.safetensors"
    try:
        names = [path.name for path in itertools.islice(folder.iterdir(), _MAX_FILES)]
    except OSError:
        names = []
    return no_model(text, names)


def parse_config(
    raw: Mapping[str, Any], generation: Mapping[str, Any], ignored: Collection[str] = (), note: Note = _unheard
) -> ModelConfig:
    """Return the configuration for the contents of config.json and generation_config.json.

    Args:
        raw: Parsed config.json.
        generation: Parsed generation_config.json; empty if there is none.
        ignored: Keys that count as absent in config.json, and in the text model and the rotary settings inside it.
        note: Called with each warning.

    Raises:
        ModelError: A value is missing, malformed or not supported; the message names it.
    """
    raw = _without(raw, ignored, note)
    family, wrapper, text = _find(raw)
    check_not_quantised(raw)
    check_not_quantised(text)
    values = family.read(text)
    vocab_size = values.count("vocab_size")
    config = ModelConfig(
        architecture=family.architecture if wrapper is None else wrapper.architecture,
        vocab_size=vocab_size,
        hidden_size=values.count("hidden_size"),
        num_heads=values.count("num_attention_heads"),
        max_positions=longest_sequence(values, note, has_scaled_length=family.has_scaled_length),
        layers=_layers(values, is_interleaved=family.is_interleaved),
        norm_eps=values.number(family.norm_eps_key),
        is_tied=_is_tied(raw, values),
        has_qkv_bias=values.flag("attention_bias"),
        has_attention_out_bias=values.flag("attention_bias"),
        has_mlp_bias=values.flag("mlp_bias"),
        eos_ids=_eos_ids((generation, raw, text), vocab_size, note),
        names=replace(CheckpointNames() if wrapper is None else wrapper.names, tensors=family.tensors),
    )
    return family.refine(replace(config, **family.network), values)


def _without(raw: Mapping[str, Any], ignored: Collection[str], note: Note) -> Mapping[str, Any]:
    """Return config.json without these keys; each is noted once, also one that is not there."""
    found: dict[str, object] = {}

    def rest(part: Mapping[str, Any], depth: int) -> dict[str, Any]:
        found.update((key, part[key]) for key in ignored if key in part)
        inner = {key: part[key] for key in part if key not in ignored}
        for key in _HOLDERS & inner.keys() if depth else ():
            if isinstance(inner[key], dict):
                inner[key] = rest(inner[key], depth - 1)
        return inner

    kept = rest(raw, _DEPTH) if ignored else raw
    for key in sorted(ignored):
        if key in found:
            note("event=config_key_ignored key=%s value=%s", name_of(key), shown(found[key]))
        else:
            note("event=config_key_absent key=%s (--ignore-config-key names it, config.json has no such key)", key)
    return kept


def _find(raw: Mapping[str, Any]) -> tuple[Family, Wrapper | None, Mapping[str, Any]]:
    """Return the family, what wraps its text model, and the settings of the text model."""
    names = raw.get("architectures")
    for family in FAMILIES:
        if names == [family.architecture]:
            return family, None, raw
    for wrapper in WRAPPERS:
        if names == [wrapper.architecture]:
            return _unwrapped(wrapper, raw)
    raise refusal_of(raw)


def _unwrapped(wrapper: Wrapper, raw: Mapping[str, Any]) -> tuple[Family, Wrapper, Mapping[str, Any]]:
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise ModelError(f"config.json: text_config of {wrapper.architecture} is {shown(text)}, an object is expected")
    kind = text.get("model_type", wrapper.model_types[0])
    if kind not in wrapper.model_types:
        known = ", ".join(wrapper.model_types)
        raise ModelError(f"config.json: text_config has model_type {shown(kind)}; supported: {known}")
    return next(family for family in FAMILIES if family.model_type == kind), wrapper, text


def _layers(values: ConfigValues, *, is_interleaved: bool) -> tuple[LayerKind, ...]:
    """Return layers that are all equal."""
    num_heads = values.count("num_attention_heads")
    head_dim = _head_dim(values, num_heads)
    kind = LayerKind(
        head_dim=head_dim,
        num_kv_heads=_num_kv_heads(values, num_heads),
        intermediate_size=values.count("intermediate_size"),
        score_scale=head_dim**-0.5,
        rope=replace(read_rope(values, head_dim), is_interleaved=is_interleaved),
    )
    return (kind,) * values.count("num_hidden_layers")


def _is_tied(raw: Mapping[str, Any], values: ConfigValues) -> bool:
    """Return whether the head is the embedding: what surrounds a text model may say so too."""
    return ConfigValues(raw, {"tie_word_embeddings": values.flag("tie_word_embeddings")}).flag("tie_word_embeddings")


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


def _eos_ids(places: tuple[Mapping[str, Any], ...], vocab_size: int, note: Note) -> tuple[int, ...]:
    """Return the ids of the first place that has some; those outside the vocabulary can never be drawn."""
    inside, outside = dict[int, None](), dict[int, None]()
    for found in [place.get("eos_token_id") for place in places]:
        if inside:
            break
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if any(type(token_id) is not int for token_id in ids):
            raise ModelError(f"eos_token_id is {shown(found)}, whole numbers are expected")
        for token_id in ids:
            (inside if 0 <= token_id < vocab_size else outside)[token_id] = None
    if outside:
        note("event=eos_outside_vocabulary eos_token_id=%s vocab_size=%d", shown(list(outside)), vocab_size)
    return tuple(inside)
