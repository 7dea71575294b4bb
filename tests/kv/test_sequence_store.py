"""The sequence store: appends, branches, truncates, releases."""

from __future__ import annotations

import math
import time

import pytest

from ferrule_server.errors import (
    BlocksExhausted,
    ContextExceeded,
    ExceedsPool,
    HandleLost,
    HandleStale,
    HandleUnknown,
    TruncateBeyond,
)
from ferrule_server.kv.append_rule import Verdict, judge
from ferrule_server.kv.block_pool import BlockPool
from ferrule_server.kv.handle import StalePolicy
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
    reservation = store.reservations.reserve_new("alice", 5)
    assert (len(store.registry), store.pool.num_used, reservation.sequence) == (0, 2, None)
    sequence = store.commit(reservation, [1, 2, 3, 4, 5])
    assert (len(store.registry), store.pool.num_used) == (1, 2)
    assert store.resolve(sequence.handle_at(), "alice") is sequence


def test_an_aborted_append_leaves_no_trace(store: SequenceStore, put: Put) -> None:
    """Only what was reserved is given back; aborting again changes nothing."""
    sequence = put([1, 2, 3])
    for reservation in (store.reservations.reserve_append(sequence, 9), store.reservations.reserve_new("bob", 9)):
        store.reservations.abort(reservation)
        store.reservations.abort(reservation)
    assert (sequence.length, sequence.num_pins, store.pool.num_used, len(store.registry)) == (3, 0, 1, 1)


def test_a_closed_reservation_cannot_be_committed(store: SequenceStore, put: Put) -> None:
    """Committing twice, or after an abort, is a bug of the caller's and said so."""
    sequence = put([1])
    reservation = store.reservations.reserve_append(sequence, 1)
    store.commit(reservation, [2])
    with pytest.raises(RuntimeError, match="before"):
        store.commit(reservation, [2])
    assert sequence.length == 2


@pytest.mark.parametrize("token_ids", [[], [2, 3, 4]])
def test_commit_takes_no_more_than_was_reserved(store: SequenceStore, put: Put, token_ids: list[int]) -> None:
    """And at least one token; the reservation is as good as before."""
    reservation = store.reservations.reserve_append(put([1]), 2)
    with pytest.raises(ValueError, match="2 tokens were reserved"):
        store.commit(reservation, token_ids)
    store.reservations.abort(reservation)


@pytest.mark.parametrize("num_accepted", range(1, 11))
def test_a_partial_commit_is_the_commit_of_the_accepted_prefix(
    store: SequenceStore, put: Put, num_accepted: int
) -> None:
    """As if no more had been reserved: length, lineage, blocks, account; the rest is free at once."""
    drafts = list(range(50, 60))
    sequence, plain = put([1, 2, 3, 4, 5]), put([1, 2, 3, 4, 5], principal="bob")
    table = sequence.block_ids
    reservation = store.reservations.reserve_append(sequence, 10)
    store.commit(reservation, drafts[:num_accepted])
    put(drafts[:num_accepted], plain)
    assert list(sequence.token_ids) == [1, 2, 3, 4, 5, *drafts[:num_accepted]]
    assert sequence.handle_at().lineage == plain.handle_at().lineage
    assert (sequence.block_ids[:2], len(sequence.block_ids)) == (table, len(plain.block_ids))
    assert store.usage.of("alice") == store.usage.of("bob")
    assert not sequence.is_appending
    put([*drafts[num_accepted:], 60], sequence)
    assert list(sequence.token_ids) == [1, 2, 3, 4, 5, *drafts, 60]


@pytest.mark.parametrize("num_accepted", [1, 2, 3, 6])
def test_a_partial_commit_of_a_fork_keeps_the_copy(store: SequenceStore, put: Put, num_accepted: int) -> None:
    """The shared block is copied for the first row, so it is needed whatever is accepted, and its source goes back."""
    sequence = put([1, 2, 3, 4, 5, 6])
    (branch,) = store.fork(sequence, 6, 1)
    reservation = store.reservations.reserve_append(branch, 6)
    (copied,) = reservation.copies
    store.commit(reservation, [9] * num_accepted)
    assert (branch.block_ids[:2], sequence.block_ids[1]) == ([sequence.block_ids[0], copied[1]], copied[0])
    assert [store.pool.refcount(block_id) for block_id in sequence.block_ids] == [2, 1]
    assert store.pool.num_used == 3 + (num_accepted > 2)


