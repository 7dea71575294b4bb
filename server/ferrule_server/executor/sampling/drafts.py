"""Speculative sampling: accept or replace a draft token so that the output keeps the distribution of the model.

A draft x drawn from q is accepted with probability min(1, p(x) / q(x)). Otherwise a token is drawn from max(p - q, 0),
normalised. The distribution of the output is then p, whatever q is (Leviathan, Kalman and Matias, "Fast Inference from
Transformers via Speculative Decoding", ICML 2023, theorem of appendix A.1; Chen et al., "Accelerating Large Language
Model Decoding with Speculative Sampling", 2023). If a draft was chosen with certainty, q is 1 at the draft and 0
elsewhere.

Each decision uses the number of its own purpose at the position of the token: ACCEPT, then RESIDUAL, never SAMPLE.
"""

from __future__ import annotations

import numpy as np

from ferrule_server.executor.base import DraftSpec, Int32Array
from ferrule_server.executor.sampling.distributions import Choice, Distribution
from ferrule_server.executor.sampling.philox import Purpose, uniform
from ferrule_server.executor.sampling.ranking import Float64Array


def decide(target: Distribution, draft: DraftSpec, seed: int, position: int) -> Choice:
    """Accept a draft or draw another token; the log-probability is that under p.

    Args:
        target: p.
        draft: The token and q.
        seed: Key of both draws.
        position: Index in its sequence of the token to decide on.
    """
    if uniform(seed, position, Purpose.ACCEPT) < accept_probability(target, draft):
        return Choice(draft.token_id, target.logprob(draft.token_id), True)
    token = residual(target, draft).draw(uniform(seed, position, Purpose.RESIDUAL)).token
    return Choice(token, target.logprob(token), False)


def accept_probability(target: Distribution, draft: DraftSpec) -> float:
    """Return min(1, p(x) / q(x)).

    A draft with q(x) = 0 cannot have been drawn from q. It is accepted if p(x) is not 0.
    """
    p = float(target.probabilities()[draft.token_id])
    q = float(_probabilities(draft, len(target.weights))[draft.token_id])
    if q == 0:
        return float(p > 0)
    return min(1.0, p / q)


def residual(target: Distribution, draft: DraftSpec) -> Distribution:
    """Return max(p - q, 0).

    If nothing is left, p and q are equal up to rounding, and a draft is rejected only by rounding. The result is then p
    itself, which changes the distribution of the output by no more than that.
    """
    weights = np.maximum(target.probabilities() - _probabilities(draft, len(target.weights)), 0.0)
    return Distribution(weights) if weights.any() else target


def proposal(draft: DraftSpec) -> tuple[Int32Array | None, Float64Array]:
    """Return q: its tokens in any order (None: all of the vocabulary) and their probabilities, float64, with sum 1.

    The contract allows the sum of the given probabilities to differ a little from 1; they are divided by it.
    """
    if draft.distribution is None:
        return np.array([draft.token_id], np.int32), np.ones(1)
    return draft.distribution.token_ids, draft.distribution.probs / draft.distribution.probs.sum()


def _probabilities(draft: DraftSpec, vocab_size: int) -> Float64Array:
    """Return q of each token: float64 [vocab_size]."""
    token_ids, probs = proposal(draft)
    if token_ids is None:
        return probs
    found = np.zeros(vocab_size)
    found[token_ids] = probs
    return found
