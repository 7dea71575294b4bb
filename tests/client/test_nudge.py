"""A call that gets no answer has its channel touched, and is never cancelled for being long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import grpc
import pytest

from ferrule import AsyncClient, Client, greedy
from ferrule.types import Append
from ferrule_client._nudge import FIRST_NUDGE_S, Nudger
from tests.client.aio_harness import run
from tests.client.fake_server import FakeServer, threads_named, wait_for


class StuckServer(FakeServer):
    """Answers no call, and no frame but the first, before so many health checks were seen: as a stuck channel does.

    Attributes:
        num_needed: Health checks that free what waits.
        looks: Times of the health checks seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_needed = 0
        self.looks: list[float] = []
        self._looked = threading.Condition()
        check: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(self._check)
        handler = grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check})
        self._server.add_generic_rpc_handlers((handler,))

    def _check(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        with self._looked:
            self.looks.append(time.monotonic())
            self._looked.notify_all()
        return b""

    def _run(self, rpc: str, context: grpc.ServicerContext, work: Callable[[], object]) -> object:
        with self._looked:
            assert self._looked.wait_for(lambda: len(self.looks) >= self.num_needed, timeout=20)
        return super()._run(rpc, context, work)


@pytest.fixture
def stuck() -> Iterator[StuckServer]:
    """A server that is not stuck yet."""
    server = StuckServer()
    with server:
        yield server


def test_a_stuck_call_is_freed(stuck: StuckServer) -> None:
    """Unary and on a stream: something else is sent over the channel soon, and the call goes on."""
    with (
        Client(stuck.target, timeout=20) as client,
        client.prefill([1, 2]) as cache,
        client.stream() as stream,
    ):
        stuck.num_needed = 1
        cache.append(3, policy=greedy())
        stuck.num_needed = 2
        stream.run([Append(cache, policy=greedy())])
    assert (stuck.calls["Decode"], stuck.calls["StreamDecode"]) == (1, 1)


def test_a_stuck_call_is_freed_in_asyncio(stuck: StuckServer) -> None:
    """The same there."""

    async def main() -> None:
        async with (
            AsyncClient(stuck.target, timeout=20) as client,
            client.prefill([1, 2]) as cache,
            client.stream() as stream,
        ):
            stuck.num_needed = 1
            await cache.append(3, policy=greedy())
            stuck.num_needed = 2
            await stream.run([Append(cache, policy=greedy())])

    run(main())
    assert (stuck.calls["Decode"], stuck.calls["StreamDecode"]) == (1, 1)


def test_a_long_call_is_left_alone_ever_longer(stuck: StuckServer) -> None:
    """It is sent once, and each look comes after about twice the wait of the one before."""
    with Client(stuck.target, timeout=20) as client, client.prefill([1, 2]) as cache:
        stuck.num_needed = 3
        began = time.monotonic()
        cache.append(3, policy=greedy())
    assert stuck.calls["Decode"] == 1
    assert time.monotonic() - began >= 4 * FIRST_NUDGE_S * 0.9


def test_quick_calls_are_not_looked_at(stuck: StuckServer) -> None:
    """A call costs no other one; on a busy machine, a rare one is not quick."""
    with Client(stuck.target) as client:
        until = time.monotonic() + 2 * FIRST_NUDGE_S
        while time.monotonic() < until:
            client.status()
    assert 10 * len(stuck.looks) < stuck.calls["GetStatus"]


def test_its_thread_ends_with_the_client_or_for_want_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed client keeps no thread, nor does one that makes no calls."""
    monkeypatch.setattr("ferrule_client._nudge.FIRST_NUDGE_S", 0.01)
    nudger = Nudger(lambda: None)
    for _ in range(2):
        with nudger:
            assert list(threads_named("ferrule-nudge"))
        wait_for(lambda: not list(threads_named("ferrule-nudge")))
    with nudger:
        nudger.close()
        wait_for(lambda: not list(threads_named("ferrule-nudge")))
