"""The workers of the text queue: one thread for each lane, started from the event loop."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from ferrule_server.api.texts.queue import TextLane, TextQueue, Ticket
from ferrule_server.fairness.bucket import Meter
from ferrule_server.quotas import LimitsOf

MAX_JOBS: Final = 1024
"""Most jobs on texts that wait or run, of all principals."""

_Result = TypeVar("_Result")


@dataclass(eq=False, slots=True)
class _Job(Generic[_Result]):
    """A function to run on a thread, and the future of its caller; ``seconds`` is how long it took."""

    work: Callable[[], _Result]
    future: asyncio.Future[_Result]
    seconds: float = 0.0

    def run(self) -> _Result:
        """Run the function and measure it."""
        begun = time.monotonic()
        try:
            return self.work()
        finally:
            self.seconds = time.monotonic() - begun


class TextWorkers:
    """Runs jobs on texts: each principal within its quota, in the order of the queue. Used on the event loop.

    Encoding a long text takes a hundred times its size, and the thread keeps that memory for the next text. There is
    therefore one thread for long texts, one for short ones, and one for conversations.

    Args:
        limits_of: The quotas of a principal.
        max_bytes: Most bytes of the texts that wait or are processed.
        charge: Called with the principal and the bytes of each accepted job.
    """

    def __init__(self, limits_of: LimitsOf, max_bytes: int, charge: Callable[[str, int], None]) -> None:
        self._charge = charge
        self._meter = Meter("TEXT_RATE", lambda principal: limits_of(principal).text_bytes_per_s)
        self._queue: TextQueue[_Job[object]] = TextQueue(MAX_JOBS, max_bytes)
        self._threads = {
            lane: ThreadPoolExecutor(1, thread_name_prefix=f"ferrule-text-{lane.value}") for lane in TextLane
        }

    def spend(self, principal: str, num_bytes: int) -> None:
        """Count work that is so short that the caller does it itself.

        Raises:
            QuotaExceeded: ``TEXT_RATE``; nothing was counted.
        """
        self._meter.check(principal)
        self._meter.charge(principal, num_bytes)

    async def run(self, principal: str, lane: TextLane, num_bytes: int, work: Callable[[], _Result]) -> _Result:
        """Run ``work`` on the thread of a lane at the principal's turn, and return its result.

        If the caller goes away before, the work never runs, its places are freed, and it counts in no quota.

        Raises:
            QuotaExceeded: ``TEXT_RATE``; nothing was queued.
            QueueFull: There is no place for the work.
        """
        self._meter.check(principal)
        future: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
        ticket = self._queue.put(principal, lane, num_bytes, _Job(work, future))  # type: ignore[arg-type]
        self._meter.charge(principal, num_bytes)
        self._charge(principal, num_bytes)
        self._begin(lane)
        try:
            return await future
        except asyncio.CancelledError:
            if self._queue.drop(ticket):
                self._meter.refund(principal, num_bytes)
            raise

    def _begin(self, lane: TextLane) -> None:
        """Start the next job of a lane if its thread is idle."""
        ticket = self._queue.take(lane)
        if ticket is not None:
            running = asyncio.get_running_loop().run_in_executor(self._threads[lane], ticket.item.run)
            running.add_done_callback(functools.partial(self._finish, ticket))

    def _finish(self, ticket: Ticket[_Job[object]], running: asyncio.Future[object]) -> None:
        """Deliver the outcome of a job if its caller still waits, and begin the next job."""
        error, future = running.exception(), ticket.item.future
        self._queue.done(ticket, ticket.item.seconds)
        if error is not None and not isinstance(error, Exception):  # a panic of the tokenizer's library
            error = RuntimeError(f"{type(error).__name__}: {error}")
        if not future.done():
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(running.result())
        self._begin(ticket.lane)
