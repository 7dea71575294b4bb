"""The append rule, row by row of its table."""

from __future__ import annotations

import pytest

from ferrule_server.errors import HandleStale
from ferrule_server.kv.append_rule import Verdict, check_handle, judge
from ferrule_server.kv.handle import Handle, StalePolicy
from ferrule_server.kv.lineage import LineageChain
from ferrule_server.kv.sequence import Sequence

TOKENS = [10, 11, 12, 13, 14]


def sequence_of(token_ids: list[int]) -> Sequence:
    """Return a sequence that holds these tokens and no blocks."""
    chain = LineageChain(b"model")
    chain.extend(token_ids)
    return Sequence("a.b.c", "id", "alice", chain, [], 60.0, 60.0, 0.0)


def handle_of(token_ids: list[int]) -> Handle:
    """Return the handle of these tokens."""
    return Handle("a.b.c", len(token_ids), sequence_of(token_ids).chain.at(len(token_ids)))


@pytest.mark.parametrize("policy", StalePolicy)
@pytest.mark.parametrize(
    ("length", "token_ids", "verdict"),
    [
        (5, [], Verdict.QUERY),
        (2, [], Verdict.QUERY),
        (5, [99], Verdict.APPEND),
        (5, [99, 98], Verdict.APPEND),
        (4, [14], Verdict.REPLAY),
        (2, [12, 13, 14], Verdict.REPLAY),
        (2, [12], Verdict.REPLAY),
    ],
)
def test_queries_appends_and_replays_do_not_depend_on_the_policy(
    policy: StalePolicy, length: int, token_ids: list[int], verdict: Verdict
) -> None:
    """``on_stale`` speaks only of what would otherwise be stale: equal tokens replay under every policy."""
    assert judge(sequence_of(TOKENS), handle_of(TOKENS[:length]), token_ids, policy) is verdict


@pytest.mark.parametrize("token_ids", [[99], [12, 99], [12, 13, 14, 15]])
def test_other_tokens_behind_the_tip_do_what_the_policy_says(token_ids: list[int]) -> None:
    """Also when the committed tokens are a proper prefix of those sent: the rest is never appended."""
    sequence, handle = sequence_of(TOKENS), handle_of(TOKENS[:2])
    assert judge(sequence, handle, token_ids, StalePolicy.FORK) is Verdict.FORK
    assert judge(sequence, handle, token_ids, StalePolicy.REWIND) is Verdict.REWIND
    with pytest.raises(HandleStale) as caught:
        judge(sequence, handle, token_ids, StalePolicy.FAIL)
    assert caught.value.metadata == {"handle_id": "id", "length": "2", "tip_length": "5"}


@pytest.mark.parametrize("policy", StalePolicy)
@pytest.mark.parametrize("token_ids", [[], [12]])
@pytest.mark.parametrize("named", [[*TOKENS, 15], [10, 99], [*TOKENS[:4], 99]])
def test_a_handle_whose_tokens_are_gone_is_stale_whatever_the_policy(
    named: list[int], token_ids: list[int], policy: StalePolicy
) -> None:
    """Beyond the tip, or rewritten meanwhile: there is nothing to branch from, to rewind to or to query."""
    with pytest.raises(HandleStale):
        judge(sequence_of(TOKENS), handle_of(named), token_ids, policy)


def test_a_handle_is_good_again_when_the_same_tokens_are_back() -> None:
    """A handle names tokens, not a moment."""
    check_handle(sequence_of([*TOKENS, 15]), handle_of([*TOKENS, 15]))


@pytest.mark.parametrize("length", [0, -1])
@pytest.mark.parametrize("token_ids", [[], [10]])
def test_a_length_that_no_handle_has_is_stale(length: int, token_ids: list[int]) -> None:
    """Even with the right lineage, which anyone can compute who knows the fingerprint."""
    forged = Handle("a.b.c", length, LineageChain(b"model").at(0))
    with pytest.raises(HandleStale):
        judge(sequence_of(TOKENS), forged, token_ids, StalePolicy.REWIND)


def test_tokens_that_fit_no_uint32_are_simply_not_those_committed() -> None:
    """Judging compares and never stores."""
    assert judge(sequence_of(TOKENS), handle_of(TOKENS[:2]), [1 << 40], StalePolicy.FORK) is Verdict.FORK
