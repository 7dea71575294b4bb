"""Where the time of a server goes on this machine: Generate by 1, 8 and 32 callers, and by nobody.

    python benchmarks/bench_serving.py [--model demo] [--callers 1 8 32] [--seconds 12] [--tokens 1500]

Each caller continues random prompts of 128 tokens by ``--tokens`` tokens, one call after the other. Measured meanwhile,
after all callers have their first token: tokens/s, messages/s, the share of the time in which a step of the call runs,
the processor time of the event loop's thread, of the busiest other thread (the engine, which computes too), of all
others (which compute) and of the callers, in cores, and health checks by a process of their own, 50 times a second. The
last row is an idle server, without health checks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import grpc
import numpy as np
from child_server import server_process  # type: ignore[import-not-found]  # beside this script, not a package
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ferrule.v1 import cache_pb2, executor_pb2, executor_pb2_grpc, policy_pb2, types_pb2

PROMPT_TOKENS = 128
HEALTH_PERIOD_S = 0.02
GREEDY = policy_pb2.LogitsReturnPolicy(greedy_argmax=policy_pb2.GreedyArgmax())


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured with some callers; processor time in cores."""

    callers: int
    tokens_per_s: float
    messages_per_s: float
    in_steps: float
    loop: float
    engine: float
    others: float
    client: float
    health_p50_ms: float
    health_p99_ms: float


@dataclass(slots=True)
class Tally:
    """What callers have received."""

    tokens: int = 0
    messages: int = 0
    run_ns: int = 0
    num_begun: int = 0


def main() -> None:
    """Measure each number of callers, print a table and one JSON line."""
    args = _parse_arguments()
    if args.check_health:
        print(json.dumps(_check_health(args.check_health, args.seconds)))
        return
    with server_process("--model", args.model, "--kv-memory", "2GiB") as (target, process):
        rows = asyncio.run(_measure_all(target, process.pid, args))
    print(
        f"{args.model}: steps as a share of the time; event loop, engine, other threads, callers in cores; health in ms"
    )
    print(f"{'callers':>8}{'tokens/s':>10}{'messages/s':>12}{'steps':>7}{'loop':>7}{'engine':>8}{'others':>8}", end="")
    print(f"{'callers':>9}{'p50':>7}{'p99':>7}")
    for row in rows:
        print(f"{row.callers:>8}{row.tokens_per_s:>10.0f}{row.messages_per_s:>12.0f}{row.in_steps:>7.0%}", end="")
        print(f"{row.loop:>7.2f}{row.engine:>8.2f}{row.others:>8.2f}{row.client:>9.2f}", end="")
        print(f"{row.health_p50_ms:>7.1f}{row.health_p99_ms:>7.1f}")
    print(json.dumps({**_environment(), "model": args.model, "rows": [asdict(row) for row in rows]}))


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, or a folder")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--seconds", type=float, default=12.0, help="for each row")
    parser.add_argument("--tokens", type=int, default=1500, help="of each call")
    parser.add_argument("--check-health", metavar="TARGET", help=argparse.SUPPRESS)
    return parser.parse_args()


async def _measure_all(target: str, pid: int, args: argparse.Namespace) -> list[Row]:
    async with grpc.aio.insecure_channel(target) as channel:
        stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
        return [await _measure(stub, target, pid, size, args) for size in [*args.callers, 0]]


async def _measure(
    stub: executor_pb2_grpc.ModelExecutorServiceAsyncStub, target: str, pid: int, size: int, args: argparse.Namespace
) -> Row:
    tally = Tally()
    described = await stub.GetModelInfo(executor_pb2.GetModelInfoRequest())
    prompts = (
        np.random.default_rng(seed).integers(0, described.info.vocab_size, PROMPT_TOKENS) for seed in range(size)
    )
    callers = [asyncio.create_task(_call(stub, prompt.tolist(), args.tokens, tally)) for prompt in prompts]
    while tally.num_begun < size:  # until all prompts have been run
        await asyncio.sleep(0.1)
    before, begin, client_before = _threads_s(pid), time.perf_counter(), time.process_time()
    tokens, messages, run_ns = tally.tokens, tally.messages, tally.run_ns
    p50, p99 = await _health(target, args.seconds) if size else await asyncio.sleep(args.seconds, (0.0, 0.0))
    elapsed, client_s = time.perf_counter() - begin, time.process_time() - client_before
    used = {thread: value - before.get(thread, 0.0) for thread, value in _threads_s(pid).items()}
    tokens, messages, run_ns = tally.tokens - tokens, tally.messages - messages, tally.run_ns - run_ns
    for caller in callers:
        caller.cancel()
    await asyncio.gather(*callers, return_exceptions=True)
    loop_s, others = used.pop(pid), sorted(used.values(), reverse=True)
    return Row(
        callers=size,
        tokens_per_s=tokens / elapsed,
        messages_per_s=messages / elapsed,
        in_steps=run_ns * 1e-9 / max(1, size) / elapsed,
        loop=loop_s / elapsed,
        engine=others[0] / elapsed,
        others=sum(others[1:]) / elapsed,
        client=client_s / elapsed,
        health_p50_ms=p50,
        health_p99_ms=p99,
    )


async def _call(
    stub: executor_pb2_grpc.ModelExecutorServiceAsyncStub, prompt: list[int], num_tokens: int, tally: Tally
) -> None:
    request = executor_pb2.GenerateRequest(
        input_ids=prompt, logits_policy=GREEDY, max_tokens=num_tokens, ignore_eos=True
    )
    has_begun = False
    while True:
        handle: types_pb2.KvCacheHandle | None = None
        async for reply in stub.Generate(request):
            tally.num_begun += not has_begun
            has_begun = True
            tally.messages += 1
            tally.run_ns += reply.timing.run_ns
            for output in reply.outputs:
                tally.tokens += len(output.outputs.tokens)
                handle = output.resume_from
        await stub.ReleaseCache(cache_pb2.ReleaseCacheRequest(kv_caches=[handle] if handle else []))


async def _health(target: str, seconds: float) -> tuple[float, float]:
    """Return the median and the 99th percentile of health checks by another process, in ms."""
    command = [sys.executable, __file__, "--check-health", target, "--seconds", str(seconds)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    output, _ = await process.communicate()
    p50, p99 = json.loads(output)
    return p50, p99


def _check_health(target: str, seconds: float) -> list[float]:
    delays_s = []
    with grpc.insecure_channel(target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        health.Check(health_pb2.HealthCheckRequest())
        end = time.perf_counter() + seconds
        while (begin := time.perf_counter()) < end:
            health.Check(health_pb2.HealthCheckRequest())
            delays_s.append(time.perf_counter() - begin)
            time.sleep(HEALTH_PERIOD_S)
    quantiles: list[float] = np.quantile(delays_s, (0.5, 0.99)).tolist()
    return [1e3 * each for each in quantiles]


def _threads_s(pid: int) -> dict[int, float]:
    """Return the processor time of each thread of a process, in seconds; the event loop's has number ``pid``."""
    tick = os.sysconf("SC_CLK_TCK")
    times = {}
    for thread in Path(f"/proc/{pid}/task").iterdir():
        fields = (thread / "stat").read_text().rpartition(")")[2].split()
        times[int(thread.name)] = (int(fields[11]) + int(fields[12])) / tick
    return times


def _environment() -> dict[str, str]:
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "commit": git.stdout.strip(),
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "grpcio": grpc.__version__,
        "cores": str(os.cpu_count()),
    }


if __name__ == "__main__":
    main()
