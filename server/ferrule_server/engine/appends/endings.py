"""Endings: release sequences at once, and notify every part that keeps data on them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from ferrule_server.durability.records import End
from ferrule_server.engine.appends.lanes import Lanes
from ferrule_server.engine.appends.running import Reports
from ferrule_server.engine.faults.failpoints import Failing
from ferrule_server.engine.metrics.counters import EngineCounters
from ferrule_server.kv.handle import Handle
from ferrule_server.kv.sequence_store import SequenceStore

_LOG = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Endings:
    """Ends sequences. Used on the engine thread.

    Args:
        store: The sequences.
        lanes: The appends in flight on them.
        on_release: Called with the cache_id of each sequence that is released.
        counters: Counts sequences that have ended.
        journal: Writes what happens to durable sequences.
        failpoints: Where to fail on purpose.

    Attributes:
        listeners: Called with the handle_id of each sequence that has ended.
    """

    store: SequenceStore
    lanes: Lanes
    on_release: Callable[[str], object]
    counters: EngineCounters
    journal: Reports
    failpoints: Failing
    listeners: tuple[Callable[[str], object], ...] = field(default=(), init=False)

    def release(self, principal: str, handles: tuple[Handle, ...]) -> tuple[int | None, ...]:
        """Release sequences at once; jobs in flight or waiting on them are answered with HANDLE_UNKNOWN.

        Returns:
            For each handle how many blocks it returned to the pool; None: there was nothing to release.
        """
        freed_blocks: list[int | None] = []
        for handle in handles:
            self.failpoints.hit("during_free")
            freed = self.release_one(handle, principal)
            freed_blocks.append(freed)
            self.counters.released += freed is not None
        return tuple(freed_blocks)

    def release_one(self, handle: Handle, principal: str) -> int | None:
        """Release one sequence, and return how many blocks it freed; None if there was nothing to release."""
        stopped = self.lanes.stop(handle, principal)
        try:
            freed = self.store.release(handle, principal)
            if freed is not None:
                self.on_release(handle.cache_id)
                self._notify(handle.handle_id)
        finally:  # jobs that wait must be answered even after a failure
            if stopped is not None:
                self.lanes.advance(stopped)
        return freed

    def expire(self, until: float | None) -> None:
        """End the sequences whose leases have ended; ``until`` as for :meth:`SequenceStore.expire`."""
        if self.store.next_expiry() == 0.0:
            self.failpoints.hit("during_free")
        for handle_id in self.store.expire(until):
            self.counters.expired += 1
            self.journal.note_ended(handle_id, End.EXPIRED)
            self._notify(handle_id)
            _LOG.info("lease expired handle_id=%s", handle_id)

    def lose_all(self) -> None:
        """End all sequences after a device fault, except durable ones, which become cold."""
        for handle_id in self.store.lose_all():
            self._notify(handle_id)

    def _notify(self, handle_id: str) -> None:
        """Notify every listener that a sequence has ended, for whatever reason."""
        for listener in self.listeners:
            listener(handle_id)
        self.journal.note_ended(handle_id)
