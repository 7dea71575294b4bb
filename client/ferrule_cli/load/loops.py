"""When requests begin: a closed loop of users, or an open loop of arrivals. Both end by themselves.

A **closed** loop has a fixed number of users, and each sends its next request when it has the answer to the last one.
It shows what a server does with so many sequences at once. It does not show how long people wait: a server that stands
still for a second is sent nothing in that second, so one long wait stands for all that would have been (Tene, "How NOT
to Measure Latency": coordinated omission). An **open** loop begins requests at times drawn beforehand, whatever became
of the earlier ones. Latencies count from those times, also if the generator itself is late, so no wait is left out.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from ferrule_cli.load.records import OK, Record

__all__ = ["Bounds", "Refused", "Run", "Work", "arrival_times", "prompt_lengths"]

Work = Callable[[int, Record], Awaitable[None]]
"""Makes one request, given its number, and notes its tokens; raises Refused if it failed."""

_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


class Refused(Exception):
    """A request failed.

    Args:
        reason: The reason as the server names it.
        retry_after_s: Seconds after which the server suggests to try again; None: it does not say.
    """

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.reason, self.retry_after_s = reason, retry_after_s


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where a run ends, whatever happens.

    Attributes:
        warm_up_s: Seconds of the same load before the measurement.
        duration_s: Seconds of the measurement; no request begins later.
        max_requests: Most requests of the measurement; None: any number.
        patience_s: Seconds that requests under way may take after that; then they are cancelled.
    """

    warm_up_s: float
    duration_s: float
    max_requests: int | None = None
    patience_s: float = 10.0


@dataclass(slots=True)
class Run:
    """One run of a loop, and what became of its requests; if the loop is cancelled, what became of them so far.

    Attributes:
        work: Makes one request.
        lengths: The lengths of the prompts.
        bounds: Where it ends.
        records: All requests, in the order in which they were scheduled.
        begin_s: When the measurement began.
        end_s: When it ended: after ``duration_s``, or earlier if the last request had ended before.
        num_under_way: Requests under way.
        num_measured: Requests of the measurement that were scheduled so far.
    """

    work: Work
    lengths: Iterator[int]
    bounds: Bounds
    records: list[Record] = field(default_factory=list)
    begin_s: float = math.inf
    end_s: float = math.inf
    num_under_way: int = 0
    num_measured: int = 0

    async def closed(self, num_users: int) -> None:
        """Have users send requests one after the other. A user whose request failed pauses, as the server asks."""
        self._begin()
        await self._finish([asyncio.create_task(self._use()) for _ in range(num_users)])

    async def open(self, rate: float, seed: str, *, max_in_flight: int) -> None:
        """Begin ``rate`` requests per second at random times.

        At most ``max_in_flight`` are under way. A request that finds no place waits for one, and the wait counts.
        """
        self._begin()
        span_s = self.bounds.warm_up_s + self.bounds.duration_s
        times = arrival_times(rate, span_s, seed)
        await self._finish([asyncio.create_task(self._arrive(times, max_in_flight))])

    def _begin(self) -> None:
        self.begin_s = asyncio.get_running_loop().time() + self.bounds.warm_up_s
        self.end_s = self.begin_s + self.bounds.duration_s

    def _scheduled(self, at_s: float) -> Record | None:
        """Return the record of a request that begins at a time; None: the run takes no more."""
        is_measured = at_s >= self.begin_s
        if at_s >= self.end_s or (is_measured and self.num_measured == self.bounds.max_requests):
            return None
        self.num_measured += is_measured
        self.records.append(Record(next(self.lengths), at_s))
        return self.records[-1]

    async def _use(self) -> None:
        loop = asyncio.get_running_loop()
        while (record := self._scheduled(loop.time())) is not None:
            pause_s = await self._attempt(len(self.records) - 1, record)
            await asyncio.sleep(min(pause_s, self.end_s - loop.time()))

    async def _arrive(self, times: Iterator[float], num_workers: int) -> None:
        """Queue requests when they are due, for workers that make them. What waits is a record, not a task."""
        loop, start_s = asyncio.get_running_loop(), self.begin_s - self.bounds.warm_up_s
        due = asyncio.Queue[tuple[int, Record] | None]()  # None: a worker may go

        async def work_off() -> None:
            while (request := await due.get()) is not None:
                await self._attempt(*request)

        async with asyncio.TaskGroup() as group:
            for _ in range(num_workers):
                group.create_task(work_off())
            for at in times:
                if (record := self._scheduled(start_s + at)) is None:
                    break
                await asyncio.sleep(record.intended_s - loop.time())
                due.put_nowait((len(self.records) - 1, record))
            else:
                await asyncio.sleep(self.end_s - loop.time())  # the time without arrivals is measured too
            for _ in range(num_workers):
                due.put_nowait(None)

    async def _attempt(self, number: int, record: Record) -> float:
        """Make a request; return how many seconds the user should pause."""
        record.sent_s = asyncio.get_running_loop().time()
        self.num_under_way += 1
        try:
            await self.work(number, record)
        except Refused as refused:
            record.outcome = refused.reason
            return min(refused.retry_after_s or _PAUSE_S, _LONGEST_PAUSE_S)
        finally:
            self.num_under_way -= 1
        record.outcome = OK
        return 0.0

    async def _finish(self, tasks: list[asyncio.Task[None]]) -> None:
        """Wait for the end and the patience after it; cancel what is still under way, raise what nobody expected.

        If it is cancelled itself, it waits for its requests too: they have sequences to release.
        """
        loop = asyncio.get_running_loop()
        try:
            left_s = self.end_s + self.bounds.patience_s - loop.time()
            done, _ = await asyncio.wait(tasks, timeout=left_s, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            self.end_s = min(self.end_s, loop.time())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()


def prompt_lengths(shortest: int, longest: int, seed: str) -> Iterator[int]:
    """Yield lengths spread evenly over the logarithm: as many from 16 to 32 as from 512 to 1024."""
    draw = random.Random(f"{seed}-lengths")  # noqa: S311 - no secret
    while True:
        yield min(longest, int(shortest * ((longest + 1) / shortest) ** draw.random()))


def arrival_times(rate: float, duration_s: float, seed: str) -> Iterator[float]:
    """Yield when requests begin, in seconds from the start: a Poisson process of ``rate`` per second."""
    draw, at = random.Random(f"{seed}-arrivals"), 0.0  # noqa: S311 - no secret
    while (at := at + draw.expovariate(rate)) < duration_s:
        yield at
