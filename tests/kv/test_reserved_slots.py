"""Reserved slots: room that is there whatever happens around it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ferrule_server.errors import BlocksExhausted, ContextExceeded, ExceedsPool, HandleUnknown
from ferrule_server.kv.reserved_slots import SlotRequest
from ferrule_server.kv.sequence import Sequence
from ferrule_server.kv.sequence_store import DEFAULT_TTL_S, SequenceStore
from ferrule_server.kv.usage import Holding
from tests.kv.conftest import Put


def reserve(store: SequenceStore, sequence: Sequence, target_length: int) -> int:
    """Reserve room for one sequence and return how many blocks that took."""
    return store.reserve_slots([SlotRequest(sequence, target_length)]).allocations[0].new_blocks


def fill(store: SequenceStore, put: Put) -> list[Sequence]:
    """Take every free block and return who has them."""
    return [put([8] * 4, principal="bob") for _ in range(store.pool.num_free)]


def test_reserved_room_is_used_before_free_blocks(store: SequenceStore, put: Put) -> None:
    """The pool may be empty: appends up to the reserved length take nothing from it."""
    sequence = put([1, 2, 3, 4, 5])
    assert reserve(store, sequence, 14) == 2
    fill(store, put)
    put([6, 7, 8, 9], sequence)
    put([10, 11, 12, 13, 14], sequence)
    put([15, 16], sequence)
    assert (sequence.length, len(sequence.block_ids), sequence.spare_ids) == (16, 4, ())
    with pytest.raises(BlocksExhausted):
        store.reservations.reserve_append(sequence, 1)


def test_the_evidence_says_what_was_taken(store: SequenceStore, put: Put) -> None:
    """Per request in their order, and the pool around them; a copy to come of a shared block is included."""
    sequence, other = put([1, 2, 3, 4, 5]), put([1])
    store.fork(sequence, 5, 1)
    requests = [SlotRequest(sequence, 8), SlotRequest(other, 9), SlotRequest(sequence, 9)]
    evidence = store.reserve_slots(requests)
    assert (evidence.free_blocks_before, evidence.free_blocks_after) == (12, 8)
    got = [(each.handle_id, each.blocks_before, each.blocks_after, each.new_blocks) for each in evidence.allocations]
    assert got == [(sequence.handle_id, 2, 3, 1), (other.handle_id, 1, 3, 2), (sequence.handle_id, 3, 4, 1)]


def test_reserving_again_changes_nothing(store: SequenceStore, put: Put) -> None:
    """Lengths are absolute; less than before takes nothing away, and so does nothing at all."""
    sequence = put([1, 2, 3])
    assert [reserve(store, sequence, length) for length in (9, 9, 4, 0)] == [2, 0, 0, 0]
    assert (sequence.reserved_length, len(sequence.spare_ids)) == (9, 2)
    empty = store.reserve_slots([])
    assert (empty.free_blocks_before, empty.free_blocks_after, empty.allocations) == (12, 12, ())


def test_it_is_all_or_nothing(store: SequenceStore, put: Put) -> None:
    """If one does not fit, none gets anything, by whatever it was refused."""
    first, second = put([1]), put([2])
    filler = put([8] * 16, principal="bob")
    for target, error in ((36, BlocksExhausted), (51, ContextExceeded)):
        with pytest.raises(error):
            store.reserve_slots([SlotRequest(first, 12), SlotRequest(second, target)])
    with pytest.raises(ExceedsPool) as caught:
        store.reserve_slots([SlotRequest(first, 32), SlotRequest(second, 32)])
    assert caught.value.metadata == {"needed_blocks": "16", "total_blocks": "15"}
    store.release(filler.handle_at(), "bob")
    with pytest.raises(HandleUnknown):
        store.reserve_slots([SlotRequest(first, 12), SlotRequest(filler, 9)])
    assert (first.spare_ids, second.spare_ids, store.pool.num_used) == ((), (), 2)


def test_an_admission_target_only_has_to_fit(store: SequenceStore, put: Put) -> None:
    """Nothing is allocated for it; together with the others it must fit the free blocks."""
    first, second = put([1]), put([2])
    put([8], principal="bob")
    evidence = store.reserve_slots([SlotRequest(first, 8, 32), SlotRequest(second, 4, 24)])
    assert [each.new_blocks for each in evidence.allocations] == [1, 0]
    with pytest.raises(BlocksExhausted) as caught:
        store.reserve_slots([SlotRequest(first, 8, 36), SlotRequest(second, 12, 24)])
    assert caught.value.metadata == {"needed_blocks": "12", "free_blocks": "11"}
    assert (len(first.spare_ids), second.spare_ids) == (1, ())


def test_an_append_that_fails_gives_the_room_back_whole(store: SequenceStore, put: Put) -> None:
    """Spares it would have taken are there again, blocks of the pool go back to it."""
    sequence = put([1, 2, 3])
    reserve(store, sequence, 8)
    reservation = store.reservations.reserve_append(sequence, 9)
    assert (len(reservation.held_ids), store.pool.num_used) == (1, 3)
    store.reservations.abort(reservation)
    assert (len(sequence.spare_ids), store.pool.num_used) == (1, 2)


def test_a_fork_pays_for_the_copy_it_makes_necessary(store: SequenceStore, put: Put) -> None:
    """The source's room must hold: its partial last block, once shared, is copied at its next append."""
    sequence = put([1, 2, 3, 4, 5])
    reserve(store, sequence, 8)
    (branch,) = store.fork(sequence, 5, 1)
    assert (len(sequence.spare_ids), branch.spare_ids, branch.reserved_length) == (1, (), 0)
    store.fork(sequence, 4, 1)  # full blocks alone are never written again
    store.fork(sequence, 5, 1)
    assert store.pool.num_used == 3
    fill(store, put)
    reservation = store.reservations.reserve_append(sequence, 3)
    assert reservation.copies == [(branch.block_ids[1], reservation.block_ids[1])]
    store.commit(reservation, [6, 7, 8])
    assert (len(sequence.spare_ids), store.pool.num_free) == (0, 0)


