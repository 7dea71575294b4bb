"""Reservations: everything an append needs, held from admission to commit."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ferrule_server.errors import BlocksExhausted, ContextExceeded, ExceedsPool, HandleUnknown
from ferrule_server.kv.block_pool import BlockPool
from ferrule_server.kv.lineage import LineageChain
from ferrule_server.kv.sequence import Sequence


@dataclass(eq=False, slots=True)
class Reservation:
    """Blocks for one append. Nothing of it can be seen in a sequence before commit.

    Attributes:
        sequence: The one appended to; None when commit will create one.
        source: The one branched from (``on_stale=FORK``), else None.
        principal: Who will own a created sequence.
        start: Tokens before the first one written.
        num_tokens: Tokens to be written; commit takes exactly so many.
        block_ids: The whole block table, covering start + num_tokens tokens. Not to be changed.
        copies: (source block, destination block) pairs to copy before the first row is written. The sources stay
            alive until commit or abort.
        held_ids: Blocks of which the reservation itself is an owner: what abort gives back.
        chain: Tokens before ``start`` of the sequence to be created; None when there is one already.
        is_live: Neither committed nor aborted.
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

    @property
    def pinned(self) -> Sequence | None:
        """The sequence that must not expire while the reservation lives."""
        return self.sequence or self.source


