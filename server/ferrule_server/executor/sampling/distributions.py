"""The distribution that a token is drawn from: temperature, then top-k, top-p and min-p, then one draw.

Tokens rank by logit, equal logits by lowest id; temperature does not change the rank. This is the plain definition,
which sorts and has a weight for every token; ``kernels.cpu.choice`` does the same, with the same bits, in a few passes.
Weights are summed in one order: 64 consecutive tokens by themselves (:func:`sums_of_runs`), then these sums from the
first on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from ferrule_server.executor.base import SampleSpec
from ferrule_server.executor.sampling.exponential import exp_of
from ferrule_server.executor.sampling.ranking import Float64Array, Logits, bits_by_rank, ranked

SMALLEST_TEMPERATURE = 1e-200
"""Below this temperature every logit but the largest has weight 0, and the division could overflow."""
RUN: Final = 64
"""Tokens that are summed before their sum is added to that of the row."""
_SHIFTS: Final = (52, 40, 28, 16, 4, 0)
"""Where the bits end by which tokens are sorted into bins, one division of the last bin after the other."""


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

    Invariant: no weight is negative, at least one is positive.

    Attributes:
        weights: float64 [vocab_size], probabilities up to one common factor; 0 for a token that is not kept.
    """

    weights: Float64Array

    def draw(self, u: float) -> Choice:
        """Return the first token whose cumulative probability exceeds ``u``, a number in [0, 1)."""
        sums = np.cumsum(sums_of_runs(self.weights))
        goal = u * sums[-1]
        run = int(sums.searchsorted(goal, side="right"))
        part = self.weights[run * RUN : (run + 1) * RUN]
        index = int(np.cumsum(part).searchsorted(goal - (sums[run - 1] if run else 0.0), side="right"))
        if index == len(part):  # the two sums of the run differ in the last bit, and the goal lies between them
            index = int(np.flatnonzero(part)[-1])
        return Choice(run * RUN + index, log_share(float(part[index]), float(sums[-1])))

    def probabilities(self) -> Float64Array:
        """Return the probability of each token: float64 [vocab_size]."""
        return self.weights / total_of(self.weights)

    def logprob(self, token_id: int) -> float:
        """Return the log-probability of a token that is kept."""
        return log_share(float(self.weights[token_id]), total_of(self.weights))


def log_share(weight: float, total: float) -> float:
    """Return the natural log-probability of a token of some weight."""
    return math.log(weight) - math.log(total)


def sums_of_runs(weights: Float64Array) -> Float64Array:
    """Return the sums of 64 consecutive weights each: every eighth from the l-th on in lane l, then lanes are added."""
    lanes = np.pad(weights, (0, -len(weights) % RUN)).reshape(-1, 8, 8)
    sums = lanes[:, 0]
    for number in range(1, 8):
        sums = sums + lanes[:, number]
    for half in (4, 2, 1):
        sums = sums[:, :half] + sums[:, half : 2 * half]
    return sums[:, 0]


def total_of(weights: Float64Array) -> float:
    """Return the sum of all weights."""
    return float(np.cumsum(sums_of_runs(weights))[-1])


def sampling_distribution(row: Logits, spec: SampleSpec, peak: float) -> Distribution:
    """Return the distribution of one draw: temperature, then top-k, top-p and min-p.

    Args:
        row: float32 or float64 [vocab_size], finite, or -inf where a mask forbids a token.
        spec: How to draw; at temperature 0 only the largest logit is kept, with the lowest id among equals.
        peak: The largest logit of the row.
    """
    if spec.temperature == 0:
        return Distribution((np.arange(len(row)) == row.argmax()).astype(np.float64))
    below = np.subtract(row, peak, dtype=np.float64)
    weights = exp_of(below * (1 / max(spec.temperature, SMALLEST_TEMPERATURE)))
    keep_top(weights, row, spec, peak)
    weights[weights < spec.min_p] = 0
    return Distribution(weights)


def keep_top(weights: Float64Array, row: Logits, spec: SampleSpec, peak: float) -> None:
    """Set to 0, in place, the weights of the tokens that top-k, then top-p drop."""
    if 0 < spec.top_k < len(row):
        weights[ranked(row)[spec.top_k :]] = 0
    if spec.top_p < 1:
        _keep_nucleus(weights, row, spec.top_p, peak)


def _keep_nucleus(weights: Float64Array, row: Logits, top_p: float, peak: float) -> None:
    """Set to 0 what is not in the smallest set of the largest logits whose weights reach ``top_p`` of their sum.

    The weights are summed by bins of tokens, from the largest logits on: by their distance to the peak; then those of
    the bin in which the goal lies, as long as they are many, by bits of their logits; then one after the other. In a
    bin even and odd ids are summed apart. Tokens that weigh too little to be in the set are not looked at.

    Args:
        weights: float64 [vocab_size], changed in place.
        row: float32 or float64 [vocab_size].
        top_p: Less than 1.
        peak: The largest logit of the row.
    """
    bits = ~bits_by_rank(row)
    goal, reached = top_p * total_of(weights), 0.0
    tokens = np.flatnonzero(weights >= 0.5 * (1.0 - top_p) / (RUN * -(-len(row) // RUN)))
    distances = np.subtract(peak, row, dtype=np.float64).view(np.int64) >> 44
    nearest = np.clip(distances - ((1023 - 10) << 8), 0, 4095)
    for bins in (nearest, *(bits >> np.uint64(shift) for shift in _SHIFTS)):
        if bins is nearest or len(tokens) > RUN:
            found, numbers = np.unique(bins[tokens], return_inverse=True)
            even, odd = (np.bincount(numbers, weights[tokens] * (tokens % 2 == half), len(found)) for half in (0, 1))
            sums = np.cumsum(np.append(reached, even + odd))
            last = min(int(sums[1:].searchsorted(goal)), len(sums) - 2)
            reached, tokens = float(sums[last]), tokens[numbers == last]
    tokens = tokens[np.argsort(bits[tokens], kind="stable")]
    sums = np.cumsum(np.append(reached, weights[tokens]))[1:]
    token = tokens[min(int(sums.searchsorted(goal)), len(tokens) - 1)]
    weights[(bits > bits[token]) | ((bits == bits[token]) & (np.arange(len(bits)) > token))] = 0