def test_a_fork_is_refused_where_the_room_of_its_source_would_not_hold(store: SequenceStore, put: Put) -> None:
    """With no block free; where no copy is needed it goes on costing nothing."""
    sequence = put([1, 2, 3, 4, 5])
    reserve(store, sequence, 8)
    fill(store, put)
    with pytest.raises(BlocksExhausted):
        store.fork(sequence, 5, 2)
    with pytest.raises(BlocksExhausted):
        store.reservations.reserve_branch(sequence, 5, 1)
    assert (sequence.num_pins, store.registry.count("alice"), store.pool.refcount(sequence.block_ids[0])) == (0, 1, 1)
    assert len(store.fork(sequence, 4, 2)) == 2


def test_a_branch_in_flight_shares_like_a_fork(store: SequenceStore, put: Put) -> None:
    """The source's room holds meanwhile, and what was only for that time goes back at its next append."""
    sequence = put([1, 2, 3, 4, 5])
    reserve(store, sequence, 8)
    branching = store.reservations.reserve_branch(sequence, 5, 1)
    assert (len(sequence.spare_ids), store.pool.num_used) == (1, 4)
    filler = fill(store, put)
    appending = store.reservations.reserve_append(sequence, 3)
    assert appending.copies[0][0] == branching.copies[0][0]
    store.commit(appending, [6, 7, 8])
    store.commit(branching, [9])
    assert (sequence.spare_ids, store.pool.num_free, len(filler)) == ((), 1, 11)


def test_a_spare_that_is_no_longer_needed_goes_back(store: SequenceStore, put: Put) -> None:
    """The fork left before the copy was made, so the append writes in place."""
    sequence = put([1, 2, 3, 4, 5])
    reserve(store, sequence, 6)
    (branch,) = store.fork(sequence, 5, 1)
    store.release(branch.handle_at(), "alice")
    reservation = store.reservations.reserve_append(sequence, 1)
    assert reservation.copies == []
    store.commit(reservation, [6])
    assert (sequence.spare_ids, store.pool.num_used) == ((), 2)


def test_truncate_keeps_what_is_reserved(store: SequenceStore, put: Put) -> None:
    """Blocks beyond the reservation go back, those within it become spares."""
    sequence = put(list(range(18)))
    reserve(store, sequence, 10)
    assert store.truncate(sequence, sequence.handle_at(), 3) == 2
    assert (len(sequence.block_ids), len(sequence.spare_ids)) == (1, 2)
    fill(store, put)
    put([9] * 9, sequence)
    assert (sequence.length, sequence.spare_ids) == (12, ())


def test_truncate_into_shared_blocks_sets_others_aside(store: SequenceStore, put: Put) -> None:
    """What the fork keeps cannot be written again; where there is nothing else the truncate is refused."""
    sequence = put([1, 2, 3, 4, 5, 6, 7, 8])
    reserve(store, sequence, 8)
    tip = sequence.handle_at()
    (branch,) = store.fork(sequence, 8, 1)
    fillers = fill(store, put)
    with pytest.raises(BlocksExhausted):
        store.truncate(sequence, tip, 3)
    with pytest.raises(BlocksExhausted):
        store.reservations.reserve_rewind(sequence, 3, 1)
    assert (sequence.length, len(sequence.block_ids)) == (8, 2)
    for filler in fillers[:2]:
        store.release(filler.handle_at(), "bob")
    assert store.truncate(sequence, tip, 3) == 0
    assert len(sequence.spare_ids) == 2  # for the second block, and for the copy of the first
    assert list(branch.token_ids) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_rewind_keeps_what_is_reserved(store: SequenceStore, put: Put) -> None:
    """Also if its append is aborted."""
    sequence = put(list(range(14)))
    reserve(store, sequence, 18)
    fill(store, put)
    store.commit(store.reservations.reserve_rewind(sequence, 2, 5), [9] * 5)
    assert (sequence.length, len(sequence.spare_ids)) == (7, 3)
    store.reservations.abort(store.reservations.reserve_rewind(sequence, 1, 1))
    assert (sequence.length, len(sequence.spare_ids)) == (1, 4)
    put([9] * 17, sequence)
    assert sequence.length == 18


