"""The block pool: which blocks are free, which free blocks are kept, and how many owners each other block has."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from ferrule_server.errors import BlocksExhausted

NULL_BLOCK = 0
"""Never handed out; unused entries of a block table point at it."""


class BlockPool:
    """Hands out blocks and counts their owners.

    A block without an owner is free. It is *cached* if :meth:`keep` was called for its contents, else *empty*.
    Empty blocks are handed out first, then cached blocks in the order in which they became free.

    Invariant: num_empty + num_cached + num_used == num_blocks - 1; the null block is none of these; a block is free
    exactly when its refcount is 0, and then it is listed once: as cached exactly when it is kept; a watched block has
    an owner; num_shared blocks have a refcount above 1.

    Args:
        num_blocks: Blocks in the pool, the null block included; at least 2.
        block_size: Slots per block, a power of two.

    Attributes:
        on_evict: Called with each cached block that is handed out, and each watched one that loses its last owner; from
            then on it is neither.
        num_shared: Blocks with two owners or more.
        num_evictions: Cached blocks handed out since start.
        num_exhausted: Requests refused since start because too few blocks were free.
        has_gaps: A sequence has given back blocks before others that it holds, so refcounts may rise along a table.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (one is the null block), got {num_blocks}")
        if block_size < 1 or block_size & (block_size - 1):
            raise ValueError(f"block_size must be a power of two, got {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.on_evict: Callable[[int], object] = lambda _block_id: None
        self.num_shared = self.num_evictions = self.num_exhausted = 0
        self.has_gaps = False
        self._refcounts = [0] * num_blocks
        # Membership in `_cached`, a byte per block, so that a picture of a large pool needs two copies and no loop.
        self._is_cached = bytearray(num_blocks)
        # A stack, lowest id on top: the block freed last is the most likely to be in a hardware cache.
        self._empty = list(range(num_blocks - 1, NULL_BLOCK, -1))
        # In the order in which they became free. (Taking the first item again and again is slow with a plain dict.)
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._kept: set[int] = set()
        self._watched: set[int] = set()

    @property
    def capacity(self) -> int:
        """Blocks that can be handed out: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_empty(self) -> int:
        """Blocks without owner that hold nothing."""
        return len(self._empty)

    @property
    def num_cached(self) -> int:
        """Blocks without owner that are kept until they are needed."""
        return len(self._cached)

    @property
    def num_free(self) -> int:
        """Blocks without owner: all that can be handed out now."""
        return len(self._empty) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks with at least one owner, each counted once."""
        return self.num_blocks - 1 - len(self._empty) - len(self._cached)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def refcount(self, block_id: int) -> int:
        """Return how many owners the block has; 0 means free."""
        return self._refcounts[block_id]

    def require(self, count: int, num_own: int = 0) -> None:
        """Return if ``count`` blocks are available: free ones, and ``num_own`` that the caller gives up for them.

        Raises:
            BlocksExhausted: Fewer are available; the refusal is counted.
        """
        num_available = num_own + self.num_free
        if count > num_available:
            self.num_exhausted += 1
            raise BlocksExhausted(count, num_available)

    def allocate(self, count: int) -> list[int]:
        """Return ``count`` free blocks, each now with one owner; all or nothing.

        Raises:
            BlocksExhausted: Fewer are free; nothing changed.
        """
        self.require(count)
        if count <= 0:
            return []
        block_ids = self._empty[-count:]
        block_ids.reverse()
        del self._empty[-count:]
        while len(block_ids) < count:
            block_ids.append(self._evict())
        for block_id in block_ids:
            self._refcounts[block_id] = 1
        return block_ids

    def evict_next(self, count: int) -> list[int]:
        """Return the blocks that allocations of one block each would hand out next, in order; fewer if fewer are free.

        Cached blocks among them are evicted now, as these allocations would do, so all of them are empty afterwards.
        """
        while len(self._empty) < count and self._cached:
            self._empty.insert(0, self._evict())
        return self._empty[: -count - 1 : -1]

    def share(self, block_ids: Iterable[int], count: int = 1) -> None:
        """Give each block ``count`` more owners.

        Raises:
            RuntimeError: A block is free (a bug in the caller).
        """
        for block_id in block_ids:
            num_owners = self._refcounts[block_id]
            if num_owners <= 0:
                raise RuntimeError(f"block {block_id} is free and cannot be shared")
            self.num_shared += num_owners == 1
            self._refcounts[block_id] = num_owners + count

    def adopt(self, block_ids: Iterable[int]) -> int:
        """Give each block, owned or cached, one more owner; return how many of them were cached.

        Raises:
            RuntimeError: A block is empty (a bug in the caller).
        """
        num_cached = len(self._cached)
        for block_id in block_ids:
            if self._refcounts[block_id]:
                self.share((block_id,))
            elif block_id not in self._cached:
                raise RuntimeError(f"block {block_id} is empty and cannot be adopted")
            else:
                del self._cached[block_id]
                self._is_cached[block_id] = 0
                self._refcounts[block_id] = 1
        return num_cached - len(self._cached)

    def release(self, block_ids: list[int]) -> int:
        """Take one owner from each block and return how many blocks became free.

        Raises:
            RuntimeError: A block has no owner (a bug in the caller).
        """
        num_free_before = self.num_free
        # Backwards, so that the stack hands the blocks out again in the order of the table, and the last cached blocks
        # are evicted first: a prompt can find the blocks before them without them, but not the reverse.
        for block_id in reversed(block_ids):
            num_owners = self._refcounts[block_id] - 1
            if num_owners < 0:
                raise RuntimeError(f"block {block_id} is free and cannot be released")
            self._refcounts[block_id] = num_owners
            if num_owners == 1:
                self.num_shared -= 1
            elif not num_owners:
                self._put_back(block_id)
        return self.num_free - num_free_before

    def keep(self, block_id: int, *, outlives_owners: bool = True) -> None:
        """Keep the contents of an owned block when it becomes free, or watch it until then.

        Raises:
            RuntimeError: The block is free (a bug in the caller).
        """
        if not self._refcounts[block_id]:
            raise RuntimeError(f"block {block_id} is free and cannot be kept")
        (self._kept if outlives_owners else self._watched).add(block_id)

    def forget(self, block_id: int) -> None:
        """Undo :meth:`keep`; a cached block becomes empty."""
        self._kept.discard(block_id)
        self._watched.discard(block_id)
        if block_id in self._cached:
            del self._cached[block_id]
            self._is_cached[block_id] = 0
            self._empty.append(block_id)

    def count_shared(self, table: list[int]) -> int:
        """Return how many blocks of a block table have several owners; see :func:`count_shared`."""
        return count_shared(table, self._refcounts, has_gaps=self.has_gaps)

    def count_unshared(self, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks have one owner: those that a release frees."""
        return sum(self._refcounts[block_id] == 1 for block_id in block_ids)

    def count_unowned(self, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks have no owner: those that :meth:`adopt` takes from the free blocks."""
        return sum(self._refcounts[block_id] == 0 for block_id in block_ids)

    def cached_ids(self) -> list[int]:
        """Return the cached blocks in the order in which they would be handed out."""
        return list(self._cached)

    def picture(self) -> tuple[list[int], bytes]:
        """Return a copy of all refcounts, and one byte for each block: 1 if it is cached, else 0.

        In both, index 0 is the null block and has a zero.
        """
        return self._refcounts.copy(), bytes(self._is_cached)

    def check_integrity(self, owners: Mapping[int, int] | None = None) -> None:
        """Raise AssertionError unless the invariant of the class holds.

        Args:
            owners: Number of owners of each owned block, counted by the caller; None: not compared.
        """
        assert self.num_free + self.num_used == self.num_blocks - 1, "free and used blocks do not add up"
        free = {*self._empty, *self._cached}
        assert len(free) == self.num_free, "a block is listed as free twice"
        assert NULL_BLOCK not in free, "the null block is listed as free"
        assert self._refcounts[NULL_BLOCK] == 0, "the null block has an owner"
        for block_id in range(1, self.num_blocks):
            count = self._refcounts[block_id]
            assert (count == 0) == (block_id in free), f"block {block_id} has {count} owners, free={block_id in free}"
        assert self._kept & free == set(self._cached), "a free block is not listed as what it is"
        assert not self._watched & (free | self._kept), "a watched block is free, or also kept"
        marked = {block_id for block_id, mark in enumerate(self._is_cached) if mark}
        assert marked == set(self._cached), "a block is marked as cached and is not, or the other way round"
        num_shared = sum(count > 1 for count in self._refcounts)
        assert num_shared == self.num_shared, f"{num_shared} blocks are shared, not {self.num_shared}"
        if owners is not None:
            counted = {block_id: count for block_id, count in enumerate(self._refcounts) if count}
            assert counted == dict(owners), f"refcounts {counted} differ from the owners {dict(owners)}"

    def _put_back(self, block_id: int) -> None:
        """List a block that lost its last owner as free."""
        if block_id in self._kept:
            self._cached[block_id] = None
            self._is_cached[block_id] = 1
        else:
            self._empty.append(block_id)
            if block_id in self._watched:
                self._watched.remove(block_id)
                self.on_evict(block_id)

    def _evict(self) -> int:
        """Take the block that was cached first."""
        block_id, _ = self._cached.popitem(last=False)
        self._is_cached[block_id] = 0
        self._kept.remove(block_id)
        self.num_evictions += 1
        self.on_evict(block_id)
        return block_id


def count_shared(table: Sequence[int], refcounts: Sequence[int], *, has_gaps: bool) -> int:
    """Return how many blocks of a block table have several owners.

    Without gaps this takes O(log n): they are the first ones of the table, since refcounts never rise along a table.

    Args:
        table: The blocks; null blocks are not counted.
        refcounts: Owners of each block.
        has_gaps: As :attr:`BlockPool.has_gaps`.
    """
    if has_gaps:
        return sum(refcounts[block_id] > 1 for block_id in table)
    return bisect_left(table, 1, key=lambda block_id: refcounts[block_id] == 1)
