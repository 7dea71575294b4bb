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
    """The one way blocks leave the pool and come back, so that each is on somebody's account.

    Invariant: the blocks of all principals add up to the pool's used ones; a principal that holds nothing is not
    remembered. A block never changes hands while it is owned: sequences share blocks with sequences of the same
    principal only. Blocks that nobody owns are on nobody's account, also those that the prefix cache knows.

    Args:
        pool: Where blocks come from.
        limits_of: The quotas of a principal, asked whenever it wants more.
    """

    __slots__ = ("_holdings", "_limits_of", "_pool")

    def __init__(self, pool: BlockPool, limits_of: LimitsOf) -> None:
        self._pool = pool
        self._limits_of = limits_of
        self._holdings: dict[str, Holding] = {}

    def of(self, principal: str) -> Holding:
        """Return what the principal holds now, a copy."""
        held = self._holdings.get(principal)
        return Holding() if held is None else Holding(held.num_sequences, held.num_blocks)

    def principals(self) -> list[str]:
        """Return who holds anything, a copy."""
        return list(self._holdings)

    def check(self, principal: str, *, num_sequences: int = 0, num_blocks: int = 0, num_whole: int = 0) -> None:
        """Return if the quotas allow so much more. Wanting nothing more is always allowed, also above a quota.

        What can never be is said before what cannot be now: releasing would not help against the first.

        Args:
            principal: Who wants it.
            num_sequences: Sequences to be created.
            num_blocks: Blocks to be allocated.
            num_whole: Blocks that must be held together for it, those held already included: above the quota, it
                could not be had by a principal that held nothing else.

        Raises:
            QuotaExceeded: ``HANDLES`` or ``KV_TOKENS``. If it can never be, ``needed`` is above ``limit`` and there is
                no ``retry_after_s``.
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
        """Return ``count`` free blocks, each with one owner; all or nothing. Quotas are not looked at: see `check`.

        Raises:
            BlocksExhausted: Fewer are free; nothing changed.
        """
        block_ids = self._pool.allocate(count)
        if block_ids:
            self._holding(principal).num_blocks += len(block_ids)
        return block_ids

    def adopt(self, principal: str, block_ids: list[int]) -> None:
        """Make the principal one more owner of blocks that it owns already or that are cached; see `allocate`."""
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
        """Count sequences that are alive or in creation from now on."""
        self._holding(principal).num_sequences += count

    def leave(self, principal: str) -> None:
        """Count a sequence off that ended, or that will not be created."""
        self._holdings[principal].num_sequences -= 1
        self._forget_empty(principal)

    def check_integrity(self, expected: Mapping[str, Holding]) -> None:
        """Raise AssertionError unless the invariant of the class holds.

        Args:
            expected: What each principal holds, counted from scratch; those without anything left out.
        """
        assert self._holdings == dict(expected), f"{self._holdings} is kept, {dict(expected)} was counted"
        num_blocks = sum(held.num_blocks for held in self._holdings.values())
        assert num_blocks == self._pool.num_used, f"{num_blocks} blocks are accounted for, not {self._pool.num_used}"

    def _holding(self, principal: str) -> Holding:
        held = self._holdings.get(principal)
        if held is None:
            held = self._holdings[principal] = Holding()
        return held

    def _forget_empty(self, principal: str) -> None:
        held = self._holdings[principal]
        if not held.num_sequences and not held.num_blocks:
            del self._holdings[principal]
