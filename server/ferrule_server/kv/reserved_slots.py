"""Reserved slots: blocks set aside for a sequence, so that it can grow to a length whatever others do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ferrule_server.errors import ContextExceeded, ExceedsPool, HandleUnknown
from ferrule_server.kv.block_pool import BlockPool
from ferrule_server.kv.metrics import KvLedger
from ferrule_server.kv.prefix_cache import PrefixCache
from ferrule_server.kv.sequence import Sequence
from ferrule_server.kv.usage import Usage


class SlotRequest(NamedTuple):
    """A request to set blocks aside for one sequence.

    Attributes:
        sequence: A sequence of the principal that asks.
        target_length: Absolute length up to which blocks are set aside.
        admission_target_length: Absolute length up to which blocks must be free now. Without effect unless it is above
            ``target_length``.
    """

    sequence: Sequence
    target_length: int
    admission_target_length: int = 0

    @property
    def fit_length(self) -> int:
        """Length up to which blocks must be set aside or free."""
        return max(self.target_length, self.admission_target_length)


@dataclass(frozen=True, slots=True)
class SlotAllocation:
    """The result for one sequence: the blocks that it held before and after, spares included."""

    handle_id: str
    blocks_before: int
    blocks_after: int

    @property
    def new_blocks(self) -> int:
        """Blocks taken from the pool."""
        return self.blocks_after - self.blocks_before


@dataclass(frozen=True, slots=True)
class SlotReservation:
    """The evidence of a reservation: free blocks before and after it, and the result of each request, in order."""

    free_blocks_before: int
    free_blocks_after: int
    allocations: tuple[SlotAllocation, ...]


@dataclass(frozen=True, slots=True)
class ReservedSlots:
    """Sets blocks aside as the *spares* of a sequence, and keeps as many of them as its reservation needs.

    A spare holds no token and is in no table. Appends take the spares before the pool's free blocks::

        reserved_length 14, block_size 4                    table            spares
        5 tokens, none shared                               [A][B . . .]     c d
        a fork of all 5 shares the partial block B          [A][B . . .]     c d e      e: B's copy, at the next append
        2 more tokens                                       [A][c . .  ]     d e        only the fork owns B
        truncate to 3, while the fork shares A              [A]              c d e f    f: A's copy

    So an append up to ``reserved_length`` finds its blocks after any fork, truncate or rewind. An operation that would
    break this (a fork of the partial last block, a truncate into blocks that forks share) takes the missing blocks
    first, or is refused and changes nothing. While an append is in flight, spares are counted from the current tip, as
    if the append had no blocks of its own. So the room is there whether it is committed or aborted, and surplus spares
    go back at its commit.

    The prefix cache must not break it either. A truncate can leave a registered block as the partial last one, and a
    prompt that finds it would share it without a check. So such a block, if its only owner has room after it, is
    withdrawn as soon as spares are counted without its copy. A block that becomes a spare is withdrawn too.

    A cold sequence has no spares: those of its reservation are taken together with its blocks.

    Invariant: spares have one owner, their sequence, and are not registered in the prefix cache; they are as many as
    appends up to ``reserved_length`` need, the copy of a shared partial last block included, and at most that copy
    more; without a reservation there are none.

    Args:
        pool: The blocks.
        usage: Allocates them and takes them back.
        cache: Registers full blocks.
        ledger: Counts truncates.
        max_context: Longest sequence in tokens.
    """

    pool: BlockPool
    usage: Usage
    cache: PrefixCache
    ledger: KvLedger
    max_context: int

    def reserve(self, requests: Iterable[SlotRequest]) -> SlotReservation:
        """Set blocks aside for all requests or for none. See :meth:`SequenceStore.reserve_slots`."""
        requests = list(requests)
        self._check(requests)
        free_blocks_before = self.pool.num_free
        allocations = tuple(self._raise_to(request.sequence, request.target_length) for request in requests)
        return SlotReservation(free_blocks_before, self.pool.num_free, allocations)

    def num_missing_to_share(self, sequence: Sequence, length: int) -> int:
        """Return how many spares (0 or 1) the sequence lacks before its first ``length`` tokens may be shared."""
        if sequence.is_cold:
            return 0
        is_tail_shared = self.pool.num_blocks_for(length) == len(sequence.block_ids)
        return self._num_missing(sequence, sequence.reserved_length, is_tail_shared=is_tail_shared)

    def add_spares(self, sequence: Sequence, count: int) -> None:
        """Allocate ``count`` spares.

        Raises:
            BlocksExhausted: Fewer blocks are free; nothing changed.
        """
        if count > 0:
            sequence.spare_ids += tuple(self.usage.allocate(sequence.principal, count))

    def truncate(self, sequence: Sequence, length: int) -> int:
        """Shorten the sequence, keep what is reserved for it, and return how many blocks became free.

        If ``length`` is that of the sequence, nothing changes.

        Raises:
            QuotaExceeded, BlocksExhausted: Other sequences share the dropped blocks, so the reservation needs other
                blocks instead, and there are too few; nothing changed.
        """
        if length == sequence.length:
            return 0
        num_freed = 0 if sequence.is_cold else self._drop_tail(sequence, length)
        sequence.chain.truncate(length)
        sequence.last_truncate = None
        self.ledger.add(sequence.principal, "num_truncates")
        return num_freed

    def settle(self, sequence: Sequence, block_ids: list[int]) -> None:
        """Give a sequence with spares its table after an append, and give back the spares that it no longer needs."""
        if block_ids is not sequence.block_ids:
            taken = set(block_ids)
            sequence.spare_ids = tuple(each for each in sequence.spare_ids if each not in taken)
            sequence.block_ids = block_ids
        num_needed = max(0, self.pool.num_blocks_for(sequence.reserved_length) - len(block_ids))
        extra_ids, sequence.spare_ids = sequence.spare_ids[num_needed:], sequence.spare_ids[:num_needed]
        self.usage.release(sequence.principal, list(extra_ids))

    def check_integrity(self, sequence: Sequence) -> None:
        """Raise AssertionError unless the invariant of the class holds for this sequence."""
        name, spares = sequence.handle_id, sequence.spare_ids
        if sequence.is_cold:
            assert not spares, f"{name} is cold and has spares"
            return
        assert all(self.pool.refcount(block_id) == 1 for block_id in spares), f"a spare of {name} is shared"
        assert not set(spares) & set(sequence.block_ids), f"a spare of {name} is in its table"
        is_shared = self.pool.refcount(sequence.block_ids[-1]) > 1
        least = self._num_needed(sequence.length, sequence.reserved_length, is_tail_shared=is_shared)
        most = self._num_needed(sequence.length, sequence.reserved_length, is_tail_shared=True)
        assert least <= len(spares) <= most, f"{name} has {len(spares)} spares, not {least} to {most}"

    def _drop_tail(self, sequence: Sequence, length: int) -> int:
        """Shorten the block table; see :meth:`truncate`."""
        num_kept = self.pool.num_blocks_for(length)
        kept_ids, tail_ids = sequence.block_ids[:num_kept], sequence.block_ids[num_kept:]
        if not sequence.reserved_length:
            sequence.block_ids = kept_ids
            return self.usage.release(sequence.principal, tail_ids)
        # The last blocks become spares first: those before them can be found in the prefix cache without them.
        own_ids = [*sequence.spare_ids]
        own_ids += [block_id for block_id in reversed(tail_ids) if self.pool.refcount(block_id) == 1]
        is_shared = self.pool.refcount(kept_ids[-1]) > 1
        num_needed = self._num_needed(length, sequence.reserved_length, is_tail_shared=is_shared)
        num_missing = num_needed - len(own_ids)
        if num_missing > 0:
            self.usage.check(sequence.principal, num_blocks=num_missing)
            own_ids += self.usage.allocate(sequence.principal, num_missing)
        given_back = [block_id for block_id in tail_ids if self.pool.refcount(block_id) > 1]
        given_back += reversed(own_ids[num_needed:])
        sequence.block_ids, sequence.spare_ids = kept_ids, tuple(own_ids[:num_needed])
        for block_id in sequence.spare_ids:
            self.cache.withdraw(block_id)
        self._withdraw_tail(sequence, length)
        return self.usage.release(sequence.principal, given_back)

    def _check(self, requests: list[SlotRequest]) -> None:
        """Raise unless all requests fit together, each at its ``fit_length``."""
        lengths: dict[Sequence, int] = {}
        for request in requests:
            if request.sequence.is_released:
                raise HandleUnknown(request.sequence.handle_id)
            if request.sequence.is_cold:
                raise RuntimeError(f"{request.sequence.handle_id} is cold: its blocks are reserved when it is computed")
            if request.fit_length > self.max_context:
                raise ContextExceeded(request.fit_length, self.max_context)
            before = lengths.get(request.sequence, request.sequence.reserved_length)
            lengths[request.sequence] = max(before, request.fit_length)
        num_missing = sum(self._num_missing(each, length) for each, length in lengths.items())
        if not num_missing:
            return
        (principal,) = {each.principal for each in lengths}
        num_whole = self._num_whole(lengths)
        if num_whole > self.pool.capacity:
            raise ExceedsPool(num_whole, self.pool.capacity)
        self.usage.check(principal, num_blocks=num_missing, num_whole=num_whole)
        self.pool.require(num_missing)

    def _num_whole(self, lengths: dict[Sequence, int]) -> int:
        """Return the least number of blocks that sequences of these lengths hold, whatever others give up."""
        held: set[int] = set()
        for sequence in lengths:
            held.update(sequence.held_ids, sequence.spare_ids)
        grown = (
            self.pool.num_blocks_for(length) - each.num_given_back - each.num_blocks for each, length in lengths.items()
        )
        return len(held) + sum(max(0, count) for count in grown)

    def _raise_to(self, sequence: Sequence, target_length: int) -> SlotAllocation:
        """Set blocks aside up to ``target_length``, known to be free."""
        blocks_before = sequence.num_blocks
        sequence.reserved_length = max(sequence.reserved_length, target_length)
        self._withdraw_tail(sequence, sequence.length)
        self.add_spares(sequence, self._num_missing(sequence, sequence.reserved_length))
        return SlotAllocation(sequence.handle_id, blocks_before, sequence.num_blocks)

    def _withdraw_tail(self, sequence: Sequence, length: int) -> None:
        """Withdraw the partial last block of a sequence that is its only owner and has room after it."""
        tail_id = sequence.block_ids[-1]
        if length % self.pool.block_size and sequence.reserved_length and self.pool.refcount(tail_id) == 1:
            self.cache.withdraw(tail_id)

    def _num_missing(self, sequence: Sequence, reserved_length: int, *, is_tail_shared: bool = False) -> int:
        """Return how many spares the sequence lacks for a reservation of that length."""
        is_tail_shared = is_tail_shared or self.pool.refcount(sequence.block_ids[-1]) > 1
        num_needed = self._num_needed(sequence.length, reserved_length, is_tail_shared=is_tail_shared)
        return max(0, num_needed - len(sequence.spare_ids))

    def _num_needed(self, length: int, reserved_length: int, *, is_tail_shared: bool) -> int:
        """Return how many blocks the appends from ``length`` to ``reserved_length`` take."""
        if reserved_length <= length:
            return 0
        num_copies = is_tail_shared and length % self.pool.block_size > 0
        return self.pool.num_blocks_for(reserved_length) - self.pool.num_blocks_for(length) + num_copies
