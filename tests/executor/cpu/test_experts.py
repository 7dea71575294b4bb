"""Mixtures on the kernels of a processor: ties, many rows of one expert, and one expert alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.executor.cpu.models import KERNEL_SETS, kernel_set_name, running
from tests.executor.cpu.test_against_torch import all_logits, torch_executor
from tests.executor.cpu.test_families import case_of
from tests.model.conftest import make_example
from tests.model.stepping import Piece, PooledSequence, Stepper

PROMPT = [(7 * i + i // 5) % 103 for i in range(400)]
"""Of one expert there are more pairs than are multiplied together."""


def edited(folder: Path, change: Any) -> Path:
    """Change the routers of a random mixture."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            change(tensor)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module", params=["qwen3-moe", "qwen2-moe-shared-gate"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture whose scores are all equal, so that every row passes the first experts."""
    made = make_example(case_of(request.param), tmp_path_factory.mktemp("moe"))
    return edited(made.folder, lambda router: router.zero_())


def test_of_equal_scores_the_first_experts_are_used(folder: Path) -> None:
    """As in torch; all rows pass the same experts, and a row alone has the bits that it has among them."""
    expected = all_logits(torch_executor(folder, "float32", is_plain=True), PROMPT)
    with running(folder, "float32") as executor:
        found = all_logits(executor, PROMPT)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * float(np.abs(expected).max()))
        stepper, seq = Stepper(executor), PooledSequence()
        stepper.run(Piece(seq, PROMPT[:-1]))
        alone = stepper.logits(Piece(seq, PROMPT[-1:]))
    np.testing.assert_array_equal(alone[0].view(np.uint32), found[len(PROMPT) - 1].view(np.uint32))


@pytest.mark.parametrize("kernels", KERNEL_SETS, ids=kernel_set_name)
def test_the_threads_change_no_bits(folder: Path, kernels: Any) -> None:
    """Nor does the number of rows in a step, with any instructions."""
    found = []
    for num_threads, max_step_rows in ((1, 512), (2, 130)):
        with running(folder, kernels=kernels, num_threads=num_threads, max_step_rows=max_step_rows) as executor:
            stepper, seq = Stepper(executor), PooledSequence()
            parts = [PROMPT[begin : begin + 130] for begin in range(0, len(PROMPT), 130)]
            found.append(np.concatenate([stepper.logits(Piece(seq, part, num_outputs=len(part))) for part in parts]))
    np.testing.assert_array_equal(found[0].view(np.uint32), found[1].view(np.uint32))


def test_a_score_that_is_no_number_makes_no_number(tmp_path: Path) -> None:
    """Nothing is written beside its place: other rows of the step go on."""
    case = {**case_of("qwen3-moe"), "tie_word_embeddings": False}
    folder = make_example(case, tmp_path / "moe").folder
    with running(folder, "float32") as executor:
        expected = all_logits(executor, PROMPT[:20])[:20]
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][102] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    with running(folder, "float32") as executor:
        stepper = Stepper(executor)
        broken, *others = stepper.run(
            Piece(PooledSequence(), [102], num_outputs=1), Piece(PooledSequence(), PROMPT[:20], num_outputs=20)
        )
    assert broken.logits is None
    found = np.stack([row.logits for row in others if row.logits is not None])
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
