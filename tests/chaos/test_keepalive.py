"""Frozen peers: how soon each side notices, and that the pings which that takes are not taken for an attack."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ferrule.v1 import executor_pb2, executor_pb2_grpc
from ferrule_client._channel import CHANNEL_OPTIONS
from ferrule_server.addresses import ListenAddress
from tests.api.harness import RunningServer, StreamClient, decode_item, wait_until

RECOMMENDED = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
)
"""What docs/operations.md recommends to clients that want to notice a dead server soon."""

_CLIENT = """
import sys, threading
import grpc
from ferrule.v1 import executor_pb2, executor_pb2_grpc
with grpc.insecure_channel(sys.argv[1]) as channel:
    stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
    def frames():
        yield executor_pb2.StreamDecodeRequest()
        threading.Event().wait()
    call = stub.StreamDecode(frames())
    next(call)
    print("open", flush=True)
    list(call)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_unix", [False, True], ids=["tcp", "unix"])
def test_a_frozen_client_is_noticed_within_15_s(is_unix: bool, tmp_path: Path) -> None:
    """Its connection stays open in the kernel; only the missing answer to a ping tells."""
    listen = ListenAddress(path=tmp_path / "f.sock") if is_unix else ListenAddress("127.0.0.1", 0)
    with (
        RunningServer(listen=listen) as server,
        subprocess.Popen(
            [sys.executable, "-c", _CLIENT, server.address.target], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as client,
    ):
        assert client.stdout is not None
        try:
            assert client.stdout.readline() == b"open\n"
            assert len(server.state.streams) == 1
            os.kill(client.pid, signal.SIGSTOP)
            started = time.monotonic()
            wait_until(lambda: not server.state.streams, timeout_s=15.0)
            sys.stderr.write(f"noticed after {time.monotonic() - started:.1f} s\n")
        finally:
            client.kill()


@pytest.mark.slow
def test_clients_that_ping_every_10_s_are_tolerated() -> None:
    """The interval that is published: on an idle connection and beside a stream, for longer than three strikes take."""
    options = [
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    with (
        RunningServer() as server,
        grpc.insecure_channel(server.address.target, options) as idle,
        grpc.insecure_channel(server.address.target, options) as busy,
    ):
        states: list[grpc.ChannelConnectivity] = []
        health_pb2_grpc.HealthStub(idle).Check(health_pb2.HealthCheckRequest(), timeout=10)
        idle.subscribe(states.append)
        stream = StreamClient(executor_pb2_grpc.ModelExecutorServiceStub(busy), timeout_s=100)
        handle = server.prefill().kv_cache
        stream.send(decode_item(handle, 7))
        stream.read()
        time.sleep(55.0)
        stream.send(decode_item(handle, 7))
        assert stream.read().results[0].decode.replayed
        assert set(states) == {grpc.ChannelConnectivity.READY}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "limit_s"), [(RECOMMENDED, 30), (CHANNEL_OPTIONS, 60)], ids=["recommended", "python-client"]
)
def test_a_frozen_server_is_noticed_by_a_call_without_a_deadline(
    options: Sequence[tuple[str, int]], limit_s: float
) -> None:
    """A call must not hang for ever: UNAVAILABLE after the client's keepalive time and timeout."""
    command = [sys.executable, "-m", "ferrule_server", "--executor", "paged-reference", "--kv-memory", "1MiB"]
    with subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            values = dict(part.split("=", 1) for part in process.stdout.readline().split()[1:])
            with grpc.insecure_channel(values["listen"], list(options)) as channel:
                stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
                stub.GetStatus(executor_pb2.GetStatusRequest())
                process.send_signal(signal.SIGSTOP)
                started = time.monotonic()
                with pytest.raises(grpc.RpcError) as caught:
                    stub.GetStatus(executor_pb2.GetStatusRequest())
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
                sys.stderr.write(f"noticed after {time.monotonic() - started:.1f} s\n")
                assert time.monotonic() - started < limit_s
        finally:
            process.kill()
