"""Speculative sampling: a draft token is accepted or replaced so that the law drawn from stays the model's own.

A draft x drawn from q is accepted with probability min(1, p(x) / q(x)), else a token is drawn from max(p - q, 0),
normalised: what comes out has the law p whatever q is (Leviathan, Kalman and Matias, "Fast Inference from Transformers
via Speculative Decoding", ICML 2023, theorem of appendix A.1; Chen et al., "Accelerating Large Language Model Decoding
with Speculative Sampling", 2023). A draft chosen with certainty is drawn from the law that has nothing but it.

Each decision uses the number of its own purpose at the position of the token: ACCEPT, then RESIDUAL, never SAMPLE.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ferrule_server.executor.base import DraftSpec, Int32Array
from ferrule_server.executor.sampling.laws import Law
from ferrule_server.executor.sampling.philox import Purpose, uniform
from ferrule_server.executor.sampling.ranking import Float64Array

__all__ = ["Decision", "accept_probability", "decide", "residual_law"]


class Decision(NamedTuple):
    """The token a row gives instead of a plain draw, its log-probability under p, and whether it is the draft."""

    token: int
    logprob: float
    is_accepted: bool


def decide(law: Law, draft: DraftSpec, seed: int, position: int) -> Decision:
    """Accept a draft or draw another token.

    Args:
        law: p.
        draft: The token and q.
        seed: Key of both draws.
        position: Index in its sequence of the token decided on.
    """
    if uniform(seed, position, Purpose.ACCEPT) < accept_probability(law, draft):
        return Decision(draft.token_id, math.log(law.probability(draft.token_id)), True)
    token, _ = residual_law(law, draft).draw(uniform(seed, position, Purpose.RESIDUAL))
    return Decision(token, math.log(law.probability(token)), False)


def accept_probability(law: Law, draft: DraftSpec) -> float:
    """Return min(1, p(x) / q(x)); where q(x) is 0, which a draft cannot be, 1 if p allows it.

    q is divided by its sum, which the contract allows to differ a little from 1.
    """
    p, q = law.probability(draft.token_id), _draft_probability(draft)
    if q == 0:
        return float(p > 0)
    return min(1.0, p / q)


def residual_law(law: Law, draft: DraftSpec) -> Law:
    """Return max(p - q, 0) over the tokens of ``law``.

    Where nothing is left, p and q are equal up to rounding, and a draft is rejected with a probability of rounding
    too: then p itself, from which the law that comes out differs by no more than that.
    """
    weights = law.probabilities()
    weights -= _draft_probabilities(law, draft)
    if not np.maximum(weights, 0.0, out=weights).any():
        return law
    return Law(law.token_ids, weights)


def _draft_probability(draft: DraftSpec) -> float:
    """Return q(x)."""
    law = draft.law
    if law is None:
        return 1.0
    if law.token_ids is None:
        return float(law.probs[draft.token_id] / law.probs.sum())
    return float(law.probs[law.token_ids == draft.token_id].sum() / law.probs.sum())


def _draft_probabilities(law: Law, draft: DraftSpec) -> Float64Array:
    """Return q of each token kept by ``law``: float64 [len(law.weights)]."""
    drafted_ids: Int32Array | None = np.array([draft.token_id], np.int32)
    probs = np.ones(1)
    if draft.law is not None:
        drafted_ids, probs = draft.law.token_ids, draft.law.probs / draft.law.probs.sum()
    if drafted_ids is None:
        return probs if law.token_ids is None else probs[law.token_ids]
    found = np.zeros(len(law.weights))
    if law.token_ids is None:
        found[drafted_ids] = probs
        return found
    places = law.token_ids.searchsorted(drafted_ids).clip(max=len(law.token_ids) - 1)
    is_kept = law.token_ids[places] == drafted_ids
    found[places[is_kept]] = probs[is_kept]
    return found