def test_a_partial_commit_of_a_branch_or_of_a_new_sequence_gives_back_the_rest(store: SequenceStore, put: Put) -> None:
    """Whether a sequence is made by it or not makes no difference."""
    sequence = put([1, 2, 3, 4, 5, 6])
    branch = store.commit(store.reservations.reserve_branch(sequence, 5, 12), [9, 8])
    assert (list(branch.token_ids), len(branch.block_ids)) == ([1, 2, 3, 4, 5, 9, 8], 2)
    made = store.commit(store.reservations.reserve_new("bob", 12), [7])
    assert (made.length, len(made.block_ids), store.usage.of("bob").num_blocks) == (1, 1, 1)
    assert (store.pool.num_used, store.usage.of("alice").num_blocks) == (4, 3)


def test_a_partial_commit_of_a_released_sequence_is_refused(store: SequenceStore, put: Put) -> None:
    """As a whole one is; everything goes back."""
    sequence = put([1, 2, 3])
    reservation = store.reservations.reserve_append(sequence, 9)
    store.release(sequence.handle_at(), "alice")
    with pytest.raises(HandleUnknown):
        store.commit(reservation, [4])
    assert store.pool.num_used == 0


def test_one_append_is_in_flight_on_a_sequence(store: SequenceStore, put: Put) -> None:
    """Whatever else would touch the sequence has to queue, and finds nothing changed meanwhile."""
    sequence = put([1, 2, 3])
    handle = sequence.handle_at()
    reservation = store.reservations.reserve_append(sequence, 1)
    for call in (
        lambda: store.reservations.reserve_append(sequence, 1),
        lambda: store.reservations.reserve_branch(sequence, 2, 1),
        lambda: store.reservations.reserve_rewind(sequence, 2, 1),
        lambda: store.fork(sequence, 2, 1),
        lambda: store.truncate(sequence, handle, 1),
    ):
        with pytest.raises(RuntimeError, match="in flight"):
            call()
    store.commit(reservation, [4])
    assert list(sequence.token_ids) == [1, 2, 3, 4]


def test_the_context_is_the_limit_of_a_sequence(store: SequenceStore, put: Put) -> None:
    """Exactly the context fits; one token more is refused before anything is held."""
    sequence = put([7] * 49)
    with pytest.raises(ContextExceeded):
        store.reservations.reserve_append(sequence, 2)
    with pytest.raises(ContextExceeded):
        store.reservations.reserve_rewind(sequence, 48, 3)
    with pytest.raises(ContextExceeded):
        store.reservations.reserve_new("alice", 51)
    assert sequence.length == 49
    assert put([7], sequence).length == 50


def test_a_need_beyond_the_whole_pool_is_told_apart_from_a_full_pool() -> None:
    """Waiting helps against the second only."""
    store = SequenceStore(
        BlockPool(4, 4), instance="here", epoch="e1", fingerprint=b"model", max_context=100, max_ttl_s=60.0
    )
    with pytest.raises(ExceedsPool) as exceeds:
        store.reservations.reserve_new("alice", 13)
    assert exceeds.value.metadata == {"needed_blocks": "4", "total_blocks": "3"}
    sequence = store.commit(store.reservations.reserve_new("alice", 5), [1, 2, 3, 4, 5])
    with pytest.raises(BlocksExhausted) as exhausted:
        store.reservations.reserve_new("alice", 12)
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
    store = SequenceStore(
        BlockPool(600, 16), instance="here", epoch="e1", fingerprint=b"model", max_context=9000, max_ttl_s=60.0
    )
    sequence = store.commit(store.reservations.reserve_new("alice", 8192), range(8192))
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


def test_an_append_behind_full_shared_blocks_copies_nothing(store: SequenceStore, put: Put) -> None:
    """A full block is never written again, so it stays shared."""
    sequence = put([1, 2, 3, 4])
    (branch,) = store.fork(sequence, 4, 1)
    reservation = store.reservations.reserve_append(branch, 1)
    assert (reservation.copies, reservation.block_ids[0]) == ([], sequence.block_ids[0])
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


def test_a_fork_may_be_shorter_than_its_source(store: SequenceStore, put: Put) -> None:
    """Any prefix can be branched; it names its parent."""
    sequence = put([1, 2, 3, 4, 5, 6])
    (branch,) = store.fork(sequence, 3, 1)
    assert (list(branch.token_ids), len(branch.block_ids)) == ([1, 2, 3], 1)
    assert branch.parent_handle_id == sequence.handle_id
    assert branch.handle_at().lineage == sequence.handle_at(3).lineage
    for length, count in ((0, 1), (7, 1), (3, 0)):
        with pytest.raises(ValueError, match=r"outside|at least"):
            store.fork(sequence, length, count)


