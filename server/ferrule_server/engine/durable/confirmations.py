"""Confirmations: outcomes that show state of durable sequences wait until the journal has that state on the disk."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from ferrule_server.engine.appends.creations import Creations
from ferrule_server.engine.appends.records import ReplayRecords
from ferrule_server.engine.bridge.delivery import Delivery
from ferrule_server.engine.bridge.gate import Finished, is_last
from ferrule_server.engine.durable.journal import Journal
from ferrule_server.engine.durable.opening import Durability
from ferrule_server.engine.durable.restore import restore
from ferrule_server.engine.jobs import AppendJob, GenerateJob, HostCall, Job, QueuedJob
from ferrule_server.errors import DurabilityLost, RequestIdReused
from ferrule_server.kv.sequence_store import SequenceStore


class NoJournal:
    """Takes reports where no sequence is durable, and drops them.

    Attributes:
        is_lost, has_work, has_open: As in :class:`~ferrule_server.engine.durable.journal.Journal`.
    """

    is_lost: Final = False
    has_work: Final = False
    has_open: Final = False

    def __len__(self) -> int:
        return 0

    def figures(self, _num_recomputed_tokens: int) -> None:
        """Return None: there are none."""

    def _drop(self, *_: object) -> None:
        """Do nothing."""

    note_append = note_rewind = note_fork = note_truncate = note_reserve = _drop
    note_state = note_ended = note_masks = _drop


class Direct:
    """The outlet without a journal: every outcome is delivered at once.

    Args:
        delivery: Takes them.

    Attributes:
        has_journal: Whether sequences can survive the process.
        journal: Takes reports.
        masks: Packed bits of restored token masks, by principal and fingerprint.
        hand_over: Takes finished jobs.
    """

    has_journal: Final = False

    def __init__(self, delivery: Delivery) -> None:
        self.journal = NoJournal()
        self.masks: Mapping[tuple[str, bytes], bytes] = {}
        self.hand_over = delivery.hand_over

    def concerns(self, _: Job[object]) -> bool:
        """Return False."""
        return False

    def tend(self) -> list[Finished] | None:
        """Return None."""
        return None

    def close(self) -> None:
        """Do nothing."""


@dataclass(eq=False)
class Confirmations:
    """The outlet with a journal: each outcome is held until a group of records is on the disk.

    Called on the engine thread, but for ``_release``, which the journal calls on its own thread after each sync. The
    lock guards what is held and which group is synced, and both threads deliver with it held.

    Invariant: outcomes are released in the order in which they came, and none before its group is synced; no outcome
    overtakes an earlier one of the same job.

    Args:
        journal: Writes what happens to durable sequences.
        store: The sequences.
        delivery: Takes outcomes that may be sent.

    Attributes:
        masks: Packed bits of restored token masks, by principal and fingerprint.
    """

    journal: Journal
    store: SequenceStore
    delivery: Delivery
    masks: Mapping[tuple[str, bytes], bytes] = field(init=False, default_factory=dict)
    has_journal: Final = True
    _lock: threading.Lock = field(init=False, default_factory=threading.Lock)
    _held: deque[tuple[int, Finished]] = field(init=False, default_factory=deque)
    _synced: int = field(init=False, default=0)

    def restore(
        self, durability: Durability, records: ReplayRecords, creations: Creations, wake: Callable[[], None]
    ) -> None:
        """Make what the journal described live again, and write it to a segment of its own.

        Args:
            durability: The journal as it was read.
            records: Where last answers go.
            creations: Where goes what requests have created.
            wake: Wakes the engine thread; any thread.

        Raises:
            OSError: It cannot be written.
        """
        restored = restore(durability, self.store, records, creations)
        self.journal.attach(self.store, records, creations, on_synced=self._release, wake=wake)
        self.journal.begin(restored, durability.state.masks)
        self.masks = durability.state.masks

    def concerns(self, job: Job[object]) -> bool:
        """Return whether the outcome of a job may show a durable sequence: it names one, creates one, or lists all."""
        registry = self.store.registry
        if isinstance(job, QueuedJob):
            if job.handle is not None:
                return registry.is_durable(job.handle.cache_id)
            return isinstance(job, AppendJob | GenerateJob) and job.new.is_durable
        if isinstance(job, HostCall):
            return not job.handles or any(registry.is_durable(handle.cache_id) for handle in job.handles)
        return False

    def hand_over(self, finished: list[Finished]) -> None:
        """Give the records of this turn to the disk, and deliver outcomes; some of them wait for these records."""
        self.journal.close_group()
        outcomes = [self._awaited(each) for each in finished]
        with self._lock:
            self._held += [each for each in outcomes if each[0] > self._synced]
            self.delivery.hand_over([each for group, each in outcomes if group <= self._synced])

    def tend(self) -> list[Finished] | None:
        """Tend the journal; if it has just been lost, return what waited for it, with DURABILITY_LOST as the outcome.

        It is unknown whether that will be there. Frames before the last one of a job are dropped; its driver ends it.
        """
        return self._lost() if self.journal.tend() else None

    def close(self) -> None:
        """Write what is left, and answer what still waits for a disk that does not answer."""
        self.journal.close()
        with contextlib.suppress(RuntimeError):  # the event loop may be closed already: then no caller waits
            self.delivery.hand_over(self._lost())

    def _lost(self) -> list[Finished]:
        """Take what waits for the disk, and return it with DURABILITY_LOST, once for each job."""
        with self._lock:
            held, self._held = self._held, deque()
        return [(job, sink, DurabilityLost()) for _, (job, sink, outcome) in held if is_last(outcome)]

    def _release(self, synced: int) -> None:
        """Deliver what waited for groups up to ``synced``; journal thread."""
        with self._lock:
            self._synced = synced
            free: list[Finished] = []
            while self._held and self._held[0][0] <= synced:
                free.append(self._held.popleft()[1])
            self.delivery.hand_over(free)

    def _awaited(self, finished: Finished) -> tuple[int, Finished]:
        """Return an outcome with the group of records that it depends on; while the journal is lost, an error.

        The groups of one job never decrease.
        """
        job, sink, outcome = finished
        is_durable = self.concerns(job) or isinstance(outcome, RequestIdReused)
        if not is_durable or not self.journal.concerns(job.principal):
            return 0, finished
        if self.journal.is_lost:
            return 0, (job, sink, DurabilityLost())
        return self.journal.group_of(job.principal), finished


Outlet = Direct | Confirmations
"""Where finished jobs leave the engine thread."""
