"""The fakes keep their own promises: a wrong table, a stray read and a second thread are noticed."""

import numpy as np
import pytest

from ferrule_server.executor.base import Executor, OutputSpec, Shaping, StepBatch
from tests.fakes import FakeExecutor, SeqRows, fake_next_token, make_step

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
