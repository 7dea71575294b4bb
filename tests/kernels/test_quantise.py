"""int8 weights: what rounding keeps, and rows that have nothing to scale."""

from __future__ import annotations

import torch

from ferrule_server.kernels import reference
from ferrule_server.kernels.quantise import LEVELS, quantise_rows


def test_no_weight_is_off_by_more_than_half_a_unit() -> None:
    """A unit is a row's largest magnitude over 127, whatever the other rows hold."""
    torch.manual_seed(0)
    weight = (torch.randn(7, 97) * 10.0 ** torch.arange(-3, 4).unsqueeze(1)).bfloat16()
    integers, scales = quantise_rows(weight)
    assert integers.dtype == torch.int8
    assert scales.dtype == torch.float32
    assert integers.abs().amax(1).tolist() == [LEVELS] * 7
    error = (scales.unsqueeze(1) * integers - weight.float()).abs()
    assert (error <= scales.unsqueeze(1) * 0.50001).all()


def test_halves_round_to_even() -> None:
    """127 fixes the unit at 1; the rest lies between two integers."""
    integers, scales = quantise_rows(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]]))
    assert integers.tolist() == [[127, 0, 2, 2, 0, -2, -2]]
    assert scales.tolist() == [1.0]


def test_a_row_of_zeros_stays_zero() -> None:
    """Its scale is 0 and nothing is divided by it."""
    integers, scales = quantise_rows(torch.tensor([[0.0, 0.0], [0.0, -2.0]]))
    assert integers.tolist() == [[0, 0], [0, -127]]
    assert scales[0] == 0
    assert reference.linear_int8(torch.ones(1, 2), integers, scales).tolist() == [[0.0, -2.0]]


def test_the_smallest_numbers_become_zero() -> None:
    """A unit below the normal numbers of float32 would have too few bits to divide by."""
    for smallest in (1e-44, 1e-38, 1e-37):
        integers, scales = quantise_rows(torch.full((1, 3), -smallest))
        assert (integers.tolist(), scales.tolist()) == ([[0, 0, 0]], [0.0])
    assert quantise_rows(torch.full((1, 3), -2e-36))[0].tolist() == [[-127] * 3]


def test_linear_of_integers_scales_before_it_adds_and_rounds_once() -> None:
    """By hand: 3 x 2 + 1 x 4 = 10 units of a half, plus a bias; then one rounding to bf16."""
    x = torch.tensor([[2.0, 4.0]]).bfloat16()
    weight, scales = torch.tensor([[3, 1]], dtype=torch.int8), torch.tensor([0.5])
    assert reference.linear_int8(x, weight, scales, torch.tensor([0.25])).item() == 5.25
    almost = reference.linear_int8(x, weight, torch.tensor([0.1]), torch.tensor([256.0]))
    assert almost.dtype == torch.bfloat16
    assert almost.item() == 256
