"""Shares of the host's time: measured by principal, divided between those that are active."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule_server.fairness.turns import Shares

MS = 1_000_000
S = 1_000_000_000


class Clock:
    """Nanoseconds that move when they are told to."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        """Return the time."""
        return self.now_ns


def served(shares: Shares, clock: Clock, wants: dict[str, int], seconds: float) -> dict[str, int]:
    """Let principals work in slices whenever they may, one at a time, and return what each has done in all.

    Args:
        shares: The accounts.
        clock: Moves with the work; by 0.1 ms where nobody may work.
        wants: Work in each slice of a principal; whoever may have begun earliest goes first.
        seconds: How long.
    """
    done = dict.fromkeys(wants, 0)
    end_ns = clock.now_ns + int(seconds * S)
    while clock.now_ns < end_ns:
        name = min(wants, key=lambda name: shares.wait_ns(shares.account(name)))
        if shares.wait_ns(shares.account(name)) <= 0:
            clock.now_ns += wants[name]
            shares.charge(name, wants[name])
            done[name] += wants[name]
        else:
            clock.now_ns += MS // 10
    return done


def test_a_principal_that_is_alone_never_waits() -> None:
    """However much it works."""
    clock = Clock()
    shares = Shares(clock)
    assert served(shares, clock, {"alice": 5 * MS}, 1.0)["alice"] >= S
    assert not shares.is_contended


def test_two_that_want_all_have_half_each() -> None:
    """At least their part of it, by time and not by the number of slices: one slice may be ten times as long."""
    clock = Clock()
    shares = Shares(clock)
    done = served(shares, clock, {"flood": 10 * MS, "other": MS}, 4.0)
    assert 0.2 * S * 4 < done["flood"] < 0.65 * S * 4
    assert done["other"] > 0.35 * S * 4


def test_what_others_leave_may_be_used() -> None:
    """Next to somebody who works for a hundredth of the time, a principal has nearly all of it."""
    clock = Clock()
    shares = Shares(clock)
    done = 0
    for index in range(4000):
        if index % 100 == 0:
            shares.account("rare")
            shares.charge("rare", MS)
            clock.now_ns += MS
        if shares.wait_ns(shares.account("flood")) <= 0:
            shares.charge("flood", MS)
            done += MS
        clock.now_ns += MS
    assert done > 0.9 * 4 * S


def test_steps_are_demand_and_cost_nothing() -> None:
    """A principal whose rows run all the time leaves a flood its part of the event loop, and never waits itself."""
    clock = Clock()
    shares = Shares(clock)
    shares.account("victim")
    flood = 0
    for _ in range(4000):
        shares.add_service([("victim", True)], MS)
        assert shares.wait_ns(shares.account("victim")) <= 0
        if shares.wait_ns(shares.account("flood")) <= 0:
            shares.charge("flood", MS)
            flood += MS
        clock.now_ns += MS
    assert 0.2 * 4 * S < flood < 0.4 * 4 * S


def test_host_work_is_charged_as_work_on_the_loop_is() -> None:
    """What the engine thread counts delays the next piece of work on the event loop."""
    clock = Clock()
    shares = Shares(clock)
    shares.account("victim")
    account = shares.account("flood")
    assert shares.wait_ns(account) <= 0
    shares.add_host_work("flood", 20 * MS)
    assert shares.wait_ns(account) > 10 * MS


def test_appends_explain_work() -> None:
    """A principal whose requests bring appends is charged for what is beyond them; nothing is saved up for later."""
    clock = Clock()
    shares = Shares(clock)
    shares.account("other")
    account = shares.account("rows")
    shares.add_service([("rows", True)] * 1000, MS)
    shares.charge("rows", 40 * MS)
    assert shares.wait_ns(account) <= 0
    shares.add_service([("rows", True)] * 100_000, MS)
    assert shares.wait_ns(account) <= 0
    shares.charge("rows", 40 * MS)
    assert shares.wait_ns(account) > 0


def test_tokens_of_a_generate_explain_no_work() -> None:
    """It has 64 rows in each step, and one request; others of its principal are charged as if it were not there."""
    clock = Clock()
    shares = Shares(clock)
    used_ns = 0
    for _ in range(400):
        shares.account("calm")
        flood = shares.account("flood")
        if shares.wait_ns(flood) <= 0:
            shares.charge("flood", 3 * MS)
            used_ns += 3 * MS
        clock.now_ns += 5 * MS
        shares.add_service([("calm", True), *[("flood", False)] * 64], 5 * MS)
    assert used_ns <= 0.4 * 400 * 5 * MS


def test_a_long_generate_counts_although_its_client_asks_for_nothing() -> None:
    """The engine opens an account for whoever it works for."""
    clock = Clock()
    shares = Shares(clock)
    shares.account("flood")
    clock.now_ns += 5 * S
    shares.add_service([("quiet", True)], MS)
    shares.account("flood")
    assert shares.is_contended


def test_who_comes_new_takes_nothing_before_it_is_measured() -> None:
    """A health check every other second does not hold back a principal that is busy alone."""
    clock = Clock()
    shares = Shares(clock)
    for index in range(6000):
        if index % 2000 == 1999:
            shares.account("probe")
        assert shares.wait_ns(shares.account("busy")) <= 0
        shares.charge("busy", 6 * MS // 10)
        clock.now_ns += MS


def test_a_debt_does_not_outlive_contention() -> None:
    """Once the others are idle nothing is waited for; a debt that is not worked off is not forgotten either."""
    clock = Clock()
    shares = Shares(clock)
    shares.account("other")
    account = shares.account("flood")
    shares.charge("flood", 500 * MS)
    assert shares.wait_ns(account) > 0
    clock.now_ns += 1100 * MS
    shares.add_service([("other", True)], MS)
    clock.now_ns += 100 * MS
    shares.charge("flood", 900 * MS)
    assert shares.wait_ns(shares.account("flood")) > 0
    clock.now_ns += 5 * S
    assert shares.wait_ns(shares.account("flood")) <= 0


def test_who_is_idle_is_forgotten() -> None:
    """After a second without requests and steps; a debt is gone by then or small."""
    clock = Clock()
    shares = Shares(clock)
    for index in range(100):
        shares.account(f"p{index}")
    assert len(shares._accounts) == 100
    clock.now_ns += 2 * S
    shares.account("alice")
    assert len(shares._accounts) == 1
    assert not shares.is_contended


@pytest.mark.parametrize("num_others", [1, 2, 7])
def test_several_floods_leave_an_equal_share(num_others: int) -> None:
    """N principals that want everything have about one part in N each."""
    clock = Clock()
    shares = Shares(clock)
    wants = {"victim": MS // 2, **{f"flood{index}": 3 * MS for index in range(num_others)}}
    done = served(shares, clock, wants, 6.0)
    assert done["victim"] > 0.4 * 6 * S / (num_others + 1)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 30 * MS), st.integers(0, 400 * MS)), max_size=200))
def test_rates_are_at_least_a_part_of_an_equal_share_whatever_happens(works: Iterable[tuple[str, int, int]]) -> None:
    """No order of work makes a rate less than half of one part in as many as are known."""
    clock = Clock()
    shares = Shares(clock)
    for name, work_ns, pause_ns in works:
        account = shares.account(name)
        shares.charge(name, work_ns)
        clock.now_ns += pause_ns
        assert 0.5 / len(shares._accounts) - 1e-9 <= account.rate <= 1.0
        assert 0.0 <= account.demand <= 1.0
        assert shares.is_contended == (len(shares._accounts) > 1)
