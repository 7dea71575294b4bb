"""Calls at once: what a connection carries, and that Envoy carries more than one connection to a server does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.serve import server_options
from tests.api.harness import RunningServer
from tools.compose.envoy import CONFIG, EnvoyProcess

NUM_STREAMS = 256
"""Calls at once on a connection to Envoy."""
NUM_UPSTREAM = 200
"""The same from Envoy: at a server a call that has just ended still counts for a moment."""


def _limits(node: Any) -> Iterator[int]:
    """Yield each ``max_concurrent_streams`` of a configuration."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        if key == "max_concurrent_streams":
            yield value
        else:
            yield from _limits(value)


def test_envoy_allows_no_more_calls_on_a_connection_than_the_servers() -> None:
    """On its listener, and to every cluster of servers: a call must not wait unseen in the proxy."""
    found = list(_limits(yaml.safe_load(CONFIG.read_text("utf-8"))))
    assert found == [NUM_STREAMS, *[NUM_UPSTREAM] * 3]
    assert NUM_UPSTREAM < NUM_STREAMS <= dict(server_options(ApiLimits()))["grpc.max_concurrent_streams"]


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvoyProcess]:
    """In front of two servers."""
    with RunningServer() as first, RunningServer() as second:
        ports = {"ferrule-a": first.address.port, "ferrule-b": second.address.port}
        with EnvoyProcess(Path(tmp_path_factory.mktemp("envoy")), ports) as running:
            running.wait_for_healthy(set(ports.values()))
            yield running


def _watch(stack: contextlib.ExitStack, channel: grpc.Channel, num_calls: int) -> list[Any]:
    """Open calls that stay open and are for one server, one after another: it refuses a crowd of new health calls."""
    stub = health_pb2_grpc.HealthStub(channel)
    to_one = (("ferrule-instance", "ferrule-a"),)
    calls: list[Any] = []  # the health stubs have no types
    for _ in range(num_calls):
        calls.append(stub.Watch(health_pb2.HealthCheckRequest(), metadata=to_one, timeout=60))
        stack.callback(calls[-1].cancel)
        assert next(calls[-1]).status == health_pb2.HealthCheckResponse.SERVING
    return calls


def test_several_connections_of_clients_share_no_limit(proxy: EnvoyProcess) -> None:
    """600 open calls over three connections are all served by one server: Envoy opens more connections to it."""
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = stack.enter_context(grpc.insecure_channel(proxy.target, options=options))
            _watch(stack, channel, 200)


def test_calls_beyond_the_limit_wait_for_their_turn(proxy: EnvoyProcess) -> None:
    """The 257th call of a connection gets no error: it is served as soon as another one ends."""
    with contextlib.ExitStack() as stack:
        channel = stack.enter_context(grpc.insecure_channel(proxy.target))
        calls = _watch(stack, channel, NUM_STREAMS)
        waiting = health_pb2_grpc.HealthStub(channel).Check.future(health_pb2.HealthCheckRequest(), timeout=60)
        with pytest.raises(grpc.FutureTimeoutError):
            waiting.result(timeout=0.5)
        calls[0].cancel()
        assert waiting.result().status == health_pb2.HealthCheckResponse.SERVING
