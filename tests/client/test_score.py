"""Scores of continuations: one run of their context, and the numbers of scoring each whole text."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from ferrule import AsyncClient, Client, greedy
from ferrule.errors import FerruleError, TokenOutOfVocabError
from ferrule.types import Score
from tests.client import aio_harness
from tests.client.fake_server import Failure, FakeServer

CONTEXT = [3, 1, 4, 1, 5, 9, 2, 6] * 20
CONTINUATIONS = [[5, 3, 5], [8], [9, 7, 9, 3, 2, 3, 8, 4], [5, 3, 6]]
TOLERANCE = 1e-5
"""Of float32: rows are summed in other orders in batches of other sizes."""


def check(client: Client, context: list[int], continuations: list[list[int]], scores: list[Score]) -> None:
    """Compare scores with those of each whole text, and the greedy tokens with what is drawn."""
    assert [score.token_ids for score in scores] == list(map(tuple, continuations))
    for score, ids in zip(scores, continuations, strict=True):
        whole = client.score([*context, *ids])[len(context) - 1 :]
        np.testing.assert_allclose(score.logprobs, whole, atol=TOLERANCE)
        assert score.logprobs.dtype == np.float32
        assert score.total == pytest.approx(float(whole.sum()), abs=TOLERANCE * len(ids))


@pytest.mark.parametrize("context", [CONTEXT, CONTEXT[:2], CONTEXT[:1]], ids=len)
def test_continuations_have_the_scores_of_the_whole_texts(client: Client, context: list[int]) -> None:
    """Also after a single token, where nothing can be forked."""
    check(client, context, CONTINUATIONS, client.score(context, CONTINUATIONS))


def test_the_context_is_run_once(client: Client) -> None:
    """The server counts its tokens once, and of the same context again at most those of a block."""
    before = client.status().num_prefill_tokens
    client.score(CONTEXT, CONTINUATIONS)
    once = client.status().num_prefill_tokens
    client.score(np.asarray(CONTEXT), continuations=CONTINUATIONS[:2])
    again = client.status().num_prefill_tokens
    num_own = sum(len(ids) + 1 for ids in CONTINUATIONS)
    assert once - before <= len(CONTEXT) - 1 + num_own
    assert again - once <= client.capabilities().block_size + num_own


def test_more_continuations_than_forks_of_one_call(client: Client) -> None:
    """They go in several frames, in their order; none, and an empty one, are no error."""
    many = [[number % 200, 7] for number in range(70)]
    check(client, CONTEXT[:5], many, client.score(CONTEXT[:5], many))
    assert client.score(CONTEXT, []) == []
    (empty,) = client.score(CONTEXT, [[]])
    assert (empty.token_ids, empty.logprobs.shape, empty.total, empty.is_greedy) == ((), (0,), 0.0, True)


def test_a_score_says_whether_greedy_decoding_would_have_written_it(client: Client) -> None:
    """Token by token, as a loop draws them."""
    drawn = [int(token) for token in client.generate(CONTEXT, 4, policy=greedy(), ignore_eos=True)]
    other = [*drawn[:2], (drawn[2] + 1) % 200]
    first, second = client.score(CONTEXT, [drawn, other])
    assert (first.is_greedy, first.greedy_ids) == (True, tuple(drawn))
    assert (second.is_greedy, second.greedy_ids[:3]) == (False, tuple(drawn[:3]))


@pytest.mark.parametrize("context", [CONTEXT, CONTEXT[:1]], ids=len)
def test_an_error_leaves_nothing_behind(client: Client, context: list[int]) -> None:
    """The context, its forks and what stands beside the one that failed are released."""
    with pytest.raises(TokenOutOfVocabError):
        client.score(context, [[5], [60_000], [7]])
    assert list(client.list_caches()) == []
    with pytest.raises(ValueError, match="at least one token"):
        client.score([], [[5]])
    with pytest.raises(TypeError, match="token ids must be integers"):
        client.score(context, [[0.5]])  # type: ignore[list-item]


@pytest.mark.parametrize("rpc", ["ForkCache", "frame"])
def test_a_call_that_fails_leaves_nothing_behind(rpc: str, fake: FakeServer, fake_client: Client) -> None:
    """The context and the forks are released, whichever call it is."""
    fake.failures[rpc] = [Failure(grpc.StatusCode.INTERNAL, reason="ENGINE_FAULT")]
    with pytest.raises(FerruleError, match="it broke"):
        fake_client.score(CONTEXT, CONTINUATIONS)
    assert fake.sequences == {}
    assert fake.calls["Prefill"] == 1


def test_the_asyncio_client_scores_the_same(client: Client, target: str) -> None:
    """To the bit: it sends the same."""

    async def scored() -> list[Score]:
        async with AsyncClient(target) as twin:
            return await twin.score(CONTEXT, CONTINUATIONS)

    for score, other in zip(client.score(CONTEXT, CONTINUATIONS), aio_harness.run(scored()), strict=True):
        np.testing.assert_allclose(score.logprobs, other.logprobs, atol=TOLERANCE)
        assert score.greedy_ids == other.greedy_ids


def test_one_text_is_no_list_of_continuations(client: Client) -> None:
    """Its characters would be scored one by one."""
    with pytest.raises(TypeError, match="list of texts"):
        client.score("Q:", " Paris")
    assert list(client.list_caches()) == []
