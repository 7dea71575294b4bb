"""The distribution that a token is drawn from: temperature, then top-k, top-p and min-p, then one draw.

Tokens rank by logit, equal logits by lowest id; temperature does not change the rank. The vocabulary is never sorted as
a whole: top-k partitions it, and top-p ranks only the tokens that can still be in the nucleus.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ferrule_server.executor.base import SampleSpec
from ferrule_server.executor.sampling.ranking import Float64Array, IntArray, Logits, largest, ranked

SMALLEST_TEMPERATURE = 1e-200
"""Below this temperature every logit but the largest has weight 0, and the division could overflow."""

_RUN = 128
_LONG = 4096


class Choice(NamedTuple):
    """The token that a row gives.

    Attributes:
        token: Its id.
        logprob: Its natural log-probability under the distribution it was drawn from; 0 for a greedy choice.
        is_accepted: Whether it is the row's draft, accepted; None if the row has no draft.
    """

    token: int
    logprob: float
    is_accepted: bool | None = None


@dataclass(frozen=True, slots=True)
class Distribution:
    """The distribution that one token is drawn from.

    Invariant: ids ascend, no weight is negative, at least one is positive.

    Attributes:
        token_ids: intp [n], the tokens kept, ascending; None: all tokens.
        weights: float64 [n], probabilities up to one common factor.
    """

    token_ids: IntArray | None
    weights: Float64Array

    def draw(self, u: float) -> Choice:
        """Return the first token whose cumulative probability exceeds ``u``.

        Args:
            u: Random number in [0, 1).
        """
        index, total = _first_beyond(self.weights, u)
        token = index if self.token_ids is None else int(self.token_ids[index])
        return Choice(token, math.log(self.weights[index]) - math.log(total))

    def probabilities(self) -> Float64Array:
        """Return the probability of each kept token: float64 [n]."""
        probabilities: Float64Array = self.weights / self.weights.sum()
        return probabilities

    def probability(self, token_id: int) -> float:
        """Return the probability of one token, kept or not."""
        index = token_id
        if self.token_ids is not None:
            index = int(self.token_ids.searchsorted(token_id))
            if index == len(self.token_ids) or self.token_ids[index] != token_id:
                return 0.0
        return float(self.weights[index] / self.weights.sum())


def sampling_distribution(row: Logits, spec: SampleSpec, peak: float) -> Distribution:
    """Return the distribution of one draw: temperature, then top-k, top-p and min-p.

    Args:
        row: float32 or float64 [vocab_size], finite, or -inf where a mask forbids a token.
        spec: How to draw; at temperature 0 only the largest logit is kept, with the lowest id among equals.
        peak: The largest logit of the row.
    """
    if spec.temperature == 0:
        return Distribution(np.array([row.argmax()]), np.ones(1))
    token_ids = largest(row, spec.top_k) if 0 < spec.top_k < len(row) else None
    values = row if token_ids is None else row[token_ids]
    weights = np.subtract(values, peak, dtype=np.float64)
    if spec.temperature != 1:
        weights /= max(spec.temperature, SMALLEST_TEMPERATURE)
    distribution = Distribution(token_ids, np.exp(weights, out=weights))
    if spec.top_p < 1:
        distribution = _keep(distribution, _nucleus(values, distribution.weights, spec.top_p))
    if spec.min_p > 0:
        distribution = _keep(distribution, np.flatnonzero(distribution.weights >= spec.min_p))
    return distribution


def _first_beyond(weights: Float64Array, u: float) -> tuple[int, float]:
    """Return the first index at which the sum of weights exceeds ``u`` times their total, and the total.

    Long rows are summed in runs. Then only the run with the result is summed element by element, which takes a fifth of
    the time of one long sum. The weight at the index is positive.
    """
    num_whole = len(weights) // _RUN if len(weights) > _LONG else 0
    if not num_whole:
        sums = np.cumsum(weights)
        return int(sums.searchsorted(u * sums[-1], side="right")), float(sums[-1])
    runs = weights[: num_whole * _RUN].reshape(num_whole, _RUN).sum(axis=1)
    sums = np.cumsum(np.append(runs, weights[num_whole * _RUN :].sum()))
    goal = u * sums[-1]
    run = int(sums.searchsorted(goal, side="right"))
    part = weights[run * _RUN : (run + 1) * _RUN if run < num_whole else None]
    index = int(np.cumsum(part).searchsorted(goal - (sums[run - 1] if run else 0.0), side="right"))
    if index == len(part):  # the two sums of the run differ in the last bit, and the goal lies between them
        index = int(np.flatnonzero(part)[-1])
    return run * _RUN + index, float(sums[-1])


def _keep(distribution: Distribution, indices: IntArray) -> Distribution:
    """Return the distribution of only the tokens at ``indices`` (intp, ascending)."""
    token_ids = indices if distribution.token_ids is None else distribution.token_ids[indices]
    return Distribution(token_ids, distribution.weights[indices])


def _nucleus(values: Logits, weights: Float64Array, top_p: float) -> IntArray:
    """Return the indices, ascending, of the smallest set of largest weights whose sum reaches ``top_p`` of the total.

    At most ``total - goal`` may be dropped. All tokens lighter than its mean share per token weigh less than that
    together, so none of them is in the set. If rounding breaks this argument, all tokens are ranked.
    """
    total = float(weights.sum())
    goal = top_p * total
    for floor in ((total - goal) / len(weights), 0.0):
        candidates = np.flatnonzero(weights >= floor)
        order = candidates[ranked(values[candidates])]
        sums = np.cumsum(weights[order])
        if sums[-1] >= goal:
            break
    is_kept = np.zeros(len(values), np.bool_)
    is_kept[order[: int(sums.searchsorted(goal)) + 1]] = True
    return np.flatnonzero(is_kept)
