"""Copies of whole blocks in the simulator: strides with gaps, many grids, pools beyond 8 GiB, and every wait needed."""

from __future__ import annotations

import numpy as np
import pytest

from ferrule_server.kernels.cuda.copy_blocks import copy_blocks, num_ctas_needed, spec, specs
from ferrule_server.kernels.cuda.spec import MODEL_SHAPES
from ferrule_server.kernels.cuda.specialise import Constant, Specialised
from tests.kernels.cuda.mutation import check_mutants
from tests.kernels.cuda.padded_pool import POOL_BYTES, PaddedPool
from tests.kernels.cuda.replay import replay
from tools.cuda_simulator import Launch, Memory, run

POOL = PaddedPool(num_blocks=9, num_layers=3, num_kv_heads=1, block_size=16, head_dim=64)
PAIRS = ((1, 5), (8, 2), (3, 7))
THREADS = 32


def _constants(parts: int, unroll: int) -> dict[str, Constant]:
    return {"PARTS": parts, "U": unroll, "THREADS": THREADS}


def _launch(
    memory: Memory,
    name: str,
    pairs: tuple[tuple[int, int], ...],
    *,
    parts: int = 2,
    unroll: int = 2,
    grid: int = 5,
    specialised: Specialised | None = None,
) -> Launch:
    address = memory.put(name, np.array(pairs or [(-1, -1)], np.int32), mutable=True, offset=16)
    pool = memory.address("pool")
    arguments = (pool, POOL.block_stride, POOL.layer_stride, address, len(pairs), 3, POOL.layer_bytes // parts)
    return Launch(copy_blocks, _constants(parts, unroll), arguments, grid, THREADS, 0, specialised)


@pytest.mark.parametrize(
    ("parts", "unroll", "grid", "num_pairs"),
    [(1, 2, 1, 3), (2, 2, 5, 3), (4, 3, 7, 1), (2, 4, 40, 2), (2, 2, 4, 0)],
)
def test_blocks_are_copied_whole_and_nothing_else_is_touched(
    parts: int, unroll: int, grid: int, num_pairs: int
) -> None:
    """All layers of the targets, whatever the pieces and the grid; three runs on one state with other orders."""
    memory = Memory()
    expected = POOL.random(1)
    POOL.put(memory, expected)
    pairs = PAIRS[:num_pairs]
    launch = _launch(memory, "pairs", pairs, parts=parts, unroll=unroll, grid=grid)
    for source, target in pairs:
        expected[target] = expected[source]
    for seed in range(3):
        replay(memory, [launch], outputs=("pool",), seed=seed)
        np.testing.assert_array_equal(POOL.get(memory), expected)


def test_every_wait_is_needed() -> None:
    """A copy of what the launch before it copies, begun before that one is done."""

    def attempt(specialised: Specialised) -> None:
        memory = Memory()
        expected = POOL.random(2)
        POOL.put(memory, expected)
        chain = [
            _launch(memory, "first", ((1, 2),), specialised=specialised),
            _launch(memory, "second", ((2, 3),), specialised=specialised),
        ]
        expected[2] = expected[3] = expected[1]
        run(memory, chain, seed=3)
        np.testing.assert_array_equal(POOL.get(memory), expected)

    assert [mutation.name for mutation in check_mutants(copy_blocks, _constants(2, 2), attempt)] == ["grid_wait"]


def test_block_addresses_hold_beyond_8_gib() -> None:
    """Blocks of 2.25 MiB at the end of a pool of 100 GiB: 32 bits would wrap many times."""
    block_stride, layer_stride, layer_bytes = 36 << 16, 1 << 16, 64
    last = POOL_BYTES // block_stride - 1
    memory = Memory()
    pool = memory.sparse("pool", POOL_BYTES)
    data = np.arange(2 * layer_bytes // 2, dtype=np.uint16).reshape(2, -1)
    for layer in range(2):
        memory.write(pool + (last - 1) * block_stride + layer * layer_stride, data[layer])
    pairs = memory.put("pairs", np.array([[last - 1, last], [last - 1, 1]], np.int32))
    arguments = (pool, block_stride, layer_stride, pairs, 2, 2, layer_bytes)
    run(memory, [Launch(copy_blocks, _constants(1, 1), arguments, 3, THREADS)])
    for block in (1, last):
        for layer in range(2):
            copied = memory.read(pool + block * block_stride + layer * layer_stride, layer_bytes // 2, np.uint16)
            np.testing.assert_array_equal(copied, data[layer])


def test_plan_never_asks_for_more_than_half_a_gpu_nor_for_idle_ctas() -> None:
    """The next kernel of the chain starts beside this one."""
    for shape in MODEL_SHAPES.values():
        for made in specs(shape):
            assert made.ctas_per_sm * made.num_threads <= 1024
            assert made.shared_bytes == 0
    assert num_ctas_needed(spec(parts=4), num_pairs=1, num_layers=28, num_sms=132) == 112
    assert num_ctas_needed(spec(parts=4), num_pairs=64, num_layers=36, num_sms=132) == 264
    assert num_ctas_needed(spec(), num_pairs=0, num_layers=36, num_sms=132) == 1
