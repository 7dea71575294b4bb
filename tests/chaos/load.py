"""Load in a process of its own, so that whoever measures is not slowed by what it measures.

    python -m tests.chaos.load KIND --target HOST:PORT --seconds S [--token TOKEN] ...

Prints one line of JSON when it is done, earlier on SIGTERM. Latencies are of the monotonic clock, from the moment a
request was due.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from ferrule.v1 import cache_pb2, executor_pb2_grpc, policy_pb2, types_pb2
from ferrule.v1 import executor_pb2 as pb

GREEDY = policy_pb2.LogitsReturnPolicy(greedy_argmax=policy_pb2.GreedyArgmax())
NOTHING = policy_pb2.LogitsReturnPolicy()
FULL = policy_pb2.LogitsReturnPolicy(full_logits=policy_pb2.FullLogits())
TIMEOUT_S = 60.0


class Load:
    """A connection, and what was measured over it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.channel = grpc.aio.insecure_channel(args.target, options=[("grpc.max_receive_message_length", -1)])
        self.stub = executor_pb2_grpc.ModelExecutorServiceStub(self.channel)
        self.metadata = (("authorization", f"Bearer {args.token}"),) if args.token else ()
        self.ends_at = 0.0
        self.began_s: list[float] = []
        self.latencies_ms: list[float] = []
        self.steps_ms: list[float] = []
        self.refused_ms: list[float] = []
        self.counts: Counter[str] = Counter()

    def note(self, began_s: float, elapsed_s: float, step_ns: int = 0) -> None:
        """Note one answer, and how long the step took that it comes from."""
        self.began_s.append(began_s)
        self.latencies_ms.append(elapsed_s * 1e3)
        self.steps_ms.append(step_ns / 1e6)

    def stop(self) -> None:
        """End before the time is up."""
        self.ends_at = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self.ends_at

    async def run(self, kind: Callable[[Load], Awaitable[None]]) -> dict[str, Any]:
        """Run one kind of load; returns what is printed."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.stop)
        await asyncio.sleep(self.args.delay)
        began_s = time.monotonic()
        self.ends_at = began_s + self.args.seconds
        await kind(self)
        ended_s = time.monotonic()
        await self.channel.close()
        return {
            "began_s": self.began_s,
            "latencies_ms": self.latencies_ms,
            "steps_ms": self.steps_ms,
            "refused_ms": self.refused_ms,
            "counts": dict(self.counts),
            "span_s": (began_s, ended_s),
        }

    async def prefill(self, num_tokens: int) -> types_pb2.KvCacheHandle:
        """Make a sequence of random tokens."""
        ids = [random.randrange(200) for _ in range(num_tokens)]
        message = pb.PrefillRequest(input=pb.PrefillInput(input_ids=ids, logits_policy=NOTHING))
        reply = await self.stub.Prefill(message, metadata=self.metadata, timeout=TIMEOUT_S)
        return reply.output.kv_cache

    async def release(self, *handles: types_pb2.KvCacheHandle) -> None:
        """Give sequences back."""
        request = cache_pb2.ReleaseCacheRequest(kv_caches=handles)
        await self.stub.ReleaseCache(request, metadata=self.metadata, timeout=TIMEOUT_S)

    async def truncate(self, handle: types_pb2.KvCacheHandle, length: int) -> types_pb2.KvCacheHandle:
        """Shorten a sequence."""
        request = cache_pb2.TruncateKvRequest(kv_cache=handle, new_length=length)
        return (await self.stub.TruncateKv(request, metadata=self.metadata, timeout=TIMEOUT_S)).kv_cache


async def decode(load: Load) -> None:
    """``--count`` streams, each decoding one sequence token by token, the next as soon as the last is answered."""
    await asyncio.gather(*(_decode_one(load) for _ in range(load.args.count)))


async def _decode_one(load: Load) -> None:
    handle = await load.prefill(load.args.tokens)
    call = load.stub.StreamDecode(metadata=load.metadata)
    for token in itertools.count():
        if load.is_over:
            break
        if handle.length >= load.args.tokens + 500:
            handle = await load.truncate(handle, load.args.tokens)
        item = pb.StreamItem(decode=pb.DecodeInput(input_ids=[token % 200], kv_cache=handle, logits_policy=GREEDY))
        began_s = time.monotonic()
        await call.write(pb.StreamDecodeRequest(items=[item]))
        reply = await call.read()
        elapsed_s = time.monotonic() - began_s
        assert isinstance(reply, pb.StreamDecodeResponse), "the stream ended"
        assert reply.results[0].HasField("decode"), reply
        handle = reply.results[0].decode.kv_cache
        if token >= 3:
            load.note(began_s, elapsed_s, reply.results[0].decode.timing.run_ns)
    await call.done_writing()
    await load.release(handle)


async def unary(load: Load) -> None:
    """Decode one sequence token by token, each by a call of its own."""
    handle = await load.prefill(load.args.tokens)
    for token in itertools.count():
        if load.is_over:
            break
        if handle.length >= load.args.tokens + 500:
            handle = await load.truncate(handle, load.args.tokens)
        message = pb.DecodeInput(input_ids=[token % 200], kv_cache=handle, logits_policy=GREEDY)
        began_s = time.monotonic()
        reply = await load.stub.Decode(pb.DecodeRequest(input=message), metadata=load.metadata, timeout=TIMEOUT_S)
        handle = reply.output.kv_cache
        load.note(began_s, time.monotonic() - began_s, reply.output.timing.run_ns)
    await load.release(handle)


async def flood(load: Load) -> None:
    """``--count`` callers that prefill prompts of ``--tokens`` tokens without a pause."""
    await asyncio.gather(*(_flood_one(load) for _ in range(load.args.count)))


async def _flood_one(load: Load) -> None:
    while not load.is_over:
        try:
            handle = await load.prefill(load.args.tokens)
        except grpc.aio.AioRpcError as error:
            reason, retry_s = _why(error)
            load.counts[reason] += 1
            await asyncio.sleep(retry_s)
            continue
        load.counts["prompts"] += 1
        load.counts["tokens"] += load.args.tokens
        await load.release(handle)


async def arrivals(load: Load) -> None:
    """Decodes that arrive at ``--rate`` per second on average, independent of each other, whatever the answers."""
    free = [await load.prefill(load.args.tokens) for _ in range(load.args.count)]
    first = list(free)
    tasks: set[asyncio.Task[None]] = set()
    rng = random.Random(7)
    due_s = time.monotonic()
    load.ends_at = due_s + load.args.seconds
    while not load.is_over:
        due_s += rng.expovariate(load.args.rate)
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        if not free:
            load.counts["no handle left"] += 1
            continue
        task = asyncio.create_task(_arrive(load, free, free.pop(), due_s))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    await load.release(*first)


async def _arrive(
    load: Load, free: list[types_pb2.KvCacheHandle], handle: types_pb2.KvCacheHandle, due_s: float
) -> None:
    request = pb.DecodeRequest(input=pb.DecodeInput(input_ids=[1], kv_cache=handle, logits_policy=GREEDY))
    load.counts["arrivals"] += 1
    try:
        reply = await load.stub.Decode(request, metadata=load.metadata, timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        load.refused_ms.append((time.monotonic() - due_s) * 1e3)
        reason, retry_s = _why(error)
        load.counts[reason] += 1
        load.counts["without RetryInfo"] += retry_s <= 0.0
        free.insert(0, handle)
    else:
        load.note(due_s, time.monotonic() - due_s)
        free.insert(0, reply.output.kv_cache)


async def health(load: Load) -> None:
    """Health checks, one each 5 ms on average."""
    stub = health_pb2_grpc.HealthStub(load.channel)
    while not load.is_over:
        await asyncio.sleep(random.uniform(0.0, 0.010))
        began_s = time.monotonic()
        reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        load.note(began_s, time.monotonic() - began_s)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def strange_health(load: Load) -> None:
    """Health checks each on a new connection; those that are not answered within five seconds are counted by status."""
    while not load.is_over:
        await asyncio.sleep(random.uniform(0.0, 0.1))
        began_s = time.monotonic()
        options = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(load.args.target, options=options) as channel:
            try:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5.0)
            except grpc.aio.AioRpcError as error:
                load.counts[error.code().name] += 1
                load.refused_ms.append((time.monotonic() - began_s) * 1e3)
            else:
                load.note(began_s, time.monotonic() - began_s)


async def noise(load: Load) -> None:
    """No load: how late the machine itself is, each time a sleep of 2 ms ends."""
    while not load.is_over:
        began_s = time.monotonic()
        await asyncio.sleep(0.002)
        load.note(began_s, time.monotonic() - began_s - 0.002)


async def reader(load: Load) -> None:
    """``--count`` streams that ask for the full logits of 32 branches again and again; ``--slow`` ones read no answer.

    They ask about the last row of each branch, so that they need no answer to go on.
    """
    await asyncio.gather(*(_read_one(load) for _ in range(load.args.count)))


async def _read_one(load: Load) -> None:
    handle = await load.prefill(load.args.tokens)
    request = cache_pb2.ForkCacheRequest(kv_cache=handle, count=32)
    branches = (await load.stub.ForkCache(request, metadata=load.metadata, timeout=TIMEOUT_S)).kv_caches
    call = load.stub.StreamDecode(metadata=load.metadata)
    items = [
        pb.StreamItem(seq=seq, decode=pb.DecodeInput(kv_cache=branch, logits_policy=FULL))
        for seq, branch in enumerate(branches)
    ]
    frame = pb.StreamDecodeRequest(items=items)
    while not load.is_over and not call.done():
        try:
            await call.write(frame)
            load.counts["frames"] += 1
            if load.args.slow:
                await asyncio.sleep(0.03)
                continue
            num_results = 0
            while num_results < len(items) and isinstance(reply := await call.read(), pb.StreamDecodeResponse):
                num_results += len(reply.results)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            break
    if not load.args.slow:
        await call.done_writing()
    try:
        while isinstance(await call.read(), pb.StreamDecodeResponse):  # what was sent before the cut
            load.counts["frames read late"] += 1
        if await call.code() is grpc.StatusCode.OK:
            load.counts["OK"] += 1
        else:
            raise grpc.aio.AioRpcError(
                await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
            )
    except grpc.aio.AioRpcError as error:
        load.counts[_why(error)[0]] += 1
    last = await load.stub.Decode(
        pb.DecodeRequest(input=pb.DecodeInput(kv_cache=handle, logits_policy=GREEDY)),
        metadata=load.metadata,
        timeout=TIMEOUT_S,
    )
    load.counts["sequences alive"] += last.output.kv_cache == handle
    await load.release(handle, *branches)


def _why(error: grpc.aio.AioRpcError) -> tuple[str, float]:
    """Return the reason of an error of ours, and its RetryInfo in seconds (0.0 without one)."""
    status: Any = rpc_status.from_call(error)  # the package has no types for calls of grpc.aio
    if status is None:
        return f"{error.code().name} {error.details()}", 0.0
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for detail in status.details:
        detail.Unpack(info)
        detail.Unpack(retry)
    return info.reason, retry.retry_delay.ToNanoseconds() / 1e9


KINDS: dict[str, Callable[[Load], Awaitable[None]]] = {
    "decode": decode,
    "flood": flood,
    "arrivals": arrivals,
    "health": health,
    "strange_health": strange_health,
    "unary": unary,
    "noise": noise,
    "reader": reader,
}


@dataclass(frozen=True)
class Measured:
    """What a load measured.

    Attributes:
        began_s: When each answered request began, on the monotonic clock; latencies_ms: how long it took.
        steps_ms: How long the step took that each came from; 0 where that is not known.
        refused_ms: How long each refused one took.
        counts: What else was counted, refusals by reason among it.
        span_s: When the load began and ended.
    """

    began_s: list[float]
    latencies_ms: list[float]
    steps_ms: list[float]
    refused_ms: list[float]
    counts: dict[str, int]
    span_s: tuple[float, float]

    def within(self, begin_s: float, end_s: float) -> list[float]:
        """Return the latencies of requests that began in this time."""
        return [ms for at, ms in zip(self.began_s, self.latencies_ms, strict=True) if begin_s <= at <= end_s]

    @property
    def seconds(self) -> float:
        """How long it ran."""
        return self.span_s[1] - self.span_s[0]


def run_loads(target: str, **loads: Mapping[str, object]) -> dict[str, Measured]:
    """Run loads side by side, each in a process of its own, until all have ended.

    Args:
        target: Address of the server.
        loads: By a name: the flags of :func:`main`, and ``kind``, by default the name.
    """
    processes = {name: start_load(target, {"kind": name, **flags}) for name, flags in loads.items()}
    return {name: end_load(name, process) for name, process in processes.items()}


def end_load(name: str, process: subprocess.Popen[str]) -> Measured:
    """Wait for the end of a load and return what it measured."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, f"the load {name} failed"
    return Measured(**json.loads(output))


