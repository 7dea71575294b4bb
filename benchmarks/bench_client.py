"""What the Python client costs per token: sync and asyncio, single calls and streams, one branch and many.

Part 1, added latency. One cache, one greedy token per call, on the bundled model. Added = the caller's wall time
minus the reply's ``queue_ns`` and ``run_ns``: conversion, bookkeeping, gRPC at both ends, thread hops. The four ways
take turns in each round, so that a slow spell of the machine hits all. CPU is what the client's process used per call,
gRPC's threads included; it says more than the wall clock where other programs run.

Part 2, many branches. 32 branches of one prompt, greedy: one packed frame per step (sync), a task per branch with a
call per token, a task per branch with a stream of its own, and a thread per branch with a call per token. Tokens/s.

Usage: python benchmarks/bench_client.py [--target ADDRESS] [--rounds 5] [--calls 150]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
from child_server import server  # type: ignore[import-not-found]  # beside this script, not a package

from ferrule import AsyncClient, Cache, Client, greedy
from ferrule.types import Append, AsyncCache, Output

GREEDY = greedy()
PROMPT = "def read_file(path):"
NUM_BRANCHES = 32


def added_ms(begin_s: float, output: Output) -> float:
    """Return the milliseconds of a call that its steps did not take."""
    return 1e3 * (time.perf_counter() - begin_s) - 1e-6 * (output.timing.queue_ns + output.timing.run_ns)


def sync_calls(cache: Cache, num_calls: int) -> list[float]:
    """Return the added milliseconds of each single call."""
    samples = []
    for _ in range(num_calls):
        begin = time.perf_counter()
        samples.append(added_ms(begin, cache.step(GREEDY)))
    return samples


def sync_frames(client: Client, cache: Cache, num_calls: int) -> list[float]:
    """Return the added milliseconds of each frame of one item."""
    samples = []
    with client.stream() as stream:
        for _ in range(num_calls):
            begin = time.perf_counter()
            samples.append(added_ms(begin, stream.run([Append(cache, policy=GREEDY)])[0]))
    return samples


async def async_calls(cache: AsyncCache, num_calls: int) -> list[float]:
    """Return the added milliseconds of each single call."""
    samples = []
    for _ in range(num_calls):
        begin = time.perf_counter()
        samples.append(added_ms(begin, await cache.step(GREEDY)))
    return samples


async def async_frames(client: AsyncClient, cache: AsyncCache, num_calls: int) -> list[float]:
    """Return the added milliseconds of each frame of one item."""
    samples = []
    async with client.stream() as stream:
        for _ in range(num_calls):
            begin = time.perf_counter()
            samples.append(added_ms(begin, (await stream.run([Append(cache, policy=GREEDY)]))[0]))
    return samples


@dataclass(frozen=True)
class Round:
    """Added milliseconds of each call of a round, and the CPU time per call in microseconds."""

    added_ms: list[float]
    cpu_us: float

    @classmethod
    def since(cls, begin_s: float, samples: list[float]) -> Round:
        """Return a round that began at this time of the process's CPU clock."""
        return cls(samples, 1e6 * (time.process_time() - begin_s) / len(samples))


def sync_latencies(target: str, num_calls: int) -> dict[str, Round]:
    """Return the samples of one round of the sync client."""
    with Client(target) as client, client.prefill(PROMPT) as cache:
        sync_calls(cache, 20)
        begin = time.process_time()
        calls = Round.since(begin, sync_calls(cache, num_calls))
        cache.truncate(5)
        begin = time.process_time()
        return {"sync call": calls, "sync stream": Round.since(begin, sync_frames(client, cache, num_calls))}


async def async_latencies(target: str, num_calls: int) -> dict[str, Round]:
    """Return the samples of one round of the asyncio client."""
    async with AsyncClient(target) as client, client.prefill(PROMPT) as cache:
        await async_calls(cache, 20)
        begin = time.process_time()
        calls = Round.since(begin, await async_calls(cache, num_calls))
        await cache.truncate(5)
        begin = time.process_time()
        return {"aio call": calls, "aio stream": Round.since(begin, await async_frames(client, cache, num_calls))}


