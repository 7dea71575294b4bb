"""The block pool."""

from __future__ import annotations

import pytest

from ferrule_server.errors import BlocksExhausted
from ferrule_server.kv.block_pool import NULL_BLOCK, BlockPool


def test_the_null_block_is_never_handed_out() -> None:
    """All blocks but block 0 can be allocated, each once."""
    pool = BlockPool(8, 4)
    block_ids = pool.allocate(7)
    assert sorted(block_ids) == list(range(1, 8))
    assert NULL_BLOCK not in block_ids
    assert (pool.num_free, pool.num_used) == (0, 7)
    pool.check_integrity(dict.fromkeys(block_ids, 1))


def test_allocation_is_all_or_nothing() -> None:
    """Asking for one block too many names the numbers and takes none."""
    pool = BlockPool(4, 4)
    pool.allocate(1)
    with pytest.raises(BlocksExhausted) as caught:
        pool.allocate(3)
    assert (caught.value.metadata["needed_blocks"], caught.value.metadata["free_blocks"]) == ("3", "2")
    assert pool.num_free == 2


def test_allocating_nothing_takes_nothing_even_from_an_empty_pool() -> None:
    """A decode step inside its block costs no block."""
    pool = BlockPool(2, 4)
    pool.allocate(1)
    assert pool.allocate(0) == []


def test_a_shared_block_is_freed_by_its_last_owner() -> None:
    """Release counts only blocks that became free."""
    pool = BlockPool(4, 4)
    block_ids = pool.allocate(2)
    pool.share(block_ids[:1])
    assert pool.refcount(block_ids[0]) == 2
    pool.share(block_ids[:1], 3)
    assert [pool.release(block_ids[:1]) for _ in range(3)] == [0, 0, 0]
    assert pool.count_unshared(block_ids) == 1
    assert pool.release(block_ids) == 1
    assert pool.release(block_ids[:1]) == 1
    assert pool.num_used == 0
    pool.check_integrity({})


def test_released_blocks_come_back_in_the_order_of_the_table() -> None:
    """A table allocated again after release is the same table."""
    pool = BlockPool(10, 4)
    block_ids = pool.allocate(5)
    pool.release(block_ids)
    assert pool.allocate(5) == block_ids


@pytest.mark.parametrize("block_id", [NULL_BLOCK, 3])
def test_a_free_block_can_be_neither_shared_nor_released(block_id: int) -> None:
    """Counting errors of the caller's show at once."""
    pool = BlockPool(4, 4)
    with pytest.raises(RuntimeError, match="free"):
        pool.share([block_id])
    with pytest.raises(RuntimeError, match="free"):
        pool.release([block_id])


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 4), (8, 0), (8, 12)])
def test_impossible_shapes_are_refused(num_blocks: int, block_size: int) -> None:
    """A pool needs a block besides the null block, and a block size that is a power of two."""
    with pytest.raises(ValueError, match="must be"):
        BlockPool(num_blocks, block_size)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (97, 7)])
def test_tokens_fill_whole_blocks(num_tokens: int, num_blocks: int) -> None:
    """A partly filled block counts as one."""
    assert BlockPool(8, 16).num_blocks_for(num_tokens) == num_blocks


def test_integrity_notices_owners_that_nobody_counted() -> None:
    """A leaked reference is found."""
    pool = BlockPool(4, 4)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="owners"):
        pool.check_integrity({})


def mixed_pool() -> BlockPool:
    """A pool with two empty blocks, three cached ones and one in use."""
    pool = BlockPool(num_blocks=7, block_size=4)
    block_ids = pool.allocate(6)
    for block_id in block_ids[1:5]:
        pool.keep(block_id)
    for index in (3, 0, 4, 1, 5):
        pool.release([block_ids[index]])
    return pool


@pytest.mark.parametrize("count", range(7))
def test_the_next_blocks_are_those_that_are_handed_out_next(count: int) -> None:
    """Empty ones first, then cached ones, the one that became free first before the others; all are empty then."""
    other = mixed_pool()
    expected = [other.allocate(1)[0] for _ in range(min(count, 5))]
    pool = mixed_pool()
    assert pool.evict_next(count) == expected
    assert (pool.num_free, pool.num_evictions) == (5, max(0, min(count, 5) - 2))
    pool.check_integrity()
    assert [pool.allocate(1)[0] for _ in expected] == expected


def test_a_picture_tells_every_block_apart_and_is_a_copy() -> None:
    """Empty, cached, owned by one, shared; what happens next changes nothing in it."""
    pool = BlockPool(6, 4)
    block_ids = pool.allocate(4)
    pool.share(block_ids[:1], 2)
    pool.keep(block_ids[3])
    pool.release(block_ids[2:])
    refcounts, is_cached = pool.picture()
    assert list(refcounts) == [0, 3, 1, 0, 0, 0]
    assert list(is_cached) == [0, 0, 0, 0, 1, 0]
    pool.release(block_ids[:2])
    assert pool.allocate(3) == [2, 3, 5]
    assert pool.allocate(1) == [4]
    assert (list(refcounts), list(is_cached)) == ([0, 3, 1, 0, 0, 0], [0, 0, 0, 0, 1, 0])
    assert list(pool.picture()[1]) == [0] * 6
    pool.check_integrity()
