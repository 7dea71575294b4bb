"""Quotas of sequences and blocks: who holds what, and what is refused before anything is held."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ferrule_server.errors import BlocksExhausted, ContextExceeded, ExceedsPool, QuotaExceeded
from ferrule_server.kv.block_pool import BlockPool
from ferrule_server.kv.reserved_slots import SlotRequest
from ferrule_server.kv.sequence import Sequence
from ferrule_server.kv.sequence_store import SequenceStore
from ferrule_server.kv.usage import Holding
from ferrule_server.quotas import QuotaLimits

NOTHING = Holding()


@pytest.fixture
def limits() -> dict[str, QuotaLimits]:
    """Quotas by principal, to be changed by the test; alice has three handles and eight blocks of four slots."""
    return {"alice": QuotaLimits(handles=3, kv_tokens=32)}


@pytest.fixture
def store(limits: dict[str, QuotaLimits]) -> Iterator[SequenceStore]:
    """Fifteen blocks of four slots and those limits; sound when the test is over."""
    store = SequenceStore(
        BlockPool(16, 4),
        instance="here",
        epoch="e1",
        max_context=64,
        max_ttl_s=100.0,
        limits_of=lambda principal: limits.get(principal, QuotaLimits()),
    )
    yield store
    store.check_integrity()


def put(store: SequenceStore, num_tokens: int, principal: str = "alice") -> Sequence:
    """Make a sequence."""
    return store.commit(store.reservations.reserve_new(principal, b"model", num_tokens), [7] * num_tokens)


def refusal(call: Callable[[], object]) -> tuple[str, dict[str, str]]:
    """Return which quota refused, and its figures."""
    with pytest.raises(QuotaExceeded) as caught:
        call()
    return caught.value.quota, {key: caught.value.metadata[key] for key in ("used", "limit", "needed")}


def test_nobody_is_remembered_who_holds_nothing(store: SequenceStore) -> None:
    """Whatever came and went: sequences released, appends aborted, requests refused."""
    sequence = put(store, 5)
    assert store.usage.of("alice") == Holding(1, 2)
    store.release(sequence.handle_at(), "alice")
    store.reservations.abort(store.reservations.reserve_new("bob", b"model", 5))
    with pytest.raises(QuotaExceeded):
        store.reservations.reserve_new("alice", b"model", 40)
    assert [store.usage.of(name) for name in ("alice", "bob", "nobody")] == [NOTHING] * 3
    assert store.usage._holdings == {}


def test_a_sequence_in_creation_is_a_handle(store: SequenceStore) -> None:
    """Else a principal could start any number at once; an abort gives it back, a commit counts it no second time."""
    sequence = put(store, 1)
    creating = [store.reservations.reserve_new("alice", b"model", 1), store.reservations.reserve_branch(sequence, 1, 1)]
    refused = ("HANDLES", {"used": "3", "limit": "3", "needed": "1"})
    assert refusal(lambda: store.reservations.reserve_new("alice", b"model", 1)) == refused
    assert refusal(lambda: store.reservations.reserve_branch(sequence, 1, 1)) == refused
    assert refusal(lambda: store.fork(sequence, 1, 1)) == refused
    store.commit(creating[0], [1])
    assert store.usage.of("alice").num_sequences == 3
    store.reservations.abort(creating[1])
    assert len(store.fork(sequence, 1, 1)) == 1
    assert put(store, 1, "bob").principal == "bob"


def test_tokens_are_refused_in_whole_blocks(store: SequenceStore) -> None:
    """Up to the quota and not one block beyond it, whoever else has room; inside a block nothing is asked."""
    sequence, other = put(store, 25), put(store, 2)
    refused = ("KV_TOKENS", {"used": "32", "limit": "32", "needed": "4"})
    assert refusal(lambda: store.reservations.reserve_append(sequence, 4)) == refused
    assert refusal(lambda: store.reservations.reserve_branch(sequence, 24, 1)) == refused
    assert refusal(lambda: store.reservations.reserve_new("alice", b"model", 1)) == refused
    store.commit(store.reservations.reserve_append(sequence, 3), [1] * 3)
    store.commit(store.reservations.reserve_append(other, 2), [1] * 2)
    assert put(store, 28, "bob").length == 28


def test_a_need_beyond_the_quota_itself_says_so(store: SequenceStore) -> None:
    """No release would ever make room, so nobody is told to wait."""
    sequence = put(store, 20)
    for call, whole in (
        (lambda: store.reservations.reserve_new("alice", b"model", 33), "36"),
        (lambda: store.reservations.reserve_append(sequence, 14), "36"),
        (lambda: store.reservations.reserve_rewind(sequence, 4, 32), "36"),
        (lambda: store.reservations.reserve_branch(sequence, 19, 14), "40"),  # the source's partial block stays as well
        (lambda: store.reserve_slots([SlotRequest(sequence, 50)]), "52"),
        (lambda: store.reserve_slots([SlotRequest(sequence, 20, 50)]), "52"),
    ):
        assert refusal(call) == ("KV_TOKENS", {"used": "20", "limit": "32", "needed": whole})
        with pytest.raises(QuotaExceeded, match="more than the quota") as caught:
            call()
        assert caught.value.retry_after_s is None
    assert refusal(lambda: store.fork(sequence, 4, 4)) == ("HANDLES", {"used": "1", "limit": "3", "needed": "4"})


def test_what_never_changes_is_said_first(store: SequenceStore, limits: dict[str, QuotaLimits]) -> None:
    """Context, pool, quota itself, quota as used, free blocks: in that order."""
    limits["alice"] = QuotaLimits(handles=1, kv_tokens=32)
    put(store, 12)
    with pytest.raises(ContextExceeded):
        store.reservations.reserve_new("alice", b"model", 65)
    with pytest.raises(ExceedsPool):
        store.reservations.reserve_new("alice", b"model", 61)
    assert refusal(lambda: store.reservations.reserve_new("alice", b"model", 33))[0] == "KV_TOKENS"
    assert refusal(lambda: store.reservations.reserve_new("alice", b"model", 32))[0] == "HANDLES"
    limits["alice"] = QuotaLimits(kv_tokens=32)
    put(store, 48, "bob")
    assert refusal(lambda: store.reservations.reserve_new("alice", b"model", 21))[0] == "KV_TOKENS"
    with pytest.raises(BlocksExhausted):
        store.reservations.reserve_new("alice", b"model", 20)


def test_a_lowered_quota_takes_nothing_away(store: SequenceStore, limits: dict[str, QuotaLimits]) -> None:
    """What is held stays, can shrink and can be used; only more is refused."""
    sequence = put(store, 30)
    limits["alice"] = QuotaLimits(handles=0, kv_tokens=0)
    store.commit(store.reservations.reserve_append(sequence, 2), [1] * 2)
    assert refusal(lambda: store.reservations.reserve_append(sequence, 1))[0] == "KV_TOKENS"
    assert refusal(lambda: store.fork(sequence, 8, 1))[0] == "HANDLES"
    assert store.truncate(sequence, sequence.handle_at(), 8) == 6


def test_a_lost_device_leaves_nothing_on_any_account(store: SequenceStore) -> None:
    """Reservations and sequences of everybody."""
    put(store, 9)
    store.reservations.reserve_new("bob", b"model", 9)
    store.lose_all()
    assert store.usage._holdings == {}
