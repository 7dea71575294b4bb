"""The sequence store: appends, branches, truncates, releases."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest

from ferrule_server.errors import (
    BlocksExhausted,
    ContextExceeded,
    ExceedsPool,
    HandleStale,
    HandleUnknown,
    TruncateBeyond,
)
from ferrule_server.kv.append_rule import Verdict
from ferrule_server.kv.block_pool import BlockPool
from ferrule_server.kv.sequence_store import SequenceStore
from tests.kv.conftest import Put


def test_nothing_of_an_append_shows_before_commit(store: SequenceStore, put: Put) -> None:
    """Length, lineage and table are those before, until all rows are written."""
    sequence = put([1, 2, 3])
    before, table = sequence.handle_at(), sequence.block_ids
    reservation = store.reservations.reserve_append(sequence, 6)
    assert (reservation.start, len(reservation.block_ids)) == (3, 3)
    assert (sequence.handle_at(), sequence.block_ids, sequence.num_pins) == (before, table, 1)
    assert store.commit(reservation, [4, 5, 6, 7, 8, 9]) is sequence
    assert (sequence.length, sequence.block_ids, sequence.num_pins) == (9, reservation.block_ids, 0)
    assert list(sequence.token_ids) == list(range(1, 10))


def test_a_new_sequence_exists_from_commit_on(store: SequenceStore) -> None:
    """Its blocks are held before, its handle comes with the commit."""
    reservation = store.reservations.reserve_new("alice", b"model", 5)
    assert (len(store.registry), store.pool.num_used, reservation.sequence) == (0, 2, None)
    sequence = store.commit(reservation, [1, 2, 3, 4, 5])
    assert (len(store.registry), store.pool.num_used) == (1, 2)
    assert store.resolve(sequence.handle_at(), "alice") is sequence


def test_a_closed_reservation_cannot_be_committed(store: SequenceStore, put: Put) -> None:
    """Committing twice, or after an abort, is a bug of the caller's and said so."""
    sequence = put([1])
    reservation = store.reservations.reserve_append(sequence, 1)
    store.commit(reservation, [2])
    with pytest.raises(RuntimeError, match="before"):
        store.commit(reservation, [2])
    assert sequence.length == 2


def test_a_read_keeps_a_sequence_and_changes_only_its_lease(
    store: SequenceStore, put: Put, advance: Callable[[float], None]
) -> None:
    """Rows of its tokens run again while another append is reserved; it does not expire meanwhile."""
    sequence = put([1, 2, 3], ttl_s=10.0)
    read = store.reservations.reserve_read(sequence, Verdict.QUERY, 2, 3)
    append = store.reservations.reserve_append(sequence, 6)
    assert (read.block_ids, read.held_ids, sequence.num_pins) == (sequence.block_ids, [], 2)
    store.check_integrity()
    store.reservations.abort(append)
    advance(20.0)
    assert store.expire() == []
    before = sequence.handle_at()
    assert store.commit(read, [3]) is sequence
    assert (sequence.handle_at(), sequence.num_pins, sequence.expires_at) == (before, 0, store.clock() + 10.0)


@pytest.mark.parametrize("token_ids", [[], [2, 3, 4]])
def test_commit_takes_no_more_than_was_reserved(store: SequenceStore, put: Put, token_ids: list[int]) -> None:
    """And at least one token; the reservation is as good as before."""
    reservation = store.reservations.reserve_append(put([1]), 2)
    with pytest.raises(ValueError, match="2 tokens were reserved"):
        store.commit(reservation, token_ids)
    store.reservations.abort(reservation)


def test_the_context_is_the_limit_of_a_sequence(store: SequenceStore, put: Put) -> None:
    """Exactly the context fits; one token more is refused before anything is held."""
    sequence = put([7] * 49)
    with pytest.raises(ContextExceeded):
        store.reservations.reserve_append(sequence, 2)
    with pytest.raises(ContextExceeded):
        store.reservations.reserve_rewind(sequence, 48, 3)
    with pytest.raises(ContextExceeded):
        store.reservations.reserve_new("alice", b"model", 51)
    assert sequence.length == 49
    assert put([7], sequence).length == 50


