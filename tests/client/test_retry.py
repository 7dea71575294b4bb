"""Retries: what is tried again, what is not, and for how long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import grpc
import pytest

from ferrule import Cache, Client, FerruleError, sample
from ferrule.errors import (
    DeadlineExceededError,
    RequestTimeoutError,
    RequestTooLargeError,
    ResourceExhaustedError,
    SlowConsumerError,
    StartingError,
    UnavailableError,
)
from ferrule.types import Append, Output
from ferrule_client._retry import Attempts, RetrySettings
from tests.client.fake_server import Failure, FakeServer

CODES = grpc.StatusCode
GONE = Failure(CODES.UNAVAILABLE, "Socket closed")
LOST = Failure(CODES.UNAVAILABLE, "Socket closed", after=True)
RESET = Failure(CODES.INTERNAL, "Received RST_STREAM with error code 2", after=True)
CUT = Failure(CODES.CANCELLED, "CANCELLED", after=True)
STARTING = Failure(CODES.UNAVAILABLE, "loading", reason="STARTING")


def run_one(client: Client, item: Append[Cache]) -> Output:
    """Return what came of an append in a frame of its own."""
    with client.stream() as stream:
        (output,) = stream.run([item])
    return output


@pytest.mark.parametrize("failure", [GONE, LOST, RESET, CUT])
def test_append_is_tried_again_and_replays(fake: FakeServer, fake_client: Client, failure: Failure) -> None:
    """Whether the request or the reply was lost, the tokens are there once; one token, and several in one call."""
    with fake_client.prefill([*b"ab"]) as cache:
        fake.failures["Decode"] = [failure, failure]
        output = cache.append(ord("c"))
        assert output.replayed == failure.after
        assert bytes(fake.sequences[cache.handle.cache_id]) == b"abc"
        assert fake.calls["Decode"] == 3
        fake.calls.clear()
        fake.failures["Prefill"] = [failure, failure]
        assert cache.append([*b"de"]).replayed == failure.after
        assert bytes(fake.sequences[cache.handle.cache_id]) == b"abcde"
        assert fake.calls["Prefill"] == 3


def test_call_that_the_server_cancels_is_a_broken_connection(fake: FakeServer) -> None:
    """What a server does that goes down under a call: on a stream too, and it is said so when the retries end."""
    with Client(fake.target, max_retries=1) as client, client.prefill([*b"ab"]) as cache:
        fake.failures["frame"] = [CUT]
        assert run_one(client, Append(cache, 1)).replayed
        fake.failures["Decode"] = [CUT] * 3
        with pytest.raises(UnavailableError, match="cut off") as caught:
            cache.append(1)
        assert (caught.value.reason, caught.value.code) == ("CONNECTION_LOST", CODES.CANCELLED)


def test_retry_draws_with_the_seed_of_the_first_try(fake: FakeServer, fake_client: Client) -> None:
    """The client draws a missing seed before it sends, so a replay is exact."""
    with fake_client.prefill([*b"ab"]) as cache:
        first = cache.append(1, policy=sample(temperature=0.5)).seed
        second = cache.append(1, policy=sample(temperature=0.5)).seed
        assert first is not None
        assert first != second
        assert cache.append(1, policy=sample(temperature=0, seed=None)).seed is None


def branch(client: Client, cache: Cache) -> Cache:
    """Return a child that one frame made beside the parent."""
    with client.stream() as stream:
        return stream.branch([cache, cache], [2, 3])[1]


Create = Callable[[Client, Cache], object]
CREATIONS: list[tuple[str, Create]] = [
    ("Prefill", lambda client, _: client.prefill([*b"xy"])),
    ("ForkCache", lambda _, cache: cache.fork()),
    ("Decode", lambda _, cache: cache.append([1], on_stale="fork")),
    ("Prefill", lambda _, cache: cache.append([1, 2], on_stale="fork")),
    ("frame", branch),
]


@pytest.fixture
def behind(fake: FakeServer, fake_client: Client) -> Iterator[Cache]:
    """A cache whose handle somebody else has left behind, so that FORK makes a branch."""
    with fake_client.prefill([*b"ab"]) as cache:
        fake.sequences[cache.handle.cache_id].append(9)
        yield cache


@pytest.mark.parametrize("failure", [GONE, LOST, RESET])
@pytest.mark.parametrize("creation", CREATIONS)
def test_creation_is_tried_again_by_its_request_id(
    fake: FakeServer, fake_client: Client, behind: Cache, creation: tuple[str, Create], failure: Failure
) -> None:
    """Whether the request or the reply was lost, the sequence is there once; the server is asked once if it can."""
    rpc, create = creation
    fake.has_request_ids = True
    if rpc == "frame":
        fake.sequences[behind.handle.cache_id].pop()
    num_before, num_calls = len(fake.sequences), fake.calls[rpc]
    fake.failures[rpc] = [failure, failure]
    made = create(fake_client, behind)
    assert len(fake.sequences) == num_before + 1
    assert fake.calls[rpc] == num_calls + 3
    assert fake.calls["GetCapabilities"] == 1
    if isinstance(made, Cache):
        made.detach()


def test_server_is_asked_once_what_it_can_do(fake: FakeServer, fake_client: Client) -> None:
    """Every later creation that breaks knows it."""
    fake.has_request_ids = True
    for _ in range(3):
        fake.failures["Prefill"] = [LOST]
        fake_client.prefill([*b"ab"]).detach()
    assert len(fake.sequences) == 3
    assert fake.calls == {"Prefill": 6, "GetCapabilities": 1}


def test_request_ids_are_new_for_every_call(fake: FakeServer, fake_client: Client) -> None:
    """The caller's own is sent as it is; the server is asked what it can do only when a creation breaks."""
    for given in ("", "", "mine"):
        fake_client.prefill([*b"ab"], request_id=given).release()
    first, second, own = (prompt.request_id for prompt in fake.prompts)
    assert own == "mine"
    assert first != second
    assert len(first) == len(second) == 32
    assert fake.calls["GetCapabilities"] == 0


