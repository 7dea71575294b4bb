"""Endings: release sequences at once, and notify every part that keeps data on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ferrule_server.engine.appends.lanes import Lanes
from ferrule_server.engine.failpoints import Failpoints
from ferrule_server.engine.metrics.counters import EngineCounters
from ferrule_server.kv.handle import Handle
from ferrule_server.kv.sequence_store import SequenceStore


@dataclass(eq=False, slots=True)
class Endings:
    """Ends sequences. Used on the engine thread.

    Args:
        store: The sequences.
        lanes: The appends in flight on them.
        on_release: Called with the cache_id of each sequence that is released.
        counters: Counts released sequences.
        failpoints: For tests.
    """

    store: SequenceStore
    lanes: Lanes
    on_release: Callable[[str], object]
    counters: EngineCounters
    failpoints: Failpoints | None = None
    _listeners: list[Callable[[str], object]] = field(default_factory=list, init=False)

    def subscribe(self, *listeners: Callable[[str], object]) -> None:
        """From now on, call these with the handle_id of each sequence that has ended."""
        self._listeners += listeners

    def release(self, principal: str, handles: tuple[Handle, ...]) -> tuple[int | None, ...]:
        """Release sequences at once; jobs in flight or waiting on them are answered with HANDLE_UNKNOWN.

        Returns:
            For each handle how many blocks it returned to the pool; None: there was nothing to release.
        """
        freed_blocks: list[int | None] = []
        for handle in handles:
            if self.failpoints is not None:
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
                self.notify(handle.handle_id)
        finally:  # jobs that wait must be answered even after a failure
            if stopped is not None:
                self.lanes.advance(stopped)
        return freed

    def notify(self, handle_id: str) -> None:
        """Notify every listener that a sequence has ended, for whatever reason."""
        for listener in self._listeners:
            listener(handle_id)
