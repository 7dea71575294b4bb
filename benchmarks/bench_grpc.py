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

from ferrule.v1 import cache_pb2, executor_pb2_grpc, policy_pb2, types_pb2
from ferrule.v1 import executor_pb2 as pb

GREEDY = policy_pb2.LogitsReturnPolicy(greedy_argmax=policy_pb2.GreedyArgmax())
PROMPT_TOKENS = 128
OPTIONS = [("grpc.use_local_subchannel_pool", 1)]

Handle = types_pb2.KvCacheHandle


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


class Stream:
    """One open StreamDecode on a connection of its own."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.aio.insecure_channel(target, options=OPTIONS)
        self._stub = executor_pb2_grpc.ModelExecutorServiceStub(self._channel)
        self._call = self._stub.StreamDecode()
        self._frame = pb.StreamDecodeRequest()

    async def prefill(self, seed: int) -> Handle:
        """Make a sequence of PROMPT_TOKENS tokens."""
        ids = [(seed * 7 + i) % 250 for i in range(PROMPT_TOKENS)]
        none = policy_pb2.LogitsReturnPolicy(none=True)
        reply = await self._stub.Prefill(pb.PrefillRequest(input=pb.PrefillInput(input_ids=ids, logits_policy=none)))
        return reply.output.kv_cache

    async def decode(self, handles: list[Handle], token: int) -> tuple[list[Handle], int]:
        """Append ``token`` to each handle in one frame.

        Returns:
            The new handles, and the added cost in ns: from the first field written into the request until the last
            reply is read and parsed, less the step's run_ns.
        """
        started_ns = time.perf_counter_ns()
        self._fill(handles, token)
        await self._call.write(self._frame)
        results: list[pb.StreamResult] = []
        while len(results) < len(handles):
            reply = await self._call.read()
            if not isinstance(reply, pb.StreamDecodeResponse):
                raise TypeError("the stream ended")
            results += reply.results
        elapsed_ns = time.perf_counter_ns() - started_ns
        for result in results:
            if result.HasField("error"):
                raise RuntimeError(result.error.message)
        results.sort(key=lambda result: result.seq)
        run_ns = max(result.decode.timing.run_ns for result in results)
        return [result.decode.kv_cache for result in results], elapsed_ns - run_ns

    def _fill(self, handles: list[Handle], token: int) -> None:
        """Write the next frame, over the last one where it has as many items."""
        if len(self._frame.items) != len(handles):
            self._frame = pb.StreamDecodeRequest(
                items=[
                    pb.StreamItem(seq=seq, decode=pb.DecodeInput(input_ids=[token], logits_policy=GREEDY))
                    for seq in range(len(handles))
                ]
            )
        for item, handle in zip(self._frame.items, handles, strict=True):
            item.decode.input_ids[0] = token
            item.decode.kv_cache.CopyFrom(handle)

    async def release(self, handles: list[Handle]) -> None:
        """Give the sequences back."""
        await self._stub.ReleaseCache(cache_pb2.ReleaseCacheRequest(kv_caches=handles))

    async def close(self) -> None:
        """End the stream and the connection."""
        await self._call.done_writing()
        await self._channel.close()


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
            handles, added_ns = await stream.decode(handles, frame % 250)
            if frame >= num_frames // 10:
                samples.append(added_ns * 1e-6)
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
    handles, _ = await stream.decode(handles, 1)
    started = time.perf_counter()
    for token in range(num_tokens):
        handles, _ = await stream.decode(handles, token % 250)
    elapsed = time.perf_counter() - started
    await stream.release(first)
    await stream.close()
    return num_handles * num_tokens / elapsed


async def apart_rate(target: str, num_clients: int, num_tokens: int) -> float:
    """Tokens/s of clients with one handle each, all decoding as fast as they are answered."""
    streams = [Stream(target) for _ in range(num_clients)]
    handles = [await stream.prefill(i) for i, stream in enumerate(streams)]

    async def drive(stream: Stream, handle: Handle) -> None:
        held = [handle]
        for token in range(num_tokens):
            held, _ = await stream.decode(held, token % 250)

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
