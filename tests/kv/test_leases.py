"""Leases: when a sequence ends by itself, and when not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ferrule_server.errors import HandleExpired, HandleLost, HandleUnknown
from ferrule_server.kv import registry
from ferrule_server.kv.handle import Handle
from ferrule_server.kv.leases import PIN_RECHECK_S
from ferrule_server.kv.registry import TOMBSTONE_S
from ferrule_server.kv.sequence_store import DEFAULT_TTL_S, SequenceStore
from ferrule_server.quotas import MIN_TTL_S
from tests.kv.conftest import Put

Advance = Callable[[float], None]


def test_a_lease_that_ran_out_frees_everything(store: SequenceStore, put: Put, advance: Advance) -> None:
    """Exactly at its end, not before."""
    sequence = put([1, 2, 3, 4, 5])
    assert store.next_expiry() == DEFAULT_TTL_S
    advance(DEFAULT_TTL_S - 0.5)
    assert store.expire() == []
    assert store.next_expiry() == 0.5
    advance(0.5)
    assert store.expire() == [sequence.handle_id]
    assert (store.pool.num_used, store.next_expiry(), sequence.is_released) == (0, None, True)


def test_a_handle_is_expired_before_anybody_collected_it(store: SequenceStore, put: Put, advance: Advance) -> None:
    """The answer depends on the clock alone."""
    handle = put([1]).handle_at()
    advance(DEFAULT_TTL_S)
    with pytest.raises(HandleExpired):
        store.resolve(handle, "alice")


def test_every_successful_operation_renews(store: SequenceStore, put: Put, advance: Advance) -> None:
    """Append, fork, branch (its source too), truncate and keep-alive start the lease anew."""
    sequence = put([1, 2, 3])
    for operate in (
        lambda: put([4], sequence),
        lambda: store.fork(sequence, 2, 1),
        lambda: store.commit(store.reservations.reserve_branch(sequence, 2, 1), [9]),
        lambda: store.truncate(sequence, sequence.handle_at(), 2),
        lambda: store.renew(sequence),
    ):
        advance(1.0)
        operate()
        assert sequence.expires_at - store.clock() == DEFAULT_TTL_S


def test_an_aborted_append_does_not_renew(store: SequenceStore, put: Put, advance: Advance) -> None:
    """A failure is no sign of life worth a lease."""
    sequence = put([1])
    reservation = store.reservations.reserve_append(sequence, 1)
    advance(1.0)
    store.reservations.abort(reservation)
    assert sequence.expires_at - store.clock() == DEFAULT_TTL_S - 1.0


@pytest.mark.parametrize(("ttl_s", "granted_s"), [(0.0, MIN_TTL_S), (-3.0, MIN_TTL_S), (33.0, 33.0), (1e9, 100.0)])
def test_a_lease_is_clamped(store: SequenceStore, put: Put, ttl_s: float, granted_s: float) -> None:
    """The server's limits hold, and the caller is told what it got; asking without a number keeps it."""
    sequence = put([1], ttl_s=ttl_s)
    assert sequence.ttl_s == granted_s
    assert store.renew(sequence, ttl_s) == granted_s
    assert store.renew(sequence) == granted_s


def test_branches_have_leases_of_their_own(store: SequenceStore, put: Put, advance: Advance) -> None:
    """As long as their source's unless asked otherwise; renewing one renews no other."""
    sequence = put([1, 2, 3], ttl_s=20.0)
    alike, longer = store.fork(sequence, 3, 1)[0], store.fork(sequence, 3, 1, ttl_s=90.0)[0]
    branch = store.commit(store.reservations.reserve_branch(sequence, 2, 1), [9])
    assert [each.ttl_s for each in (alike, longer, branch)] == [20.0, 90.0, 20.0]
    advance(15.0)
    store.renew(alike)
    advance(5.0)
    assert sorted(store.expire()) == sorted([sequence.handle_id, branch.handle_id])


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


def test_a_renewal_under_a_pin_counts(store: SequenceStore, put: Put, advance: Advance) -> None:
    """An overdue sequence that was kept alive meanwhile lives on for as long as that says, not until the next look."""
    sequence = put([1], ttl_s=5.0)
    reservation = store.reservations.reserve_append(sequence, 1)
    advance(6.0)
    assert store.expire() == []
    store.renew(sequence, 20.0)
    store.reservations.abort(reservation)
    advance(19.75)
    assert (store.expire(), store.next_expiry()) == ([], 0.25)
    advance(0.25)
    assert store.expire() == [sequence.handle_id]


def test_tombstones_tell_the_truth(
    store: SequenceStore, put: Put, advance: Advance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why a handle is gone, to its owner and to others; a reason ends with its time though nothing else happens."""
    monkeypatch.setattr(registry, "MAX_TOMBSTONES", 2)
    expired, foreign = put([1]), put([2], principal="bob")
    released = put([3])
    handles = {name: each.handle_at() for name, each in (("expired", expired), ("foreign", foreign))}
    handles["released"] = released.handle_at()
    store.release(handles["released"], "alice")
    advance(DEFAULT_TTL_S)
    assert len(store.expire()) == 2

    def answer(handle: Handle, principal: str = "alice") -> type[Exception]:
        with pytest.raises(HandleUnknown) as caught:
            store.resolve(handle, principal)
        return caught.type

    assert [answer(handles[name]) for name in ("expired", "foreign", "released")] == [
        HandleExpired,
        HandleUnknown,
        HandleUnknown,
    ]
    assert (answer(handles["foreign"], "bob"), answer(handles["expired"], "bob")) == (HandleExpired, HandleUnknown)
    assert store.release(handles["expired"], "alice") is None
    assert answer(handles["expired"]) is HandleExpired
    advance(TOMBSTONE_S)
    assert [answer(handles["expired"]), answer(handles["foreign"], "bob")] == [HandleUnknown, HandleUnknown]
    assert store.registry.num_tombstones == 2

    later = [put([index]).handle_at() for index in range(3)]
    lost = put([9], ttl_s=100.0)
    advance(DEFAULT_TTL_S)
    store.expire()
    assert [answer(each) for each in later].count(HandleExpired) == 2
    handle = lost.handle_at()
    store.lose_all()
    assert (answer(handle), answer(handle, "bob")) == (HandleLost, HandleUnknown)


def test_the_source_of_a_branch_is_kept_alive(store: SequenceStore, put: Put, advance: Advance) -> None:
    """In-flight work pins what it reads."""
    sequence = put([1, 2], ttl_s=5.0)
    reservation = store.reservations.reserve_branch(sequence, 1, 1)
    advance(6.0)
    assert store.expire() == []
    store.commit(reservation, [9])
    assert sequence.expires_at - store.clock() == 5.0


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
