"""The pace: against executors that exist only as formulas, with a clock that stands where it is put."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ferrule_server.engine.steps.pace import MIN_PREFILL_ROWS, Pace

Cost = Callable[[int, int], float]
"""Seconds of a step, by its decode rows and its prefill rows."""


def computing(decode_rows: int, prefill_rows: int) -> float:
    """Every row costs: 10 ms and 50 us a row."""
    return 0.010 + 50e-6 * (decode_rows + prefill_rows)


def reading(decode_rows: int, prefill_rows: int) -> float:
    """A step reads the weights, which takes 8 ms; more than 160 rows take longer than that."""
    return max(0.008, 50e-6 * (decode_rows + prefill_rows))


class Machine:
    """Runs steps on a fake clock as the engine would: as many prefill rows as the pace and 512 rows allow."""

    def __init__(self, cost: Cost, max_step_time_s: float | None = None) -> None:
        self.pace = Pace(max_step_time_s)
        self.cost = cost
        self.rows: list[int] = []
        self.step_s: list[float] = []

    def step(self, decode_rows: int, *, waited_s: float = 0.0, floods: bool = True) -> float:
        """Run one step; returns what it took."""
        rows = 0
        if floods:
            rows = min(512 - decode_rows, self.pace.prefill_rows(decode_rows, waited_s))
        step_s = self.cost(decode_rows, rows)
        self.pace.learn(decode_rows, rows, step_s)
        self.rows.append(rows)
        self.step_s.append(step_s)
        return step_s


@pytest.mark.parametrize("cost", [computing, reading])
@pytest.mark.parametrize("decode_rows", [1, 7, 64])
def test_mixed_steps_settle_at_twice_a_decode_step(cost: Cost, decode_rows: int) -> None:
    """Whatever the shape of the executor's cost, a flood makes steps about twice as long and no longer."""
    machine = Machine(cost)
    for _ in range(20):
        machine.step(decode_rows, floods=False)
    decode_s = cost(decode_rows, 0)
    for _ in range(200):
        machine.step(decode_rows)
    assert max(machine.step_s) <= 2.1 * decode_s
    settled = sorted(machine.step_s[-100:])
    assert settled[50] >= 1.7 * decode_s, "prompts get the time they may have"


def test_prompts_are_not_cut_to_save_less_than_a_client_notices() -> None:
    """Steps of a fifth of a millisecond: prompts have 2 ms beside them."""
    machine = Machine(lambda decode_rows, prefill_rows: 0.0002 + 10e-6 * prefill_rows)
    for _ in range(100):
        machine.step(1)
    assert 150 <= machine.rows[-1] <= 200


def test_a_step_time_that_is_given_is_kept() -> None:
    """--max-step-time is the budget, prompts and decodes together."""
    machine = Machine(computing, max_step_time_s=0.013)
    for _ in range(200):
        machine.step(4)
    assert max(machine.step_s[20:]) <= 0.0135
    assert sorted(machine.step_s[-100:])[50] >= 0.012


def test_a_step_time_below_a_decode_step_leaves_prompts_their_least() -> None:
    """The budget cannot be met; prompts still end."""
    machine = Machine(computing, max_step_time_s=0.001)
    for _ in range(100):
        machine.step(4)
    assert set(machine.rows) == {0, MIN_PREFILL_ROWS}
    assert machine.rows.count(0) <= 6


def test_a_decode_that_has_waited_leaves_less_to_prompts() -> None:
    """All of it up to most of a decode step, none behind a step that prompts made long, something every second step."""
    machine = Machine(computing)
    while not machine.rows or machine.rows[-1] < 150:
        machine.step(4)
    pace, decode_s = machine.pace, computing(4, 0)
    fresh, punctual, late, very_late = (
        pace.prefill_rows(4, waited) for waited in (0.0, 0.79 * decode_s, 1.3 * decode_s, 9.0)
    )
    assert fresh == punctual
    assert late == pytest.approx(0.5 * fresh, abs=2)
    assert very_late == 0
    machine.step(4, floods=False)
    assert pace.prefill_rows(4, 9.0) == pytest.approx(0.25 * fresh, abs=2)


@pytest.mark.parametrize("cost", [computing, reading])
def test_decodes_that_come_late_wait_for_the_longest_step_and_their_own_at_most(cost: Cost) -> None:
    """The promise: from arrival to end within the longest step and a decode step, whenever a decode arrives."""
    rng = random.Random(5)
    machine = Machine(cost)
    for _ in range(100):
        machine.step(1)
    machine.step_s.clear()
    latencies: list[float] = []
    for _ in range(2000):
        running_s = machine.step(0) if rng.random() < 0.3 else machine.step_s[-1] if machine.step_s else 0.0
        waited_s = running_s * rng.choice((0.0, 0.9, 1.0, rng.random()))
        latencies.append(waited_s + machine.step(1, waited_s=waited_s))
    late = [latency for latency in latencies if latency > 1.02 * (cost(1, 0) + max(machine.step_s))]
    assert len(late) <= 0.01 * len(latencies)
    assert sum(rows > 0 for rows in machine.rows) >= 0.4 * len(machine.rows), "prompts get on"


