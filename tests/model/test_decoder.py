"""The decoder against transformers on random weights of awkward shapes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ferrule_server.executor.base import Float32Array, OutputSpec
from ferrule_server.executor.torch import TorchExecutor
from tests.model.conftest import Example
from tests.model.stepping import Piece, PooledSequence, Stepper

NewExecutor = Callable[..., TorchExecutor]

PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, 97, 37)]
GREEDY = OutputSpec(greedy=True)
RELATIVE_TOLERANCE = 1e-4


def assert_close(ours: Float32Array, theirs: Float32Array) -> None:
    """Logits agree within 1e-4 of the largest."""
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() <= RELATIVE_TOLERANCE * np.abs(theirs).max()


def rms(values: Float32Array) -> float:
    """Return the root of the mean square."""
    return float(np.sqrt(np.mean(np.square(values))))


def feed(stepper: Stepper, chunk: int) -> tuple[PooledSequence, Float32Array]:
    """Run the prompt in chunks; return the sequence and the logits of all positions."""
    seq = PooledSequence()
    parts = [PROMPT[begin : begin + chunk] for begin in range(0, len(PROMPT), chunk)]
    return seq, np.concatenate([stepper.logits(Piece(seq, part, num_outputs=len(part))) for part in parts])


def continue_greedily(stepper: Stepper, seqs: list[PooledSequence], tokens: list[int], count: int) -> list[list[int]]:
    """Decode sequences together, one token at a time; return ``count`` tokens of each, the first of which is given."""
    produced = [[token] for token in tokens]
    for _ in range(count - 1):
        rows = stepper.run(*(Piece(seq, made[-1:], spec=GREEDY) for seq, made in zip(seqs, produced, strict=True)))
        for made, row in zip(produced, rows, strict=True):
            assert row.token is not None
            made.append(row.token)
    return produced


def test_logits_of_a_whole_prefill_equal_transformers(example: Example, new_executor: NewExecutor) -> None:
    """Every position of a prompt gives transformers' logits, over prompts around a block boundary."""
    stepper = Stepper(new_executor(example.folder))
    for length in (1, 15, 16, 17, 37):
        tokens = PROMPT[:length]
        assert_close(stepper.logits(Piece(PooledSequence(), tokens, num_outputs=length)), example.logits(tokens))


def test_hidden_states_equal_transformers(example: Example, new_executor: NewExecutor) -> None:
    """Every position's state after the final norm is transformers' last hidden state."""
    spec = OutputSpec(hidden_state=True)
    rows = Stepper(new_executor(example.folder)).run(Piece(PooledSequence(), PROMPT, num_outputs=37, spec=spec))
    ours = np.stack([row.hidden_state for row in rows if row.hidden_state is not None])
    with torch.inference_mode():
        theirs = example.oracle.model(torch.tensor([PROMPT])).last_hidden_state[0].numpy()
    assert_close(ours, theirs)


def test_a_prompt_in_chunks_equals_transformers(example: Example, new_executor: NewExecutor) -> None:
    """Fed one by one, in chunks and whole: the logits of all positions agree, and 64 greedy tokens are identical.

    They are if each is the best one of transformers after all before it.
    """
    stepper = Stepper(new_executor(example.folder))
    seqs, logits = zip(*(feed(stepper, chunk) for chunk in (1, 4, 7, len(PROMPT))), strict=True)
    expected = example.logits(PROMPT)
    for found in logits:
        assert_close(found, expected)
    continued = continue_greedily(stepper, list(seqs), [int(found[-1].argmax()) for found in logits], 64)
    assert continued == [continued[0]] * len(seqs)
    assert continued[0] == example.logits([*PROMPT, *continued[0]])[len(PROMPT) - 1 : -1].argmax(1).tolist()


def test_mixed_batch_of_forked_sequences_equals_transformers(example: Example, new_executor: NewExecutor) -> None:
    """Forks that diverge, a prefill, a chunk, a verify and a query in one step each get their own logits."""
    stepper = Stepper(new_executor(example.folder))
    trunk, half = PooledSequence(), PooledSequence()
    stepper.run(Piece(trunk, PROMPT))
    stepper.run(Piece(half, PROMPT[:20]))
    forks = [stepper.fork(trunk) for _ in range(5)]
    for round_ in range(3):
        pieces = [Piece(fork, [10 * round_ + index]) for index, fork in enumerate(forks)]
        logits = stepper.logits(
            pieces[0],
            Piece(PooledSequence(), PROMPT[:33]),
            *pieces[1:],
            Piece(half, PROMPT[:5], num_outputs=5),
            Piece(trunk, PROMPT[-1:], is_query=True),
        )
        for index in range(5):
            history = PROMPT + [10 * done + index for done in range(round_ + 1)]
            assert_close(logits[index if index == 0 else index + 1], example.logits(history)[-1])
        assert_close(logits[1], example.logits(PROMPT[:33])[-1])
        assert_close(logits[6:11], example.logits(PROMPT[:20] + PROMPT[:5] * (round_ + 1))[-5:])
        assert_close(logits[11], example.logits(PROMPT)[-1])


