"""Decode loops: what they yield, when they end, and that everything goes on well after them."""

from __future__ import annotations

import signal
import threading
from collections import Counter

import grpc
import pytest

from ferrule_client import BlocksExhaustedError, Client, DeadlineExceededError, Output, greedy, no_output, sample
from tests.client.fake_server import EOS, Failure, FakeServer, threads_named, wait_for

PROMPT = [5, 6, 7, 8]


def token_of(output: Output | None) -> int:
    """Return the chosen token; there must be one."""
    assert output is not None
    assert output.token is not None
    return output.token


def decode_by_hand(client: Client, num_tokens: int, seed: int | None) -> list[int]:
    """Return the tokens of a loop of unary decodes."""
    policy = greedy() if seed is None else sample(temperature=0.8, seed=seed)
    with client.prefill(PROMPT, policy=policy) as cache:
        tokens = [token_of(cache.last)]
        while len(tokens) < num_tokens:
            tokens.append(token_of(cache.decode(tokens[-1], policy=policy)))
    return tokens


@pytest.mark.parametrize("seed", [None, 0, 2**64 - 1])
def test_generate_draws_what_decoding_by_hand_draws(client: Client, seed: int | None) -> None:
    """The loop is nothing but decodes with server-side sampling."""
    temperature = 0.0 if seed is None else 0.8
    with client.prefill(PROMPT, policy=no_output()) as cache:
        loop = cache.generate(max_tokens=12, temperature=temperature, seed=seed)
        assert list(loop) == decode_by_hand(client, 12, seed)
        assert loop.finish_reason == "max_tokens"
        assert loop.tokens == list(loop.tokens)
        assert next(loop, None) is None


def test_handle_covers_all_but_the_newest_token(client: Client) -> None:
    """After each token the handle stands before it and the token is pending."""
    with client.prefill(PROMPT, policy=no_output()) as cache:
        for place, token in enumerate(cache.generate(max_tokens=5)):
            assert cache.length == len(PROMPT) + place
            assert cache.pending == (token,)


def test_two_loops_are_one_long_loop(client: Client) -> None:
    """A second loop goes on where the first one stopped, whatever way it stopped."""
    whole = decode_by_hand(client, 12, None)
    with client.prefill(PROMPT, policy=no_output()) as cache:
        parts = list(cache.generate(max_tokens=4, temperature=0))
        for token in cache.generate(temperature=0):
            parts.append(token)
            if len(parts) == 9:
                break
        parts += cache.generate(max_tokens=3, policy=greedy())
        assert parts == whole


def test_decode_after_a_loop_appends_the_whole_text(client: Client) -> None:
    """Loop, question, loop: the sequence holds every token once."""
    with client.prefill(PROMPT, policy=no_output()) as cache:
        said = list(cache.generate(max_tokens=4))
        cache.decode([20, 21], policy=no_output())
        said_more = list(cache.generate(max_tokens=3))
        assert cache.info(token_ids=True).token_ids == (*PROMPT, *said, 20, 21, *said_more[:-1])
        cache.query(no_output())
        assert cache.pending == ()
        assert cache.info(token_ids=True).token_ids[-1] == said_more[-1]


def test_fork_after_a_loop_takes_the_pending_token_along(client: Client) -> None:
    """Branches go on after the last token of the loop; a truncate drops it."""
    with client.prefill(PROMPT, policy=no_output()) as cache:
        said = list(cache.generate(max_tokens=4, temperature=0))
        branch, early = cache.fork()[0], cache.fork(length=4)[0]
        with branch, early:
            assert branch.pending == (said[-1],)
            assert early.pending == ()
            assert list(branch.generate(3, temperature=0)) == list(cache.generate(3, temperature=0))
            assert list(early.generate(4, temperature=0)) == said
        cache.truncate(cache.length)
        assert cache.pending == ()


def test_seed_is_drawn_once_and_can_be_read(client: Client) -> None:
    """A loop without a seed draws one, says which, and is repeated by it."""
    with client.prefill(PROMPT, policy=no_output()) as cache:
        branches = cache.fork(2)
        with branches[0] as first, branches[1] as second:
            loop = first.generate(max_tokens=8)
            tokens = list(loop)
            assert loop.output is not None
            seed = loop.output.seed
            assert seed is not None
            assert list(second.generate(max_tokens=8, seed=seed)) == tokens


def test_full_context_ends_the_loop(client: Client) -> None:
    """The end of the context is a reason to stop, not an error."""
    with client.prefill([1] * 508, policy=no_output()) as cache:
        loop = cache.generate()
        assert len(list(loop)) == 5
        assert loop.finish_reason == "context_full"
        assert cache.length == 512


def test_loop_needs_a_policy_that_chooses(client: Client) -> None:
    """Misuse is said before anything runs."""
    with client.prefill(PROMPT, policy=no_output()) as cache:
        with pytest.raises(ValueError, match="chooses"):
            cache.generate(policy=no_output())
        with pytest.raises(ValueError, match="not both"):
            cache.generate(policy=greedy(), temperature=1.0)
        assert list(cache.generate(max_tokens=0)) == []


