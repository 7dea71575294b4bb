"""Grouped attention against the plain one, over a pool full of NaN wherever a sequence has nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ferrule_server.kernels.reference import AttentionRule
from ferrule_server.model.attention import GroupedAttention, PlainAttention, StepArrays

BLOCK_SIZE = 16
Seq = tuple[int, int]  # tokens in the pool before the step, rows of the step
_RULES = [
    AttentionRule(0.3, window, cap, chunk) for window, chunk in ((20, 0), (0, 33), (20, 33)) for cap in (0.0, 4.0)
]


def make_step(seqs: list[Seq], rng: np.random.Generator) -> tuple[StepArrays, int]:
    """Return a step over sequences with scattered blocks, and the number of blocks of its pool."""
    counts = [-(-(past + rows) // BLOCK_SIZE) for past, rows in seqs]
    ids = rng.permutation(np.arange(1, 1 + sum(counts)))
    tables = np.zeros((len(seqs), max(counts) + 2), np.int32)
    for table, count, end in zip(tables, counts, np.cumsum(counts), strict=True):
        table[:count] = ids[end - count : end]
    positions = [np.arange(past, past + rows) for past, rows in seqs]
    slots = [t[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for t, p in zip(tables, positions, strict=True)]
    step = StepArrays(
        positions=np.concatenate(positions).astype(np.int32),
        slot_mapping=np.concatenate(slots).astype(np.int32),
        cu_seqlens_q=np.concatenate(([0], np.cumsum([rows for _, rows in seqs]))).astype(np.int32),
        kv_lens=np.array([past + rows for past, rows in seqs], np.int32),
        block_tables=tables,
    )
    return step, 1 + sum(counts)


def make_pool(step: StepArrays, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a pool with random K and V at every sequence's positions and NaN everywhere else."""
    pool = torch.full(shape, float("nan"), dtype=dtype)
    for table, kv_len in zip(step.block_tables, step.kv_lens, strict=True):
        for index, block in enumerate(table[: -(-int(kv_len) // BLOCK_SIZE)]):
            used = min(BLOCK_SIZE, int(kv_len) - index * BLOCK_SIZE)
            pool[int(block), :, :, :, :used] = torch.randn(shape[1], 2, shape[3], used, shape[5]).to(dtype)
    return pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(8, 2, 10), (3, 3, 16), (16, 8, 64)], ids=["4to1", "1to1", "2to1-wide"])
@pytest.mark.parametrize(
    "seqs",
    [
        [(0, 1)],
        [(16, 1)] * 5,
        [(200, 1)] * 16,
        [(3, 1), (500, 1), (31, 1), (470, 1), (15, 1)],
        [(30, 5), (40, 5), (2, 5)],
        [(0, 300)],
        [(37, 129), (0, 17), (90, 1), (8, 128), (91, 1)],
    ],
    ids=["first", "equal", "many", "uneven", "verify", "prefill", "mixed"],
)
def test_grouped_attention_equals_the_plain_one(
    seqs: list[Seq], heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Outputs agree to rounding and the pools to the last bit, NaN included."""
    torch.manual_seed(4)
    num_heads, num_kv_heads, head_dim = heads
    step, num_blocks = make_step(seqs, np.random.default_rng(5))
    pool = make_pool(step, (num_blocks, 2, 2, num_kv_heads, BLOCK_SIZE, head_dim), dtype)
    pools = (pool, pool.clone())
    num_rows = len(step.positions)
    query, rule = (3 * torch.randn(num_rows, num_heads, head_dim)).to(dtype), AttentionRule(head_dim**-0.5)
    key, value = torch.randn(2, num_rows, num_kv_heads, head_dim).to(dtype)
    for layer in (0, 1):
        plain = PlainAttention(pools[0], step).attend(layer, query, (key, value), rule, sinks=None)
        grouped = GroupedAttention(pools[1], step, num_heads).attend(layer, query, (key, value), rule, sinks=None)
        tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(grouped, plain, rtol=tolerance, atol=tolerance)
        error = (grouped.float() - plain.float()).norm() / plain.float().norm()
        assert error < (6e-3 if dtype == torch.bfloat16 else 2e-6)
    assert torch.equal(pools[0].view(torch.uint8), pools[1].view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("rule", _RULES, ids=str)
@pytest.mark.parametrize(
    "seqs", [[(200, 1), (90, 1)], [(150, 5), (140, 5)], [(37, 300)]], ids=["step", "verify", "chunk"]
)
def test_windows_chunks_sinks_and_caps_equal_the_plain_ones(
    seqs: list[Seq], rule: AttentionRule, has_sinks: bool, dtype: torch.dtype
) -> None:
    """Blocks before all that a row sees may be given back: whatever the null block holds, no row sees it."""
    torch.manual_seed(8)
    sinks = (2 * torch.randn(4)).to(dtype) if has_sinks else None
    step, num_blocks = make_step(seqs, np.random.default_rng(9))
    pool = make_pool(step, (num_blocks, 1, 2, 2, BLOCK_SIZE, 8), dtype)
    num_rows = len(step.positions)
    query, (key, value) = torch.randn(num_rows, 4, 8).to(dtype), torch.randn(2, num_rows, 2, 8).to(dtype)
    whole = PlainAttention(pool.clone(), step).attend(0, query, (key, value), rule, sinks=sinks)
    for table, (past, _) in zip(step.block_tables, seqs, strict=True):
        first = max(past - past % (rule.chunk or past + 1), past + 1 - (rule.window or past + 1))
        table[: first // BLOCK_SIZE] = 0
    assert not step.block_tables.all()
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for made in (PlainAttention(pool.clone(), step), GroupedAttention(pool.clone(), step, 4)):
        found = made.attend(0, query, (key, value), rule, sinks=sinks)
        torch.testing.assert_close(found, whole, rtol=tolerance, atol=tolerance)


def test_a_sink_takes_weight_from_the_values_of_its_head() -> None:
    """With equal scores a row of three keys gives them 3 of 3 + e^sink parts of the weight."""
    step, num_blocks = make_step([(2, 1)], np.random.default_rng(3))
    pool = torch.zeros(num_blocks, 1, 2, 1, BLOCK_SIZE, 8)
    pool[:, :, 1] = 1.0
    sinks = torch.tensor([0.0, 2.0])
    query, key, value = torch.randn(1, 2, 8), torch.zeros(1, 1, 8), torch.ones(1, 1, 8)
    expected = (3 / (3 + sinks.exp())).view(1, 2, 1).expand(1, 2, 8).flatten(1)
    for made in (PlainAttention(pool.clone(), step), GroupedAttention(pool.clone(), step, 2)):
        found = made.attend(0, query, (key, value), AttentionRule(8**-0.5), sinks=sinks)
        torch.testing.assert_close(found, expected)
