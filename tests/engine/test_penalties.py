"""Penalties: each row counts the tokens up to its own; the fake executor compares them with those in its pool."""

from __future__ import annotations

import pytest

from ferrule_server.engine.jobs import ForkJob, ForkResult, OutputRequest
from ferrule_server.executor.base import OutputSpec, SampleSpec, Shaping
from ferrule_server.kv.handle import StalePolicy
from tests.engine.harness import GREEDY, Harness, append
from tests.fakes import fake_logits

VOCAB = 32
TOKENS = tuple((5 * i) % 11 for i in range(23))


def penalised(start: int = 0, *, all_positions: bool = False) -> OutputRequest:
    """A greedy choice in which one occurrence more or less shows."""
    shaping = Shaping(frequency_penalty=0.3, presence_penalty=0.5, penalty_start=start)
    return OutputRequest(OutputSpec(greedy=True, shaping=shaping), all_positions=all_positions)


def expected(tokens: tuple[int, ...], start: int = 0) -> int:
    """What the model says after these tokens, those from ``start`` on counted."""
    logits = fake_logits(tokens, VOCAB).astype(float)
    for token in set(tokens[start:]):
        logits[token] -= 0.5 + 0.3 * tokens[start:].count(token)
    return int(logits.argmax())


@pytest.mark.parametrize("start", [0, 1, 9, 22, 23, 40])
@pytest.mark.parametrize("max_step_rows", [2, 5, 64])
def test_every_row_of_a_prompt_counts_what_stands_before_it(start: int, max_step_rows: int) -> None:
    """In however many chunks; a start beyond the row counts nothing."""
    with Harness(max_step_rows=max_step_rows) as harness:
        result = harness.prefill(*TOKENS, output=penalised(start, all_positions=True))
        assert [row.token for row in result.rows] == [expected(TOKENS[: i + 1], start) for i in range(len(TOKENS))]


@pytest.mark.parametrize("start", [0, 10, 24])
def test_decodes_queries_replays_and_forks_count_alike(start: int) -> None:
    """Also behind the tip, where the sequence holds more than the row may see."""
    output = penalised(start)
    with Harness(retained_bytes=0) as harness:
        first = harness.prefill(*TOKENS, output=output)
        assert first.rows[0].token == expected(TOKENS, start)
        second = harness.decode(first.handle, 3, 3, output=output)
        third = harness.decode(second.handle, 4, output=output)
        assert third.rows[0].token == expected((*TOKENS, 3, 3, 4), start)
        assert harness.decode(first.handle, output=output).rows[0].token == expected(TOKENS, start)
        replay = harness.decode(first.handle, 3, 3, output=penalised(start, all_positions=True))
        assert replay.recomputed
        assert [row.token for row in replay.rows] == [
            expected((*TOKENS, 3), start),
            expected((*TOKENS, 3, 3), start),
        ]
        branch = harness.submit(append(first.handle, 7, output=output, on_stale=StalePolicy.FORK)).result()
        assert branch.rows[0].token == expected((*TOKENS, 7), start)
        forked = harness.answer(ForkResult, ForkJob("me", second.handle, second.handle.length, 1))
        assert harness.decode(forked.handles[0], 9, output=output).rows[0].token == expected((*TOKENS, 3, 3, 9), start)


def test_rows_without_penalties_carry_no_history() -> None:
    """Nothing where nobody asks, and None beside those that do; bias alone counts nothing."""
    biased = OutputRequest(OutputSpec(sample=SampleSpec(), shaping=Shaping(bias=((3, 1.0),))))
    with Harness() as harness:
        handles = [harness.prefill(1, 2, i).handle for i in range(3)]
        sinks = harness.submit_all(append(handles[0], 5), append(handles[1], 5, output=biased))
        handles[:2] = [sink.result().handle for sink in sinks]
        assert all(batch.histories == () for batch in harness.executor.batches)
        outputs = (GREEDY, penalised(1), biased)
        pairs = zip(handles, outputs, strict=True)
        sinks = harness.submit_all(*(append(handle, 6, output=output) for handle, output in pairs))
        for sink in sinks:
            sink.result()
        histories = harness.executor.batches[-1].histories
        counted = [None if each is None else each.tolist() for each in histories]
        assert counted == [None, [2, 1, 5, 6], None]
