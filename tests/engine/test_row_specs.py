"""Row specs: what each row of an append returns."""

from __future__ import annotations

import dataclasses

import pytest

from ferrule_server.engine.appends import rows as module
from ferrule_server.engine.appends.rows import row_specs
from ferrule_server.engine.jobs import Drafts, OutputRequest
from ferrule_server.executor.base import OutputSpec

SPEC = OutputSpec(greedy=True)
SCORED = OutputRequest(SPEC, all_positions=True, wants_targets=True)


def test_each_row_has_the_token_behind_it_as_its_target() -> None:
    """The last one has none, or the one that is known to follow."""
    specs = row_specs(SCORED, (5, 6, 7))
    assert all(spec.sample is None for spec in specs.values())
    assert [(row, spec.target_id) for row, spec in specs.items()] == [(0, 6), (1, 7), (2, -1)]
    specs = row_specs(dataclasses.replace(SCORED, last_target=9), (5, 6, 7))
    assert [spec for spec in specs.values() if spec.target_id == 9] == [dataclasses.replace(SPEC, target_id=9)]


def test_of_a_verify_the_drafts_are_targets() -> None:
    """Rows are those of the last certain token and of each draft."""
    specs = row_specs(SCORED, (5, 6, 7, 8), Drafts(2))
    assert [(row, spec.target_id) for row, spec in specs.items()] == [(1, 7), (2, 8), (3, -1)]
    assert (0 in specs, 1 in specs, len(specs)) == (False, True, 3)


def test_a_long_prompt_to_be_scored_costs_the_engine_thread_next_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spec is made when its row is run: nobody who decodes waits for those of 100 000 rows."""
    num_made = 0

    def replace(spec: OutputSpec, target_id: int) -> OutputSpec:
        nonlocal num_made
        num_made += 1
        return dataclasses.replace(spec, target_id=target_id)

    monkeypatch.setattr(module, "replace", replace)
    specs = row_specs(SCORED, tuple(range(100_000)))
    assert len(specs) == 100_000
    assert num_made == 0
    assert specs[99_998].target_id == 99_999
    assert num_made == 1
