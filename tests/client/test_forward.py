"""Forward passes without a cache: rows of all positions, scores, vectors; and everything a policy can ask for."""

from __future__ import annotations

import numpy as np
import pytest

from ferrule import Client, Policy, greedy, logits
from ferrule.errors import TokenOutOfVocabError

IDS = [3, 1, 4, 1, 5, 9, 2, 6] * 30


def test_forward_brings_the_rows_of_a_prefill(client: Client) -> None:
    """In chunks without gaps, and nothing is kept."""
    chunks = list(client.forward(IDS))
    assert [chunk.first_position for chunk in chunks] == list(np.cumsum([0, *(one.num_rows for one in chunks)])[:-1])
    assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    rows = np.concatenate([chunk.logits for chunk in chunks])
    with client.prefill(IDS, policy=logits(), all_positions=True, reuse_prefix=False) as cache:
        np.testing.assert_allclose(rows, cache.last.logits, atol=1e-5)


def test_score_is_the_logprob_of_each_next_token(client: Client) -> None:
    """As a prefill with target_logprobs gives it, over the borders of chunks too."""
    scores = client.score(IDS)
    assert scores.shape == (len(IDS) - 1,)
    assert scores.dtype == np.float32
    with client.prefill(IDS, policy=Policy(target_logprobs=True), all_positions=True, reuse_prefix=False) as cache:
        np.testing.assert_allclose(scores, cache.last.target_logprobs, atol=1e-5)
    assert client.score([5]).shape == (0,)


def test_embed_pools_the_hidden_states(client: Client) -> None:
    """Mean and last, of the vectors that a policy can have one by one."""
    chunks = list(client.forward(IDS, policy=Policy(hidden_state=True), pooling="mean"))
    hidden = np.concatenate([chunk.hidden_state for chunk in chunks])
    assert hidden.shape == (len(IDS), client.model_info().hidden_size)
    np.testing.assert_allclose(client.embed(IDS), hidden.astype(np.float64).mean(axis=0), atol=1e-5)
    np.testing.assert_allclose(client.embed(IDS, "last"), hidden[-1], atol=1e-5)
    with pytest.raises(ValueError, match="pooling must be one of mean, last"):
        client.embed(IDS, "middle")  # type: ignore[arg-type]


def test_forward_left_early_is_cancelled(client: Client) -> None:
    """And what is wrong is said at the first row."""
    with client.forward(IDS * 2) as rows:
        assert next(rows).first_position == 0
    assert list(rows) == []
    with pytest.raises(TokenOutOfVocabError):
        next(client.forward([999]))


def test_every_part_of_a_policy_comes_back(client: Client) -> None:
    """As numpy arrays of the rows; they agree with the logits."""
    policy = greedy(
        logprobs=True, top_logprobs=3, logprob_token_ids=[7, 1], entropy=True, hidden_state=True, logits="float32"
    )
    with client.prefill(IDS[:5], policy=policy, all_positions=True) as cache:
        output = cache.last
        logprobs = output.logits - np.log(np.exp(output.logits).sum(axis=1, keepdims=True))
        np.testing.assert_allclose(output.requested_logprobs, logprobs[:, [7, 1]], atol=1e-5)
        np.testing.assert_allclose(output.entropies, -(np.exp(logprobs) * logprobs).sum(axis=1), atol=1e-4)
        assert output.hidden_state.shape == (5, client.model_info().hidden_size)
        assert [len(row) for row in output.top_logprobs] == [3] * 5
        assert [row[0].token for row in output.top_logprobs] == list(output.tokens)


def test_masks_bind_the_choice(client: Client) -> None:
    """Whatever form a mask has; the server's metrics count the registered one."""
    vocab_size = client.model_info().vocab_size
    allowed = np.zeros(vocab_size, np.bool_)
    allowed[[20, 30]] = True
    bits = np.packbits(allowed, bitorder="little").tobytes()
    registered = client.register_mask(allowed)
    assert [client.register_mask(one) for one in (bits, [20, 30])] == [registered, registered]
    assert client.admin.cache_metrics().token_masks >= 1
    with client.prefill(IDS[:5]) as cache:
        chosen = {cache.step(greedy(mask=one), redraw=True).token for one in (allowed, bits, [20, 30], registered)}
        assert len(chosen) == 1
        assert chosen <= {20, 30}
    with pytest.raises(ValueError, match="at least one token"):
        greedy(mask=np.zeros(vocab_size, np.bool_))
    with pytest.raises(TypeError, match="bools must be a numpy array"):
        greedy(mask=[True, False])
