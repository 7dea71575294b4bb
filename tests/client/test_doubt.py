"""Appends whose answer never came: repeated they replay, otherwise they are dropped, and never doubled."""

from __future__ import annotations

import threading
from collections.abc import Callable

import grpc
import pytest

from ferrule import Cache, Client, greedy, logits
from ferrule.errors import DeadlineExceededError, HandleStaleError, UnavailableError
from tests.client.fake_server import Failure, FakeServer

CODES = grpc.StatusCode
LANDED = Failure(CODES.DEADLINE_EXCEEDED, "Deadline Exceeded", after=True)
LOST = Failure(CODES.DEADLINE_EXCEEDED, "Deadline Exceeded")

Append = Callable[[Client, Cache, list[int]], object]
WAYS: list[tuple[str, Append]] = [
    ("Decode", lambda _, cache, tokens: cache.decode(tokens, policy=greedy())),
    ("frame", lambda client, cache, tokens: client.decode_many([cache], [tokens], policy=greedy())),
]


def tokens_of(fake: FakeServer, cache: Cache) -> list[int]:
    """Return what the server holds."""
    return fake.sequences[cache.handle.cache_id]


@pytest.mark.parametrize("failure", [LANDED, LOST])
@pytest.mark.parametrize(("rpc", "append"), WAYS)
def test_same_tokens_again_are_there_once(
    fake: FakeServer, fake_client: Client, rpc: str, append: Append, failure: Failure
) -> None:
    """The retry after a timeout is a plain one."""
    with fake_client.prefill([1, 2]) as cache:
        fake.failures[rpc] = [failure]
        with pytest.raises(DeadlineExceededError) as caught:
            append(fake_client, cache, [3, 4])
        assert "send the same tokens again" in caught.value.__notes__[0]
        assert cache.length == 2
        append(fake_client, cache, [3, 4])
        append(fake_client, cache, [5])
        assert tokens_of(fake, cache) == [1, 2, 3, 4, 5]
        assert cache.length == 5
        assert fake.calls["GetCacheInfo"] == 0


@pytest.mark.parametrize("failure", [LANDED, LOST])
@pytest.mark.parametrize(("rpc", "append"), WAYS)
def test_other_tokens_replace_those_in_doubt(
    fake: FakeServer, fake_client: Client, rpc: str, append: Append, failure: Failure
) -> None:
    """What raised did not happen: going on in another way gives the text that was meant."""
    with fake_client.prefill([1, 2]) as cache:
        fake.failures[rpc] = [failure]
        with pytest.raises(DeadlineExceededError):
            append(fake_client, cache, [3, 4])
        append(fake_client, cache, [9])
        append(fake_client, cache, [10])
        assert tokens_of(fake, cache) == [1, 2, 9, 10]
        assert fake.calls["GetCacheInfo"] == 1


def test_part_of_a_doubtful_append_leaves_the_rest_in_doubt(fake: FakeServer, fake_client: Client) -> None:
    """Sending its first token replays that one; the others go when something else follows."""
    with fake_client.prefill([1, 2]) as cache:
        fake.failures["Decode"] = [LANDED]
        with pytest.raises(DeadlineExceededError):
            cache.decode([3, 4, 5])
        assert cache.decode(3).replayed
        cache.decode(9)
        assert tokens_of(fake, cache) == [1, 2, 3, 9]


def test_queries_forks_and_loops_stand_before_the_doubt(fake: FakeServer, fake_client: Client) -> None:
    """The cache has not moved, whatever it is used for next."""
    with fake_client.prefill([*b"the"]) as cache:
        fake.failures["Decode"] = [LANDED]
        with pytest.raises(DeadlineExceededError):
            cache.decode([*b"XY"])
        assert cache.append((), policy=greedy()).token == ord(" ")
        with cache.fork()[0] as branch:
            assert tokens_of(fake, branch) == [*b"the"]
        assert bytes(cache.generate(6)) == b" quick"
        assert bytes(tokens_of(fake, cache)) == b"the quic"


