"""Host calls: operations that read or change sequences and need no step of the executor, and no turn in a lane.

Those of :class:`Caches` judge leases at ``at``, the job's time of arrival on the store's clock, and raise:

    HandleUnknown, HandleExpired, EpochChanged, WrongInstance     The handle names no sequence here.
    ContextExceeded, ExceedsPool, QuotaExceeded, BlocksExhausted  There is no room; nothing changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ferrule_server.engine.appends.endings import Endings
from ferrule_server.engine.appends.lanes import Lanes
from ferrule_server.engine.appends.running import Reports
from ferrule_server.engine.jobs import CacheInfo, HostCall, Lease, ListResult, SlotsWanted
from ferrule_server.engine.metrics.views import View
from ferrule_server.errors import FerruleError
from ferrule_server.executor.base import TokenMask
from ferrule_server.kv.handle import Handle
from ferrule_server.kv.reserved_slots import SlotRequest, SlotReservation
from ferrule_server.kv.sequence import Sequence
from ferrule_server.kv.sequence_store import SequenceStore


@dataclass(frozen=True, slots=True)
class Caches:
    """Operations on the sequences of one store.

    Args:
        store: The sequences; called from the engine thread only.
        bytes_per_block: K and V of all layers of one block.
        lanes: The jobs in flight or waiting on them.
        journal: Writes what happens to durable sequences.
    """

    store: SequenceStore
    bytes_per_block: int
    lanes: Lanes
    journal: Reports

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

    def keep_alive(
        self, principal: str, handles: tuple[Handle, ...], ttl_s: float | None, at: float
    ) -> tuple[Lease | FerruleError, ...]:
        """Renew leases; each handle that names no sequence fails alone."""
        return tuple(self._renew(principal, handle, ttl_s, at) for handle in handles)

    def describe(self, principal: str, handle: Handle, at: float, with_token_ids: bool) -> CacheInfo:
        """Return all details of a sequence, and renew its lease."""
        sequence = self.store.resolve(handle, principal, at)
        self.store.renew(sequence)
        block_ids, token_ids = tuple(sequence.held_ids), sequence.token_ids
        return dataclasses.replace(
            self._describe(sequence),
            tip=sequence.handle_at(),
            block_ids=block_ids,
            block_refcounts=tuple(map(self.store.pool.refcount, block_ids)),
            token_ids=tuple(token_ids) if with_token_ids else None,
        )

    def list_page(self, principal: str, after_handle_id: str, limit: int) -> ListResult:
        """Return a page of a principal's sequences, in order of handle_id."""
        sequences = self.store.registry.page(principal, after_handle_id, limit + 1)
        page = tuple(self._describe(sequence) for sequence in sequences[:limit])
        next_after = page[-1].handle_id if len(sequences) > limit else ""
        return ListResult(page, next_after, self.store.registry.count(principal))

    def _renew(self, principal: str, handle: Handle, ttl_s: float | None, at: float) -> Lease | FerruleError:
        try:
            granted = self.store.renew(self.store.resolve(handle, principal, at), ttl_s)
        except FerruleError as error:
            return error
        return Lease(granted, granted)

    def _describe(self, sequence: Sequence) -> CacheInfo:
        """Describe a sequence, as a rule in a time independent of its length: a page has up to a thousand of them."""
        now = self.store.clock()
        return CacheInfo(
            handle_id=sequence.handle_id,
            length=sequence.length,
            tip=None,
            num_blocks=sequence.num_blocks,
            num_shared_blocks=self.store.pool.count_shared(sequence.block_ids),
            kv_bytes=sequence.num_blocks * self.bytes_per_block,
            age_s=now - sequence.created_at,
            lease=Lease(sequence.ttl_s, max(0.0, sequence.expires_at - now)),
            parent_handle_id=sequence.parent_handle_id,
            num_pending=self.lanes.num_pending(sequence),
            reserved_length=sequence.reserved_length,
            is_durable=sequence.is_durable,
            tokens_to_recompute=sequence.length if sequence.is_cold else 0,
            first_position=sequence.first_position,
            lowest_length=sequence.lowest_length,
        )


class Host(NamedTuple):
    """The parts of the engine that host calls use."""

    caches: Caches
    endings: Endings
    journal: Reports
    look: Callable[[int, int], View]


def reserve(principal: str, wanted: tuple[SlotsWanted, ...]) -> HostCall[SlotReservation]:
    """Return the call that reserves room for sequences, all or nothing."""
    return HostCall(
        principal, lambda host, at: host.caches.reserve(principal, wanted, at), tuple(each.handle for each in wanted)
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
    return HostCall(principal, lambda host, at: host.caches.keep_alive(principal, handles, ttl_s, at), handles)


def describe(principal: str, handle: Handle, *, with_token_ids: bool = False) -> HostCall[CacheInfo]:
    """Return the call that describes one sequence, whatever the length of the handle."""
    return HostCall(principal, lambda host, at: host.caches.describe(principal, handle, at, with_token_ids), (handle,))


def list_caches(principal: str, after_handle_id: str = "", limit: int = 100) -> HostCall[ListResult]:
    """Return the call that lists a principal's sequences in order of handle_id, after ``after_handle_id``."""
    return HostCall(principal, lambda host, _: host.caches.list_page(principal, after_handle_id, limit))


def keep_masks(principal: str, masks: tuple[TokenMask, ...]) -> HostCall[None]:
    """Return the call that writes masks to the journal, so that they are known after a restart."""
    return HostCall(principal, lambda host, _: host.journal.note_masks(principal, masks))


def view(principal: str, max_sequences: int = 256, max_principals: int = 64) -> HostCall[View]:
    """Return the call that takes a view of the whole server, with at most so many sequences and principals."""
    return HostCall(principal, lambda host, _: host.look(max_sequences, max_principals))
