"""The numbers of trained weights are those of transformers in float32, in torch and in the processor's kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from benchmarks.cpu.sides import open_side
from ferrule_server.executor.base import Executor, Float32Array, OutputSpec
from ferrule_server.executor.torch import TorchExecutor
from ferrule_server.model.weights import load_model
from ferrule_server.text.tokenizer import Tokenizer
from tests.model.stepping import Piece, PooledSequence, Stepper
from tests.models_real.conftest import NUM_TOKENS

pytestmark = pytest.mark.real_model

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "Water boils at 100 degrees Celsius, which is",
    "The three laws of motion were published by",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "1, 1, 2, 3, 5, 8, 13,",
    "Ingredients:\n- 2 eggs\n- 100 g flour\n",
]
NUM_GREEDY = 64
MAX_CONTEXT = 640


@pytest.fixture(scope="module")
def oracle(path: Path) -> Any:  # Any: transformers has no types
    """The model in transformers, which reads the file by its own code and that of the package gguf, in float32."""
    read: Any = load_gguf_checkpoint
    make: Any = AutoModelForCausalLM
    empty = make.from_config(AutoConfig.for_model(**read(path)["config"]), dtype=torch.float32)
    tensors = read(path, return_tensors=True, model_to_load=empty)["tensors"]
    missing, unexpected = empty.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])  # the head is the embedding
    return empty.eval()


@pytest.fixture(scope="module")
def executor(path: Path) -> Iterator[TorchExecutor]:
    """Torch, float32."""
    model = load_model(path, dtype="float32")
    executor = TorchExecutor(model, kv_memory_bytes=128 << 20, max_context=MAX_CONTEXT)
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def expected(oracle: Any, texts: list[list[int]]) -> list[Float32Array]:
    """For each text, transformers' log-probability of every token but the first."""
    return [_of_transformers(oracle, token_ids) for token_ids in texts]


def _of_transformers(oracle: Any, token_ids: list[int]) -> Float32Array:
    with torch.inference_mode():
        logprobs = oracle(torch.tensor([token_ids[:-1]])).logits[0].log_softmax(-1)
    found: Float32Array = logprobs[torch.arange(len(token_ids) - 1), torch.tensor(token_ids[1:])].numpy()
    return found


def target_logprobs(executor: Executor, token_ids: Sequence[int]) -> Float32Array:
    """Return the log-probability of every token but the first, float32 [len(token_ids) - 1], by one step each 100."""
    stepper, seq = Stepper(executor), PooledSequence()
    rows: list[float | None] = []
    for begin in range(0, len(token_ids) - 1, 100):
        targets = token_ids[begin + 1 : begin + 101]
        batch = stepper.batch(Piece(seq, token_ids[begin : begin + len(targets)], num_outputs=len(targets)))
        specs = tuple(OutputSpec(target_id=target) for target in targets)
        rows += [row.target_logprob for row in executor.run(replace(batch, output_specs=specs)).rows]
    return np.array(rows, np.float32)


def test_logprobs_of_a_thousand_tokens_are_those_of_transformers(
    executor: TorchExecutor, texts: list[list[int]], expected: list[Float32Array]
) -> None:
    """Each within 1e-4, in float32."""
    assert [len(logprobs) for logprobs in expected] == [NUM_TOKENS] * 2
    for token_ids, logprobs in zip(texts, expected, strict=True):
        np.testing.assert_allclose(target_logprobs(executor, token_ids), logprobs, rtol=0, atol=1e-4)


def test_greedy_texts_are_those_of_transformers(executor: TorchExecutor, oracle: Any, tokenizer: Tokenizer) -> None:
    """64 tokens after 8 prompts, here all in one batch."""
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    sequences = [PooledSequence() for _ in prompts]
    stepper, said = Stepper(executor), [list[int]() for _ in prompts]
    fed = prompts
    for _ in range(NUM_GREEDY):
        pieces = [Piece(seq, ids, spec=OutputSpec(greedy=True)) for seq, ids in zip(sequences, fed, strict=True)]
        fed = [[row.token] for row in stepper.run(*pieces) if row.token is not None]
        said = [[*tokens, *drawn] for tokens, drawn in zip(said, fed, strict=True)]
    for prompt, tokens in zip(prompts, said, strict=True):
        assert tokens == _greedy_of_transformers(oracle, prompt)


def _greedy_of_transformers(oracle: Any, prompt: list[int]) -> list[int]:
    """Return what it says; the end token does not end it."""
    settings = {"max_new_tokens": NUM_GREEDY, "min_new_tokens": NUM_GREEDY, "do_sample": False}
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        drawn = oracle.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=[], **settings)
    found: list[int] = drawn[0, len(prompt) :].tolist()
    return found


def test_packed_kernels_cost_a_thousandth_of_the_loss_at_most(
    path: Path, texts: list[list[int]], expected: list[Float32Array]
) -> None:
    """The mean loss of the processor's kernels, which keep the blocks of the file, beside transformers' in float32."""
    side = open_side("numba-cpu", path, 2 * MAX_CONTEXT, MAX_CONTEXT, 2)
    try:
        losses = [-target_logprobs(side.executor, token_ids).mean() for token_ids in texts]
    finally:
        side.close()
    exact = -np.mean(expected)
    assert np.mean(losses) == pytest.approx(exact, rel=1e-3)
