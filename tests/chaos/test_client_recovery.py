"""The Python client when its server is killed, and when every connection to it breaks sooner or later."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ferrule import AsyncClient, Cache, Client, greedy, sample
from ferrule.types import Append, Token
from tests.api.harness import RunningServer
from tests.chaos.cutting_proxy import CuttingProxy
from tests.chaos.figures import report, seed_of_run
from tests.chaos.server_process import ServerProcess
from tests.chaos.test_pending_cuts import inside, settled

PROMPT = list(range(1, 40))
NUM_TOKENS = 200


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server of the paged reference in a process of its own."""
    settings = {"executor": "paged-reference", "kv-memory": "4MiB", "instance": "chaos", "drain-grace": "300ms"}
    arguments = [f"--{name}={value}" for name, value in settings.items()]
    with ServerProcess(tmp_path / "server.log", *arguments) as server:
        yield server


def drawn(cache: Cache, num_tokens: int, *, temperature: float, seed: int | None = None) -> Iterator[int]:
    """Draw tokens one by one, each when it is asked for, so that the server is never ahead of what was read."""
    for _ in range(num_tokens):
        yield from cache.generate(1, policy=sample(temperature=temperature, seed=seed))


def start_later(server: ServerProcess, delay_s: float, ready_at: list[float]) -> threading.Timer:
    """Start the server again after a while, on its port, and put down when it was ready."""

    def start() -> None:
        server.start()
        ready_at.append(time.monotonic())

    timer = threading.Timer(delay_s, start)
    timer.start()
    return timer


@pytest.mark.slow
def test_client_is_back_soon_after_a_kill(server: ServerProcess) -> None:
    """Killed at any moment, also in the middle of a step: the wait is the server's start and little more."""
    rng = random.Random(seed_of_run())
    waits_s = []
    with Client(server.target) as client:
        with client.prefill(PROMPT) as cache:
            expected = list(cache.generate(400, policy=sample(temperature=0.9, seed=3)))
        with client.prefill(PROMPT, recover=True) as cache:
            said: list[int] = []
            loop = drawn(cache, 400, temperature=0.9, seed=3)
            for number in range(5):
                said += [next(loop) for _ in range(50)]
                threading.Timer(rng.uniform(0.0, 0.02), server.kill).start()
                ready_at: list[float] = []
                restart = start_later(server, 0.5, ready_at)
                while cache.num_recoveries == number:
                    said.append(next(loop))
                waits_s.append(time.monotonic() - (ready_at or [time.monotonic()])[0])
                restart.join()
            said += loop
        assert said == expected
    report("client-after-kill", kills=len(waits_s), worst_wait_after_ready_s=round(max(waits_s), 3))
    assert max(waits_s) < 5.0


async def waits_for_token(
    kind: type[Client | AsyncClient], target: str, cut: Callable[[], None], num_cuts: int
) -> list[list[float]]:
    """Return the seconds from a cut to the next token, by a call of its own and on a stream."""
    policy = greedy()
    async with (
        inside(kind(target)) as client,
        inside(client.prefill(PROMPT, policy=policy)) as cache,
        inside(client.stream()) as stream,
    ):

        async def wait(append: Callable[[Token], Any]) -> float:  # what either client gives
            cut()
            began = time.monotonic()
            await settled(append(cache.last.token))
            return time.monotonic() - began

        ways: list[Callable[[Token], Any]] = [
            lambda token: cache.append(token, policy=policy),
            lambda token: stream.run([Append(cache, token, policy)]),
        ]
        return [[await wait(way) for _ in range(num_cuts)] for way in ways]


@pytest.mark.slow
def test_client_has_the_next_token_soon_after_a_cut() -> None:
    """One connection reset while nothing is under way: the next append notices, and costs milliseconds more."""
    with RunningServer() as server, CuttingProxy(server.address.port) as proxy:
        began = time.process_time()
        waits_s: dict[str, list[float]] = {}
        for name, client in (("", Client), ("aio ", AsyncClient)):
            unary_s, stream_s = asyncio.run(waits_for_token(client, proxy.target, proxy.cut_all, 100))
            waits_s |= {f"{name}unary": unary_s, f"{name}stream": stream_s}
        cpu_s = time.process_time() - began
        assert proxy.num_connections >= 400
    for way, waits in waits_s.items():
        waits.sort()
        median_s, p99_s = waits[50], waits[98]
        report("client-after-cut", way=way, median_ms=round(1e3 * median_s, 1), p99_ms=round(1e3 * p99_s, 1))
        assert median_s < 0.2
    report("client-after-cut", cuts=400, cpu_s_with_server_and_proxy=round(cpu_s, 2))