def sync_rates(target: str, num_tokens: int) -> dict[str, float]:
    """Return tokens/s of many branches with the sync client: packed, and a thread each."""
    rates = {}
    with Client(target) as client, client.prefill(PROMPT) as cache, cache.fork(NUM_BRANCHES) as branches:
        begin = time.perf_counter()
        with client.stream() as stream:
            for _ in range(num_tokens):
                stream.run([Append(branch, policy=GREEDY) for branch in branches])
        rates["sync, one packed stream"] = NUM_BRANCHES * num_tokens / (time.perf_counter() - begin)
        with ThreadPoolExecutor(NUM_BRANCHES) as pool:
            begin = time.perf_counter()
            list(pool.map(lambda branch: sync_calls(branch, num_tokens), branches))
            rates["sync, a thread each, calls"] = NUM_BRANCHES * num_tokens / (time.perf_counter() - begin)
    return rates


async def async_rates(target: str, num_tokens: int) -> dict[str, float]:
    """Return tokens/s of many branches with the asyncio client: a task each, with calls and with streams."""
    rates = {}
    async with AsyncClient(target) as client, client.prefill(PROMPT) as cache, cache.fork(NUM_BRANCHES) as branches:
        begin = time.perf_counter()
        await asyncio.gather(*(async_calls(branch, num_tokens) for branch in branches))
        rates["aio, a task each, calls"] = NUM_BRANCHES * num_tokens / (time.perf_counter() - begin)
        begin = time.perf_counter()
        await asyncio.gather(*(async_frames(client, branch, num_tokens) for branch in branches))
        rates["aio, a task each, streams"] = NUM_BRANCHES * num_tokens / (time.perf_counter() - begin)
    return rates


def measure(target: str, num_rounds: int, num_calls: int) -> dict[str, dict[str, float]]:
    """Run both parts, print their tables and return the figures."""
    samples: dict[str, list[Round]] = {}
    rates: dict[str, list[float]] = {}
    for _ in range(num_rounds):
        for name, one in (sync_latencies(target, num_calls) | asyncio.run(async_latencies(target, num_calls))).items():
            samples.setdefault(name, []).append(one)
        for name, rate in (sync_rates(target, 20) | asyncio.run(async_rates(target, 20))).items():
            rates.setdefault(name, []).append(rate)
    figures = {}
    print(f"{'one cache':28} {'p50 ms':>8} {'p99 ms':>8} {'cpu us':>8}   p50 of rounds")
    for name, rounds in samples.items():
        quantiles = statistics.quantiles([ms for one in rounds for ms in one.added_ms], n=100)
        medians = [statistics.median(one.added_ms) for one in rounds]
        cpu_us = statistics.median(one.cpu_us for one in rounds)
        low, high = min(medians), max(medians)
        print(f"{name:28} {quantiles[49]:8.3f} {quantiles[98]:8.3f} {cpu_us:8.0f}   {low:.3f}-{high:.3f}")
        figures[name] = {"p50_ms": quantiles[49], "p99_ms": quantiles[98], "low": low, "high": high, "cpu_us": cpu_us}
    print(f"{f'{NUM_BRANCHES} branches':28} {'tokens/s':>8}                     rounds")
    for name, values in rates.items():
        print(f"{name:28} {statistics.median(values):8.0f}                     {min(values):.0f}-{max(values):.0f}")
        figures[name] = {"tokens_per_s": statistics.median(values), "low": min(values), "high": max(values)}
    return figures


def main() -> None:
    """Run both parts; print tables, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="a server that is up; without it one is started")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=150)
    arguments = parser.parse_args()
    with contextlib.nullcontext(arguments.target) if arguments.target else server() as target:
        figures = measure(target, arguments.rounds, arguments.calls)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    machine = {"commit": commit.stdout.strip(), "cpus": os.cpu_count(), "python": platform.python_version()}
    print(json.dumps({**machine, "grpcio": grpc.__version__, "figures": figures}))


if __name__ == "__main__":
    main()
