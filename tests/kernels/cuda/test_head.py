"""Layer 1 of the output head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ferrule_server.kernels import reference
from ferrule_server.kernels.cuda.head import head, partial_bytes, shared_bytes, spec
from ferrule_server.kernels.cuda.specialise import Constant, Specialised
from tests.kernels.cuda.mutation import check_mutants
from tests.kernels.cuda.replay import replay
from tools.cuda_simulator import Launch, Memory, run

EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """One launch of the head."""

    m: int = 1
    size: int = 272
    vocab_size: int = 31
    r: int = 2
    u: int = 1
    warps: int = 2
    grid: int = 3
    is_stored: bool = True
    ring: int = 0

    @property
    def constants(self) -> dict[str, Constant]:
        """The compile-time constants."""
        return dict(spec(self.size, M=self.m, R=self.r, U=self.u, WARPS=self.warps, RING=self.ring).constants)


@dataclass
class Data:
    """All bf16."""

    hidden: Tensor
    norm: Tensor
    weight: Tensor


def _exact(case: Case) -> Data:
    """Return data whose sums are exact in float32 and often equal: rounding and ties show."""
    torch.manual_seed(case.vocab_size)
    weight = torch.randint(-3, 4, (case.vocab_size, case.size))
    weight[:, 8:] *= torch.rand(case.vocab_size, 1) < 0.3
    return Data(
        hidden=(torch.randint(0, 2, (case.m, case.size)) * 4 - 2).bfloat16(),
        norm=(torch.randint(1, 3, (case.size,)) / 2).bfloat16(),
        weight=weight.bfloat16(),
    )


def _expected(case: Case, data: Data) -> Tensor:
    normed = reference.rms_norm(data.hidden, data.norm, 0.0)
    return reference.linear(normed.float(), data.weight.float()).bfloat16().float()


def _numpy(tensor: Tensor) -> Any:
    return tensor.contiguous().view(torch.uint16).numpy()


def _place(case: Case, data: Data) -> Memory:
    memory = Memory()
    memory.put("hidden", _numpy(data.hidden), mutable=True, offset=16)
    memory.put("norm", _numpy(data.norm), offset=32)
    memory.put("weight", _numpy(data.weight), offset=48)
    memory.empty("logits", (case.m, case.vocab_size), np.float32, offset=16)
    memory.empty("tokens", case.m, np.int32)
    memory.empty("partials", partial_bytes(case.grid, M=case.m) // 8, np.uint64)
    memory.put("ticket", np.zeros(1, np.uint32), mutable=True)
    return memory


def _launch(case: Case, memory: Memory, specialised: Specialised | None = None) -> Launch:
    names = ("hidden", "norm", "weight", "logits", "tokens", "partials", "ticket")
    addresses = [0 if name == "logits" and not case.is_stored else memory.address(name) for name in names]
    return Launch(
        head,
        case.constants,
        (*addresses, case.vocab_size, case.size, 0.0),
        grid=case.grid,
        num_threads=32 * case.warps,
        shared_bytes=shared_bytes(case.size, case.constants),
        specialised=specialised,
    )


CASES = [
    Case(),
    Case(m=2, size=520, r=4, u=2, vocab_size=37),
    Case(m=2, size=264, r=1, u=2, warps=3, grid=1, vocab_size=29),
    Case(size=8, vocab_size=1, r=4, grid=2, warps=1),
    Case(size=16, vocab_size=53, r=1, grid=40, warps=1, is_stored=False),
]
CASES += [replace(case, ring=ring) for case, ring in zip(CASES, (2, 3, 1, 2, 5), strict=True)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_and_best_tokens_are_the_definitions(case: Case) -> None:
    """Every bit of the logits, the lowest id of equal ones, three times with the ticket as the run before left it."""
    data = _exact(case)
    memory, expected = _place(case, data), _expected(case, data)
    for seed in range(3):
        replay(memory, [_launch(case, memory)], outputs=("logits", "tokens"), counters=("ticket",), seed=seed)
        if case.is_stored:
            assert np.array_equal(memory.get("logits"), expected.numpy())
        assert memory.get("tokens").tolist() == reference.best_tokens(expected, is_masked=False).tolist()


def test_ties_go_to_the_lowest_id() -> None:
    """Every second token of one row, all tokens of the other, whose logits are 0."""
    case = Case(size=16, vocab_size=41, m=2)
    data = _exact(case)
    data.weight = torch.ones_like(data.weight)
    data.weight[::2] = -1
    data.norm[:] = 1
    data.hidden[1] = torch.tensor([2.0, -2.0] * 8)
    memory = _place(case, data)
    run(memory, [_launch(case, memory)], seed=1)
    sums = _expected(case, data)[0]
    assert memory.get("tokens").tolist() == [int(sums[1] > sums[0]), 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_a_row_that_is_not_finite_has_no_token(value: float) -> None:
    """A logit is NaN, infinite, or becomes so where it is rounded to bf16; the other row has its token."""
    case = Case(m=2, size=16, vocab_size=19)
    data = _exact(case)
    data.hidden[0] = 2
    data.norm[:] = 1
    data.weight[11] = 0
    data.weight[11, 0] = value
    if value == 3e38:
        data.weight[11, 1] = value
    data.hidden[1, :2] = 0
    memory = _place(case, data)
    run(memory, [_launch(case, memory)], seed=1)
    assert memory.get("tokens")[0] == -1
    second = _expected(case, data)[1]
    assert memory.get("tokens")[1] == (second.argmax() if second.isfinite().all() else -1)


def test_the_best_token_does_not_depend_on_the_grid() -> None:
    """Nor on tiles or the ring; the logits neither."""
    data = _exact(Case(m=2, size=528, vocab_size=45))
    found = set()
    for r, u, warps, grid, ring in ((1, 1, 2, 1, 0), (2, 2, 3, 4, 2), (4, 1, 2, 9, 0), (2, 2, 2, 3, 5)):
        case = Case(2, 528, 45, r, u, warps, grid, ring=ring)
        memory = _place(case, data)
        run(memory, [_launch(case, memory)], seed=grid)
        found.add((memory.get("tokens").tobytes(), memory.get("logits").tobytes()))
    assert len(found) == 1


@pytest.mark.parametrize(("m", "ring"), [(1, 0), (2, 0), (1, 2)])
def test_head_needs_all_of_its_synchronisation(m: int, ring: int) -> None:
    """Barriers, both fences of the ticket, the waits: each deletion is found."""
    case = Case(m=m, size=264, vocab_size=11, grid=2, r=1, ring=ring)
    data = _exact(case)
    expected = _expected(case, data)

    def simulate(mutant: Specialised) -> None:
        memory = _place(case, data)
        for seed in range(2):
            run(memory, [_launch(case, memory, mutant)], seed=seed)
            assert memory.get("tokens").tolist() == reference.best_tokens(expected, is_masked=False).tolist()
            assert np.array_equal(memory.get("logits"), expected.numpy())

    found = [mutation.name for mutation in check_mutants(head, case.constants, simulate)]
    assert (found.count("fence"), found.count("barrier"), found.count("grid_wait")) == (2, 4, 1)


@pytest.mark.slow
def test_sweep() -> None:
    """Every tile size of the sweep, random numbers."""
    for r, u, warps in ((1, 8, 2), (2, 4, 2), (4, 4, 4), (4, 2, 2)):
        for m in (1, 2):
            case = Case(m, 1040, 61, r, u, warps, 3)
            torch.manual_seed(r)
            data = Data(
                torch.randn(m, 1040).bfloat16(),
                torch.rand(1040).bfloat16(),
                torch.randn(61, 1040).bfloat16(),
            )
            memory = _place(case, data)
            run(memory, [_launch(case, memory)], seed=r)
            found = torch.from_numpy(memory.get("logits"))
            torch.testing.assert_close(found, _expected(case, data), rtol=2**-7, atol=2**-4)
            assert memory.get("tokens").tolist() == found.argmax(1).tolist()
