"""What Envoy in front costs: the same messages direct and through it, in turns, with the shipped configuration.

One server with the paged reference executor, whose steps are short, and one Envoy with deploy/envoy.yaml. Three
clients, connected to the server, to Envoy, and to a port of the same Envoy that passes bytes on unread, send the same
message in turns, hundreds of times; which goes first changes each time. *Added* is the median of the latencies through
Envoy less the median of the direct ones in each round: all have the same server, the same phase of the machine and the
same neighbours. What the port that reads nothing adds is the price of any process in between on this machine: two more
wake-ups and copies; the rest is HTTP/2 and routing. Measured are a frame of a StreamDecode that stays open (one decode;
32 decodes; one decode with its logits), and a unary Decode.

Usage: python benchmarks/bench_proxy.py [--rounds 7] [--messages 400]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc
import yaml
from bench_grpc import versions  # type: ignore[import-not-found]  # beside this script, not a package
from child_server import server  # type: ignore[import-not-found]

from ferrule.v1 import cache_pb2, executor_pb2_grpc, policy_pb2, types_pb2
from ferrule.v1 import executor_pb2 as pb

BAR_MS = 0.1
INSTANCE = "ferrule-a"
NO_OUTPUT = policy_pb2.LogitsReturnPolicy()
GREEDY = policy_pb2.LogitsReturnPolicy(greedy_argmax=policy_pb2.GreedyArgmax())
LOGITS = policy_pb2.LogitsReturnPolicy(full_logits=policy_pb2.FullLogits())
METADATA = (("ferrule-instance", INSTANCE),)
PROMPT = list(range(64))
MOST_APPENDS = 400
"""The executor's context less the prompt; then the sequences are made anew."""


UNREAD = """
name: unread
address: { socket_address: { address: 0.0.0.0, port_value: 50052 } }
filter_chains:
  - filters:
      - name: envoy.filters.network.tcp_proxy
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy
          stat_prefix: unread
          cluster: ferrule-a
"""


@dataclass(frozen=True)
class Message:
    """One kind of message: how many decodes in it, what they return, and by which call."""

    name: str
    handles: int
    policy: policy_pb2.LogitsReturnPolicy
    is_unary: bool = False


MESSAGES = (
    Message("stream, 1 decode", 1, GREEDY),
    Message("stream, 32 decodes", 32, GREEDY),
    Message("stream, 1 decode with logits", 1, LOGITS),
    Message("unary, 1 decode", 1, GREEDY, is_unary=True),
)


@dataclass(frozen=True)
class Row:
    """Milliseconds: medians over all messages, and what Envoy added in each round, as median and spread."""

    message: str
    direct_p50: float
    envoy_p50: float
    direct_p99: float
    envoy_p99: float
    added_p50: float
    added_spread: tuple[float, float]
    unread_added_p50: float
    unread_added_spread: tuple[float, float]


class Sender:
    """Sends one kind of message to sequences of its own, over a connection of its own.

    Args:
        target: The server, or Envoy.
        message: The kind.
    """

    def __init__(self, target: str, message: Message) -> None:
        self._channel = grpc.aio.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)])
        self._stub = executor_pb2_grpc.ModelExecutorServiceStub(self._channel)
        self._message = message
        self._handles: list[types_pb2.KvCacheHandle] = []
        self._call = None if message.is_unary else self._stub.StreamDecode(metadata=METADATA)

    async def begin(self) -> None:
        """Make new sequences in the place of those before."""
        await self.release()
        request = pb.PrefillRequest(input=pb.PrefillInput(input_ids=PROMPT, logits_policy=NO_OUTPUT))
        for _ in range(self._message.handles):
            reply = await self._stub.Prefill(request, metadata=METADATA)
            self._handles.append(reply.output.kv_cache)

    async def send(self, token: int) -> float:
        """Append a token to each sequence by one message; returns how many ms its answer took."""
        inputs = [
            pb.DecodeInput(input_ids=[token], kv_cache=handle, logits_policy=self._message.policy)
            for handle in self._handles
        ]
        if self._call is None:
            request = pb.DecodeRequest(input=inputs[0])
            started = time.perf_counter()
            self._handles = [(await self._stub.Decode(request, metadata=METADATA)).output.kv_cache]
            return 1e3 * (time.perf_counter() - started)
        frame = pb.StreamDecodeRequest(items=[pb.StreamItem(seq=seq, decode=one) for seq, one in enumerate(inputs)])
        started, num_waiting = time.perf_counter(), len(inputs)
        await self._call.write(frame)
        while num_waiting:
            reply = await self._call.read()
            assert isinstance(reply, pb.StreamDecodeResponse), "the stream ended"
            num_waiting -= len(reply.results)
            for result in reply.results:
                assert result.HasField("decode"), result.error.message
                self._handles[result.seq] = result.decode.kv_cache
        return 1e3 * (time.perf_counter() - started)

    async def release(self) -> None:
        """Give the sequences back."""
        await self._stub.ReleaseCache(cache_pb2.ReleaseCacheRequest(kv_caches=self._handles), metadata=METADATA)
        self._handles = []

    async def close(self) -> None:
        """End the stream and the connection."""
        if self._call is not None:
            await self._call.done_writing()
        await self._channel.close()


