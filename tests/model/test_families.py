"""Each family against its configuration class in transformers: defaults, allow-list, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from ferrule_server.errors import ModelError
from ferrule_server.model.config import parse_config, read_config
from ferrule_server.model.families import FAMILIES
from ferrule_server.model.families.family import Family
from ferrule_server.model.families.mistral import MISTRAL
from ferrule_server.model.families.qwen3 import QWEN3

EACH = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
SIZES = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip


def config_of(family: Family, **changes: Any) -> dict[str, Any]:
    """Return a small config.json of a family."""
    return {"architectures": [family.architecture], "model_type": family.model_type, **SIZES, **changes}


@EACH
def test_a_configuration_of_transformers_loads(family: Family, tmp_path: Path) -> None:
    """What transformers saves for the defaults of a family is read, in full as in short, with the same meaning."""
    settings = {"sliding_window": None} if family is MISTRAL else {}  # version 0.2 and later
    config = transformers.AutoConfig.for_model(family.model_type, architectures=[family.architecture], **settings)
    config.save_pretrained(tmp_path)
    found = read_config(tmp_path)
    assert found == parse_config(json.loads(config.to_json_string(use_diff=False)), {})
    assert (found.vocab_size, found.num_layers) == (config.vocab_size, config.num_hidden_layers)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert (found.num_kv_heads, found.head_dim) == (config.num_key_value_heads, head_dim)
    assert (found.norm_eps, found.max_positions) == (config.rms_norm_eps, config.max_position_embeddings)


def assert_silence_has_their_meaning(family: Family) -> None:
    """Compare a config.json that is silent with what the family's class in transformers assumes."""
    config = transformers.AutoConfig.for_model(family.model_type, **SIZES)
    theirs = {**config.to_dict(), "rope_theta": config.rope_parameters["rope_theta"]}
    for key in family.defaults.keys() - {"head_dim", "layer_types", "sliding_window"}:
        assert theirs[key] == family.defaults[key], key
    silent = config_of(family, eos_token_id=5)
    assert parse_config(silent, {}) == parse_config({**theirs, **silent}, {})


@EACH
def test_silence_means_what_transformers_assumes(family: Family) -> None:
    """Every default of a family is that of its class."""
    assert_silence_has_their_meaning(family)


@EACH
@pytest.mark.parametrize(
    ("key", "value"),
    [
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
        ("auto_map", {"AutoModelForCausalLM": "modeling.Other"}),
        ("a_setting_of_tomorrow", 0),
        ("use_sliding_window", True),
    ],
)
def test_a_setting_that_is_not_listed_is_refused(family: Family, key: str, value: object) -> None:
    """Key and value are named; null counts as absent, as in the files that transformers writes."""
    window = {"max_window_layers": 1} if "max_window_layers" in family.defaults else {}
    with pytest.raises(ModelError, match=key.replace("use_", "")) as refusal:
        parse_config(config_of(family, **window, **{key: value}), {})
    assert repr(value)[:20] in str(refusal.value) or key == "use_sliding_window"
    assert parse_config(config_of(family, **{key: None}), {}) == parse_config(config_of(family), {})


@EACH
def test_a_setting_of_rotary_positions_that_is_not_listed_is_refused(family: Family) -> None:
    """An unknown factor would stretch the positions otherwise."""
    with pytest.raises(ModelError, match=r"rope_parameters has mrope_section \[8, 12\]"):
        parse_config(config_of(family, rope_parameters={"rope_type": "default", "mrope_section": [8, 12]}), {})


@EACH
def test_another_model_type_is_refused(family: Family) -> None:
    """The names must belong together."""
    with pytest.raises(ModelError, match=f"model_type is 'gemma2', {family.architecture} has '{family.model_type}'"):
        parse_config(config_of(family, model_type="gemma2"), {})


def test_a_window_of_mistral_is_refused_where_it_has_an_effect() -> None:
    """One that no sequence reaches has none, null is none, and silence is the default of 4096 tokens."""
    long = {"max_position_embeddings": 32768}
    for window in ({}, {"sliding_window": 4096}):
        with pytest.raises(ModelError, match=r"sliding_window is 4096 .* With max_position_embeddings 4096"):
            parse_config(config_of(MISTRAL, **long, **window), {})
    without = parse_config(config_of(MISTRAL, **long, sliding_window=None), {})
    assert parse_config(config_of(MISTRAL, **long, sliding_window=32768), {}) == without
    assert parse_config(config_of(MISTRAL, max_position_embeddings=4096), {}).max_positions == 4096


def test_silence_about_the_window_of_qwen3_is_the_window_of_transformers() -> None:
    """Its class has a window of 4096 tokens from layer 28 on, if windows are used at all."""
    assert parse_config(config_of(QWEN3, use_sliding_window=True), {}) == parse_config(config_of(QWEN3), {})
    with pytest.raises(ModelError, match="sliding_window is 4096"):
        parse_config(config_of(QWEN3, use_sliding_window=True, max_window_layers=1), {})
