"""The block pool: which blocks are free, and how many owners each other one has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ferrule_server.errors import BlocksExhausted

NULL_BLOCK = 0
"""Never handed out; unused entries of a block table point at it."""


class BlockPool:
    """Hands out blocks and counts their owners.

    Invariant: num_free + num_used == num_blocks - 1; the null block is neither; a block is free exactly when its
    refcount is 0, and then it is listed as free once.

    Args:
        num_blocks: Blocks in the pool, the null block included; at least 2.
        block_size: Slots per block, a power of two.
    """

    __slots__ = ("_free", "_refcounts", "block_size", "num_blocks")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (one is the null block), got {num_blocks}")
        if block_size < 1 or block_size & (block_size - 1):
            raise ValueError(f"block_size must be a power of two, got {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._refcounts = [0] * num_blocks
        # A stack, lowest id on top: the block freed last is the likeliest to be in a cache.
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))

    @property
    def capacity(self) -> int:
        """Blocks that can be handed out at all: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with at least one owner, each counted once."""
        return self.num_blocks - 1 - len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def refcount(self, block_id: int) -> int:
        """Return how many owners the block has; 0 means free."""
        return self._refcounts[block_id]

    def allocate(self, count: int) -> list[int]:
        """Return ``count`` free blocks, each now with one owner; all or nothing.

        Raises:
            BlocksExhausted: Fewer are free; nothing changed.
        """
        if count > len(self._free):
            raise BlocksExhausted(count, len(self._free))
        if count <= 0:
            return []
        block_ids = self._free[-count:]
        block_ids.reverse()
        del self._free[-count:]
        for block_id in block_ids:
            self._refcounts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int], count: int = 1) -> None:
        """Give each block ``count`` more owners.

        Raises:
            RuntimeError: A block is free (a bug of the caller's).
        """
        for block_id in block_ids:
            if self._refcounts[block_id] <= 0:
                raise RuntimeError(f"block {block_id} is free and cannot be shared")
            self._refcounts[block_id] += count

    def release(self, block_ids: list[int]) -> int:
        """Take one owner from each block and return how many blocks became free.

        Raises:
            RuntimeError: A block has no owner (a bug of the caller's).
        """
        num_free_before = len(self._free)
        # Backwards, so that the stack hands the blocks out again in the order of the table.
        for block_id in reversed(block_ids):
            if self._refcounts[block_id] <= 0:
                raise RuntimeError(f"block {block_id} is free and cannot be released")
            self._refcounts[block_id] -= 1
            if not self._refcounts[block_id]:
                self._free.append(block_id)
        return len(self._free) - num_free_before

    def count_sole(self, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks have one owner: what releasing them would free."""
        return sum(self._refcounts[block_id] == 1 for block_id in block_ids)

    def check_integrity(self, owners: Mapping[int, int] | None = None) -> None:
        """Raise AssertionError unless the invariant of the class holds.

        Args:
            owners: Owners of each owned block as the caller counts them; None does not compare.
        """
        assert self.num_free + self.num_used == self.num_blocks - 1, "free and used blocks do not add up"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is listed as free twice"
        assert NULL_BLOCK not in free, "the null block is listed as free"
        assert self._refcounts[NULL_BLOCK] == 0, "the null block has an owner"
        for block_id in range(1, self.num_blocks):
            count = self._refcounts[block_id]
            assert (count == 0) == (block_id in free), f"block {block_id} has {count} owners, free={block_id in free}"
        if owners is not None:
            counted = {block_id: count for block_id, count in enumerate(self._refcounts) if count}
            assert counted == dict(owners), f"refcounts {counted} differ from the owners {dict(owners)}"