def test_a_branch_leaves_its_source_as_it_is(store: SequenceStore, put: Put) -> None:
    """on_stale=FORK: full blocks shared, the partial one copied, a new name, the source's tip untouched."""
    sequence = put([1, 2, 3, 4, 5, 6, 7])
    handle = sequence.handle_at(6)
    assert judge(sequence, handle, [9], StalePolicy.FORK) is Verdict.FORK
    reservation = store.reservations.reserve_branch(sequence, 6, 1)
    assert (reservation.sequence, reservation.source, sequence.num_pins) == (None, sequence, 1)
    assert reservation.copies == [(sequence.block_ids[1], reservation.block_ids[1])]
    branch = store.commit(reservation, [9])
    assert (list(branch.token_ids), list(sequence.token_ids)) == ([1, 2, 3, 4, 5, 6, 9], [1, 2, 3, 4, 5, 6, 7])
    assert (branch.cache_id != sequence.cache_id, sequence.num_pins) == (True, 0)
    assert [store.pool.refcount(block_id) for block_id in sequence.block_ids] == [2, 1]


def test_a_branch_outlives_its_source(store: SequenceStore, put: Put) -> None:
    """What is to be copied stays alive by reference, even when the source is released before the first row."""
    sequence = put([1, 2, 3, 4, 5, 6])
    reservation = store.reservations.reserve_branch(sequence, 6, 1)
    assert store.release(sequence.handle_at(), "alice") == 0
    store.check_integrity()
    branch = store.commit(reservation, [9])
    assert list(branch.token_ids) == [1, 2, 3, 4, 5, 6, 9]
    assert store.pool.num_used == 2


def test_an_aborted_branch_gives_its_shares_back(store: SequenceStore, put: Put) -> None:
    """Refcounts are those before."""
    sequence = put([1, 2, 3, 4, 5, 6])
    store.reservations.abort(store.reservations.reserve_branch(sequence, 6, 20))
    assert [store.pool.refcount(block_id) for block_id in sequence.block_ids] == [1, 1]
    assert (store.pool.num_used, sequence.num_pins) == (2, 0)


def test_a_rewind_pays_with_its_own_tail(store: SequenceStore, put: Put) -> None:
    """With no block free, the blocks of the dropped tail serve the append."""
    sequence = put([7] * 30)
    put([8] * 28)
    assert store.pool.num_free == 0
    reservation = store.reservations.reserve_rewind(sequence, 3, 29)
    assert (sequence.length, reservation.start, reservation.copies) == (3, 3, [])
    store.commit(reservation, [9] * 29)
    assert list(sequence.token_ids) == [7] * 3 + [9] * 29


def test_a_refused_rewind_keeps_the_tail(store: SequenceStore, put: Put) -> None:
    """It is checked first, the copy of a shared partial block included; shared tail blocks pay for nothing."""
    sequence = put([7] * 30)
    store.fork(sequence, 30, 1)
    put([8] * 28)
    with pytest.raises(BlocksExhausted) as caught:
        store.reservations.reserve_rewind(sequence, 3, 1)
    assert caught.value.metadata == {"needed_blocks": "1", "free_blocks": "0"}
    assert (sequence.length, sequence.is_appending, sequence.num_pins) == (30, False, 0)


def test_a_rewind_into_a_shared_block_copies_it(store: SequenceStore, put: Put) -> None:
    """The branch keeps the tokens that the rewind drops."""
    sequence = put([1, 2, 3, 4])
    (branch,) = store.fork(sequence, 4, 1)
    reservation = store.reservations.reserve_rewind(sequence, 2, 1)
    assert reservation.copies == [(branch.block_ids[0], reservation.block_ids[0])]
    store.commit(reservation, [9])
    assert (list(sequence.token_ids), list(branch.token_ids)) == ([1, 2, 9], [1, 2, 3, 4])


def test_an_aborted_rewind_leaves_the_shortened_sequence(store: SequenceStore, put: Put) -> None:
    """(id, length) is good, the tail is gone."""
    sequence = put([1, 2, 3, 4, 5, 6])
    tip = sequence.handle_at()
    store.reservations.abort(store.reservations.reserve_rewind(sequence, 2, 9))
    assert (list(sequence.token_ids), store.pool.num_used) == ([1, 2], 1)
    assert judge(sequence, sequence.handle_at(2), [3], StalePolicy.FAIL) is Verdict.APPEND
    with pytest.raises(HandleStale):
        judge(sequence, tip, [3], StalePolicy.FAIL)


def test_truncate_frees_the_tail_at_once(store: SequenceStore, put: Put) -> None:
    """Only blocks nobody else has count as freed."""
    sequence = put(list(range(14)))
    store.fork(sequence, 9, 1)
    assert store.truncate(sequence, sequence.handle_at(), 5) == 1
    assert (sequence.length, len(sequence.block_ids)) == (5, 2)
    assert store.pool.num_used == 3


