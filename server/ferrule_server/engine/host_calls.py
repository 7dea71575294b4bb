"""Host calls: operations that read or change sequences and need no step of the executor, and no turn in a lane.

Those on sequences judge leases at ``at``, the job's time of arrival on the store's clock, and raise:

    HandleUnknown, HandleExpired, EpochChanged, WrongInstance     The handle names no sequence here.
    ContextExceeded, ExceedsPool, QuotaExceeded, BlocksExhausted  There is no room; nothing changed.

A view of the whole server is cheap enough to be taken between two steps: data proportional to the pool is copied, not
traversed, and the reader computes the rest from the copies. With 200 000 blocks and 9000 sequences, of which it lists
256, a view takes about two milliseconds of the engine thread; with 1024 listed, five to seven.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice

from ferrule_server.engine.appends.endings import Endings
from ferrule_server.engine.appends.lanes import Lanes
from ferrule_server.engine.appends.running import Reports
from ferrule_server.engine.bridge.gate import Gate
from ferrule_server.engine.jobs import CacheInfo, HostCall, Lease, ListResult, SlotsWanted
from ferrule_server.engine.metrics.counters import EngineSnapshot, OwnCounters
from ferrule_server.engine.metrics.timings import HistogramReading
from ferrule_server.errors import FerruleError
from ferrule_server.executor.base import TokenMask
from ferrule_server.kv.handle import Handle
from ferrule_server.kv.metrics import KvMetrics
from ferrule_server.kv.per_principal import PerPrincipal
from ferrule_server.kv.reserved_slots import SlotRequest, SlotReservation
from ferrule_server.kv.sequence import Sequence
from ferrule_server.kv.sequence_store import SequenceStore


@dataclass(slots=True)
class PrincipalSeen:
    """One principal: what it holds, its unfinished jobs, and the sums over its appends.

    Attributes:
        num_sequences, num_blocks: Live sequences, and the blocks that they hold.
        num_jobs, num_rows: Jobs in the queue or in flight, and their rows.
        num_appends: Appends committed. num_tokens: their tokens, without those from the prefix cache.
        queue_ns: Time that the appends waited for their first steps. run_ns: run time of the steps with rows of them.
    """

    name: str
    num_sequences: int
    num_blocks: int
    num_jobs: int
    num_rows: int
    num_appends: int = 0
    num_tokens: int = 0
    queue_ns: int = 0
    run_ns: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """The server between two steps. It shares nothing with the engine that can change.

    Attributes:
        at_s: Time of the view on ``time.monotonic``. unix_ns: the same by the wall clock.
        snapshot: The engine's figures.
        timings: The readings of the histograms of ``engine/metrics/timings.py``, by their names.
        kv: The counters of the pool.
        refcounts: Owners of each block, the null block at index 0; the view's own copy.
        is_cached: A byte for each block, 1 if only the prefix cache holds it.
        has_gaps: As in :class:`~ferrule_server.kv.block_pool.BlockPool`.
        sequences: Those whose leases end soonest, in that order.
        principals: The most recently active first.
        num_principals: Known principals, including those not listed. num_jobs: accepted and unfinished jobs of all.
    """

    at_s: float
    unix_ns: int
    snapshot: EngineSnapshot
    timings: Mapping[str, HistogramReading]
    kv: KvMetrics
    refcounts: list[int] = field(repr=False)
    is_cached: bytes = field(repr=False)
    has_gaps: bool
    sequences: tuple[CacheInfo, ...]
    principals: tuple[PrincipalSeen, ...]
    num_principals: int
    num_jobs: int


@dataclass(frozen=True, slots=True)
class Host:
    """What host calls do; called from the engine thread only.

    Args:
        store: The sequences.
        bytes_per_block: K and V of all layers of one block.
        lanes: The jobs in flight or waiting on sequences.
        endings: Releases sequences.
        journal: Writes what happens to durable sequences.
        gate: Knows the accepted and unfinished jobs.
        own: The counters of each principal.
        snapshot: Returns the engine's current state.
    """

    store: SequenceStore
    bytes_per_block: int
    lanes: Lanes
    endings: Endings
    journal: Reports
    gate: Gate
    own: PerPrincipal[OwnCounters]
    snapshot: Callable[[], EngineSnapshot]

    def reserve(self, principal: str, wanted: tuple[SlotsWanted, ...], at: float) -> SlotReservation:
        """Reserve room for sequences, all or nothing.

        Raises:
            Restoring: One of them is cold, and is being computed now.
        """
        requests = [SlotRequest(self.store.resolve(each.handle, principal, at), *each[1:]) for each in wanted]
        for request in requests:
            if request.sequence.is_cold:
                self.lanes.warm(request.sequence)
        reservation = self.store.reserve_slots(requests)
        for request in requests:
            if request.sequence.is_durable:
                self.journal.note_reserve(request.sequence)
        return reservation

    def renew(self, principal: str, handle: Handle, ttl_s: float | None, at: float) -> Lease | FerruleError:
        """Renew a lease, or return why it cannot be renewed: each handle of a request fails alone."""
        try:
            granted = self.store.renew(self.store.resolve(handle, principal, at), ttl_s)
        except FerruleError as error:
            return error
        return Lease(granted, granted)

    def describe(self, principal: str, handle: Handle, at: float, with_token_ids: bool) -> CacheInfo:
        """Return all details of a sequence, and renew its lease."""
        sequence = self.store.resolve(handle, principal, at)
        self.store.renew(sequence)
        info = self._describe(sequence, self.store.clock())
        info.tip, info.block_ids = sequence.handle_at(), tuple(sequence.held_ids)
        info.block_refcounts = tuple(map(self.store.pool.refcount, info.block_ids))
        info.token_ids = tuple(sequence.token_ids) if with_token_ids else None
        return info

    def list_page(self, principal: str, after_handle_id: str, limit: int, with_tips: bool) -> ListResult:
        """Return a page of a principal's sequences, in order of handle_id."""
        sequences = self.store.registry.page(principal, after_handle_id, limit + 1)
        now = self.store.clock()
        page = tuple(self._describe(sequence, now) for sequence in sequences[:limit])
        if with_tips:
            for info, sequence in zip(page, sequences, strict=False):
                info.tip = sequence.handle_at() if info.length else None
        next_after = page[-1].handle_id if len(sequences) > limit else ""
        return ListResult(page, next_after, self.store.registry.count(principal))

    def look(self, max_sequences: int, max_principals: int) -> View:
        """Return a view of the current state; nothing changes, and no lease is renewed."""
        snapshot = self.snapshot()
        refcounts, is_cached = self.store.pool.picture()
        pending = self.gate.pending()
        # Those that appended recently, newest first, then those that hold sequences or have jobs.
        known = dict.fromkeys(chain(self.own.recent(), self.store.usage.principals(), pending))
        soonest, now = self.store.registry.soonest(max_sequences), self.store.clock()
        return View(
            at_s=time.monotonic(),
            unix_ns=time.time_ns(),
            snapshot=snapshot,
            timings=dict(snapshot.counters.timings),
            kv=self.store.metrics(),
            refcounts=refcounts,
            is_cached=is_cached,
            has_gaps=self.store.pool.has_gaps,
            sequences=tuple(self._outline(each, now, tuple(each.held_ids)) for each in soonest),
            principals=tuple(self._principal(name, pending) for name in islice(known, max_principals)),
            num_principals=len(known),
            num_jobs=self.gate.num_jobs,
        )

    def _describe(self, sequence: Sequence, now: float) -> CacheInfo:
        """Describe a sequence, as a rule in a time independent of its length: a page has up to a thousand of them."""
        info = self._outline(sequence, now)
        info.num_shared_blocks = self.store.pool.count_shared(sequence.block_ids)
        return info

    def _outline(self, sequence: Sequence, now: float, block_ids: tuple[int, ...] = ()) -> CacheInfo:
        """Describe a sequence at a time on the store's clock, apart from who shares its blocks."""
        length, num_blocks = sequence.length, sequence.num_blocks
        # By position, in the order of the class: keywords take longer, and a view has up to a thousand of these.
        return CacheInfo(
            sequence.handle_id,
            sequence.principal,
            length,
            num_blocks,
            num_blocks * self.bytes_per_block,
            now - sequence.created_at,
            sequence.ttl_s,
            max(0.0, sequence.expires_at - now),
            sequence.parent_handle_id,
            self.lanes.num_pending(sequence),
            sequence.is_appending,
            sequence.reserved_length,
            sequence.first_position,
            sequence.lowest_length,
            sequence.is_durable,
            length if sequence.is_cold else 0,
            block_ids,
        )

    def _principal(self, name: str, pending: dict[str, tuple[int, int]]) -> PrincipalSeen:
        held, own = self.store.usage.of(name), self.own.look(name)
        seen = PrincipalSeen(name, held.num_sequences, held.num_blocks, *pending.get(name, (0, 0)))
        seen.num_appends = own.prefills + own.decodes + own.verifies
        seen.num_tokens = own.prefill_tokens + own.decode_tokens
        seen.queue_ns, seen.run_ns = own.queue_ns, own.prefill_ns + own.decode_ns + own.verify_ns
        return seen


