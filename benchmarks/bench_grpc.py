"""What the wire costs: added latency of a StreamDecode frame, and whether many clients batch like one.

Part 1, added latency. One client on loopback sends a frame with one greedy decode per handle and waits for the reply.
Added cost = client latency - the reply's ``run_ns``: packing, HTTP/2, two thread hops, judging, committing, unpacking.
The paged reference executor is used because its steps are short; the model plays no part in the figure.

Part 2, cohorts. 32 clients with a connection and a stream each, one handle each, against one client with one stream
and 32 handles in a packed frame, on the same server in turns. Tokens/s of the first over the second shows half-cohorts
(clients that alternate at half the batch): without the gather window it falls towards one half.

Usage: python benchmarks/bench_grpc.py [--model FOLDER] [--rounds 5] [--frames 400]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
from child_server import server  # type: ignore[import-not-found]  # beside this script, not a package
from decode_stream import Stream  # type: ignore[import-not-found]

from ferrule.v1 import types_pb2


@dataclass(frozen=True)
class Latency:
    """Added latency of one frame with ``handles`` items, in milliseconds."""

    handles: int
    p50_ms: float
    p99_ms: float
    spread_ms: tuple[float, float]


@dataclass(frozen=True)
class Cohort:
    """Tokens/s of 32 clients with one handle each against one packed stream, medians over rounds."""

    model: str
    packed: float
    apart: float
    ratio: float
    ratio_spread: tuple[float, float]


async def measure_latency(target: str, num_handles: int, num_frames: int, num_rounds: int) -> Latency:
    """Time frames of ``num_handles`` items; each round works on fresh sequences."""
    added_ms: list[float] = []
    medians: list[float] = []
    for _ in range(num_rounds):
        stream = Stream(target)
        handles = [await stream.prefill(i) for i in range(num_handles)]
        first = list(handles)
        samples: list[float] = []
        for frame in range(num_frames):
            handles, elapsed_ns, run_ns = await stream.decode(handles, frame % 250)
            if frame >= num_frames // 10:
                samples.append((elapsed_ns - run_ns) * 1e-6)
        await stream.release(first)
        await stream.close()
        added_ms += samples
        medians.append(statistics.median(samples))
    quantiles = statistics.quantiles(added_ms, n=100)
    return Latency(num_handles, quantiles[49], quantiles[98], (min(medians), max(medians)))


async def packed_rate(target: str, num_handles: int, num_tokens: int) -> float:
    """Tokens/s of one client with all handles in one frame."""
    stream = Stream(target)
    handles = [await stream.prefill(i) for i in range(num_handles)]
    first = list(handles)
    handles, _, _ = await stream.decode(handles, 1)
    started = time.perf_counter()
    for token in range(num_tokens):
        handles, _, _ = await stream.decode(handles, token % 250)
    elapsed = time.perf_counter() - started
    await stream.release(first)
    await stream.close()
    return num_handles * num_tokens / elapsed


async def apart_rate(target: str, num_clients: int, num_tokens: int) -> float:
    """Tokens/s of clients with one handle each, all decoding as fast as they are answered."""
    streams = [Stream(target) for _ in range(num_clients)]
    handles = [await stream.prefill(i) for i, stream in enumerate(streams)]

    async def drive(stream: Stream, handle: types_pb2.KvCacheHandle) -> None:
        held = [handle]
        for token in range(num_tokens):
            held, _, _ = await stream.decode(held, token % 250)

    for stream, handle in zip(streams, handles, strict=True):
        await stream.decode([handle], 0)
    await asyncio.gather(*(stream.release([handle]) for stream, handle in zip(streams, handles, strict=True)))
    handles = [await stream.prefill(i) for i, stream in enumerate(streams)]
    started = time.perf_counter()
    await asyncio.gather(*(drive(stream, handle) for stream, handle in zip(streams, handles, strict=True)))
    elapsed = time.perf_counter() - started
    await streams[0].release(handles)
    for stream in streams:
        await stream.close()
    return num_clients * num_tokens / elapsed


async def measure_cohort(target: str, model: str, num_tokens: int, num_rounds: int) -> Cohort:
    """Interleave both ways of driving 32 handles."""
    packed: list[float] = []
    apart: list[float] = []
    for _ in range(num_rounds):
        packed.append(await packed_rate(target, 32, num_tokens))
        apart.append(await apart_rate(target, 32, num_tokens))
    ratios = [a / p for a, p in zip(apart, packed, strict=True)]
    return Cohort(
        model,
        statistics.median(packed),
        statistics.median(apart),
        statistics.median(ratios),
        (min(ratios), max(ratios)),
    )


def versions() -> dict[str, str]:
    """What the figures were taken with."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "commit": git.stdout.strip(),
        "python": platform.python_version(),
        "grpcio": grpc.__version__,
        "cpus": str(os.cpu_count()),
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def main() -> None:
    """Run both parts; print a table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, action="append", default=[], help="also run part 2 on this model folder")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--frames", type=int, default=300)
    parser.add_argument("--cohort-tokens", type=int, default=30)
    arguments = parser.parse_args()

    with server("--executor", "paged-reference") as target:
        latencies = [
            asyncio.run(measure_latency(target, count, arguments.frames, arguments.rounds)) for count in (1, 32)
        ]
    print(f"{'handles':>8} {'p50 ms':>8} {'p99 ms':>8}   medians of rounds")
    for row in latencies:
        print(f"{row.handles:8d} {row.p50_ms:8.3f} {row.p99_ms:8.3f}   {row.spread_ms[0]:.3f}-{row.spread_ms[1]:.3f}")
    print(f"32 handles cost {latencies[1].p50_ms / latencies[0].p50_ms:.2f}x one\n", flush=True)

    cohorts: list[Cohort] = []
    for model in [Path("demo"), *arguments.model]:
        with server("--model", str(model), "--kv-memory", "2GiB") as target:
            cohorts.append(asyncio.run(measure_cohort(target, model.name, arguments.cohort_tokens, arguments.rounds)))
        row2 = cohorts[-1]
        print(
            f"{row2.model}: packed {row2.packed:.0f} tok/s, 32 clients {row2.apart:.0f} tok/s, "
            f"ratio {row2.ratio:.2f} ({row2.ratio_spread[0]:.2f}-{row2.ratio_spread[1]:.2f})",
            flush=True,
        )
    print(json.dumps({**versions(), "latency": [asdict(x) for x in latencies], "cohort": [asdict(x) for x in cohorts]}))


if __name__ == "__main__":
    main()