def test_truncate_drops_what_is_in_doubt(fake: FakeServer, fake_client: Client) -> None:
    """By hand it works too, and nothing more is asked afterwards."""
    with fake_client.prefill([1, 2]) as cache:
        fake.failures["Decode"] = [LANDED]
        with pytest.raises(DeadlineExceededError):
            cache.decode([3])
        cache.truncate(cache.length)
        assert tokens_of(fake, cache) == [1, 2]
        cache.decode([9])
        assert tokens_of(fake, cache) == [1, 2, 9]
        assert fake.calls["GetCacheInfo"] == 0


def test_tokens_of_others_are_never_dropped(fake: FakeServer, fake_client: Client) -> None:
    """Behind the handle stands what is not ours: that is a stale handle, as always."""
    with fake_client.prefill([1, 2]) as cache:
        fake.failures["Decode"] = [LOST]
        with pytest.raises(DeadlineExceededError):
            cache.decode([3])
        tokens_of(fake, cache).append(7)
        with pytest.raises(HandleStaleError):
            cache.decode([9])
        assert tokens_of(fake, cache) == [1, 2, 7]


def test_two_doubts_in_a_row_are_remembered(fake: FakeServer, fake_client: Client) -> None:
    """Whichever of them landed, it is known as ours."""
    with fake_client.prefill([1, 2]) as cache:
        fake.failures["Decode"] = [LANDED, LOST]
        for token in (3, 4):
            with pytest.raises(DeadlineExceededError):
                cache.decode(token)
        cache.decode(5)
        assert tokens_of(fake, cache) == [1, 2, 5]


def test_clear_refusals_leave_no_doubt(fake: FakeServer, fake_client: Client) -> None:
    """An answer is an answer."""
    with fake_client.prefill([1, 2]) as cache:
        fake.failures["Decode"] = [Failure(CODES.RESOURCE_EXHAUSTED, "full", reason="KV_BLOCKS_EXHAUSTED")]
        with pytest.raises(Exception, match="full"):
            cache.decode(3)
        assert cache.tip.doubts == frozenset()


def test_broken_branch_frame_is_in_doubt_too(fake: FakeServer, fake_client: Client) -> None:
    """A frame that is not sent again leaves its parents as they were."""
    with fake_client.prefill([1, 2]) as cache, fake_client.stream() as stream:
        fake.failures["frame"] = [Failure(CODES.UNAVAILABLE, "Socket closed", after=True)]
        with pytest.raises(UnavailableError):
            stream.branch([cache, cache], [3, 4])
        cache.decode(9)
        assert tokens_of(fake, cache) == [1, 2, 9]


def test_timeout_on_a_real_server_loses_and_doubles_nothing(client: Client) -> None:
    """Timeouts of every length around the time that an append takes, then a retry or another way on."""
    with client.prefill([1, 2]) as cache:
        expected = [1, 2]
        for number in range(60):
            token = number % 250
            try:
                cache.decode(token, policy=logits(), timeout=1e-4 * (1 + number % 20))
                expected.append(token)
            except DeadlineExceededError:
                if number % 2:
                    cache.decode(token)
                    expected.append(token)
        cache.decode(251)
        assert list(cache.info(token_ids=True).token_ids) == [*expected, 251]


def test_two_threads_on_a_stream_are_told(fake: FakeServer, fake_client: Client) -> None:
    """At once, instead of taking each other's answers."""
    fake.delay_s = 0.5
    first, second = (fake_client.prefill([1, 2]) for _ in range(2))
    with fake_client.stream() as stream:
        thread = threading.Thread(target=stream.decode, args=([first], [3]))
        thread.start()
        while not fake.frames:
            pass
        with pytest.raises(RuntimeError, match="used by two threads"):
            stream.decode([second], [4])
        thread.join()
        assert first.length == 3
        stream.decode([second], [4])
    fake_client.release([first, second])


def test_leaving_a_cache_after_its_client_warns(fake: FakeServer) -> None:
    """The sequence cannot be released any more; that is said."""
    client = Client(fake.target)
    with pytest.warns(ResourceWarning, match="after its client was closed"), client.prefill([1, 2]) as cache:
        client.close()
    assert cache.is_released
