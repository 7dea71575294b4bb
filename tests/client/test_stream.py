"""Packed streams: many caches, one frame."""

from __future__ import annotations

import gc

import grpc
import pytest

from ferrule_client import (
    CallCancelledError,
    Client,
    ExecutorError,
    HandleNotFoundError,
    Output,
    UnavailableError,
    greedy,
    no_output,
    sample,
)
from tests.client.fake_server import Failure, FakeServer, threads_named, wait_for


def test_packed_steps_equal_single_decodes(client: Client) -> None:
    """Three branches in one frame per step draw what each draws alone."""
    with client.prefill([5, 6, 7], policy=no_output()) as cache:
        singles, branches = cache.fork(3), cache.fork(3)
        alone = [list(branch.generate(6, seed=seed)) for seed, branch in enumerate(singles)]
        policies = [sample(seed=seed) for seed in range(3)]
        with client.stream() as stream:
            outputs = stream.decode(branches, [()] * 3, policy=policies)
            together = [[output.token] for output in outputs]
            for _ in range(5):
                outputs = stream.decode(branches, [output.token or 0 for output in outputs], policy=policies)
                for tokens, output in zip(together, outputs, strict=True):
                    tokens.append(output.token)
            assert stream.num_frames == 6
            assert stream.free_blocks is not None
        assert together == alone
        client.release([*singles, *branches])


def test_results_come_in_the_order_of_the_caches(fake: FakeServer, fake_client: Client) -> None:
    """The server may answer in any order; the fake answers backwards."""
    caches = [fake_client.prefill(b"x" * n, policy=no_output()) for n in range(1, 6)]
    outputs = fake_client.decode_many(caches, [1, 2, 3, 4, [5, 5]], policy=greedy())
    assert [output.handle.length for output in outputs] == [2, 3, 4, 5, 7]
    assert [cache.length for cache in caches] == [2, 3, 4, 5, 7]
    fake_client.decode_many(caches, [1] * 5)
    assert [len(frame) for frame in fake.frames] == [5, 5]
    assert fake.calls["StreamDecode"] == 1
    fake_client.release(caches)


def test_one_bad_item_leaves_its_neighbours_alone(fake: FakeServer, fake_client: Client) -> None:
    """The error says which cache it was; the others have moved."""
    caches = [fake_client.prefill(b"abc", policy=no_output()) for _ in range(3)]
    del fake.sequences[caches[1].handle.cache_id]
    with fake_client.stream() as stream:
        first, second, third = stream.try_decode(caches, [1, 2, 3], policy=greedy())
        assert isinstance(first, Output)
        assert isinstance(second, HandleNotFoundError)
        assert isinstance(third, Output)
        with pytest.raises(HandleNotFoundError) as caught:
            stream.decode(caches, [1, 2, 3], policy=greedy())
    assert "cache 1 of 3" in caught.value.__notes__[0]
    assert [cache.length for cache in caches] == [5, 3, 5]
    fake_client.release(caches)


def test_release_travels_with_the_frame(client: Client) -> None:
    """Losers go and winners move in one round trip."""
    with client.prefill([5, 6, 7], policy=no_output()) as cache, client.stream() as stream:
        winner, *losers = cache.fork(3)
        stream.decode([winner], [9], policy=no_output(), release=losers)
        assert all(loser.is_released for loser in losers)
        assert len(list(client.list_caches())) == 2
        stream.decode([], [], release=[winner])
        assert len(list(client.list_caches())) == 1


def test_broken_stream_sends_only_what_was_not_answered(fake: FakeServer, fake_client: Client) -> None:
    """A frame whose reply was lost is sent again and replayed: nothing is doubled."""
    caches = [fake_client.prefill(b"abc", policy=no_output()) for _ in range(2)]
    fake.failures["frame"] = [Failure(grpc.StatusCode.UNAVAILABLE, after=True)]
    outputs = fake_client.decode_many(caches, [1, 2], policy=greedy())
    assert [output.replayed for output in outputs] == [True, True]
    assert [fake.sequences[cache.handle.cache_id][3:] for cache in caches] == [[1], [2]]
    fake_client.release(caches)


def test_branching_appends_are_not_sent_twice(fake: FakeServer, fake_client: Client) -> None:
    """A fork whose reply was lost may have made a branch, so the caller hears of it."""
    with fake_client.prefill(b"abc", policy=no_output()) as cache, fake_client.stream() as stream:
        fake.failures["frame"] = [Failure(grpc.StatusCode.UNAVAILABLE, after=True)]
        with pytest.raises(UnavailableError):
            stream.decode([cache], [1], on_stale="fork", policy=no_output())
        assert len(fake.frames) == 1


def test_misuse_is_said_before_anything_is_sent(fake: FakeServer, fake_client: Client) -> None:
    """Sizes must agree, and a cache can be in a frame only once."""
    with fake_client.prefill(b"abc", policy=no_output()) as cache, fake_client.stream() as stream:
        with pytest.raises(ValueError, match="once"):
            stream.decode([cache, cache], [1, 2])
        with pytest.raises(ValueError, match=r"shorter|longer"):
            stream.decode([cache], [1, 2])
        with pytest.raises(ValueError, match="on_stale"):
            stream.decode([cache], [1], on_stale="panic")  # type: ignore[arg-type]
        assert fake.frames == []


def test_closed_stream_refuses(fake_client: Client) -> None:
    """After close, and after the client's close, there is one clear error."""
    with fake_client.prefill(b"abc", policy=no_output()) as cache:
        stream = fake_client.stream()
        stream.decode([cache], [1], policy=no_output())
        stream.close()
        stream.close()
        with pytest.raises(CallCancelledError, match="closed"):
            stream.decode([cache], [1])
    fake_client.close()
    with pytest.raises(ExecutorError, match="closed"):
        fake_client.status()


def test_forgotten_stream_leaves_no_thread(fake_client: Client) -> None:
    """A stream that nobody closed ends with its object."""
    with fake_client.prefill(b"abc", policy=no_output()) as cache:
        stream = fake_client.stream()
        stream.decode([cache], [1], policy=no_output())
        del stream
        gc.collect()
        wait_for(lambda: not list(threads_named("ferrule-stream")))
