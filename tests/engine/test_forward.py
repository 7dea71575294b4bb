"""Forward: rows of all positions in order, targets across chunks, pooled states, and nothing left behind."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ferrule_server.engine import host_calls
from ferrule_server.engine.jobs import ListResult, OutputRequest, Pooling
from ferrule_server.errors import BlocksExhausted, ContextExceeded, EngineFault, NonFiniteLogits, QuotaExceeded
from ferrule_server.executor.base import OutputSpec, SampleSpec
from ferrule_server.quotas import QuotaLimits
from tests.engine.harness import GREEDY, Harness, append
from tests.engine.streams import UNSEEDED, VOCAB, SteppedExecutor, forward, start
from tests.fakes import HIDDEN_SIZE, FakeExecutor, fake_hidden, fake_logits, fake_next_token

TOKENS = [(5 * i + i * i) % VOCAB for i in range(21)]
FULL = OutputRequest(OutputSpec(full_logits=True), all_positions=True)
TARGETS = OutputRequest(OutputSpec(), all_positions=True, wants_targets=True)
NOTHING = OutputRequest(None, all_positions=True)


@pytest.mark.parametrize("chunk_rows", [1, 7, 8, 20, 21, 100])
def test_rows_of_all_positions_come_in_order_without_gaps(harness: Harness, chunk_rows: int) -> None:
    """Every row is that of its own prefix, however the tokens are cut."""
    frames = start(harness, forward(*TOKENS, output=FULL, chunk_rows=chunk_rows)).forward()
    assert [frame.first_position for frame in frames] == list(range(0, 21, chunk_rows))
    assert [frame.is_last for frame in frames] == [False] * (len(frames) - 1) + [True]
    rows = [row for frame in frames for row in frame.rows]
    assert [row.position for row in rows] == list(range(1, 22))
    for end, row in enumerate(rows, 1):
        np.testing.assert_array_equal(row.logits, fake_logits(TOKENS[:end], VOCAB))
    assert len(harness.store.registry) == 0
    assert harness.store.pool.num_free == 63


def test_a_chunk_longer_than_a_step_is_one_frame_all_the_same() -> None:
    """Steps are the engine's own business."""
    with Harness(max_step_rows=4) as harness:
        frames = start(harness, forward(*TOKENS, chunk_rows=10)).forward()
        assert [len(frame.rows) for frame in frames] == [10, 10, 1]
        assert max(batch.num_rows for batch in harness.executor.batches) == 4


@pytest.mark.parametrize("chunk_rows", [1, 7, 21])
def test_targets_cross_the_borders_of_chunks(harness: Harness, chunk_rows: int) -> None:
    """Every row scores the token that follows it, but the last of all, which none follows."""
    frames = start(harness, forward(*TOKENS, output=TARGETS, chunk_rows=chunk_rows)).forward()
    found = [row.target_logprob for frame in frames for row in frame.rows]
    assert found[-1] is None
    for end, value in enumerate(found[:-1], 1):
        logits = fake_logits(TOKENS[:end], VOCAB).astype(np.float64)
        expected = logits[TOKENS[end]] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        assert value == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("chunk_rows", [1, 7, 21])
