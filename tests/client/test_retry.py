"""Retries: what is tried again, what is not, and for how long."""

from __future__ import annotations

import time

import grpc
import pytest

from ferrule_client import BlocksExhaustedError, Client, DrainingError, StartingError, UnavailableError, greedy, sample
from tests.client.fake_server import Failure, FakeServer

CODES = grpc.StatusCode
GONE = Failure(CODES.UNAVAILABLE, "Socket closed")
LOST = Failure(CODES.UNAVAILABLE, "Socket closed", after=True)
RESET = Failure(CODES.INTERNAL, "Received RST_STREAM with error code 2", after=True)
STARTING = Failure(CODES.UNAVAILABLE, "loading", reason="STARTING")


def test_broken_connection_is_tried_again(fake: FakeServer, fake_client: Client) -> None:
    """UNAVAILABLE twice, then an answer: the caller sees the answer."""
    fake.failures["GetStatus"] = [GONE, GONE]
    assert fake_client.status().is_ready
    assert fake.calls["GetStatus"] == 3


@pytest.mark.parametrize("failure", [GONE, LOST, RESET])
def test_append_is_tried_again_and_replays(fake: FakeServer, fake_client: Client, failure: Failure) -> None:
    """Whether the request or the reply was lost, the token is there once."""
    with fake_client.prefill([*b"ab"], policy=greedy()) as cache:
        fake.failures["Decode"] = [failure, failure]
        output = cache.decode([*b"cd"], policy=greedy())
        assert output.replayed == failure.after
        assert bytes(fake.sequences[cache.handle.cache_id]) == b"abcd"
        assert fake.calls["Decode"] == 3


def test_retry_draws_with_the_seed_of_the_first_try(fake: FakeServer, fake_client: Client) -> None:
    """The client draws a missing seed before it sends, so a replay is exact."""
    with fake_client.prefill([*b"ab"]) as cache:
        first = cache.decode(1, policy=sample(temperature=0.5)).seed
        second = cache.decode(1, policy=sample(temperature=0.5)).seed
        assert first is not None
        assert first != second
        assert cache.decode(1, policy=sample(temperature=0, seed=None)).seed is None


@pytest.mark.parametrize("failure", [GONE, LOST, RESET])
def test_creation_is_not_tried_again(fake: FakeServer, fake_client: Client, failure: Failure) -> None:
    """A prefill or fork that may have run is the caller's to repeat."""
    fake.failures["Prefill"] = [failure]
    with pytest.raises(UnavailableError if failure is not RESET else Exception, match=r"Socket|RST") as caught:
        fake_client.prefill([*b"ab"])
    assert getattr(caught.value, "reason", "") == "CONNECTION_LOST"
    assert fake.calls["Prefill"] == 1
    with fake_client.prefill([*b"ab"]) as cache:
        fake.failures["ForkCache"] = [failure]
        with pytest.raises(Exception, match=r"Socket|RST"):
            cache.fork(2)
        assert fake.calls["ForkCache"] == 1
        fake.failures["Decode"] = [failure]
        with pytest.raises(Exception, match=r"Socket|RST"):
            cache.decode(1, on_stale="fork")


def test_starting_server_is_waited_for(fake: FakeServer, fake_client: Client) -> None:
    """A server that still loads did nothing, so even a prefill waits for it, up to the timeout."""
    fake.failures["Prefill"] = [STARTING] * 3
    fake_client.prefill([*b"ab"]).release()
    assert fake.calls["Prefill"] == 4
    fake.failures["Prefill"] = [STARTING] * 1000
    start = time.monotonic()
    with pytest.raises(StartingError):
        fake_client.prefill([*b"ab"], timeout=0.5)
    assert time.monotonic() - start < 2


def test_other_refusals_are_not_tried_again(fake: FakeServer, fake_client: Client) -> None:
    """A server that drains, or a full pool, is answered to the caller at once."""
    fake.failures["GetStatus"] = [Failure(CODES.UNAVAILABLE, "bye", reason="DRAINING")]
    with pytest.raises(DrainingError):
        fake_client.status()
    fake.failures["Prefill"] = [Failure(CODES.RESOURCE_EXHAUSTED, "full", reason="KV_BLOCKS_EXHAUSTED")]
    with pytest.raises(BlocksExhaustedError):
        fake_client.prefill([*b"ab"])
    assert fake.calls == {"GetStatus": 1, "Prefill": 1}


def test_retries_end(fake: FakeServer) -> None:
    """A connection that never holds is given up after a few tries, long before the timeout."""
    fake.failures["GetStatus"] = [GONE] * 100
    with Client.connect(fake.target, max_retries=2) as client:
        start = time.monotonic()
        with pytest.raises(UnavailableError):
            client.status()
        assert time.monotonic() - start < 5
        assert fake.calls["GetStatus"] == 3


def test_client_finds_a_server_that_comes_up_late() -> None:
    """Waiting drives the channel: the server is found within moments, not at the next backoff."""
    with FakeServer() as first:
        port = first.port
    client = Client.connect(f"127.0.0.1:{port}", max_retries=0)
    with pytest.raises(UnavailableError):
        client.wait_until_ready(timeout=0.3)
    seen: list[object] = []
    start = time.monotonic()
    servers: list[FakeServer] = []

    def on_progress(status: object) -> None:
        seen.append(status)
        if len(seen) == 3:
            servers.append(_serve_on(port))

    assert client.wait_until_ready(on_progress=on_progress, timeout=15).is_ready
    assert time.monotonic() - start < 4
    assert seen[0] is None
    client.close()
    servers[0].__exit__()


def _serve_on(port: int) -> FakeServer:
    server = FakeServer()
    assert server._server.add_insecure_port(f"127.0.0.1:{port}") == port
    return server.__enter__()
