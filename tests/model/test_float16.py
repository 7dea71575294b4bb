"""Every family in float16 on the torch executor, against transformers in float16 and float32."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ferrule_server.executor.torch import TorchExecutor
from tests.model.conftest import Example
from tests.model.stepping import Piece, PooledSequence, Stepper

PROMPTS = [[int(token) for token in row] for row in np.random.default_rng(3).integers(0, 97, (4, 50))]
"""Several, because the error of one depends on chance where transformers rounds as rarely as we do (Llama 4)."""


def test_float16_errs_no_more_than_transformers_does(
    example: Example, new_executor: Callable[..., TorchExecutor]
) -> None:
    """Prompts in two chunks, then a decode; bfloat16, whose steps are eight times as large, errs more."""
    exact = np.stack([example.logits(prompt) for prompt in PROMPTS])
    theirs = np.stack([example.logits(prompt, torch.float16) for prompt in PROMPTS])
    ours = _mean_error(new_executor(example.folder, "float16"), exact)
    assert ours <= 1.2**2 * np.square(theirs - exact).mean()
    assert 0 < ours < _mean_error(new_executor(example.folder, "bfloat16"), exact)


def _mean_error(executor: TorchExecutor, exact: np.ndarray) -> float:
    """Return the mean square of the error of the logits of every position of every prompt."""
    logits = np.stack([_logits(Stepper(executor, seed), prompt) for seed, prompt in enumerate(PROMPTS)])
    return float(np.square(logits - exact).mean())


def _logits(stepper: Stepper, prompt: list[int]) -> np.ndarray:
    seq = PooledSequence()
    parts = [prompt[:31], prompt[31:49], prompt[49:]]
    return np.concatenate([stepper.logits(Piece(seq, part, num_outputs=len(part))) for part in parts])
