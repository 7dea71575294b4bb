"""Lanes: on one sequence one job at a time, in order of arrival.

At most one append is in flight on a sequence; other appends, forks and truncates wait behind it and are judged when
their turn comes. Release acts at once and ends what is in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ferrule_server.engine.admission import Admission
from ferrule_server.engine.counters import EngineCounters
from ferrule_server.engine.faults import fault
from ferrule_server.engine.host_jobs import HostJobs
from ferrule_server.engine.jobs import AppendJob, AppendResult, ForkJob, Job, Outcome, Sink, TruncateJob
from ferrule_server.engine.running import RunningAppend
from ferrule_server.errors import Cancelled, FerruleError, HandleUnknown
from ferrule_server.kv.sequence import Sequence
from ferrule_server.kv.store import KvStore

LaneJob = AppendJob | ForkJob | TruncateJob
"""A job that is judged by the state of its sequence."""


class Lanes:
    """The appends in flight, and what waits behind them.

    Invariant: a sequence has a lane exactly while an append is in flight on it, and at most one is; ``num_waiting`` is
    the number of jobs in all lanes; a waiting job pins its sequence.

    Args:
        store: The sequences; called from the engine thread only.
        admission: Turns jobs into running appends.
        host_jobs: Carries out forks and truncates.
        counters: Counts forks and truncates.
        finish: Takes the outcome of each job, once.

    Attributes:
        running: The appends in flight, oldest first.
    """

    def __init__(
        self,
        store: KvStore,
        admission: Admission,
        host_jobs: HostJobs,
        counters: EngineCounters,
        finish: Callable[[Job, Sink, Outcome], None],
    ) -> None:
        self.running: dict[RunningAppend, None] = {}
        self.num_waiting = 0
        self._lanes: dict[Sequence, deque[tuple[LaneJob, Sink]]] = {}
        self._store = store
        self._admission = admission
        self._host_jobs = host_jobs
        self._counters = counters
        self._finish = finish

    def __len__(self) -> int:
        """Jobs in flight and waiting."""
        return len(self.running) + self.num_waiting

    def enter(self, job: LaneJob, sink: Sink, at: float) -> None:
        """Judge the job now, or after whatever is in flight on its sequence.

        Raises:
            FerruleError: It is refused; nothing happened.
        """
        if job.handle is None:
            if job.is_cancelled:
                raise Cancelled
            self._start(job, sink, None)
            return
        sequence = self._store.resolve(job.handle, job.principal, at)
        if (lane := self._lanes.get(sequence)) is not None:
            lane.append((job, sink))
            self.num_waiting += 1
            sequence.num_pins += 1  # it came within the lease, so the lease lasts until it is judged
        else:
            self._judge(job, sink, sequence, at)

    def end(self, sequence: Sequence) -> None:
        """The sequence is being released: what is in flight or waiting on it is answered HANDLE_UNKNOWN."""
        waiting = self._lanes.pop(sequence, None)
        if waiting is None:
            return
        for run in [run for run in self.running if run.sequence is sequence]:
            self._drop(run)
            self._finish(run.job, run.sink, HandleUnknown(sequence.handle_id))
        self.num_waiting -= len(waiting)
        sequence.num_pins -= len(waiting)
        for job, sink in waiting:
            self._finish(job, sink, HandleUnknown(sequence.handle_id))

    def complete(self, run: RunningAppend, answer: AppendResult) -> None:
        """The append is committed: answer it and let the next in its lane go on."""
        self.running.pop(run, None)
        self._finish(run.job, run.sink, answer)
        self._go_on(run)

    def fail(self, run: RunningAppend, error: FerruleError) -> None:
        """Take back what the append reserved and answer it with ``error``; its handle stays as it was."""
        self._drop(run)
        self._finish(run.job, run.sink, error)
        self._go_on(run)

    def end_all(self, why: Callable[[LaneJob], FerruleError]) -> None:
        """Take back and answer everything in flight and everything that waits."""
        for run in list(self.running):
            self._drop(run)
            self._finish(run.job, run.sink, why(run.job))
        lanes, self._lanes, self.num_waiting = self._lanes, {}, 0
        for waiting in lanes.values():
            for job, sink in waiting:
                self._finish(job, sink, why(job))

    def num_pending(self, sequence: Sequence) -> int:
        """Return how many jobs are in flight or waiting on the sequence."""
        lane = self._lanes.get(sequence)
        return 0 if lane is None else 1 + len(lane)

    def _judge(self, job: LaneJob, sink: Sink, sequence: Sequence, at: float) -> None:
        if job.is_cancelled:
            raise Cancelled
        if isinstance(job, AppendJob):
            self._start(job, sink, sequence)
            return
        self._finish(job, sink, self._host_jobs.run(job, at))
        if isinstance(job, ForkJob):
            self._counters.forks += 1
        else:
            self._counters.truncates += 1

    def _start(self, job: AppendJob, sink: Sink, sequence: Sequence | None) -> None:
        """Let the append run, or answer it at once."""
        admitted = (
            self._admission.create(job, sink) if sequence is None else self._admission.append(job, sink, sequence)
        )
        if isinstance(admitted, AppendResult):
            self._finish(job, sink, admitted)
            return
        self.running[admitted] = None
        if sequence is not None:
            self._lanes[sequence] = deque()

    def _drop(self, run: RunningAppend) -> None:
        if run.reservation is not None:
            self._store.abort(run.reservation)
        elif run.sequence is not None:
            run.sequence.num_pins -= 1
        self.running.pop(run, None)

    def _go_on(self, run: RunningAppend) -> None:
        """Let the jobs that waited for ``run`` go on, until one of them is in flight."""
        if run.sequence is None:
            return
        waiting = self._lanes.pop(run.sequence, None)
        while waiting:
            job, sink = waiting.popleft()
            self.num_waiting -= 1
            self._take_turn(job, sink, run.sequence)
            if (lane := self._lanes.get(run.sequence)) is not None:
                lane.extend(waiting)
                return

    def _take_turn(self, job: LaneJob, sink: Sink, sequence: Sequence) -> None:
        """Judge a job that waited; the pin of its waiting is what keeps the sequence until now."""
        try:
            if sequence.is_released:
                raise HandleUnknown(sequence.handle_id)
            self._judge(job, sink, sequence, self._store.now())
        except FerruleError as error:
            self._finish(job, sink, error)
        except Exception:  # noqa: BLE001 - a bug must end its own job only
            self._finish(job, sink, fault(f"job failed kind={type(job).__name__}"))
        finally:
            sequence.num_pins -= 1
