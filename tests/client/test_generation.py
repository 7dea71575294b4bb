"""Decode loops: what they yield, when they end, and that everything goes on well after them."""

from __future__ import annotations

import dataclasses
import pickle
import signal
import threading

import grpc
import pytest

from ferrule import Cache, Client, Policy, greedy, sample
from ferrule.errors import (
    BlocksExhaustedError,
    ContextExceededError,
    DeadlineExceededError,
    HandleStaleError,
    InvalidRequestError,
    MaskUnknownError,
    PendingTokenError,
    TruncateBeyondError,
    UnavailableError,
)
from ferrule.types import TokenMask, WithText
from tests.client.fake_server import EOS, Failure, FakeServer, threads_named, wait_for

PROMPT = [5, 6, 7, 8]


def held(cache: Cache) -> bytes:
    """Return the pending token as bytes: one, or none."""
    return b"" if cache.pending is None else bytes([cache.pending])


def held_ids(cache: Cache) -> list[int]:
    """Return the pending token as a list: of one, or none."""
    return [] if cache.pending is None else [int(cache.pending)]


def decode_by_hand(client: Client, num_tokens: int, seed: int | None) -> list[int]:
    """Return the tokens of a loop of unary decodes."""
    policy = greedy() if seed is None else sample(temperature=0.8, seed=seed)
    with client.prefill(PROMPT, policy=policy) as cache:
        tokens = [cache.last.token]
        while len(tokens) < num_tokens:
            tokens.append(cache.append(tokens[-1], policy=policy).token)
    return list(map(int, tokens))


@pytest.mark.parametrize("seed", [None, 0, 2**64 - 1])
def test_generate_draws_what_decoding_by_hand_draws(client: Client, seed: int | None) -> None:
    """The loop is nothing but decodes with server-side sampling."""
    temperature = 0.0 if seed is None else 0.8
    with client.prefill(PROMPT) as cache:
        loop = cache.generate(max_tokens=12, policy=sample(temperature=temperature, seed=seed))
        assert list(loop) == decode_by_hand(client, 12, seed)
        assert loop.finish_reason == "max_tokens"
        assert loop.tokens == list(loop.tokens)
        assert next(loop, None) is None


@pytest.mark.parametrize("name", ["text", "tokens", "cached_tokens", "output"])
def test_what_only_a_run_fills_is_refused_before_it(client: Client, name: str) -> None:
    """An empty text would look like an answer; afterwards each is there."""
    with client.prefill(PROMPT) as cache:
        for loop in (client.generate(PROMPT, 3, keep=True), cache.generate(3)):
            loop._plan = dataclasses.replace(loop._plan, has_text=True)  # the reference server has no tokenizer
            with pytest.raises(RuntimeError, match=r"has not run: call read\(\), or iterate"):
                getattr(loop, name)
            loop._plan = dataclasses.replace(loop._plan, has_text=False)
            assert loop.finish_reason is None
            assert len(loop.read().tokens) == 3
            assert loop.output.token == loop.tokens[-1]
            client.release(loop.caches[-1:])


def test_a_loop_that_will_not_run_is_empty(client: Client) -> None:
    """With nothing to draw, or closed before its first token."""
    with client.generate(PROMPT, 5) as closed:
        pass
    for loop in (client.generate(PROMPT, 0, text=True), closed):
        assert (loop.tokens, loop.cached_tokens) == ([], 0)
    assert client.generate(PROMPT, 0, text=True).text == ""


def test_a_loop_says_how_far_it_is(client: Client) -> None:
    """Nothing that it shows is secret."""
    loop = client.generate(PROMPT, 3, n=2, policy=greedy(), ignore_eos=True)
    assert repr(loop) == "Generation(not run)"
    next(loop)
    assert repr(loop) == "Generation(1 tokens, running; 0 tokens, running)"
    assert repr(loop.read()) == "Generation(3 tokens, max_tokens; 3 tokens, max_tokens)"
    assert repr(loop.branches[1]) == "Branch(1, 3 tokens, max_tokens)"
    assert repr(client.generate(PROMPT, 0)) == "Generation(0 tokens, max_tokens)"


