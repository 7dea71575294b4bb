"""When requests begin: a closed loop of users, or an open one of arrivals. Both end by themselves.

A **closed** loop has a fixed number of users, each asking again when it has its answer. It shows what a server does
with so many sequences at once. It does not show how long people wait: a server that stands still for a second is sent
nothing in that second, so one long wait stands for all that would have been (Tene, "How NOT to Measure Latency":
coordinated omission). An **open** loop begins requests at times drawn beforehand, whatever became of the earlier ones,
and counts latency from those times, also when the generator itself is late: nothing is left out.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from benchmarks.load.records import OK, Record

Work = Callable[[int, Record], Awaitable[None]]
"""Makes one request, with its number, and notes the arrivals; raises Refused when nothing came of it."""

_PAUSE_S = 0.05
"""How long a user that was refused waits, as a client that backs off does."""


class Refused(Exception):
    """A request came to nothing.

    Args:
        reason: As the server names it.
        is_rejected: The server had no room for it.
    """

    def __init__(self, reason: str, *, is_rejected: bool) -> None:
        super().__init__(reason)
        self.reason, self.is_rejected = reason, is_rejected


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where a run ends, whatever happens.

    Attributes:
        duration_s: No request begins later.
        max_requests: Nor after so many.
        patience_s: How long what is under way then may take; what is left is cancelled.
    """

    duration_s: float
    max_requests: int
    patience_s: float = 10.0


def prompt_lengths(shortest: int, longest: int, seed: str) -> Iterator[int]:
    """Yield lengths spread evenly over the logarithm: as many from 16 to 32 as from 512 to 1024."""
    draw = random.Random(seed)
    while True:
        yield min(longest, int(shortest * ((longest + 1) / shortest) ** draw.random()))


def arrival_times(rate: float, duration_s: float, seed: str) -> list[float]:
    """Return when requests are to begin, in seconds from the start: independent of each other, ``rate`` a second."""
    draw, times, at = random.Random(seed), [], 0.0
    while (at := at + draw.expovariate(rate)) < duration_s:
        times.append(at)
    return times


async def run_closed(work: Work, num_users: int, lengths: Iterator[int], bounds: Bounds) -> list[Record]:
    """Let users ask again and again; return what came of every request."""
    loop, records = asyncio.get_running_loop(), list[Record]()
    end_s = loop.time() + bounds.duration_s

    async def use() -> None:
        while loop.time() < end_s and len(records) < bounds.max_requests:
            number, record = len(records), Record(next(lengths), loop.time())
            records.append(record)
            await _attempt(work, number, record)
            if record.outcome != OK:
                await asyncio.sleep(_PAUSE_S)

    await _finish([asyncio.create_task(use()) for _ in range(num_users)], end_s, bounds)
    return records


async def run_open(
    work: Work, times: list[float], lengths: Iterator[int], bounds: Bounds, *, max_in_flight: int
) -> list[Record]:
    """Begin a request at each of the times; one that finds no place waits for it, and the wait counts."""
    loop, places = asyncio.get_running_loop(), asyncio.Semaphore(max_in_flight)
    start_s = loop.time()
    records = [Record(next(lengths), start_s + at) for at in times[: bounds.max_requests]]

    async def begin(number: int, record: Record) -> None:
        await asyncio.sleep(record.intended_s - loop.time())
        async with places:
            await _attempt(work, number, record)

    tasks = [asyncio.create_task(begin(number, record)) for number, record in enumerate(records)]
    await _finish(tasks, start_s + bounds.duration_s, bounds)
    return records


async def _attempt(work: Work, number: int, record: Record) -> None:
    record.sent_s = asyncio.get_running_loop().time()
    try:
        await work(number, record)
        record.outcome = OK
    except Refused as refused:
        record.outcome, record.is_rejected = refused.reason, refused.is_rejected


async def _finish(tasks: list[asyncio.Task[None]], end_s: float, bounds: Bounds) -> None:
    """Wait for the end and a while longer; cancel what is still under way, raise what nobody expected.

    Cancelled itself, it leaves nothing under way either: requests do not outlive their connections.
    """
    if not tasks:
        return
    left_s = end_s + bounds.patience_s - asyncio.get_running_loop().time()
    try:
        done, _ = await asyncio.wait(tasks, timeout=left_s)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
