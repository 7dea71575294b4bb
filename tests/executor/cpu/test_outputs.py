"""What rows return is computed as its definition says, from the logits of the kernels, however it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ferrule_server.executor.base import Float32Array, OutputSpec, StepBatch
from ferrule_server.executor.cpu.executor import NumbaCpuExecutor
from ferrule_server.executor.sampling.selection import select_rows
from ferrule_server.model.tensors import ModelWeights
from tests.executor.cpu.models import running, write_awkward, write_tiny
from tests.executor.test_device_outputs import assert_same, history_of, random_spec
from tests.model.stepping import Piece, PooledSequence, Stepper

TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, 1000, 150)]


@pytest.fixture(scope="module", params=[write_tiny, write_awkward], ids=["64 x 16 tokens", "1003 tokens"])
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NumbaCpuExecutor]:
    """An executor whose steps have fewer rows, and whose head has fewer outputs, than some steps here."""
    with running(request.param(tmp_path_factory.mktemp("model")), max_step_rows=64) as made:
        yield made


def known(executor: NumbaCpuExecutor, batch: StepBatch) -> tuple[Float32Array, Float32Array]:
    """Return the logits and hidden states of all rows of a step."""
    every = replace(
        batch,
        output_rows=np.arange(batch.num_rows, dtype=np.int32),
        output_specs=(OutputSpec(full_logits=True, hidden_state=True),) * batch.num_rows,
        histories=(),
    )
    rows = executor.run(every).rows
    logits = [row.logits for row in rows if row.logits is not None]
    return np.stack(logits), np.stack([row.hidden_state for row in rows if row.hidden_state is not None])


@pytest.mark.parametrize("seed", range(12))
def test_every_field_is_that_of_the_definition(executor: NumbaCpuExecutor, seed: int) -> None:
    """Any mix of specs on any rows of up to three sequences, in one part or in several."""
    rng = np.random.default_rng(seed)
    vocab_size = executor.info.model.config.vocab_size
    lengths = rng.integers(1, 60, 3)
    pieces = [Piece(PooledSequence(), TOKENS[:length], num_outputs=0) for length in lengths]
    batch = Stepper(executor, seed).batch(*pieces)
    logits, hidden = known(executor, batch)
    output_rows = np.flatnonzero(rng.random(batch.num_rows) < rng.choice([0.1, 0.9])).astype(np.int32)
    specs = tuple(random_spec(rng, vocab_size) for _ in output_rows)
    histories = tuple(history_of(rng, spec, vocab_size) for spec in specs)
    if not any(spec.shaping is not None and spec.shaping.has_penalties for spec in specs):
        histories = ()
    found = executor.run(replace(batch, output_rows=output_rows, output_specs=specs, histories=histories)).rows
    positions = batch.positions[output_rows].tolist()
    expected = select_rows(logits[output_rows], positions, specs, histories, hidden[output_rows])
    for mine, theirs in zip(found, expected, strict=True):
        assert_same(mine, theirs)


def test_a_value_does_not_depend_on_what_else_is_asked_for(executor: NumbaCpuExecutor) -> None:
    """Bit for bit: log-probabilities alone, beside others, and with the whole row."""
    stepper, seq = Stepper(executor, 3), PooledSequence()
    stepper.run(Piece(seq, TOKENS[:40]))
    specs = [
        OutputSpec(num_top_logprobs=5, entropy=True, target_id=3),
        OutputSpec(greedy=True, logprobs=True, num_top_logprobs=64, entropy=True, target_id=3),
        OutputSpec(full_logits=True, num_top_logprobs=80, entropy=True, target_id=3, hidden_state=True),
    ]
    rows = [stepper.run(Piece(seq, [TOKENS[39]], is_query=True, spec=spec))[0] for spec in specs]
    for row in rows:
        assert row.entropy == rows[0].entropy
        assert row.target_logprob == rows[0].target_logprob
        assert row.top_ids is not None
        assert row.top_logprobs is not None
        np.testing.assert_array_equal(row.top_ids[:5], rows[0].top_ids)
        np.testing.assert_array_equal(row.top_logprobs[:5], rows[0].top_logprobs)


def test_a_row_that_is_not_finite_says_so_and_spoils_no_other(tmp_path: Path) -> None:
    """One token has NaN as its embedding; its sequence is not finite, and its neighbour is as without it."""
    folder = write_awkward(tmp_path / "model")
    with running(folder) as good:
        expected = Stepper(good).logits(Piece(PooledSequence(), TOKENS[:20]))

    def spoil(weights: ModelWeights) -> None:
        weights.embedding[7] = torch.nan

    with running(folder, change=spoil) as executor:
        specs = (OutputSpec(greedy=True, logprobs=True, num_top_logprobs=3, full_logits=True, entropy=True),)
        batch = Stepper(executor).batch(Piece(PooledSequence(), [5, 7]), Piece(PooledSequence(), TOKENS[:20]))
        bad, neighbour = executor.run(replace(batch, output_specs=specs * 2)).rows
        assert (bad.is_finite, bad.token, bad.logits, bad.top_ids, bad.entropy) == (False, None, None, None, None)
        assert neighbour.is_finite
        np.testing.assert_array_equal(neighbour.logits, expected[0])
