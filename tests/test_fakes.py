"""The fakes keep their own promises: a wrong table, a stray read and a second thread are noticed."""

import threading

import numpy as np
import pytest

from ferrule_server.executor.base import DraftSpec, Executor, OutputSpec, SampleSpec, Shaping, StepBatch
from tests.fakes import FakeExecutor, SeqRows, fake_hidden, fake_logits, fake_next_token, make_step

GREEDY = OutputSpec(greedy=True)
PENALISED = OutputSpec(greedy=True, shaping=Shaping(frequency_penalty=100.0, penalty_start=1))


def run_greedy(executor: FakeExecutor, *seqs: SeqRows) -> list[int | None]:
    """Run one step and return the tokens of its output rows."""
    return [row.token for row in executor.run(make_step(seqs, executor.info.block_size)).rows]


def test_fake_executor_reads_tokens_back_through_the_tables() -> None:
    """Two sequences in scattered blocks give the logits of their own tokens."""
    executor = FakeExecutor()
    conforming: Executor = executor
    assert conforming.info.model.model_id == "fake"
    one, two = [1, 2, 3, 4, 5, 6], [7, 8, 9]
    tokens = run_greedy(executor, SeqRows(one, 0, [9, 4], {5: GREEDY}), SeqRows(two, 0, [2], {0: GREEDY, 2: GREEDY}))
    assert tokens == [fake_next_token(one, 32), fake_next_token(two[:1], 32), fake_next_token(two, 32)]
    assert executor.tokens_at([9, 4], 7) == [*one, -1]
    executor.copy_blocks(np.array([[4, 5]], np.int32))
    assert run_greedy(executor, SeqRows([11], 6, [9, 5], {0: GREEDY})) == [fake_next_token([*one, 11], 32)]
    assert executor.copied_blocks == [(4, 5)]
    assert [batch.num_rows for batch in executor.batches] == [9, 1]


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        (SeqRows([1], 3, [1], {0: GREEDY}), "nobody wrote"),
        (SeqRows([1], 4, [1, 0], {0: GREEDY}), "null block"),
        (SeqRows([1, 2], 0, [0], {}), "null block"),
    ],
)
def test_fake_executor_notices_wrong_tables(rows: SeqRows, match: str) -> None:
    """Reads of unwritten slots and anything on the null block are assertion errors."""
    with pytest.raises(AssertionError, match=match):
        run_greedy(FakeExecutor(), rows)


def test_fake_executor_fails_on_the_chosen_run_and_spoils_its_slots() -> None:
    """The contract allows a failed run to spoil slot_mapping, and nothing else."""
    executor = FakeExecutor()
    executor.errors[2] = RuntimeError("boom")
    run_greedy(executor, SeqRows([1, 2], 0, [1]))
    with pytest.raises(RuntimeError, match="boom"):
        run_greedy(executor, SeqRows([3], 2, [1]))
    assert executor.tokens_at([1], 3) == [1, 2, -1]
    assert run_greedy(executor, SeqRows([3], 2, [1], {0: GREEDY})) == [fake_next_token([1, 2, 3], 32)]


def test_fake_executor_returns_rows_that_are_not_finite() -> None:
    """Only the rows of the bad tokens."""
    executor = FakeExecutor()
    executor.bad_token_ids.add(5)
    step = make_step([SeqRows([4, 5], 0, [1], {0: GREEDY, 1: GREEDY})], 4)
    assert [row.is_finite for row in executor.run(step).rows] == [True, False]


def test_fake_executor_waits_at_its_gate_and_stays_with_one_thread() -> None:
    """A test can hold a step, look around, and let it go on; a second thread is refused."""
    executor = FakeExecutor()
    executor.gate = threading.Event()
    thread = threading.Thread(target=run_greedy, args=(executor, SeqRows([1], 0, [1])))
    thread.start()
    assert executor.is_waiting.wait(timeout=10)
    executor.gate.set()
    thread.join(timeout=10)
    assert executor.tokens_at([1], 1) == [1]
    with pytest.raises(AssertionError, match="one thread"):
        run_greedy(executor, SeqRows([2], 1, [1]))


def test_fake_logits_follow_every_token() -> None:
    """Order and content count."""
    assert not np.array_equal(fake_logits([1, 2], 32), fake_logits([2, 1], 32))


def test_fake_executor_counts_the_tokens_of_the_sequence() -> None:
    """Penalties are applied to the tokens from their start to the row's own, prompt and decode steps alike."""
    executor = FakeExecutor(vocab_size=4)
    executor.run(make_step([SeqRows([0, 1, 2], 0, [1])], 4))
    step = make_step([SeqRows([3, 3], 3, [1, 2], {0: PENALISED, 1: PENALISED}, before=[0, 1, 2])], 4)
    assert [history.tolist() for history in step.histories if history is not None] == [[1, 2, 3], [1, 2, 3, 3]]
    assert [row.token for row in executor.run(step).rows] == [0, 0]
    assert [len(history) for history in executor.batches[-1].histories if history is not None] == [3, 4]


@pytest.mark.parametrize("wrong", [(), (None,), (np.array([5, 5], np.int32),), (np.array([4, 5, 5], np.int32),)])
def test_fake_executor_notices_wrong_histories(wrong: tuple[np.ndarray | None, ...]) -> None:
    """A history left out, too short or too long is an assertion error."""
    step = make_step([SeqRows([4, 5, 5, 5], 0, [1], {3: PENALISED})], 4)
    fields = {name: getattr(step, name) for name in StepBatch.__dataclass_fields__}
    with pytest.raises(AssertionError, match="history"):
        FakeExecutor().run(StepBatch(**{**fields, "histories": wrong}))


def test_fake_executor_serves_hidden_states_and_drafts() -> None:
    """A hidden state is a function of the tokens alone; a draft is accepted or replaced."""
    spec = OutputSpec(
        sample=SampleSpec(seed=7), draft=DraftSpec(3), hidden_state=True, entropy=True, logprob_ids=(1, 2)
    )
    (row,) = FakeExecutor().run(make_step([SeqRows([4, 5], 0, [1], {1: spec})], 4)).rows
    assert row.hidden_state is not None
    assert row.hidden_state.tolist() == fake_hidden([4, 5]).tolist()
    assert row.is_accepted == (row.token == 3)
    assert row.requested_logprobs is not None
    assert row.requested_logprobs.shape == (2,)
    assert fake_hidden([5, 4]).tolist() != fake_hidden([4, 5]).tolist()
