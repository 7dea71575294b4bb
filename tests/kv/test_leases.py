"""Leases: when a sequence ends by itself, and when not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ferrule_server.errors import HandleExpired
from ferrule_server.kv.leases import PIN_RECHECK_S
from ferrule_server.kv.sequence_store import DEFAULT_TTL_S, SequenceStore
from tests.kv.conftest import Put

Advance = Callable[[float], None]


def test_a_handle_is_expired_before_anybody_collected_it(store: SequenceStore, put: Put, advance: Advance) -> None:
    """The answer depends on the clock alone."""
    handle = put([1]).handle_at()
    advance(DEFAULT_TTL_S)
    with pytest.raises(HandleExpired):
        store.resolve(handle, "alice")


def test_work_in_flight_keeps_a_sequence_alive(store: SequenceStore, put: Put, advance: Advance) -> None:
    """A pinned sequence is found by its handles past its lease, and is looked at again now and then."""
    sequence = put([1], ttl_s=5.0)
    reservation = store.reservations.reserve_append(sequence, 1)
    advance(6.0)
    assert store.expire() == []
    assert store.next_expiry() == PIN_RECHECK_S
    assert store.resolve(sequence.handle_at(), "alice") is sequence
    store.reservations.abort(reservation)
    advance(PIN_RECHECK_S)
    assert store.expire() == [sequence.handle_id]


@pytest.mark.parametrize("ended_s", [0.0, 0.1, 0.2, 0.3, 0.9, 1.0, 7.3])
@pytest.mark.parametrize("kind", ["append", "branch", "pin"])
def test_everything_is_back_within_a_second_of_the_last_pin(
    store: SequenceStore, put: Put, advance: Advance, kind: str, ended_s: float
) -> None:
    """Whenever work on an overdue sequence fails, and however it had been pinned and looked at before."""
    sequence = put([1, 2], ttl_s=5.0)
    reservation = None
    if kind == "append":
        reservation = store.reservations.reserve_append(sequence, 9)
    elif kind == "branch":
        reservation = store.reservations.reserve_branch(sequence, 1, 9)
    else:
        sequence.num_pins += 1
    advance(5.0)
    for _ in range(round(ended_s * 10)):
        assert store.expire() == []
        advance(0.1)
    if reservation is None:
        sequence.num_pins -= 1
    else:
        store.reservations.abort(reservation)
    waited_s = 0.0
    while not store.expire():
        wait_s = store.next_expiry()
        assert wait_s is not None
        advance(wait_s)
        waited_s += wait_s
    assert waited_s <= PIN_RECHECK_S < 0.5
    assert (store.pool.num_used, store.next_expiry()) == (0, None)


def test_a_shorter_lease_ends_sooner(store: SequenceStore, put: Put, advance: Advance) -> None:
    """The old end of a lease that was shortened does not count, nor does that of one made longer."""
    sequence = put([1], ttl_s=90.0)
    store.renew(sequence, 10.0)
    assert store.next_expiry() == 10.0
    store.renew(sequence, 50.0)
    assert store.next_expiry() == 50.0
    advance(10.0)
    assert store.expire() == []


def test_the_heap_stays_small_under_renewals_and_churn(store: SequenceStore, put: Put, advance: Advance) -> None:
    """Ever shorter leases and released sequences leave no more entries than twice the sequences and a few."""
    sequence = put([1], ttl_s=100.0)
    for index in range(500):
        store.renew(sequence, 100.0 - index * 0.1)
        store.release(put([2]).handle_at(), "alice")
        assert len(store._leases._entries) <= 2 * len(store.registry) + 65
    advance(50.0)
    store.check_integrity()
    assert store.next_expiry() == pytest.approx(0.1)
