"""Random models of awkward shapes, made and saved by transformers, loaded by our loader."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from ferrule_server.executor.base import Float32Array
from ferrule_server.executor.torch import TorchExecutor
from ferrule_server.model.weights import DTypeName, load_model
from tests.model.dense_families import DENSE, DENSE_CASES, dense_families_known, make_dense

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

YARN_ROPE = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 24,
}  # fmt: skip
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [1.5, 2.5, 4.0, 6.0], "original_max_position_embeddings": 1,
    "attention_factor": 1.3,
}  # fmt: skip

CASES: dict[str, dict[str, Any]] = {
    "qwen3-gqa-4to1-tied": {
        "family": "Qwen3", "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 10, "tie_word_embeddings": True,
    },
    "qwen3-gqa-1to1-untied": {
        "family": "Qwen3", "vocab_size": 131, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2,
        "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16, "attention_bias": True,
    },
    "qwen3-yarn-late-windows": {
        "family": "Qwen3", "vocab_size": 109, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rope_parameters": YARN_ROPE,
        "use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1,
    },
    "llama-gqa-4to1-tied-llama3-rope": {
        "family": "Llama", "vocab_size": 113, "hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE,
    },
    "llama-gqa-1to1-untied-biases": {
        "family": "Llama", "vocab_size": 101, "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 22, "attention_bias": True, "mlp_bias": True,
    },
    "llama-linear-rope": {
        "family": "Llama", "vocab_size": 101, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0},
    },
    "qwen2-gqa-7to1-tied": {
        "family": "Qwen2", "vocab_size": 103, "hidden_size": 56, "intermediate_size": 76, "num_hidden_layers": 2,
        "num_attention_heads": 7, "num_key_value_heads": 1, "tie_word_embeddings": True, "max_window_layers": 1,
    },
    "qwen2-moe-shared-gate": {
        "family": "Qwen2Moe", "vocab_size": 103, "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 7, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "mlp_only_layers": [1],
    },
    "qwen3-moe": {
        "family": "Qwen3Moe", "vocab_size": 103, "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 9, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "norm_topk_prob": True, "decoder_sparse_step": 2, "tie_word_embeddings": True,
    },
    "mistral-gqa-3to1-untied": {
        "family": "Mistral", "vocab_size": 107, "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12, "sliding_window": None,
    },
    "mistral-window": {
        "family": "Mistral", "vocab_size": 107, "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12, "sliding_window": 9,
    },
    "ministral-window-by-layer": {
        "family": "Ministral", "vocab_size": 107, "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 3,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12, "sliding_window": 10,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "ministral3-growing-queries": {
        "family": "Ministral3", "vocab_size": 107, "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12,
        "rope_parameters": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.7, "llama_4_scaling_beta": 0.3},
    },
    "gemma2-window-softcap": {
        "family": "Gemma2", "vocab_size": 103, "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 14, "sliding_window": 12,
        "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 9.0,
    },
    "gemma3-two-ropes": {
        "family": "Gemma3", "vocab_size": 103, "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 14, "sliding_window": 12,
        "query_pre_attn_scalar": 20, "sliding_window_pattern": 2, "pad_token_id": 0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "gemma4-shared-kv-second-embedding": {
        "family": "Gemma4", "vocab_size": 103, "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 24, "sliding_window": 12,
        "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 103, "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 3, "use_double_wide_mlp": True,
        "final_logit_softcapping": 20.0,
    },
    "gemma4-values-are-keys": {
        "family": "Gemma4", "vocab_size": 103, "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 24, "sliding_window": 12,
        "num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "phi3-longrope-partial": {
        "family": "Phi3", "vocab_size": 103, "hidden_size": 64, "intermediate_size": 60, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": LONG_ROPE,
        "original_max_position_embeddings": 1, "pad_token_id": 0, "sliding_window": 30,
    },
    "smollm3-nope-every-other": {
        "family": "SmolLM3", "vocab_size": 103, "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "no_rope_layer_interval": 2, "pad_token_id": 0,
    },
    "olmo2": {
        "family": "Olmo2", "vocab_size": 103, "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
    "olmo3-windows": {
        "family": "Olmo3", "vocab_size": 103, "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 12,
        "rope_parameters": {
            "full_attention": YARN_ROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    },
    "glm-interleaved-half": {
        "family": "Glm", "vocab_size": 103, "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "pad_token_id": 0,
    },
    "glm4-interleaved-half": {
        "family": "Glm4", "vocab_size": 103, "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "pad_token_id": 0,
    },
    "granite-multipliers": {
        "family": "Granite", "vocab_size": 103, "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "attention_multiplier": 0.4, "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6, "logits_scaling": 4.0,
    },
    "cohere2-parallel": {
        "family": "Cohere2", "vocab_size": 103, "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 12, "logit_scale": 0.3,
    },
    "starcoder2-layernorm": {
        "family": "Starcoder2", "vocab_size": 103, "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 14,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Example:
    """A random model on disk and the same model in transformers, float32."""

    folder: Path
    oracle: Any

    def logits(self, token_ids: list[int], dtype: torch.dtype = torch.float32) -> Float32Array:
        """Return transformers' logits of every position, float32 [length, vocab_size]."""
        oracle = self.oracle if dtype == torch.float32 else copy.deepcopy(self.oracle).to(dtype)
        with torch.inference_mode():
            logits: Float32Array = oracle(torch.tensor([token_ids])).logits[0].float().numpy()
        return logits


