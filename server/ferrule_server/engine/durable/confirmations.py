"""Confirmations: what the engine hands over waits until the journal confirms what it shows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

from ferrule_server.engine.appends.creations import Creations
from ferrule_server.engine.appends.records import ReplayRecords
from ferrule_server.engine.bridge.delivery import Delivery
from ferrule_server.engine.bridge.gate import Finished, is_last
from ferrule_server.engine.durable.barrier import Barrier
from ferrule_server.engine.durable.journal import Journal
from ferrule_server.engine.durable.opening import Durability
from ferrule_server.engine.durable.restore import restore
from ferrule_server.engine.jobs import AppendJob, GenerateJob, HostCall, Job, QueuedJob
from ferrule_server.engine.metrics.durability import DurabilityFigures
from ferrule_server.errors import DurabilityLost, RequestIdReused
from ferrule_server.kv.sequence_store import SequenceStore


@dataclass(slots=True)
class Confirmations:
    """The journal of an engine, and the outcomes that wait for it. Engine thread only, except the figures.

    Args:
        journal: Writes what happens to durable sequences.
        store: The sequences.
        delivery: Takes outcomes that may be sent.
    """

    journal: Journal
    store: SequenceStore
    delivery: Delivery
    _barrier: Barrier = field(init=False)
    _num_restored: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Let the barrier deliver where everything else is delivered."""
        self._barrier = Barrier(self.delivery.deliver)

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
        restored = restore(durability.state, self.store, records, creations, knows_digests=durability.knows_digests)
        self.journal.attach(self.store, records, creations, on_synced=self._barrier.release, wake=wake)
        self.journal.begin(restored, durability.state.masks)
        self._num_restored = len(restored)

    def check(self, job: Job[object]) -> None:
        """Return if a job may begin.

        Raises:
            DurabilityLost: It depends on the journal, which cannot be written now.
        """
        if self.journal.is_lost and isinstance(job, QueuedJob) and self.is_durable(job):
            raise DurabilityLost

    def is_durable(self, job: Job[object]) -> bool:
        """Return whether the outcome of a job may show a durable sequence: it names one, creates one, or lists all."""
        registry = self.store.registry
        if isinstance(job, QueuedJob):
            if job.handle is not None:
                return registry.is_durable(job.handle.cache_id)
            return isinstance(job, AppendJob | GenerateJob) and job.is_durable
        if isinstance(job, HostCall):
            return not job.handles or any(registry.is_durable(handle.cache_id) for handle in job.handles)
        return False

    def hand_over(self) -> None:
        """Deliver finished jobs; those that show state of durable sequences wait for the journal."""
        finished, self.delivery.finished = self.delivery.finished, []
        self._barrier.pass_on([self._awaited(each) for each in finished])

    def lose(self) -> None:
        """Answer what waits for the journal with DURABILITY_LOST: it is unknown whether it will be there.

        Frames before the last one of a job are dropped; its driver ends it.
        """
        self.delivery.finished += [
            (job, sink, DurabilityLost()) for job, sink, outcome in self._barrier.take_all() if is_last(outcome)
        ]

    def close(self) -> None:
        """Write what is left, and answer what still waits for a disk that does not answer."""
        self.journal.close()
        with contextlib.suppress(RuntimeError):  # the event loop may be closed already: then no caller waits
            self.delivery.deliver([(job, sink, DurabilityLost()) for job, sink, _ in self._barrier.take_all()])

    def figures(self, num_recomputed_tokens: int) -> DurabilityFigures:
        """Return the figures of the journal; from any thread."""
        return self.journal.figures(self._num_restored, num_recomputed_tokens)

    def _awaited(self, finished: Finished) -> tuple[int, Finished]:
        """Return an outcome with the group of records that it depends on; while the journal is lost, an error."""
        job, sink, outcome = finished
        is_durable = self.is_durable(job) or isinstance(outcome, RequestIdReused)
        if not is_durable or not self.journal.concerns(job.principal):
            return 0, finished
        if self.journal.is_lost:
            return 0, (job, sink, DurabilityLost())
        return self.journal.group_of(job.principal), finished
