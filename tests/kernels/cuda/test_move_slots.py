"""Moves of single slots in the simulator: chains, swaps, any number, pools beyond 8 GiB, and every barrier needed."""

from __future__ import annotations

import numpy as np
import pytest

from ferrule_server.kernels.cuda.move_slots import (
    capacity,
    move_slots,
    num_ctas_needed,
    spec,
    specs,
    stage_slots,
    stage_spec,
    staging_bytes,
    variants,
)
from ferrule_server.kernels.cuda.spec import MODEL_SHAPES
from ferrule_server.kernels.cuda.specialise import Constant, Specialised
from tests.kernels.cuda.mutation import check_mutants
from tests.kernels.cuda.padded_pool import POOL_BYTES, Bits, PaddedPool
from tests.kernels.cuda.replay import replay
from tools.cuda_simulator import Launch, Memory, run

POOLS = {head_dim: PaddedPool(4, 2, 2, 16, head_dim) for head_dim in (64, 128)}
PLANES = 4
THREADS = 32

# From tree to path; a chain whose slots are read before they are written; a swap; across blocks.
PAIRS = ((20, 17), (17, 40), (40, 18), (33, 34), (34, 33), (63, 16), (50, 62))


def _expected(values: Bits, pairs: tuple[tuple[int, int], ...]) -> Bits:
    sources, targets = np.array(pairs, np.int64).reshape(-1, 2).T
    size = values.shape[4]
    moved = values.copy()
    moved[targets // size, :, :, :, targets % size] = values[sources // size, :, :, :, sources % size]
    return moved


def _memory(pool: PaddedPool, pairs: tuple[tuple[int, int], ...], seed: int) -> tuple[Memory, Bits]:
    memory = Memory()
    values = pool.random(seed)
    pool.put(memory, values)
    memory.put("pairs", np.array(pairs or [(-1, -1)], np.int32), mutable=True, offset=16)
    memory.empty("staging", (max(1, len(pairs)), pool.num_layers, PLANES, pool.head_dim), np.uint16, offset=16)
    return memory, values


def _few(head_dim: int, unroll: int, block_size: int = 16) -> dict[str, Constant]:
    return {"HEAD_DIM": head_dim, "BLOCK_SIZE": block_size, "U": unroll, "THREADS": THREADS}


def _move(
    memory: Memory,
    pool: PaddedPool,
    num_pairs: int,
    *,
    unroll: int,
    grid: int = 3,
    specialised: Specialised | None = None,
) -> Launch:
    addresses = (memory.address("pool"), pool.block_stride, pool.layer_stride, memory.address("pairs"))
    arguments = (*addresses, num_pairs, pool.num_layers, PLANES)
    return Launch(move_slots, _few(pool.head_dim, unroll, pool.block_size), arguments, grid, THREADS, 0, specialised)


def _stage(
    memory: Memory,
    pool: PaddedPool,
    direction: str,
    num_pairs: int,
    *,
    grid: int = 3,
    specialised: Specialised | None = None,
) -> Launch:
    addresses = (memory.address("pool"), pool.block_stride, pool.layer_stride)
    more = (memory.address("pairs"), memory.address("staging"), num_pairs, pool.num_layers, PLANES)
    constants: dict[str, Constant] = {**_few(pool.head_dim, 1, pool.block_size), "DIRECTION": direction}
    return Launch(stage_slots, constants, (*addresses, *more), grid, THREADS, 0, specialised)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("grid", "num_pairs"), [(1, 7), (3, 7), (20, 3), (2, 0)])
def test_few_slots_are_read_before_any_is_written(head_dim: int, grid: int, num_pairs: int) -> None:
    """Chains and swaps too; nothing else of the pool changes."""
    pool, unroll = POOLS[head_dim], 512 // head_dim  # capacity 8 either way, and once what is not full
    memory, values = _memory(pool, PAIRS[:num_pairs], 0)
    for seed in range(3):
        replay(memory, [_move(memory, pool, num_pairs, unroll=unroll, grid=grid)], outputs=("pool",), seed=seed)
        np.testing.assert_array_equal(pool.get(memory), _expected(values, PAIRS[:num_pairs]))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("grid", "num_pairs"), [(1, 7), (5, 6), (50, 2), (2, 0)])
