"""Shaping and sampling distributions in plain Python, by sorting everything: the reference for the fast versions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from hypothesis import reject

from ferrule_server.executor.base import Float32Array, SampleSpec, Shaping, TokenMask

FAR = 1e-9
"""Comparisons are skipped where rounding may decide: a border closer than this."""


def as_row(values: Sequence[float]) -> Float32Array:
    """Return the values as one float32 row."""
    return np.asarray(values, dtype=np.float32)


def mask_of(token_ids: Sequence[int], vocab_size: int) -> TokenMask:
    """Return the mask that allows these tokens."""
    is_allowed = np.zeros(vocab_size, np.bool_)
    is_allowed[list(token_ids)] = True
    return TokenMask(bytes(sorted(token_ids)), np.packbits(is_allowed, bitorder="little"))


def slow_shape(row: Sequence[float], shaping: Shaping, history: Sequence[int]) -> list[float]:
    """Return the shaped logits, token by token, as the contract words it."""
    shaped = []
    for token_id, raw in enumerate(row):
        logit, count = raw, list(history).count(token_id)
        if count > 0:
            logit = logit / shaping.repetition_penalty if logit > 0 else logit * shaping.repetition_penalty
            logit = logit - count * shaping.frequency_penalty - shaping.presence_penalty
        logit += dict(shaping.bias).get(token_id, 0.0)
        is_allowed = shaping.mask is None or shaping.mask.bits[token_id // 8] >> token_id % 8 & 1
        shaped.append(logit if is_allowed else -math.inf)
    return shaped


def slow_distribution(row: Sequence[float], spec: SampleSpec) -> dict[int, float]:
    """Return the probability of each kept token, ids ascending; -inf is a token that may not be drawn."""
    ranked = sorted((i for i in range(len(row)) if row[i] > -math.inf), key=lambda i: (-row[i], i))
    if spec.temperature == 0:
        return {ranked[0]: 1.0}
    weight = {i: math.exp((row[i] - row[ranked[0]]) / spec.temperature) for i in ranked}
    if spec.top_k:
        ranked = ranked[: spec.top_k]
    if spec.top_p < 1:
        ranked = slow_nucleus(ranked, weight, spec.top_p)
    if spec.min_p:
        _need(all(abs(weight[i] - spec.min_p) > FAR or weight[i] == 1 for i in ranked))
        ranked = [i for i in ranked if weight[i] >= spec.min_p]
    total = sum(weight[i] for i in ranked)
    return {i: weight[i] / total for i in sorted(ranked)}


def slow_nucleus(ranked: list[int], weight: dict[int, float], top_p: float) -> list[int]:
    """Return the shortest head of the ranking whose share reaches ``top_p``."""
    total = sum(weight[i] for i in ranked)
    reached = 0.0
    for count, i in enumerate(ranked, start=1):
        reached += weight[i]
        _need(abs(reached - top_p * total) > FAR * total or count == len(ranked))
        if reached >= top_p * total:
            return ranked[:count]
    return ranked


def slow_draw(distribution: dict[int, float], u: float) -> int:
    """Return the first id whose cumulative probability exceeds ``u``."""
    cumulative = 0.0
    for token_id, probability in distribution.items():
        cumulative += probability
        _need(abs(cumulative - u) > FAR)
        if cumulative > u:
            return token_id
    raise AssertionError("u is below 1")


def _need(is_far: bool) -> None:
    """Leave out an example whose outcome rounding decides."""
    if not is_far:
        reject()
