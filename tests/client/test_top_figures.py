"""The arithmetic of ``ferrule top``: rates by difference, also over restarts, and quantiles of the last seconds."""

from __future__ import annotations

import json
import math

import pytest

from ferrule.types import Status
from ferrule_cli.top.figures import WINDOW_S, Figures, History, Look, as_dict
from tests.client.views import blank, histogram, look, principal, sequence


def _two(before: Look, after: Look) -> Figures:
    history = History()
    history.add(before)
    return history.add(after)


def test_rates_are_differences_over_the_servers_time() -> None:
    """Per second of the server's clock, whatever the answers took on their way."""
    before = look(100.0, num_decode_tokens=1000, num_prefill_tokens=10, num_steps=50, num_step_rows=400, step_ns=0)
    after = look(
        102.0,
        num_decode_tokens=1500,
        num_prefill_tokens=110,
        num_steps=70,
        num_step_rows=480,
        step_ns=1_500_000_000,
        num_errors=8,
        num_refused={"QUEUE_FULL": 6, "HANDLE_STALE": 2},
        num_prefix_lookup_tokens=100,
        num_prefix_hit_tokens=25,
        num_forks=4,
    )
    rates = _two(before, Look(before.at_s + 9.0, after.status, after.view)).rates
    assert rates is not None
    assert (rates.seconds, rates.generated_tokens, rates.prompt_tokens, rates.steps) == (2.0, 250.0, 50.0, 10.0)
    assert (rates.rows_per_step, rates.busy, rates.refused, rates.forks) == (4.0, 0.75, 4.0, 2.0)
    assert rates.refused_by == {"QUEUE_FULL": 3.0, "HANDLE_STALE": 1.0}
    assert rates.prefix_hit_rate == 0.25


def test_one_look_gives_no_rates() -> None:
    """Nor does a server on which no time has passed; nothing is divided by 0."""
    history = History()
    assert history.add(look(100.0, num_steps=5)).rates is None
    assert history.add(look(100.0, num_steps=5)).rates is None
    moved = history.add(look(101.0, num_steps=8))
    assert moved.rates is not None
    assert (moved.rates.steps, moved.rates.rows_per_step) == (3.0, 0.0)


def test_the_same_snapshot_again_changes_nothing() -> None:
    """A server shows one snapshot for a while: the rates stay those of the last change."""
    history = History()
    history.add(look(100.0, num_steps=5))
    rates = history.add(look(101.0, num_steps=8)).rates
    again = history.add(look(101.0, num_steps=8))
    assert again.rates == rates
    assert len(again.generated_points) == 1


def test_a_new_run_of_the_server_begins_anew() -> None:
    """Counters that are smaller give no negative rate, and the restart is told."""
    history = History()
    history.add(look(100.0, num_decode_tokens=1000))
    history.add(look(101.0, num_decode_tokens=1100))
    fresh = history.add(look(150.0, num_decode_tokens=30, epoch="e2"))
    assert (fresh.rates, fresh.restarts) == (None, 1)
    later = history.add(look(151.0, num_decode_tokens=50, epoch="e2"))
    assert later.rates is not None
    assert (later.rates.generated_tokens, later.restarts) == (20.0, 1)
    assert later.generated_points == (100.0, 20.0)


def test_a_counter_that_is_smaller_was_counted_anew() -> None:
    """Whatever made it so: a rate is never negative."""
    rates = _two(look(100.0, num_forks=9, num_errors=5), look(102.0, num_forks=4, num_errors=5)).rates
    assert rates is not None
    assert (rates.forks, rates.refused) == (2.0, 0.0)


def test_a_server_that_loads_has_no_rates_and_then_some() -> None:
    """Looks without a view are no ground for rates."""
    history = History()
    status = blank(Status, state="starting", epoch="e1", load_progress=0.4)
    loading = history.add(Look(1000.0, status))
    assert (loading.rates, loading.principals, loading.latencies) == (None, (), {})
    assert history.add(look(3.0, num_steps=5)).rates is None
    assert history.add(look(4.0, num_steps=6)).rates is not None


def test_guests_are_told_by_their_own_clock() -> None:
    """Without the role there is no uptime to rely on; what nobody told them stays unknown."""
    before = look(500.0, cells=None, num_decode_tokens=10, num_steps=1)
    after = look(502.0, cells=None, num_decode_tokens=30, num_steps=5)
    rates = _two(before, after).rates
    assert rates is not None
    assert (rates.generated_tokens, rates.steps, rates.rows_per_step, rates.busy) == (10.0, 2.0, None, None)


