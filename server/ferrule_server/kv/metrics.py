"""What the KV core counts, and how it stands at a moment."""

from __future__ import annotations

from dataclasses import dataclass

from ferrule_server.kv.block_pool import BlockPool
from ferrule_server.kv.per_principal import PerPrincipal


@dataclass(slots=True)
class KvCounters:
    """Counted since start, each where it happens, by the one thread that changes the store.

    Attributes:
        created: Sequences created, forks included.
        forks: Of these, branches made by fork and by branch reservations.
        truncates: Truncates and rewinds that dropped tokens.
        released: Sequences released by their owners.
        expired: Sequences whose lease ran out.
        block_copies: Blocks copied because a shared one would have been written, counted at the commit.
        prefix_lookup_tokens: Tokens of prompts that were looked up in the prefix cache and got their blocks.
        prefix_hit_tokens: Of these, tokens found.
    """

    created: int = 0
    forks: int = 0
    truncates: int = 0
    released: int = 0
    expired: int = 0
    block_copies: int = 0
    prefix_lookup_tokens: int = 0
    prefix_hit_tokens: int = 0


class KvLedger:
    """What is counted, of the whole store and of each principal: the same numbers, so that neither can be forgotten.

    Attributes:
        total: Of all principals.
        own: Of each principal that was active lately.
    """

    __slots__ = ("own", "total")

    def __init__(self) -> None:
        self.total = KvCounters()
        self.own = PerPrincipal(KvCounters)

    def add(self, principal: str, counter: str, amount: int = 1) -> None:
        """Count something that a principal did or that happened to what it owns.

        Args:
            principal: Whose it is.
            counter: Name of a field of :class:`KvCounters`.
            amount: How much.
        """
        for counters in (self.total, self.own.of(principal)):
            setattr(counters, counter, getattr(counters, counter) + amount)


@dataclass(frozen=True, slots=True)
class KvMetrics:
    """The pool and the store at a moment. Names beginning ``num_`` count since start, the others say how it is now.

    empty_blocks + cached_blocks + used_blocks == total_blocks.

    Attributes:
        block_size: Tokens in one block.
        total_blocks: Blocks that sequences can use: all but the null block.
        empty_blocks: Blocks that nobody owns and that hold nothing.
        cached_blocks: Blocks that only the prefix cache knows; handed out when no empty one is left.
        used_blocks: Blocks that sequences and reservations own, each counted once.
        shared_blocks: Of these, blocks with two owners or more.
        live_sequences: Sequences alive.
        tombstones: Expired sequences still remembered.
        num_created, num_forks, num_truncates, num_released, num_expired, num_block_copies, num_prefix_lookup_tokens,
            num_prefix_hit_tokens: See :class:`KvCounters`.
        num_prefix_evictions: Cached blocks handed out.
        num_exhausted: Requests refused because too few blocks were free.
    """

    block_size: int
    total_blocks: int
    empty_blocks: int
    cached_blocks: int
    used_blocks: int
    shared_blocks: int
    live_sequences: int
    tombstones: int
    num_created: int
    num_forks: int
    num_truncates: int
    num_released: int
    num_expired: int
    num_block_copies: int
    num_prefix_lookup_tokens: int
    num_prefix_hit_tokens: int
    num_prefix_evictions: int
    num_exhausted: int


def metrics_of(pool: BlockPool, counters: KvCounters, live_sequences: int, tombstones: int) -> KvMetrics:
    """Return the figures as they are read, one by one, while the pool may be changing in another thread."""
    empty_blocks = pool.num_empty
    # Blocks may have moved between the two reads: they add up all the same.
    cached_blocks = min(pool.num_cached, pool.capacity - empty_blocks)
    return KvMetrics(
        block_size=pool.block_size,
        total_blocks=pool.capacity,
        empty_blocks=empty_blocks,
        cached_blocks=cached_blocks,
        used_blocks=pool.capacity - empty_blocks - cached_blocks,
        shared_blocks=pool.num_shared,
        live_sequences=live_sequences,
        tombstones=tombstones,
        num_created=counters.created,
        num_forks=counters.forks,
        num_truncates=counters.truncates,
        num_released=counters.released,
        num_expired=counters.expired,
        num_block_copies=counters.block_copies,
        num_prefix_lookup_tokens=counters.prefix_lookup_tokens,
        num_prefix_hit_tokens=counters.prefix_hit_tokens,
        num_prefix_evictions=pool.num_evictions,
        num_exhausted=pool.num_exhausted,
    )
