"""The probe of the read rate, compiled by Numba."""

from __future__ import annotations

from typing import Any

import numba

from benchmarks.cpu.machine import ReadRate

__all__ = ["compiled_probe"]


@numba.njit(nogil=True, cache=False)  # type: ignore[untyped-decorator]  # Numba has no types
def _fold(words: Any) -> int:
    """Return the exclusive or of all words, so that every word is read."""
    folded = 0
    for index in range(words.size):
        folded ^= words[index]
    return folded


def compiled_probe(num_passes: int) -> ReadRate:
    """Return a probe with one thread on each core."""
    return ReadRate(_fold, num_passes=num_passes)
