"""Reservations: everything an append needs, held from admission to commit."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from ferrule_server.errors import ContextExceeded, ExceedsPool
from ferrule_server.kv.append_rule import Verdict
from ferrule_server.kv.block_pool import BlockPool
from ferrule_server.kv.lineage import LineageChain
from ferrule_server.kv.metrics import KvLedger
from ferrule_server.kv.new_sequence import USUAL, NewSequence
from ferrule_server.kv.prefix_cache import PrefixCache
from ferrule_server.kv.reserved_slots import ReservedSlots
from ferrule_server.kv.sequence import Sequence, require_idle
from ferrule_server.kv.usage import Usage
from ferrule_server.kv.windows import num_outside, without_first


@dataclass(eq=False, slots=True)
class Reservation:
    """Blocks for the rows of one append. No sequence shows any of it before the commit.

    Attributes:
        verdict: What the rows mean.
        sequence: The sequence that the append extends, branches from (FORK) or only reads (QUERY, REPLAY), or whose
            tokens are run again (WARM); None with CREATE.
        principal: The owner of it, or of the one to be created.
        start: Tokens before the first row.
        num_tokens: Number of rows; the commit takes as many, or fewer.
        block_ids: The block table, at least for start + num_tokens tokens. Replaced as a whole, never changed in place.
        copies: (source block, destination block) pairs to copy before the first row is written. The sources stay
            alive until commit or abort.
        held_ids: Blocks that the reservation itself owns; an abort gives them back.
        chain: The chain of the sequence to be created: its tokens before ``start``, or the whole prompt if that was
            looked up. None if a sequence exists already.
        num_cached: How many of the first rows need not be written, since the table has their KV: their blocks came from
            the prefix cache, or were computed and are in it (whole blocks, and maybe all). Of a read: all rows.
        num_given_back: Blocks that the table of a branch lacks.
        new: How the sequence to be created is kept, unless it is a branch, which is kept like its source. ``held_ids``
            beyond the table become its spares.
    """

    verdict: Verdict
    sequence: Sequence | None
    principal: str
    start: int
    num_tokens: int
    block_ids: list[int]
    copies: list[tuple[int, int]]
    held_ids: list[int]
    chain: LineageChain | None = field(default=None, repr=False)
    num_cached: int = 0
    num_given_back: int = 0
    new: NewSequence = USUAL

    def check_tokens(self, token_ids: SequenceOf[int]) -> None:
        """Return if these tokens of a live reservation can be committed.

        Raises:
            ValueError: There is no token, or more than were reserved. Or the blocks of a sequence to be created were
                looked up for other tokens, or hold more tokens.
        """
        if not 1 <= len(token_ids) <= self.num_tokens:
            raise ValueError(f"{self.num_tokens} tokens were reserved, {len(token_ids)} were written")
        if self.chain is None or len(self.chain) == self.start:
            return
        if len(token_ids) < self.num_cached:
            raise ValueError(f"{self.num_cached} tokens are cached, only {len(token_ids)} are committed")
        if self.chain.token_ids[: len(token_ids)] != array("I", token_ids):
            raise ValueError("the tokens are not those of the prompt that was looked up")


@dataclass(frozen=True, slots=True)
class Reservations:
    """The live reservations, and the one place where appends get their blocks. A call that raises changes nothing.

    Requests are checked in this order, from limits that never change to those that may change in a moment: the
    context, the size of the pool, a quota that is too small for the request alone, the quotas as used now, the free
    blocks. So a principal at its quota is told so, whether or not the pool is full as well.

    Every ``reserve_*`` method raises:

    * ContextExceeded: The sequence would be longer than the context.
    * ExceedsPool: It would need more blocks than the pool has.
    * QuotaExceeded: HANDLES or KV_TOKENS.
    * BlocksExhausted: Too few blocks are free now.
    * HandleUnknown: The sequence is released.

    Invariant: a sequence is pinned at least as often as live reservations are on it, and is appending exactly when
    one of them will extend it; the rows of a live reservation go to blocks with refcount 1 only, which the prefix cache
    does not know, and the blocks to copy from are owned; a sequence does not move under a reservation that will extend
    it.

    Args:
        pool: The blocks.
        usage: Allocates them and takes them back.
        cache: Finds prompts.
        slots: Blocks set aside for sequences.
        ledger: Counts the tokens found.
        max_context: Longest sequence in tokens.

    Attributes:
        live: Reservations neither committed nor aborted; read only.
    """

    pool: BlockPool
    usage: Usage
    cache: PrefixCache
    slots: ReservedSlots
    ledger: KvLedger
    max_context: int
    live: set[Reservation] = field(default_factory=set, init=False)

    def reserve_new(
        self,
        principal: str,
        root: bytes,
        num_tokens: int,
        new: NewSequence = USUAL,
        prompt: SequenceOf[int] | None = None,
    ) -> Reservation:
        """Hold the blocks of a sequence to be created with ``num_tokens`` tokens.

        With a prompt, the new sequence shares the full blocks that the prefix cache knows for its first tokens. The
        reservation's ``num_cached`` counts these tokens, and only the tokens after them are to be written. Such a
        block counts in the quota unless the principal owns it already. If it had no owner, it was one of the free ones.

        Args:
            principal: The owner.
            root: Identifies the model: the root of its lineage.
            num_tokens: Tokens to be written.
            new: How it is kept.
            prompt: These tokens, to be looked up in the prefix cache; the commit then takes no others, and at least the
                cached ones. None: nothing is looked up.

        Raises:
            ValueError: The prompt has another length.
        """
        if prompt is not None and len(prompt) != num_tokens:
            raise ValueError(f"the prompt has {len(prompt)} tokens, not {num_tokens}")
        self._check_need(0, num_tokens, new.reserved_length)
        chain = LineageChain(root)
        found_ids: list[int] = []
        looked_up = prompt if self.cache.is_on else None
        if looked_up is not None:
            chain.extend(looked_up)
            found_ids = self.cache.find(principal, chain)
        reservation = Reservation(Verdict.CREATE, None, principal, 0, num_tokens, [], [], [], chain, new=new)
        self._hold(reservation, found_ids, new.reserved_length)
        if looked_up is not None:
            self.ledger.add(principal, "num_prefix_lookup_tokens", num_tokens)
            self.ledger.add(principal, "num_prefix_hit_tokens", reservation.num_cached)
        return self._open(reservation)

    def reserve_cold(self, sequence: Sequence) -> Reservation:
        """Hold the blocks of a cold sequence, those reserved for it included, to compute its tokens again.

        Full blocks that the prefix cache knows are shared, as for a new sequence with this prompt; private ones too.
        """
        require_idle(sequence)
        principal, length = sequence.principal, sequence.length
        self._check_need(0, length, sequence.reserved_length)
        found_ids = self.cache.find(principal, sequence.chain, is_cold=True)
        reservation = Reservation(Verdict.WARM, sequence, principal, 0, length, [], [], [])
        self._hold(reservation, found_ids, sequence.reserved_length)
        return self._open(reservation)

    def num_cached(self, sequence: Sequence) -> int:
        """Return how many of its first tokens a cold sequence would find in the prefix cache now."""
        return len(self.cache.find(sequence.principal, sequence.chain, is_cold=True)) * self.pool.block_size

    def note_computed(self, reservation: Reservation, num_tokens: int) -> None:
        """Let other cold sequences find the full blocks among the first tokens of one that is being computed."""
        size, sequence = self.pool.block_size, reservation.sequence
        blocks = range(reservation.num_cached // size, num_tokens // size)
        if blocks and reservation in self.live:
            assert sequence is not None, "only a sequence that exists is cold"
            self.cache.register(sequence, reservation.block_ids, blocks, was_cold=True)
            reservation.num_cached = blocks.stop * size

    def reserve_append(self, sequence: Sequence, num_tokens: int) -> Reservation:
        """Hold the blocks for more tokens at the tip: first spares of the sequence, then free blocks of the pool."""
        require_idle(sequence)
        self._check_need(len(sequence.chain.token_ids), num_tokens, num_gone=sequence.num_given_back)
        return self._extend(sequence, num_tokens)

    def reserve_read(self, sequence: Sequence, verdict: Verdict, start: int, stop: int) -> Reservation:
        """Keep a sequence alive while the rows of its tokens ``start`` to ``stop`` run again; nothing is written.

        An append of the sequence may be reserved meanwhile.
        """
        count, table = stop - start, sequence.block_ids
        reservation = Reservation(verdict, sequence, sequence.principal, start, count, table, [], [], num_cached=count)
        self.live.add(reservation)
        sequence.num_pins += 1
        return reservation

    def reserve_again(self, reservation: Reservation) -> bool:
        """Use a committed append of one token to a sequence again, for one more token after its tip.

        Returns:
            Whether the reservation lives again, equal to what :meth:`reserve_append` would return. False: the append
            needs blocks or checks that the reservation does not have, or the sequence is released or busy; nothing
            changed.
        """
        sequence = reservation.sequence
        if sequence is None or reservation in self.live or sequence.is_released or sequence.is_appending:
            return False
        start, table = len(sequence.chain.token_ids), sequence.block_ids
        is_partial = start % self.pool.block_size > 0
        if not is_partial or start >= self.max_context or self.pool.refcount(table[-1]) > 1:
            return False
        reservation.start, reservation.num_tokens, reservation.block_ids = start, 1, table
        if reservation.held_ids or reservation.copies:
            reservation.held_ids, reservation.copies = [], []
        self._open(reservation)
        return True

    def reserve_branch(self, source: Sequence, length: int, num_tokens: int) -> Reservation:
        """Hold what a new sequence needs that shares the first ``length`` tokens and appends ``num_tokens``.

        Full blocks are shared; a partly filled last one will be copied. The source is pinned, not changed.

        Raises:
            KvGivenBack: The source has given back blocks that the rows need.
            ValueError: The source is shorter than ``length``.
        """
        require_idle(source)
        prefix = prefix_blocks(source, length, self.pool)
        # The source must outlive the copy, so its partial block counts as well: waiting would not free it.
        is_copied = self._is_partial(length)
        num_gone = source.num_given_back
        self._check_need(length, num_tokens, num_copies=is_copied, num_gone=num_gone)
        num_whole = self.pool.num_blocks_for(length + num_tokens) + is_copied - num_gone
        shared_ids = prefix[num_gone:]
        num_fresh, num_spares = num_whole - len(shared_ids), self.slots.num_missing_to_share(source, length)
        self.usage.check(
            source.principal, num_sequences=1, num_blocks=num_fresh + num_spares, num_whole=num_whole + num_spares
        )
        self.pool.require(num_fresh + num_spares)
        self.slots.add_spares(source, num_spares)
        fresh_ids = self.usage.allocate(source.principal, num_fresh)
        self.usage.enter(source.principal)
        self.pool.share(shared_ids)
        block_ids, copies = _extended(prefix, fresh_ids, is_copied=is_copied)
        held_ids, chain = shared_ids + fresh_ids, source.chain.copy(length)
        branch = Reservation(Verdict.FORK, source, source.principal, length, num_tokens, block_ids, copies, held_ids)
        branch.chain, branch.num_given_back = chain, num_gone
        return self._open(branch)

    def reserve_rewind(self, sequence: Sequence, length: int, num_tokens: int) -> Reservation:
        """Drop the tokens after ``length`` and hold the blocks for ``num_tokens`` tokens there.

        The tail is dropped at once and for good, even if the reservation is aborted later. It is dropped only if its
        own blocks, the spares and the free blocks together are enough; the quota is checked for the difference.

        Raises:
            KvGivenBack: It has given back blocks that the rows need.
            ValueError: The sequence is shorter than ``length``.
        """
        self._check_rewind(sequence, length, num_tokens)
        self.slots.truncate(sequence, length)
        return self._extend(sequence, num_tokens, Verdict.REWIND)

    def foresee(self, reservations: SequenceOf[Reservation]) -> list[list[int] | None]:
        """Return, for appends in flight, the block table that one more token after each is likely to get.

        Nothing is promised or held. But if the pool is full, a cached block is evicted for a table that needs one more
        block, as the append would do, even if that append never comes.

        Writing to the slot of that token does no harm, whatever happens next: it is never read before it is written
        again. A token in the block of the one before it goes beyond all committed tokens, in a block with one owner
        that the cache does not know (or the reservation could not be live). Other blocks are spares of the sequence, or
        empty blocks of the pool; the cache knows neither, and their next owner writes to a slot before it is read.

        Args:
            reservations: Live ones at tips, in the order in which the next appends are likely to come.

        Returns:
            For each a table that covers one token more than its own; None: there is no room for one.
        """
        tables: list[list[int] | None] = []
        without: list[tuple[int, list[int]]] = []
        size, max_context = self.pool.block_size, self.max_context
        for reservation in reservations:
            table, stop = reservation.block_ids, reservation.start + reservation.num_tokens
            if (sequence := reservation.sequence) is not None and sequence.window:
                count = num_outside(sequence, reservation.start, stop, size)
                table = table if count == sequence.num_given_back else without_first(table, count)
            if stop >= max_context:
                tables.append(None)
            elif stop % size:
                tables.append(table)
            elif (spare_id := _next_spare(reservation)) is not None:
                tables.append([*table, spare_id])
            else:
                without.append((len(tables), table))
                tables.append(None)
        for (index, table), block_id in zip(without, self.pool.evict_next(len(without)), strict=False):
            tables[index] = [*table, block_id]
        return tables

    def shorten(self, reservation: Reservation, num_tokens: int) -> None:
        """Make the reservation one for fewer tokens, at least one, and give back what it holds beyond these.

        Blocks of the pool return to the pool, and spares stay with the sequence. No copy is lost: only the first row
        needs one. The room of a sequence to be created stays whole: blocks that leave its table become spares.
        """
        num_kept = self.pool.num_blocks_for(reservation.start + num_tokens)
        num_room = self.pool.num_blocks_for(reservation.new.reserved_length)
        reservation.num_tokens = num_tokens
        surplus = set(reservation.block_ids[max(num_kept, num_room) :])
        reservation.block_ids = reservation.block_ids[:num_kept]
        given_back = [block_id for block_id in reservation.held_ids if block_id in surplus]
        reservation.held_ids = [block_id for block_id in reservation.held_ids if block_id not in surplus]
        self.usage.release(reservation.principal, given_back)

    def close(self, reservation: Reservation) -> None:
        """End a live reservation; the caller decides what happens to the blocks that it holds."""
        self.live.remove(reservation)
        if (sequence := reservation.sequence) is not None:
            sequence.num_pins -= 1
            if reservation.verdict.moves:
                sequence.is_appending = False

    def abort(self, reservation: Reservation) -> None:
        """Give back what was reserved and nothing else; a closed reservation is left alone."""
        if reservation in self.live:
            self.close(reservation)
            self.usage.release(reservation.principal, reservation.held_ids)
            if reservation.verdict.creates:
                self.usage.leave(reservation.principal)

    def count_owners(self) -> Counter[int]:
        """Return how many live reservations hold each block."""
        return Counter(block_id for reservation in self.live for block_id in reservation.held_ids)

    def count_without(self) -> Counter[int]:
        """Return how many live reservations of branches hold each block without the one before it in the table."""
        return Counter(branch.held_ids[0] for branch in self.live if branch.num_given_back)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariant of the class holds."""
        num_users = Counter(each.sequence for each in self.live if each.sequence is not None)
        num_appends = Counter(each.sequence for each in self.live if each.verdict.moves)
        for sequence, count in num_users.items():
            assert sequence.num_pins >= count, f"{sequence.handle_id} is pinned {sequence.num_pins} times by {count}"
            assert num_appends[sequence] == int(sequence.is_appending), f"{sequence.handle_id} has other appends"
        for reservation in self.live:
            named, verdict = reservation.sequence, reservation.verdict
            is_void = named is not None and named.is_released and verdict.moves
            if not (is_void or verdict.reads):
                self._check_table(reservation)

    def _check_table(self, reservation: Reservation) -> None:
        """Check a reservation that can still be committed; the table of any other one is void until its abort."""
        start, stop = reservation.start, reservation.start + reservation.num_tokens
        length = stop if reservation.verdict is Verdict.WARM else start
        if reservation.verdict.moves and (sequence := reservation.sequence) is not None:
            assert sequence.length == length, "a sequence moved under its reservation"
        assert len(reservation.block_ids) == self.pool.num_blocks_for(stop), "a reserved table has another size"
        written_ids = reservation.block_ids[(start + reservation.num_cached) // self.pool.block_size :]
        for block_id in written_ids:
            assert self.pool.refcount(block_id) == 1, f"block {block_id} would be written and is shared"
        self.cache.check_unlisted(written_ids)
        for source_id, _ in reservation.copies:
            assert self.pool.refcount(source_id) > 0, f"block {source_id} is to be copied and is free"

    def _check_need(
        self, start: int, num_tokens: int, reserved_length: int = 0, *, num_copies: int = 0, num_gone: int = 0
    ) -> None:
        """Raise if so many tokens after ``start`` would not fit the context, or the pool if it were empty.

        ``num_gone`` of the blocks were given back and ``num_copies`` more are needed.
        """
        if num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
        length = max(start + num_tokens, reserved_length)
        if length > self.max_context:
            raise ContextExceeded(length, self.max_context)
        num_blocks = self.pool.num_blocks_for(length) + num_copies - num_gone
        if num_blocks > self.pool.capacity:
            raise ExceedsPool(num_blocks, self.pool.capacity)

    def _check_rewind(self, sequence: Sequence, length: int, num_tokens: int) -> None:
        """Return if an append at ``length`` can be reserved once the tokens after it are dropped."""
        require_idle(sequence)
        prefix = prefix_blocks(sequence, length, self.pool)
        self._check_need(length, num_tokens, num_gone=sequence.num_given_back)
        is_copied = self._is_partial(length) and self.pool.refcount(prefix[-1]) > 1
        # The room beyond the append must be there afterwards as well.
        num_whole = self.pool.num_blocks_for(max(length + num_tokens, sequence.reserved_length))
        num_needed = num_whole - len(prefix) + is_copied
        num_own = self.pool.count_unshared(sequence.block_ids[len(prefix) :]) + len(sequence.spare_ids)
        if num_needed > num_own:
            num_held = num_whole - sequence.num_given_back
            self.usage.check(sequence.principal, num_blocks=num_needed - num_own, num_whole=num_held)
            self.pool.require(num_needed, num_own)

    def _hold(self, reservation: Reservation, found_ids: list[int], reserved_length: int) -> None:
        """Hold the blocks for a new or cold sequence, those found in the prefix cache first; all or nothing."""
        principal, num_tokens, creates = reservation.principal, reservation.num_tokens, reservation.verdict.creates
        num_blocks = self.pool.num_blocks_for(max(num_tokens, reserved_length))
        num_fresh = num_blocks - len(found_ids)
        num_more = num_fresh + self.pool.count_unowned(found_ids)
        self.usage.check(principal, num_sequences=int(creates), num_blocks=num_more, num_whole=num_blocks)
        self.pool.require(num_more)
        self.cache.link(found_ids)
        # The found blocks first, or the allocation might hand them out.
        self.usage.adopt(principal, found_ids)
        reservation.held_ids = found_ids + self.usage.allocate(principal, num_fresh)
        reservation.block_ids = reservation.held_ids[: self.pool.num_blocks_for(num_tokens)]
        reservation.num_cached = len(found_ids) * self.pool.block_size
        if creates:
            self.usage.enter(principal)

    def _extend(self, sequence: Sequence, num_tokens: int, verdict: Verdict = Verdict.APPEND) -> Reservation:
        """Hold the blocks for tokens at the tip that fit the context; after a rewind they fit the quota too."""
        principal, table, start = sequence.principal, sequence.block_ids, len(sequence.chain.token_ids)
        is_copied = self.pool.refcount(table[-1]) > 1 and self._is_partial(start)
        num_whole = self.pool.num_blocks_for(start + num_tokens)
        num_fresh = num_whole - len(table) + is_copied
        if not num_fresh:
            return self._open(Reservation(verdict, sequence, principal, start, num_tokens, table, [], []))
        # Spares stay with the sequence until the commit, so an abort has nothing to put back.
        spare_ids = list(sequence.spare_ids[:num_fresh])
        fresh_ids: list[int] = []
        if num_more := num_fresh - len(spare_ids):
            if verdict is Verdict.APPEND:
                self.usage.check(principal, num_blocks=num_more, num_whole=num_whole - sequence.num_given_back)
            fresh_ids = self.usage.allocate(principal, num_more)
        block_ids, copies = _extended(table, spare_ids + fresh_ids, is_copied=is_copied)
        return self._open(Reservation(verdict, sequence, principal, start, num_tokens, block_ids, copies, fresh_ids))

    def _is_partial(self, length: int) -> bool:
        return length % self.pool.block_size > 0

    def _open(self, reservation: Reservation) -> Reservation:
        """Let the reservation live. From now on its rows may be written at any time.

        Only here could a block be written that the prefix cache knows: the partial last block of a sequence, after a
        truncate or as a fork, when this sequence is its last owner. All other blocks were allocated or set aside for
        writing, and these are never registered.
        """
        start, size = reservation.start, self.pool.block_size
        if start % size and (block_id := reservation.block_ids[start // size]) in self.cache.registered:
            self.cache.withdraw(block_id)
        self.live.add(reservation)
        if (sequence := reservation.sequence) is not None:
            sequence.num_pins += 1
            if reservation.verdict.moves:
                sequence.is_appending = True
        return reservation


def _extended(prefix: list[int], fresh_ids: list[int], *, is_copied: bool) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the table of ``prefix`` followed by fresh blocks, and the copies to make.

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
    """Return the first spare of its sequence that the reservation does not use, or None."""
    sequence = reservation.sequence
    if sequence is None or not sequence.spare_ids:
        return None
    taken = set(reservation.block_ids)
    return next((each for each in sequence.spare_ids if each not in taken), None)


def prefix_blocks(sequence: Sequence, length: int, pool: BlockPool) -> list[int]:
    """Return the blocks of the first ``length`` tokens, as a new list.

    Raises:
        KvGivenBack: The sequence could not be continued there.
        ValueError: ``length`` is outside [1, length of the sequence].
    """
    if not 1 <= length <= sequence.length:
        raise ValueError(f"length {length} is outside [1, {sequence.length}]")
    sequence.require_kv(length)
    return sequence.block_ids[: pool.num_blocks_for(length)]