def test_bfloat16_is_as_exact_as_transformers_in_bfloat16(example: Example, new_executor: NewExecutor) -> None:
    """Against float32 we err no more than transformers does, and keep the best token where the gap is clear."""
    stepper = Stepper(new_executor(example.folder, "bfloat16"))
    ours = stepper.logits(Piece(PooledSequence(), PROMPT, num_outputs=len(PROMPT)))
    exact, theirs = example.logits(PROMPT), example.logits(PROMPT, torch.bfloat16)
    assert rms(ours - exact) <= 1.2 * rms(theirs - exact)
    second, first = np.sort(exact, axis=1)[:, -2:].T
    is_clear = first - second > 2 * np.abs(ours - exact).max(1)
    assert is_clear.sum() >= 3
    assert (ours.argmax(1) == exact.argmax(1))[is_clear].all()


def test_plain_and_fast_ops_agree_on_logits_and_on_the_whole_pool(example: Example, new_executor: NewExecutor) -> None:
    """The same StepBatches through the reference ops and the fast ones leave the same pool, not only equal logits."""
    steppers = [Stepper(new_executor(example.folder, is_plain=is_plain)) for is_plain in (True, False)]
    results = []
    for stepper in steppers:
        trunk = PooledSequence()
        logits = [stepper.logits(Piece(trunk, PROMPT, num_outputs=3))]
        forks = [stepper.fork(trunk) for _ in range(3)]
        logits += [
            stepper.logits(*(Piece(fork, [token + index]) for index, fork in enumerate(forks))) for token in range(3)
        ]
        logits.append(stepper.logits(*(Piece(fork, [1, 2], num_outputs=2) for fork in forks)))
        pool = stepper.executor.read_blocks(np.arange(stepper.executor.info.num_blocks, dtype=np.int32))
        results.append((np.concatenate(logits), pool.view(np.float32)))
    (plain_logits, plain_pool), (fast_logits, fast_pool) = results
    assert_close(fast_logits, plain_logits)
    largest = float(np.nanmax(np.abs(plain_pool)))
    np.testing.assert_allclose(fast_pool, plain_pool, rtol=1e-4, atol=1e-5 * largest)  # NaN in both if never written


def test_rows_without_a_slot_leave_the_pool_alone(qwen3: Example, new_executor: NewExecutor) -> None:
    """A query returns the logits of its row again and changes no byte of the pool."""
    stepper, seq = Stepper(new_executor(qwen3.folder)), PooledSequence()
    first = stepper.logits(Piece(seq, PROMPT, num_outputs=4))
    all_blocks = np.arange(stepper.executor.info.num_blocks, dtype=np.int32)
    before = stepper.executor.read_blocks(all_blocks)
    again = stepper.logits(Piece(seq, PROMPT[-4:], is_query=True, num_outputs=4))
    assert_close(again, first)
    np.testing.assert_array_equal(stepper.executor.read_blocks(all_blocks), before)


def test_a_sequence_of_garbage_does_not_reach_its_neighbours(qwen3: Example, new_executor: NewExecutor) -> None:
    """Of sequences decoded together, the one whose KV is NaN is flagged alone."""
    stepper = Stepper(new_executor(qwen3.folder))
    seqs = [PooledSequence() for _ in range(3)]
    stepper.run(*(Piece(seq, PROMPT) for seq in seqs))
    spoilt = np.array(seqs[1].blocks[:1], np.int32)
    stepper.executor.write_blocks(spoilt, np.full((1, stepper.executor.info.bytes_per_block), 0xFF, np.uint8))
    rows = stepper.run(*(Piece(seq, [4]) for seq in seqs))
    assert [row.is_finite for row in rows] == [True, False, True]
    assert rows[0].logits is not None
    assert_close(rows[0].logits, qwen3.logits([*PROMPT, 4])[-1])


def test_a_step_without_output_rows_still_writes(qwen3: Example, new_executor: NewExecutor) -> None:
    """A prefill chunk that wants no output fills the pool for the next one."""
    stepper, seq = Stepper(new_executor(qwen3.folder)), PooledSequence()
    assert stepper.run(Piece(seq, PROMPT[:20], num_outputs=0)) == []
    assert_close(stepper.logits(Piece(seq, PROMPT[20:])), qwen3.logits(PROMPT)[-1:])
