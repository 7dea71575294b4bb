"""Costs: what steps teach about the shortest step and the prices of rows."""

from __future__ import annotations

import pytest

from ferrule_server.engine.steps.costs import Chunk, Costs
from tests.engine.test_batcher import decode

STEP_S, ROW_S = 0.004, 0.004


def _learn(costs: Costs, num_steps: int, base_s: float) -> None:
    """Let two principals decode, one row each in a step."""
    chunks = [Chunk(decode(name), 1) for name in ("a", "b")]
    for _ in range(num_steps):
        costs.learn(chunks, base_s + 2 * ROW_S)


def test_the_shortest_step_stays_while_prices_explain_the_time_of_steps() -> None:
    """However long the load lasts: a shortest step that rises would make all steps longer."""
    costs = Costs(None)
    costs.base_s = STEP_S
    _learn(costs, 8192, STEP_S)
    assert costs.base_s == pytest.approx(STEP_S, rel=0.02)


def test_the_shortest_step_is_forgotten_if_prices_do_not_explain_it() -> None:
    """Steps that are longer now and then, however few rows they have, raise it."""
    costs = Costs(None)
    costs.base_s = STEP_S
    for _ in range(2048):
        _learn(costs, 1, 3 * STEP_S)
        _learn(costs, 8, STEP_S)
    assert costs.base_s > 1.1 * STEP_S
