"""Reserved slots: room that is there whatever happens around it."""

from __future__ import annotations

import pytest

from ferrule_server.errors import BlocksExhausted, ContextExceeded, ExceedsPool, HandleUnknown
from ferrule_server.kv.reserved_slots import SlotRequest
from ferrule_server.kv.sequence import Sequence
from ferrule_server.kv.sequence_store import SequenceStore
from tests.kv.conftest import Put


def reserve(store: SequenceStore, sequence: Sequence, target_length: int) -> int:
    """Reserve room for one sequence and return how many blocks that took."""
    return store.reserve_slots([SlotRequest(sequence, target_length)]).allocations[0].new_blocks


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
