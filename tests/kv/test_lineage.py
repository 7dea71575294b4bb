"""The lineage chain."""

from __future__ import annotations

import pytest

from ferrule_server.kv.lineage import LINEAGE_BYTES, LineageChain
from tests.kv.dense_model import lineage_of

AWKWARD_LENGTHS = [0, 1, 15, 16, 17, 31, 32, 33, 97]


def chain_of(token_ids: list[int], fingerprint: bytes = b"model") -> LineageChain:
    """Return a chain over the tokens."""
    chain = LineageChain(fingerprint)
    chain.extend(token_ids)
    return chain


@pytest.mark.parametrize("length", AWKWARD_LENGTHS)
def test_a_lineage_is_what_the_definition_says(length: int) -> None:
    """Any server can compute it from the fingerprint and the tokens."""
    token_ids = [(7 * index) % 50_000 for index in range(97)]
    chain = chain_of(token_ids)
    assert chain.at(length) == lineage_of(token_ids[:length], b"model")
    assert len(chain.at(length)) == LINEAGE_BYTES


def test_the_test_vector_of_the_contract_holds() -> None:
    """The bytes never change: handles and stored blocks outlive a release of the server."""
    assert chain_of([], b"\0" * 32).at(0).hex() == "07a4f8c94ce14c96949d665261e42d0f"
    assert chain_of(list(range(16)), b"\0" * 32).at(16).hex() == "7a90e168935ca68b8c38a555ea0b6fc6"
    assert chain_of(list(range(17)), b"\0" * 32).at(17).hex() == "a9064d208c4f5a07632145aba1c9ab5b"


@pytest.mark.parametrize("step", [1, 2, 15, 16, 17, 97])
def test_the_way_tokens_arrive_does_not_matter(step: int) -> None:
    """One by one, in pieces or at once: equal tokens, equal lineage."""
    token_ids = list(range(97))
    chain = LineageChain(b"model")
    for start in range(0, 97, step):
        chain.extend(token_ids[start : start + step])
    assert chain.at(97) == chain_of(token_ids).at(97)
    chain.check_integrity()


def test_other_tokens_another_order_or_another_model_give_another_lineage() -> None:
    """Nothing that decides the KV is left out."""
    lineages = {
        chain_of([1, 2, 3]).at(3),
        chain_of([1, 3, 2]).at(3),
        chain_of([1, 2]).at(2),
        chain_of([1, 2, 0]).at(3),
        chain_of([1, 2, 3], b"other").at(3),
        chain_of([]).at(0),
    }
    assert len(lineages) == 6


@pytest.mark.parametrize("length", AWKWARD_LENGTHS)
def test_truncate_and_copy_leave_the_chain_of_a_prefix(length: int) -> None:
    """After either, going on with other tokens is as if the rest had never been."""
    token_ids = list(range(97))
    chain = chain_of(token_ids)
    twin = chain.copy(length)
    twin.extend([5, 6])
    assert twin.at(length + 2) == chain_of([*token_ids[:length], 5, 6]).at(length + 2)
    assert chain.at(97) == chain_of(token_ids).at(97)
    chain.truncate(length)
    chain.extend([5, 6])
    assert chain.at(length + 2) == twin.at(length + 2)
    chain.check_integrity()


@pytest.mark.parametrize("length", [-1, 4])
def test_lengths_beyond_the_tip_are_refused(length: int) -> None:
    """There is no lineage of tokens that are not there."""
    chain = chain_of([1, 2, 3])
    for call in (chain.at, chain.truncate, chain.copy):
        with pytest.raises(ValueError, match="outside"):
            call(length)
    assert len(chain) == 3


def test_a_token_that_is_no_uint32_changes_nothing() -> None:
    """A bad token in the middle leaves none of its neighbours behind."""
    chain = chain_of([1, 2])
    with pytest.raises(OverflowError):
        chain.extend([3, 1 << 32])
    assert list(chain.token_ids) == [1, 2]
    chain.extend([(1 << 32) - 1])
    assert chain.at(3) == lineage_of([1, 2, (1 << 32) - 1], b"model")


def test_whole_copies_share_their_tokens_until_one_changes() -> None:
    """4096 branches of 32 000 tokens took 560 MB of the host before any of them was appended to."""
    chain = LineageChain(b"model")
    chain.extend(range(40))
    grown, cut, kept = (chain.copy(40) for _ in range(3))
    assert grown.token_ids is cut.token_ids is kept.token_ids is chain.token_ids
    grown.extend([7])
    cut.truncate(20)
    chain.extend([8])
    for each, expected in (
        (grown, [*range(40), 7]),
        (cut, [*range(20)]),
        (chain, [*range(40), 8]),
        (kept, [*range(40)]),
    ):
        assert each.token_ids.tolist() == expected
        assert each.at(len(expected)) == lineage_of(expected, b"model")
        each.check_integrity()
