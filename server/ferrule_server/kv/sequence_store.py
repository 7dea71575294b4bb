"""The sequence store: the one place where sequences, blocks and leases change together."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from ferrule_server.errors import HandleExpired, HandleUnknown, TruncateBeyond
from ferrule_server.kv.append_rule import check_handle
from ferrule_server.kv.block_pool import BlockPool
from ferrule_server.kv.handle import Handle, handle_id_of
from ferrule_server.kv.leases import LeaseHeap
from ferrule_server.kv.lineage import LineageChain
from ferrule_server.kv.metrics import KvLedger, KvMetrics, metrics_of
from ferrule_server.kv.prefix_cache import PrefixCache
from ferrule_server.kv.registry import SECRET_BYTES, Registry
from ferrule_server.kv.reservation import Reservation, Reservations, prefix_blocks
from ferrule_server.kv.reserved_slots import ReservedSlots, SlotRequest, SlotReservation
from ferrule_server.kv.sequence import Sequence, Truncation, require_idle
from ferrule_server.kv.usage import Holding, Usage
from ferrule_server.quotas import LimitsOf, unlimited

MIN_TTL_S = 5.0
"""Shortest lease."""

DEFAULT_TTL_S = 60.0
"""Lease of a new sequence when none is asked for."""


def _new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


class SequenceStore:
    """Sequences over a block pool. Called from one thread only; every call that raises has changed nothing.

    Invariant: the refcount of a block is the number of its owners, which are the sequences with it in their table
    or among their spares and the live reservations that hold it, all of one principal; a sequence has at least one
    token, and of n tokens exactly ceil(n / block_size) blocks in its table, each once; its spares are what appends up
    to its reserved length need (see ``kv/reserved_slots.py``); its lineage at any length is that computed from its
    tokens; its lease lasts between MIN_TTL_S and max_ttl_s; what a principal is said to hold is what its sequences
    and reservations hold.

    Quotas are looked at before anything is allocated, all or nothing: HANDLES where sequences are created (one in
    creation counts), KV_TOKENS where blocks are. The order of refusals stands at ``Reservations``.

    Whoever owns a block owns those before it in each table that has it: refcounts never rise along a table.

    Full blocks are registered in the prefix cache as they are committed, and found by new sequences of the same
    principal; those that nobody owns any more are free, and handed out when no empty block is left (see
    ``kv/prefix_cache.py``). A block that the cache knows is never written: it is withdrawn before.

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
        limits_of: The quotas of a principal, asked whenever it wants more.
        has_prefix_cache: False: no block is registered, and none is found.

    Attributes:
        registry: The live sequences, to be read only.
        reservations: Where appends get their blocks.
        usage: What each principal holds: HANDLES and, times block_size, KV_TOKENS; to be read only.
        ledger: What is counted, to be read only.

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
        limits_of: LimitsOf = unlimited,
        has_prefix_cache: bool = True,
    ) -> None:
        if max_context < 1:
            raise ValueError(f"max_context must be at least 1, got {max_context}")
        if not MIN_TTL_S <= max_ttl_s < math.inf:
            raise ValueError(f"max_ttl_s must be finite and at least {MIN_TTL_S}, got {max_ttl_s}")
        self.pool = pool
        self.max_context = max_context
        self.max_ttl_s = max_ttl_s
        self.clock = clock
        self.registry = Registry(instance, epoch, new_secret)
        self.usage = Usage(pool, limits_of)
        self.ledger = KvLedger()
        self._fingerprint = fingerprint
        self._leases = LeaseHeap(self.registry.sequences)
        self._cache = PrefixCache(pool, is_on=has_prefix_cache)
        self._slots = ReservedSlots(pool, self.usage, self._cache, self.ledger, max_context)
        self.reservations = Reservations(
            pool,
            self.usage,
            self._slots,
            self._cache,
            ledger=self.ledger,
            fingerprint=fingerprint,
            max_context=max_context,
        )

    def metrics(self) -> KvMetrics:
        """Return how the store stands; from any thread. In the middle of a step some figures may be those before it."""
        return metrics_of(self.pool, self.ledger.total, len(self.registry), self.registry.num_tombstones)

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
        now = self.clock() if at is None else at
        sequence = self.registry.get(handle.cache_id, principal)
        if sequence is None:
            raise self.registry.why_missing(handle.cache_id, principal, self.clock())
        if sequence.expires_at <= now and not sequence.num_pins:
            raise HandleExpired(sequence.handle_id)
        return sequence

    def reserve_slots(self, requests: SequenceOf[SlotRequest]) -> SlotReservation:
        """Set blocks aside for sequences of one principal, all or nothing, and renew their leases.

        Appends up to ``target_length`` find their blocks from now on, whatever is forked, truncated or rewound, until
        the sequence ends; its forks do not inherit that. Lengths are absolute: asking for as much again, or for less,
        changes nothing. Nothing is allocated for ``admission_target_length``, it only has to fit. Appends in flight are
        no hindrance: they keep what they have reserved themselves.

        Raises:
            ContextExceeded, ExceedsPool, QuotaExceeded, BlocksExhausted: As :meth:`reserve_new`, over all requests.
            HandleUnknown: A sequence is released.
        """
        reservation = self._slots.reserve(requests)
        for request in requests:
            self.renew(request.sequence)
        return reservation

    def commit(self, reservation: Reservation, token_ids: SequenceOf[int], ttl_s: float | None = None) -> Sequence:
        """Append the tokens whose KV was written; create the sequence where there was none; renew the lease.

        Args:
            reservation: A live one.
            token_ids: Of the first rows: as many as were reserved, or fewer where a verify accepted fewer. The store is
                then as if only these had been reserved: what the others would have needed goes back.
            ttl_s: As in :meth:`renew`; a created sequence has its source's, or DEFAULT_TTL_S.

        Raises:
            HandleUnknown: The sequence was released meanwhile; the reservation is aborted.
            RuntimeError: The reservation was committed or aborted before.
            ValueError: No token, or more than were reserved; or not those of the prompt that was looked up.
        """
        if not reservation.is_live:
            raise RuntimeError("the reservation was committed or aborted before")
        num_tokens = len(token_ids)
        if not 1 <= num_tokens <= reservation.num_tokens:
            raise ValueError(f"{reservation.num_tokens} tokens were reserved, {num_tokens} were written")
        sequence = reservation.sequence
        if sequence is None:
            reservation.check_tokens(token_ids)
        elif sequence.is_released:
            self.reservations.abort(reservation)
            raise HandleUnknown(sequence.handle_id)
        if num_tokens != reservation.num_tokens:
            self.reservations.shorten(reservation, num_tokens)
        if sequence is None:
            sequence = self._create_reserved(reservation, token_ids)
        else:
            sequence.chain.extend(token_ids)
            self._slots.settle(sequence, reservation.block_ids)
        self.reservations.close(reservation)
        size = self.pool.block_size
        if reservation.start % size + num_tokens >= size and sequence.is_published:
            self._cache.register(sequence, (reservation.start + reservation.num_cached) // size)
        if reservation.copies:
            self.ledger.add(sequence.principal, "num_block_copies", len(reservation.copies))
            self.usage.release(sequence.principal, [source_id for source_id, _ in reservation.copies])
        sequence.last_truncate = None
        if (source := reservation.source) is not None and not source.is_released:
            self.renew(source)
        self.renew(sequence, ttl_s)
        return sequence

    def fork(self, sequence: Sequence, length: int, count: int, ttl_s: float | None = None) -> list[Sequence]:
        """Return ``count`` new sequences on the first ``length`` tokens, sharing all their blocks.

        No block is copied: the first append into a shared block copies it. None is needed either, but one where room
        is reserved for ``sequence`` and its last block comes to be shared: that copy is part of the room. Each has a
        lease of its own, as long as the forked one's unless ``ttl_s`` says otherwise; the forked one's is renewed.

        Raises:
            QuotaExceeded: HANDLES, or KV_TOKENS for that one block.
            BlocksExhausted: There is no such block.
            HandleUnknown: The sequence is released.
            ValueError: ``length`` is outside [1, its length], or ``count`` below 1.
        """
        require_idle(sequence)
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        prefix = prefix_blocks(sequence, length, self.pool)
        num_spares = self._slots.num_missing_to_share(sequence, length)
        self.usage.check(sequence.principal, num_sequences=count, num_blocks=num_spares)
        self._slots.add_spares(sequence, num_spares)
        self.usage.enter(sequence.principal, count)
        self.pool.share(prefix, count)
        branches, chain = [], sequence.chain.copy(length)
        for _ in range(count):
            branch = self._create(sequence.principal, chain.copy(length), prefix, sequence)
            self.renew(branch, ttl_s)
            branches.append(branch)
        self.ledger.add(sequence.principal, "num_forks", count)
        self.renew(sequence)
        return branches

    def truncate(self, sequence: Sequence, handle: Handle, new_length: int) -> int:
        """Shorten the sequence to ``new_length`` tokens and return how many blocks that gave back.

        What is reserved stays so; where others share what is dropped of it, other blocks are set aside instead.

        An equal request succeeds again, with the same answer, while the tip still is ``new_length``. Renews the lease.

        Raises:
            TruncateBeyond: ``new_length`` is outside [1, length of the handle].
            HandleStale: The sequence does not hold the handle's tokens.
            QuotaExceeded, BlocksExhausted: There are no such other blocks; nothing changed.
            HandleUnknown: The sequence is released.
        """
        require_idle(sequence)
        if not 1 <= new_length <= handle.length:
            raise TruncateBeyond(handle.handle_id, new_length, handle.length)
        last = sequence.last_truncate
        if last is None or (last.handle, last.new_length) != (handle, new_length):
            check_handle(sequence, handle)
            last = Truncation(handle, new_length, self._slots.truncate(sequence, new_length))
            sequence.last_truncate = last
        self.renew(sequence)
        return last.freed_blocks

    def release(self, handle: Handle, principal: str) -> int | None:
        """End the principal's sequence, whatever the handle's length; None: there was nothing to release.

        Acts at once, pinned or not. An append reserved on it must not be run any further; abort it, before or after.

        Returns:
            Blocks given back to the pool; those shared with others do not count.
        """
        sequence = self.registry.get(handle.cache_id, principal)
        if sequence is None:
            return None
        self.registry.remove(sequence)
        self.ledger.add(principal, "num_released")
        return self._free_sequence(sequence)

    def renew(self, sequence: Sequence, ttl_s: float | None = None) -> float:
        """Start the lease anew and return its seconds: ``ttl_s`` clamped to [MIN_TTL_S, max], None: as before."""
        if ttl_s is not None:
            sequence.ttl_s = self._clamp_ttl(ttl_s)
        sequence.expires_at = self.clock() + sequence.ttl_s
        self._leases.schedule(sequence)
        return sequence.ttl_s

    def expire(self, at: float | None = None) -> list[str]:
        """Free every sequence whose lease has ended, pinned ones left out, and return their handle_ids.

        Args:
            at: Leases that ended by then, on the store's clock; None: by now.
        """
        now = self.clock()
        due = self._leases.take_due(now if at is None else min(at, now))
        for sequence in due:
            self.registry.bury(sequence, now)
            self.ledger.add(sequence.principal, "num_expired")
            self._free_sequence(sequence)
        return [sequence.handle_id for sequence in due]

    def next_expiry(self) -> float | None:
        """Return in how many seconds :meth:`expire` may find something, 0 or more; None: never as things are."""
        at = self._leases.next_at()
        return None if at is None else max(0.0, at - self.clock())

    def lose_all(self) -> None:
        """Free everything after a device fault, cached blocks too; every handle answers HandleLost from now on."""
        self._cache.clear()
        for reservation in list(self.reservations.live):
            self.reservations.abort(reservation)
        lost = list(self.registry)
        self.registry.lose_all()
        for sequence in lost:
            self._free_sequence(sequence)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariants of the store and of its parts hold; slow, for tests."""
        owners = self.reservations.count_owners()
        for sequence in self.registry:
            owners.update(sequence.block_ids)
            owners.update(sequence.spare_ids)
            self._check_sequence(sequence)
        self.pool.check_integrity(owners)
        self.usage.check_integrity(self._count_holdings())
        self.registry.check_integrity()
        self._leases.check_integrity(self.clock())
        self.reservations.check_integrity()
        self._cache.check_integrity(self.registry)

    def _count_holdings(self) -> dict[str, Holding]:
        """Return what each principal holds, counted from scratch: a block on two accounts would count twice."""
        holdings: dict[str, Holding] = {}
        blocks: dict[str, set[int]] = {}
        for each in self.registry:
            holdings.setdefault(each.principal, Holding()).num_sequences += 1
            blocks.setdefault(each.principal, set()).update(each.block_ids, each.spare_ids)
        for reservation in self.reservations.live:
            held = holdings.setdefault(reservation.principal, Holding())
            held.num_sequences += reservation.sequence is None
            blocks.setdefault(reservation.principal, set()).update(reservation.held_ids)
        for principal, block_ids in blocks.items():
            holdings[principal].num_blocks = len(block_ids)
        return {principal: held for principal, held in holdings.items() if held != Holding()}

    def _check_sequence(self, sequence: Sequence) -> None:
        name = sequence.handle_id
        assert sequence.length > 0, f"{name} is empty"
        assert len(sequence.block_ids) == self.pool.num_blocks_for(sequence.length), f"{name} has a table of other size"
        assert len(set(sequence.block_ids)) == len(sequence.block_ids), f"{name} has a block twice"
        refcounts = [self.pool.refcount(block_id) for block_id in sequence.block_ids]
        assert refcounts == sorted(refcounts, reverse=True), f"{name} shares a block and not those before it"
        self._slots.check_integrity(sequence)
        sequence.chain.check_integrity(self._fingerprint)
        assert MIN_TTL_S <= sequence.ttl_s <= self.max_ttl_s, f"{name} has a lease of {sequence.ttl_s} s"
        assert sequence.num_pins >= int(sequence.is_appending), f"{name} is appended to and not pinned"

    def _create_reserved(self, reservation: Reservation, token_ids: SequenceOf[int]) -> Sequence:
        assert reservation.chain is not None, "a reservation without a sequence has a chain"
        if len(reservation.chain) == reservation.start:
            reservation.chain.extend(token_ids)
        elif len(reservation.chain) > len(token_ids):
            reservation.chain.truncate(len(token_ids))
        sequence = self._create(reservation.principal, reservation.chain, reservation.block_ids, reservation.source)
        if reservation.source is None:
            sequence.is_published = reservation.is_published
        else:
            self.ledger.add(reservation.principal, "num_forks")
        if reservation.reserved_length:
            sequence.reserved_length = reservation.reserved_length
            sequence.spare_ids = tuple(reservation.held_ids[len(reservation.block_ids) :])
        return sequence

    def _create(self, principal: str, chain: LineageChain, block_ids: list[int], parent: Sequence | None) -> Sequence:
        """Register a sequence that takes over one owner's share of each block; its lease is not scheduled yet."""
        cache_id = self.registry.new_cache_id()
        now = self.clock()
        ttl_s = self._clamp_ttl(DEFAULT_TTL_S) if parent is None else parent.ttl_s
        sequence = Sequence(cache_id, handle_id_of(cache_id), principal, chain, block_ids, ttl_s, now + ttl_s, now)
        if parent is not None:
            sequence.parent_handle_id = parent.handle_id
            sequence.is_published = parent.is_published
        self.registry.add(sequence)
        self.ledger.add(principal, "num_created")
        return sequence

    def _free_sequence(self, sequence: Sequence) -> int:
        """Take the blocks of a sequence that the registry no longer knows."""
        block_ids, sequence.block_ids = [*sequence.block_ids, *sequence.spare_ids], []
        sequence.spare_ids = ()
        sequence.is_released = True
        freed_blocks = self.usage.release(sequence.principal, block_ids)
        self.usage.leave(sequence.principal)
        return freed_blocks

    def _clamp_ttl(self, ttl_s: float) -> float:
        return min(max(ttl_s, MIN_TTL_S), self.max_ttl_s)
