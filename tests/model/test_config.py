"""config.json of both dialects becomes one ModelConfig; what would change the result unseen is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ferrule_server.errors import ModelError
from ferrule_server.model.config_reader import parse_config, read_config
from ferrule_server.model.rope import Llama3Scaling, Rope
from tests.configs import uniform_config, with_layers

BASE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 256, "hidden_act": "silu", "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA = {**BASE, "architectures": ["LlamaForCausalLM"], "head_dim": None}
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64)


def test_both_dialects_give_one_configuration() -> None:
    """What transformers 4 and 5 write about the same model reads the same."""
    old = {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **SCALING}, "torch_dtype": "bfloat16"}
    new = {**LLAMA, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **SCALING}, "dtype": "bfloat16"}
    assert parse_config(old, {}) == parse_config(new, {})
    assert parse_config(old, {}).layers[0].rope == Rope(5e5, num_pairs=8, width=16, scaling=LLAMA3)


@pytest.mark.parametrize("rope", [{}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}])
def test_plain_rope_is_understood_in_every_spelling(rope: dict[str, Any]) -> None:
    """No scaling, null and the type "default" mean the same."""
    (kind, _) = parse_config({**BASE, **rope}, {}).layers
    assert kind.rope == Rope(10_000.0, num_pairs=kind.head_dim // 2, width=kind.head_dim)


def test_silent_keys_get_the_defaults_of_transformers() -> None:
    """Without head_dim, kv heads, norm eps and tying, the values are those of the transformers classes."""
    silent = {key: value for key, value in LLAMA.items() if key not in {"num_key_value_heads", "rms_norm_eps"}}
    config = parse_config(silent, {})
    assert (config.head_dim, config.num_kv_heads, config.norm_eps, config.is_tied) == (16, 4, 1e-6, False)
    assert config.qk_norm == "none"
    assert parse_config({**BASE, "head_dim": None}, {}).head_dim == 128


@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [
        (3, {}, (3,)),
        (3, {"eos_token_id": [7, 8]}, (7, 8)),
        ([3, 4], {"eos_token_id": None}, (3, 4)),
        (None, {"eos_token_id": 9}, (9,)),
        (None, {}, ()),
    ],
)
def test_eos_ids_come_from_generation_config_first(config_eos: Any, generation: Any, expected: Any) -> None:
    """generation_config.json wins, config.json is the fallback, none is allowed."""
    assert parse_config({**BASE, "eos_token_id": config_eos}, generation).eos_ids == expected


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "architectures"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 1}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"rope_scaling": {"type": "mrope", "factor": 2.0}}, "mrope"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 1.0}}, "beta_fast"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 0}}, "factor"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "short_factor"),
        ({"rope_parameters": ["default"]}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor"),
        ({"rope_scaling": {"rope_type": "llama3", **SCALING, "low_freq_factor": 4.0}}, "high_freq_factor"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 31}, "head_dim"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"intermediate_size": None}, "intermediate_size"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_what_cannot_be_run_exactly_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    """One clear error names the key or the value; nothing is approximated."""
    with pytest.raises(ModelError, match=named):
        parse_config({**BASE, **change}, {})


def test_a_sliding_window_that_no_layer_uses_is_accepted() -> None:
    """Qwen3 writes sliding_window and max_window_layers even where every layer attends fully."""
    window = {"sliding_window": 64, "max_window_layers": 2}
    assert parse_config({**BASE, **window, "use_sliding_window": False}, {}) == parse_config(BASE, {})
    assert parse_config({**BASE, **window, "use_sliding_window": True}, {}) == parse_config(BASE, {})


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    """config.json missing, no JSON, or no object: each is a ModelError with the path."""
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="JSON object"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "eos_token_id": 1}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert read_config(tmp_path).eos_ids == (2,)


@pytest.mark.parametrize(
    ("windows", "chunks", "expected"),
    [
        ((0, 0), (0, 0), 0),
        ((8, 6), (0, 0), 8),
        ((0, 0), (8, 6), 8),
        ((8, 0), (0, 6), 8),
        ((8, 0), (0, 0), 0),
        ((0, 0), (8, 0), 0),
        ((8, 6), (5, 7), 6),
    ],
)
def test_chunks_bound_what_a_row_attends_to_as_windows_do(
    windows: tuple[int, int], chunks: tuple[int, int], expected: int
) -> None:
    """No row sees more than the last ``chunk`` tokens, and in a layer with both it sees the fewer."""
    kinds = zip(uniform_config(num_layers=2).layers, windows, chunks, strict=True)
    layers = tuple(replace(kind, window=window, chunk=chunk) for kind, window, chunk in kinds)
    assert replace(uniform_config(), layers=layers).attention_window == expected


def test_a_chunk_that_no_sequence_fills_is_none() -> None:
    """A sequence of 64 tokens is one chunk of 64."""
    config = with_layers(uniform_config(), chunk=64)
    assert config.for_context(64) == uniform_config()
    assert config.for_context(65) == config