@pytest.mark.parametrize("failure", [GONE, LOST, RESET])
@pytest.mark.parametrize("creation", CREATIONS)
def test_creation_is_not_tried_again_where_it_would_double(
    fake: FakeServer, fake_client: Client, behind: Cache, creation: tuple[str, Create], failure: Failure
) -> None:
    """On a server that does not honour request ids, one that may have run is the caller's to repeat."""
    rpc, create = creation
    num_calls = fake.calls[rpc]
    fake.failures[rpc] = [failure]
    with pytest.raises(FerruleError, match=r"Socket|RST") as caught:
        create(fake_client, behind)
    assert caught.value.reason == "CONNECTION_LOST"
    assert fake.calls[rpc] == num_calls + 1


def test_creation_is_not_tried_again_where_nobody_can_be_asked(fake: FakeServer) -> None:
    """A server that is gone for good ends the call with the error of the creation."""
    with Client(fake.target, max_retries=1) as client:
        fake.has_request_ids = True
        fake.failures["Prefill"] = [LOST]
        fake.failures["GetCapabilities"] = [GONE] * 10
        with pytest.raises(UnavailableError, match="Socket closed"):
            client.prefill([*b"ab"])
    assert fake.calls == {"Prefill": 1, "GetCapabilities": 2}


@pytest.mark.parametrize(
    ("rpc", "reason"),
    [
        ("Decode", "QUEUE_FULL"),
        ("item", "QUOTA_QUEUED_ROWS"),
        ("Prefill", "QUOTA_PREFILL_RATE"),
        ("Decode", "QUOTA_CALL_RATE"),
        ("item", "QUOTA_REQUEST_BYTES"),
    ],
)
def test_passing_refusal_is_waited_out(fake: FakeServer, fake_client: Client, rpc: str, reason: str) -> None:
    """At least as long as the server asks for; the neighbours in a frame are not sent again."""
    full = Failure(CODES.RESOURCE_EXHAUSTED, "full", reason=reason, retry_after_s=0.15)
    caches = [fake_client.prefill([*b"ab"]) for _ in range(3)]
    fake.failures[rpc] = [full, full]
    start = time.monotonic()
    if rpc == "Decode":
        caches[0].append(1)
    elif rpc == "Prefill":
        caches.append(fake_client.prefill([*b"ab"]))
    else:
        with fake_client.stream() as stream:
            stream.run([Append(cache, token) for token, cache in enumerate(caches, 1)])
        assert [len(frame) for frame in fake.frames] == [3, 2]
        assert [cache.length for cache in caches] == [3, 3, 3]
    assert time.monotonic() - start > (0.15 if rpc == "item" else 0.3)
    fake_client.release(caches)