def test_no_repr_shows_the_secret_of_a_handle(client: Client) -> None:
    """Logs show the loggable id instead."""
    with client.prefill(PROMPT, policy=greedy()) as cache, cache.fork(2) as branches:
        shown = [cache, cache.handle, cache.last, cache.pending, cache.generate(2), branches, client]
        texts = list(map(repr, shown))
        assert f"Cache({cache.handle.handle_id}, length=4, " in texts[0]
        for secret in (cache.handle.cache_id, *(branch.handle.cache_id for branch in branches)):
            assert not [text for text in texts if secret in text]


def test_two_loops_are_one_long_loop(client: Client) -> None:
    """A second loop goes on where the first one stopped, whatever way it stopped."""
    whole = decode_by_hand(client, 12, None)
    with client.prefill(PROMPT) as cache:
        parts = list(cache.generate(max_tokens=4, policy=greedy()))
        for token in cache.generate(policy=greedy()):
            parts.append(token)
            if len(parts) == 9:
                break
        parts += cache.generate(max_tokens=3, policy=greedy())
        assert parts == whole


def test_seed_is_drawn_once_and_can_be_read(client: Client) -> None:
    """A loop without a seed draws one, says which, and is repeated by it."""
    with client.prefill(PROMPT) as cache:
        branches = cache.fork(2)
        with branches[0] as first, branches[1] as second:
            loop = first.generate(max_tokens=8)
            tokens = list(loop)
            seed = loop.output.seed
            assert seed is not None
            assert list(second.generate(max_tokens=8, policy=sample(seed=seed))) == tokens


def test_full_context_ends_the_loop(client: Client) -> None:
    """The end of the context is a reason to stop, not an error."""
    with client.prefill([1] * 508) as cache:
        loop = cache.generate()
        assert len(list(loop)) == 5
        assert loop.finish_reason == "context_full"
        assert cache.length == 512


@pytest.mark.parametrize("n", [1, 2])
def test_prompt_that_does_not_fit_is_an_error(client: Client, n: int) -> None:
    """Nothing of it was run, so that it is no generation that has ended."""
    with pytest.raises(ContextExceededError):
        client.generate([1] * 513, 5, n=n).read()


def test_tokens_that_do_not_fit_are_an_error(client: Client) -> None:
    """Nothing is appended, nothing gets lost, and shorter ones go on from there."""
    with client.prefill([1] * 500) as cache:
        pending = list(cache.generate(1, policy=greedy()))
        loop = cache.generate(5, tokens=[5] * 20)
        with pytest.raises(ContextExceededError):
            loop.read()
        assert (loop.tokens, loop.finish_reason) == ([], "error")
        assert cache.length == 500
        assert [cache.pending] == pending[-1:]
        assert cache.info().handle.length == 500
        assert len(cache.generate(2, tokens=[5] * 5).read().tokens) == 2
        assert cache.info(token_ids=True).token_ids[500:506] == (*pending, *[5] * 5)


def test_full_context_without_room_for_one_token_is_an_error(client: Client) -> None:
    """A loop that can append nothing, and draw nothing, says so by an error."""
    with client.prefill([1] * 508) as cache:
        assert cache.generate().read().finish_reason == "context_full"
        with pytest.raises(ContextExceededError):
            next(cache.generate())
        assert cache.length == 512


def test_loop_needs_a_policy_that_chooses(client: Client) -> None:
    """Misuse is said before anything runs."""
    with client.prefill(PROMPT) as cache:
        with pytest.raises(ValueError, match="chooses"):
            cache.generate(policy=Policy(top_logprobs=1))
        assert list(cache.generate(max_tokens=0)) == []


def test_eos_ends_the_loop_and_is_no_text(fake: FakeServer, fake_client: Client) -> None:
    """The model's own end token is the last of the tokens only; it can be ignored."""
    fake.text = [*b"abcd", EOS]
    with fake_client.prefill([*b"_____"]) as cache:
        loop = cache.generate()
        assert "".join(loop.pieces()) == "abcd"
        assert loop.tokens == [*b"abcd", EOS]
        assert loop.finish_reason == "eos"
        assert cache.pending == EOS
        assert len(list(cache.generate(7, ignore_eos=True))) == 7


