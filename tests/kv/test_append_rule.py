"""The append rule: of all short sequences, what the model of it says."""

from __future__ import annotations

from itertools import product

import pytest

from ferrule_server.errors import HandleRewritten
from ferrule_server.kv.append_rule import Verdict, judge
from ferrule_server.kv.handle import Handle, StalePolicy
from ferrule_server.kv.lineage import LineageChain
from ferrule_server.kv.sequence import Sequence
from tests.kv.dense_model import Tokens, verdict_of

SHORT: list[Tokens] = [tokens for length in range(4) for tokens in product((10, 11), repeat=length)]
"""The first one is empty."""


def sequence_of(token_ids: Tokens) -> Sequence:
    """Return a sequence that holds these tokens and no blocks."""
    chain = LineageChain(b"model")
    chain.extend(token_ids)
    return Sequence("a.b.c", "id", "alice", chain, [], 60.0, 60.0, 0.0)


SEQUENCES = {tokens: sequence_of(tokens) for tokens in SHORT[1:]}


@pytest.mark.parametrize("policy", StalePolicy)
@pytest.mark.parametrize("held", SEQUENCES)
def test_every_verdict_is_that_of_the_model(held: Tokens, policy: StalePolicy) -> None:
    """Behind each handle that any sequence gives, with each input: beyond the tip and rewritten ones too."""
    for named, tokens in product(SEQUENCES, SHORT):
        handle, expected = SEQUENCES[named].handle_at(), verdict_of(held, named, tokens, policy)
        if isinstance(expected, Verdict):
            assert judge(SEQUENCES[held], handle, tokens, policy) is expected
            continue
        with pytest.raises(expected) as caught:
            judge(SEQUENCES[held], handle, tokens, policy)
        metadata = {"handle_id": "id", "length": str(len(named)), "tip_length": str(len(held))}
        assert caught.value.metadata == metadata
        is_ancestor = held[: len(named)] == named
        assert isinstance(caught.value, HandleRewritten) is not is_ancestor
        assert ("on_stale" in caught.value.message) is is_ancestor  # no policy continues from tokens that are gone


@pytest.mark.parametrize("length", [0, -1])
@pytest.mark.parametrize("token_ids", [[], [10]])
def test_a_length_that_no_handle_has_is_stale(length: int, token_ids: list[int]) -> None:
    """Even with the right lineage, which anyone can compute who knows the fingerprint."""
    forged = Handle("a.b.c", length, LineageChain(b"model").at(0))
    with pytest.raises(HandleRewritten):
        judge(SEQUENCES[10, 11], forged, token_ids, StalePolicy.REWIND)


def test_tokens_that_fit_no_uint32_are_simply_not_those_committed() -> None:
    """Judging compares and never stores."""
    handle = SEQUENCES[10, 11, 10].handle_at(2)
    assert judge(SEQUENCES[10, 11, 10], handle, [1 << 40], StalePolicy.FORK) is Verdict.FORK
