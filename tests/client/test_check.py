"""Arguments: what is wrong is said by name, before anything is sent."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest

from ferrule import Client, Handle, Policy, greedy, logits, sample
from ferrule.types import Append
from ferrule_client._check import token_list
from tests.client.fake_server import FakeServer

WRONG_TOKENS = [
    "123",
    b"ab",
    bytearray(b"a"),
    1.5,
    [1.0],
    [1, "2"],
    np.array([5.0, 6.0]),
    np.array([True]),
    None,
    [[1]],
]


@pytest.mark.parametrize(
    ("tokens", "ids"),
    [
        (7, [7]),
        ([1, 2], [1, 2]),
        (range(3), [0, 1, 2]),
        ((), []),
        (np.int64(7), [7]),
        ([np.uint8(7)], [7]),
        (np.array([5, 6], np.uint16), [5, 6]),
        (np.array(5), [5]),
        (np.array([]), []),
        (2**32 - 1, [2**32 - 1]),
    ],
)
def test_integers_of_every_kind_are_tokens(tokens: object, ids: list[int]) -> None:
    """One or several, plain or numpy."""
    assert token_list(tokens) == ids
    assert all(type(i) is int for i in token_list(tokens))


@pytest.mark.parametrize("tokens", WRONG_TOKENS, ids=repr)
def test_other_things_are_no_tokens(tokens: object) -> None:
    """Neither texts, nor bytes, nor floats are converted silently."""
    with pytest.raises(TypeError, match=r"token ids must be integers; use client.tokenize\(text\)"):
        token_list(tokens)


@pytest.mark.parametrize("tokens", [-1, [3, -2], np.array([-1]), 2**32])
def test_tokens_fit_the_wire(tokens: object) -> None:
    """The server knows the vocabulary; the wire holds 32 bits."""
    with pytest.raises(ValueError, match="negative"):
        token_list(tokens)


def test_a_prompt_may_be_a_text(fake: FakeServer, fake_client: Client) -> None:
    """Encoded by the server as ``tokenize`` does, so the cache is that of its tokens."""
    with fake_client.prefill("the") as cache:
        assert cache.token_ids == fake_client.tokenize("the") == list(fake.prompts[-1].input_ids)


def test_every_way_in_checks_tokens(fake: FakeServer, fake_client: Client) -> None:
    """Prefill, decode, streams, loops and the tokenizer; the cache is as before."""
    with fake_client.prefill([1]) as cache, fake_client.stream() as stream:
        calls: list[Callable[[], object]] = [
            lambda: fake_client.prefill(b"def f"),
            lambda: cache.append(["1", "2"]),  # type: ignore[list-item]
            lambda: cache.append(1.5),  # type: ignore[arg-type]
            lambda: stream.run([Append(cache, b"ab")]),
            lambda: cache.generate(stop=[b"abc", [1.5]]),  # type: ignore[list-item]
            lambda: list(cache.generate(2, tokens=[1.5])),  # type: ignore[list-item]
            lambda: cache.verify("ab", tokens=1),  # type: ignore[arg-type]
            lambda: fake_client.detokenize("123"),  # type: ignore[arg-type]
            lambda: greedy(mask="12"),  # type: ignore[arg-type]
        ]
        for call in calls:
            with pytest.raises(TypeError, match="token ids must be integers"):
                call()
        assert fake.calls["Decode"] == 0
        assert cache.length == 1


@pytest.mark.parametrize("max_tokens", [-1, 2.5, "3", math.nan])
def test_loops_want_whole_numbers(fake_client: Client, max_tokens: object) -> None:
    """A loop that would never end, or end by accident, does not begin."""
    with fake_client.prefill([1]) as cache:
        with pytest.raises(ValueError, match="max_tokens must be a whole number of at least 0"):
            cache.generate(max_tokens)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="max_tokens must be a whole number of at least 0"):
            fake_client.generate("the", max_tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: sample(seed=-1), "seed must be a whole number from 0 to 18446744073709551615, got -1"),
        (lambda: sample(seed=2**64), "seed"),
        (lambda: sample(temperature=-0.1), "temperature must be a number of at least 0, got -0.1"),
        (lambda: sample(temperature=math.nan), "temperature"),
        (lambda: sample(top_p=0), "top_p must be a number of more than 0 and at most 1, got 0"),
        (lambda: sample(min_p=1.5), "min_p"),
        (lambda: sample(top_k=-1), "top_k"),
        (lambda: greedy(repetition_penalty=0), "repetition_penalty"),
        (lambda: sample(frequency_penalty=math.inf), "frequency_penalty must be a number, got inf"),
        (lambda: logits("int8"), "dtype of logits must be one of float32, bfloat16, float16, got 'int8'"),  # type: ignore[arg-type]
        (lambda: greedy(top_logprobs=-1), "top_logprobs"),
        (lambda: greedy(logit_bias={7: -math.inf}), "use a mask"),
        (lambda: Client("127.0.0.1:1", durability="disk"), "durability must be one of none, journaled"),  # type: ignore[arg-type]
        (lambda: Client("localhost"), "host:port"),
        (lambda: Client(""), "host:port"),
        (lambda: Client("localhost:"), "host:port"),
        (lambda: Client("unix:"), "host:port"),
        (lambda: Client("http://localhost:1"), "host:port"),
        (lambda: Client("::1:50051"), r"\[IPv6\]:port"),
        (lambda: Client("localhost:0"), "from 1 to 65535"),
        (lambda: Client("localhost:65536"), "from 1 to 65535"),
        (lambda: Client("localhost:1", timeout=0), "timeout must be a number of more than 0, got 0"),
        (lambda: Client("localhost:1", max_retries=-1), "max_retries"),
    ],
)
def test_values_out_of_range_are_named(make: Callable[[], object], text: str) -> None:
    """Field, range and what was given."""
    with pytest.raises(ValueError, match=text):
        make()


@pytest.mark.parametrize(
    "target", ["[::1]:50051", "dns:///name:1", "ipv4:127.0.0.1:1", "unix:/x", "unix:///x", "a-b.c:1"]
)
def test_targets_of_every_kind_connect(target: str) -> None:
    """What gRPC understands passes."""
    Client(target).close()


def test_default_target_is_where_serve_listens() -> None:
    """Without an address it is the server of the first steps."""
    with Client() as client:
        assert repr(client) == "Client('127.0.0.1:50051')"


@pytest.mark.parametrize("target", [None, 50051])
def test_target_is_a_text(target: object) -> None:
    """Said before gRPC stumbles over it."""
    with pytest.raises(TypeError, match=r"target must be a text such as '127\.0\.0\.1:50051'"):
        Client(target)  # type: ignore[arg-type]


def test_policy_is_a_policy(fake_client: Client) -> None:
    """Forgotten brackets are the usual reason."""
    with fake_client.prefill([1]) as cache:
        with pytest.raises(TypeError, match=r"call it: policy=greedy\(\)"):
            cache.append(1, policy=greedy)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"call it: policy=greedy\(\)"):
            fake_client.prefill([1], policy=greedy)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="must be a Policy, got str"):
            cache.generate(policy="greedy")  # type: ignore[arg-type]
        with fake_client.stream() as stream, pytest.raises(TypeError, match=r"call it: policy=logits\(\)"):
            stream.run([Append(cache, 1, cast("Policy", logits))])


def test_choices_are_listed_and_case_is_free(fake_client: Client) -> None:
    """Messages of the server write FORK where this client writes fork."""
    with fake_client.prefill([1]) as cache:
        with pytest.raises(ValueError, match="on_stale must be one of fail, fork, rewind, got 'branch'"):
            cache.append(1, on_stale="branch")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="on_stale"):
            cache.append(1, on_stale=None)  # type: ignore[arg-type]
        cache.append(1, on_stale="REWIND")  # type: ignore[arg-type]
        cache.append((), policy=logits("BFLOAT16"))  # type: ignore[arg-type]


def test_counts_and_times_are_checked(fake_client: Client) -> None:
    """Negative, absent and not-a-number values do not reach the wire."""
    with fake_client.prefill([1]) as cache:
        calls: list[tuple[str, Callable[[], object]]] = [
            ("n must", lambda: cache.fork(0)),
            ("n must", lambda: cache.fork(-1)),
            ("length must", lambda: cache.fork(length=0)),
            ("ttl must", lambda: cache.fork(ttl=math.nan)),
            ("ttl must", lambda: fake_client.prefill([1], ttl=-1)),
            ("ttl must", lambda: fake_client.keep_alive([cache], ttl=math.inf)),
            ("timeout must", lambda: cache.append(1, timeout=0)),
            ("timeout must", lambda: fake_client.status(timeout=-1)),
            ("timeout must", lambda: fake_client.status(timeout=math.nan)),
            ("reserve_length must", lambda: fake_client.prefill([1], reserve_length=-1)),
        ]
        for text, call in calls:
            with pytest.raises(ValueError, match=text):
                call()
        assert fake_client.status(timeout=math.inf).is_ready


def test_only_handles_are_adopted(fake_client: Client) -> None:
    """What is none leaves no half-made cache behind."""
    with fake_client.prefill([1]) as cache, warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TypeError, match=r"got Cache; take cache.handle"):
            fake_client.adopt(cache)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"got str; make it with Handle.from_string"):
            fake_client.adopt(cache.handle.to_string())  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="got NoneType"):
            fake_client.release([None])  # type: ignore[list-item]


def test_handles_travel_as_text() -> None:
    """To a string and back, safe for URLs, padding cut off or not."""
    for size in range(1, 6):
        handle = Handle("x" * size, 2**31, b"\xff\xfe" * 8)
        text = handle.to_string()
        assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
        assert Handle.from_string(text) == handle
        assert Handle.from_string(text + "=" * (-len(text) % 4)) == handle


@pytest.mark.parametrize("text", ["", "?", "A", "AAAA", "hello world", "CgA", "\u00e4"])
def test_other_texts_are_no_handles(text: str) -> None:
    """The message does not repeat what may be a secret."""
    with pytest.raises(ValueError, match="this is no handle"):
        Handle.from_string(text)


def test_texts_are_texts(fake_client: Client) -> None:
    """Bytes, nothing, and halves of surrogate pairs are none."""
    with pytest.raises(TypeError, match="must be a str, got bytes; decode it first"):
        fake_client.tokenize(b"x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got NoneType"):
        fake_client.tokenize(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"half a surrogate pair, U\+D83D, at 2"):
        fake_client.tokenize("ab\ud83d")


def test_scoring_needs_all_rows(fake_client: Client) -> None:
    """A score of the last row would be empty; one token has no score anyway."""
    policy = Policy(target_logprobs=True)
    with pytest.raises(ValueError, match="all_positions=True"):
        fake_client.prefill([1, 2], policy=policy)
    with fake_client.prefill([1], policy=policy) as cache, pytest.raises(ValueError, match="all_positions=True"):
        cache.append([1, 2], policy=policy)


def test_caches_are_not_pickled(fake_client: Client) -> None:
    """A handle is the value to send."""
    with fake_client.prefill([1]) as cache:
        for way in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match=r"cache.detach\(\)"):
                way(cache)


def test_conversation_is_a_list_of_messages(fake_client: Client) -> None:
    """A bare text is told what it should be."""
    for wrong in ("hello", {"role": "user", "content": "hello"}, ["hello"]):
        with pytest.raises(TypeError, match="list of messages"):
            fake_client.apply_chat_template(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("prob", [float("nan"), float("inf"), -0.5])
def test_draft_probabilities_are_numbers(client: Client, prob: float) -> None:
    """One that is none is named, by its draft and its token."""
    with client.prefill([1, 2]) as cache:
        with pytest.raises(ValueError, match=r"draft_probs\[0\] of token 7"):
            cache.verify([7], tokens=3, policy=sample(), draft_probs=[{7: prob}])
        assert cache.length == 2
