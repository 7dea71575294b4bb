"""A server with trained weights: a chat, and forks and verifies with the bits of a whole prefill."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from ferrule import Client, greedy, logits
from ferrule_server.text.tokenizer import Tokenizer

pytestmark = pytest.mark.real_model

QUESTIONS = ("What is the capital of France?", "Which river flows through it?", "Name one dish from there.")
LENGTHS = (33, 128, 250)
"""Where a sequence is forked: within a block, at the end of one, far in."""


@pytest.fixture
def client(target: str) -> Iterator[Client]:
    """A client; the test must leave no sequence behind."""
    with Client(target, timeout=60) as client:
        yield client
        assert list(client.list_caches()) == []


def bits(row: object) -> bytes:
    """Return the bytes of a row of logits."""
    return np.asarray(row, np.float32).tobytes()


def whole(client: Client, token_ids: list[int]) -> bytes:
    """Return the logits of the last row of a prompt that shares no KV with any other."""
    with client.prefill(token_ids, policy=logits(), reuse_prefix=False, publish_prefix=False) as cache:
        return bits(cache.last.logits)


def num_same(first: list[int], second: list[int]) -> int:
    """Return how many tokens two sequences begin with in common; an answer may be spelled with other tokens later."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def test_the_matrices_are_those_of_the_file(client: Client) -> None:
    """Packed as they are, under the name of the model."""
    info = client.model_info()
    assert (info.model_id, info.packed_types[0]) == ("smollm2", "Q4_1")


def test_a_chat_of_three_turns_remembers(client: Client) -> None:
    """The first answer is right. Each turn reuses what its prompt begins with and says what a fresh sequence says."""
    with client.chat(policy=greedy(), max_tokens=32) as chat:
        for question in QUESTIONS:
            asked = [*chat.all_messages, {"role": "user", "content": question}]
            prompt = list(client.apply_chat_template(asked).token_ids)
            held = chat._cache.token_ids if chat._cache else []
            answer = chat.send(question)
            assert answer.num_reused_tokens >= num_same(held, prompt)
            assert client.generate(prompt, 32, policy=greedy(), reuse_prefix=False).read().tokens == answer.tokens
        assert "Paris" in chat.messages[1]["content"]
        assert all(message["content"] for message in chat.messages)


def test_forks_of_a_real_text_have_the_bits_of_a_whole_prefill(client: Client, texts: list[list[int]]) -> None:
    """Another text goes on from each fork; FEATURE_DETERMINISTIC promises the bits."""
    text, other = texts
    with client.prefill(text[:300], reuse_prefix=False, publish_prefix=False) as cache:
        for length in LENGTHS:
            with cache.fork(length=length) as fork:
                output = fork.append(other[:40], policy=logits())
                assert bits(output.logits) == whole(client, text[:length] + other[:40])
        assert bits(cache.append(text[300:310], policy=logits()).logits) == whole(client, text[:310])


def test_verified_drafts_of_a_real_text_have_the_bits_of_a_whole_prefill(
    client: Client, texts: list[list[int]]
) -> None:
    """Every row of a verify, and the row after drafts that did not hold."""
    text, other = texts
    with client.prefill(text[:200], reuse_prefix=False, publish_prefix=False) as cache:
        check = cache.verify(text[201:206], tokens=text[200:201], policy=logits(), acceptance="none")
        for row, length in zip(check.output.logits, range(201, 207), strict=True):
            assert bits(row) == whole(client, text[:length])
        cache.truncate(203)
        after = cache.append(other[:5], policy=logits())
        assert bits(after.logits) == whole(client, text[:203] + other[:5])


def test_speculation_says_what_plain_decoding_says(client: Client, tokenizer: Tokenizer) -> None:
    """Drafts that are right, wrong and half right, on a text that the model knows."""
    prompt = tokenizer.encode("The capital of France is")
    expected = client.generate(prompt, 40, policy=greedy(), ignore_eos=True).read().tokens
    said: list[int] = []
    with client.prefill(prompt, policy=greedy()) as cache:
        said.append(int(cache.last.token))
        while len(said) < len(expected):
            drafts = [*expected[len(said) : len(said) + 2], 17, 17]
            said += cache.verify(drafts, policy=greedy(), acceptance="greedy").output.tokens
    assert said[: len(expected)] == expected
