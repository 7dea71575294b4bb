"""A tiny model through everything: executor, runner and kernels in the simulator, against torch alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ferrule_server.errors import HandleLost
from ferrule_server.executor.base import OutputSpec, PendingStep, RowOutput, SampleSpec, Shaping, StepBatch
from ferrule_server.executor.cuda.compose import Kernels
from ferrule_server.executor.cuda.gpu import GpuError, GpuLost
from ferrule_server.executor.fallback.executor import FallbackExecutor
from tests.engine.harness import GREEDY as GREEDY_OUTPUT
from tests.engine.harness import Harness
from tests.engine.streams import generate, start
from tests.executor.cuda.fake_gpu import FakeGpu
from tests.executor.cuda.tiny_model import tiny_executor
from tests.executor.cuda.toy_runner import GREEDY, cubins_of, executor_over
from tests.model.stepping import Piece, PooledSequence, Stepper

TOKENS = [(37 * i + 11) % 67 for i in range(120)]
FULL = OutputSpec(greedy=True, full_logits=True)
WHOLE = OutputSpec(full_logits=True, hidden_state=True)
SAMPLED = OutputSpec(
    sample=SampleSpec(temperature=0.9, top_k=30, top_p=0.95, seed=5), shaping=Shaping(bias=((7, 1.5),))
)


def simulated(
    kind: str = "qwen3", *, is_deterministic: bool = False, num_sms: int = 2
) -> tuple[FallbackExecutor, FakeGpu]:
    """Return an executor whose kernels are there and run in the simulator."""
    gpu = FakeGpu(simulate=True, num_sms=num_sms)
    inner = tiny_executor(kind, num_layers=1)
    cubins = cubins_of(inner, is_deterministic=is_deterministic)
    executor = executor_over(gpu, inner, Kernels(Path("bundle"), cubins), is_deterministic=is_deterministic)
    return executor, gpu


class Pair:
    """The same sequences on the kernels and in torch alone."""

    def __init__(self, kind: str) -> None:
        self.executor, self.gpu = simulated(kind)
        Stepper(self.executor).run(Piece(PooledSequence(), [1]))
        assert self.executor.tend()
        self.steppers = Stepper(self.executor), Stepper(tiny_executor(kind, num_layers=1))

    def run(self, make: Callable[[Stepper], Sequence[Piece]]) -> list[int | None]:
        """Run a step on both; tokens, which must be the same, are returned."""
        with self.gpu.watched():
            mine = self.steppers[0].run(*make(self.steppers[0]))
        theirs = self.steppers[1].run(*make(self.steppers[1]))
        assert tokens_of(mine) == tokens_of(theirs)
        assert [row.position for row in mine] == [row.position for row in theirs]
        return tokens_of(mine)


def tokens_of(rows: Sequence[RowOutput]) -> list[int | None]:
    """Return the tokens of rows."""
    return [row.token for row in rows]


@pytest.mark.parametrize("kind", ["qwen3", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_life_of_sequences_is_that_in_torch(kind: str) -> None:
    """Prompt, decode, fork, truncate, verify, sampling, two steps in flight: tokens are identical."""
    pair = Pair(kind)
    seqs = {stepper: [PooledSequence()] for stepper in pair.steppers}

    def piece(number: int, tokens: Sequence[int | None], **more: object) -> Callable[[Stepper], Piece]:
        return lambda stepper: Piece(seqs[stepper][number], tokens, **{"spec": GREEDY, **more})  # type: ignore[arg-type]

    def run(*pieces: Callable[[Stepper], Piece]) -> list[int | None]:
        return pair.run(lambda stepper: [make(stepper) for make in pieces])

    tokens = run(piece(0, TOKENS[:21]))
    for _ in range(2):
        tokens = run(piece(0, tokens))
    for stepper in pair.steppers:  # the fork shares its last block: the next step copies it
        seqs[stepper].append(stepper.fork(seqs[stepper][0]))
    run(piece(0, tokens), piece(1, [9], spec=SAMPLED))
    for stepper in pair.steppers:
        seqs[stepper][1].length -= 7
    run(piece(1, [4]))
    run(piece(0, [5, 6, 2, 8], num_outputs=4), piece(1, [3]))
    run(piece(0, [8], is_query=True), piece(1, TOKENS[:20]))
    _check_whole_rows(pair, [piece(0, [9], spec=WHOLE)(stepper) for stepper in pair.steppers])

    executor = pair.executor
    while executor.tend():
        pass
    assert executor.state.captured_batch_sizes
    first = [stepper.batch(piece(0, [11])(stepper), piece(1, [12])(stepper)) for stepper in pair.steppers]
    executor.run(first[0])
    executor.tend()
    _in_flight(pair, seqs, first[1])
    assert executor.state.fallback_reason == ""
    assert executor.state.num_graph_steps == 3
    _check_pools(pair)


def _check_whole_rows(pair: Pair, pieces: Sequence[Piece]) -> None:
    """Logits and hidden states, which torch takes from the buffers: two roundings of bfloat16 apart at most."""
    with pair.gpu.watched():
        mine = pair.steppers[0].run(pieces[0])[0]
    theirs = pair.steppers[1].run(pieces[1])[0]
    assert mine.logits is not None
    assert mine.hidden_state is not None
    assert theirs.logits is not None
    assert theirs.hidden_state is not None
    np.testing.assert_allclose(mine.logits, theirs.logits, rtol=0, atol=0.05)
    np.testing.assert_allclose(mine.hidden_state, theirs.hidden_state, rtol=0.02, atol=0.03)


def _in_flight(pair: Pair, seqs: dict[Stepper, list[PooledSequence]], first: StepBatch) -> None:
    """Put three steps one ahead of the other, each with the tokens of the one before."""
    mine, theirs = pair.steppers
    tokens = tokens_of(theirs.executor.run(first).rows)

    def batch(stepper: Stepper, known: Sequence[int | None]) -> StepBatch:
        pairs = zip(seqs[stepper], known, strict=True)
        return stepper.batch(*(Piece(seq, [token or 0], spec=GREEDY) for seq, token in pairs))

    pending = [_submitted(pair, batch(mine, tokens))]
    for _ in range(2):
        fed = replace(batch(mine, [0, 0]), feedback=np.arange(2, dtype=np.int32))
        pending.append(_submitted(pair, fed))
        got = tokens_of(pending.pop(0).result().rows)
        tokens = tokens_of(theirs.executor.run(batch(theirs, tokens)).rows)
        assert got == tokens
    assert tokens_of(pending[0].result().rows) == tokens_of(theirs.executor.run(batch(theirs, tokens)).rows)


def _submitted(pair: Pair, batch: StepBatch) -> PendingStep:
    with pair.gpu.watched():
        assert pair.executor.can_submit(batch)
        return pair.executor.submit(batch)


def _check_pools(pair: Pair) -> None:
    """All KV is that of torch, up to the rounding of bfloat16; what nobody wrote is zero in both."""
    blocks = np.arange(24, dtype=np.int32)
    pools = [
        torch.from_numpy(stepper.executor.read_blocks(blocks)).view(torch.bfloat16).float() for stepper in pair.steppers
    ]
    torch.testing.assert_close(pools[0], pools[1], rtol=0.02, atol=0.03)
    assert torch.equal(pools[0] == 0, pools[1] == 0)


def test_deterministic_rows_have_the_same_bits_however_they_run() -> None:
    """A prompt at once or in pieces, beside others or alone: logits are equal to the bit, all of it on the kernels."""
    executor, gpu = simulated(is_deterministic=True)
    stepper = Stepper(executor)
    whole, cut, other = PooledSequence(), PooledSequence(), PooledSequence()
    with gpu.watched():
        expected = stepper.run(Piece(whole, TOKENS[:10], num_outputs=2, spec=FULL))
        stepper.run(Piece(cut, TOKENS[:5]), Piece(other, TOKENS[30:33]))
        rows = stepper.run(Piece(cut, TOKENS[5:9], spec=FULL))
        rows += stepper.run(Piece(other, [9]), Piece(cut, TOKENS[9:10], spec=FULL))[1:]
    for mine, theirs in zip(rows, expected, strict=True):
        assert mine.token == theirs.token
        np.testing.assert_array_equal(mine.logits, theirs.logits)
    assert executor.state.num_torch_steps == 0


# ---- with the engine ------------------------------------------------------------------------------------------------

PROMPT = tuple(TOKENS[:18])
SLOW = [("replay", 1), ("replay", 2), ("upload", 1), ("upload", 3), ("download", 4), ("wait", 1), ("wait", 6)]
SLOW += [("allocate", 3), ("run attention", 4), ("record", 6), ("prepare", 5), ("load", 4)]


def engine_over(executor: object) -> Harness:
    """Return an engine."""
    return Harness(executor, max_step_rows=24)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """What a Generate gives on torch alone."""
    with engine_over(tiny_executor(num_layers=1)) as harness:
        return start(harness, generate(None, *PROMPT, output=GREEDY_OUTPUT, max_tokens=9)).branch().tokens


def test_a_generate_runs_ahead_on_the_kernels(expected: list[int]) -> None:
    """Its tokens are those of torch; steps are queued before the tokens they begin with are known."""
    executor, gpu = simulated(num_sms=1)
    with gpu.watched(), engine_over(executor) as harness:
        assert start(harness, generate(None, *PROMPT, output=GREEDY_OUTPUT, max_tokens=9)).branch().tokens == expected
        assert harness.engine.counters.queued_steps > 4
        state = executor.state
        assert (state.fallback_reason, state.num_torch_steps) == ("", 2)
        assert state.num_graph_steps > 5


@pytest.mark.parametrize(
    ("call", "nth"),
    [("launch", 1), ("capture", 1), ("replay", 3), *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)],
)
def test_kernels_that_fail_in_the_midst_of_a_generate_are_not_noticed(
    expected: list[int], call: str, nth: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Torch goes on with the steps in flight; one warning, and a reason."""
    executor, gpu = simulated(num_sms=1)
    with engine_over(executor) as harness:
        gpu.fail(call, GpuError("refused on purpose"), nth=nth)
        tokens = start(harness, generate(None, *PROMPT, output=GREEDY_OUTPUT, max_tokens=6)).branch().tokens
        assert tokens == expected[:6]
        # What cannot be captured is launched, which needs no reason.
        expected_state = ("numba-cuda", "") if call == "capture" else ("torch", "refused on purpose")
        assert (executor.state.name, executor.state.fallback_reason) == expected_state
        assert executor.state.preparation == ""
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1


@pytest.mark.parametrize(("call", "nth"), [("run attention", 2), pytest.param("replay", 2, marks=pytest.mark.slow)])
def test_a_lost_device_loses_every_handle(call: str, nth: int) -> None:
    """What runs ends with HANDLE_LOST, and the engine says once that it has failed."""
    executor, gpu = simulated(num_sms=1)
    with engine_over(executor) as harness:
        gpu.fail(call, GpuLost("an illegal memory access was encountered"), nth=nth)
        branch = start(harness, generate(None, *PROMPT, output=GREEDY_OUTPUT, max_tokens=9)).branch()
        assert isinstance(branch.last.error, HandleLost)
        assert harness.num_failures == 1
        assert harness.engine.snapshot().is_failed
