"""Leases: when a sequence ends by itself, and when not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ferrule_server.errors import HandleExpired
from ferrule_server.kv.leases import PIN_RECHECK_S
from ferrule_server.kv.store import DEFAULT_TTL_S, MIN_TTL_S, KvStore
from tests.kv.conftest import Put

Advance = Callable[[float], None]


def test_a_lease_that_ran_out_frees_everything(store: KvStore, put: Put, advance: Advance) -> None:
    """Exactly at its end, not before."""
    sequence = put([1, 2, 3, 4, 5])
    assert store.next_expiry() == DEFAULT_TTL_S
    advance(DEFAULT_TTL_S - 0.5)
    assert store.expire() == []
    assert store.next_expiry() == 0.5
    advance(0.5)
    assert store.expire() == [sequence.handle_id]
    assert (store.pool.num_used, store.next_expiry(), sequence.is_released) == (0, None, True)


def test_a_handle_is_expired_before_anybody_collected_it(store: KvStore, put: Put, advance: Advance) -> None:
    """The answer depends on the clock alone."""
    handle = store.handle_at(put([1]))
    advance(DEFAULT_TTL_S)
    with pytest.raises(HandleExpired):
        store.resolve(handle, "alice")


def test_every_successful_operation_renews(store: KvStore, put: Put, advance: Advance) -> None:
    """Append, fork, branch (its source too), truncate and keep-alive start the lease anew."""
    sequence = put([1, 2, 3])
    for operate in (
        lambda: put([4], sequence),
        lambda: store.fork(sequence, 2, 1),
        lambda: store.commit(store.reserve_branch(sequence, 2, 1), [9]),
        lambda: store.truncate(sequence, store.handle_at(sequence), 2),
        lambda: store.renew(sequence),
    ):
        advance(1.0)
        operate()
        assert sequence.expires_at - store.now() == DEFAULT_TTL_S


def test_an_aborted_append_does_not_renew(store: KvStore, put: Put, advance: Advance) -> None:
    """A failure is no sign of life worth a lease."""
    sequence = put([1])
    reservation = store.reserve_append(sequence, 1)
    advance(1.0)
    store.abort(reservation)
    assert sequence.expires_at - store.now() == DEFAULT_TTL_S - 1.0


@pytest.mark.parametrize(("ttl_s", "granted_s"), [(0.0, MIN_TTL_S), (-3.0, MIN_TTL_S), (33.0, 33.0), (1e9, 100.0)])
def test_a_lease_is_clamped(store: KvStore, put: Put, ttl_s: float, granted_s: float) -> None:
    """The server's limits hold, and the caller is told what it got; asking without a number keeps it."""
    sequence = put([1], ttl_s=ttl_s)
    assert sequence.ttl_s == granted_s
    assert store.renew(sequence, ttl_s) == granted_s
    assert store.renew(sequence) == granted_s


def test_branches_have_leases_of_their_own(store: KvStore, put: Put, advance: Advance) -> None:
    """As long as their source's unless asked otherwise; renewing one renews no other."""
    sequence = put([1, 2, 3], ttl_s=20.0)
    alike, longer = store.fork(sequence, 3, 1)[0], store.fork(sequence, 3, 1, ttl_s=90.0)[0]
    branch = store.commit(store.reserve_branch(sequence, 2, 1), [9])
    assert [each.ttl_s for each in (alike, longer, branch)] == [20.0, 90.0, 20.0]
    advance(15.0)
    store.renew(alike)
    advance(5.0)
    assert sorted(store.expire()) == sorted([sequence.handle_id, branch.handle_id])


def test_work_in_flight_keeps_a_sequence_alive(store: KvStore, put: Put, advance: Advance) -> None:
    """A pinned sequence is found by its handles past its lease, and is looked at again now and then."""
    sequence = put([1], ttl_s=5.0)
    reservation = store.reserve_append(sequence, 1)
    advance(6.0)
    assert store.expire() == []
    assert store.next_expiry() == PIN_RECHECK_S
    assert store.resolve(store.handle_at(sequence), "alice") is sequence
    store.abort(reservation)
    advance(PIN_RECHECK_S)
    assert store.expire() == [sequence.handle_id]


def test_the_source_of_a_branch_is_kept_alive(store: KvStore, put: Put, advance: Advance) -> None:
    """In-flight work pins what it reads."""
    sequence = put([1, 2], ttl_s=5.0)
    reservation = store.reserve_branch(sequence, 1, 1)
    advance(6.0)
    assert store.expire() == []
    store.commit(reservation, [9])
    assert sequence.expires_at - store.now() == 5.0


def test_a_shorter_lease_ends_sooner(store: KvStore, put: Put, advance: Advance) -> None:
    """The old end of a lease that was shortened does not count, nor does that of one made longer."""
    sequence = put([1], ttl_s=90.0)
    store.renew(sequence, 10.0)
    assert store.next_expiry() == 10.0
    store.renew(sequence, 50.0)
    assert store.next_expiry() == 50.0
    advance(10.0)
    assert store.expire() == []


def test_the_heap_stays_small_under_renewals_and_churn(store: KvStore, put: Put, advance: Advance) -> None:
    """Ever shorter leases and released sequences leave no more entries than twice the sequences and a few."""
    sequence = put([1], ttl_s=100.0)
    for index in range(500):
        store.renew(sequence, 100.0 - index * 0.1)
        store.release(store.handle_at(put([2])), "alice")
        assert len(store._leases._entries) <= 2 * store.num_sequences + 65
    advance(50.0)
    store.check_integrity()
    assert store.next_expiry() == pytest.approx(0.1)
