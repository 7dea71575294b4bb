"""Turns on the event loop: nobody waits for the whole of a large request."""

from __future__ import annotations

import asyncio

from ferrule_server.api.limits import LOOP_SLICE
from ferrule_server.api.turns import Turns


def test_others_have_their_turn_while_a_large_batch_is_worked_on() -> None:
    """After so much work, or so many pieces of it."""

    async def count(works: list[int]) -> int:
        turns, num_turns, is_over = Turns(1000), 0, False

        async def other() -> None:
            nonlocal num_turns
            while not is_over:
                num_turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        for work in works:
            await turns.spend(work)
        is_over = True
        await task
        return num_turns

    assert asyncio.run(count([1] * (LOOP_SLICE - 1))) <= 1
    assert asyncio.run(count([1] * 3 * LOOP_SLICE)) >= 3
    assert asyncio.run(count([600] * 8)) >= 4
