"""Runs the jobs of a call, and ends calls with the status of an error."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar, cast

import grpc
from grpc_status import rpc_status

from ferrule_server.api.rpc.observe import current_call
from ferrule_server.api.rpc.state import Phase, ServerState
from ferrule_server.api.rpc.status import log_refused, to_status
from ferrule_server.api.security.principal import principal_of
from ferrule_server.engine.engine import Engine
from ferrule_server.engine.jobs import AppendJob, GenerateJob, Job, Outcome, QueuedJob
from ferrule_server.errors import Draining, FerruleError

_R = TypeVar("_R")

Context = grpc.aio.ServicerContext[Any, Any]
"""A call in progress; Any, because reply types differ and nothing here touches them."""


class CallEnded(Exception):
    """Ends a method before it has a reply; the handler ends the call with the status.

    Attributes:
        status: The status for gRPC.
    """

    def __init__(self, status: grpc.Status) -> None:
        super().__init__(status.details)
        self.status = status


@dataclass(frozen=True, slots=True)
class PlainStatus(grpc.Status):
    """A status without details, for protocols other than ours."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...] = ()


class GatheringSink:
    """Resolves a future when each of some jobs has its outcome; does nothing once the caller is gone."""

    __slots__ = ("_future", "_num_jobs", "_outcomes")

    def __init__(self, num_jobs: int, future: asyncio.Future[dict[Job[object], Outcome]]) -> None:
        self._num_jobs = num_jobs
        self._future = future
        self._outcomes: dict[Job[object], Outcome] = {}

    def deliver(self, job: Job[object], outcome: Outcome) -> None:
        """Keep the outcome of one job."""
        self._outcomes[job] = outcome

    def flush(self) -> None:
        """Resolve the future if no outcome is missing."""
        if len(self._outcomes) == self._num_jobs and not self._future.done():
            self._future.set_result(self._outcomes)


async def run_job(engine: Engine, job: Job[_R]) -> _R:
    """Run one job and return its result. If the caller goes away before the job's step, the job never runs.

    Raises:
        FerruleError: The engine's answer.
    """
    call = current_call()
    if call is not None:
        call.record_job(job)
    outcome = (await _outcomes(engine, [job]))[job]
    if call is not None:
        call.record_outcome(outcome)
    if isinstance(outcome, FerruleError):
        raise outcome
    return cast("_R", outcome)


async def run_jobs(engine: Engine, jobs: Sequence[AppendJob]) -> list[Outcome]:
    """Run jobs that arrived together and return their outcomes in the same order.

    If the caller goes away, the jobs that have no step yet never run.
    """
    if not jobs:
        return []
    outcomes = await _outcomes(engine, jobs)
    call = current_call()
    if call is not None:
        call.record_outcomes(outcomes.values())
    return [outcomes[job] for job in jobs]


async def _outcomes(engine: Engine, jobs: Sequence[Job[object]]) -> dict[Job[object], Outcome]:
    """Submit jobs and return the outcome of each; cancel them if the caller goes away."""
    future: asyncio.Future[dict[Job[object], Outcome]] = asyncio.get_running_loop().create_future()
    sink = GatheringSink(len(jobs), future)
    engine.submit([(job, sink) for job in jobs])
    try:
        return await future
    except asyncio.CancelledError:
        for job in jobs:
            cancel(job)
        raise


def cancel(job: Job[object]) -> None:
    """Cancel a job that no caller waits for. What is committed stays, and can be replayed."""
    if isinstance(job, QueuedJob):
        job.cancel()


def admit_new(state: ServerState, job: AppendJob | GenerateJob) -> None:
    """Check that the server still takes a job.

    A draining server creates no sequences. It still answers a repeated creation, which the engine recognises.

    Raises:
        Draining: The job would create a sequence.
    """
    if job.handle is None and state.phase is Phase.DRAINING:
        if not job.request_id:
            raise Draining
        job.new = replace(job.new, is_repeat_only=True)


def refuse(context: Context, rpc: str, error: FerruleError) -> NoReturn:
    """Log a refused call and end it with the status of ``error``."""
    log_refused(rpc, error, principal_of(context), call=current_call())
    abort(error)


def abort(error: FerruleError) -> NoReturn:
    """End a call with the status of ``error``."""
    end_with(rpc_status.to_status(to_status(error)), error.reason, error.metadata.get("handle_id", ""))


def end_with(status: grpc.Status, reason: str = "", handle_id: str = "") -> NoReturn:
    """End a call with a status, and record it for the observers; one that is not ours has no reason."""
    call = current_call()
    if call is not None:
        call.record_refusal(status.code, reason, handle_id)
    raise CallEnded(status)
