"""Generate, Forward and Warmup over a real model in torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.make_random_model import write_model
from ferrule_server.engine.jobs import OutputRequest, Pooling, WarmupJob, WarmupResult
from ferrule_server.executor.base import OutputSpec
from ferrule_server.executor.torch import TorchExecutor
from ferrule_server.model.weights import load_model
from tests.engine.harness import Harness
from tests.engine.streams import forward, start

PROMPT = tuple((11 * i + 5) % 100 for i in range(37))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3."""
    path = tmp_path_factory.mktemp("tiny")
    write_model(path, "tiny")
    return path


@pytest.fixture
def harness(folder: Path) -> Iterator[Harness]:
    """An engine over it, whose pool is NaN from end to end, so that any stray read shows."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    executor = TorchExecutor(load_model(folder, dtype="float32"), kv_memory_bytes=4 << 20, max_context=256)
    blocks = np.arange(executor.info.num_blocks, dtype=np.int32)
    executor.write_blocks(blocks, np.full((len(blocks), executor.info.bytes_per_block), 0xFF, np.uint8))
    with Harness(executor) as made:  # type: ignore[arg-type]
        yield made
    torch.set_num_threads(num_threads)


def test_forward_gives_the_rows_of_a_prefill_and_leaves_nothing(harness: Harness) -> None:
    """Logits of all positions in chunks, and the mean of the hidden states."""
    output = OutputRequest(OutputSpec(full_logits=True, hidden_state=True), all_positions=True)
    whole = harness.prefill(*PROMPT, output=output)
    harness.release(whole.handle)
    frames = start(harness, forward(*PROMPT, output=output, pooling=Pooling.MEAN, chunk_rows=10)).forward()
    rows = [row for frame in frames for row in frame.rows]
    for mine, theirs in zip(rows, whole.rows, strict=True):
        assert mine.logits is not None
        assert theirs.logits is not None
        np.testing.assert_allclose(mine.logits, theirs.logits, atol=1e-4)
    hidden = np.stack([row.hidden_state for row in whole.rows if row.hidden_state is not None])
    pooled = frames[-1].pooled
    assert pooled is not None
    np.testing.assert_allclose(pooled, hidden.astype(np.float64).mean(axis=0).astype(np.float32), atol=1e-5)
    assert len(harness.store.registry) == 0


def test_a_warm_up_leaves_the_pool_as_it_is(harness: Harness) -> None:
    """It reads the null block, which may hold anything; what is computed afterwards is what it was."""
    before = harness.prefill(*PROMPT)
    blocks = np.arange(1, harness.executor.info.num_blocks, dtype=np.int32)
    data = harness.executor.read_blocks(blocks)
    result = harness.answer(WarmupResult, WarmupJob("admin", (1, 3)))
    assert [step[:2] for step in result.steps] == [(1, 1), (3, 3), (2, 512)]
    np.testing.assert_array_equal(harness.executor.read_blocks(blocks), data)
    assert before.rows[0].token is not None
    harness.decode(before.handle, before.rows[0].token)


@pytest.mark.parametrize("length", [16, 17, 32, 33, 97, 160])
def test_a_prefix_hit_changes_logits_by_rounding_alone(harness: Harness, length: int) -> None:
    """float32: fewer rows are summed in another order, so up to 2e-6 of logits about 2; of the pool's NaN nothing."""
    full = OutputRequest(OutputSpec(full_logits=True, greedy=True))
    tokens = tuple((7 * i + length) % 100 for i in range(length))
    cold = harness.prefill(*tokens, output=full)
    hit = harness.prefill(*tokens, output=full)
    assert (cold.cached_tokens, hit.cached_tokens) == (0, length // 16 * 16)
    expected, logits = cold.rows[0].logits, hit.rows[0].logits
    assert expected is not None
    assert logits is not None
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-6)
    assert hit.rows[0].token == cold.rows[0].token