@pytest.mark.parametrize("output", [NOTHING, FULL])
def test_hidden_states_are_pooled_over_all_rows(chunk_rows: int, output: OutputRequest) -> None:
    """The mean is summed in float64; LAST is the last row; without a policy nothing else comes."""
    hidden = np.stack([fake_hidden(TOKENS[:end]) for end in range(1, 22)])
    with Harness() as harness:
        for pooling, expected in (
            (Pooling.MEAN, hidden.mean(axis=0, dtype=np.float64).astype(np.float32)),
            (Pooling.LAST, hidden[-1]),
        ):
            frames = start(harness, forward(*TOKENS, output=output, pooling=pooling, chunk_rows=chunk_rows)).forward()
            pooled = frames[-1].pooled
            assert pooled is not None
            assert pooled.dtype == np.float32
            assert pooled.shape == (HIDDEN_SIZE,)
            np.testing.assert_allclose(pooled, expected, rtol=1e-6)
            assert [frame.pooled is None for frame in frames[:-1]] == [True] * (len(frames) - 1)
            rows = [row for frame in frames for row in frame.rows]
            assert len(rows) == (0 if output is NOTHING else 21)
            assert all(row.hidden_state is None for row in rows)
            assert len(frames) == (1 if output is NOTHING else -(-21 // chunk_rows))


def test_only_the_last_row_goes_through_the_head_where_only_that_is_pooled(harness: Harness) -> None:
    """LAST without a policy needs one row of one chunk."""
    start(harness, forward(*TOKENS, output=NOTHING, pooling=Pooling.LAST)).forward()
    assert [len(batch.output_rows) for batch in harness.executor.batches] == [0, 0, 1]


def test_hidden_states_that_were_asked_for_come_with_the_pooled_one() -> None:
    """Both at once."""
    output = OutputRequest(OutputSpec(hidden_state=True), all_positions=True)
    with Harness() as harness:
        frames = start(harness, forward(*TOKENS, output=output, pooling=Pooling.LAST)).forward()
        rows = [row for frame in frames for row in frame.rows]
        for end, row in enumerate(rows, 1):
            np.testing.assert_array_equal(row.hidden_state, fake_hidden(TOKENS[:end]))


def test_a_selection_chooses_a_token_for_every_row_with_one_seed() -> None:
    """Unseeded: the seed that was drawn is told, and draws the same again."""
    output = OutputRequest(UNSEEDED.spec, all_positions=True, is_seeded=False)
    with Harness() as harness:
        greedy = start(harness, forward(*TOKENS)).forward()
        tokens = [row.token for frame in greedy for row in frame.rows]
        assert tokens == [fake_next_token(TOKENS[:end], VOCAB) for end in range(1, 22)]
        assert greedy[0].seed is None
        drawn = start(harness, forward(*TOKENS, output=output)).forward()
        seed = drawn[0].seed
        assert seed is not None
        assert {frame.seed for frame in drawn} == {seed}
        seeded = OutputRequest(OutputSpec(sample=SampleSpec(seed=seed)), all_positions=True)
        again = start(harness, forward(*TOKENS, output=seeded, chunk_rows=5)).forward()
        assert [row.token for frame in drawn for row in frame.rows] == [
            row.token for frame in again for row in frame.rows
        ]


@pytest.mark.parametrize("bad_at", [0, 7, 8, 20])
def test_a_row_that_is_not_finite_fails_the_call_and_leaves_nothing(bad_at: int) -> None:
    """In the first chunk, at a border, at the end: what came before it has been sent."""
    tokens = [i + 1 for i in range(21)]
    with Harness() as harness:
        harness.executor.bad_token_ids = {tokens[bad_at]}
        outcomes = start(harness, forward(*tokens)).wait()
        assert isinstance(outcomes[-1], NonFiniteLogits)
        assert len(outcomes) == bad_at // 8 + 1
        assert len(harness.store.registry) == 0
        assert harness.store.pool.num_free == 63


def test_a_step_that_fails_for_good_fails_the_call_and_leaves_nothing(harness: Harness) -> None:
    """Alone, and again alone."""
    harness.executor.errors = {2: RuntimeError("told to fail"), 3: RuntimeError("told to fail")}
    assert isinstance(start(harness, forward(*TOKENS)).wait()[-1], EngineFault)
    assert len(harness.store.registry) == 0


def test_what_does_not_fit_is_refused_before_anything_is_sent() -> None:
    """All its room is reserved with the first chunk, small as that is."""
    limits = QuotaLimits(kv_tokens=16)
    with Harness(FakeExecutor(max_context=20)) as harness:
        assert isinstance(start(harness, forward(*TOKENS, chunk_rows=1)).error(), ContextExceeded)
    with Harness(FakeExecutor(num_blocks=7)) as harness:
        handle = harness.prefill(1).handle
        assert isinstance(start(harness, forward(*TOKENS, chunk_rows=1)).error(), BlocksExhausted)
        harness.release(handle)
        start(harness, forward(*TOKENS, chunk_rows=1)).forward()
    with Harness(limits_of=lambda _: limits) as harness:
        assert isinstance(start(harness, forward(*TOKENS, chunk_rows=1)).error(), QuotaExceeded)
        assert harness.executor.batches == []


def test_its_room_is_its_own_from_the_first_chunk_on() -> None:
    """Others that come meanwhile cannot make it fail half-way."""
    executor = SteppedExecutor(num_blocks=8)
    with Harness(executor) as harness:
        stream = start(harness, forward(*TOKENS))  # 6 of 7 blocks
        executor.arrive()
        executor.step()
        greedy = [harness.submit(append(None, *range(8))) for _ in range(3)]
        executor.run_freely()
        assert sum(len(frame.rows) for frame in stream.forward()) == 21
        assert any(isinstance(pending.outcome(), BlocksExhausted) for pending in greedy)


def test_it_pushes_no_record_out() -> None:
    """Its rows are bulky and nobody asks for them again: replays of others keep theirs."""
    with Harness(retained_bytes=1000) as harness:
        output = OutputRequest(OutputSpec(full_logits=True))
        first = harness.prefill(1, 2, 3, output=GREEDY).handle
        harness.decode(first, 4, output=output)
        frames = start(harness, forward(*TOKENS, output=FULL)).forward()
        again = harness.decode(first, 4, output=output)
        assert again.replayed
        assert not again.recomputed
        assert harness.engine._lanes.admission.records.memory.num_held <= 1000
        assert len(frames) == 3


def test_it_takes_nothing_from_the_prefix_cache_and_leaves_nothing_there(harness: Harness) -> None:
    """All its rows are run; a prompt that it has run is not known afterwards."""
    start(harness, forward(*TOKENS)).forward()
    assert harness.prefill(*TOKENS).cached_tokens == 0
    num_steps = len(harness.executor.batches)
    start(harness, forward(*TOKENS)).forward()
    assert sum(batch.num_rows for batch in harness.executor.batches[num_steps:]) == 21
    assert harness.prefill(*TOKENS).cached_tokens == 20


def test_its_sequence_is_seen_only_while_it_runs() -> None:
    """It counts among the principal's, and ends with the call."""
    executor = SteppedExecutor()
    with Harness(executor) as harness:
        stream = start(harness, forward(*TOKENS))
        executor.arrive()
        executor.step()
        listed = harness.submit(host_calls.list_caches("me"))
        executor.run_freely()
        outcome = listed.outcome()
        assert isinstance(outcome, ListResult)
        assert outcome.total == 1
        stream.forward()
        outcome = harness.answer(ListResult, host_calls.list_caches("me"))
        assert outcome.total == 0


def test_its_rows_count_as_rows_that_ran(harness: Harness) -> None:
    """For the prefill rate: all of them, or as many as ran."""
    job = forward(*TOKENS)
    start(harness, job).forward()
    assert job.rows_run == 21
    harness.executor.bad_token_ids = {TOKENS[12]}
    job = dataclasses.replace(job, rows_run=0)
    start(harness, job).wait()
    assert 8 <= job.rows_run <= 16
