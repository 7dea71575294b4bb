"""The KV store: the one place where sequences, blocks and leases change together."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from ferrule_server.errors import HandleExpired, HandleUnknown, TruncateBeyond
from ferrule_server.kv import append_rule
from ferrule_server.kv.append_rule import Verdict
from ferrule_server.kv.block_pool import BlockPool
from ferrule_server.kv.handle import Handle, StalePolicy, handle_id_of
from ferrule_server.kv.leases import LeaseHeap
from ferrule_server.kv.lineage import LineageChain
from ferrule_server.kv.registry import SECRET_BYTES, TOMBSTONE_S, Registry
from ferrule_server.kv.reservation import Reservation, Reservations, prefix_blocks, require_idle
from ferrule_server.kv.sequence import Sequence, Truncation

__all__ = ["DEFAULT_TTL_S", "KvStore", "MIN_TTL_S", "Reservation", "TOMBSTONE_S"]

MIN_TTL_S = 5.0
"""Shortest lease."""

DEFAULT_TTL_S = 60.0
"""Lease of a new sequence when none is asked for."""


def _new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


class KvStore:
    """Sequences over a block pool. Called from one thread only; every call that raises has changed nothing.

    Invariant: the refcount of a block is the number of its owners, which are the sequences with it in their table
    and the live reservations that hold it; a sequence has at least one token, and of n tokens exactly
    ceil(n / block_size) blocks, each in its table once; its lineage at any length is that computed from its tokens;
    its lease lasts between MIN_TTL_S and max_ttl_s.

    A committed slot is never written again: a write into a block with refcount above 1 is preceded by its copy, and
    while an append is reserved on a sequence nobody can come to share the blocks it writes to (fork, truncate and
    further reservations on it raise RuntimeError; the engine queues them behind the append).

    Args:
        pool: The blocks; nobody else may allocate from it.
        instance: Name of this server: 1 to 64 of ``A-Z a-z 0-9 _ -``. epoch: name of this run of it, likewise.
        fingerprint: Of the model; root of every lineage.
        max_context: Longest sequence in tokens.
        max_ttl_s: Longest lease in seconds, at least MIN_TTL_S.
        clock: Monotonic seconds.
        new_secret: Returns 16 unguessable bytes.

    Raises:
        ValueError: An argument is outside its range.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        instance: str,
        epoch: str,
        fingerprint: bytes,
        max_context: int,
        max_ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
        new_secret: Callable[[], bytes] = _new_secret,
    ) -> None:
        if max_context < 1:
            raise ValueError(f"max_context must be at least 1, got {max_context}")
        if not MIN_TTL_S <= max_ttl_s < math.inf:
            raise ValueError(f"max_ttl_s must be finite and at least {MIN_TTL_S}, got {max_ttl_s}")
        self.pool = pool
        self.max_context = max_context
        self.max_ttl_s = max_ttl_s
        self._fingerprint = fingerprint
        self._clock = clock
        self._registry = Registry(instance, epoch, new_secret)
        self._leases = LeaseHeap(self._registry.sequences)
        self._reservations = Reservations(pool, max_context)

    @property
    def num_sequences(self) -> int:
        """Sequences alive."""
        return len(self._registry)

    def num_sequences_of(self, principal: str) -> int:
        """Sequences of the principal alive."""
        return self._registry.count(principal)

    def now(self) -> float:
        """Seconds on the clock that ``expires_at`` and ``created_at`` are told on."""
        return self._clock()

    def resolve(self, handle: Handle, principal: str, at: float | None = None) -> Sequence:
        """Return the principal's live sequence that the handle belongs to, whatever its length says.

        Args:
            handle: As the client sent it.
            principal: Who sent it.
            at: When it arrived, on the store's clock: the moment its lease is judged at. None: now.

        Raises:
            HandleUnknown: Malformed, never issued, released or foreign: identical answers.
            HandleExpired: The principal's own; its lease ended within the last TOMBSTONE_S.
            HandleLost: The principal's own, lost to a device fault.
            EpochChanged: Of an earlier run of this server.
            WrongInstance: Of another server.
        """
        now = self._clock() if at is None else at
        sequence = self._registry.get(handle.cache_id, principal)
        if sequence is None:
            raise self._registry.why_missing(handle.cache_id, principal, self._clock())
        if sequence.expires_at <= now and not sequence.num_pins:
            raise HandleExpired(sequence.handle_id)
        return sequence

    def handle_at(self, sequence: Sequence, length: int | None = None) -> Handle:
        """Return the handle of the first ``length`` tokens; None: of all of them."""
        at = sequence.length if length is None else length
        return Handle(sequence.cache_id, at, sequence.chain.at(at))

    def judge(
        self, sequence: Sequence, handle: Handle, token_ids: SequenceOf[int], on_stale: StalePolicy = StalePolicy.FAIL
    ) -> Verdict:
        """Return what appending means: see :func:`ferrule_server.kv.append_rule.judge`, which says what it raises."""
        return append_rule.judge(sequence, handle, token_ids, on_stale)

    def sequences_of(self, principal: str, after_handle_id: str = "", limit: int = 100) -> list[Sequence]:
        """Return up to ``limit`` of the principal's sequences after that handle_id, in order of handle_id."""
        return self._registry.page(principal, after_handle_id, limit)

    def reserve_new(self, principal: str, num_tokens: int) -> Reservation:
        """Hold the blocks of a sequence to be created with ``num_tokens`` tokens.

        Raises:
            ContextExceeded: Longer than the context.
            ExceedsPool: More blocks than the pool has.
            BlocksExhausted: Too few are free now.
        """
        return self._reservations.reserve_new(principal, num_tokens, LineageChain(self._fingerprint))

    def reserve_append(self, sequence: Sequence, num_tokens: int) -> Reservation:
        """Hold the blocks for ``num_tokens`` more tokens at the tip.

        Raises:
            ContextExceeded, ExceedsPool, BlocksExhausted: As :meth:`reserve_new`.
            HandleUnknown: The sequence is released.
        """
        return self._reservations.reserve_append(sequence, num_tokens)

    def reserve_branch(self, sequence: Sequence, length: int, num_tokens: int) -> Reservation:
        """Hold what a new sequence needs that shares the first ``length`` tokens and appends ``num_tokens``.

        Full blocks are shared; a partly filled last one will be copied. The source is pinned, not changed.

        Raises:
            ContextExceeded, ExceedsPool, BlocksExhausted: As :meth:`reserve_new`.
            HandleUnknown: The sequence is released.
            ValueError: It is shorter than ``length``.
        """
        return self._reservations.reserve_branch(sequence, length, num_tokens)

    def reserve_rewind(self, sequence: Sequence, length: int, num_tokens: int) -> Reservation:
        """Drop what lies beyond ``length`` and hold the blocks for ``num_tokens`` tokens there.

        The tail is dropped at once and for good, even if the reservation is aborted; but only when the blocks it
        gives back together with the free ones are enough.

        Raises:
            ContextExceeded, ExceedsPool, BlocksExhausted: As :meth:`reserve_new`.
            HandleUnknown: The sequence is released.
            ValueError: It is shorter than ``length``.
        """
        self._reservations.check_rewind(sequence, length, num_tokens)
        self._drop_tail(sequence, length)
        return self._reservations.reserve_append(sequence, num_tokens)

    def commit(self, reservation: Reservation, token_ids: SequenceOf[int], ttl_s: float | None = None) -> Sequence:
        """Append the tokens whose KV was written; create the sequence where there was none; renew the lease.

        Args:
            reservation: A live one.
            token_ids: Exactly as many as were reserved.
            ttl_s: As in :meth:`renew`; a created sequence has its source's, or DEFAULT_TTL_S.

        Raises:
            HandleUnknown: The sequence was released meanwhile; the reservation is aborted.
            RuntimeError: The reservation was committed or aborted before.
            ValueError: Another number of tokens.
        """
        if not reservation.is_live:
            raise RuntimeError("the reservation was committed or aborted before")
        if len(token_ids) != reservation.num_tokens:
            raise ValueError(f"{reservation.num_tokens} tokens were reserved, {len(token_ids)} were written")
        sequence = reservation.sequence
        if sequence is not None and sequence.is_released:
            self.abort(reservation)
            raise HandleUnknown(sequence.handle_id)
        if sequence is None:
            sequence = self._create_reserved(reservation, token_ids)
        else:
            sequence.chain.extend(token_ids)
            sequence.block_ids = reservation.block_ids
        self._reservations.close(reservation)
        if reservation.copies:
            self.pool.release([source_id for source_id, _ in reservation.copies])
        sequence.last_truncate = None
        self._renew_source(reservation.source)
        self.renew(sequence, ttl_s)
        return sequence

    def abort(self, reservation: Reservation) -> None:
        """Give back what was reserved and nothing else; a closed reservation is left alone."""
        self._reservations.abort(reservation)

    def fork(self, sequence: Sequence, length: int, count: int, ttl_s: float | None = None) -> list[Sequence]:
        """Return ``count`` new sequences on the first ``length`` tokens, sharing all their blocks.

        No block is needed, none is copied: the first append into a shared block copies it. Each has a lease of its
        own, as long as the forked one's unless ``ttl_s`` says otherwise; the forked one's is renewed.

        Raises:
            HandleUnknown: The sequence is released.
            ValueError: ``length`` is outside [1, its length], or ``count`` below 1.
        """
        require_idle(sequence)
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        prefix = prefix_blocks(sequence, length, self.pool)
        branches = []
        for _ in range(count):
            self.pool.share(prefix)
            branch = self._create(sequence.principal, sequence.chain.copy(length), prefix, sequence)
            self.renew(branch, ttl_s)
            branches.append(branch)
        self.renew(sequence)
        return branches

    def truncate(self, sequence: Sequence, handle: Handle, new_length: int) -> int:
        """Shorten the sequence to ``new_length`` tokens and return how many blocks that gave back.

        An equal request succeeds again, with the same answer, while the tip still is ``new_length``. Renews the lease.

        Raises:
            TruncateBeyond: ``new_length`` is outside [1, length of the handle].
            HandleStale: The sequence does not hold the handle's tokens.
            HandleUnknown: The sequence is released.
        """
        require_idle(sequence)
        if not 1 <= new_length <= handle.length:
            raise TruncateBeyond(handle.handle_id, new_length, handle.length)
        freed_blocks = _remembered(sequence, handle, new_length)
        if freed_blocks is None:
            append_rule.check_handle(sequence, handle)
            freed_blocks = self._drop_tail(sequence, new_length)
            sequence.last_truncate = Truncation(handle.length, handle.lineage, new_length, freed_blocks)
        self.renew(sequence)
        return freed_blocks

    def release(self, handle: Handle, principal: str) -> int | None:
        """End the principal's sequence, whatever the handle's length; None: there was nothing to release.

        Acts at once, pinned or not. An append reserved on it must not be run any further; abort it, before or after.

        Returns:
            Blocks given back to the pool; those shared with others do not count.
        """
        sequence = self._registry.get(handle.cache_id, principal)
        if sequence is None:
            return None
        self._registry.remove(sequence)
        return self._free_sequence(sequence)

    def renew(self, sequence: Sequence, ttl_s: float | None = None) -> float:
        """Start the lease anew and return its seconds: ``ttl_s`` clamped to [MIN_TTL_S, max], None: as before."""
        if ttl_s is not None:
            sequence.ttl_s = self._clamp_ttl(ttl_s)
        sequence.expires_at = self._clock() + sequence.ttl_s
        self._leases.schedule(sequence)
        return sequence.ttl_s

    def expire(self) -> list[str]:
        """Free every sequence whose lease has ended, pinned ones left out, and return their handle_ids."""
        now = self._clock()
        due = self._leases.take_due(now)
        for sequence in due:
            self._registry.bury(sequence, now)
            self._free_sequence(sequence)
        return [sequence.handle_id for sequence in due]

    def next_expiry(self) -> float | None:
        """Return in how many seconds :meth:`expire` may find something, 0 or more; None: never as things are."""
        at = self._leases.next_at()
        return None if at is None else max(0.0, at - self._clock())

    def lose_all(self) -> None:
        """Free everything after a device fault; every handle there was answers HandleLost from now on."""
        self._reservations.abort_all()
        lost = list(self._registry)
        self._registry.lose_all()
        for sequence in lost:
            self._free_sequence(sequence)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariants of the store and of its parts hold; slow, for tests."""
        owners = self._reservations.count_owners()
        for sequence in self._registry:
            owners.update(sequence.block_ids)
            self._check_sequence(sequence)
        self.pool.check_integrity(owners)
        self._registry.check_integrity()
        self._leases.check_integrity(self._clock())
        self._reservations.check_integrity()

    def _check_sequence(self, sequence: Sequence) -> None:
        name = sequence.handle_id
        assert sequence.length > 0, f"{name} is empty"
        assert len(sequence.block_ids) == self.pool.num_blocks_for(sequence.length), f"{name} has a table of other size"
        assert len(set(sequence.block_ids)) == len(sequence.block_ids), f"{name} has a block twice"
        sequence.chain.check_integrity(self._fingerprint)
        assert MIN_TTL_S <= sequence.ttl_s <= self.max_ttl_s, f"{name} has a lease of {sequence.ttl_s} s"
        assert sequence.num_pins >= int(sequence.is_appending), f"{name} is appended to and not pinned"

    def _create_reserved(self, reservation: Reservation, token_ids: SequenceOf[int]) -> Sequence:
        assert reservation.chain is not None, "a reservation without a sequence has a chain"
        reservation.chain.extend(token_ids)
        return self._create(reservation.principal, reservation.chain, reservation.block_ids, reservation.source)

    def _create(self, principal: str, chain: LineageChain, block_ids: list[int], parent: Sequence | None) -> Sequence:
        """Register a sequence that takes over one owner's share of each block; its lease is not scheduled yet."""
        cache_id = self._registry.new_cache_id()
        now = self._clock()
        ttl_s = self._clamp_ttl(DEFAULT_TTL_S) if parent is None else parent.ttl_s
        sequence = Sequence(cache_id, handle_id_of(cache_id), principal, chain, block_ids, ttl_s, now + ttl_s, now)
        if parent is not None:
            sequence.parent_handle_id = parent.handle_id
        self._registry.add(sequence)
        return sequence

    def _drop_tail(self, sequence: Sequence, length: int) -> int:
        """Shorten the sequence and return the blocks freed; at the tip nothing changes."""
        if length == sequence.length:
            return 0
        num_kept = self.pool.num_blocks_for(length)
        tail_ids = sequence.block_ids[num_kept:]
        sequence.block_ids = sequence.block_ids[:num_kept]
        sequence.chain.truncate(length)
        sequence.last_truncate = None
        return self.pool.release(tail_ids)

    def _free_sequence(self, sequence: Sequence) -> int:
        """Take the blocks of a sequence that the registry no longer knows."""
        block_ids, sequence.block_ids = sequence.block_ids, []
        sequence.is_released = True
        return self.pool.release(block_ids)

    def _renew_source(self, source: Sequence | None) -> None:
        if source is not None and not source.is_released:
            self.renew(source)

    def _clamp_ttl(self, ttl_s: float) -> float:
        return min(max(ttl_s, MIN_TTL_S), self.max_ttl_s)


def _remembered(sequence: Sequence, handle: Handle, new_length: int) -> int | None:
    """Return what an equal truncate answered; it is forgotten once the tip has moved."""
    last = sequence.last_truncate
    if last is None or (last.length, last.lineage, last.new_length) != (handle.length, handle.lineage, new_length):
        return None
    return last.freed_blocks
