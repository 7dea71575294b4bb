"""The Python client when its server is killed, and when every connection to it breaks sooner or later."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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


def loops(client: Client, seeds: list[int | None], *, recover: bool) -> Iterator[tuple[Cache, Iterator[int]]]:
    """Yield a cache and a loop on it for each seed; None is greedy."""
    for seed in seeds:
        cache = client.prefill(PROMPT, recover=recover)
        yield cache, drawn(cache, NUM_TOKENS, temperature=0.0 if seed is None else 0.9, seed=seed)


def drawn(cache: Cache, num_tokens: int, *, temperature: float, seed: int | None = None) -> Iterator[int]:
    """Draw tokens one by one, each when it is asked for, so that the server is never ahead of what was read."""
    for _ in range(num_tokens):
        yield from cache.generate(1, policy=sample(temperature=temperature, seed=seed))


def stop_and_start(server: ServerProcess) -> None:
    """End the server in order and start it again, on its port."""
    server.stop()
    server.start()


def start_later(server: ServerProcess, delay_s: float, ready_at: list[float]) -> threading.Timer:
    """Start the server again after a while, on its port, and put down when it was ready."""

    def start() -> None:
        server.start()
        ready_at.append(time.monotonic())

    timer = threading.Timer(delay_s, start)
    timer.start()
    return timer


@pytest.mark.slow
def test_loops_say_the_same_over_a_kill_and_a_restart(server: ServerProcess) -> None:
    """Greedy and seeded: SIGKILL between two tokens, the same port again after a while, and no token differs."""
    seeds = [None, 7, 2**63]
    with Client(server.target) as client:
        expected = []
        for cache, loop in loops(client, seeds, recover=False):
            expected.append(list(loop))
            cache.release()
        pairs = list(loops(client, seeds, recover=True))
        said = [[next(loop) for _ in range(NUM_TOKENS // 3 + place)] for place, (_, loop) in enumerate(pairs)]
        server.kill()
        start_later(server, 1.0, [])
        for place, (_, loop) in enumerate(pairs):
            said[place] += loop
        assert said == expected
        assert [cache.num_recoveries for cache, _ in pairs] == [1, 1, 1]
        client.release([cache for cache, _ in pairs])
        assert server.used_blocks == 0


@pytest.mark.slow
def test_loops_go_on_over_a_restart_in_order(server: ServerProcess) -> None:
    """SIGTERM under a loop and a unary one: both are served in the grace, told of its end, and taken up by the next."""
    with Client(server.target) as client:
        with client.prefill(PROMPT) as cache:
            expected = list(cache.generate(NUM_TOKENS, policy=greedy()))
        with (
            client.prefill(PROMPT, recover=True) as looped,
            client.prefill(PROMPT, policy=greedy(), recover=True) as unary,
        ):
            said: tuple[list[int], list[int]] = ([], [])
            loop = drawn(looped, NUM_TOKENS, temperature=0.0)
            for place in range(NUM_TOKENS):
                if place == NUM_TOKENS // 2:
                    restart = threading.Thread(target=stop_and_start, args=(server,))
                    restart.start()
                said[0].append(next(loop))
                said[1].append(unary.last.token)
                unary.append(unary.last.token, policy=greedy())
                time.sleep(0.01)  # so that the grace ends between two tokens of these
            restart.join()
            assert said == (expected, expected)
            assert (looped.num_recoveries, unary.num_recoveries) == (1, 1)


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


def work(client: Client, seed: int) -> list[list[int]]:
    """Prefill, loop, fork, branch, roll back and loop again; return what every sequence held at its end."""
    rng = random.Random(seed)
    held = []
    with ExitStack() as stack:
        root = stack.enter_context(client.prefill(PROMPT))
        list(root.generate(10, policy=sample(temperature=0.9, seed=seed)))
        branches = [stack.enter_context(one) for one in root.fork(3)]
        list(branches[0].generate(10, policy=greedy()))
        loop = branches[0].generate(8, n=3, policy=sample(temperature=0.9, seed=seed))
        list(loop)
        assert [branch.error for branch in loop.branches] == [None] * 3
        branches += [stack.enter_context(one) for one in loop.caches[1:]]
        for place, _ in enumerate(root.generate(20, policy=sample(temperature=0.9, seed=seed + 1))):
            if place == 6:
                break  # what the server drew beyond is dropped by the next append
        branches[1].append([rng.randrange(256) for _ in range(5)], pending="send")
        branches[1].truncate(branches[1].length - 3)
        with client.stream() as stream:
            for _ in range(3):
                taken = {branches[2].pending, root.pending}  # an int like these would need a word about it
                tokens = rng.sample([token for token in range(256) if token not in taken], 3)
                born = stream.branch([branches[2], branches[2], root], tokens)
                stack.enter_context(born[1])
                branches.append(born[1])
        for cache in (root, *branches):
            info = cache.info(token_ids=True)
            assert list(info.token_ids) == cache.token_ids
            held.append([*info.token_ids, -1 if cache.pending is None else int(cache.pending)])
    return held


def run_with_cuts(num_rounds: int, mean_bytes: float) -> tuple[int, int]:
    """Do the work again and again over connections that break; returns the number of cuts and sequences left over."""
    with RunningServer() as server, Client(server.address.target) as client:
        expected = [work(client, seed) for seed in range(num_rounds)]
        proxy = CuttingProxy(server.address.port, seed=seed_of_run(), mean_bytes=mean_bytes)
        with proxy, Client(proxy.target, max_retries=50) as disturbed:
            assert [work(disturbed, seed) for seed in range(num_rounds)] == expected
        return proxy.num_cuts, len(list(client.list_caches()))


def test_client_makes_and_appends_once_over_cut_connections() -> None:
    """Prefills, forks, branches, appends and rollbacks: the same sequences as without cuts, and none besides."""
    num_cuts, num_left = run_with_cuts(1, 2500.0)
    assert num_cuts > 2
    assert num_left == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_client_makes_and_appends_once_over_a_thousand_cuts() -> None:
    """The same, for long."""
    num_cuts, num_left = run_with_cuts(75, 1500.0)
    report("client-cuts", cuts=num_cuts, left=num_left)
    assert num_cuts > 1000
    assert num_left == 0
