"""Quantise weights to int8 with one scale per row, once at loading. A token then reads half the bytes of bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["LEVELS", "quantise_rows"]

LEVELS = 127
"""The largest integer; the range is symmetric, so -128 does not occur."""


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
