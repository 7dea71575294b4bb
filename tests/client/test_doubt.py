"""Appends whose answer never came: repeated they replay, otherwise they are dropped, and never doubled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

import grpc
import pytest

from ferrule import Cache, Client, Policy, greedy, logits
from ferrule.errors import DeadlineExceededError, HandleStaleError, UnavailableError
from ferrule.types import Append
from tests.client.fake_server import Failure, FakeServer
from tests.client.frames import append_all, append_by_stream

CODES = grpc.StatusCode
LANDED = Failure(CODES.DEADLINE_EXCEEDED, "Deadline Exceeded", after=True)
LOST = Failure(CODES.DEADLINE_EXCEEDED, "Deadline Exceeded")

LIKELIEST = Policy(top_logprobs=1)

Way = Callable[[Client, Cache, list[int]], object]
CALL: Way = lambda _, cache, tokens: cache.append(tokens, policy=LIKELIEST)  # noqa: E731
FRAME: Way = lambda client, cache, tokens: append_by_stream(client, [cache], [tokens], LIKELIEST)  # noqa: E731
WAYS: list[tuple[str, Way, list[int]]] = [
    ("Decode", CALL, [3]),
    ("Prefill", CALL, [3, 4]),
    ("frame", FRAME, [3, 4]),
]
"""What the server counts it as, the call, and the tokens that make it that."""


def tokens_of(fake: FakeServer, cache: Cache) -> list[int]:
    """Return what the server holds."""
    return fake.sequences[cache.handle.cache_id]


@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize("failure", [LANDED, LOST])
@pytest.mark.parametrize("way", WAYS, ids=[rpc for rpc, *_ in WAYS])
def test_what_raised_did_not_happen(
    fake: FakeServer, fake_client: Client, way: tuple[str, Way, list[int]], failure: Failure, repeats: bool
) -> None:
    """The same tokens again are there once, by a plain retry; others replace those in doubt."""
    rpc, append, tokens = way
    then = tokens if repeats else [9]
    with fake_client.prefill([1, 2]) as cache:
        fake.failures[rpc] = [failure]
        with pytest.raises(DeadlineExceededError) as caught:
            append(fake_client, cache, tokens)
        assert "send the same tokens again" in caught.value.__notes__[0]
        assert cache.length == 2
        append(fake_client, cache, then)
        append(fake_client, cache, [5])
        assert tokens_of(fake, cache) == [1, 2, *then, 5]
        assert cache.length == 3 + len(then)
        assert fake.calls["GetCacheInfo"] == (0 if repeats else 1)


def test_part_of_a_doubtful_append_leaves_the_rest_in_doubt(fake: FakeServer, fake_client: Client) -> None:
    """Sending its first token replays that one; the others go when something else follows."""
    with fake_client.prefill([1, 2]) as cache:
        fake.failures["Prefill"] = [LANDED]
        with pytest.raises(DeadlineExceededError):
            cache.append([3, 4, 5])
        assert cache.append(3).replayed
        cache.append(9)
        assert tokens_of(fake, cache) == [1, 2, 3, 9]


@pytest.mark.parametrize("draws_first", [False, True])
def test_draws_forks_and_loops_stand_before_the_doubt(
    fake: FakeServer, fake_client: Client, *, draws_first: bool
) -> None:
    """The cache has not moved, whatever it is used for next."""
    with fake_client.prefill([*b"the"]) as cache:
        fake.failures["Prefill"] = [LANDED]
        with pytest.raises(DeadlineExceededError):
            cache.append([*b"XY"])
        said = [cache.step(greedy()).token] if draws_first else []
        with cache.fork() as branch:
            assert tokens_of(fake, branch) == [*b"the"]
        assert bytes([*said, *cache.generate(6 - len(said))]) == b" quick"
        assert bytes(tokens_of(fake, cache)) == b"the quic"


@pytest.mark.parametrize("failure", [LANDED, LOST])
@pytest.mark.parametrize("pending", ["send", "drop"])
def test_a_pending_token_is_part_of_the_append_in_doubt(
    fake: FakeServer, fake_client: Client, pending: Literal["send", "drop"], failure: Failure
) -> None:
    """It stays pending when the append fails: repeated it is there once, and it can still be replaced."""
    with fake_client.prefill([*b"the"], policy=greedy()) as cache:
        fake.failures["Decode"] = [failure]
        with pytest.raises(DeadlineExceededError):
            cache.step()
        assert (cache.length, cache.pending) == (3, ord(" "))
        cache.append((), pending="send") if pending == "send" else cache.append(ord("-"), pending="drop")
        assert bytes(tokens_of(fake, cache)) == (b"the " if pending == "send" else b"the-")
        assert cache.pending is None


def test_a_loop_of_several_branches_is_asked_for_again_in_the_same_words(fake: FakeServer, fake_client: Client) -> None:
    """Its request_id is good for one content only, and finds the branches that the lost answer was about."""
    fake.has_request_ids = True
    with fake_client.prefill([*b"the"]) as cache:
        fake.failures["Generate"] = [Failure(CODES.UNAVAILABLE, "Socket closed", after=True)] * 2
        loop = cache.generate(6, n=2)
        with loop.read().caches:
            assert [bytes(branch.tokens) for branch in loop.branches] == [b" quick"] * 2
            assert len(fake.sequences) == 2
        first, *again = fake.generates
        assert again == [first] * 2


def test_truncate_drops_what_is_in_doubt(fake: FakeServer, fake_client: Client) -> None:
    """By hand it works too, and nothing more is asked afterwards."""
    with fake_client.prefill([1, 2]) as cache:
        fake.failures["Decode"] = [LANDED]
        with pytest.raises(DeadlineExceededError):
            cache.append([3])
        cache.truncate(cache.length)
        assert tokens_of(fake, cache) == [1, 2]
        cache.append([9])
        assert tokens_of(fake, cache) == [1, 2, 9]
        assert fake.calls["GetCacheInfo"] == 0


def test_tokens_of_others_are_never_dropped(fake: FakeServer, fake_client: Client) -> None:
    """Behind the handle stands what is not ours: that is a stale handle, as always."""
    with fake_client.prefill([1, 2]) as cache:
        fake.failures["Decode"] = [LOST]
        with pytest.raises(DeadlineExceededError):
            cache.append([3])
        tokens_of(fake, cache).append(7)
        with pytest.raises(HandleStaleError):
            cache.append([9])
        assert tokens_of(fake, cache) == [1, 2, 7]


def test_two_doubts_in_a_row_are_remembered(fake: FakeServer, fake_client: Client) -> None:
    """Whichever of them landed, it is known as ours."""
    with fake_client.prefill([1, 2]) as cache:
        fake.failures["Decode"] = [LANDED, LOST]
        for token in (3, 4):
            with pytest.raises(DeadlineExceededError):
                cache.append(token)
        cache.append(5)
        assert tokens_of(fake, cache) == [1, 2, 5]


def test_clear_refusals_leave_no_doubt(fake: FakeServer, fake_client: Client) -> None:
    """An answer is an answer."""
    with fake_client.prefill([1, 2]) as cache:
        fake.failures["Decode"] = [Failure(CODES.RESOURCE_EXHAUSTED, "full", reason="KV_BLOCKS_EXHAUSTED")]
        with pytest.raises(Exception, match="full"):
            cache.append(3)
        assert cache._tip.doubts == frozenset()


def test_broken_branch_frame_is_in_doubt_too(fake: FakeServer, fake_client: Client) -> None:
    """A frame that is not sent again leaves its parents as they were."""
    with fake_client.prefill([1, 2]) as cache, fake_client.stream() as stream:
        fake.failures["frame"] = [Failure(CODES.UNAVAILABLE, "Socket closed", after=True)]
        with pytest.raises(UnavailableError):
            stream.branch([cache, cache], [3, 4])
        cache.append(9)
        assert tokens_of(fake, cache) == [1, 2, 9]


def test_timeout_on_a_real_server_loses_and_doubles_nothing(client: Client) -> None:
    """Timeouts of every length around the time that an append takes, then a retry or another way on."""
    with client.prefill([1, 2]) as cache:
        expected = [1, 2]
        for number in range(60):
            token = number % 250
            try:
                cache.append(token, policy=logits(), timeout=1e-4 * (1 + number % 20))
                expected.append(token)
            except DeadlineExceededError:
                if number % 2:
                    cache.append(token)
                    expected.append(token)
        cache.append(251)
        assert list(cache.info(token_ids=True).token_ids) == [*expected, 251]


def test_two_threads_on_a_stream_are_told(fake: FakeServer, fake_client: Client) -> None:
    """At once, instead of taking each other's answers."""
    fake.delay_s = 0.5
    first, second = (fake_client.prefill([1, 2]) for _ in range(2))
    with fake_client.stream() as stream:
        thread = threading.Thread(target=stream.run, args=([Append(first, 3)],))
        thread.start()
        while not fake.frames:
            pass
        with pytest.raises(RuntimeError, match="used by two threads"):
            append_all(stream, [second], [4])
        thread.join()
        assert first.length == 3
        append_all(stream, [second], [4])
    fake_client.release([first, second])