def test_eos_ends_the_loop_and_is_yielded(fake: FakeServer, fake_client: Client) -> None:
    """The model's own end token is the last one; it can be ignored."""
    fake.text = [*b"abcd", EOS]
    with fake_client.prefill([*b"_____"], policy=no_output()) as cache:
        loop = cache.generate()
        assert list(loop) == [*b"abcd", EOS]
        assert loop.finish_reason == "eos"
        assert cache.pending == (EOS,)
        assert len(list(cache.generate(7, ignore_eos=True))) == 7


def test_stop_ids_end_the_loop(fake: FakeServer, fake_client: Client) -> None:
    """So do the caller's own."""
    with fake_client.prefill([*b"the"], policy=no_output()) as cache:
        loop = cache.generate(stop_ids=[ord("k")])
        assert bytes(loop) == b" quick"
        assert loop.finish_reason == "stop_token"


def test_loop_drives_one_stream(fake: FakeServer, fake_client: Client) -> None:
    """A loop costs one StreamDecode and one frame per token, and its threads end with it."""
    with fake_client.prefill([*b"the"], policy=no_output()) as cache:
        list(cache.generate(10))
    assert fake.calls["StreamDecode"] == 1
    assert Counter(len(frame) for frame in fake.frames) == {1: 10}
    wait_for(lambda: not list(threads_named("ferrule-stream")))


def test_text_never_holds_half_a_character(fake: FakeServer, fake_client: Client) -> None:
    """Characters of several tokens come out whole; an unfinished one at the end does not come out at all."""
    text = "naïve 日本語 🦀 end. "
    fake.text = list(text.encode())
    with fake_client.prefill(fake.text, policy=no_output()) as cache:
        pieces = list(cache.generate_text(len(fake.text)))
        assert "".join(pieces) == text
        assert "🦀" in pieces
        assert all("\ufffd" not in piece for piece in pieces)
        cut = cache.generate_text(4)
        assert "".join(cut) == "naï"
        assert len(cut.tokens) == 4
        assert cut.finish_reason == "max_tokens"
        split = cache.generate_text(4)
        assert "".join(split) == "ve "
    with fake_client.prefill(fake.text, policy=no_output()) as cache:
        assert "".join(cache.generate_text(3)) == "na"  # the third token is the first half of ï
        assert "".join(cache.generate_text(3)) == "ïve"


def test_end_token_is_not_text(fake: FakeServer, fake_client: Client) -> None:
    """What ends the text is in the tokens only."""
    fake.text = [*b"abcd", EOS]
    with fake_client.prefill([*b"_____"], policy=no_output()) as cache, cache.generate_text() as loop:
        assert "".join(loop) == "abcd"
        assert loop.tokens[-1] == EOS
        assert loop.finish_reason == "eos"


def test_broken_stream_is_resumed_without_doubling(fake: FakeServer, fake_client: Client) -> None:
    """Cut before or after the work, the loop goes on and every token is there once."""
    fake.failures["frame"] = [
        Failure(grpc.StatusCode.UNAVAILABLE),
        Failure(grpc.StatusCode.UNAVAILABLE, after=True),
        Failure(grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2", after=True),
    ]
    with fake_client.prefill([*b"the"], policy=no_output()) as cache:
        assert bytes(cache.generate(12)) == b" quick brown"
        assert bytes(fake.sequences[cache.handle.cache_id]) == b"the quick brow"
    assert fake.calls["StreamDecode"] == 4


def test_interrupted_loop_leaves_a_usable_cache(fake: FakeServer, fake_client: Client) -> None:
    """Ctrl-C while a token is under way: the append that was cut off is made certain before the next one."""
    fake.delay_s = 0.05
    with fake_client.prefill([*b"the"], policy=no_output()) as cache:
        tokens: list[int] = []
        loop = cache.generate()
        tokens += [next(loop) for _ in range(3)]
        fake.delay_s = 0.6
        interrupt = (threading.main_thread().ident or 0, signal.SIGINT)
        threading.Timer(0.2, signal.pthread_kill, interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            next(loop)
        fake.delay_s = 0.0
        assert bytes(tokens) == b" qu"
        wait_for(lambda: len(fake.sequences[cache.handle.cache_id]) == 6)
        cache.decode(list(b"!"), policy=no_output())
        assert bytes(fake.sequences[cache.handle.cache_id]) == b"the qu!"


def test_slow_step_meets_the_timeout(fake: FakeServer, fake_client: Client) -> None:
    """The timeout bounds each token, and the cache goes on afterwards."""
    with fake_client.prefill([*b"the"], policy=no_output()) as cache:
        loop = cache.generate(timeout=0.3)
        assert next(loop) == ord(" ")
        fake.delay_s = 0.8
        with pytest.raises(DeadlineExceededError):
            next(loop)
        assert loop.finish_reason == "closed"
        fake.delay_s = 0.0
        assert bytes(cache.generate(5)) == b"quick"


def test_failed_item_raises_and_loses_nothing(fake: FakeServer, fake_client: Client) -> None:
    """An item's own error ends the loop; what was yielded is still there to go on from."""
    with fake_client.prefill([*b"the"], policy=no_output()) as cache:
        fake.failures["frame"] = [Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "no block", reason="KV_BLOCKS_EXHAUSTED")]
        with pytest.raises(BlocksExhaustedError):
            list(cache.generate(5))
        assert bytes(cache.generate(6)) == b" quick"