def test_stop_ids_end_the_loop(fake: FakeServer, fake_client: Client) -> None:
    """So do the caller's own."""
    with fake_client.prefill([*b"the"]) as cache:
        loop = cache.generate(stop=[ord("k")])
        assert bytes(loop) == b" quick"
        assert loop.finish_reason == "stop_token"


def test_loop_is_one_call(fake: FakeServer, fake_client: Client) -> None:
    """A loop costs one Generate, and its thread ends with it."""
    with fake_client.prefill([*b"the"]) as cache:
        assert len(cache.generate(10).read().tokens) == 10
    assert fake.calls == {"Prefill": 1, "Generate": 1, "ReleaseCache": 1}
    wait_for(lambda: not list(threads_named("ferrule-replies")))


def test_text_never_holds_half_a_character(fake: FakeServer, fake_client: Client) -> None:
    """Characters of several tokens come out whole; an unfinished one at the end does not come out at all."""
    text = "naïve 日本語 🦀 end. "
    fake.text = list(text.encode())
    with fake_client.prefill(fake.text) as cache:
        pieces = list(cache.generate(len(fake.text)).pieces())
        assert "".join(pieces) == text
        assert "🦀" in pieces
        assert all("\ufffd" not in piece for piece in pieces)
        cut = cache.generate(4)
        assert "".join(cut.pieces()) == "naï"
        assert len(cut.tokens) == 4
        assert cut.finish_reason == "max_tokens"
        assert "".join(cache.generate(4).pieces()) == "ve "
    with fake_client.prefill(fake.text) as cache:
        assert "".join(cache.generate(3).pieces()) == "na"  # the third token is the first half of ï
        assert "".join(cache.generate(3).pieces()) == "ïve"


