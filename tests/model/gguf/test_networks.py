"""Each architecture of GGUF against transformers, by the tests of the families' folders, with random weights."""

from __future__ import annotations

from typing import Any, Final

import pytest

from tests.model.conftest import CASES, Example, make_example
from tests.model.gguf.writing import write_gguf
from tests.model.test_decoder import (
    test_a_prompt_in_chunks_equals_transformers,
    test_bfloat16_is_as_exact_as_transformers_in_bfloat16,
    test_logits_of_a_whole_prefill_equal_transformers,
    test_mixed_batch_of_forked_sequences_equals_transformers,
)

__all__ = [
    "test_a_prompt_in_chunks_equals_transformers",
    "test_bfloat16_is_as_exact_as_transformers_in_bfloat16",
    "test_logits_of_a_whole_prefill_equal_transformers",
    "test_mixed_batch_of_forked_sequences_equals_transformers",
]

ARCHITECTURES: Final[dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]]] = {
    "llama, divisors of frequencies": ("llama", "llama-gqa-4to1-tied-llama3-rope", {}, {}),
    "llama, biases": ("llama", "llama-gqa-1to1-untied-biases", {}, {}),
    "llama, linear": ("llama", "llama-linear-rope", {}, {}),
    "llama, Mistral": ("llama", "mistral-gqa-3to1-untied", {}, {}),
    "mistral3": (
        "mistral3", "ministral3-growing-queries", {},
        {"rope.scaling.yarn_log_multiplier": 0.7, "attention.temperature_scale": 0.3},
    ),
    "qwen2": ("qwen2", "qwen2-gqa-7to1-tied", {}, {}),
    "qwen3, tied": ("qwen3", "qwen3-gqa-4to1-tied", {}, {}),
    "qwen3, biases": ("qwen3", "qwen3-gqa-1to1-untied", {}, {}),
    "qwen3, yarn": ("qwen3", "qwen3-yarn-late-windows", {"use_sliding_window": False}, {}),
    "qwen2moe": (
        "qwen2moe", "qwen2-moe-shared-gate", {"mlp_only_layers": None},
        {
            "expert_count": 7, "expert_used_count": 3, "expert_feed_forward_length": 24,
            "expert_shared_feed_forward_length": 40,
        },
    ),
    "qwen3moe": (
        "qwen3moe", "qwen3-moe", {"decoder_sparse_step": 1},
        {
            "expert_count": 9, "expert_used_count": 2, "expert_feed_forward_length": 24,
            "expert_shared_feed_forward_length": 0,
        },
    ),
    "gemma2": (
        "gemma2", "gemma2-window-softcap", {"query_pre_attn_scalar": 14},
        {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 9.0, "attention.sliding_window": 12},
    ),
    "gemma3": (
        "gemma3", "gemma3-two-ropes", {"query_pre_attn_scalar": 14, "num_hidden_layers": 7},
        {"attention.sliding_window": 12, "attention.sliding_window_pattern": 2, "rope.freq_base_swa": 100.0},
    ),
    "phi3": (
        "phi3", "phi3-longrope-partial", {},
        {
            "rope.scaling.attn_factor": 1.3, "rope.scaling.original_context_length": 1, "attention.sliding_window": 30,
        },
    ),
    "smollm3": ("smollm3", "smollm3-nope-every-other", {"no_rope_layer_interval": 4}, {}),
    "olmo2": ("olmo2", "olmo2", {}, {}),
    "olmo2, windows": (
        "olmo2", "olmo3-windows", {},
        {"attention.sliding_window": 12, "attention.sliding_window_pattern": [True, True, True, False]},
    ),
    "chatglm": ("chatglm", "glm-interleaved-half", {}, {}),
    "glm4": ("glm4", "glm4-interleaved-half", {}, {}),
    "granite": (
        "granite", "granite-multipliers", {},
        {"attention.scale": 0.4, "embedding_scale": 3.0, "residual_scale": 0.6, "logit_scale": 4.0},
    ),
    "cohere2": (
        "cohere2", "cohere2-parallel", {},
        {"attention.sliding_window": 12, "logit_scale": 0.3, "rope.scaling.type": "none"},
    ),
    "starcoder2": ("starcoder2", "starcoder2-layernorm", {"sliding_window": None}, {}),
}  # fmt: skip
"""For each name: the architecture, a case of the families, its changes, and more keys of the file."""


@pytest.fixture(scope="module", params=ARCHITECTURES)
def example(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Example:
    """A model in a GGUF file."""
    arch, case, changes, keys = ARCHITECTURES[request.param]
    folder = tmp_path_factory.mktemp("model")
    made = make_example({**CASES[case], **changes}, folder)
    path = folder / "tiny-F32.gguf"
    write_gguf(path, arch, made.oracle, keys)
    return Example(path, made.oracle)
