"""One rendering serves all who asked before it began, and takes little of the time."""

from __future__ import annotations

import asyncio
import time

import pytest

from ferrule_server.api.web.assembly import SharedRender
from tests.api.loops import on_a_loop


@on_a_loop
async def test_a_rendering_is_never_older_than_the_question() -> None:
    """What was counted before the question is in the answer, one after another and many at once."""
    counter = 0

    async def count_and_read(index: int) -> bool:
        nonlocal counter
        await asyncio.sleep(0.001 * (index % 20))
        counter += 1
        mine = counter
        return await render.get() >= mine

    def read() -> int:
        value = counter
        time.sleep(0.002)
        return value

    render = SharedRender(read)
    assert all(await asyncio.gather(*map(count_and_read, range(200))))


@on_a_loop
async def test_many_who_ask_at_once_cost_two_renderings() -> None:
    """The one that runs already, which is too old for them, and one for all of them."""
    begun = 0
    others: list[asyncio.Task[int]] = []

    def read() -> int:
        nonlocal begun
        begun += 1
        if begun == 1:
            others.extend(asyncio.create_task(render.get()) for _ in range(19))
        return begun

    render = SharedRender(read)
    assert await render.get() == 1
    assert set(await asyncio.gather(*others)) == {2}


@on_a_loop
async def test_rendering_takes_a_tenth_of_the_time_at_most() -> None:
    """Who asks without a pause waits between two renderings."""
    render = SharedRender(lambda: time.sleep(0.01))
    began = time.monotonic()
    for _ in range(4):
        await render.get()
    assert time.monotonic() - began > 3 * 0.09


@on_a_loop
async def test_one_who_goes_away_takes_the_rendering_from_nobody() -> None:
    """The others that wait for the same one still get it."""
    render = SharedRender(lambda: "yes")
    first, second = asyncio.create_task(render.get()), asyncio.create_task(render.get())
    await asyncio.sleep(0)
    first.cancel()
    assert await second == "yes"


@on_a_loop
async def test_a_rendering_that_fails_fails_alone() -> None:
    """All who shared it are told; the next one is tried again."""
    outcomes = iter([ValueError("no"), None])

    def read() -> str:
        outcome = next(outcomes)
        if outcome is not None:
            raise outcome
        return "yes"

    render = SharedRender(read)
    with pytest.raises(ValueError, match="no"):
        await render.get()
    assert await render.get() == "yes"