def reserve(principal: str, wanted: tuple[SlotsWanted, ...]) -> HostCall[SlotReservation]:
    """Return the call that reserves room for sequences, all or nothing."""
    return HostCall(
        principal, lambda host, at: host.reserve(principal, wanted, at), tuple(each.handle for each in wanted)
    )


def release(principal: str, handles: tuple[Handle, ...]) -> HostCall[tuple[int | None, ...]]:
    """Return the call that ends sequences, whatever the lengths of the handles.

    Its result has, for each handle, how many blocks were returned to the pool; None: there was nothing to release.
    """
    return HostCall(principal, lambda host, _: host.endings.release(principal, handles), handles)


def keep_alive(
    principal: str, handles: tuple[Handle, ...], ttl_s: float | None = None
) -> HostCall[tuple[Lease | FerruleError, ...]]:
    """Return the call that renews leases, whatever the lengths of the handles; ``ttl_s`` None keeps each duration.

    Its result has, for each handle, its lease or the reason why it could not be renewed.
    """
    return HostCall(
        principal, lambda host, at: tuple(host.renew(principal, each, ttl_s, at) for each in handles), handles
    )


def describe(principal: str, handle: Handle, *, with_token_ids: bool = False) -> HostCall[CacheInfo]:
    """Return the call that describes one sequence, whatever the length of the handle."""
    return HostCall(principal, lambda host, at: host.describe(principal, handle, at, with_token_ids), (handle,))


def list_caches(
    principal: str, after_handle_id: str = "", limit: int = 100, *, with_tips: bool = False
) -> HostCall[ListResult]:
    """Return the call that lists a principal's sequences in order of handle_id, after ``after_handle_id``."""
    return HostCall(principal, lambda host, _: host.list_page(principal, after_handle_id, limit, with_tips))


def keep_masks(principal: str, masks: tuple[TokenMask, ...]) -> HostCall[None]:
    """Return the call that writes masks to the journal, so that they are known after a restart."""
    return HostCall(principal, lambda host, _: host.journal.note_masks(principal, masks))


def view(principal: str, max_sequences: int = 256, max_principals: int = 64) -> HostCall[View]:
    """Return the call that takes a view of the whole server, with at most so many sequences and principals."""
    return HostCall(principal, lambda host, _: host.look(max_sequences, max_principals))
