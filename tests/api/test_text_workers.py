"""TextWorkers on an event loop of its own: turns, cancelled callers, errors, and the quota of text per second."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

import pytest

from ferrule_server.api.texts.queue import TextLane
from ferrule_server.api.texts.workers import TextWorkers
from ferrule_server.errors import InvalidRequest, QueueFull, QuotaExceeded
from ferrule_server.quotas import QuotaLimits, unlimited
from tests.api.loops import on_a_loop

LONG = TextLane.LONG


def uncharged(_principal: str, _num_bytes: int) -> None:
    """Charge nothing."""


class Held:
    """Work that goes on until it is let go, and notes the order in which work was begun."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.gate = threading.Event()

    def work(self, name: str) -> Callable[[], str]:
        """Return work that gives its name."""

        def run() -> str:
            self.order.append(name)
            assert self.gate.wait(10)
            return name

        return run


async def begun(held: Held) -> None:
    """Wait until some work was begun."""
    while not held.order:
        await asyncio.sleep(0.001)


@on_a_loop
async def test_work_of_a_caller_that_left_is_never_run_and_its_places_are_free() -> None:
    """Work that runs goes on to its end, and then frees its place too."""
    limits = QuotaLimits(text_bytes_per_s=10)
    workers, held = TextWorkers(lambda _: limits, 12, uncharged), Held()
    running = asyncio.create_task(workers.run("a", LONG, 3, held.work("first")))
    await begun(held)
    waiting = asyncio.create_task(workers.run("a", LONG, 9, held.work("second")))
    await asyncio.sleep(0)
    with pytest.raises(QuotaExceeded):
        await workers.run("a", LONG, 1, held.work("refused"))
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    third = asyncio.create_task(workers.run("a", LONG, 6, held.work("third")))
    await asyncio.sleep(0)
    assert workers._queue.num_jobs == 2
    running.cancel()
    held.gate.set()
    assert await third == "third"
    assert held.order == ["first", "third"]
    assert workers._queue.num_jobs == 0


@on_a_loop
async def test_an_error_reaches_its_caller_and_the_next_job_runs() -> None:
    """Whatever it is."""
    workers = TextWorkers(unlimited, 1 << 20, uncharged)
    for error in (InvalidRequest("text", "is wrong"), ZeroDivisionError("a bug")):

        def fail(error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error)):
            await workers.run("a", LONG, 1, fail)
    assert await workers.run("a", LONG, 1, lambda: 7) == 7
    assert workers._queue.num_jobs == 0


@on_a_loop
async def test_what_is_refused_is_neither_queued_nor_charged() -> None:
    """By the queue or by the quota, for short work and for queued work alike."""
    limits = {"a": QuotaLimits(text_bytes_per_s=100), "b": QuotaLimits()}
    workers = TextWorkers(lambda name: limits[name], 150, uncharged)
    with pytest.raises(QueueFull):
        await workers.run("a", LONG, 151, lambda: 0)
    workers.spend("a", 90)
    assert await workers.run("a", LONG, 120, lambda: 7) == 7
    for refused in (lambda: workers.spend("a", 1), lambda: asyncio.ensure_future(workers.run("a", LONG, 1, int))):
        with pytest.raises(QuotaExceeded) as caught:
            await (refused() or asyncio.sleep(0))
        assert caught.value.reason == "QUOTA_TEXT_RATE"
        assert caught.value.retry_after_s is not None
        assert 0.9 <= caught.value.retry_after_s <= 1.2
    assert await workers.run("b", LONG, 150, lambda: 8) == 8


class _Panic(BaseException):
    """What a panic of a library in Rust looks like."""


@on_a_loop
async def test_a_panic_ends_its_own_job_only() -> None:
    """The lane goes on: the next job on it is run."""
    workers = TextWorkers(unlimited, 1 << 20, uncharged)

    def panic() -> None:
        raise _Panic("at the disco")

    with pytest.raises(RuntimeError, match="_Panic: at the disco"):
        await workers.run("alice", TextLane.SHORT, 10, panic)
    assert await workers.run("alice", TextLane.SHORT, 10, lambda: "served") == "served"
    assert workers._queue.num_jobs == 0