class Reservations:
    """The live reservations, and the one place where appends get their blocks. A call that raises changes nothing.

    Invariant: a sequence is pinned at least as often as live reservations are on it, and is appending exactly when
    one of them will extend it; a live reservation's rows go to blocks with refcount 1 only, and the blocks it is to
    copy from are owned; a sequence does not move under a reservation that will extend it.

    Args:
        pool: Where blocks come from.
        max_context: Longest sequence in tokens.
    """

    __slots__ = ("_live", "_max_context", "_pool")

    def __init__(self, pool: BlockPool, max_context: int) -> None:
        self._pool = pool
        self._max_context = max_context
        self._live: set[Reservation] = set()

    def reserve_new(self, principal: str, num_tokens: int, chain: LineageChain) -> Reservation:
        """Hold the blocks of a sequence to be created; ``chain`` is empty and becomes its own."""
        self._check_need(0, num_tokens)
        block_ids, fresh_ids, copies = self._grow([], 0, num_tokens, is_shared=False)
        return self._open(Reservation(None, None, principal, 0, num_tokens, block_ids, copies, fresh_ids, chain))

    def reserve_append(self, sequence: Sequence, num_tokens: int) -> Reservation:
        """Hold the blocks for more tokens at the tip."""
        require_idle(sequence)
        start, table = sequence.length, sequence.block_ids
        self._check_need(start, num_tokens)
        is_shared = self._pool.refcount(table[-1]) > 1
        block_ids, fresh_ids, copies = self._grow(table, start, num_tokens, is_shared=is_shared)
        return self._open(
            Reservation(sequence, None, sequence.principal, start, num_tokens, block_ids, copies, fresh_ids)
        )

    def reserve_branch(self, source: Sequence, length: int, num_tokens: int) -> Reservation:
        """Hold what a new sequence needs that shares the first ``length`` tokens of ``source`` and appends more."""
        require_idle(source)
        prefix = prefix_blocks(source, length, self._pool)
        # The source must outlive the copy, so its partial block counts as well: no waiting would spare it.
        self._check_need(length, num_tokens, num_copies=self._is_partial(length))
        block_ids, fresh_ids, copies = self._grow(prefix, length, num_tokens, is_shared=True)
        self._pool.share(prefix)
        held_ids, chain = prefix + fresh_ids, source.chain.copy(length)
        return self._open(
            Reservation(None, source, source.principal, length, num_tokens, block_ids, copies, held_ids, chain)
        )

    def check_rewind(self, sequence: Sequence, length: int, num_tokens: int) -> None:
        """Return if an append at ``length`` can be reserved once what lies beyond it is dropped."""
        require_idle(sequence)
        prefix = prefix_blocks(sequence, length, self._pool)
        self._check_need(length, num_tokens)
        num_free = self._pool.num_free + self._pool.count_sole(sequence.block_ids[len(prefix) :])
        is_copied = self._is_partial(length) and self._pool.refcount(prefix[-1]) > 1
        num_fresh = self._num_fresh(prefix, length, num_tokens, is_copied=is_copied)
        if num_fresh > num_free:
            raise BlocksExhausted(num_fresh, num_free)

    def close(self, reservation: Reservation) -> None:
        """End a live reservation; what becomes of the blocks it holds is the caller's to say."""
        self._live.remove(reservation)
        reservation.is_live = False
        if reservation.sequence is not None:
            reservation.sequence.is_appending = False
        if reservation.pinned is not None:
            reservation.pinned.num_pins -= 1

    def abort(self, reservation: Reservation) -> None:
        """Give back what was reserved and nothing else; a closed reservation is left alone."""
        if reservation.is_live:
            self.close(reservation)
            self._pool.release(reservation.held_ids)

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

    def _check_table(self, reservation: Reservation) -> None:
        """Test a reservation that can still be committed (of others the table is void: they wait to be aborted)."""
        start, stop = reservation.start, reservation.start + reservation.num_tokens
        sequence = reservation.sequence
        assert sequence is None or sequence.length == start, "a sequence moved under its reservation"
        assert len(reservation.block_ids) == self._pool.num_blocks_for(stop), "a reserved table has another size"
        for block_id in reservation.block_ids[start // self._pool.block_size :]:
            assert self._pool.refcount(block_id) == 1, f"block {block_id} would be written and is shared"
        for source_id, _ in reservation.copies:
            assert self._pool.refcount(source_id) > 0, f"block {source_id} is to be copied and is free"

    def _check_need(self, start: int, num_tokens: int, *, num_copies: int = 0) -> None:
        """Raise if so many tokens from ``start`` on would not fit the context or the whole, else empty, pool."""
        if num_tokens < 1:
            raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
        if start + num_tokens > self._max_context:
            raise ContextExceeded(start + num_tokens, self._max_context)
        num_blocks = self._pool.num_blocks_for(start + num_tokens) + num_copies
        if num_blocks > self._pool.capacity:
            raise ExceedsPool(num_blocks, self._pool.capacity)

    def _grow(
        self, prefix: list[int], start: int, num_tokens: int, *, is_shared: bool
    ) -> tuple[list[int], list[int], list[tuple[int, int]]]:
        """Allocate for ``num_tokens`` tokens behind the ``start`` ones in ``prefix``; all or nothing.

        Args:
            prefix: Blocks of the first ``start`` tokens; not changed.
            start: Tokens in them.
            num_tokens: Tokens to make room for.
            is_shared: The last block of ``prefix`` has other owners, so it is replaced by a copy if it has room::

                prefix  [A A A A] [B B . .]          B is shared, start = 6, 4 more tokens
                table   [A A A A] [C C c c] [d d . .]    copies = [(B, C)], allocated = [C, d]

        Returns:
            The whole table, the blocks allocated, and the copies to make.
        """
        is_copied = is_shared and self._is_partial(start)
        fresh_ids = self._pool.allocate(self._num_fresh(prefix, start, num_tokens, is_copied=is_copied))
        if is_copied:
            return prefix[:-1] + fresh_ids, fresh_ids, [(prefix[-1], fresh_ids[0])]
        return (prefix + fresh_ids if fresh_ids else prefix), fresh_ids, []

    def _num_fresh(self, prefix: list[int], start: int, num_tokens: int, *, is_copied: bool) -> int:
        return self._pool.num_blocks_for(start + num_tokens) - len(prefix) + is_copied

    def _is_partial(self, length: int) -> bool:
        return length % self._pool.block_size > 0

    def _open(self, reservation: Reservation) -> Reservation:
        self._live.add(reservation)
        if reservation.sequence is not None:
            reservation.sequence.is_appending = True
        if reservation.pinned is not None:
            reservation.pinned.num_pins += 1
        return reservation


def require_idle(sequence: Sequence) -> None:
    """Return if the sequence lives and no append is in flight on it.

    Raises:
        HandleUnknown: It is released.
        RuntimeError: An append is in flight (a bug of the caller's).
    """
    if sequence.is_released:
        raise HandleUnknown(sequence.handle_id)
    if sequence.is_appending:
        raise RuntimeError(f"an append is in flight on {sequence.handle_id}; queue behind it")


def prefix_blocks(sequence: Sequence, length: int, pool: BlockPool) -> list[int]:
    """Return the blocks of the first ``length`` tokens, as a list of its own.

    Raises:
        ValueError: ``length`` is outside [1, length of the sequence].
    """
    if not 1 <= length <= sequence.length:
        raise ValueError(f"length {length} is outside [1, {sequence.length}]")
    return sequence.block_ids[: pool.num_blocks_for(length)]
