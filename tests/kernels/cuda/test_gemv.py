"""Layer 1 of the GEMV: numbers against the definition, hazards in the simulator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ferrule_server.kernels import reference
from ferrule_server.kernels.cuda import head
from ferrule_server.kernels.cuda.gemv import gemv, num_ctas_needed, shared_bytes, spec, specs
from ferrule_server.kernels.cuda.spec import MODEL_SHAPES, SHARED_LIMITS
from ferrule_server.kernels.cuda.specialise import Constant, Specialised
from tests.kernels.cuda.mutation import check_mutants
from tests.kernels.cuda.replay import replay
from tools.cuda_simulator import Launch, Memory, run

EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """One launch of the kernel; sizes have tails, CTAs have unequal work."""

    epilogue: str = "store"
    m: int = 1
    size: int = 264
    num_rows: int = 13
    r: int = 2
    u: int = 2
    warps: int = 2
    grid: int = 2
    is_normed: bool = False
    has_bias: bool = False
    ring: int = 0

    @property
    def constants(self) -> dict[str, Constant]:
        """The compile-time constants."""
        return dict(
            spec(
                self.size,
                M=self.m,
                NORM=self.is_normed,
                EPILOGUE=self.epilogue,
                BIAS=self.has_bias,
                R=self.r,
                U=self.u,
                WARPS=self.warps,
                RING=self.ring,
            ).constants
        )

    @property
    def num_weight_rows(self) -> int:
        """Rows of the weight."""
        return self.num_rows * (2 if self.epilogue == "swiglu" else 1)


@dataclass
class Data:
    """What a case computes with, all bf16."""

    x: Tensor
    norm: Tensor
    weight: Tensor
    bias: Tensor
    before: Tensor


def _random(case: Case, seed: int = 0) -> Data:
    torch.manual_seed(seed)
    return Data(
        x=torch.randn(case.m, case.size).bfloat16() * 3,
        norm=torch.rand(case.size).bfloat16() + 0.5,
        weight=(torch.randn(case.num_weight_rows, case.size) / case.size**0.5).bfloat16(),
        bias=torch.randn(case.num_weight_rows).bfloat16(),
        before=torch.randn(case.m, case.num_rows).bfloat16(),
    )


def _exact(case: Case, seed: int = 0) -> Data:
    """Return data whose float32 sums are exact in any order: all that can differ is where bf16 is rounded."""
    data = _random(case, seed)
    data.x = (torch.randint(0, 2, data.x.shape) * 4 - 2).bfloat16()
    data.norm = (torch.randint(1, 200, data.norm.shape) / 64).bfloat16()
    data.weight = torch.randint(-60, 61, data.weight.shape).bfloat16() / 256
    return data


def _expected(case: Case, data: Data) -> Tensor:
    x = reference.rms_norm(data.x, data.norm, EPS) if case.is_normed else data.x
    bias = data.bias if case.has_bias else None
    y = reference.linear(x.float(), data.weight.float(), None if bias is None else bias.float()).bfloat16()
    if case.epilogue == "swiglu":
        return reference.activate(y, "silu", is_gated=True)
    return data.before + y if case.epilogue == "residual" else y


def _numpy(tensor: Tensor) -> Any:
    return tensor.contiguous().view(torch.uint16).numpy()


def _place(case: Case, data: Data, offset: int = 0) -> Memory:
    memory = Memory()
    memory.put("x", _numpy(data.x), mutable=True, offset=offset)
    memory.put("norm", _numpy(data.norm), offset=offset)
    memory.put("weight", _numpy(data.weight), offset=offset)
    memory.put("bias", _numpy(data.bias), offset=offset)
    if case.epilogue == "residual":
        memory.put("out", _numpy(data.before), mutable=True, offset=offset)
    else:
        memory.empty("out", (case.m, case.num_rows), np.uint16, offset=offset)
    return memory


def _launch(case: Case, memory: Memory, specialised: Specialised | None = None, eps: float = EPS) -> Launch:
    addresses = [memory.address(name) for name in ("x", "norm", "weight", "bias", "out")]
    return Launch(
        gemv,
        case.constants,
        (*addresses, case.num_rows, case.size, eps),
        grid=case.grid,
        num_threads=32 * case.warps,
        shared_bytes=shared_bytes(case.size, case.constants),
        specialised=specialised,
    )


def _run(case: Case, data: Data, *, num_runs: int = 1, offset: int = 0, eps: float = EPS) -> Tensor:
    """Run a case several times on one state, each in another order, and return what all runs gave."""
    memory = _place(case, data, offset)
    found = []
    for seed in range(num_runs):
        replay(memory, [_launch(case, memory, eps=eps)], outputs=("out",), seed=seed)
        found.append(memory.get("out"))
    assert all(np.array_equal(found[0], other) for other in found)
    return torch.from_numpy(found[0]).view(torch.bfloat16)


CASES = [
    Case(),
    Case(m=2, size=520, num_rows=7, r=1, u=4, has_bias=True),
    Case(m=2, size=776, num_rows=9, r=4, u=1, warps=1, is_normed=True),
    Case(size=776, num_rows=33, r=4, u=2, warps=3, grid=3, is_normed=True, has_bias=True),
    Case("residual", size=1032, num_rows=11, r=1, u=4, grid=3),
    Case("residual", m=2, size=264, num_rows=10, r=2, u=1, has_bias=True),
    Case("swiglu", size=520, num_rows=9, r=1, u=2, is_normed=True),
    Case("swiglu", m=2, size=264, num_rows=6, r=2, u=1, is_normed=True, has_bias=True),
    Case(size=8, num_rows=1, r=1, u=1, warps=1, grid=1),
    Case(size=256, num_rows=5, r=1, u=1, warps=1, grid=5),
    Case(num_rows=3, grid=4, is_normed=True),
]
CASES += [replace(case, ring=ring) for case, ring in zip(CASES, (2, 1, 3, 5, 2, 4, 2, 1, 2, 5, 2), strict=True)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rounds_where_the_definition_rounds(case: Case) -> None:
    """With sums that are exact in float32 every bit is that of the definition; bases are multiples of 16 only."""
    data = _exact(case)
    # SwiGLU's exp2 and reciprocal are approximations: one unit of bf16 where the rounding of silu is close.
    found, expected = _run(case, data, num_runs=3, offset=48, eps=0.0), _expected(case, data)
    if case.epilogue == "swiglu":
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)
        assert (found == expected).float().mean() > 0.8
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_close_for_any_numbers(case: Case) -> None:
    """Random numbers: within a unit of bf16, and of its rounding of the normalised vector."""
    data = _random(case)
    torch.testing.assert_close(_run(case, data), _expected(case, data), rtol=2**-7, atol=2**-7)


def _order_dependent(case: Case) -> Data:
    """Return data whose rows add up to what their order rounds away: every number comes with its opposite."""
    data = _random(case)
    data.x = torch.ones_like(data.x)
    half = (torch.randn(case.num_rows, case.size // 2) * 2.0 ** torch.randint(0, 60, (case.size // 2,))).bfloat16()
    data.weight = torch.cat((half, -half), 1)[:, torch.randperm(case.size)]
    return data


def test_order_of_a_sum_depends_on_nothing() -> None:
    """Tile sizes, warps, the grid, the ring and a second vector leave every bit of a row as it is."""
    case = Case(size=1032, num_rows=6)
    data = _order_dependent(case)
    expected = _run(case, data)
    assert len(set(expected.flatten().tolist())) > 3
    others = [(1, 1, 1, 1, 0), (1, 4, 2, 3, 2), (4, 2, 1, 2, 0), (2, 8, 3, 1, 1), (2, 2, 2, 2, 5)]
    for r, u, warps, grid, ring in others:
        other = Case(size=1032, num_rows=6, r=r, u=u, warps=warps, grid=grid, ring=ring)
        assert torch.equal(_run(other, data), expected), other
    data.x = torch.cat((data.x, data.x * 2))
    data.before = data.before.repeat(2, 1)
    both = _run(Case(m=2, size=1032, num_rows=6), data)
    assert torch.equal(both[0], expected[0])
    assert torch.equal(both[1], expected[0] * 2)


def test_order_of_the_norm_depends_on_nothing() -> None:
    """Nor do warps and tile sizes change the sum of squares: its bits show in the normalised vector."""
    case = Case(size=776, num_rows=8, is_normed=True)
    data = _random(case)
    data.x = (torch.randn(1, 776) * 2.0 ** torch.randint(-20, 20, (1, 776))).bfloat16()
    data.weight = torch.eye(8, 776).bfloat16() * 1e30
    expected = _run(case, data)
    for u, warps in ((1, 1), (4, 3), (2, 4)):
        assert torch.equal(_run(Case(size=776, num_rows=8, u=u, warps=warps, is_normed=True), data), expected)


@pytest.mark.parametrize("ring", [0, 2])
def test_needs_all_of_its_synchronisation(ring: int) -> None:
    """Without any barrier or wait, or waiting for one tile less, the simulator finds a hazard."""
    case = Case("residual", m=2, size=272, num_rows=9, u=1, grid=2, is_normed=True, ring=ring)
    data = _random(case)

    def simulate(mutant: Specialised) -> None:
        memory = _place(case, data)
        run(memory, [_launch(case, memory, mutant)], seed=3)
        found = torch.from_numpy(memory.get("out")).view(torch.bfloat16)
        torch.testing.assert_close(found, _expected(case, data), rtol=2**-7, atol=2**-7)

    found = [str(mutation).partition(" on")[0] for mutation in check_mutants(gemv, case.constants, simulate)]
    assert found.count("barrier") == 2
    if ring:
        waits = {name for name in found if "_wait_" in name}
        assert waits == {
            *("copy_async_wait_0", "copy_async_wait_0 (as copy_async_wait_1)"),
            *("copy_async_wait_1", "copy_async_wait_1 (as copy_async_wait_2)"),
        }


def test_nan_and_infinity_of_a_vector_stay_in_its_outputs() -> None:
    """What is beyond the end of a row does not spread, nor does one vector to the other."""
    case = Case(m=2, size=264, num_rows=5, r=4)
    data = _random(case)
    data.x[0, 263] = float("nan")
    found = _run(case, data)
    assert found[0].isnan().all()
    assert torch.equal(found[1], _run(Case(size=264, num_rows=5, r=4), _with_x(data, data.x[1:]))[0])


def _with_x(data: Data, x: Tensor) -> Data:
    return Data(x, data.norm, data.weight, data.bias, data.before[: len(x)])


@pytest.mark.slow
@pytest.mark.parametrize("epilogue", ["store", "residual", "swiglu"])
@pytest.mark.parametrize("size", [16, 528, 1040, 2064])
def test_sweep(epilogue: str, size: int) -> None:
    """Every tile size of the sweep, with bias and norm, at sizes below, at and above a tile."""
    for r, u in ((1, 1), (1, 8), (2, 4), (4, 1), (4, 4)):
        for m in (1, 2):
            case = Case(epilogue, m, size, 4 * r + 1, r, u, 2, 2, True, True)
            data = _random(case, seed=r * u)
            torch.testing.assert_close(_run(case, data, num_runs=3), _expected(case, data), rtol=2**-7, atol=2**-7)


def test_every_cta_has_rows() -> None:
    """Rows go round the CTAs first, so as many find work as there are turns of one warp."""
    assert num_ctas_needed(13, {"R": 2}) == 7
    assert num_ctas_needed(1, {"R": 4}) == 1


@pytest.mark.parametrize("num_sms", [58, 72, 84, 108, 114, 128, 132, 142, 148, 170, 188])
@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_rows_go_round_evenly(name: str, num_sms: int) -> None:
    """No multiprocessor has more than a sixth more rows than the average, however many there are."""
    for one in specs(MODEL_SHAPES[name]):
        constants: dict[str, Any] = dict(one.constants)
        for linear in MODEL_SHAPES[name].linears.values():
            if linear.epilogue == constants["EPILOGUE"]:
                groups = linear.num_rows / constants["R"] / num_sms
                assert np.ceil(groups) <= groups * 7 / 6, (linear, one.name)


LIMITS = {
    **dict.fromkeys([(8, 0)], (163, 164)),
    **dict.fromkeys([(8, 6), (8, 9), (12, 0)], (99, 100)),
    **dict.fromkeys([(9, 0), (10, 0)], (227, 228)),
}
"""KiB of shared memory by compute capability: most of one CTA, all of a multiprocessor."""
ATTENTION_BYTES = 97_936
"""The largest kernel between two of these."""


@pytest.mark.parametrize("capability", LIMITS)
@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_rings_follow_from_the_shared_memory(name: str, capability: tuple[int, int]) -> None:
    """One fits any GPU, and two a multiprocessor; beside attention too, where kernels of that size start early."""
    limit, whole = (kib << 10 for kib in LIMITS[capability])
    shape = MODEL_SHAPES[name]
    found = [*specs(shape, [limit]), *head.specs(shape, [limit])]
    assert len(found) == 8
    for one in found:
        ring = int(dict(one.constants)["RING"])  # type: ignore[arg-type]
        assert one.shared_bytes <= min(limit, 99 << 10)
        assert 2 * (one.shared_bytes + 1024) <= whole
        if limit == 227 << 10:
            assert ring >= (3 if dict(one.constants)["M"] == 2 else 4)
            assert one.shared_bytes + ATTENTION_BYTES + 2048 <= whole
        else:
            assert ring == 2 or one.shared_bytes + (32 << 10) > (50 << 10) - 1024  # that of 8.6


def test_specs_of_a_model_are_unique() -> None:
    """Two to a model and GPU would be compiled twice."""
    shape = MODEL_SHAPES["Qwen3-1.7B"]
    for limit in SHARED_LIMITS:
        names = [one.name for one in specs(shape, [limit])]
        assert len(names) == len(set(names)) == 6
    assert {one.name for one in specs(shape)} == {one.name for it in SHARED_LIMITS for one in specs(shape, [it])}


@pytest.mark.parametrize("has_qkv_bias", [False, True])
@pytest.mark.parametrize("has_out_bias", [False, True])
@pytest.mark.parametrize("has_mlp_bias", [False, True])
def test_specs_have_the_biases_of_the_model(has_qkv_bias: bool, has_out_bias: bool, has_mlp_bias: bool) -> None:
    """QKV and O have one each, gate, up and down that of the feed-forward part."""
    biases = {"has_qkv_bias": has_qkv_bias, "has_attention_out_bias": has_out_bias, "has_mlp_bias": has_mlp_bias}
    shape = replace(MODEL_SHAPES["Qwen3-0.6B"], **biases)
    found = {(constants["EPILOGUE"], constants["BIAS"]) for one in specs(shape) if (constants := dict(one.constants))}
    assert found == {
        ("store", has_qkv_bias),
        ("residual", has_out_bias),
        ("residual", has_mlp_bias),
        ("swiglu", has_mlp_bias),
    }
