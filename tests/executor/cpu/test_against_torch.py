"""The kernels compute what the torch executor computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ferrule_server.executor.base import Executor, Float32Array
from ferrule_server.executor.torch import TorchExecutor
from ferrule_server.model.weights import DTypeName, load_model
from ferrule_server.text.tokenizer import Tokenizer
from tests.executor.cpu.models import (
    DEMO,
    KERNEL_SETS,
    KV_BYTES,
    kernel_set_name,
    running,
    write_awkward,
    write_tiny,
)
from tests.model.stepping import Piece, PooledSequence, Stepper

TEXT = (Path(__file__).parents[3] / "LICENSE").read_text()
"""It never changes: another text has other positions at which two tokens are nearly as likely."""


def torch_executor(folder: Path, dtype: DTypeName, *, is_plain: bool = False) -> TorchExecutor:
    """Return the oracle."""
    model = load_model(folder, dtype=dtype)
    return TorchExecutor(model, kv_memory_bytes=KV_BYTES, max_context=1024, is_plain=is_plain)


def all_logits(executor: Executor, *prompts: list[int]) -> Float32Array:
    """Return the logits of all positions of some prompts, run in one step, and of a decode after each."""
    stepper = Stepper(executor)
    seqs = [PooledSequence() for _ in prompts]
    chunks = [Piece(seq, prompt, num_outputs=len(prompt)) for seq, prompt in zip(seqs, prompts, strict=True)]
    return np.concatenate((stepper.logits(*chunks), stepper.logits(*(Piece(seq, [7]) for seq in seqs))))


@pytest.mark.parametrize("write", [write_tiny, write_awkward])
def test_float32_logits_equal_plain_torch(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    """Only the order of sums differs: 1e-4 of logits with a standard deviation near 1."""
    folder = write(tmp_path / "model")
    prompts = [list(range(3, 803)), [9], list(range(40, 57))]
    expected = all_logits(torch_executor(folder, "float32", is_plain=True), *prompts)
    with running(folder, "float32") as executor:
        assert executor.info.kernel_set == "fma-f32/1"
        found = all_logits(executor, *prompts)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * float(expected.std()) + 2e-5)


@pytest.mark.parametrize("kernels", KERNEL_SETS, ids=kernel_set_name)
def test_bfloat16_greedy_tokens_equal_torch(kernels: tuple[str, bool]) -> None:
    """Where the float32 gap between the two best logits exceeds 0.1, which is so at 9 of 10 positions of a text."""
    tokenizer = Tokenizer.load(DEMO)
    assert tokenizer is not None
    prompt = tokenizer.encode(TEXT)[:400]
    exact = all_logits(torch_executor(DEMO, "float32"), prompt)
    rounded = all_logits(torch_executor(DEMO, "bfloat16"), prompt)
    with running(DEMO, "bfloat16", kernels) as executor:
        found = all_logits(executor, prompt)
    two_best = np.sort(exact, axis=1)[:, -2:]
    is_clear = two_best[:, 1] - two_best[:, 0] > 0.1
    assert is_clear.mean() >= 0.9, is_clear.mean()
    np.testing.assert_array_equal(found.argmax(1)[is_clear], rounded.argmax(1)[is_clear])
    assert np.abs(found - exact).max() <= np.abs(rounded - exact).max() * 1.5
