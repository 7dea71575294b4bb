"""Rotary frequencies against the functions of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ferrule_server.executor.torch import TorchExecutor
from ferrule_server.model.config_reader import parse_config
from ferrule_server.model.rope import Rope, rotation_table, stored_order
from ferrule_server.model.weights import load_model
from tests.model.conftest import CASES, make_example
from tests.model.stepping import Piece, PooledSequence, Stepper
from tests.model.test_decoder import assert_close

SIZES: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 512, "pad_token_id": 0, "eos_token_id": 5,
}  # fmt: skip
LISTS: dict[str, Any] = {
    "short_factor": [1.0 + 0.1 * i for i in range(16)],
    "long_factor": [2.0 + 0.5 * i for i in range(16)],
}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn without a factor": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 64},
    "yarn, every setting": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 20.0,
        "beta_slow": 2.0, "mscale": 0.9, "mscale_all_dim": 0.6, "truncate": False,
    },
    "yarn, its magnitude": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "attention_factor": 1.7,
    },
    "longrope": {"rope_type": "longrope", **LISTS, "original_max_position_embeddings": 64},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("seq_len", [64, 512])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_magnitudes_equal_transformers(name: str, seq_len: int) -> None:
    """Of every kind of scaling, for a server of short and of long sequences."""
    settings = {"rope_theta": 1000.0, **SCALINGS[name]}
    family = "phi3" if name == "proportional" else "llama"
    architecture = {"phi3": "Phi3ForCausalLM", "llama": "LlamaForCausalLM"}[family]
    raw = {**SIZES, "architectures": [architecture], "rope_parameters": settings}
    (kind,) = parse_config(raw, {}).for_context(seq_len).layers
    theirs = transformers.LlamaConfig(**SIZES, rope_parameters=dict(settings))
    found, magnitude = ROPE_INIT_FUNCTIONS[settings["rope_type"]](theirs, "cpu", seq_len=seq_len)
    frequencies, magnitudes = rotation_table(kind.rope, 32)
    torch.testing.assert_close(frequencies, found, rtol=1e-6, atol=0)
    rotated = found != 0
    torch.testing.assert_close(magnitudes[rotated], torch.full_like(found[rotated], magnitude))


def test_a_pair_that_stays_keeps_its_length() -> None:
    """Magnitudes are for rotated pairs only: the others pass as they are."""
    rope = Rope(100.0, num_pairs=2, width=4)
    assert rotation_table(rope, 12)[0].tolist()[2:] == [0.0] * 4
    assert rotation_table(None, 12).tolist() == [[0.0] * 6, [1.0] * 6]


def test_the_order_of_a_head_brings_pairs_half_a_head_apart() -> None:
    """Row i and row i + half of the server are the pair i of the checkpoint, rotated pairs first."""
    assert stored_order(Rope(1e4, 4, 8), 8) is None
    assert stored_order(Rope(1e4, 2, 8), 8) is None  # the slowest pairs stay: nothing moves
    assert stored_order(Rope(1e4, 4, 8, is_interleaved=True), 8) == [0, 2, 4, 6, 1, 3, 5, 7]
    assert stored_order(Rope(1e4, 2, 4), 8) == [0, 1, 4, 5, 2, 3, 6, 7]
    assert stored_order(Rope(1e4, 1, 2, is_interleaved=True), 6) == [0, 2, 3, 1, 4, 5]


@pytest.mark.parametrize(
    ("case", "scaling", "longest"),
    [
        ("llama-linear-rope", {"rope_type": "linear", "factor": 4.0}, 96),
        ("qwen2-gqa-7to1-tied", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}, 96),
        ("qwen3-gqa-4to1-tied", {"rope_type": "yarn", "factor": 5.0, "original_max_position_embeddings": 20}, 100),
    ],
)
def test_logits_beyond_the_stated_length_equal_transformers(
    case: str, scaling: dict[str, Any], longest: int, tmp_path: Path
) -> None:
    """Of files whose ``max_position_embeddings`` is the length before the scaling, up to the last token."""
    rope = {"rope_theta": 10_000.0, **scaling}
    settings = {**CASES[case], "max_position_embeddings": 24, "rope_parameters": rope}
    example = make_example(settings, tmp_path)
    model = load_model(tmp_path, dtype="float32")
    assert model.config.max_positions == longest
    prompt = [int(token) for token in np.random.default_rng(5).integers(0, settings["vocab_size"], longest)]
    executor = TorchExecutor(model, kv_memory_bytes=4 << 20, max_context=longest)
    try:
        found = Stepper(executor).logits(Piece(PooledSequence(), prompt, num_outputs=longest))
    finally:
        executor.close()
    assert_close(found, example.logits(prompt))