def test_any_number_of_slots_moves_through_a_buffer(head_dim: int, grid: int, num_pairs: int) -> None:
    """Gather and scatter, one chain; three runs with other orders."""
    pool = POOLS[head_dim]
    memory, values = _memory(pool, PAIRS[:num_pairs], 0)
    chain = [_stage(memory, pool, direction, num_pairs, grid=grid) for direction in ("gather", "scatter")]
    for seed in range(3):
        replay(memory, chain, outputs=("pool",), seed=seed)
        np.testing.assert_array_equal(pool.get(memory), _expected(values, PAIRS[:num_pairs]))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_blocks_of_all_sizes_are_addressed_alike(block_size: int, head_dim: int) -> None:
    """A slot is block and offset; pairs within a block and across two."""
    pool = PaddedPool(3, 2, 2, block_size, head_dim)
    pairs = ((block_size + 1, 2 * block_size), (2 * block_size, 5), (3 * block_size - 1, block_size - 1))
    for staged in (False, True):
        memory, values = _memory(pool, pairs, 1)
        chain = [_stage(memory, pool, direction, 3) for direction in ("gather", "scatter")]
        run(memory, chain if staged else [_move(memory, pool, 3, unroll=head_dim // 64)], seed=2)
        np.testing.assert_array_equal(pool.get(memory), _expected(values, pairs))


def test_moving_few_needs_its_wait_and_its_barrier() -> None:
    """Two moves in a row, the second begun before the first is done."""
    pool = POOLS[64]

    def attempt(specialised: Specialised) -> None:
        memory, values = _memory(pool, PAIRS, 1)
        move = _move(memory, pool, len(PAIRS), unroll=2, grid=2, specialised=specialised)
        run(memory, [move, move], seed=2)
        np.testing.assert_array_equal(pool.get(memory), _expected(_expected(values, PAIRS), PAIRS))

    found = check_mutants(move_slots, _few(64, 2), attempt)
    assert [mutation.name for mutation in found] == ["grid_wait", "barrier"]


@pytest.mark.parametrize("mutated", ["gather", "scatter"])
def test_moving_many_needs_its_waits(mutated: str) -> None:
    """Two moves in a row; the gather of the second must not start before the scatter of the first is done."""
    pool = POOLS[64]

    def attempt(specialised: Specialised) -> None:
        memory, values = _memory(pool, PAIRS[:4], 3)
        chain = [
            _stage(memory, pool, way, 4, specialised=specialised if way == mutated else None)
            for way in ("gather", "scatter", "gather", "scatter")
        ]
        run(memory, chain, seed=4)
        np.testing.assert_array_equal(pool.get(memory), _expected(_expected(values, PAIRS[:4]), PAIRS[:4]))

    found = check_mutants(stage_slots, {**_few(64, 1), "DIRECTION": mutated}, attempt)
    assert [mutation.name for mutation in found] == ["grid_wait"]


def test_slot_addresses_hold_beyond_8_gib() -> None:
    """The last blocks of a pool of 100 GiB, by both ways."""
    block_stride, layer_stride, plane_bytes = 36 << 16, 1 << 16, 16 * 64 * 2
    last = POOL_BYTES // block_stride - 1
    memory = Memory()
    pool, staging = memory.sparse("pool", POOL_BYTES), memory.sparse("staging", 1 << 12)
    pairs = memory.put("pairs", np.array([[last * 16 + 15, 16 + 3], [last * 16 + 15, last * 16 + 2]], np.int32))
    kept = np.arange(2 * PLANES * 64, dtype=np.uint16).reshape(2, PLANES, 64)

    def address(block: int, offset: int, layer: int, plane: int) -> int:
        return pool + block * block_stride + layer * layer_stride + plane * plane_bytes + offset * 128

    def check() -> None:
        for block, offset in ((1, 3), (last, 2)):
            for layer, plane in np.ndindex(2, PLANES):
                at = address(block, offset, layer, plane)
                np.testing.assert_array_equal(memory.read(at, 64, np.uint16), kept[layer, plane])
                memory.write(at, np.zeros(64, np.uint16))

    for layer, plane in np.ndindex(2, PLANES):
        memory.write(address(last, 15, layer, plane), kept[layer, plane])
    begin = (pool, block_stride, layer_stride, pairs)
    run(memory, [Launch(move_slots, _few(64, 1), (*begin, 2, 2, PLANES), 3, THREADS)])
    check()
    chain = [
        Launch(stage_slots, {**_few(64, 1), "DIRECTION": way}, (*begin, staging, 2, 2, PLANES), 3, THREADS)
        for way in ("gather", "scatter")
    ]
    run(memory, chain)
    check()


def test_plans_name_their_capacity() -> None:
    """64 new tokens of a sequence fit one launch at any head size; half an SM is left."""
    for shape in MODEL_SHAPES.values():
        assert capacity(spec(shape)) >= 64
        for made in (*specs(shape), *variants(shape)):
            assert made.ctas_per_sm * made.num_threads <= 1024
    shape = MODEL_SHAPES["Qwen3-8B"]
    assert capacity(spec(shape, unroll=8)) == 128
    assert num_ctas_needed(spec(shape), 36, 16, 132) == 264
    assert staging_bytes(shape, 10) == 10 * 36 * 16 * 256
    assert stage_spec(shape, "gather").kernel is stage_slots
