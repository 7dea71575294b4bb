"""The arithmetic of the fairness bars."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.load import Measured
from tests.hostile.fairness import Comparison, Phase, phase_of

CALM = Phase(p50_ms=4.0, p99_ms=9.0, longest_step_ms=8.0, per_s=200.0)


def comparison(attacked: Phase, control: Phase | None = CALM) -> Comparison:
    """Return a comparison of one victim with one connection."""
    return Comparison(1, 1, CALM, attacked, control, 0.0, {"OK": 1}, 0.0, 0.0)


def measured(*latencies_ms: float) -> Measured:
    """Return calls one after another, from time 0."""
    began_s = [sum(latencies_ms[:index]) / 1e3 for index in range(len(latencies_ms))]
    return Measured(began_s, list(latencies_ms), [1.0] * len(latencies_ms), [], {}, (0.0, sum(latencies_ms) / 1e3))


@pytest.mark.parametrize(("p99_ms", "per_s", "is_met"), [(27.0, 90.0, True), (27.1, 90.0, False), (27.0, 89.0, False)])
def test_bars_are_a_step_and_ten_milliseconds_and_45_percent(p99_ms: float, per_s: float, is_met: bool) -> None:
    """Exactly at the bar it is met."""
    assert comparison(Phase(4.0, p99_ms, 8.0, per_s)).is_met is is_met


def test_the_control_is_subtracted_once_and_never_added() -> None:
    """A slow control excuses as much, a fast one nothing."""
    attacked = Phase(10.0, 40.0, 8.0, 50.0)
    slow, fast = Phase(8.0, 25.0, 8.0, 100.0), Phase(2.0, 5.0, 8.0, 300.0)
    assert comparison(attacked, slow).corrected_p99_ms == 24.0
    assert comparison(attacked, slow).corrected_share == 0.5
    assert comparison(attacked, fast).corrected_p99_ms == comparison(attacked, None).corrected_p99_ms == 40.0
    assert comparison(attacked, fast).corrected_share == comparison(attacked, None).corrected_share == 0.25


def test_a_call_that_hangs_for_the_whole_phase_is_its_latency() -> None:
    """It began before the phase and ends after it: nothing is answered, and nothing is hidden."""
    phase = phase_of([measured(5.0, 5000.0, 5.0)], (1.0, 3.0))
    assert (phase.p99_ms, phase.per_s) == (5000.0, 0.0)


def test_a_phase_without_any_call_is_no_success() -> None:
    """Its latency is its length."""
    assert phase_of([measured(5.0)], (1.0, 3.0)) == Phase(2000.0, 2000.0, 0.0, 0.0)


@given(st.lists(st.lists(st.floats(0.1, 100.0), min_size=5, max_size=30), min_size=1, max_size=3))
def test_the_worst_victim_counts(latencies_ms: list[list[float]]) -> None:
    """However many there are, one that suffers is not averaged away."""
    victims = [measured(*each) for each in latencies_ms]
    span = (0.0, min(victim.span_s[1] for victim in victims))
    together, alone = phase_of(victims, span), [phase_of([victim], span) for victim in victims]
    assert together.p99_ms == max(each.p99_ms for each in alone)
    assert together.per_s == min(each.per_s for each in alone)
