"""Shapes a row of logits before a token is chosen from it: penalties, then bias, then mask."""

from __future__ import annotations

import numpy as np

from ferrule_server.executor.base import Float32Array, Int32Array, Shaping
from ferrule_server.executor.sampling.ranking import Float64Array

__all__ = ["shape_row"]


def shape_row(row: Float32Array, shaping: Shaping, history: Int32Array | None) -> Float64Array:
    """Return the logits to choose from, in float64; the row is not changed.

    Args:
        row: float32 [vocab_size], finite.
        shaping: Penalties, bias and mask.
        history: int32 [n], the tokens that penalties count; None where ``shaping`` has none.

    Returns:
        float64 [vocab_size], the caller's; -inf where the mask forbids a token, finite elsewhere. A mask allows at
        least one token.
    """
    values = row.astype(np.float64)
    if shaping.has_penalties:
        assert history is not None, "penalties without a history"
        _penalise(values, shaping, history)
    if shaping.bias:
        token_ids, amounts = zip(*shaping.bias, strict=True)
        values[list(token_ids)] += amounts
    if shaping.mask is not None:
        is_allowed = np.unpackbits(shaping.mask.bits, count=len(row), bitorder="little").view(np.bool_)
        values[~is_allowed] = -np.inf
    return values


def _penalise(values: Float64Array, shaping: Shaping, history: Int32Array) -> None:
    """Apply the penalties in place to the tokens that occurred."""
    token_ids, counts = np.unique(history, return_counts=True)
    occurred = values[token_ids]
    factor = shaping.repetition_penalty
    occurred = np.where(occurred > 0, occurred / factor, occurred * factor)
    values[token_ids] = occurred - (counts * shaping.frequency_penalty + shaping.presence_penalty)
