"""Counters of the sequence store, and its state at a moment."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from ferrule_server.kv.block_pool import BlockPool
from ferrule_server.kv.per_principal import PerPrincipal


@dataclass(slots=True)
class KvCounters:
    """Counts since start. Only the thread that changes the store writes them.

    Attributes:
        num_created: Sequences created, forks included.
        num_forks: Of these, branches made by fork and by branch reservations.
        num_truncates: Truncates and rewinds that dropped tokens.
        num_released: Sequences released by their owners.
        num_expired: Sequences whose lease ended.
        num_block_copies: Blocks copied because a shared block would have been written, counted at the commit.
        num_prefix_lookup_tokens: Tokens of prompts that were looked up in the prefix cache and got their blocks.
        num_prefix_hit_tokens: Of these, tokens found.
        num_given_back: Blocks that sequences gave back because they are outside their windows.
    """

    num_created: int = 0
    num_forks: int = 0
    num_truncates: int = 0
    num_released: int = 0
    num_expired: int = 0
    num_block_copies: int = 0
    num_prefix_lookup_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_given_back: int = 0


@dataclass(frozen=True, slots=True)
class KvLedger:
    """Counts every event twice: for the whole store and for one principal, so neither can be forgotten.

    Attributes:
        total: Counters of all principals.
        own: Counters of each principal that was active recently.
    """

    total: KvCounters = field(default_factory=KvCounters)
    own: PerPrincipal[KvCounters] = field(default_factory=lambda: PerPrincipal(KvCounters))

    def add(self, principal: str, counter: str, amount: int = 1) -> None:
        """Add to a counter of the store and of a principal.

        Args:
            principal: The owner of the sequence.
            counter: Name of a field of :class:`KvCounters`.
            amount: Number to add.
        """
        for counters in (self.total, self.own.of(principal)):
            setattr(counters, counter, getattr(counters, counter) + amount)


@dataclass(slots=True, kw_only=True)
class KvMetrics(KvCounters):
    """The counters and the state of the pool and the store at a moment. Names beginning ``num_`` count since start.

    empty_blocks + cached_blocks + used_blocks == total_blocks.

    Attributes:
        block_size: Tokens in one block.
        total_blocks: Blocks that sequences can use: all but the null block.
        empty_blocks: Blocks without owner that hold nothing.
        cached_blocks: Blocks that only the prefix cache knows; handed out when no empty one is left.
        used_blocks: Blocks that sequences and reservations own, each counted once.
        shared_blocks: Of these, blocks with two owners or more.
        live_sequences: Sequences alive.
        tombstones: Expired sequences still remembered.
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
    num_prefix_evictions: int
    num_exhausted: int


def metrics_of(pool: BlockPool, counters: KvCounters, live_sequences: int, tombstones: int) -> KvMetrics:
    """Return the metrics; they are read one by one, while another thread may be changing the pool."""
    empty_blocks = pool.num_empty
    # Blocks may have moved between the two reads; the sum is right all the same.
    cached_blocks = min(pool.num_cached, pool.capacity - empty_blocks)
    return KvMetrics(
        **asdict(counters),
        block_size=pool.block_size,
        total_blocks=pool.capacity,
        empty_blocks=empty_blocks,
        cached_blocks=cached_blocks,
        used_blocks=pool.capacity - empty_blocks - cached_blocks,
        shared_blocks=pool.num_shared,
        live_sequences=live_sequences,
        tombstones=tombstones,
        num_prefix_evictions=pool.num_evictions,
        num_exhausted=pool.num_exhausted,
    )