def test_truncate_takes_any_handle_up_to_the_tip(store: SequenceStore, put: Put) -> None:
    """new_length is absolute and at most the handle's own length."""
    sequence = put(list(range(14)))
    assert store.truncate(sequence, sequence.handle_at(10), 8) == 2
    assert sequence.length == 8


def test_truncate_to_the_tip_keeps_everything(store: SequenceStore, put: Put) -> None:
    """Nothing was dropped, so nothing moved."""
    sequence = put([1, 2, 3])
    block_ids = sequence.block_ids
    assert store.truncate(sequence, sequence.handle_at(), 3) == 0
    assert (sequence.length, sequence.block_ids) == (3, block_ids)


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


def test_a_truncate_is_forgotten_when_the_tip_moves(store: SequenceStore, put: Put) -> None:
    """After an append the old request would drop tokens it never knew of; it is stale, even back at the length."""
    sequence = put(list(range(14)))
    tip = sequence.handle_at()
    store.truncate(sequence, tip, 5)
    put([90, 91], sequence)
    with pytest.raises(HandleStale):
        store.truncate(sequence, tip, 5)
    store.reservations.abort(store.reservations.reserve_rewind(sequence, 5, 1))
    with pytest.raises(HandleStale):
        store.truncate(sequence, tip, 5)


def test_a_truncate_is_forgotten_when_a_rewind_goes_below_it(store: SequenceStore, put: Put) -> None:
    """Its answer would claim a length that is no longer there."""
    sequence = put(list(range(14)))
    tip = sequence.handle_at()
    store.truncate(sequence, tip, 5)
    store.reservations.abort(store.reservations.reserve_rewind(sequence, 3, 1))
    with pytest.raises(HandleStale):
        store.truncate(sequence, tip, 5)


def test_release_acts_once_whatever_the_length(store: SequenceStore, put: Put) -> None:
    """Idempotent; only the owner's counts, and it says what it freed."""
    sequence = put(list(range(9)))
    handle = sequence.handle_at(2)
    assert store.release(handle, "bob") is None
    assert store.release(handle, "alice") == 3
    assert store.release(handle, "alice") is None
    with pytest.raises(HandleUnknown):
        store.resolve(handle, "alice")


@pytest.mark.parametrize("is_aborted_first", [True, False])
def test_release_during_an_append_is_safe_in_either_order(
    store: SequenceStore, put: Put, is_aborted_first: bool
) -> None:
    """Everything is free afterwards, and nothing twice."""
    sequence = put(list(range(6)))
    reservation = store.reservations.reserve_append(sequence, 9)
    if is_aborted_first:
        store.reservations.abort(reservation)
    store.release(sequence.handle_at(), "alice")
    store.check_integrity()
    store.reservations.abort(reservation)
    assert (store.pool.num_used, sequence.num_pins) == (0, 0)


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


def test_after_a_device_fault_every_handle_is_lost(store: SequenceStore, put: Put) -> None:
    """Owners hear so, others hear what they always hear; reservations are closed."""
    sequence = put([1, 2, 3])
    handle = sequence.handle_at()
    reservation = store.reservations.reserve_append(sequence, 9)
    store.lose_all()
    assert (store.pool.num_used, len(store.registry)) == (0, 0)
    store.reservations.abort(reservation)
    with pytest.raises(HandleLost):
        store.resolve(handle, "alice")
    with pytest.raises(HandleUnknown) as caught:
        store.resolve(handle, "bob")
    assert caught.type is HandleUnknown
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
        store.reservations.reserve_new("alice", num_tokens)


@pytest.mark.parametrize("length", [0, 4])
def test_branches_and_rewinds_stay_within_the_sequence(store: SequenceStore, put: Put, length: int) -> None:
    """No handle names such a length."""
    sequence = put([1, 2, 3])
    for reserve in (store.reservations.reserve_branch, store.reservations.reserve_rewind):
        with pytest.raises(ValueError, match="outside"):
            reserve(sequence, length, 1)


@pytest.mark.parametrize(
    "settings", [{"max_context": 0}, {"max_ttl_s": 4.9}, {"max_ttl_s": float("inf")}, {"max_ttl_s": float("nan")}]
)
def test_impossible_settings_are_refused(settings: dict[str, float]) -> None:
    """The constructor says which value is out of range."""
    arguments = {"instance": "a", "epoch": "b", "fingerprint": b"", "max_context": 9, "max_ttl_s": 60.0, **settings}
    with pytest.raises(ValueError, match=next(iter(settings))):
        SequenceStore(BlockPool(4, 4), **arguments)  # type: ignore[arg-type]