@pytest.mark.parametrize("rpc", ["Decode", "item"])
@pytest.mark.parametrize(
    ("reason", "retry_after_s", "num_tries"),
    [
        ("QUEUE_FULL", 0.0, 3),  # and no more than the retries allow
        ("QUEUE_FULL", 99.0, 1),  # longer than the timeout
        ("QUEUE_FULL", None, 1),  # nobody says when
        ("KV_BLOCKS_EXHAUSTED", 0.0, 1),
        ("QUOTA_HANDLES", 0.0, 1),
        ("QUOTA_KV_TOKENS", 0.0, 1),
    ],
)
def test_other_refusals_are_the_callers(
    fake: FakeServer, rpc: str, reason: str, retry_after_s: float | None, num_tries: int
) -> None:
    """What ends only when somebody releases something is said at once."""
    full = Failure(CODES.RESOURCE_EXHAUSTED, "full", reason=reason, retry_after_s=retry_after_s)
    with Client(fake.target, max_retries=2) as client, client.prefill([*b"ab"]) as cache:
        fake.failures[rpc] = [full] * 50
        with pytest.raises(ResourceExhaustedError) as caught:
            cache.append(1) if rpc == "Decode" else run_one(client, Append(cache, 1))
        assert (caught.value.reason, caught.value.retry_after_s) == (reason, retry_after_s)
        assert 50 - len(fake.failures[rpc]) == num_tries
        assert cache.length == 2


TIMED_OUT = Failure(CODES.DEADLINE_EXCEEDED, "late", reason="REQUEST_TIMEOUT", metadata=(("timeout_s", "30"),))
TOO_LARGE = Failure(
    CODES.INVALID_ARGUMENT,
    "large",
    reason="REQUEST_TOO_LARGE",
    metadata=(("num_bytes", "9000"), ("limit_bytes", "8000"), ("field", "request")),
)


@pytest.mark.parametrize("rpc", ["Decode", "Prefill", "GetStatus"])
def test_a_request_that_never_arrived_is_sent_again(fake: FakeServer, fake_client: Client, rpc: str) -> None:
    """Nothing was run, so even a creation without request ids is repeated, and no append is in doubt."""
    with fake_client.prefill([*b"ab"]) as cache:
        fake.calls.clear()
        fake.failures[rpc] = [TIMED_OUT] * 2
        if rpc == "Decode":
            cache.append(1)
        elif rpc == "Prefill":
            fake_client.prefill([*b"ab"]).release()
        else:
            fake_client.status()
        assert fake.calls[rpc] == 3
        assert fake.calls["GetCapabilities"] == 0


def test_a_request_that_never_arrives_is_named(fake: FakeServer) -> None:
    """After the retries; an append that never arrived is not in doubt."""
    with Client(fake.target, max_retries=1) as client, client.prefill([*b"ab"]) as cache:
        fake.failures["Decode"] = [TIMED_OUT] * 50
        with pytest.raises(RequestTimeoutError) as caught:
            cache.append(2)
        assert isinstance(caught.value, DeadlineExceededError)
        assert cache._tip.doubts == frozenset()
        assert fake.calls["Decode"] == 2


