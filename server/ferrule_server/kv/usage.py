"""Usage: how many sequences and blocks each principal holds, and whether its quotas allow more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ferrule_server.errors import QuotaExceeded
from ferrule_server.kv.block_pool import BlockPool
from ferrule_server.quotas import LimitsOf


@dataclass(slots=True)
class Holding:
    """What one principal holds.

    Attributes:
        num_sequences: Sequences alive, and sequences in creation.
        num_blocks: Blocks of the pool, each counted once however many of its sequences share it.
    """

    num_sequences: int = 0
    num_blocks: int = 0


class Usage:
    """The one way by which blocks leave the pool and return, so that each is counted for a principal.

    Invariant: the blocks of all principals add up to the used blocks of the pool; a principal that holds nothing has no
    record. The principal of a block does not change while the block is owned: only sequences of one principal share
    blocks. Free blocks count for no principal, even if the prefix cache knows them.

    Args:
        pool: The blocks.
        limits_of: The quotas of a principal, read whenever it asks for more.
    """

    def __init__(self, pool: BlockPool, limits_of: LimitsOf) -> None:
        self._pool = pool
        self._limits_of = limits_of
        self._holdings: dict[str, Holding] = {}

    def of(self, principal: str) -> Holding:
        """Return what the principal holds now, as a copy."""
        held = self._holdings.get(principal)
        return Holding() if held is None else Holding(held.num_sequences, held.num_blocks)

    def principals(self) -> list[str]:
        """Return the principals that hold a sequence, one in creation, or a block, as a copy."""
        return list(self._holdings)

    def check(self, principal: str, *, num_sequences: int = 0, num_blocks: int = 0, num_whole: int = 0) -> None:
        """Return if the quotas allow so much more. A request for nothing more always passes, even above a quota.

        A request that can never fit its quota is refused first, since releasing handles would not help.

        Args:
            principal: The principal that asks.
            num_sequences: Sequences to be created.
            num_blocks: Blocks to be allocated.
            num_whole: All blocks that the request must hold at once, those held already included. Above the quota, even
                a principal that held nothing else could not get them.

        Raises:
            QuotaExceeded: ``HANDLES`` or ``KV_TOKENS``. If the request can never fit, ``needed`` is above ``limit`` and
                there is no ``retry_after_s``.
        """
        limits = self._limits_of(principal)
        if limits.handles is None and limits.kv_tokens is None:
            return
        held = self.of(principal)
        num_whole = max(num_whole, num_blocks)
        size = self._pool.block_size
        wanted = [
            ("HANDLES", held.num_sequences, num_sequences, num_sequences, limits.handles),
            ("KV_TOKENS", held.num_blocks * size, num_blocks * size, num_whole * size, limits.kv_tokens),
        ]
        for quota, used, more, whole, limit in wanted:
            if limit is not None and more and whole > limit:
                raise QuotaExceeded(quota, used, limit, None, needed=whole)
        for quota, used, more, _, limit in wanted:
            if limit is not None and more and used + more > limit:
                raise QuotaExceeded(quota, used, limit, needed=more)

    def allocate(self, principal: str, count: int) -> list[int]:
        """Return ``count`` free blocks, each with one owner; all or nothing. :meth:`check` checks the quotas.

        Raises:
            BlocksExhausted: Fewer are free; nothing changed.
        """
        block_ids = self._pool.allocate(count)
        if block_ids:
            self._holding(principal).num_blocks += len(block_ids)
        return block_ids

    def adopt(self, principal: str, block_ids: list[int]) -> None:
        """Add an owner to blocks that the principal owns already or that are cached; see :meth:`allocate`."""
        if num_taken := self._pool.adopt(block_ids):
            self._holding(principal).num_blocks += num_taken

    def release(self, principal: str, block_ids: list[int]) -> int:
        """Take one owner from each block and return how many became free."""
        num_freed = self._pool.release(block_ids)
        if num_freed:
            self._holdings[principal].num_blocks -= num_freed
            self._forget_empty(principal)
        return num_freed

    def enter(self, principal: str, count: int = 1) -> None:
        """Count sequences that are created, or will be."""
        self._holding(principal).num_sequences += count

    def leave(self, principal: str) -> None:
        """Stop counting a sequence that has ended, or that will not be created."""
        self._holdings[principal].num_sequences -= 1
        self._forget_empty(principal)

    def check_integrity(self, expected: Mapping[str, Holding]) -> None:
        """Raise AssertionError unless the invariant of the class holds.

        Args:
            expected: What each principal holds, counted from scratch; without those that hold nothing.
        """
        assert self._holdings == dict(expected), f"{self._holdings} is kept, {dict(expected)} was counted"
        num_blocks = sum(held.num_blocks for held in self._holdings.values())
        assert num_blocks == self._pool.num_used, f"{num_blocks} blocks are accounted for, not {self._pool.num_used}"

    def _holding(self, principal: str) -> Holding:
        return self._holdings.setdefault(principal, Holding())

    def _forget_empty(self, principal: str) -> None:
        held = self._holdings[principal]
        if not held.num_sequences and not held.num_blocks:
            del self._holdings[principal]
