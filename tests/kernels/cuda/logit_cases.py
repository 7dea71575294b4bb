"""Rows of logits as awkward as they come, and the sizes that the kernels over them are simulated with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["DIGITS", "SLICE", "THREADS", "VOCABULARIES", "WARPS", "awkward_rows", "num_slices", "philox_seed"]

WARPS = 2
THREADS = 32 * WARPS
SLICE = 256
DIGITS = ((24, 8), (16, 8), (8, 8), (0, 8))
"""Narrow digits, so that a simulated CTA has few bins to walk."""
VOCABULARIES = (97, 300, 517)
"""One slice and a piece of one, two, three; none a multiple of 4 but 300."""

Rows = npt.NDArray[np.float32]


def num_slices(vocab_size: int) -> int:
    """Return the slices of a row at the sizes above."""
    return -(-vocab_size // SLICE)


def philox_seed(number: int) -> int:
    """Return one of many 64-bit seeds."""
    return (number * 0x9E3779B97F4A7C15 + 0xDEADBEEF) % 2**64


def awkward_rows(vocab_size: int, seed: int) -> Rows:
    """Return rows without ties, with many, masked, of both zeros, all equal, very wide, one peak, scattered ties."""
    rng = np.random.default_rng(seed)
    plain = rng.normal(0, 3, vocab_size)
    tied = np.round(rng.normal(0, 1, vocab_size) * 2) / 2
    masked = np.where(rng.random(vocab_size) < 0.7, -np.inf, tied)
    masked[rng.integers(vocab_size)] = 1.5
    zeros = np.where(rng.random(vocab_size) < 0.5, -0.0, 0.0)
    zeros[::5] = -1.0
    equal = np.full(vocab_size, -7.25)
    wide = rng.normal(0, 1, vocab_size) * 10.0 ** rng.integers(-30, 30, vocab_size)
    peak = np.full(vocab_size, -np.inf)
    peak[-1] = -3.0
    scattered = np.full(vocab_size, -3.0)
    scattered[:: max(vocab_size // 20, 1)] = 4.0
    return np.stack([plain, tied, masked, zeros, equal, wide, peak, scattered]).astype(np.float32)
