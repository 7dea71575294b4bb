"""Blocks gathered into a buffer and scattered from it, in the simulator."""

from __future__ import annotations

import numpy as np
import pytest

from ferrule_server.kernels.cuda.block_transfer import specs, transfer_blocks, variants
from ferrule_server.kernels.cuda.spec import MODEL_SHAPES
from ferrule_server.kernels.cuda.specialise import Constant, Specialised
from tests.kernels.cuda.mutation import check_mutants
from tests.kernels.cuda.padded_pool import POOL_BYTES, PaddedPool
from tests.kernels.cuda.replay import replay
from tools.cuda_simulator import Launch, Memory, run

POOL = PaddedPool(num_blocks=7, num_layers=3, num_kv_heads=1, block_size=16, head_dim=64)
BLOCKS = (6, 1, 4)
THREADS = 32


def _constants(direction: str, parts: int = 2) -> dict[str, Constant]:
    return {"DIRECTION": direction, "PARTS": parts, "U": 3, "THREADS": THREADS}


def _launch(
    memory: Memory,
    direction: str,
    *,
    blocks: str = "block_ids",
    num_blocks: int = 3,
    parts: int = 2,
    grid: int = 5,
    specialised: Specialised | None = None,
) -> Launch:
    pool, ids, buffer = (memory.address(name) for name in ("pool", blocks, "buffer"))
    part_bytes = POOL.layer_bytes // parts
    arguments = (pool, POOL.block_stride, POOL.layer_stride, ids, buffer, num_blocks, POOL.num_layers, part_bytes)
    return Launch(transfer_blocks, _constants(direction, parts), arguments, grid, THREADS, 0, specialised)


def _memory(seed: int) -> tuple[Memory, np.ndarray]:
    memory = Memory()
    values = POOL.random(seed)
    POOL.put(memory, values)
    memory.put("block_ids", np.array(BLOCKS, np.int32), mutable=True, offset=16)
    memory.put("targets", np.array([2, 3, 5], np.int32), mutable=True)
    return memory, values


@pytest.mark.parametrize(("parts", "grid", "num_blocks"), [(1, 1, 3), (2, 5, 3), (4, 50, 2), (2, 3, 0)])
def test_gather_fills_the_buffer_without_gaps(parts: int, grid: int, num_blocks: int) -> None:
    """In the order of the ids; the pool stays as it is."""
    memory, values = _memory(1)
    memory.empty("buffer", (3, POOL.num_layers, *POOL.inside), np.uint16, offset=32)
    for seed in range(3):
        launch = _launch(memory, "gather", num_blocks=num_blocks, parts=parts, grid=grid)
        replay(memory, [launch], outputs=("buffer",), seed=seed)
        np.testing.assert_array_equal(memory.get("buffer")[:num_blocks], values[list(BLOCKS)][:num_blocks])
        np.testing.assert_array_equal(POOL.get(memory), values)


@pytest.mark.parametrize(("parts", "grid"), [(1, 1), (2, 5)])
def test_scatter_overwrites_the_blocks_named_and_no_other(parts: int, grid: int) -> None:
    """What a gather gave comes back in other blocks."""
    memory, values = _memory(2)
    data = POOL.random(3)[:3]
    memory.put("buffer", data, mutable=True, offset=32)
    values[list(BLOCKS)] = data
    for seed in range(3):
        replay(memory, [_launch(memory, "scatter", parts=parts, grid=grid)], outputs=("pool",), seed=seed)
        np.testing.assert_array_equal(POOL.get(memory), values)


@pytest.mark.parametrize("mutated", ["gather", "scatter"])
def test_every_wait_is_needed(mutated: str) -> None:
    """A gather of what a scatter writes, and a scatter of what a gather writes, begun before that one is done."""

    def attempt(specialised: Specialised) -> None:
        memory, values = _memory(4)
        memory.put("buffer", values[[0, 0, 0]], mutable=True)
        gather, scatter = (
            _launch(memory, way, blocks=blocks, specialised=specialised if way == mutated else None)
            for way, blocks in (("gather", "block_ids"), ("scatter", "targets"))
        )
        chain = [gather, scatter] if mutated == "scatter" else [scatter, gather]
        run(memory, chain, seed=5)
        if mutated == "scatter":
            values[[2, 3, 5]] = values[list(BLOCKS)]
        else:
            values[[2, 3, 5]] = values[[0, 0, 0]]
        np.testing.assert_array_equal(POOL.get(memory), values)

    found = check_mutants(transfer_blocks, _constants(mutated), attempt)
    assert [mutation.name for mutation in found] == ["grid_wait"]


@pytest.mark.parametrize("direction", ["gather", "scatter"])
def test_block_and_buffer_addresses_hold_beyond_8_gib(direction: str) -> None:
    """Blocks of 2.25 MiB at the end of a pool of 100 GiB."""
    block_stride, layer_stride, layer_bytes = 36 << 16, 1 << 16, 64
    last = POOL_BYTES // block_stride - 1
    memory = Memory()
    pool, buffer = memory.sparse("pool", POOL_BYTES), memory.sparse("buffer", 1 << 12)
    ids = memory.put("block_ids", np.array([last, 1], np.int32))
    data = np.arange(2 * 2 * layer_bytes // 2, dtype=np.uint16).reshape(2, 2, -1)
    inside = [[pool + block * block_stride + layer * layer_stride for layer in range(2)] for block in (last, 1)]
    outside = [[buffer + (index * 2 + layer) * layer_bytes for layer in range(2)] for index in range(2)]
    before, after = (inside, outside) if direction == "gather" else (outside, inside)
    for index in range(2):
        for layer in range(2):
            memory.write(before[index][layer], data[index, layer])
    arguments = (pool, block_stride, layer_stride, ids, buffer, 2, 2, layer_bytes)
    run(memory, [Launch(transfer_blocks, _constants(direction, 1), arguments, 3, THREADS)])
    for index in range(2):
        for layer in range(2):
            read = memory.read(after[index][layer], layer_bytes // 2, np.uint16)
            np.testing.assert_array_equal(read, data[index, layer])


def test_plan_leaves_half_an_sm() -> None:
    """The next kernel of the chain starts beside this one."""
    shape = MODEL_SHAPES["Qwen3-8B"]
    assert all(made.ctas_per_sm * made.num_threads <= 1024 for made in (*specs(shape), *variants(shape)))