@pytest.mark.parametrize("rpc", ["Decode", "Prefill", "frame"])
def test_a_request_that_is_too_large_is_not_sent_again(fake: FakeServer, fake_client: Client, rpc: str) -> None:
    """It would be as large the next time; the numbers are attributes, and nothing is in doubt."""
    with fake_client.prefill([*b"ab"]) as cache:
        fake.calls.clear()
        fake.failures[rpc] = [TOO_LARGE] * 9
        calls: dict[str, Callable[[], object]] = {
            "Decode": lambda: cache.append(1),
            "Prefill": lambda: fake_client.prefill([3]),
            "frame": lambda: run_one(fake_client, Append(cache, 1)),
        }
        with pytest.raises(RequestTooLargeError) as caught:
            calls[rpc]()
        assert (caught.value.num_bytes, caught.value.limit_bytes, caught.value.field) == (9000, 8000, "request")
        assert fake.calls[rpc] == 1
        assert cache._tip.doubts == frozenset()
        fake.failures.clear()


def test_slow_consumer_is_told_and_its_append_is_in_doubt(fake: FakeServer, fake_client: Client) -> None:
    """What was under way on the stream ran; the same tokens again replay, on a stream opened anew."""
    with fake_client.prefill([*b"ab"]) as cache, fake_client.stream() as stream:
        fake.failures["frame"] = [Failure(CODES.RESOURCE_EXHAUSTED, "slow", reason="SLOW_CONSUMER", after=True)]
        with pytest.raises(SlowConsumerError):
            stream.run([Append(cache, 1)])
        assert cache._tip.doubts == {(1,)}
        assert stream.run([Append(cache, 1)])[0].replayed
        assert fake.sequences[cache.handle.cache_id] == [*b"ab", 1]
        assert fake.calls["StreamDecode"] == 2


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


@pytest.mark.parametrize("rpc", ["Tokenize", "Detokenize", "ApplyChatTemplate"])
def test_calls_on_texts_wait_for_a_starting_server(fake: FakeServer, rpc: str) -> None:
    """As any other call does, whatever ``max_retries`` says."""
    with Client(fake.target, max_retries=0, timeout=20) as client:
        fake.failures[rpc] = [STARTING] * 3
        assert client.tokenize("ab") == [*b"ab"]
        assert client.detokenize([*b"ab"]) == "ab"
        assert client.apply_chat_template([{"role": "user", "content": "ab"}]).text == "user: ab\n"
        assert fake.calls[rpc] == 4


def test_retries_end(fake: FakeServer) -> None:
    """A connection that never holds is given up after a few tries, long before the timeout."""
    fake.failures["GetStatus"] = [GONE] * 100
    with Client(fake.target, max_retries=2) as client:
        start = time.monotonic()
        with pytest.raises(UnavailableError):
            client.status()
        assert time.monotonic() - start < 5
        assert fake.calls["GetStatus"] == 3


def test_first_pause_is_short_and_later_ones_are_a_second() -> None:
    """One broken connection costs milliseconds; a server that stays away is asked about once a second."""
    lost = UnavailableError(CODES.UNAVAILABLE, "CONNECTION_LOST", "Socket closed")
    attempts = Attempts(RetrySettings(max_retries=8), None)
    pauses_s = [attempts.pause_s(lost) for _ in range(8)]
    assert pauses_s[0] <= 0.005
    assert sum(pauses_s[:5]) >= 0.7
    assert all(0.5 <= pause_s <= 1.0 for pause_s in pauses_s[4:])


def test_client_finds_a_server_that_comes_up_late() -> None:
    """Waiting drives the channel: the server is found within moments, not at the next backoff."""
    with FakeServer() as first:
        port = first.port
    client = Client(f"127.0.0.1:{port}", max_retries=0)
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
