"""Rank logits: largest first, the lowest id first among equals."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ferrule_server.executor.base import Float32Array

Float64Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.intp]
Logits = Float32Array | Float64Array
"""One row of logits: float32 if raw, float64 if shaped, -inf where a mask forbids a token. Never NaN."""


def best_ids(logits: Float32Array) -> list[int]:
    """Return the id of each row's largest logit, the lowest among equals, and -1 for a row with NaN or infinity.

    Args:
        logits: float32 [num_rows, vocab_size].
    """
    best = logits.argmax(axis=1)
    # NaN wins argmax, so every bad row shows in its peak or minimum.
    is_finite = np.isfinite(logits[np.arange(len(logits)), best]) & np.isfinite(logits.min(axis=1))
    ids: list[int] = np.where(is_finite, best, -1).tolist()
    return ids


def ranked_largest(row: Logits, k: int) -> IntArray:
    """Return the ids of the ``k`` largest logits (or all), largest first, the lowest id first among equals."""
    return ranked(row)[:k]


def ranked(values: Logits) -> IntArray:
    """Return the indices of ``values``, largest value first, the lowest index first among equals."""
    return np.argsort(~bits_by_rank(values), kind="stable")


def bits_by_rank(values: Logits) -> npt.NDArray[np.uint64]:
    """Return integers that rise with the values: uint64, of the same shape; 0.0 and -0.0 are equal."""
    bits = (values.astype(np.float64) + 0.0).view(np.int64)
    return (bits ^ (bits >> 63 | np.int64(-(1 << 63)))).view(np.uint64)
