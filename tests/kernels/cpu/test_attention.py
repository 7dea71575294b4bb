"""Paged attention against ``kernels/reference.py``: many lengths and shapes, rows of one sequence, shared tiles."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest
import torch
from numba import njit

from ferrule_server.executor.base import StepBatch
from ferrule_server.executor.cpu.memory import StepMemory
from ferrule_server.executor.cpu.tasks import TaskPlanner
from ferrule_server.kernels import reference
from ferrule_server.kernels.cpu.compiled import Wanted
from ferrule_server.kernels.cpu.plan import Plan
from ferrule_server.kernels.cpu.records import LAYER, MODEL, STAGE, THREAD
from ferrule_server.kernels.cpu.sync import SyncBlock, reset
from ferrule_server.model.config import ModelConfig
from tests.configs import uniform_config
from tests.executor.cpu.models import HAS_AVX512_BF16, KERNEL_SETS, kernels_of

LAYERS, BLOCK = 2, 16
FAST = KERNEL_SETS[1] if HAS_AVX512_BF16 else KERNEL_SETS[0]
"""The instructions of this processor, as far as attention has forms for them."""


_KERNEL = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


@njit
def _reset(sync):  # type: ignore[no-untyped-def]
    reset(sync, 2, 1)


@cache
def stages_of(plan: Plan) -> list[Callable[..., int]]:
    """Return ``attend`` and ``merge`` as a server calls them; their machine code is shared with other tests."""
    kernels = kernels_of(plan, Wanted((), (), (), (plan.head_dim,)))
    return [_KERNEL(address) for address in kernels.attention[plan.head_dim]]


@dataclass
class Case:
    """Sequences in a pool: ``rows`` of each are in the step, and they end at ``lengths``."""

    lengths: list[int]
    rows: list[int]
    num_kv_heads: int
    group: int
    head_dim: int

    def config(self) -> ModelConfig:
        """Return a model of these sizes."""
        num_heads = self.num_kv_heads * self.group
        return uniform_config(
            num_layers=LAYERS, num_heads=num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim
        )

    def batch(self) -> StepBatch:
        """Return the step; blocks lie in the pool in no order."""
        counts = [-(-length // BLOCK) for length in self.lengths]
        ids = np.random.default_rng(1).permutation(sum(counts)).astype(np.int32) + 1
        tables = np.zeros((len(counts), max(counts) + 1), np.int32)
        for table, blocks in zip(tables, np.split(ids, np.cumsum(counts)[:-1]), strict=True):
            table[: len(blocks)] = blocks
        pairs = list(zip(self.lengths, self.rows, strict=True))
        positions = np.concatenate([np.arange(length - rows, length) for length, rows in pairs]).astype(np.int32)
        zeros, none = np.zeros(len(positions), np.int32), np.empty(0, np.int32)
        bounds = np.concatenate(([0], np.cumsum(self.rows))).astype(np.int32)
        return StepBatch(zeros, positions, zeros - 1, bounds, np.array(self.lengths, np.int32), tables, none, ())

    def pool(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a pool that holds random tokens, and NaN in the slots of no token."""
        batch, generator = self.batch(), torch.Generator().manual_seed(self.group)
        shape = (int(batch.block_tables.max()) + 1, LAYERS, 2, self.num_kv_heads, BLOCK, self.head_dim)
        pool = torch.full(shape, torch.nan, dtype=dtype)
        for table, length in zip(batch.block_tables, self.lengths, strict=True):
            for position in range(length):
                slot = pool[table[position // BLOCK], :, :, :, position % BLOCK]
                slot.copy_(torch.randn(slot.shape, generator=generator))
        return pool

    def queries(self) -> torch.Tensor:
        """Return random queries, float32 [rows, num_heads, head_dim]."""
        shape = (sum(self.rows), self.num_kv_heads * self.group, self.head_dim)
        return torch.randn(shape, generator=torch.Generator().manual_seed(self.group + 1))


def run(
    case: Case,
    plan: Plan,
    queries: torch.Tensor,
    pool: torch.Tensor,
    *,
    num_threads: int,
    ancestors: npt.NDArray[np.int64] | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Return what the kernels compute: float32 [rows, num_heads, head_dim]."""
    config, batch = case.config(), case.batch()
    memory = StepMemory(config, plan, max_rows=600, max_context=4096, num_threads=num_threads)
    planner = TaskPlanner(case.num_kv_heads, case.group, num_threads, memory.num_partials)
    ends = np.repeat(batch.kv_lens, case.rows)
    memory.set_rows(batch, planner.plan(batch, None if ancestors is None else ends))
    if ancestors is not None:
        memory.set_ancestors(np.repeat(batch.kv_lens - np.array(case.rows, np.int32), case.rows), ends, ancestors)
    memory.queries[: len(queries)] = queries.flatten(1) * case.head_dim**-0.5
    model, layer = np.zeros(1, MODEL), np.zeros(1, LAYER)
    model["num_heads"], model["score_softcap"] = config.num_heads, softcap
    layer["num_kv_heads"], layer["num_queries_per_kv"], layer["window"] = config.num_kv_heads, case.group, window
    layer["pool"] = pool.data_ptr()
    layer["block_bytes"], layer["head_bytes"] = pool.stride(0) * pool.itemsize, pool.stride(3) * pool.itemsize
    layer["pool_offset"] = pool.stride(1) * pool.itemsize
    sync = SyncBlock(2)
    _reset(sync.address)
    thread, stage = np.zeros(1, THREAD), np.zeros(1, STAGE)
    thread["model"], thread["step"], thread["sync"] = model.ctypes.data, memory.address, sync.address
    stage["layer"] = layer.ctypes.data
    for number, kernel in enumerate(stages_of(plan)):
        stage["claim"] = number
        kernel(None, thread.ctypes.data, stage.ctypes.data)
    width = config.num_heads * config.head_dim
    return memory.inputs["attended"][: len(queries), :width].float().view(queries.shape)


@pytest.mark.parametrize(
    ("group", "head_dim", "is_bfloat16"),
    [(1, 32, False), (3, 96, False), (2, 80, False), (1, 32, True), (16, 32, True), (2, 256, True)],
)
@pytest.mark.parametrize("num_threads", [1, 4])
def test_attention_is_that_of_the_reference(group: int, head_dim: int, num_threads: int, *, is_bfloat16: bool) -> None:
    """Tokens around the sizes of blocks and tiles; slots behind a sequence hold NaN, which nothing may read."""
    case = Case([1, 15, 16, 17, 255, 256, 257, 300, 513, 40], [1, 1, 2, 17, 1, 3, 1, 300, 5, 40], 2, group, head_dim)
    dtype = torch.bfloat16 if is_bfloat16 else torch.float32
    instructions = FAST[0] if is_bfloat16 else "fma"
    plan = Plan(instructions, is_emulated=False, is_bfloat16=is_bfloat16, head_dim=head_dim)
    batch, pool, queries = case.batch(), case.pool(dtype), case.queries()
    expected = reference.paged_attention(
        queries, pool, 1,
        positions=torch.from_numpy(batch.positions), cu_seqlens_q=torch.from_numpy(batch.cu_seqlens_q),
        kv_lens=torch.from_numpy(batch.kv_lens), block_tables=torch.from_numpy(batch.block_tables),
    )  # fmt: skip
    found = run(case, plan, queries, pool, num_threads=num_threads)
    tolerance = 2**-8 if is_bfloat16 else 1e-5  # results are rounded to bfloat16
    torch.testing.assert_close(found, expected, atol=tolerance / 4, rtol=tolerance)


@pytest.mark.parametrize("window", [1, 15, 16, 40, 256, 300])
@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_row_sees_the_tokens_of_its_window(window: int, num_threads: int) -> None:
    """Blocks before the windows of all rows may have been given back: nothing reads what is there, NaN here.

    The scores are capped too.
    """
    case = Case([1, 16, 17, 257, 300, 513, 800, 800, 1030], [1, 2, 17, 1, 300, 5, 1, 40, 3], 2, 3, 96)
    batch, pool, queries = case.batch(), case.pool(torch.float32), case.queries()
    plan = Plan("fma", is_emulated=False, is_bfloat16=False, head_dim=96)
    expected = reference.paged_attention(
        queries, pool, 1,
        positions=torch.from_numpy(batch.positions), cu_seqlens_q=torch.from_numpy(batch.cu_seqlens_q),
        kv_lens=torch.from_numpy(batch.kv_lens), block_tables=torch.from_numpy(batch.block_tables),
        rule=reference.AttentionRule(96**-0.5, window, 1.5),
    )  # fmt: skip
    for table, length, rows in zip(batch.block_tables, case.lengths, case.rows, strict=True):
        pool[table[: max(0, length - rows + 1 - window) // BLOCK]] = torch.nan
    found = run(case, plan, queries, pool, num_threads=num_threads, window=window, softcap=1.5)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("num_threads", [1, 4])
def test_rows_of_a_tree_see_their_ancestors(num_threads: int) -> None:
    """Trees of up to 64 drafts, on both sides of a tile and at the very begin of a sequence; each row and its path."""
    case = Case([70, 64, 1, 258, 300], [5, 64, 1, 9, 64], 2, 3, 96)
    random = np.random.default_rng(2)
    masks: list[int] = []
    paths: list[list[int]] = []
    for length, rows in zip(case.lengths, case.rows, strict=True):
        parents = [-1, *(int(random.integers(0, row)) for row in range(1, rows))]
        for row in range(rows):
            mask = (masks[len(masks) - row + parents[row]] if row else 0) | 1 << row
            masks.append(mask)
            begin = length - rows
            paths.append([*range(begin), *(begin + j for j in range(rows) if mask >> j & 1)])
    batch, pool, queries = case.batch(), case.pool(torch.float32), case.queries()
    plan = Plan("fma", is_emulated=False, is_bfloat16=False, head_dim=96)
    ancestors = np.array(masks, np.uint64).view(np.int64)
    found = run(case, plan, queries, pool, num_threads=num_threads, ancestors=ancestors)
    seqs = np.repeat(np.arange(batch.num_seqs), case.rows)
    for row, (seq, path) in enumerate(zip(seqs, paths, strict=True)):
        key, value = reference.gather_kv(pool, 1, torch.from_numpy(batch.block_tables[seq]), case.lengths[seq])
        key, value = (part[:, path].repeat_interleave(3, dim=0) for part in (key, value))
        weights = torch.softmax(torch.einsum("hd,htd->ht", queries[row], key) * 96**-0.5, dim=-1)
        torch.testing.assert_close(found[row], torch.einsum("ht,htd->hd", weights, value), atol=1e-5, rtol=1e-5)
