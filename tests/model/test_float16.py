"""Every family in float16 on the torch executor, against transformers in float16 and float32."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ferrule_server.executor.torch import TorchExecutor
from tests.model.conftest import Example
from tests.model.stepping import Piece, PooledSequence, Stepper

PROMPT = [int(token) for token in np.random.default_rng(3).integers(0, 97, 50)]


def test_float16_errs_no_more_than_transformers_does(
    example: Example, new_executor: Callable[..., TorchExecutor]
) -> None:
    """A prompt in two chunks, then a decode; bfloat16, whose steps are eight times as large, errs more."""
    exact = example.logits(PROMPT)
    ours = _mean_error(new_executor(example.folder, "float16"), exact)
    assert ours <= 1.2**2 * np.square(example.logits(PROMPT, torch.float16) - exact).mean()
    assert 0 < ours < _mean_error(new_executor(example.folder, "bfloat16"), exact)


def _mean_error(executor: TorchExecutor, exact: np.ndarray) -> float:
    """Return the mean square of the error of the logits of every position."""
    stepper, seq = Stepper(executor), PooledSequence()
    parts = [PROMPT[:31], PROMPT[31:49], PROMPT[49:]]
    logits = np.concatenate([stepper.logits(Piece(seq, part, num_outputs=len(part))) for part in parts])
    return float(np.square(logits - exact).mean())
