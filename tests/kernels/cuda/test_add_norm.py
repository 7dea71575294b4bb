"""Layer 1 of the fused residual and norm."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ferrule_server.kernels import reference
from ferrule_server.kernels.cuda import gemv
from ferrule_server.kernels.cuda.add_norm import add_norm, shared_bytes, spec, specs
from ferrule_server.kernels.cuda.spec import MODEL_SHAPES
from ferrule_server.kernels.cuda.specialise import Specialised
from tests.kernels.cuda.mutation import check_mutants
from tests.kernels.cuda.replay import replay
from tools.cuda_simulator import Launch, Memory, run

EPS = 1e-6


def _bits(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint16]]:
    return tensor.contiguous().view(torch.uint16).numpy()


def _run(
    hidden: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    *,
    grid: int = 2,
    warps: int = 1,
    eps: float = EPS,
    in_place: bool = False,
    num_runs: int = 3,
    specialised: Specialised | None = None,
) -> tuple[Tensor, Tensor]:
    """Run several times on one state, each in another order; return the residual stream and the normed rows."""
    num_rows, size = hidden.shape
    memory = Memory()
    memory.put("hidden", _bits(hidden), mutable=True, offset=16)
    memory.put("delta", _bits(hidden if delta is None else delta), mutable=True, offset=32)
    memory.put("weight", _bits(weight), offset=48)
    memory.empty("normed", (num_rows, size), np.uint16, offset=16)
    constants = dict(spec(size, ADD=delta is not None, WARPS=warps).constants)
    chunks = constants["X"]
    assert isinstance(chunks, int)
    out = "delta" if in_place else "normed"
    launch = Launch(
        add_norm,
        constants,
        (*map(memory.address, ("hidden", "delta", "weight", out)), num_rows, size, eps),
        grid=grid,
        num_threads=32 * warps,
        shared_bytes=shared_bytes(X=chunks, WARPS=warps),
        specialised=specialised,
    )
    found = []
    for seed in range(num_runs):
        replay(memory, [launch], outputs=("hidden", "delta", "normed"), seed=seed)
        found.append((memory.get("hidden"), memory.get(out)))
    assert all(np.array_equal(found[0], one) for one in found)
    first, second = (torch.from_numpy(part).view(torch.bfloat16) for part in found[0])
    return first, second


@pytest.mark.parametrize("size", [8, 264, 520, 776])
@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize(("num_rows", "grid", "warps"), [(5, 2, 1), (3, 5, 2)])
def test_rounds_where_the_definition_rounds(size: int, has_delta: bool, num_rows: int, grid: int, warps: int) -> None:
    """The sum has every bit of the definition's; the normed rows too, where the scale is exact."""
    torch.manual_seed(size)
    weight = torch.randn(size).bfloat16()
    hidden = torch.randn(num_rows, size).bfloat16()
    delta = torch.randn(num_rows, size).bfloat16() * 3 if has_delta else None
    added, normed = _run(hidden, delta, weight, grid=grid, warps=warps)
    expected = hidden if delta is None else hidden + delta
    assert torch.equal(added, expected)
    torch.testing.assert_close(normed, reference.rms_norm(expected, weight, EPS), rtol=2**-7, atol=0)
    exact = torch.randint(0, 2, hidden.shape).bfloat16() * 8 - 4
    _, normed = _run(exact, None if delta is None else torch.zeros_like(delta), weight, grid=grid, warps=warps, eps=0)
    assert torch.equal(normed, reference.rms_norm(exact, weight, 0))


def test_output_may_take_the_place_of_the_delta() -> None:
    """Each thread reads its own values before it writes them."""
    hidden, delta, weight = torch.randn(5, 264).bfloat16(), torch.randn(5, 264).bfloat16(), torch.rand(264).bfloat16()
    for one, other in zip(
        _run(hidden, delta, weight), _run(hidden, delta, weight, in_place=True, warps=2), strict=True
    ):
        assert torch.equal(one, other)


def test_bits_are_those_of_the_norm_of_a_gemv() -> None:
    """A row alone, normalised in front of a GEMV, and among others, here: rounding shows in an identity matrix."""
    torch.manual_seed(3)
    hidden = (torch.randn(3, 776) * 2.0 ** torch.randint(-20, 20, (3, 776))).bfloat16()
    weight = torch.rand(776).bfloat16()
    expected = [_run(hidden, None, weight, warps=warps, num_runs=1)[1] for warps in (1, 2, 3)]
    assert all(torch.equal(expected[0], one) for one in expected)
    memory = Memory()
    x = memory.put("x", _bits(hidden[1]), mutable=True)
    norm, identity = memory.put("norm", _bits(weight)), memory.put("identity", _bits(torch.eye(9, 776).bfloat16()))
    out = memory.empty("out", 9, np.uint16)
    made = gemv.spec(776, M=1, NORM=True, EPILOGUE="store", R=1, U=1, WARPS=2)
    args = (x, norm, identity, x, out, 9, 776, EPS)
    run(memory, [Launch(made.kernel, dict(made.constants), args, 2, made.num_threads, made.shared_bytes)])
    assert torch.equal(torch.from_numpy(memory.get("out")).view(torch.bfloat16), expected[0][1, :9])


def test_a_row_of_zeros_or_nan_stays_by_itself() -> None:
    """Zeros give zeros, NaN gives NaN, the rows beside them are untouched by either."""
    hidden, weight = torch.randn(4, 264).bfloat16(), torch.rand(264).bfloat16()
    hidden[1], hidden[2, 263] = 0, float("nan")
    _, normed = _run(hidden, None, weight, grid=1)
    assert normed[1].count_nonzero() == 0
    assert normed[2].isnan().all()
    assert torch.equal(normed[[0, 3]], _run(hidden[[0, 3]], None, weight)[1])


def test_needs_all_of_its_synchronisation() -> None:
    """Three rows in one CTA: sums are overwritten twice."""
    hidden, delta, weight = torch.randn(4, 520).bfloat16(), torch.randn(4, 520).bfloat16(), torch.rand(520).bfloat16()

    def simulate(mutant: Specialised) -> None:
        added, normed = _run(hidden, delta, weight, grid=1, warps=2, num_runs=1, specialised=mutant)
        assert torch.equal(added, hidden + delta)
        torch.testing.assert_close(normed, reference.rms_norm(added, weight, EPS), rtol=2**-7, atol=0)

    found = check_mutants(add_norm, dict(spec(520, ADD=True, WARPS=2).constants), simulate)
    assert sorted(mutation.name for mutation in found) == ["barrier", "grid_wait"]


def test_sizes_of_models_fit() -> None:
    """A CTA holds a whole row in its registers."""
    for shape in MODEL_SHAPES.values():
        for one in specs(shape):
            constants = dict(one.constants)
            assert isinstance(chunks := constants["X"], int)
            assert chunks * one.num_threads * 8 >= shape.hidden_size
