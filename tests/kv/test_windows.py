"""Blocks outside the window of a sequence: given back at commits, and what needs them is refused with a price."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from ferrule_server.errors import ExceedsPool, KvGivenBack, QuotaExceeded
from ferrule_server.kv.block_pool import BlockPool, count_shared
from ferrule_server.kv.new_sequence import NewSequence
from ferrule_server.kv.reserved_slots import SlotRequest
from ferrule_server.kv.sequence import Sequence
from ferrule_server.kv.sequence_store import SequenceStore
from ferrule_server.quotas import QuotaLimits

SIZE, WINDOW = 4, 3
Make = Callable[..., Sequence]


@pytest.fixture
def make(store: SequenceStore) -> Make:
    """Return a maker of sequences that give back blocks outside a window of three tokens."""

    def made(num_tokens: int, *, window: int = WINDOW, publish: bool = True, first: int = 0) -> Sequence:
        tokens = range(first, first + num_tokens)
        reservation = store.reservations.reserve_new(
            "alice", b"model", num_tokens, NewSequence(publish_prefix=publish, attention_window=window)
        )
        return store.commit(reservation, list(tokens))

    return made


def put(store: SequenceStore, sequence: Sequence, tokens: Iterable[int]) -> None:
    """Append tokens one by one."""
    for token in tokens:
        store.commit(store.reservations.reserve_append(sequence, 1), [token])


def price_of(caught: pytest.ExceptionInfo[KvGivenBack]) -> tuple[str, str, str]:
    """Return what the error announces."""
    data = caught.value.metadata
    return data["length"], data["lowest_length"], data["tokens_to_recompute"]


@pytest.mark.parametrize(
    ("length", "first"), [(7, 0), (8, 0), (11, 4), (12, 4), (15, 8), (16, 8), (19, 12), (20, 12), (47, 40)]
)
def test_a_prefill_keeps_two_windows_and_a_token(store: SequenceStore, make: Make, length: int, first: int) -> None:
    """And what shares a block with them; the table keeps its length."""
    sequence = make(length)
    num_given_back = first // SIZE
    assert (sequence.first_position, sequence.num_given_back) == (first, num_given_back)
    assert sequence.lowest_length == (first + WINDOW if first else 1)
    assert sequence.block_ids[:num_given_back] == [0] * num_given_back
    assert len(sequence.block_ids) == -(-length // SIZE)
    assert store.pool.num_used == sequence.num_blocks == len(sequence.block_ids) - num_given_back
    assert store.usage.of("alice").num_blocks == sequence.num_blocks
    assert store.metrics().num_given_back == num_given_back


def test_what_needs_kv_that_is_gone_is_refused_with_its_price(store: SequenceStore, make: Make) -> None:
    """Fork, truncate, rewind and branch: below the lowest length nothing changes, at it all of them are exact."""
    sequence = make(20)
    table = sequence.block_ids
    for ask in (
        lambda: store.fork(sequence, 14, 1),
        lambda: store.truncate(sequence, sequence.handle_at(), 14),
        lambda: store.reservations.reserve_rewind(sequence, 14, 1),
        lambda: store.reservations.reserve_branch(sequence, 14, 1),
    ):
        with pytest.raises(KvGivenBack) as caught:
            ask()
        assert price_of(caught) == ("14", "15", "14")
        assert (sequence.block_ids, sequence.length, sequence.num_pins) == (table, 20, 0)
        store.check_integrity()
    (fork,) = store.fork(sequence, 15, 1)
    branch = store.commit(store.reservations.reserve_branch(sequence, 15, 2), [1, 2])
    assert fork.block_ids == [0, 0, 0, table[3]]
    assert (branch.block_ids[:3], branch.lowest_length, branch.window) == ([0, 0, 0], 15, WINDOW)
    assert store.truncate(sequence, sequence.handle_at(), 15) == 1
    assert (sequence.length, sequence.lowest_length) == (15, 15)


def test_a_sequence_grows_past_the_pool(make: Make) -> None:
    """What it gave back counts for neither the pool nor the quota."""
    limits = QuotaLimits(kv_tokens=4 * 6)
    store = SequenceStore(
        BlockPool(8, SIZE),
        instance="here",
        epoch="e1",
        max_context=200,
        max_ttl_s=100.0,
        limits_of=lambda _: limits,
    )
    sequence = store.commit(
        store.reservations.reserve_new("alice", b"model", 1, NewSequence(attention_window=WINDOW)), [0]
    )
    put(store, sequence, range(1, 150))
    assert (len(sequence.block_ids), sequence.num_blocks) == (38, 3)
    with pytest.raises(ExceedsPool):
        store.reservations.reserve_append(sequence, 4 * 6)
    with pytest.raises(QuotaExceeded):
        store.reservations.reserve_append(sequence, 4 * 4)
    store.commit(store.reservations.reserve_append(sequence, 4 * 3), list(range(12)))
    with pytest.raises(ExceedsPool):
        store.reserve_slots([SlotRequest(sequence, 190)])
    store.check_integrity()


def test_the_next_table_is_foreseen_without_what_will_be_given_back(store: SequenceStore, make: Make) -> None:
    """So a step that was queued ahead is the step of the append that comes."""
    sequence = make(15)
    reservation = store.reservations.reserve_append(sequence, 1)
    (foreseen,) = store.reservations.foresee([reservation])
    store.commit(reservation, [15])
    following = store.reservations.reserve_append(sequence, 1)
    assert following.block_ids == foreseen
    store.commit(following, [16])
    (reservation,) = (store.reservations.reserve_append(sequence, 1),)
    assert store.reservations.foresee([reservation]) == [sequence.block_ids]
    store.reservations.abort(reservation)


def test_shared_blocks_are_counted_with_gaps_and_without() -> None:
    """Without gaps they are the first ones of a table; with gaps they may be anywhere."""
    refcounts = [0, 5, 3, 2, 1, 1]
    tables: list[list[int]] = [[], [4], [1, 2, 3], [1, 2, 3, 4, 5], [2, 4]]
    assert [count_shared(table, refcounts, has_gaps=False) for table in tables] == [0, 0, 3, 3, 1]
    assert [count_shared(table, refcounts, has_gaps=True) for table in tables] == [0, 0, 3, 3, 1]
    assert count_shared([4, 1, 5, 2, 0], refcounts, has_gaps=True) == 2