def test_a_need_beyond_the_whole_pool_is_told_apart_from_a_full_pool() -> None:
    """Waiting helps against the second only."""
    store = SequenceStore(BlockPool(4, 4), instance="here", epoch="e1", max_context=100, max_ttl_s=60.0)
    with pytest.raises(ExceedsPool) as exceeds:
        store.reservations.reserve_new("alice", b"model", 13)
    assert exceeds.value.metadata == {"needed_blocks": "4", "total_blocks": "3"}
    sequence = store.commit(store.reservations.reserve_new("alice", b"model", 5), [1, 2, 3, 4, 5])
    with pytest.raises(BlocksExhausted) as exhausted:
        store.reservations.reserve_new("alice", b"model", 12)
    assert exhausted.value.metadata == {"needed_blocks": "3", "free_blocks": "1"}
    with pytest.raises(ExceedsPool):  # the source's own partial block stays, so 3 + 1 blocks can never be had
        store.reservations.reserve_branch(sequence, 5, 5)
    with pytest.raises(BlocksExhausted):
        store.reservations.reserve_branch(sequence, 4, 5)
    assert store.pool.num_used == 2
    store.check_integrity()


@pytest.mark.parametrize("length", [6, 4])
def test_forks_hold_the_tokens_of_all_of_them_once(store: SequenceStore, put: Put, length: int) -> None:
    """Until one is appended to; also where they are shorter than their source."""
    branches = store.fork(put([1, 2, 3, 4, 5, 6]), length, 5)
    assert len({id(each.token_ids) for each in branches}) == 1
    store.commit(store.reservations.reserve_append(branches[0], 1), [9])
    assert [each.token_ids.tolist()[length:] for each in branches] == [[9], [], [], [], []]
    store.check_integrity()


def test_forks_cost_no_block_until_they_diverge(store: SequenceStore, put: Put) -> None:
    """All blocks are shared; the first append into the partial one copies it, and it alone."""
    sequence = put([1, 2, 3, 4, 5, 6])
    first, second = store.fork(sequence, 6, 2)
    assert store.pool.num_used == 2
    assert first.block_ids == second.block_ids == sequence.block_ids
    reservation = store.reservations.reserve_append(first, 1)
    assert reservation.copies == [(sequence.block_ids[1], reservation.block_ids[1])]
    assert reservation.block_ids[0] == sequence.block_ids[0]
    store.commit(reservation, [7])
    assert store.pool.num_used == 3
    assert [store.pool.refcount(block_id) for block_id in sequence.block_ids] == [3, 2]
    assert list(second.token_ids) == [1, 2, 3, 4, 5, 6]


def test_sixteen_forks_of_a_long_handle_take_less_than_a_millisecond() -> None:
    """Integers only: no block is copied, or taken, until one of the branches goes on."""
    store = SequenceStore(BlockPool(600, 16), instance="here", epoch="e1", max_context=9000, max_ttl_s=60.0)
    sequence = store.commit(store.reservations.reserve_new("alice", b"model", 8192), range(8192))
    fastest_s = math.inf
    for _ in range(10):
        started = time.perf_counter()
        branches = store.fork(sequence, 8192, 64)
        fastest_s = min(fastest_s, time.perf_counter() - started)
        assert (store.pool.num_used, store.metrics().num_block_copies) == (512, 0)
        assert all(each.block_ids == sequence.block_ids for each in branches)
        for each in branches:
            store.release(each.handle_at(), "alice")
    assert fastest_s < 4e-3
    (branch,) = store.fork(sequence, 8185, 1)
    store.commit(store.reservations.reserve_append(branch, 1), [7])
    assert (store.pool.num_used, store.metrics().num_block_copies) == (513, 1)


def test_the_last_owner_of_a_block_writes_it_in_place(store: SequenceStore, put: Put) -> None:
    """No copy is made for nobody."""
    sequence = put([1, 2, 3])
    (branch,) = store.fork(sequence, 3, 1)
    assert store.release(sequence.handle_at(), "alice") == 0
    reservation = store.reservations.reserve_append(branch, 1)
    assert (reservation.copies, reservation.block_ids) == ([], branch.block_ids)
    store.reservations.abort(reservation)


def test_two_owners_that_append_at_once_both_copy(store: SequenceStore, put: Put) -> None:
    """Neither can know that the other will leave; the block they left is free afterwards."""
    sequence = put([1, 2, 3])
    (branch,) = store.fork(sequence, 3, 1)
    old_block = sequence.block_ids[0]
    reservations = [store.reservations.reserve_append(each, 1) for each in (sequence, branch)]
    assert [each.copies[0][0] for each in reservations] == [old_block, old_block]
    for reservation in reservations:
        store.commit(reservation, [9])
    assert store.pool.refcount(old_block) == 0
    assert store.pool.num_used == 2