def test_quantiles_are_those_of_the_last_seconds() -> None:
    """What was measured before the window is not in them; what was not measured is None."""
    history = History()
    for second in range(30):
        slow = histogram(0, 0, 0, 100 if second >= 5 else 0)
        figures = history.add(look(100.0 + second, step_seconds=slow))
        if second == 5:
            assert figures.latencies["step"].p50 == pytest.approx(0.006)
    assert second > 5 + WINDOW_S
    assert figures.latencies["step"].p50 is None
    assert figures.latencies["queue"].p99 is None


def test_quantiles_lie_within_their_range() -> None:
    """By a straight line; beyond the last bound it is that bound, and an empty histogram has none."""
    assert histogram().quantile(0.5) is None
    assert histogram(10).quantile(0.5) == pytest.approx(0.0005)
    assert histogram(0, 10).quantile(1.0) == pytest.approx(0.002)
    assert histogram(5, 5).quantile(0.75) == pytest.approx(0.0015)
    assert histogram(0, 0, 0, 0, 7).quantile(0.99) == 0.008
    assert histogram(1, 0, 0, 9).quantile(0.05) == pytest.approx(0.0005)


def test_histograms_of_another_run_are_not_subtracted() -> None:
    """A count that is smaller than before means that it began anew."""
    assert histogram(3, 4).since(histogram(1, 4)).counts == (2, 0, 0, 0, 0)
    assert histogram(1, 1).since(histogram(5, 0)).counts == (1, 1, 0, 0, 0)


def test_principals_are_ordered_by_how_long_their_appends_wait() -> None:
    """Means over the window; one without an append has no time."""
    before = look(
        100.0,
        principals=(principal("alice", num_appends=10, queue_ns=10), principal("idle", num_appends=5)),
        known_principals=2,
    )
    after = look(
        102.0,
        principals=(
            principal("alice", num_appends=20, num_tokens=40, queue_ns=10 + 20_000_000, run_ns=50_000_000),
            principal("bob", num_appends=2, num_tokens=4, queue_ns=10_000_000),
            principal("idle", num_appends=5, queued_jobs=3),
        ),
        known_principals=3,
    )
    figures = _two(before, after).principals
    assert [one.principal for one in figures] == ["bob", "alice", "idle"]
    assert [one.queue_s for one in figures] == [pytest.approx(0.005), pytest.approx(0.002), None]
    assert [one.tokens for one in figures] == [2.0, 20.0, 0.0]
    assert figures[1].run_s == pytest.approx(0.005)


def test_a_principal_that_was_forgotten_meanwhile_counts_anew() -> None:
    """Smaller sums are new ones."""
    before = look(100.0, principals=(principal("alice", num_appends=10, num_tokens=90, queue_ns=10**10),))
    after = look(102.0, principals=(principal("alice", num_appends=2, num_tokens=4, queue_ns=2_000_000),))
    (alice,) = _two(before, after).principals
    assert alice.tokens == 2.0
    assert alice.queue_s == pytest.approx(0.001)


def test_a_principal_that_was_not_listed_before_is_not_charged_with_its_past() -> None:
    """Where the list was not whole, its sums may be from any time."""
    before = look(100.0, principals=(), known_principals=3)
    after = look(102.0, principals=(principal("alice", num_appends=10**6, num_tokens=10**6),), known_principals=3)
    (alice,) = _two(before, after).principals
    assert (alice.tokens, alice.queue_s) == (0.0, None)


def test_figures_are_json_without_surprises() -> None:
    """Plain numbers, no NaN, and no picture."""
    figures = _two(look(100.0), look(101.0, sequences=(sequence(1),), principals=(principal("alice"),)))
    facts = json.loads(json.dumps(as_dict(figures), allow_nan=False))
    assert facts["rates"]["steps"] == 0.0
    assert facts["kv"]["used_blocks"] == 40
    assert facts["sequences"][0]["handle_id"] == f"{1:016x}"
    assert facts["latencies_s"]["step"] == {"p50": None, "p99": None}
    assert not any(isinstance(value, float) and math.isnan(value) for value in facts["rates"].values())