def test_a_step_without_decodes_behind_one_with_some_is_short() -> None:
    """Whoever decoded last is about to come back, and would wait for all of it."""
    machine = Machine(computing)
    while not machine.rows or machine.rows[-1] < 150:
        machine.step(4)
    for _ in range(2):
        machine.step(0)
    behind, later = machine.rows[-2:]
    assert behind == pytest.approx(later / 2, rel=0.1)


def test_decodes_that_are_always_late_leave_every_second_step_to_prompts() -> None:
    """More decodes than a step holds, or clients that answer slowly: prompts are not starved."""
    machine = Machine(computing)
    for _ in range(200):
        machine.step(4, waited_s=60.0)
    had = [rows > 0 for rows in machine.rows[20:]]
    assert sum(had) >= 0.45 * len(had)


def test_one_slow_step_holds_prompts_back_for_a_moment_only() -> None:
    """A page fault or a stolen core, in a mixed step and in one of decodes alone."""
    for floods in (True, False):
        machine = Machine(computing)
        for _ in range(100):
            machine.step(4)
        usual = machine.rows[-1]
        machine.cost = lambda decode_rows, prefill_rows: 100 * computing(decode_rows, prefill_rows)
        machine.step(4, floods=floods)
        machine.cost = computing
        for _ in range(60):
            machine.step(4)
        assert max(machine.step_s[101:]) <= 4.0 * computing(4, 0), floods
        assert machine.rows[-1] >= 0.8 * usual, floods


def test_a_slow_first_step_does_not_set_the_measure() -> None:
    """The first steps of a process are slow; the budget is made of the fastest, and more than one is looked at."""
    machine = Machine(computing)
    machine.cost = lambda decode_rows, prefill_rows: 50 * computing(decode_rows, prefill_rows)
    machine.step(4)
    machine.cost = computing
    for _ in range(100):
        machine.step(4)
    assert max(machine.step_s[1:]) <= 2.1 * computing(4, 0)


def test_longer_contexts_are_noticed_while_a_flood_lasts() -> None:
    """A mixed step tells nothing of decodes alone, so one step in a few leaves the prompts out."""
    machine = Machine(computing)
    for _ in range(100):
        machine.step(4)
    usual = machine.rows[-1]
    machine.cost = lambda decode_rows, prefill_rows: 0.030 * (decode_rows > 0) + computing(0, prefill_rows)
    for _ in range(1500):
        machine.step(4)
    assert machine.rows[-1] >= 2 * usual, "a decode step takes four times as long, so prompts may take longer"
    assert max(machine.step_s) <= 2.1 * 0.040
    machine.cost = computing
    for _ in range(100):
        machine.step(4)
    assert machine.step_s[-1] <= 2.1 * computing(4, 0)


def test_a_number_of_decodes_that_is_new_is_measured_before_it_is_mixed() -> None:
    """64 decodes take longer than one; nothing is known of them until a step had them alone."""
    machine = Machine(computing)
    for _ in range(50):
        machine.step(1)
    machine.rows.clear()
    machine.step(64)
    machine.step(64)
    machine.step(64)
    assert machine.rows[:2] == [0, 0]
    assert machine.rows[2] >= MIN_PREFILL_ROWS


def test_prompts_are_left_out_of_few_steps() -> None:
    """Measuring costs one step in thirty or so, however the number of decodes changes."""
    rng = random.Random(9)
    machine = Machine(computing)
    for _ in range(2000):
        machine.step(rng.randint(1, 100))
    assert machine.rows.count(0) <= 0.05 * 2000


def test_dearer_rows_are_noticed_within_a_few_steps() -> None:
    """A prompt in a long context costs more per row: steps are too long for a moment, not for good."""
    machine = Machine(computing)
    for _ in range(100):
        machine.step(4)
    machine.cost = lambda decode_rows, prefill_rows: 0.010 + 50e-6 * decode_rows + 400e-6 * prefill_rows
    for _ in range(40):
        machine.step(4)
    assert sum(step_s > 0.025 for step_s in machine.step_s[100:]) <= 5
    assert machine.step_s[-1] <= 0.022


def test_tails_of_a_few_rows_teach_little() -> None:
    """What a step with one prefill row took longer than one without is noise."""
    rng = random.Random(11)
    machine = Machine(computing)
    for _ in range(100):
        machine.step(4)
    usual = machine.rows[-1]
    for _ in range(20):
        machine.pace.learn(4, 1, computing(4, 1) * rng.uniform(0.9, 1.1))
    limit = machine.pace.prefill_rows(4, 0.0)
    assert limit == 0 or limit >= usual / 4


def test_a_clock_that_stands_still_stops_nothing() -> None:
    """Steps that take no time at all, as those of a fake executor."""
    machine = Machine(lambda decode_rows, prefill_rows: 0.0)
    for _ in range(200):
        machine.step(4)
    assert machine.rows.count(0) <= 10
    assert max(machine.rows) > MIN_PREFILL_ROWS
    machine.cost = computing
    for _ in range(100):
        machine.step(4)
    assert machine.step_s[-1] <= 2.1 * computing(4, 0)


def test_room_for_prompts_grows_no_faster_than_it_was_tried() -> None:
    """Where the first rows are nearly free, the guess for many of them is not trusted at once."""
    machine = Machine(lambda decode_rows, prefill_rows: 0.010 + 1e-3 * max(0, prefill_rows - 64))
    for _ in range(300):
        machine.step(4)
    assert max(machine.rows) <= 128
    assert sorted(machine.step_s[-100:])[50] <= 0.021
