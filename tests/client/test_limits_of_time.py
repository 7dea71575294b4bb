"""One timeout is for everything that a method does, and a client that closes says so."""

from __future__ import annotations

import time
from typing import Any

import grpc
import pytest

from ferrule import Cache, Client, greedy
from ferrule.errors import CallCancelledError, DeadlineExceededError
from ferrule.types import Append
from tests.client.fake_server import Failure, FakeServer

LOST = Failure(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", after=True)


@pytest.fixture
def doubtful(fake: FakeServer, fake_client: Client) -> Cache:
    """A cache whose next append has to look first."""
    cache = fake_client.prefill([1, 2])
    fake.failures["Decode"] = [LOST]
    with pytest.raises(DeadlineExceededError):
        cache.append(3)
    return cache


def slowed(client: Client, monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[Any]:
    """Let each unary call take so long, and return the timeouts that they are given."""
    wire, limits = client._connection.wire, []
    call = wire.call

    def slow(method: Any, request: Any, timeout: float | None, *rest: Any) -> Any:
        limits.append(timeout)
        time.sleep(seconds)
        return call(method, request, timeout, *rest)

    monkeypatch.setattr(wire, "call", slow)
    return limits


@pytest.mark.parametrize("way", ["Decode", "Prefill", "frame"])
def test_what_a_look_took_is_not_given_again(
    fake: FakeServer, fake_client: Client, doubtful: Cache, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The append has what the look at the sequence left of the time."""
    limits = slowed(fake_client, monkeypatch, 0.2)
    with doubtful:
        if way == "frame":
            with pytest.raises(DeadlineExceededError), fake_client.stream() as stream:
                stream.run([Append(doubtful, 4, greedy())], timeout=0.1)
        else:
            fake.calls.clear()
            doubtful.append([4] if way == "Decode" else [4, 5], policy=greedy(), timeout=10)
            assert [fake.calls["GetCacheInfo"], fake.calls[way]] == [1, 1]
            assert limits[0] is not None
            assert limits[1] is not None
            assert limits[1] <= limits[0] - 0.2


def test_many_batches_keep_one_limit(fake_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Handles beyond what one request takes do not make a call last longer."""
    fake_client._connection.handle_limit.advertise(1)
    caches = [fake_client.prefill([1]) for _ in range(3)]
    limits = slowed(fake_client, monkeypatch, 0.05)
    fake_client.keep_alive(caches, timeout=10)
    fake_client.release(caches, timeout=10)
    assert [limit is not None and limit <= 10 - 0.05 * (place % 3) for place, limit in enumerate(limits)] == [True] * 6


def test_a_client_that_closes_under_a_call_says_so(fake: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The channel itself has a ValueError for that."""
    client = Client(fake.target)
    cache = client.prefill([1], keep_alive=False)
    stream, wire = client.stream(), client._connection.wire

    def closed(*_: object) -> Any:
        client.close()
        raise ValueError("Cannot invoke RPC on closed channel!")

    monkeypatch.setattr(wire, "call", closed)
    monkeypatch.setattr(wire, "open_stream", closed)
    with pytest.raises(CallCancelledError, match="closed"):
        stream.run([Append(cache, 1)])
    client._connection.is_closed = False
    with pytest.raises(CallCancelledError, match="closed"):
        client.status()
    cache.detach()


@pytest.mark.parametrize("token", ["s3cr\u00e9t", "s3cret\n", "s3 cret", ""])
def test_a_token_that_cannot_travel_is_refused_without_repeating_it(token: str) -> None:
    """When connecting; gRPC would refuse the first call and print the token."""
    if not token:
        Client("127.0.0.1:1", token=token).close()
        return
    with pytest.raises(ValueError, match="no header can carry") as caught:
        Client("127.0.0.1:1", token=token)
    assert "s3" not in str(caught.value)
    with pytest.raises(TypeError, match="must be a text, got bytes"):
        Client("127.0.0.1:1", token=token.encode())  # type: ignore[arg-type]
