"""How a call becomes jobs, and how every error leaves: typed, logged once, without inner text."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn, Protocol, TypeVar, cast

import grpc
from grpc_status import rpc_status

from ferrule_server.api.rpc.observe import current_call
from ferrule_server.api.rpc.state import EngineApi, Phase, ServerState
from ferrule_server.api.rpc.status import code_of, fault_of, log_refused, reason_of, to_status
from ferrule_server.api.security.principal import principal_of
from ferrule_server.engine.jobs import AppendJob, GenerateJob, Job, Outcome, QueuedJob
from ferrule_server.errors import Draining, FerruleError

_LOG = logging.getLogger(__name__)

HANG_UP_S: Final = 1.0
"""When the client has hung up, gRPC cancels the call within this time of the write that failed."""


class _Servicer(Protocol):
    """A servicer as the decorators see it."""

    state: ServerState


_S = TypeVar("_S", bound=_Servicer)
_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_R = TypeVar("_R")

Context = grpc.aio.ServicerContext[Any, Any]
"""A call in progress; Any, because reply types differ and nothing here touches them."""


class CallEnded(Exception):
    """The method is over before it has a reply; the handler ends the call with the status.

    Attributes:
        status: For gRPC.
    """

    def __init__(self, status: grpc.Status) -> None:
        super().__init__(status.details)
        self.status = status


@dataclass(frozen=True, slots=True)
class PlainStatus(grpc.Status):
    """A status of a protocol that is not ours, without details."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...] = ()


class FutureSink:
    """Resolves a future with the outcome of one job; does nothing once the caller is gone."""

    __slots__ = ("_future",)

    def __init__(self, future: asyncio.Future[Outcome]) -> None:
        self._future = future

    def deliver(self, job: Job[object], outcome: Outcome) -> None:  # noqa: ARG002  (one future, one job)
        """Resolve the future."""
        if not self._future.done():
            self._future.set_result(outcome)

    def flush(self) -> None:
        """Nothing is left to do."""


class GatheringSink:
    """Resolves a future once every one of some jobs has its outcome; does nothing once the caller is gone."""

    __slots__ = ("_future", "_num_jobs", "_outcomes")

    def __init__(self, num_jobs: int, future: asyncio.Future[dict[Job[object], Outcome]]) -> None:
        self._num_jobs = num_jobs
        self._future = future
        self._outcomes: dict[Job[object], Outcome] = {}

    def deliver(self, job: Job[object], outcome: Outcome) -> None:
        """Keep the outcome of one job."""
        self._outcomes[job] = outcome

    def flush(self) -> None:
        """Resolve the future if none is missing."""
        if len(self._outcomes) == self._num_jobs and not self._future.done():
            self._future.set_result(self._outcomes)


async def run_job(engine: EngineApi, job: Job[_R]) -> _R:
    """Run one job and return its result. When the caller goes away before its step, nothing happens.

    Raises:
        FerruleError: Whatever the engine answered.
    """
    future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    call = current_call()
    if call is not None:
        call.record_job(job)
    engine.submit([(job, FutureSink(future))])
    try:
        outcome = await future
    except asyncio.CancelledError:
        cancel(job)
        raise
    if call is not None:
        call.record_outcome(outcome)
    if isinstance(outcome, FerruleError):
        raise outcome
    return cast("_R", outcome)


async def run_jobs(engine: EngineApi, jobs: Sequence[AppendJob]) -> list[Outcome]:
    """Run jobs that arrived together and return what became of each, in their order.

    When the caller goes away, those that have no step yet never run.
    """
    if not jobs:
        return []
    future: asyncio.Future[dict[Job[object], Outcome]] = asyncio.get_running_loop().create_future()
    sink = GatheringSink(len(jobs), future)
    engine.submit([(job, sink) for job in jobs])
    try:
        outcomes = await future
    except asyncio.CancelledError:
        for job in jobs:
            cancel(job)
        raise
    call = current_call()
    if call is not None:
        call.record_outcomes(outcomes.values())
    return [outcomes[job] for job in jobs]


def cancel(job: Job[object]) -> None:
    """Tell the engine that nobody waits for a job; what has been committed stays, and can be replayed."""
    if isinstance(job, QueuedJob):
        job.cancel()


def admit_new(state: ServerState, job: AppendJob | GenerateJob) -> None:
    """Let a job go on that needs no new sequence, or that the server may still make one for.

    While the server drains, a creation that happened before is still answered; the engine knows which did.

    Raises:
        Draining: The server takes no new prompts any more.
    """
    if job.handle is None and state.phase is Phase.DRAINING:
        if not job.request_id:
            raise Draining
        job.is_repeat_only = True


def unary(
    handler: Callable[[_S, _Request, Context], Awaitable[_Response]],
) -> Callable[[_S, _Request, Context], Awaitable[_Response]]:
    """Wrap a unary method: errors become statuses and one log line each, and the call is counted while it runs."""
    refusing = _refusing(handler)

    @functools.wraps(handler)
    async def call(self: _S, request: _Request, context: Context) -> _Response:
        self.state.num_active += 1
        try:
            return await refusing(self, request, context)
        finally:
            self.state.num_active -= 1

    return call


def streamed(handler: Callable[[_S, _Request, Context], Awaitable[None]]) -> Any:
    """Wrap a method that writes its replies itself: errors it raises become statuses and one log line each.

    Any, because the stubs know such methods as ones that return an iterator.
    """
    return _refusing(handler)


def _refusing(
    handler: Callable[[_S, _Request, Context], Awaitable[_Response]],
) -> Callable[[_S, _Request, Context], Awaitable[_Response]]:
    """Wrap a method: what it raises ends the call with a status and one log line."""
    rpc = handler.__name__

    @functools.wraps(handler)
    async def call(self: _S, request: _Request, context: Context) -> _Response:
        try:
            return await handler(self, request, context)
        except FerruleError as error:
            refuse(context, rpc, error)
        except CallEnded:
            raise
        except Exception as failure:  # noqa: BLE001  (fault_of logs it)
            refuse(context, rpc, fault_of(failure, rpc))

    return call


def refuse(context: Context, rpc: str, error: FerruleError) -> NoReturn:
    """Log a refused call and end it with the status of ``error``."""
    log_refused(rpc, error, principal_of(context), call=current_call())
    abort(error)


def abort(error: FerruleError) -> NoReturn:
    """End a call with the status of ``error``, and tell whoever watches the call."""
    call = current_call()
    if call is not None:
        call.record_refusal(code_of(error), reason_of(error), error.metadata.get("handle_id", ""))
    raise CallEnded(rpc_status.to_status(to_status(error)))


def end_with(status: grpc.Status) -> NoReturn:
    """End a call with a status that has no reason of ours, and tell its observers."""
    call = current_call()
    if call is not None:
        call.record_refusal(status.code, "")
    raise CallEnded(status)
