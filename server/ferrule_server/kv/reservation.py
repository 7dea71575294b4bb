"""Reservations: everything an append needs, held from admission to commit."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from ferrule_server.errors import ContextExceeded, ExceedsPool
from ferrule_server.kv.block_pool import BlockPool
from ferrule_server.kv.lineage import LineageChain
from ferrule_server.kv.metrics import KvLedger
from ferrule_server.kv.prefix_cache import PrefixCache
from ferrule_server.kv.reserved_slots import ReservedSlots
from ferrule_server.kv.sequence import Sequence, require_idle
from ferrule_server.kv.usage import Usage


@dataclass(eq=False, slots=True)
class Reservation:
    """Blocks for one append. Nothing of it can be seen in a sequence before commit.

    Attributes:
        sequence: The one appended to; None when commit will create one.
        source: The one branched from (``on_stale=FORK``), else None.
        principal: Who will own a created sequence.
        start: Tokens before the first one written.
        num_tokens: Tokens to be written; commit takes so many of them, or fewer.
        block_ids: The whole block table, covering start + num_tokens tokens. Replaced as a whole, not to be changed.
        copies: (source block, destination block) pairs to copy before the first row is written. The sources stay
            alive until commit or abort.
        held_ids: Blocks of which the reservation itself is an owner: what abort gives back.
        chain: Of the sequence to be created: its tokens before ``start``, or the whole prompt where that was looked up;
            None when there is a sequence already.
        is_live: Neither committed nor aborted.
        reserved_length: Of the sequence to be created; what ``held_ids`` has beyond the table becomes its spares.
        num_cached: Of the tokens to be written, how many the first blocks of the table hold already: they came out of
            the prefix cache and must not be written. Whole blocks; may be all of the tokens.
        is_published: Of the sequence to be created.
    """

    sequence: Sequence | None
    source: Sequence | None
    principal: str
    start: int
    num_tokens: int
    block_ids: list[int]
    copies: list[tuple[int, int]]
    held_ids: list[int]
    chain: LineageChain | None = field(default=None, repr=False)
    is_live: bool = True
    reserved_length: int = 0
    num_cached: int = 0
    is_published: bool = False

    @property
    def pinned(self) -> Sequence | None:
        """The sequence that must not expire while the reservation lives."""
        return self.sequence or self.source

    def check_tokens(self, token_ids: SequenceOf[int]) -> None:
        """Return if a sequence to be created can begin with these tokens.

        Raises:
            ValueError: Its blocks were looked up for other ones, or hold more of them.
        """
        if self.chain is None or len(self.chain) == self.start:
            return
        if len(token_ids) < self.num_cached:
            raise ValueError(f"{self.num_cached} tokens are cached, only {len(token_ids)} are committed")
        if self.chain.token_ids[: len(token_ids)] != array("I", token_ids):
            raise ValueError("the tokens are not those of the prompt that was looked up")


class Reservations:
    """The live reservations, and the one place where appends get their blocks. A call that raises changes nothing.

    What stands against a request is looked at in this order, from what never changes to what may be gone in a moment:
    the context, the size of the pool, a quota that is too small for the request alone, the quotas as they are used
    now, the free blocks. So a principal at its quota hears that, whether or not the pool is full as well.

    Invariant: a sequence is pinned at least as often as live reservations are on it, and is appending exactly when
    one of them will extend it; a live reservation's rows go to blocks with refcount 1 only, which the prefix cache does
    not know, and the blocks it is to copy from are owned; a sequence does not move under a reservation that will extend
    it.

    Args:
        pool: The blocks.
        usage: Where they are allocated and given back.
        slots: Blocks set aside for sequences.
        cache: Where prompts are looked up.
        counters: Told what was found there.
        max_context: Longest sequence in tokens.
    """

    __slots__ = ("_cache", "_ledger", "_live", "_max_context", "_pool", "_slots", "_usage")

    def __init__(
        self,
        pool: BlockPool,
        usage: Usage,
        slots: ReservedSlots,
        cache: PrefixCache,
        *,
        ledger: KvLedger,
        max_context: int,
    ) -> None:
        self._pool = pool
        self._usage = usage
        self._slots = slots
        self._cache = cache
        self._ledger = ledger
        self._max_context = max_context
        self._live: set[Reservation] = set()

    @property
    def live(self) -> Iterator[Reservation]:
        """Those neither committed nor aborted."""
        return iter(self._live)

    def reserve_new(
        self,
        principal: str,
        num_tokens: int,
        chain: LineageChain,
        reserved_length: int = 0,
        prompt: SequenceOf[int] | None = None,
    ) -> Reservation:
        """Hold the blocks of a sequence to be created; ``chain`` is empty and becomes its own."""
        self._check_need(0, num_tokens, reserved_length)
        found_ids: list[int] = []
        if prompt is not None:
            chain.extend(prompt)
            found_ids = self._cache.find(principal, chain)
        num_blocks = self._pool.num_blocks_for(max(num_tokens, reserved_length))
        held_ids = self._hold(principal, found_ids, num_blocks)
        table = held_ids[: self._pool.num_blocks_for(num_tokens)]
        reservation = Reservation(None, None, principal, 0, num_tokens, table, [], held_ids, chain)
        reservation.reserved_length = reserved_length
        reservation.num_cached = len(found_ids) * self._pool.block_size
        if prompt is not None:
            self._ledger.add(principal, "prefix_lookup_tokens", num_tokens)
            self._ledger.add(principal, "prefix_hit_tokens", reservation.num_cached)
        return self._open(reservation)

    def reserve_append(self, sequence: Sequence, num_tokens: int, *, is_checked: bool = False) -> Reservation:
        """Hold the blocks for more tokens at the tip: spares of the sequence first, then free ones of the pool.

        Args:
            sequence: One that nothing is in flight on.
            num_tokens: Tokens to be written.
            is_checked: :meth:`check_rewind` said that there is room.
        """
        if sequence.is_released or sequence.is_appending:
            require_idle(sequence)
        start, table = len(sequence.chain.token_ids), sequence.block_ids
        fresh_ids: list[int] = []
        if not is_checked:
            self._check_need(start, num_tokens)
        is_copied = self._pool.refcount(table[-1]) > 1 and self._is_partial(start)
        num_fresh = self._pool.num_blocks_for(start + num_tokens) - len(table) + is_copied
        if not num_fresh:
            return self._open(Reservation(sequence, None, sequence.principal, start, num_tokens, table, [], fresh_ids))
        # Spares stay the sequence's until commit, so that an abort has nothing to put back.
        spare_ids = list(sequence.spare_ids[:num_fresh])
        if num_more := num_fresh - len(spare_ids):
            if not is_checked:
                num_whole = self._pool.num_blocks_for(start + num_tokens)
                self._usage.check(sequence.principal, num_blocks=num_more, num_whole=num_whole)
            fresh_ids = self._usage.allocate(sequence.principal, num_more)
        block_ids, copies = _extended(table, spare_ids + fresh_ids, is_copied=is_copied)
        return self._open(
            Reservation(sequence, None, sequence.principal, start, num_tokens, block_ids, copies, fresh_ids)
        )

    def reserve_again(self, reservation: Reservation) -> bool:
        """Let a committed append of one token to a sequence be that of the next one, if that needs nothing new.

        It is then just what :meth:`reserve_append` would return. Where blocks or checks are needed that it knows
        nothing of nothing happens, and it returns False.
        """
        sequence = reservation.sequence
        if sequence is None or reservation.is_live or sequence.is_released or sequence.is_appending:
            return False
        start, table = len(sequence.chain.token_ids), sequence.block_ids
        is_partial = start % self._pool.block_size > 0
        if not is_partial or start >= self._max_context or self._pool.refcount(table[-1]) > 1:
            return False
        reservation.start, reservation.num_tokens, reservation.block_ids = start, 1, table
        if reservation.held_ids or reservation.copies:
            reservation.held_ids, reservation.copies = [], []
        reservation.is_live = True
        self._open(reservation)
        return True

    def reserve_branch(self, source: Sequence, length: int, num_tokens: int) -> Reservation:
        """Hold what a new sequence needs that shares the first ``length`` tokens of ``source`` and appends more."""
        require_idle(source)
        prefix = prefix_blocks(source, length, self._pool)
        # The source must outlive the copy, so its partial block counts as well: no waiting would spare it.
        is_copied = self._is_partial(length)
        self._check_need(length, num_tokens, num_copies=is_copied)
        num_whole = self._pool.num_blocks_for(length + num_tokens) + is_copied
        num_fresh, num_spares = num_whole - len(prefix), self._slots.num_missing_to_share(source, length)
        self._usage.check(
            source.principal, num_sequences=1, num_blocks=num_fresh + num_spares, num_whole=num_whole + num_spares
        )
        self._pool.require(num_fresh + num_spares)
        self._slots.add_spares(source, num_spares)
        fresh_ids = self._usage.allocate(source.principal, num_fresh)
        self._usage.enter(source.principal)
        self._pool.share(prefix)
        block_ids, copies = _extended(prefix, fresh_ids, is_copied=is_copied)
        held_ids, chain = prefix + fresh_ids, source.chain.copy(length)
        return self._open(
            Reservation(None, source, source.principal, length, num_tokens, block_ids, copies, held_ids, chain)
        )

    def check_rewind(self, sequence: Sequence, length: int, num_tokens: int) -> None:
        """Return if an append at ``length`` can be reserved once what lies beyond it is dropped."""
        require_idle(sequence)
        prefix = prefix_blocks(sequence, length, self._pool)
        self._check_need(length, num_tokens)
        is_copied = self._is_partial(length) and self._pool.refcount(prefix[-1]) > 1
        # What is reserved beyond the append must be there afterwards as well.
        num_whole = self._pool.num_blocks_for(max(length + num_tokens, sequence.reserved_length))
        num_needed = num_whole - len(prefix) + is_copied
        num_own = self._pool.count_sole(sequence.block_ids[len(prefix) :]) + len(sequence.spare_ids)
        if num_needed <= num_own:
            return
        self._usage.check(sequence.principal, num_blocks=num_needed - num_own, num_whole=num_whole)
        self._pool.require(num_needed, num_own)

    def foresee(self, reservations: SequenceOf[Reservation]) -> list[list[int] | None]:
        """Return the tables of :meth:`SequenceStore.foresee`.

        A token in the block of the one before it goes where nothing was committed, in a block with one owner that the
        cache does not know (or the reservation could not be live). Other blocks are spares of the sequence, or empty
        ones of the pool; neither are known to the cache, and whoever gets them writes to a slot before it is read.
        """
        tables: list[list[int] | None] = []
        without: list[int] = []
        size, max_context = self._pool.block_size, self._max_context
        for reservation in reservations:
            table, stop = reservation.block_ids, reservation.start + reservation.num_tokens
            if stop >= max_context:
                tables.append(None)
            elif stop % size:
                tables.append(table)
            elif (spare_id := _next_spare(reservation)) is not None:
                tables.append([*table, spare_id])
            else:
                without.append(len(tables))
                tables.append(None)
        for index, block_id in zip(without, self._pool.evict_next(len(without)), strict=False):
            tables[index] = [*reservations[index].block_ids, block_id]
        return tables

    def shorten(self, reservation: Reservation, num_tokens: int) -> None:
        """Make the reservation one for fewer tokens, at least one; what it holds beyond these goes back.

        Blocks of the pool go to the pool and spares stay the sequence's. No copy is lost: the row that needs it is the
        first one. The room of a sequence to be created stays whole: blocks that leave its table become spares.
        """
        num_kept = self._pool.num_blocks_for(reservation.start + num_tokens)
        num_room = self._pool.num_blocks_for(reservation.reserved_length)
        reservation.num_tokens = num_tokens
        surplus = set(reservation.block_ids[max(num_kept, num_room) :])
        reservation.block_ids = reservation.block_ids[:num_kept]
        given_back = [block_id for block_id in reservation.held_ids if block_id in surplus]
        reservation.held_ids = [block_id for block_id in reservation.held_ids if block_id not in surplus]
        self._usage.release(reservation.principal, given_back)

    def close(self, reservation: Reservation) -> None:
        """End a live reservation; what becomes of the blocks it holds is the caller's to say."""
        self._live.remove(reservation)
        reservation.is_live = False
        if (sequence := reservation.sequence) is not None:
            sequence.is_appending = False
            sequence.num_pins -= 1
        elif reservation.source is not None:
            reservation.source.num_pins -= 1

    def abort(self, reservation: Reservation) -> None:
        """Give back what was reserved and nothing else; a closed reservation is left alone."""
        if reservation.is_live:
            self.close(reservation)
            self._usage.release(reservation.principal, reservation.held_ids)
            if reservation.sequence is None:
                self._usage.leave(reservation.principal)

    def abort_all(self) -> None:
        """Abort every live reservation."""
        for reservation in list(self._live):
            self.abort(reservation)

    def count_owners(self) -> Counter[int]:
        """Return how many live reservations hold each block."""
        return Counter(block_id for reservation in self._live for block_id in reservation.held_ids)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariant of the class holds."""
        num_users = Counter(each.pinned for each in self._live if each.pinned is not None)
        num_appends = Counter(each.sequence for each in self._live if each.sequence is not None)
        for sequence, count in num_users.items():
            assert sequence.num_pins >= count, f"{sequence.handle_id} is pinned {sequence.num_pins} times by {count}"
            assert num_appends[sequence] == int(sequence.is_appending), f"{sequence.handle_id} has other appends"
        for reservation in self._live:
            assert reservation.is_live, "a closed reservation is kept"
            if reservation.sequence is None or not reservation.sequence.is_released:
                self._check_table(reservation)

    def _hold(self, principal: str, found_ids: list[int], num_blocks: int) -> list[int]:
        """Return so many blocks for a new sequence, those found in the prefix cache first; all or nothing."""
        num_fresh = num_blocks - len(found_ids)
        num_more = num_fresh + self._pool.count_free(found_ids)
        self._usage.check(principal, num_sequences=1, num_blocks=num_more, num_whole=num_blocks)
        self._pool.require(num_more)
        self._cache.link(found_ids)
        # What was found first, or it might be handed out for the rest.
        self._usage.adopt(principal, found_ids)
        fresh_ids = self._usage.allocate(principal, num_fresh)
        self._usage.enter(principal)
        return found_ids + fresh_ids

    def _check_table(self, reservation: Reservation) -> None:
        """Test a reservation that can still be committed (of others the table is void: they wait to be aborted)."""
        start, stop = reservation.start, reservation.start + reservation.num_tokens
        sequence = reservation.sequence
        assert sequence is None or sequence.length == start, "a sequence moved under its reservation"
        assert len(reservation.block_ids) == self._pool.num_blocks_for(stop), "a reserved table has another size"
        written_ids = reservation.block_ids[(start + reservation.num_cached) // self._pool.block_size :]
        for block_id in written_ids:
            assert self._pool.refcount(block_id) == 1, f"block {block_id} would be written and is shared"
        self._cache.check_unlisted(written_ids)
        for source_id, _ in reservation.copies:
            assert self._pool.refcount(source_id) > 0, f"block {source_id} is to be copied and is free"

    def _check_need(self, start: int, num_tokens: int, reserved_length: int = 0, *, num_copies: int = 0) -> None:
        """Raise if so many tokens from ``start`` on would not fit the context or the whole, else empty, pool."""
        if num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
        length = max(start + num_tokens, reserved_length)
        if length > self._max_context:
            raise ContextExceeded(length, self._max_context)
        num_blocks = self._pool.num_blocks_for(length) + num_copies
        if num_blocks > self._pool.capacity:
            raise ExceedsPool(num_blocks, self._pool.capacity)

    def _is_partial(self, length: int) -> bool:
        return length % self._pool.block_size > 0

    def _open(self, reservation: Reservation) -> Reservation:
        """Let the reservation live. From now on its rows may be written at any time.

        Here is the one place where a block could come to be written that the prefix cache knows: one that a sequence
        holds half of, after a truncate or as a fork, and is the last to hold. All others were allocated or set aside
        for the purpose, and these are never registered.
        """
        start, size = reservation.start, self._pool.block_size
        if start % size and (block_id := reservation.block_ids[start // size]) in self._cache.registered:
            self._cache.withdraw(block_id)
        self._live.add(reservation)
        if (sequence := reservation.sequence) is not None:
            sequence.is_appending = True
            sequence.num_pins += 1
        elif reservation.source is not None:
            reservation.source.num_pins += 1
        return reservation


def _extended(prefix: list[int], fresh_ids: list[int], *, is_copied: bool) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the table of ``prefix`` with fresh blocks behind it, and the copies to make.

    Args:
        prefix: Blocks of the tokens before; not changed.
        fresh_ids: Blocks with no other owner.
        is_copied: The last block of ``prefix`` has room and other owners, so it is replaced by a copy::

            prefix  [A A A A] [B B . .]          B is shared, 6 tokens, 4 more to come
            table   [A A A A] [C C c c] [d d . .]    copies = [(B, C)], fresh = [C, d]
    """
    if is_copied:
        return prefix[:-1] + fresh_ids, [(prefix[-1], fresh_ids[0])]
    return prefix + fresh_ids, []


def _next_spare(reservation: Reservation) -> int | None:
    """Return the first spare of its sequence that the reservation leaves; None: there is none."""
    sequence = reservation.sequence
    if sequence is None or not sequence.spare_ids:
        return None
    taken = set(reservation.block_ids)
    return next((each for each in sequence.spare_ids if each not in taken), None)


def prefix_blocks(sequence: Sequence, length: int, pool: BlockPool) -> list[int]:
    """Return the blocks of the first ``length`` tokens, as a list of its own.

    Raises:
        ValueError: ``length`` is outside [1, length of the sequence].
    """
    if not 1 <= length <= sequence.length:
        raise ValueError(f"length {length} is outside [1, {sequence.length}]")
    return sequence.block_ids[: pool.num_blocks_for(length)]
