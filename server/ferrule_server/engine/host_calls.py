"""Host calls: operations that read or change sequences and need no step of the executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ferrule_server.engine.appends.caches import Caches
from ferrule_server.engine.appends.endings import Endings
from ferrule_server.engine.appends.running import Reports
from ferrule_server.engine.jobs import CacheInfo, HostCall, Lease, ListResult, SlotsWanted
from ferrule_server.engine.metrics.views import View
from ferrule_server.errors import FerruleError
from ferrule_server.executor.base import TokenMask
from ferrule_server.kv.handle import Handle
from ferrule_server.kv.reserved_slots import SlotReservation


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