@pytest.mark.parametrize("tokens_per_frame", [1, 3])
def test_broken_generation_is_resumed_without_doubling(
    fake: FakeServer, fake_client: Client, tokens_per_frame: int
) -> None:
    """Cut before or after the work, the loop goes on and every token is there once."""
    fake.tokens_per_frame = tokens_per_frame
    fake.failures["Generate"] = [Failure(grpc.StatusCode.UNAVAILABLE)]
    fake.failures["token"] = [
        Failure(grpc.StatusCode.UNAVAILABLE),
        Failure(grpc.StatusCode.UNAVAILABLE, after=True),
        Failure(grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2", after=True),
    ]
    with fake_client.prefill([*b"the"]) as cache:
        assert bytes(cache.generate(12)) == b" quick brown"
        assert bytes(fake.sequences[cache.handle.cache_id]) == b"the quick brow"
        assert (cache.length, held(cache), cache._tip.is_ahead) == (14, b"n", False)
    assert fake.calls["Generate"] == 5


@pytest.mark.parametrize("tokens_per_frame", [1, 4])
def test_text_ends_before_its_stop(fake: FakeServer, fake_client: Client, tokens_per_frame: int) -> None:
    """Unless it is wanted as drawn; all tokens are there, and what is no stop after all comes too."""
    fake.text, fake.tokens_per_frame = [*b"a store. a stop. "], tokens_per_frame
    kinds: list[tuple[WithText, str]] = [(True, "a store. a "), ("as_drawn", "a store. a stop")]
    for text, expected in kinds:
        loop = fake_client.generate(fake.text, text=text, stop=["stop", "never"]).read()
        assert (loop.text, loop.finish_reason) == (expected, "stop_sequence")
        assert bytes(loop.tokens) == b"a store. a stop"
        assert fake.generates[-1].include_stop_text == (text == "as_drawn")
    with fake_client.generate(fake.text, stop="stop") as loop:
        assert "".join(loop.pieces()) == "a store. a "
    assert fake_client.generate(fake.text, 5, stop="stop", text=True).read().text == "a sto"
    with pytest.raises(ValueError, match="text must be one of"):
        fake_client.generate(fake.text, text="whole")  # type: ignore[arg-type]


@pytest.mark.parametrize("num_frames", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens_per_frame", [1, 3])
def test_text_that_was_held_back_survives_a_break(
    fake: FakeServer, fake_client: Client, tokens_per_frame: int, num_frames: int
) -> None:
    """Also where a loop goes on from its newest token, as its first frame had several: the new call knows no text."""
    fake.text, fake.tokens_per_frame = list("a store, ein Stövchen. ".encode()), tokens_per_frame
    fake.failures_after_frames["token"] = num_frames
    fake.failures["token"] = [Failure(grpc.StatusCode.UNAVAILABLE)]
    loop = fake_client.generate(fake.text, 22, stop=["store!", "Stövn"], text=True, policy=greedy())
    assert "".join(loop.pieces()) == loop.text == "a store, ein Stövchen"
    assert bytes(loop.tokens).decode() == loop.text
    assert fake.calls["Generate"] == 2


def test_text_after_half_a_character_ends_before_its_stop(fake: FakeServer, fake_client: Client) -> None:
    """The rest of a character is part of the first piece, and what the server holds back is not there twice."""
    fake.text = list("naïve stores. ".encode())
    for stop, expected in (("ve sto", "ï"), ("ve st!", "ïve stores."), ("never", "ïve stores.")):
        for fake.tokens_per_frame in (1, 5, 20):
            with fake_client.prefill(fake.text) as cache:
                cache.generate(3).read()
                assert "".join(cache.generate(11, stop=stop).pieces()) == expected


@pytest.mark.parametrize("num_frames", [1, 2, 5, 6])
def test_text_and_stops_go_on_over_a_break(fake: FakeServer, fake_client: Client, num_frames: int) -> None:
    """Half a character, and a stop that began before the break, are none the worse for it: the rest is told as one."""
    fake.text = list("naïve 日本語 end. ".encode())
    with fake_client.prefill(fake.text) as cache:
        fake.failures_after_frames["token"] = num_frames
        fake.failures["token"] = [Failure(grpc.StatusCode.UNAVAILABLE)]
        loop = cache.generate(text=True, stop=["語 e"], policy=sample(seed=1))
        pieces = [token.text for token in loop]
        assert "".join(pieces) == loop.text == "naïve 日本"
        assert loop.finish_reason == "stop_sequence"
        assert bytes(loop.tokens).decode() == "naïve 日本語 e"
        assert fake.calls["Generate"] == 2
        assert fake.sequences[cache.handle.cache_id] == [*fake.text, *loop.tokens[:-1]]


def test_a_whole_loop_among_tokens_drawn_before_leaves_the_cache_usable(client: Client) -> None:
    """It is answered out of what a loop that was left early had drawn, and ends before its end."""
    with client.prefill(PROMPT) as cache:
        said = list(client.generate(PROMPT, 60, policy=greedy()))
        loop = cache.generate(60, policy=greedy())
        next(loop)
        drawn_by(client, cache, len(PROMPT) + 20)
        assert [*held_ids(cache), *cache.generate(9, policy=greedy())] == said[:10]
        assert [*held_ids(cache), *cache.generate(4, policy=greedy())] == said[9:14]
        output = cache.append([1, 2])
        assert not output.replayed
        text = [*PROMPT, *said[:14], 1, 2]
        assert list(cache.info(token_ids=True).token_ids) == text == cache.token_ids


def test_once_what_was_drawn_before_is_dropped_a_loop_ends_at_the_tip(client: Client) -> None:
    """So that somebody else's tokens behind it are told and not dropped."""
    with client.prefill(PROMPT) as cache:
        loop = cache.generate(60, policy=greedy())
        next(loop)
        drawn_by(client, cache, len(PROMPT) + 20)
        assert len(list(cache.generate(3, tokens=[1, 2], policy=greedy()))) == 3
        other = client.adopt(cache.handle, keep_alive=False)
        other.append([3, 4])
        other.detach()
        with pytest.raises(HandleStaleError):
            cache.append([5, 6])


def drawn_by(client: Client, cache: Cache, length: int) -> None:
    """Wait until the server has drawn so far ahead."""
    other = client.adopt(cache.handle, keep_alive=False)
    wait_for(lambda: other.info().handle.length >= length)
    other.detach()


@pytest.mark.parametrize("tokens_per_frame", [1, 4])
@pytest.mark.parametrize("place", range(1, 9))
def test_every_place_of_a_frame_is_a_good_one_to_leave(
    fake: FakeServer, fake_client: Client, place: int, tokens_per_frame: int
) -> None:
    """Several tokens of one frame share a handle; truncates, forks and appends between them are exact all the same."""
    fake.tokens_per_frame = tokens_per_frame
    fake.text = list(range(50, 70))
    said = [fake.text[(3 + n) % 20] for n in range(place)]
    with fake_client.prefill([1, 2, 3]) as cache:

        def speak() -> None:
            for _, token in zip(range(place), cache.generate(12), strict=False):
                assert cache.pending == token
                assert cache.token_ids == [1, 2, 3, *said[: cache.length - 3]]

        speak()
        assert (cache.length, cache.token_ids) == (2 + place, [1, 2, 3, *said[:-1]])
        with cache.fork() as branch, cache.fork(length=cache.length) as early:
            assert (branch.handle.length, branch.pending) == (2 + place, cache.pending)
            assert (early.handle.length, early.pending) == (2 + place, None)
            assert fake.sequences[early.handle.cache_id] == [1, 2, 3, *said[:-1]]
        cache.truncate(cache.length)
        assert (cache.handle.length, cache.pending, cache.token_ids) == (2 + place, None, [1, 2, 3, *said[:-1]])
        cache.truncate(3)
        speak()
        cache.append(9)
        assert fake.sequences[cache.handle.cache_id] == cache.token_ids == [1, 2, 3, *said, 9]


def test_what_is_refused_within_a_frame_changes_nothing(fake: FakeServer, fake_client: Client) -> None:
    """The handle covers tokens that nobody has seen, and they are no place to cut or to branch at."""
    fake.tokens_per_frame = 4
    with fake_client.prefill([1, 2, 3]) as cache:
        loop = cache.generate(8)
        said = [next(loop), next(loop)]
        assert cache.handle.length > cache.length + 1
        with pytest.raises(TruncateBeyondError, match="cannot truncate to 5 tokens: lengths go from 1 to 4"):
            cache.truncate(cache.length + 1)
        with pytest.raises(InvalidRequestError, match="length: 5 is outside"):
            cache.fork(length=cache.length + 1)
        with pytest.raises(PendingTokenError):
            cache.append(int(said[-1]))
        assert fake.calls["TruncateKv"] == 0
        assert [*said, *loop] == [fake.text[(3 + n) % len(fake.text)] for n in range(8)]
        assert fake.calls["Generate"] == 1


@pytest.mark.parametrize("use", ["append", "fork", "same", "shorter"])
def test_a_frame_is_dropped_though_nobody_answers(fake: FakeServer, use: str) -> None:
    """An append that begins with it fails, and the handle is stale; what comes next goes on all the same."""
    fake.tokens_per_frame = 4
    with Client(fake.target, max_retries=0) as client, client.prefill([1, 2, 3]) as cache:
        loop = cache.generate(12)
        said = [next(loop) for _ in range(3)]
        fake.failures["TruncateKv"] = [Failure(grpc.StatusCode.UNAVAILABLE, "Socket closed", after=True)]
        with pytest.raises(UnavailableError):
            cache.append(9)
        assert (cache.token_ids, cache.pending) == ([1, 2, 3, *said[:-1]], said[-1])
        if use == "append":
            cache.append(9)
            assert cache.token_ids == [1, 2, 3, *said, 9]
        elif use == "fork":
            with cache.fork() as branch:
                assert (branch.token_ids, branch.pending) == ([1, 2, 3, *said[:-1]], said[-1])
        else:
            cache.truncate(cache.length if use == "same" else 4)
            assert (cache.token_ids, cache.pending) == ([1, 2, 3, *said[: 2 if use == "same" else 1]], None)
        assert fake.sequences[cache.handle.cache_id] == cache.token_ids


def test_moving_the_cache_in_the_loop_goes_on_from_there(fake: FakeServer, fake_client: Client) -> None:
    """A caller may put tokens of its own in between."""
    fake.delay_s = 0.01
    with fake_client.prefill([*b"the"]) as cache:
        said = []
        for token in cache.generate(8):
            said.append(token)
            if len(said) == 4:
                cache.append([*b"__"])
        assert bytes(said) == b" quik br"[:4] + b" bro"
        assert bytes(fake.sequences[cache.handle.cache_id]) == b"the qui__ br"


def test_branches_have_caches_of_their_own(fake: FakeServer, fake_client: Client) -> None:
    """As many as asked for, each with its tokens, its text and its end."""
    for fake.tokens_per_frame in (1, 3):
        with fake_client.prefill([*b"the"]) as cache:
            loop = cache.generate(6, n=3, text=True, policy=sample(seed=2**64 - 1))
            tokens = list(loop)
            assert {token.index for token in tokens} == {0, 1, 2}
            assert loop.caches[0] is cache
            for branch in loop.branches:
                assert bytes(branch.tokens) == b" quick" == branch.text.encode()
                assert branch.tokens == [token for token in tokens if token.index == branch.index]
                assert (branch.finish_reason, branch.seed) == ("max_tokens", (2**64 - 1 + branch.index) % 2**64)
                assert bytes(branch.cache.token_ids or []) == b"the quic"
                assert held(branch.cache) == b"k"
                branch.cache.append([*b"!"])
                assert bytes(fake.sequences[branch.cache.handle.cache_id]) == b"the quick!"
            fake_client.release(loop.caches[1:])


def test_branches_left_early_are_exact(fake: FakeServer, fake_client: Client) -> None:
    """Also in the middle of the first frame of a new branch."""
    fake.tokens_per_frame = 4
    for place in range(1, 13):
        with fake_client.prefill([*b"the"]) as cache:
            loop = cache.generate(8, n=2)
            for _ in range(place):
                next(loop)
            for branch in loop.branches:
                if branch.has_cache:
                    assert bytes(branch.cache.token_ids or []) == (b"the" + bytes(branch.tokens))[: branch.cache.length]
                    assert held_ids(branch.cache) == branch.tokens[-1:]
                    branch.cache.append([*b"!"])
                    text = bytes(fake.sequences[branch.cache.handle.cache_id])
                    assert text == b"the" + bytes(branch.tokens) + b"!" == bytes(branch.cache.token_ids or [])
            fake_client.release(loop.caches[1:])


def test_branches_are_resumed_one_by_one(fake: FakeServer, fake_client: Client) -> None:
    """After a break each goes on by a call of its own, from where it was."""
    fake.failures_after_frames["token"] = 3
    fake.failures["token"] = [Failure(grpc.StatusCode.UNAVAILABLE, after=True)]
    with fake_client.prefill([*b"the"]) as cache:
        loop = cache.generate(9, n=3, policy=sample(seed=7))
        with loop:
            list(loop)
            assert [bytes(branch.tokens) for branch in loop.branches] == [b" quick br"] * 3
        requests = fake.generates[1:]
        (max_tokens,) = {request.max_tokens for request in requests}
        assert 6 <= max_tokens < 9  # frames just before the break may be lost
        # They are sent in order, and taken up by threads of the server in any.
        assert sorted(request.logits_policy.sample.seed for request in requests) == [7, 8, 9]
        fake_client.release(loop.caches[1:])


def test_one_liner_makes_and_ends_its_sequence(fake: FakeServer, fake_client: Client) -> None:
    """A prompt in, tokens out, nothing left behind; or kept, to go on with."""
    assert "".join(token.text for token in fake_client.generate("the", 6)) == " quick"
    assert fake.sequences == {}
    assert bytes(fake_client.generate([*b"the"], 6)) == b" quick"
    with fake_client.generate("the", 60) as loop:
        assert next(loop).text == " "
    assert fake.sequences == {}
    with fake_client.generate("the", 6, n=2, keep=True) as loop:
        loop.read()
    with loop.caches as caches:
        _, second = caches
        assert bytes(second.token_ids or []) == b"the quic"
        assert bytes(second.generate(6)) == b" brown"
    assert fake.calls["Prefill"] == 0


def test_creation_is_repeated_only_where_that_is_safe(fake: FakeServer, fake_client: Client) -> None:
    """One sequence, however often the connection breaks; and an error where the server does not know request ids."""
    fake.failures["Generate"] = [Failure(grpc.StatusCode.UNAVAILABLE, after=True)]
    with pytest.raises(UnavailableError):
        fake_client.generate("the", 3).read()
    fake.sequences.clear()
    fake.has_request_ids = True
    with Client(fake.target) as client:
        fake.failures["Generate"] = [Failure(grpc.StatusCode.UNAVAILABLE, after=True)]
        with client.generate("the", 3, keep=True) as loop:
            loop.read()
        assert len(fake.sequences) == 1
        client.release(loop.caches)


def test_dropped_mask_is_registered_again(fake: FakeServer, fake_client: Client) -> None:
    """A server that has forgotten a mask gets it once more, in the middle of what needs it."""
    mask = fake_client.register_mask(b"\xff" * 33)
    with fake_client.prefill([*b"the"]) as cache:
        fake.masks.clear()
        assert bytes(cache.generate(3, policy=greedy(mask=mask))) == b" qu"
        assert fake.calls["RegisterTokenMask"] == 2
        fake.masks.clear()
        stranger = TokenMask(bits=b"\x01" * 33, fingerprint=b"unknown to client")
        with pytest.raises(MaskUnknownError):
            list(cache.generate(3, policy=greedy(mask=stranger)))
        assert bytes(cache.generate(3, policy=greedy())) == b"ick"


def test_refused_generation_changes_nothing(fake: FakeServer, fake_client: Client) -> None:
    """A clear no leaves no doubt: the next append is a plain one."""
    with fake_client.prefill([*b"the"]) as cache:
        fake.failures["Generate"] = [Failure(grpc.StatusCode.INVALID_ARGUMENT, "no", reason="INVALID_FIELD")]
        with pytest.raises(InvalidRequestError):
            list(cache.generate(3, tokens=[*b"!!"]))
        assert (cache.length, cache.pending, cache._tip.is_ahead, cache._tip.running) == (3, None, False, None)
        fake.sequences[cache.handle.cache_id].append(1)
        with pytest.raises(HandleStaleError):
            list(cache.generate(3))
        assert not cache._tip.is_ahead
        assert bytes(cache.generate(3, on_stale="rewind")) == b"qui"


def test_tokens_go_in_first(fake: FakeServer, fake_client: Client) -> None:
    """A question and its answer are one call, behind what was pending."""
    with fake_client.prefill([*b"the"]) as cache:
        cache.generate(2).read()
        fake.failures["Generate"] = [Failure(grpc.StatusCode.UNAVAILABLE, after=True)]
        assert len(list(cache.generate(3, tokens=[*b"?! "]))) == 3
        assert bytes(fake.sequences[cache.handle.cache_id]) == b"the q?! k "


def test_memory_that_runs_out_is_an_error_and_the_tokens_are_kept(fake: FakeServer, fake_client: Client) -> None:
    """It must not look like a text that is done; and one branch of several does not end the others."""
    with fake_client.prefill([*b"the"]) as cache:
        fake.failures["append"] = [Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, reason="KV_BLOCKS_EXHAUSTED")]
        loop = cache.generate(9)
        with pytest.raises(BlocksExhaustedError):
            list(loop)
        assert (bytes(loop.tokens), loop.finish_reason) == (b" ", "kv_blocks_exhausted")
        assert bytes(cache.generate(5)) == b"quick"
        fake.failures["append"] = [Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, reason="KV_BLOCKS_EXHAUSTED")]
        loop = cache.generate(6, n=2).read()
        failed, other = loop.branches
        assert isinstance(failed.error, BlocksExhaustedError)
        assert (bytes(other.tokens), other.finish_reason, other.error) == (b" brown", "max_tokens", None)
        fake_client.release(loop.caches[1:])


