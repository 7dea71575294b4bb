"""Debts: who waits for whom after a long step, and for how long."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType

import pytest

from ferrule_server.engine.appends.running import RunningAppend
from ferrule_server.engine.steps.batcher import Batcher
from ferrule_server.engine.steps.costs import LONGEST_S
from ferrule_server.engine.steps.debts import Debts
from ferrule_server.kv.sequence import Sequence
from tests.engine.test_batcher import Clock, running
from tests.engine.test_cohorts import Simulation, decoder

BASE_S = 0.004
"""The shortest step."""


def _rows_later(simulation: Simulation, names: list[str]) -> list[int]:
    """Return the rows of each principal in the last three quarters of the steps."""
    rows = Counter(dict.fromkeys(names, 0))
    for step in simulation.steps[len(simulation.steps) // 4 :]:
        rows.update(step)
    return [rows[name] for name in names]


@pytest.mark.parametrize(("num_principals", "row_s"), [(20, 0.004), (30, 0.004), (41, 0.002)])
def test_equal_principals_have_equal_rows_of_steps_that_are_cut(num_principals: int, row_s: float) -> None:
    """Each decodes one sequence, and their rows together are more than a step may take: none of them is left out."""
    names = [f"p{number}" for number in range(num_principals)]
    simulation = Simulation(*map(decoder, names), row_s=dict.fromkeys(names, row_s))
    simulation.run(8.0)
    counts = sorted(_rows_later(simulation, names))
    assert counts[0] >= 0.5 * counts[num_principals // 2]


def test_branches_do_not_cost_a_principal_its_turn() -> None:
    """One principal decodes 64 sequences beside forty that decode one each, of dear rows: it has no less than they."""
    names = [*(f"p{number}" for number in range(40)), "many"]
    clients = [decoder(name, 0.0005) for name in (*names, *["many"] * 63)]
    simulation = Simulation(*clients, row_s=dict.fromkeys(names, 0.002))
    simulation.run(5.0)
    *others, many = _rows_later(simulation, names)
    assert many >= 0.5 * sorted(others)[20]


def _others_s(long_s: float, others: list[str]) -> float:
    """Return how long the others decode, step by step, before a principal that has taken a long step may go on."""
    debts, now, began = Debts(LONGEST_S), 100.0, 102.0
    debts.charge({"long": long_s, "p0": 0.001}, now, BASE_S)
    now = began
    while "long" in debts.held(now, ["long", *others], {}, BASE_S):
        debts.charge(dict.fromkeys(others, BASE_S / len(others)), now, BASE_S)
        now += BASE_S
    return now - began


@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_step_longer_than_is_allowed_is_repaid_once(count: int) -> None:
    """All others together have as much time, and each as much as the longest step, however many have come."""
    waited_s = _others_s(2.0, [f"p{number}" for number in range(count)])
    assert 2.0 - LONGEST_S <= waited_s <= 2.0 + count * LONGEST_S + BASE_S


def test_a_step_that_is_allowed_is_repaid_to_each() -> None:
    """Two floods must not repay each other what they owe to a third principal."""
    assert _others_s(0.02, ["p0", "p1", "p2"]) == pytest.approx(3 * 0.02, abs=4 * BASE_S)


def _decoders(count: int) -> list[RunningAppend]:
    sequences = [object.__new__(Sequence) for _ in range(count)]
    for number, sequence in enumerate(sequences):
        sequence.handle_id = f"s{number}"
    return [running(1, f"p{number}", sequence) for number, sequence in enumerate(sequences)]


def _num_calls_of_a_plan(count: int) -> int:
    """Count the calls of Python functions in one plan while so many principals decode."""
    clock, num_calls = Clock(), 0
    batcher, runs = Batcher(4096, None, clock), _decoders(count)
    for _ in range(3):
        clock.now_ns += 5_000_000
        batcher.learn(batcher.plan(runs), 5_000_000)

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        batcher.plan(runs)
    finally:
        sys.setprofile(before)
    return num_calls


def test_a_plan_costs_no_more_for_each_principal_than_with_few() -> None:
    """256 principals that decode: eight times the work of 32."""
    assert _num_calls_of_a_plan(256) <= 9 * _num_calls_of_a_plan(32)