@pytest.mark.parametrize("new_length", [-1, 0, 6])
def test_truncate_beyond_the_handle_is_refused(store: SequenceStore, put: Put, new_length: int) -> None:
    """Even where the sequence is longer than the handle."""
    sequence = put(list(range(9)))
    with pytest.raises(TruncateBeyond):
        store.truncate(sequence, sequence.handle_at(5), new_length)
    assert sequence.length == 9


def test_truncate_twice_to_the_same_length_changes_nothing(store: SequenceStore, put: Put) -> None:
    """A retry after a lost reply gets the same answer, though its handle is beyond the tip by now."""
    sequence = put(list(range(14)))
    tip = sequence.handle_at()
    assert [store.truncate(sequence, tip, 5) for _ in range(3)] == [2, 2, 2]
    with pytest.raises(HandleStale):
        store.truncate(sequence, tip, 4)


def test_an_append_to_a_released_sequence_answers_unknown(store: SequenceStore, put: Put) -> None:
    """At commit and at reservation; what was held is given back."""
    sequence = put(list(range(6)))
    reservation = store.reservations.reserve_append(sequence, 9)
    store.release(sequence.handle_at(), "alice")
    with pytest.raises(HandleUnknown):
        store.commit(reservation, [1] * 9)
    with pytest.raises(HandleUnknown):
        store.reservations.reserve_append(sequence, 1)
    assert store.pool.num_used == 0


def test_after_a_device_fault_nothing_is_left(store: SequenceStore, put: Put) -> None:
    """Reservations are closed, and handles name nothing."""
    sequence = put([1, 2, 3])
    handle = sequence.handle_at()
    reservation = store.reservations.reserve_append(sequence, 9)
    store.lose_all()
    assert (store.pool.num_used, len(store.registry)) == (0, 0)
    store.reservations.abort(reservation)
    with pytest.raises(HandleUnknown):
        store.resolve(handle, "alice")
    assert store.release(handle, "alice") is None


def test_a_token_that_is_no_uint32_commits_nothing(store: SequenceStore, put: Put) -> None:
    """The wire ring checks the vocabulary; should it fail, sequence and reservation are as before."""
    sequence = put([1])
    reservation = store.reservations.reserve_append(sequence, 2)
    with pytest.raises(OverflowError):
        store.commit(reservation, [2, -1])
    assert sequence.length == 1
    store.commit(reservation, [2, 3])


@pytest.mark.parametrize("num_tokens", [0, -1])
def test_an_append_of_nothing_cannot_be_reserved(store: SequenceStore, put: Put, num_tokens: int) -> None:
    """Queries and replays need no reservation."""
    with pytest.raises(ValueError, match="num_tokens"):
        store.reservations.reserve_append(put([1]), num_tokens)
    with pytest.raises(ValueError, match="num_tokens"):
        store.reservations.reserve_new("alice", b"model", num_tokens)


@pytest.mark.parametrize("length", [0, 4])
def test_branches_forks_and_rewinds_stay_within_the_sequence(store: SequenceStore, put: Put, length: int) -> None:
    """No handle names such a length."""
    sequence = put([1, 2, 3])
    for reserve in (store.reservations.reserve_branch, store.reservations.reserve_rewind, store.fork):
        with pytest.raises(ValueError, match="outside"):
            reserve(sequence, length, 1)
    with pytest.raises(ValueError, match="at least"):
        store.fork(sequence, 3, 0)


@pytest.mark.parametrize(
    "settings", [{"max_context": 0}, {"max_ttl_s": 4.9}, {"max_ttl_s": float("inf")}, {"max_ttl_s": float("nan")}]
)
def test_impossible_settings_are_refused(settings: dict[str, float]) -> None:
    """The constructor says which value is out of range."""
    arguments = {"instance": "a", "epoch": "b", "max_context": 9, "max_ttl_s": 60.0, **settings}
    with pytest.raises(ValueError, match=next(iter(settings))):
        SequenceStore(BlockPool(4, 4), **arguments)  # type: ignore[arg-type]