def make_example(case: dict[str, Any], folder: Path) -> Example:
    """Save a random model whose norms and biases are random too, so that no two tensors could be swapped unseen."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if case["family"] in DENSE:
        return Example(folder, make_dense(case, folder, randomise))
    settings = {"max_position_embeddings": 512, "eos_token_id": 5, **case}
    family = settings.pop("family")
    config = _config_class(family)(**settings, attn_implementation="eager")
    torch.manual_seed(20)
    oracle = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    randomise(oracle)
    oracle.save_pretrained(folder)
    return Example(folder, oracle)


def randomise(oracle: Any) -> None:
    """Give a model random weights at which every feature matters."""
    with torch.no_grad():
        for buffer_name, buffer in oracle.named_buffers():
            if buffer_name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
        for name, parameter in oracle.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("sinks"):
                parameter.uniform_(0.0, 4.0)
            else:
                parameter.normal_(std=0.2 if parameter.ndim == 1 else 2.0 * parameter.shape[1] ** -0.5)


def _config_class(family: str) -> Any:
    return getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Have torch use one thread: small shapes gain nothing from more, and barriers cost much on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="package", autouse=True)
def dense_families() -> Iterator[None]:
    """Have the loader know the families that only tests have."""
    with dense_families_known():
        yield


@pytest.fixture(scope="session", params=[*CASES, *DENSE_CASES])
def example(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Example:
    """One of the awkward shapes."""
    return make_example({**CASES, **DENSE_CASES}[request.param], tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Example:
    """The first of the awkward shapes."""
    return make_example(CASES["qwen3-gqa-4to1-tied"], tmp_path_factory.mktemp("model"))


@pytest.fixture
def new_executor() -> Iterator[Callable[..., TorchExecutor]]:
    """Make executors whose pool, null block included, is NaN from end to end, so that any stray read shows."""
    made: list[TorchExecutor] = []

    def make(folder: Path, dtype: DTypeName = "float32", **settings: Any) -> TorchExecutor:
        settings = {"kv_memory_bytes": 4 << 20, "max_context": 512, "block_size": 16, **settings}
        executor = TorchExecutor(load_model(folder, dtype=dtype), **settings)
        all_blocks = np.arange(executor.info.num_blocks, dtype=np.int32)
        executor.write_blocks(all_blocks, np.full((len(all_blocks), executor.info.bytes_per_block), 0xFF, np.uint8))
        made.append(executor)
        return executor

    yield make
    for executor in made:
        executor.close()