def test_a_new_sequence_can_come_with_room(store: SequenceStore, put: Put) -> None:
    """Taken together with the prompt's own, all or nothing; an abort gives back all of it."""
    for reserved_length, error in ((51, ContextExceeded), (50, None)):
        if error is not None:
            with pytest.raises(error):
                store.reservations.reserve_new("alice", 3, reserved_length)
            continue
        reservation = store.reservations.reserve_new("alice", 3, reserved_length)
        assert (len(reservation.block_ids), len(reservation.held_ids)) == (1, 13)
        store.reservations.abort(reservation)
    assert store.pool.num_used == 0
    sequence = store.commit(store.reservations.reserve_new("alice", 3, 10), [1, 2, 3])
    assert (sequence.reserved_length, sequence.num_blocks, store.usage.of("alice")) == (10, 3, Holding(1, 3))
    fill(store, put)
    put([4] * 7, sequence)
    other = store.release(sequence.handle_at(), "alice")
    assert other == 3


def test_release_gives_the_room_back(store: SequenceStore, put: Put) -> None:
    """It counts as freed; with an append in flight on it as well, in either order."""
    sequence = put([1])
    reserve(store, sequence, 16)
    reservation = store.reservations.reserve_append(sequence, 20)
    assert store.release(sequence.handle_at(), "alice") == 4
    store.reservations.abort(reservation)
    assert store.pool.num_used == 0


def test_reserving_renews(store: SequenceStore, put: Put, advance: Callable[[float], None]) -> None:
    """It is an operation like any other: a sign of life, also where nothing changes."""
    sequence = put([1])
    advance(1.0)
    reserve(store, sequence, 0)
    assert sequence.expires_at - store.clock() == DEFAULT_TTL_S


@pytest.mark.parametrize("is_committed", [True, False])
def test_room_can_be_reserved_while_an_append_is_in_flight(store: SequenceStore, put: Put, is_committed: bool) -> None:
    """Not knowing whether it will be committed, it is set aside from the tip on; what is too much goes back then."""
    sequence = put([1, 2, 3])
    store.fork(sequence, 3, 1)
    reservation = store.reservations.reserve_append(sequence, 6)
    assert reserve(store, sequence, 14) == 4
    fill(store, put)
    if is_committed:
        store.commit(reservation, [4] * 6)
    else:
        store.reservations.abort(reservation)
    assert len(sequence.spare_ids) == (1 if is_committed else 4)
    put([5] * (14 - sequence.length), sequence)
    assert sequence.spare_ids == ()


@pytest.mark.parametrize("num_accepted", range(1, 13))
def test_a_partial_commit_leaves_the_room_as_it_was(store: SequenceStore, put: Put, num_accepted: int) -> None:
    """Spares that the rest would have taken stay spares, blocks of the pool go back to it."""
    sequence = put([1, 2, 3])
    reserve(store, sequence, 10)
    store.commit(store.reservations.reserve_append(sequence, 12), [9] * num_accepted)
    assert sequence.num_blocks == max(3, len(sequence.block_ids)) == store.pool.num_used
    fill(store, put)
    if sequence.length < 10:
        put([7] * (10 - sequence.length), sequence)


def test_a_partial_commit_keeps_the_room_of_a_new_sequence(store: SequenceStore, put: Put) -> None:
    """Blocks that leave its table become spares, up to the room asked for and no further."""
    sequence = store.commit(store.reservations.reserve_new("alice", 9, 14), [1, 2])
    assert (len(sequence.block_ids), len(sequence.spare_ids)) == (1, 3)
    fill(store, put)
    put([3] * 12, sequence)
    store.reservations.abort(store.reservations.reserve_rewind(sequence, 1, 1))
    assert len(sequence.spare_ids) == 3


def test_a_partial_commit_gives_back_what_is_beyond_the_room(store: SequenceStore) -> None:
    """The room was less than the rows: only the room stays."""
    sequence = store.commit(store.reservations.reserve_new("alice", 15, 6), [1, 2])
    assert (len(sequence.block_ids), len(sequence.spare_ids), store.pool.num_used) == (1, 1, 2)
