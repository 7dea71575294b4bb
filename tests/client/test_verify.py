"""Drafts checked on the server: every rule, distributions, masks, handles, and retries that double nothing."""

from __future__ import annotations

import grpc
import numpy as np
import pytest

from ferrule import Client, FerruleError, Policy, greedy, logits, sample
from ferrule.types import Append, Output, Verification, Verify
from tests.client.fake_server import Failure, FakeServer

PROMPT = [5, 6, 7, 8]


def spoken(client: Client, num_tokens: int, policy: Policy) -> list[int]:
    """Return what plain decoding says after the prompt."""
    return client.generate(PROMPT, num_tokens, policy=policy).read().tokens


@pytest.mark.parametrize(("acceptance", "policy"), [("greedy", None), ("exact", greedy()), (None, sample(seed=4))])
def test_speculation_says_what_plain_decoding_says(client: Client, acceptance: str | None, policy: object) -> None:
    """Whatever the drafts are, with every rule that compares tokens."""
    plain = greedy() if acceptance else sample(seed=4)
    expected = spoken(client, 20, plain)
    rng = np.random.default_rng(1)
    with client.prefill(PROMPT) as cache:
        said = list[int](cache.generate(1, policy=plain))
        while len(said) < 20:
            drafts = expected[len(said) :][: rng.integers(0, 5)]
            if drafts and rng.integers(2):
                drafts[-1] = (drafts[-1] + 1) % 256
            check = cache.verify(drafts, acceptance=acceptance, policy=policy)  # type: ignore[arg-type]
            said += check.output.tokens
            assert check.accepted_count == len(check.output.tokens) - 1 <= len(drafts)
            assert cache.pending == check.next_token
            assert cache.token_ids == [*PROMPT, *said[:-1]]
        assert said[:20] == expected
        assert list(cache.info(token_ids=True).token_ids) == cache.token_ids


def test_distributions_may_be_dense_or_sparse(client: Client) -> None:
    """The same distributions written either way accept the same drafts by the same seed."""
    vocab_size = client.model_info().vocab_size
    sparse = [{3: 0.5, 4: 0.5}, {9: 0.25, 10: 0.75, 11: 0.0}, {1: 1.0}]
    dense = np.zeros((3, vocab_size), np.float32)
    for row, distribution in enumerate(sparse):
        for token, prob in distribution.items():
            dense[row, token] = prob
    seen = []
    for distributions in (sparse, dense):
        with client.prefill(PROMPT) as cache:
            check = cache.verify([4, 10, 1], tokens=9, policy=sample(seed=11), draft_probs=distributions)
            assert check.output.seed == 11
            seen.append((check.accepted_count, check.output.tokens, cache.token_ids))
    assert seen[0] == seen[1]


def test_masks_bind_each_row(client: Client) -> None:
    """A row chooses from its own mask, in any form of it."""
    vocab_size = client.model_info().vocab_size
    only = np.zeros(vocab_size, np.bool_)
    only[40] = True
    registered = client.register_mask([41])
    with client.prefill(PROMPT) as cache:
        check = cache.verify([40, 41], tokens=9, policy=greedy(), masks=[only, registered, [42]])
        assert check.output.tokens == (40, 41, 42)
        with pytest.raises(ValueError, match="masks needs one per row"):
            cache.verify([1, 2], policy=greedy(), masks=[only])


def test_the_caller_may_decide(client: Client) -> None:
    """All rows and handles come back; going on from one of them rewinds."""
    with client.prefill(PROMPT) as cache:
        check = cache.verify([1, 2, 3], tokens=9, policy=logits(), acceptance="none", row_handles=True)
        assert check.output.logits.shape[0] == 4
        assert [handle.length for handle in check.row_handles] == [5, 6, 7, 8]
        assert (cache.length, cache.pending, check.has_next) == (8, None, False)
        with pytest.raises(AttributeError, match="you choose it"):
            _ = check.next_token
        cache.truncate(6)
        assert cache.token_ids == [*PROMPT, 9, 1]


def test_rules_go_with_their_policies(client: Client) -> None:
    """Misuse is said before anything is sent."""
    with client.prefill(PROMPT) as cache:
        with pytest.raises(ValueError, match="greedy needs a greedy policy"):
            cache.verify([1], tokens=2, acceptance="greedy", policy=sample())
        with pytest.raises(ValueError, match=r"rejection needs a policy of sample\(\)"):
            cache.verify([1], tokens=2, acceptance="rejection", policy=greedy())
        with pytest.raises(ValueError, match="one distribution per draft"):
            cache.verify([1], tokens=2, draft_probs=[])
        with pytest.raises(ValueError, match="certain"):
            cache.verify([1])
        with pytest.raises(ValueError, match="acceptance must be one of none, greedy, exact, rejection"):
            cache.verify([1], tokens=2, acceptance="always")  # type: ignore[arg-type]
        assert cache.verify([1], tokens=2, acceptance="GREEDY").has_next  # type: ignore[arg-type]


def test_verifies_and_decodes_share_a_frame(client: Client) -> None:
    """One frame, answers of each kind in order, and one bad item alone."""
    expected = spoken(client, 4, greedy())
    with (
        client.prefill(PROMPT) as first,
        client.prefill(PROMPT) as second,
        client.prefill(PROMPT) as third,
        client.stream() as stream,
    ):
        output, check, error = stream.run(
            [
                Append(first, expected[0], greedy()),
                Verify(second, expected[1:3], expected[0], greedy()),
                Verify(third, [999], 1, greedy()),
            ],
            errors="return",
        )
        assert stream.num_frames <= 2
        assert isinstance(output, Output)
        assert output.token == expected[1]
        assert isinstance(check, Verification)
        assert check.output.tokens == tuple(expected[1:4])
        assert isinstance(error, FerruleError)
        assert third.length == 4
        first.truncate(4)
        second.truncate(4)
        checks = stream.run([Verify(first, expected[1:2], expected[0]), Verify(second, [], expected[0])])
        assert [one.accepted_count for one in checks] == [1, 0]
        with pytest.raises(FerruleError) as caught:
            stream.run([Verify(first, [1]), Verify(second, [999])])
        assert "item 1 of 2" in caught.value.__notes__[0]


def test_lost_answer_of_a_verify_is_asked_for_again(fake: FakeServer, fake_client: Client) -> None:
    """The same request once more; and drafts that landed are dropped when others follow."""
    with fake_client.prefill([*b"the"]) as cache:
        fake.failures["ForwardVerify"] = [Failure(grpc.StatusCode.UNAVAILABLE)]
        check = cache.verify([*b"qu?"], tokens=[*b" "], acceptance="greedy")
        assert fake.calls["ForwardVerify"] == 2
        assert (check.accepted_count, cache.pending) == (2, ord("i"))