def test_memory_that_runs_out_for_all_branches_is_an_error(fake: FakeServer, fake_client: Client) -> None:
    """However many there are; what each had drawn can be read."""
    full = Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, reason="KV_BLOCKS_EXHAUSTED")
    for n in (1, 3):
        fake.failures["append"] = [full] * n
        loop = fake_client.generate([*b"the"], 9, n=n)
        with pytest.raises(BlocksExhaustedError, match="in branches"):
            loop.read()
        assert [branch.finish_reason for branch in loop.branches] == ["kv_blocks_exhausted"] * n
        assert all(branch.tokens for branch in loop.branches)
        assert fake.sequences == {}


def test_generation_tells_what_the_prefix_cache_had(client: Client) -> None:
    """Whole blocks of a prompt that was there before, told for each branch."""
    prompt = list(range(130, 170))
    assert client.generate(prompt, 2).read().cached_tokens == 0
    again = client.generate(prompt, 2, n=2).read()
    assert again.cached_tokens == again.branches[0].cached_tokens == 32
    assert client.generate(prompt, 2, reuse_prefix=False).read().cached_tokens == 0


def test_mask_of_another_process_goes_by_its_fingerprint(fake_client: Client, client: Client) -> None:
    """Its name is all that travels; this client cannot register it anew."""
    name = client.register_mask([5, 9]).fingerprint
    mask = pickle.loads(pickle.dumps(TokenMask(fingerprint=name)))
    assert set(client.generate(PROMPT, 6, policy=sample(mask=mask)).read().tokens) <= {5, 9}
    with pytest.raises(MaskUnknownError):
        client.generate(PROMPT, 6, policy=sample(mask=TokenMask(fingerprint=b"0" * 16))).read()
    with pytest.raises(ValueError, match="fingerprint alone"):
        client.register_mask(mask)
    with pytest.raises(ValueError, match="needs"):
        TokenMask()


