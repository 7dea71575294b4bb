"""The asyncio client under cuts and cancellations at once: every append is there once, and no token differs.

Many tasks on one client decode through the cutting proxy; a third of their calls is cancelled after a few milliseconds
at most and then repeated. What they are told is compared with a run that nothing disturbed, and what the server holds
with what they were told.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from ferrule import AsyncClient, Policy, sample
from ferrule.types import Append, AsyncCache, AsyncStream, Output, Token
from tests.chaos.cutting_proxy import CuttingProxy
from tests.chaos.figures import report, seed_of_run
from tests.chaos.server_process import ServerProcess

NUM_TASKS = 16
NUM_TOKENS = 400
MIN_CUTS = 150
MIN_CANCELLED = 1000
MEAN_BYTES_PER_CUT = 10_000.0


async def append(cache: AsyncCache, stream: AsyncStream | None, token: Token, policy: Policy) -> Output:
    """Append the pending token by a call of its own, or on the stream."""
    if stream is None:
        return await cache.append(token, policy=policy)
    return (await stream.run([Append(cache, token, policy)]))[0]


async def say(client: AsyncClient, number: int, seen: Counter[str], *, is_disturbed: bool) -> list[int]:
    """Return the tokens of one session, after a look at what the server holds."""
    chance = random.Random(seed_of_run() + number)
    prompt, policy = [5, 6, 7, number], sample(seed=number, temperature=0.9)
    async with client.prefill(prompt, policy=policy) as cache, client.stream() as stream:
        told = [cache.last.token]
        while len(told) < NUM_TOKENS:
            limit_s = chance.random() * 0.004 if is_disturbed and chance.random() < 1 / 3 else None
            try:
                async with asyncio.timeout(limit_s):
                    output = await append(cache, stream if number % 2 else None, told[-1], policy)
            except TimeoutError:
                seen["cancelled"] += 1
                continue
            seen["appends"] += 1
            seen["replayed"] += output.replayed
            told.append(output.token)
        held = (await cache.info(token_ids=True)).token_ids
        assert list(held) == cache.token_ids == [*prompt, *told[:-1]]
        return list(map(int, told))


async def run_all(target: str, seen: Counter[str], *, is_disturbed: bool) -> list[list[int]]:
    """Return what every task was told; nothing of the client is left afterwards."""
    async with AsyncClient(target, timeout=60, max_retries=50) as client:
        sessions = (say(client, number, seen, is_disturbed=is_disturbed) for number in range(NUM_TASKS))
        told = await asyncio.gather(*sessions)
    assert len(asyncio.all_tasks()) == 1
    return told


@pytest.mark.slow
def test_cut_and_cancelled_appends_are_there_once(tmp_path: Path) -> None:
    """Both at the same time, on one connection of many tasks, by calls and on streams."""
    seen: Counter[str] = Counter()
    with ServerProcess(tmp_path / "log", "--executor", "paged-reference", "--kv-memory", "16MiB") as server:
        expected = asyncio.run(run_all(server.target, Counter(), is_disturbed=False))
        with CuttingProxy(server.port, seed=seed_of_run(), mean_bytes=MEAN_BYTES_PER_CUT) as proxy:
            told = asyncio.run(run_all(proxy.target, seen, is_disturbed=True))
            num_cuts = proxy.num_cuts
    report("aio under cuts and cancellations", cuts=num_cuts, **seen, equal=told == expected)
    assert told == expected
    assert num_cuts >= MIN_CUTS
    assert seen["cancelled"] >= MIN_CANCELLED
    assert seen["replayed"] > 0
