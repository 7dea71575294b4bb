"""Quantise weights once, at loading: to int8 with a scale per row, or to int4 with a scale per block of a row."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["LEVELS", "quantise_blocks", "quantise_rows"]

LEVELS = 127
"""The largest integer; the range is symmetric, so -128 does not occur."""

_INT4_LEVELS = (8.0, 7.0)
"""What the number with the largest magnitude of a block may become, up to its sign."""


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight as integers and scales, ``weight[n, k] ~ scales[n] * integers[n, k]``.

    The largest magnitude of a row becomes 127. The other weights are rounded to the nearest integer, halves to even, so
    no weight changes by more than half the scale of its row.

    Args:
        weight: [num_rows, size], finite; not changed.

    Returns:
        int8 [num_rows, size] and float32 [num_rows], on the device of the weight. A row of zeros, or of numbers below
        2e-36, has the scale 0.
    """
    wide = weight.float()
    scales = wide.abs().amax(1) / LEVELS
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 0.0, scales)
    divisors = torch.where(scales > 0, scales, torch.inf).unsqueeze(1)
    return (wide / divisors).round_().to(torch.int8), scales


def quantise_blocks(weight: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return a weight as integers of 4 bits and scales of blocks of a row, ``weight ~ scale * integer``.

    The number with the largest magnitude of a block becomes -8 or, if that fits better, -7, so that the range is used
    on the side where it is needed. The scale is rounded to bfloat16 before integers are, to nearest, halves to even.

    Args:
        weight: [num_rows, num_columns], finite, a multiple of ``size`` columns; not changed.
        size: Columns of a block.

    Returns:
        int8 [num_rows, num_columns] from -8 to 7, and bfloat16 [num_rows, num_columns / size]. A block of zeros, or of
        numbers below 2e-37, has the scale 0.
    """
    blocks = weight.float().view(len(weight), -1, size)
    lowest, highest = blocks.amin(2), blocks.amax(2)
    signed = torch.where(-lowest > highest, lowest, highest)
    signed = torch.where(signed.abs() < 2e-37, 0.0, signed)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    for level in _INT4_LEVELS:
        scales = (signed / -level).bfloat16()
        divisors = torch.where(scales == 0, torch.inf, scales.float()).unsqueeze(2)
        integers = (blocks / divisors).round_().clamp_(-8, 7)
        error = integers.mul(divisors.where(scales.unsqueeze(2) != 0, 0.0)).sub_(blocks).square_().sum(2)
        if best is None:
            best = (error, integers, scales)
            continue
        is_better = error < best[0]
        best = (
            torch.where(is_better, error, best[0]),
            torch.where(is_better.unsqueeze(2), integers, best[1]),
            torch.where(is_better, scales, best[2]),
        )
    assert best is not None
    return best[1].to(torch.int8).view(weight.shape), best[2]
