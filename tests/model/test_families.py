"""Each family against its configuration class in transformers: defaults, allow-list, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from ferrule_server.errors import ModelError
from ferrule_server.model.config_reader import parse_config, read_config
from ferrule_server.model.families import FAMILIES
from ferrule_server.model.families.family import Family
from ferrule_server.model.families.mistral import MISTRAL
from ferrule_server.model.families.qwen import QWEN3

EACH = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
SIZES = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
DERIVED = {"head_dim", "layer_types", "sliding_window", "rope_parameters", "no_rope_layers", "per_layer_config", *SIZES}
"""Settings that a class of transformers works out if config.json is silent; the whole configurations are compared."""


def config_of(family: Family, **changes: Any) -> dict[str, Any]:
    """Return a small config.json of a family."""
    return {"architectures": [family.architecture], "model_type": family.model_type, **SIZES, **changes}


@EACH
def test_a_configuration_of_transformers_loads(family: Family, tmp_path: Path) -> None:
    """What transformers saves for the defaults of a family is read, in full as in short, with the same meaning."""
    settings = {"architectures": [family.architecture], "eos_token_id": 5}
    config = transformers.AutoConfig.for_model(family.model_type, **settings)
    config.save_pretrained(tmp_path)
    found = read_config(tmp_path)
    assert found == parse_config(json.loads(config.to_json_string(use_diff=False)), {})
    assert (found.vocab_size, found.num_layers) == (config.vocab_size, config.num_hidden_layers)
    written = config.to_dict()
    head_dim = written.get("head_dim") or config.hidden_size // config.num_attention_heads
    first = found.layers[0]
    assert (first.num_kv_heads, first.head_dim) == (written["num_key_value_heads"], head_dim)
    assert (found.norm_eps, found.max_positions) == (
        getattr(config, family.norm_eps_key),
        config.max_position_embeddings,
    )


def assert_silence_has_their_meaning(family: Family) -> None:
    """Compare a config.json that is silent with what the family's class in transformers assumes."""
    config = transformers.AutoConfig.for_model(family.model_type, **SIZES)
    theirs = config.to_dict()
    for key in family.assumed.keys() & theirs.keys() - DERIVED:
        assert theirs[key] == family.assumed[key], key
    silent = config_of(family, eos_token_id=5)
    assert parse_config(silent, {}) == parse_config({**theirs, **silent}, {})


@EACH
def test_silence_means_what_transformers_assumes(family: Family) -> None:
    """Every default of a family is that of its class."""
    assert_silence_has_their_meaning(family)


def test_sizes_that_a_file_leaves_out_are_those_of_transformers() -> None:
    """Gemma 3 with vision states only some of them."""
    for family in FAMILIES:
        theirs = transformers.AutoConfig.for_model(family.model_type).to_dict()
        for key in SIZES.keys() & family.assumed.keys():
            assert theirs[key] == family.assumed[key], (family.model_type, key)


UNLISTED: list[tuple[str, Any]] = [
    ("attn_logit_softcapping", 50.0),
    ("final_logit_softcapping", 30.0),
    ("hidden_act", "gelu_pytorch_tanh"),
    ("partial_rotary_factor", 0.75),
    ("num_experts", 128),
    ("query_pre_attn_scalar", 256),
    ("no_rope_layers", [0, 1]),
    ("is_causal", False),
    ("embedding_multiplier", 12.0),
    ("quantization_config", {"quant_method": "fp8"}),
    ("text_config", {"hidden_size": 64}),
    ("attn_multiplier", 2.0),
    ("a_setting_of_tomorrow", 0),
    ("use_sliding_window", True),
]


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        (family, key, value)
        for family in FAMILIES
        for key, value in UNLISTED
        if key not in {*family.assumed, *family.without_effect} and family.only.get(key) != value
    ],
    ids=lambda part: part.model_type if isinstance(part, Family) else None,
)
def test_a_setting_that_is_not_listed_is_refused(family: Family, key: str, value: object) -> None:
    """Key and value are named; null counts as absent, as in the files that transformers writes."""
    with pytest.raises(ModelError, match=key) as refusal:
        parse_config(config_of(family, **{key: value}), {})
    assert repr(value)[:20] in str(refusal.value)
    assert parse_config(config_of(family, **{key: None}), {}) == parse_config(config_of(family), {})


@EACH
def test_a_setting_of_rotary_positions_that_is_not_listed_is_refused(family: Family) -> None:
    """An unknown factor would stretch the positions otherwise."""
    with pytest.raises(ModelError, match=r"mrope_section \[8, 12\]|rope_parameters is"):
        parse_config(config_of(family, rope_parameters={"rope_type": "default", "mrope_section": [8, 12]}), {})


@EACH
def test_another_model_type_is_refused(family: Family) -> None:
    """The names must belong together."""
    with pytest.raises(ModelError, match=f"model_type is 'bert', {family.architecture} has '{family.model_type}'"):
        parse_config(config_of(family, model_type="bert"), {})


def test_a_window_that_no_sequence_reaches_is_none() -> None:
    """Null is none too, and silence is the default of 4096 tokens."""
    long = {"max_position_embeddings": 32768}
    for window in ({}, {"sliding_window": 4096}):
        kinds = parse_config(config_of(MISTRAL, **long, **window), {}).layers
        assert {kind.window for kind in kinds} == {4096}
    without = parse_config(config_of(MISTRAL, **long, sliding_window=None), {})
    assert parse_config(config_of(MISTRAL, **long, sliding_window=32768), {}) == without
    assert parse_config(config_of(MISTRAL, **long, sliding_window=4096), {}).for_context(4096) == without


def test_silence_about_the_window_of_qwen3_is_the_window_of_transformers() -> None:
    """Its class has a window of 4096 tokens from layer 28 on, if windows are used at all."""
    long = {"max_position_embeddings": 32768}
    assert parse_config(config_of(QWEN3, **long, use_sliding_window=True), {}) == parse_config(
        config_of(QWEN3, **long), {}
    )
    late = parse_config(config_of(QWEN3, **long, use_sliding_window=True, max_window_layers=1), {})
    assert [kind.window for kind in late.layers] == [0, 4096]
    with pytest.raises(ModelError, match="use_sliding_window is false"):
        parse_config(config_of(QWEN3, layer_types=["full_attention", "sliding_attention"]), {})
