"""Layer 1 of the argmax over rows of logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ferrule_server.executor.sampling.ranking import best_ids
from ferrule_server.kernels import reference
from ferrule_server.kernels.cuda.argmax import (
    argmax,
    num_ctas_needed,
    partial_bytes,
    shared_bytes,
    spec,
    specs,
)
from ferrule_server.kernels.cuda.spec import MODEL_SHAPES
from ferrule_server.kernels.cuda.specialise import Specialised
from tests.kernels.cuda.mutation import check_mutants
from tests.kernels.cuda.replay import replay, without_wrapping
from tools.cuda_simulator import Launch, Memory


def _argmax(
    logits: Tensor,
    *,
    grid: int,
    warps: int = 1,
    slice_size: int = 128,
    seeds: int = 3,
    offset: int = 0,
    specialised: Specialised | None = None,
) -> list[int]:
    """Run the argmax several times on one state and return what all runs gave."""
    num_rows, vocab_size = logits.shape
    constants = dict(spec(WARPS=warps, SLICE=slice_size).constants)
    memory = Memory()
    names = ("logits", "tokens", "partials", "tickets")
    memory.put("logits", logits.numpy(), mutable=True, offset=offset)
    memory.empty("tokens", num_rows, np.int32)
    memory.empty("partials", partial_bytes(num_rows, vocab_size, SLICE=slice_size) // 8, np.uint64)
    memory.put("tickets", np.zeros(num_rows, np.uint32), mutable=True)
    found = []
    for seed in range(seeds):
        launch = Launch(
            argmax,
            constants,
            (*map(memory.address, names), num_rows, vocab_size),
            grid=grid,
            num_threads=32 * warps,
            shared_bytes=shared_bytes(WARPS=warps),
            specialised=specialised,
        )
        replay(memory, [launch], outputs=("tokens",), counters=("tickets",), seed=seed)
        found.append(memory.get("tokens").tolist())
    assert all(one == found[0] for one in found)
    return list(map(int, found[0]))


@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "grid", "warps", "slice_size"),
    [(1, 1, 1, 1, 128), (3, 131, 2, 1, 128), (5, 257, 4, 2, 256), (2, 517, 7, 1, 256), (4, 128, 9, 1, 128)],
)
def test_argmax_is_the_definition(num_rows: int, vocab_size: int, grid: int, warps: int, slice_size: int) -> None:
    """Few different values, so that ties are everywhere; rows that begin anywhere; more and fewer CTAs than slices."""
    torch.manual_seed(vocab_size)
    logits = torch.randint(-2, 3, (num_rows, vocab_size)).float() * 0.5
    logits[:, -1] += 0.5
    found = _argmax(logits, grid=grid, warps=warps, slice_size=slice_size, offset=16)
    assert found == reference.best_tokens(logits, is_masked=False).tolist()
    assert found == best_ids(logits.numpy())


def test_argmax_of_what_is_not_finite() -> None:
    """NaN of either sign and infinities anywhere."""
    inf, nan = float("inf"), float("nan")
    logits = torch.randn(9, 131)
    logits[0, 130], logits[1, 0], logits[2, 64], logits[3, 129] = nan, -nan, inf, -inf
    logits[4] = -inf
    logits[5] = -inf
    logits[5, 77] = -3e38
    logits[6] = -inf
    logits[6, 100] = nan
    logits[7] = torch.where(torch.arange(131) % 2 == 0, 0.0, -0.0)
    logits[8] = -logits[8].abs() * 1e-42
    found = _argmax(logits, grid=3)
    assert found == reference.best_tokens(logits, is_masked=False).tolist()
    assert found[7] == 0
    assert found == best_ids(logits.numpy())


def test_argmax_needs_all_of_its_synchronisation() -> None:
    """Two warps, two CTAs and several slices each: every barrier and fence is needed."""
    logits = torch.randn(2, 3 * 256 - 5)
    constants = dict(spec(WARPS=2, SLICE=256).constants)

    def simulate(mutant: Specialised) -> None:
        found = _argmax(logits, grid=2, warps=2, slice_size=256, seeds=1, specialised=mutant)
        assert found == logits.argmax(1).tolist()

    found = [mutation.name for mutation in check_mutants(argmax, constants, simulate)]
    assert (found.count("fence"), found.count("barrier"), found.count("grid_wait")) == (2, 2, 1)


def test_a_ticket_that_does_not_wrap_is_found() -> None:
    """The next run would give no token."""
    constants = dict(spec(WARPS=1, SLICE=128).constants)
    with pytest.raises(AssertionError, match="tickets must be 0"):
        _argmax(torch.randn(2, 300), grid=2, specialised=without_wrapping(argmax, constants))


def test_launches_of_models() -> None:
    """A CTA per row and slice finds work; vocabularies have few slices."""
    for shape in MODEL_SHAPES.values():
        assert len(specs(shape)) == 1
        assert num_ctas_needed(3, shape.vocab_size) <= 3 * 64
    assert num_ctas_needed(3, 8193) == 6
    assert partial_bytes(3, 8193) == 48
