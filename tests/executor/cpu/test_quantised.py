"""Quantised models: what the kernels compute is what the quantised weights stand for, with the same bits everywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from ferrule_server.executor.base import Float32Array
from ferrule_server.executor.torch import TorchExecutor
from ferrule_server.kernels.cpu.plan import Instructions, WeightKind
from ferrule_server.model.tensors import ModelWeights
from tests.executor.cpu.models import DEMO, KV_BYTES, QUANTISED_SETS, running, write_awkward, write_tiny
from tests.executor.cpu.test_against_torch import TEXT, all_logits
from tests.executor.cpu.test_weights import load_packed
from tests.executor.cpu.unpacking import unpack_model
from tests.model.stepping import Piece, PooledSequence, Stepper

PROMPTS = [list(range(3, 203)), [9], list(range(40, 57))]


def oracle_of(folder: Path, kind: WeightKind) -> TorchExecutor:
    """Return plain torch with a float32 model whose weights are what the quantised ones stand for."""
    prepared, model = load_packed(folder, "float32", kind)
    model.weights = unpack_model(model.config, prepared.packer.finish(model.take_weights()), torch.float32)
    return TorchExecutor(model, kv_memory_bytes=KV_BYTES, max_context=1024, is_plain=True)


def oracle_logits(folder: Path, kind: WeightKind) -> Float32Array:
    """Return the logits of :func:`oracle_of`."""
    return all_logits(oracle_of(folder, kind), *PROMPTS)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("write", [write_tiny, write_awkward])
def test_logits_are_those_of_the_quantised_weights(
    tmp_path: Path, write: Callable[[Path], Path], kind: WeightKind
) -> None:
    """Inputs are int16, a hundred times finer than bfloat16; all instructions give the same bits.

    Emulated sums are exact in ``test_dot_quantised``.
    """
    folder = write(tmp_path / "model")
    expected = oracle_logits(folder, kind)
    found = []
    for kernels in QUANTISED_SETS:
        with running(folder, "float32", kernels, weights=kind) as executor:
            assert executor.info.kernel_set == "packed-f32/1"
            assert executor.info.model.dtype == kind
            found.append(all_logits(executor, *PROMPTS))
    np.testing.assert_allclose(found[0], expected, rtol=0, atol=3e-3 * float(expected.std()))
    for other in found[1:]:
        np.testing.assert_array_equal(found[0].view(np.uint32), other.view(np.uint32))


def log_probabilities(folder: Path, tokens: list[int], kind: WeightKind) -> Float32Array:
    """Return the log-probability of each token of a text after those before it."""
    with running(folder, weights=kind, kernels=QUANTISED_SETS[-1] if kind != "float" else ("fma", False)) as executor:
        logits = Stepper(executor).logits(Piece(PooledSequence(), tokens, num_outputs=len(tokens)))
    scores = torch.from_numpy(logits[:-1]).log_softmax(1)
    return scores[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])].numpy()


def test_a_trained_model_loses_little() -> None:
    """The perplexity of a text: within 1 % in int8, 8 % in int4 (the long measurement is in docs/performance.md)."""
    from ferrule_server.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(DEMO)
    assert tokenizer is not None
    tokens = tokenizer.encode(TEXT)[:400]
    exact = log_probabilities(DEMO, tokens, "float").mean()
    assert abs(np.exp(exact - log_probabilities(DEMO, tokens, "int8").mean()) - 1) < 0.01
    assert abs(np.exp(exact - log_probabilities(DEMO, tokens, "int4").mean()) - 1) < 0.08


def test_int8_inputs_are_coarser(tmp_path: Path) -> None:
    """Another kernel set with another fingerprint; logits within a tenth of their standard deviation."""
    folder = write_tiny(tmp_path / "model")
    expected = oracle_logits(folder, "int8")
    with running(folder, "float32", QUANTISED_SETS[-1], weights="int8", has_int8_inputs=True) as executor:
        assert executor.info.kernel_set == "packed-a8-f32/1"
        found = all_logits(executor, *PROMPTS)
    assert 1e-4 < np.abs(found - expected).max() < 0.1 * expected.std()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_row_that_is_not_finite_says_so_and_spoils_no_other(tmp_path: Path, kind: WeightKind) -> None:
    """Integers know no NaN, so the scale of the inputs has to say it."""
    folder = write_awkward(tmp_path / "model")
    kernels: tuple[Instructions, bool] = QUANTISED_SETS[-1]

    def spoil(weights: ModelWeights) -> None:
        weights.embedding[7, 100] = torch.inf
        weights.embedding[8, 3] = torch.nan

    with running(folder, "float32", kernels, weights=kind) as good:
        expected = Stepper(good).logits(Piece(PooledSequence(), [5, 6, 9]))
    with running(folder, "float32", kernels, weights=kind, change=spoil) as executor:
        stepper = Stepper(executor)
        pieces = [Piece(PooledSequence(), [5, 7]), Piece(PooledSequence(), [8]), Piece(PooledSequence(), [5, 6, 9])]
        rows = executor.run(stepper.batch(*pieces)).rows
        assert [row.is_finite for row in rows] == [False, False, True]
        np.testing.assert_array_equal(rows[2].logits, expected[0])
