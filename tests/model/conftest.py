"""Random models of awkward shapes, made and saved by transformers, loaded by our loader."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from ferrule_server.executor.base import Float32Array
from ferrule_server.executor.torch import TorchExecutor
from ferrule_server.model.weights import DTypeName, load_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

CASES: dict[str, dict[str, Any]] = {
    "qwen3-gqa-4to1-tied": {
        "family": "Qwen3", "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 10, "tie_word_embeddings": True,
    },
    "qwen3-gqa-1to1-untied": {
        "family": "Qwen3", "vocab_size": 131, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 2,
        "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16, "attention_bias": True,
    },
    "llama-gqa-4to1-tied-llama3-rope": {
        "family": "Llama", "vocab_size": 113, "hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 1, "tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE,
    },
    "llama-gqa-1to1-untied-biases": {
        "family": "Llama", "vocab_size": 101, "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 22, "attention_bias": True, "mlp_bias": True,
    },
    "qwen2-gqa-7to1-tied": {
        "family": "Qwen2", "vocab_size": 103, "hidden_size": 56, "intermediate_size": 76, "num_hidden_layers": 2,
        "num_attention_heads": 7, "num_key_value_heads": 1, "tie_word_embeddings": True, "max_window_layers": 1,
    },
    "mistral-gqa-3to1-untied": {
        "family": "Mistral", "vocab_size": 107, "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12, "sliding_window": None,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Example:
    """A random model on disk and the same model in transformers, float32."""

    folder: Path
    oracle: Any
    greedy_cache: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def logits(self, token_ids: list[int], dtype: torch.dtype = torch.float32) -> Float32Array:
        """Return transformers' logits of every position, float32 [length, vocab_size]."""
        oracle = self.oracle if dtype == torch.float32 else copy.deepcopy(self.oracle).to(dtype)
        with torch.inference_mode():
            logits: Float32Array = oracle(torch.tensor([token_ids])).logits[0].float().numpy()
        return logits

    def greedy(self, token_ids: list[int], count: int) -> list[int]:
        """Return the next ``count`` tokens of transformers, its own cache decoding one by one."""
        key = (*token_ids, count)
        if key not in self.greedy_cache:
            self.greedy_cache[key] = self._decode(token_ids, count)
        return self.greedy_cache[key]

    def _decode(self, token_ids: list[int], count: int) -> list[int]:
        produced: list[int] = []
        step, cache = torch.tensor([token_ids]), None
        with torch.inference_mode():
            for _ in range(count):
                out = self.oracle(step, past_key_values=cache, use_cache=True)
                step, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
                produced.append(int(step))
        return produced


def make_example(case: dict[str, Any], folder: Path) -> Example:
    """Save a random model whose norms and biases are random too, so that no two tensors could be swapped unseen."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    settings = {"max_position_embeddings": 512, "eos_token_id": 5, **case}
    family = settings.pop("family")
    config = getattr(transformers, f"{family}Config")(**settings)
    torch.manual_seed(20)
    oracle = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.2 if parameter.ndim == 1 else 2.0 * parameter.shape[1] ** -0.5)
    oracle.save_pretrained(folder)
    return Example(folder, oracle)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Small shapes gain nothing from threads, and barriers cost much on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session", params=CASES, ids=list(CASES))
def example(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Example:
    """One of the awkward shapes."""
    return make_example(CASES[request.param], tmp_path_factory.mktemp("model"))


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
