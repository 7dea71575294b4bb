"""Copy-on-write by the kernel: the bytes of torch's own copy, in stream order, however many pairs there are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ferrule_server.executor.cuda import block_copies
from ferrule_server.executor.cuda.block_copies import PAIR_LAYOUT, BlockCopies, block_copy_spec
from ferrule_server.executor.cuda.kernel_set import KernelSet
from tests.executor.cuda.fake_gpu import CUBIN, FakeGpu

SHAPE = (12, 2, 2, 1, 16, 64)


def make(gpu: FakeGpu) -> tuple[BlockCopies, torch.Tensor]:
    """Return copies over a pool of random bits."""
    pool = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3)).bfloat16()
    gpu.adopt("pool", pool, is_mutable=True)
    pairs = gpu.allocate("pairs", (PAIR_LAYOUT.num_bytes,), torch.uint8)
    return BlockCopies(gpu, KernelSet(gpu, {block_copy_spec(): CUBIN}), pool, pairs), pool


def test_blocks_are_copied_whole_and_nothing_else_changes() -> None:
    """All layers, keys and values; every other block keeps its bits."""
    gpu = FakeGpu(simulate=True)
    copies, pool = make(gpu)
    expected = pool.clone()
    pairs = np.array([[3, 7], [3, 1], [11, 0]], np.int32)
    expected[pairs[:, 1]] = expected[pairs[:, 0]]
    copies.copy(pairs)
    gpu.synchronize()
    assert torch.equal(pool, expected)


def test_copies_follow_one_another_in_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain of copies, more than a launch takes and than there are staging slots: the last block holds the first."""
    monkeypatch.setattr(block_copies, "MAX_PAIRS", 1)
    gpu = FakeGpu(simulate=True)
    copies, pool = make(gpu)
    first = pool[0].clone()
    for block in range(4):
        copies.copy(np.array([[block, block + 1], [10, 11]], np.int32))
    gpu.synchronize()
    assert torch.equal(pool[4], first)
    assert len(gpu.calls("launch")) == 8


def test_no_pairs_put_nothing_into_the_stream() -> None:
    """As a step without copy-on-write asks for."""
    gpu = FakeGpu()
    copies, _ = make(gpu)
    copies.copy(np.empty((0, 2), np.int32))
    assert not gpu.calls("launch")
    assert not gpu.calls("upload")
