"""The entrance: where each job goes when the engine thread takes it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ferrule_server.engine.appends.lanes import Lanes
from ferrule_server.engine.durable.confirmations import Outlet
from ferrule_server.engine.faults.unexpected import fault
from ferrule_server.engine.generation.drivers import Drivers, Outcomes
from ferrule_server.engine.generation.forward import ForwardPass
from ferrule_server.engine.generation.generate import Generation
from ferrule_server.engine.host_calls import Host
from ferrule_server.engine.jobs import ForwardJob, GenerateJob, HostCall, Job, LaneJob, QueuedJob, Sink, WarmupJob
from ferrule_server.engine.metrics.counters import EngineCounters
from ferrule_server.engine.steps.stepper import GatherWindow
from ferrule_server.engine.steps.warmup import Warmup
from ferrule_server.errors import Cancelled, Draining, FerruleError, HandleExpired


@dataclass(eq=False, slots=True)
class Entrance:
    """Carries out host calls, queues jobs in the lanes of their sequences, and starts the others.

    Attributes:
        is_closed: The engine stops: every job is answered with DRAINING.
    """

    counters: EngineCounters
    outlet: Outlet
    outcomes: Outcomes
    gather: GatherWindow
    lanes: Lanes
    drivers: Drivers
    warmup: Warmup
    host: Host
    is_closed: bool = False

    def accept(self, job: Job[object], sink: Sink, at: float) -> bool:
        """Accept a job, or keep the reason why it is refused; never raises.

        Args:
            job: The request.
            sink: Receives its outcome.
            at: Time of arrival on the store's clock, at which leases are judged.

        Returns:
            Whether it was refused because a lease has ended.
        """
        try:
            if self.is_closed:
                raise Draining
            self._dispatch(job, sink, at)
        except FerruleError as error:
            self.outcomes.collect(job, sink, error)
            return isinstance(error, HandleExpired)
        except Exception:  # noqa: BLE001 - a bug must end only its own job
            self.outcomes.collect(job, sink, fault(f"job failed kind={type(job).__name__}"))
        return False

    def _dispatch(self, job: Job[object], sink: Sink, at: float) -> None:
        if isinstance(job, QueuedJob) and job.handle is not None:
            self.gather.came_back(job.handle.cache_id, time.monotonic())
        if self.outlet.is_lost:
            self.outlet.check(job)
        if isinstance(job, LaneJob):
            self.lanes.enter(job, sink, at)
        elif isinstance(job, HostCall):
            self.outcomes.collect(job, sink, job.carry_out(self.host, at))
        elif isinstance(job, WarmupJob):
            self.warmup.add(job, sink)
        else:
            assert isinstance(job, GenerateJob | ForwardJob)
            self._start(job, sink, at)

    def _start(self, job: GenerateJob | ForwardJob, sink: Sink, at: float) -> None:
        if job.is_cancelled:
            raise Cancelled
        if isinstance(job, GenerateJob):
            self.counters.generate(job.principal)
            self.drivers.start(Generation(job, sink, self.drivers), at)
        else:
            self.drivers.start(ForwardPass(job, sink, self.drivers), at)