def start_load(target: str, flags: Mapping[str, object]) -> subprocess.Popen[str]:
    """Start a load in a process of its own: its kind, and the flags of :func:`main`."""
    options = [f"--{name}={value}" for name, value in flags.items() if name != "kind"]
    command = [sys.executable, "-m", "tests.chaos.load", str(flags["kind"]), "--target", target, *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@contextmanager
def undisturbed() -> Iterator[bool]:
    """Give this process and those it starts real-time scheduling; yields False where the system does not allow it.

    Milliseconds are to be measured, and neighbours on the machine are not to be among them.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def percentile(values: list[float], share: float) -> float:
    """Return the value that ``share`` of the values do not pass."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(values: list[float]) -> dict[str, float]:
    """Return count, median, p99 and largest."""
    return {
        "count": len(values),
        "p50": round(percentile(values, 0.50), 2),
        "p99": round(percentile(values, 0.99), 2),
        "max": round(max(values), 2),
    }


def main() -> None:
    """Run the load named on the command line."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("--target", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds to wait before it begins")
    parser.add_argument("--token", default="")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rate", type=float, default=10.0)
    parser.add_argument("--slow", type=int, default=0)
    args = parser.parse_args()

    async def run() -> dict[str, Any]:
        return await Load(args).run(KINDS[args.kind])

    print(json.dumps(asyncio.run(run())), flush=True)


if __name__ == "__main__":
    main()