def test_token_is_an_int_that_knows_more(client: Client) -> None:
    """It can be used as the id it is, and has what the policy asked for."""
    with client.prefill(PROMPT) as cache:
        policy = sample(seed=3, logprobs=True, top_logprobs=2, entropy=True)
        token = next(cache.generate(2, policy=policy))
        assert isinstance(token, int)
        assert token.logprob < 0
        assert token.sampled_logprob <= 0
        assert len(token.top_logprobs) == 2
        assert token.output.entropies.shape == (1,)
        assert token.output.seed == 3
        again = pickle.loads(pickle.dumps(token))
        assert (again, again.text, again.output.tokens) == (token, "", (token,))


def test_interrupted_loop_leaves_a_usable_cache(fake: FakeServer, fake_client: Client) -> None:
    """Ctrl-C while a token is under way: what the server draws meanwhile is dropped by the next append."""
    fake.delay_s = 0.05
    with fake_client.prefill([*b"the"]) as cache:
        loop = cache.generate()
        tokens = [next(loop) for _ in range(3)]
        fake.delay_s = 0.6
        interrupt = (threading.main_thread().ident or 0, signal.SIGINT)
        threading.Timer(0.2, signal.pthread_kill, interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            tokens.extend(loop)
        fake.delay_s = 0.0
        said = bytes(tokens)
        assert b" quick brown".startswith(said)
        wait_for(lambda: len(fake.sequences[cache.handle.cache_id]) >= 3 + len(said))
        cache.append(list(b"!"))
        assert bytes(fake.sequences[cache.handle.cache_id]) == b"the" + said + b"!"


def test_slow_step_meets_the_timeout(fake: FakeServer, fake_client: Client) -> None:
    """The timeout bounds each token, and the cache goes on afterwards."""
    with fake_client.prefill([*b"the"]) as cache:
        fake.delay_s = 0.05
        loop = cache.generate(timeout=0.3)
        assert next(loop) == ord(" ")
        fake.delay_s = 0.8
        said = [ord(" ")]
        with pytest.raises(DeadlineExceededError):
            said.extend(loop)
        assert loop.finish_reason == "closed"
        fake.delay_s = 0.0
        assert b" quick brown fox".startswith(bytes(said))
        assert bytes(said) + bytes(cache.generate(16 - len(said))) == b" quick brown fox"
