"""--debug-top-tokens: the log shows the five best tokens of every output row, and answers stay as they are."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from ferrule_server.engine.jobs import Acceptance, Drafts, OutputRequest
from ferrule_server.errors import NonFiniteLogits
from ferrule_server.executor.base import NO_SLOT, OutputSpec
from ferrule_server.kv.handle import StalePolicy
from tests.engine.harness import GREEDY, Harness, append
from tests.fakes import FakeExecutor, fake_logits

VOCAB = 32
TOP = OutputRequest(OutputSpec(num_top_logprobs=2))
MANY = OutputRequest(OutputSpec(num_top_logprobs=7))


def best_of(tokens: tuple[int, ...], count: int = 5) -> list[int]:
    """The best tokens after these, best first."""
    best: list[int] = np.argsort(-fake_logits(tokens, VOCAB))[:count].tolist()
    return best


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, int, list[int]]]:
    """Handle, position and tokens of each row in the log."""
    rows = []
    for record in caplog.records:
        if record.message.startswith("top tokens"):
            handle_id, position, path, _, best = record.args  # type: ignore[misc]
            assert path == "fake"
            rows.append((str(handle_id), int(str(position)), [int(each.split(":")[0]) for each in str(best).split()]))
    return rows


def test_every_output_row_is_logged_and_answered_as_it_was_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    """Prompts, decodes, branches, verifies; with fewer, as many or more of the best asked for, or none."""
    caplog.set_level(logging.INFO)
    with Harness(debug_top_tokens=True) as harness:
        assert [record.levelname for record in caplog.records if "debug_top_tokens" in record.message] == ["WARNING"]
        first = harness.prefill(1, 2, 3)
        assert (first.rows[0].token, first.rows[0].top_ids) == (best_of((1, 2, 3))[0], None)
        second = harness.decode(first.handle, 4, output=TOP)
        assert second.rows[0].top_ids is not None
        assert second.rows[0].top_logprobs is not None
        assert second.rows[0].top_ids.tolist() == best_of((1, 2, 3, 4), 2)
        assert len(second.rows[0].top_logprobs) == 2
        many = harness.decode(second.handle, 5, output=MANY)
        assert many.rows[0].top_ids is not None
        assert many.rows[0].top_ids.tolist() == best_of((1, 2, 3, 4, 5), 7)
        harness.submit(append(first.handle, 9, on_stale=StalePolicy.FORK)).result()
        job = append(many.handle, 6, 7, drafts=Drafts(1, Acceptance.EXACT))
        harness.submit(job).result()
    handle_id = first.handle.handle_id
    assert logged(caplog) == [
        ("new", 3, best_of((1, 2, 3))),
        (handle_id, 4, best_of((1, 2, 3, 4))),
        (handle_id, 5, best_of((1, 2, 3, 4, 5))),
        ("new", 4, best_of((1, 2, 3, 9))),
        (handle_id, 6, best_of((1, 2, 3, 4, 5, 6))),
        (handle_id, 7, best_of((1, 2, 3, 4, 5, 6, 7))),
    ]


def test_the_step_that_is_debugged_runs_as_without_debugging(caplog: pytest.LogCaptureFixture) -> None:
    """With the same outputs and slots; a query of the same rows follows, which writes nothing."""
    caplog.set_level(logging.INFO)
    with Harness(debug_top_tokens=True) as harness:
        row = harness.prefill(1, 2, 3, output=GREEDY).rows[0]
        step, query = harness.executor.batches
    assert step.output_specs == (GREEDY.spec,)
    assert (step.slot_mapping >= 0).all()
    assert query.output_specs == (OutputSpec(num_top_logprobs=5),)
    assert (query.slot_mapping == NO_SLOT).all()
    assert f"path=fake token={row.token} best={row.token}:" in caplog.text


def test_a_query_that_fails_costs_its_lines_only(caplog: pytest.LogCaptureFixture) -> None:
    """The step has run, and is answered."""
    executor = FakeExecutor()
    executor.errors = {2: RuntimeError("no memory")}
    with Harness(executor, debug_top_tokens=True) as harness:
        assert harness.prefill(1, 2, 3).rows[0].token == best_of((1, 2, 3))[0]
    assert "top tokens of 1 rows could not be found" in caplog.text


def test_a_row_that_is_not_finite_is_logged_as_such(caplog: pytest.LogCaptureFixture) -> None:
    """Its neighbours are logged and answered."""
    caplog.set_level(logging.INFO)
    executor = FakeExecutor()
    executor.bad_token_ids = {7}
    with Harness(executor, debug_top_tokens=True) as harness:
        bad, good = harness.submit_all(append(None, 7), append(None, 8))
        assert isinstance(bad.error(), NonFiniteLogits)
        assert good.result().rows[0].token == best_of((8,))[0]
    messages = [record.message for record in caplog.records if record.message.startswith("top tokens")]
    assert messages[0].endswith("best=none (not finite)")


def test_nothing_is_logged_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    """Token contents never appear in the log by default, and no row is asked for more."""
    caplog.set_level(logging.DEBUG)
    with Harness() as harness:
        harness.prefill(1, 2, 3, output=GREEDY)
        assert harness.executor.batches[-1].output_specs == (GREEDY.spec,)
    assert not logged(caplog)
    assert not any("debug_top_tokens" in record.message for record in caplog.records)