async def measure(message: Message, targets: Sequence[str], num_rounds: int, num_messages: int) -> Row:
    """Send messages all ways in turns.

    Args:
        message: The kind.
        targets: The server, Envoy, and its port that reads nothing.
        num_rounds: Rounds, each with new sequences.
        num_messages: Messages a round, each way.
    """
    ways = [Sender(target, message) for target in targets]
    took: list[list[float]] = [[] for _ in ways]
    added: list[list[float]] = [[] for _ in ways]
    for _ in range(num_rounds):
        for way in ways:
            await way.begin()
        samples: list[list[float]] = [[] for _ in ways]
        for number in range(min(num_messages, MOST_APPENDS)):
            for turn in range(len(ways)):
                place = (number + turn) % len(ways)
                ms = await ways[place].send(number % 250)
                if number >= num_messages // 10:
                    samples[place].append(ms)
        for place, one in enumerate(samples):
            added[place].append(statistics.median(one) - statistics.median(samples[0]))
            took[place].extend(one)
    await _all(way.release for way in ways)
    await _all(way.close for way in ways)
    quantiles = [statistics.quantiles(one, n=100) for one in took]
    p50, p99 = ([one[at] for one in quantiles] for at in (49, 98))
    medians = [statistics.median(one) for one in added]
    spreads = [(min(one), max(one)) for one in added]
    return Row(message.name, p50[0], p50[1], p99[0], p99[1], medians[1], spreads[1], medians[2], spreads[2])


async def _all(calls: Iterator[Callable[[], Awaitable[None]]]) -> None:
    for call in calls:
        await call()


@contextmanager
def envoy_before(target: str) -> Iterator[tuple[str, str]]:
    """Run Envoy with the shipped configuration, but for one more port; its second instance is not there.

    Yields:
        Its address, and that of the port that passes bytes on unread.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tools.compose.envoy import CONFIG, EnvoyProcess, free_ports

    port, unread, nobody = int(target.rpartition(":")[2]), *free_ports(2)
    config = yaml.safe_load(CONFIG.read_text("utf-8"))
    config["static_resources"]["listeners"].append(yaml.safe_load(UNREAD))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source.yaml"
        source.write_text(yaml.safe_dump(config), "utf-8")
        ports = {INSTANCE: port, "ferrule-b": nobody}
        with EnvoyProcess(Path(folder), ports, source, {("0.0.0.0", 50052): unread}) as envoy:
            envoy.wait_for_healthy({port})
            yield envoy.target, f"127.0.0.1:{unread}"


def main() -> None:
    """Run all kinds; print a table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--messages", type=int, default=400)
    arguments = parser.parse_args()
    with server("--executor", "paged-reference", "--instance", INSTANCE) as direct, envoy_before(direct) as envoy:
        targets = (direct, *envoy)
        rows = [asyncio.run(measure(message, targets, arguments.rounds, arguments.messages)) for message in MESSAGES]
    head = f"{'direct p50':>10} {'Envoy p50':>10} {'direct p99':>10} {'Envoy p99':>10}"
    print(f"{'message':<30} {head}   added p50, ms           unread")
    for row in rows:
        low, high = row.added_spread
        figures = f"{row.direct_p50:10.3f} {row.envoy_p50:10.3f} {row.direct_p99:10.3f} {row.envoy_p99:10.3f}"
        print(
            f"{row.message:<30} {figures}   {row.added_p50:.3f} ({low:.3f} to {high:.3f})  {row.unread_added_p50:.3f}"
        )
    print(f"bar: a stream message of one decode gets {BAR_MS} ms at most: {rows[0].added_p50 <= BAR_MS}")
    load = f"{os.getloadavg()[0]:.1f}"
    print(json.dumps({**versions(), "load": load, "added": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
