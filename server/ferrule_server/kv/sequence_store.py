"""The sequence store: the one place where sequences, blocks and leases change together."""

from __future__ import annotations

import math
import secrets
import time
from array import array
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from itertools import pairwise

from ferrule_server.errors import HandleExpired, HandleUnknown, TruncateBeyond
from ferrule_server.kv.append_rule import Verdict, check_handle
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
from ferrule_server.kv.windows import give_back, set_window
from ferrule_server.quotas import MIN_TTL_S, LimitsOf, unlimited

DEFAULT_TTL_S = 60.0
"""Lease of a new sequence if the request names none."""
RESTORED_LEASE_S = 120.0
"""Least time for which a restored sequence lives after a restart: clients may take a minute or two to reconnect."""


def _new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


class SequenceStore:
    """Sequences over a block pool, in memory. Called from one thread only; a call that raises changes nothing.

    Invariant: the refcount of a block is the number of its owners, which are the sequences with it in their table
    or among their spares and the live reservations that hold it, all of one principal; a sequence has at least one
    token, and of n tokens exactly ceil(n / block_size) blocks in its table, each once, or none if it is cold; the first
    ones may be null blocks because they were given back (see ``kv/windows.py``); its spares are what appends up to its
    reserved length need (see ``kv/reserved_slots.py``); its lineage at any length is that computed from its tokens; its
    lease lasts between MIN_TTL_S and max_ttl_s; the usage of a principal is what its sequences and reservations hold.

    Quotas are checked before anything is allocated, all or nothing: HANDLES if sequences are created (one in creation
    counts), KV_TOKENS if blocks are allocated. :class:`Reservations` documents the order of refusals.

    An owner of a block also owns the blocks before it in each table that has it, unless it gave them back: refcounts
    never rise along a table but for such owners.

    Full blocks are registered in the prefix cache as they are committed, and new sequences of the same principal find
    them. Registered blocks without owner are free, and are handed out when no empty block is left (see
    ``kv/prefix_cache.py``). A registered block is never written: it is withdrawn first.

    A committed slot is never written again: a block with refcount above 1 is copied before a write. While an append is
    reserved on a sequence, no other sequence can start to share the blocks that it writes to: fork, truncate and
    further reservations on it raise RuntimeError, and the engine queues them after the append.

    Args:
        pool: The blocks; the store alone allocates from it.
        instance: Name of this server: 1 to 64 of ``A-Z a-z 0-9 _ -``. epoch: name of this run of it, likewise.
        max_context: Longest sequence in tokens.
        max_ttl_s: Longest lease in seconds, at least MIN_TTL_S.
        clock: Monotonic seconds.
        new_secret: Returns 16 unguessable bytes.
        limits_of: The quotas of a principal, read whenever it asks for more.
        has_prefix_cache: False: no block is registered or found but by cold sequences.
        durable_epoch: The epoch in the cache_ids of durable sequences; None: there are none.

    Attributes:
        registry: The live sequences; read only.
        reservations: Gives appends their blocks.
        usage: Sequences and blocks that each principal holds; read only.
        ledger: Counters of the store and of each principal; read only.
        on_lease: Called with a durable sequence whose lease may have another duration now.

    Raises:
        ValueError: An argument is outside its range.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        instance: str,
        epoch: str,
        max_context: int,
        max_ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
        new_secret: Callable[[], bytes] = _new_secret,
        limits_of: LimitsOf = unlimited,
        has_prefix_cache: bool = True,
        durable_epoch: str | None = None,
    ) -> None:
        if max_context < 1:
            raise ValueError(f"max_context must be at least 1, got {max_context}")
        if not MIN_TTL_S <= max_ttl_s < math.inf:
            raise ValueError(f"max_ttl_s must be finite and at least {MIN_TTL_S}, got {max_ttl_s}")
        self.pool = pool
        self.max_context = max_context
        self.max_ttl_s = max_ttl_s
        self.clock = clock
        self.registry = Registry(instance, epoch, new_secret, durable_epoch)
        self.usage = Usage(pool, limits_of)
        self.ledger = KvLedger()
        self.on_lease: Callable[[Sequence], None] | None = None
        self._leases = LeaseHeap(self.registry.sequences)
        self._cache = PrefixCache(pool, is_on=has_prefix_cache)
        self._slots = ReservedSlots(pool, self.usage, self._cache, self.ledger, max_context)
        self.reservations = Reservations(pool, self.usage, self._cache, self._slots, self.ledger, max_context)

    def metrics(self) -> KvMetrics:
        """Return counters and state; from any thread. During a step some figures may be those before it."""
        return metrics_of(self.pool, self.ledger.total, len(self.registry), self.registry.num_tombstones)

    def resolve(self, handle: Handle, principal: str, at: float | None = None) -> Sequence:
        """Return the principal's live sequence with the handle's cache_id; length and lineage are not checked.

        Args:
            handle: The handle of the request.
            principal: The principal that sent it.
            at: Time of arrival on the store's clock, for which the lease must last. None: now.

        Raises:
            HandleUnknown: It is malformed, was never issued, was released or is another principal's: identical answers.
            HandleExpired: It is the principal's own, and its lease ended within the last TOMBSTONE_S.
            EpochChanged: It is of an earlier run of this server.
            WrongInstance: It is of another server.
        """
        now = self.clock() if at is None else at
        sequence = self.registry.sequences.get(handle.cache_id)  # as Registry.get, without the call for each token
        if sequence is None or sequence.principal != principal:
            raise self.registry.why_missing(handle.cache_id, principal, self.clock())
        if sequence.expires_at <= now and not sequence.num_pins:
            raise HandleExpired(sequence.handle_id)
        return sequence

    def reserve_slots(self, requests: SequenceOf[SlotRequest]) -> SlotReservation:
        """Set blocks aside for sequences of one principal, all or nothing, and renew their leases.

        From now on appends up to ``target_length`` find their blocks, after any fork, truncate or rewind, until the
        sequence ends; its forks do not inherit the room. Lengths are absolute: a repeated or a smaller request changes
        nothing. Nothing is allocated for ``admission_target_length``; it only has to fit. Appends may be in flight:
        they keep what they have reserved themselves.

        Raises:
            ContextExceeded, ExceedsPool, QuotaExceeded, BlocksExhausted: As for :class:`Reservations`, for all
                requests together.
            HandleUnknown: A sequence is released.
        """
        reservation = self._slots.reserve(requests)
        for request in requests:
            self.renew(request.sequence)
        return reservation

    def commit(self, reservation: Reservation, token_ids: SequenceOf[int], ttl_s: float | None = None) -> Sequence:
        """Append the tokens whose KV was written, create the sequence if there is none, and renew the lease.

        Args:
            reservation: A live one. After a read only the lease is renewed.
            token_ids: Tokens of the first rows: as many as were reserved, or fewer if a verify accepted fewer. The
                result is as if only these had been reserved: surplus blocks go back.
            ttl_s: As in :meth:`renew`; a created sequence has the lease of its source, or DEFAULT_TTL_S.

        Raises:
            HandleUnknown: The sequence was released meanwhile; the reservation is aborted.
            RuntimeError: The reservation was committed or aborted before.
            ValueError: No token, more than were reserved, or others than those of the prompt that was looked up.
        """
        if reservation not in self.reservations.live:
            raise RuntimeError("the reservation was committed or aborted before")
        reservation.check_tokens(token_ids)
        sequence, verdict, num_tokens = reservation.sequence, reservation.verdict, len(token_ids)
        if sequence is not None and sequence.is_released and verdict.moves:
            self.reservations.abort(reservation)
            raise HandleUnknown(sequence.handle_id)
        if not verdict.appends:
            assert sequence is not None, "only tokens of a sequence are run again"
            return self._end_rerun(reservation, sequence, ttl_s)
        if num_tokens != reservation.num_tokens:
            self.reservations.shorten(reservation, num_tokens)
        if sequence is None or verdict.creates:
            sequence = self._create_reserved(reservation, token_ids)
        else:
            sequence.chain.extend(token_ids)
            if sequence.spare_ids:
                self._slots.settle(sequence, reservation.block_ids)
            else:
                sequence.block_ids = reservation.block_ids
        self.reservations.close(reservation)
        size = self.pool.block_size
        if reservation.start % size + num_tokens >= size:
            blocks = range((reservation.start + reservation.num_cached) // size, sequence.length // size)
            self._cache.register(sequence, sequence.block_ids, blocks)
            if sequence.window:
                self._give_back(sequence, reservation.start)
        if reservation.copies:
            self.ledger.add(sequence.principal, "num_block_copies", len(reservation.copies))
            self.usage.release(sequence.principal, [source_id for source_id, _ in reservation.copies])
        sequence.last_truncate = None
        if (source := reservation.sequence) is not sequence and source is not None and not source.is_released:
            self.renew(source)
        self.renew(sequence, ttl_s)
        return sequence

    def fork(self, sequence: Sequence, length: int, count: int, ttl_s: float | None = None) -> list[Sequence]:
        """Return ``count`` new sequences on the first ``length`` tokens, sharing all their blocks.

        No block is copied: the first append into a shared block copies it. No block is needed either, with one
        exception: if room is reserved for ``sequence`` and its last block becomes shared, the room includes its copy.
        Each new sequence has its own lease, of ``ttl_s`` or as long as that of ``sequence``, which is renewed. Forks of
        a cold sequence are cold.

        Raises:
            QuotaExceeded: HANDLES, or KV_TOKENS for that one block.
            BlocksExhausted: That one block is not available.
            HandleUnknown: The sequence is released.
            KvGivenBack: Blocks that a row after ``length`` tokens needs were given back.
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
        self.pool.share(prefix[sequence.num_given_back :], count)
        branches, chain = [], sequence.chain.copy(length)
        for _ in range(count):
            branch = self._create(sequence.principal, chain.copy(length), prefix, sequence)
            set_window(branch, sequence.window, sequence.num_given_back, self.pool.block_size)
            self.renew(branch, ttl_s)
            branches.append(branch)
        self.ledger.add(sequence.principal, "num_forks", count)
        self.renew(sequence)
        return branches

    def truncate(self, sequence: Sequence, handle: Handle, new_length: int) -> int:
        """Shorten the sequence to ``new_length`` tokens, renew its lease, and return how many blocks became free.

        Reserved room is kept: if others share the dropped blocks of it, other blocks are set aside instead. An equal
        request succeeds again, with the same answer, while the tip is still ``new_length``.

        Raises:
            TruncateBeyond: ``new_length`` is outside [1, length of the handle].
            HandleStale: The sequence does not hold the handle's tokens.
            KvGivenBack: Blocks that a row after ``new_length`` tokens needs were given back.
            QuotaExceeded, BlocksExhausted: These other blocks are not available; nothing changed.
            HandleUnknown: The sequence is released.
        """
        require_idle(sequence)
        if not 1 <= new_length <= handle.length:
            raise TruncateBeyond(handle.handle_id, new_length, handle.length)
        last = sequence.last_truncate
        if last is None or (last.handle, last.new_length) != (handle, new_length):
            check_handle(sequence, handle)
            sequence.require_kv(new_length)
            last = Truncation(handle, new_length, self._slots.truncate(sequence, new_length))
            sequence.last_truncate = last
        self.renew(sequence)
        return last.freed_blocks

    def release(self, handle: Handle, principal: str) -> int | None:
        """End the principal's sequence, whatever the handle's length.

        Acts at once, even if the sequence is pinned. An append reserved on it must not run any further; abort it,
        before or after.

        Returns:
            How many blocks became free; shared blocks do not count. None: there was nothing to release.
        """
        sequence = self.registry.get(handle.cache_id, principal)
        if sequence is None:
            return None
        self.registry.remove(sequence)
        self.ledger.add(principal, "num_released")
        return self._free_sequence(sequence)

    def renew(self, sequence: Sequence, ttl_s: float | None = None) -> float:
        """Restart the lease and return its seconds: ``ttl_s`` clamped to [MIN_TTL_S, max_ttl_s]; None: as before."""
        if ttl_s is not None:
            sequence.ttl_s = self._clamp_ttl(ttl_s)
            if self.on_lease is not None and sequence.is_durable:
                self.on_lease(sequence)
        sequence.expires_at = self.clock() + sequence.ttl_s
        if sequence.expires_at < sequence.scheduled_at:
            self._leases.schedule(sequence, sequence.expires_at)
        return sequence.ttl_s

    def expire(self, at: float | None = None) -> list[str]:
        """Free every sequence whose lease has ended, except pinned ones, and return their handle_ids.

        Args:
            at: Time on the store's clock by which the leases ended; None: now.
        """
        now = self.clock()
        due = self._leases.take_due(now if at is None else min(at, now))
        for sequence in due:
            self.registry.bury(sequence, now)
            self.ledger.add(sequence.principal, "num_expired")
            self._free_sequence(sequence)
        return [sequence.handle_id for sequence in due]

    def next_expiry(self) -> float | None:
        """Return in how many seconds, 0 or more, :meth:`expire` may find a sequence; None if there is no sequence."""
        at = self._leases.next_at()
        return None if at is None else max(0.0, at - self.clock())

    def restore(self, root: bytes, secret: bytes, principal: str, token_ids: array[int], ttl_s: float) -> Sequence:
        """Return a durable sequence of an earlier run, cold, for :meth:`register_restored`; quotas are not checked.

        Args:
            root: Identifies the model: the root of its lineage.
            secret: The secret part of its cache_id.
            principal: The owner.
            token_ids: Its tokens, at least one.
            ttl_s: Length of its lease.
        """
        cache_id = self.registry.durable_cache_id(secret)
        chain = LineageChain(root)
        chain.extend(token_ids)
        now = self.clock()
        sequence = Sequence(cache_id, handle_id_of(cache_id), principal, chain, [], self._clamp_ttl(ttl_s), now, now)
        sequence.is_durable = sequence.is_cold = True
        return sequence

    def register_restored(self, sequences: SequenceOf[Sequence]) -> None:
        """Make restored sequences live; each lease begins now, and first lasts RESTORED_LEASE_S at least."""
        self.registry.restore(sequences)
        for sequence in sequences:
            self.usage.enter(sequence.principal)
        self.renew_restored()

    def renew_restored(self) -> None:
        """Renew the leases of all durable sequences, because their owners could not do that for a while."""
        now = self.clock()
        for sequence in self.registry:
            if sequence.is_durable:
                sequence.expires_at = max(sequence.expires_at, now + max(sequence.ttl_s, RESTORED_LEASE_S))
                if sequence.expires_at < sequence.scheduled_at:
                    self._leases.schedule(sequence, sequence.expires_at)

    def lose_all(self) -> list[str]:
        """Free everything after a device fault, cached blocks too; durable sequences become cold.

        Returns:
            The handle_ids of all others, which have ended.
        """
        lost = [sequence.handle_id for sequence in self.registry if not sequence.is_durable]
        self._cache.clear()
        for reservation in list(self.reservations.live):
            self.reservations.abort(reservation)
        for sequence in list(self.registry):
            if sequence.is_durable:
                self.usage.release(sequence.principal, [*sequence.held_ids, *sequence.spare_ids])
                sequence.block_ids, sequence.spare_ids, sequence.is_cold = [], (), True
                sequence.num_given_back, sequence.lowest_length = 0, 1
            else:
                self.registry.remove(sequence)
                self._free_sequence(sequence)
        return lost

    def check_integrity(self) -> None:
        """Raise AssertionError unless the invariants of the store and of its parts hold; slow, for tests."""
        owners = self.reservations.count_owners()
        num_without = self.reservations.count_without()
        for sequence in self.registry:
            owners.update(sequence.held_ids)
            owners.update(sequence.spare_ids)
            num_without.update(sequence.held_ids[:1] if sequence.num_given_back else ())
        for sequence in self.registry:
            self._check_sequence(sequence, num_without)
        self.pool.check_integrity(owners)
        self.usage.check_integrity(self._count_holdings())
        self.registry.check_integrity()
        self._leases.check_integrity(self.clock())
        self.reservations.check_integrity()
        self._cache.check_integrity(self.registry)

    def _count_holdings(self) -> dict[str, Holding]:
        """Return what each principal holds, counted from scratch; a block of two principals would count twice."""
        holdings: dict[str, Holding] = {}
        blocks: dict[str, set[int]] = {}
        for each in self.registry:
            holdings.setdefault(each.principal, Holding()).num_sequences += 1
            blocks.setdefault(each.principal, set()).update(each.held_ids, each.spare_ids)
        for reservation in self.reservations.live:
            held = holdings.setdefault(reservation.principal, Holding())
            held.num_sequences += reservation.verdict.creates
            blocks.setdefault(reservation.principal, set()).update(reservation.held_ids)
        for principal, block_ids in blocks.items():
            holdings[principal].num_blocks = len(block_ids)
        return {principal: held for principal, held in holdings.items() if held != Holding()}

    def _check_sequence(self, sequence: Sequence, num_without: Mapping[int, int]) -> None:
        """Check one sequence; ``num_without`` counts, by block, the owners that gave back the block before it."""
        name, held_ids = sequence.handle_id, sequence.held_ids
        assert sequence.length > 0, f"{name} is empty"
        num_blocks = 0 if sequence.is_cold else self.pool.num_blocks_for(sequence.length)
        assert len(sequence.block_ids) == num_blocks, f"{name} has a table of other size"
        assert len(set(held_ids)) == len(held_ids), f"{name} has a block twice"
        assert not any(sequence.block_ids[: sequence.num_given_back]), f"{name} has a block that it gave back"
        lowest = sequence.num_given_back * self.pool.block_size + sequence.window if sequence.num_given_back else 1
        assert sequence.lowest_length == lowest <= sequence.length, f"{name} cannot be continued"
        assert self.pool.has_gaps or not sequence.num_given_back, f"{name} has gaps that the pool does not know"
        for before, block_id in pairwise(held_ids):
            most = self.pool.refcount(before) + num_without.get(block_id, 0)
            assert self.pool.refcount(block_id) <= most, f"{name} shares a block and not those before it"
        self._slots.check_integrity(sequence)
        sequence.chain.check_integrity()
        assert MIN_TTL_S <= sequence.ttl_s <= self.max_ttl_s, f"{name} has a lease of {sequence.ttl_s} s"
        assert sequence.num_pins >= int(sequence.is_appending), f"{name} is appended to and not pinned"

    def _end_rerun(self, reservation: Reservation, sequence: Sequence, ttl_s: float | None) -> Sequence:
        """Renew the lease after tokens were run again; a cold sequence gets the blocks to which they were written."""
        if reservation.verdict is Verdict.WARM:
            self.reservations.note_computed(reservation, sequence.length)
            table = reservation.block_ids
            sequence.block_ids, sequence.spare_ids = table, tuple(reservation.held_ids[len(table) :])
            sequence.is_cold = False
        self.reservations.close(reservation)
        self.renew(sequence, ttl_s)
        return sequence

    def _create_reserved(self, reservation: Reservation, token_ids: SequenceOf[int]) -> Sequence:
        new = reservation.new
        assert reservation.chain is not None, "a reservation without a sequence has a chain"
        if len(reservation.chain) == reservation.start:
            reservation.chain.extend(token_ids)
        elif len(reservation.chain) > len(token_ids):
            reservation.chain.truncate(len(token_ids))
        source, chain, table = reservation.sequence, reservation.chain, reservation.block_ids
        sequence = self._create(reservation.principal, chain, table, source, is_durable=new.is_durable)
        window = new.attention_window if source is None else source.window
        set_window(sequence, window, reservation.num_given_back, self.pool.block_size)
        if source is None:
            sequence.is_published = new.publish_prefix and self._cache.is_on
        else:
            self.ledger.add(reservation.principal, "num_forks")
        if new.reserved_length:
            sequence.reserved_length = new.reserved_length
            sequence.spare_ids = tuple(reservation.held_ids[len(table) :])
        return sequence

    def _create(
        self,
        principal: str,
        chain: LineageChain,
        block_ids: list[int],
        parent: Sequence | None,
        *,
        is_durable: bool = False,
    ) -> Sequence:
        """Register a sequence that becomes an owner of its blocks in place of the caller; `renew` must follow."""
        is_durable = is_durable if parent is None else parent.is_durable
        cache_id = self.registry.new_cache_id(is_durable=is_durable)
        now = self.clock()
        ttl_s = self._clamp_ttl(DEFAULT_TTL_S) if parent is None else parent.ttl_s
        sequence = Sequence(cache_id, handle_id_of(cache_id), principal, chain, block_ids, ttl_s, now + ttl_s, now)
        if parent is not None:
            sequence.parent_handle_id = parent.handle_id
            sequence.is_published, sequence.is_cold = parent.is_published, parent.is_cold
        sequence.is_durable = is_durable
        self.registry.add(sequence)
        self.ledger.add(principal, "num_created")
        return sequence

    def _give_back(self, sequence: Sequence, start: int) -> None:
        """Release the blocks outside the window after an append to the sequence, which had ``start`` tokens before."""
        if given_back := give_back(sequence, start, self.pool.block_size):
            self.pool.has_gaps = True
            self.usage.release(sequence.principal, given_back)
            self.ledger.add(sequence.principal, "num_given_back", len(given_back))

    def _free_sequence(self, sequence: Sequence) -> int:
        """Take all blocks from a sequence that is no longer registered, and return how many became free."""
        block_ids, sequence.block_ids = [*sequence.held_ids, *sequence.spare_ids], []
        sequence.spare_ids, sequence.num_given_back = (), 0
        sequence.is_released = True
        freed_blocks = self.usage.release(sequence.principal, block_ids)
        self.usage.leave(sequence.principal)
        return freed_blocks

    def _clamp_ttl(self, ttl_s: float) -> float:
        return min(max(ttl_s, MIN_TTL_S), self.max_ttl_s)
