"""Attacks by sheer number, from a process of their own: ten thousand streams, a hundred thousand calls thrown away."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
import psutil
import pytest

from ferrule.v1 import executor_pb2
from ferrule_server.api.limits import ApiLimits
from tests.api.harness import GREEDY, RunningServer, wait_until
from tests.api.hostile import http2

T = TypeVar("T")

_NUM_STREAMS = 10_000
_NUM_OF_ONE = ApiLimits().max_streams_per_connection - 6
"""Streams of one connection."""
_NUM_RESETS = 100_000

_CLIENT = """
import asyncio, sys
import grpc
from ferrule.v1 import executor_pb2, executor_pb2_grpc

async def hold(target, num_streams, num_of_one):
    channels, calls = [], []
    while len(calls) < num_streams:
        channels.append(grpc.aio.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)]))
        await channels[-1].channel_ready()
        stub = executor_pb2_grpc.ModelExecutorServiceStub(channels[-1])
        for _ in range(num_of_one):
            call = stub.StreamDecode()
            await call.write(executor_pb2.StreamDecodeRequest())
            calls.append(call)
        await asyncio.gather(*(call.read() for call in calls[-num_of_one:]))
    print("open", flush=True)
    await asyncio.Event().wait()

asyncio.run(hold(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
"""


@contextmanager
def _streams(server: RunningServer) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", _CLIENT, server.address.target, str(_NUM_STREAMS), str(_NUM_OF_ONE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        try:
            assert client.stdout.readline() == b"open\n"
            yield client
        finally:
            client.kill()


def _decode_ms(server: RunningServer, count: int) -> float:
    """Return the median time of a unary decode, sent again where gRPC refused it: too many calls waited just then."""
    handle = _served(lambda: server.prefill((1, 2, 3)).kv_cache)
    took = []
    for _ in range(count):
        started = time.perf_counter()
        _served(lambda: server.decode(handle, policy=GREEDY))
        took.append(time.perf_counter() - started)
    _served(lambda: server.release(handle))
    return statistics.median(took) * 1000


def _served(call: Callable[[], T]) -> T:
    """Return the reply to a call, which is sent again after each RST_STREAM with REFUSED_STREAM: it never began."""
    while True:
        try:
            return call()
        except grpc.RpcError as error:
            if "RST_STREAM with error code 7" not in (error.details() or ""):
                raise
            time.sleep(0.01)


@pytest.mark.slow
def test_ten_thousand_streams_leave_the_others_served_and_nothing_behind() -> None:
    """They cost memory while they last; a decode goes on at the same pace; when their client is killed all is back."""
    process = psutil.Process()
    with RunningServer() as server:
        before_ms, before_bytes = _decode_ms(server, 200), process.memory_info().rss
        with _streams(server):
            wait_until(lambda: len(server.state.streams) == _NUM_STREAMS)
            during_ms, during_bytes = _decode_ms(server, 200), process.memory_info().rss
            num_files = process.num_fds()
        wait_until(lambda: not server.state.streams, timeout_s=60)
        after_ms = _decode_ms(server, 200)
        wait_until(lambda: process.num_fds() <= num_files - 10, timeout_s=60)
        server.store.check_integrity()
    each = (during_bytes - before_bytes) / _NUM_STREAMS / 1024
    sys.stderr.write(f"decode {before_ms:.2f} / {during_ms:.2f} / {after_ms:.2f} ms, {each:.1f} KiB a stream\n")
    assert during_ms < 10 * before_ms
    assert each < 200


@pytest.mark.slow
def test_a_hundred_thousand_calls_thrown_away_leave_nothing_behind() -> None:
    """HEADERS and RST_STREAM, again and again, over as many connections as the server asks for (CVE-2023-44487)."""
    headers = http2.call_headers("/ferrule.v1.ModelExecutorService/StreamDecode")
    process = psutil.Process()
    with RunningServer() as server:
        _decode_ms(server, 100)
        num_files, num_sent = process.num_fds(), 0
        started = time.monotonic()
        while num_sent < _NUM_RESETS:
            with http2.peer(server.address.host, server.address.port) as peer:
                for index in range(5000):
                    stream = 2 * index + 1
                    peer.send(
                        http2.frame(http2.HEADERS, http2.END_HEADERS, stream, headers),
                        http2.frame(http2.RST_STREAM, 0, stream, http2.CANCEL.to_bytes(4, "big")),
                    )
                num_sent += 5000
                during_ms = _decode_ms(server, 20)
        elapsed_s = time.monotonic() - started
        wait_until(lambda: not server.state.streams and not server.state.num_active, timeout_s=60)
        wait_until(lambda: process.num_fds() <= num_files + 2, timeout_s=60)
        server.store.check_integrity()
        _decode_ms(server, 100)
    sys.stderr.write(f"{num_sent / elapsed_s:.0f} resets/s, decode meanwhile {during_ms:.2f} ms\n")


@pytest.mark.slow
def test_a_call_beyond_the_streams_of_a_connection_waits_for_its_deadline() -> None:
    """Its client queues it, silently: DEADLINE_EXCEEDED. Other connections are served."""
    with RunningServer() as server:
        streams = []
        for _ in range(ApiLimits().max_streams_per_connection):
            streams.append(server.open_stream())
            streams[-1].send()
            streams[-1].read()
        with pytest.raises(grpc.RpcError) as caught:
            server.stub.GetStatus(executor_pb2.GetStatusRequest(), timeout=0.3)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        with grpc.insecure_channel(server.address.target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            call: Any = channel.unary_unary(
                "/ferrule.v1.ModelExecutorService/GetStatus"
            )  # no serializers: bytes in, bytes out
            assert call(b"", timeout=10)
        for stream in streams:
            stream.half_close()
