"""Tokens and log-probabilities out of logits, on the host in numpy: the same logits give the same token anywhere.

The order is the contract's: temperature, top-k, top-p, min-p, renormalise, then one draw against the cumulative law in
float64 by ascending token id. Tokens rank by logit, equal logits by lowest id; temperature keeps that rank. Platforms
may differ in the last bits of ``exp``, so two of them could part only where the random number lies within about 1e-15
of a border of the law.

Costs are per row: a row that asks for little is not slowed by a neighbour that asks for much. No full sort of the
vocabulary happens: top-k partitions, and top-p ranks only the tokens that can still be in the nucleus.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ferrule_server.executor.base import Float32Array, OutputSpec, RowOutput, SampleSpec
from ferrule_server.executor.philox import Purpose, uniform

Float64Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.intp]

_CHUNK_ELEMENTS = 1 << 17
"""Rows are normalised together up to this many logits, so that the float64 copy stays in the L2 cache."""

_SMALLEST_TEMPERATURE = 1e-260
"""Below it every smaller float32 logit weighs exactly nothing, and the division could overflow."""


@dataclass(frozen=True, slots=True)
class Law:
    """What one token is drawn from.

    Invariant: ids ascend, no weight is negative, the largest weight is 1.

    Attributes:
        token_ids: intp [n], the tokens kept, ascending; None means all of them.
        weights: float64 [n], probabilities up to one common factor.
    """

    token_ids: IntArray | None
    weights: Float64Array

    def draw(self, u: float) -> tuple[int, float]:
        """Return the first token whose cumulative probability exceeds ``u``, and its natural log-probability.

        Args:
            u: Random number in [0, 1).
        """
        sums = np.cumsum(self.weights)
        total = float(sums[-1])
        index = int(sums.searchsorted(u * total, side="right"))
        token = index if self.token_ids is None else int(self.token_ids[index])
        return token, math.log(self.weights[index]) - math.log(total)


def select_rows(logits: Float32Array, positions: Sequence[int], specs: Sequence[OutputSpec]) -> list[RowOutput]:
    """Return what each row's spec asks for; the logits are neither changed nor kept.

    Args:
        logits: float32 [num_outputs, vocab_size], row-major, owned by the caller; raw (T=1).
        positions: Index in its sequence of each row's own token, that is
            ``batch.positions[batch.output_rows]``; the token drawn has the next index.
        specs: What each row returns; len == num_outputs.

    Returns:
        One RowOutput for each row, in order. A row with NaN or infinity has ``is_finite`` False and nothing else set.
    """
    if not specs:
        return []
    best_ids = logits.argmax(axis=1)
    peaks = logits[np.arange(len(specs)), best_ids]  # NaN wins argmax, so every bad row shows in its peak or minimum
    is_finite = np.isfinite(peaks) & np.isfinite(logits.min(axis=1))
    wanted = [i for i, spec in enumerate(specs) if is_finite[i] and _needs_normaliser(spec)]
    normalisers = _log_normalisers(logits, peaks, wanted)
    outputs = []
    for i, (spec, best_id) in enumerate(zip(specs, best_ids.tolist(), strict=True)):
        position = int(positions[i]) + 1
        if is_finite[i]:
            outputs.append(_select_row(logits[i], position, spec, best_id, normalisers.get(i, math.nan)))
        else:
            outputs.append(RowOutput(position, is_finite=False))
    return outputs


def sampling_law(row: Float32Array, spec: SampleSpec, peak: float) -> Law:
    """Return the law of one draw: temperature, then top-k, top-p and min-p.

    Args:
        row: float32 [vocab_size], finite.
        spec: How to draw; a temperature of 0 leaves the largest logit alone, the lowest id among equals.
        peak: The largest logit of the row.
    """
    if spec.temperature == 0:
        return Law(np.array([row.argmax()]), np.ones(1))
    token_ids = _largest(row, spec.top_k) if 0 < spec.top_k < len(row) else None
    values = row if token_ids is None else row[token_ids]
    weights = np.subtract(values, peak, dtype=np.float64)
    if spec.temperature != 1:
        weights /= max(spec.temperature, _SMALLEST_TEMPERATURE)
    law = Law(token_ids, np.exp(weights, out=weights))
    if spec.top_p < 1:
        law = _keep(law, _nucleus(values, law.weights, spec.top_p))
    if spec.min_p > 0:
        law = _keep(law, np.flatnonzero(law.weights >= spec.min_p))
    return law


def _needs_normaliser(spec: OutputSpec) -> bool:
    """Whether the row's log softmax at T=1 is needed."""
    return spec.logprobs or spec.num_top_logprobs > 0 or spec.target_id >= 0


def _log_normalisers(logits: Float32Array, peaks: Float32Array, rows: list[int]) -> dict[int, float]:
    """Return log(sum(exp(row))) in float64 of each wanted row, by row index."""
    normalisers: dict[int, float] = {}
    size = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    for start in range(0, len(rows), size):
        chunk = rows[start : start + size]
        tops = peaks[chunk].astype(np.float64)
        weights = np.subtract(logits[chunk], tops[:, None], dtype=np.float64)
        sums = np.exp(weights, out=weights).sum(axis=1)
        normalisers.update(zip(chunk, (tops + np.log(sums)).tolist(), strict=True))
    return normalisers


def _select_row(row: Float32Array, position: int, spec: OutputSpec, best_id: int, normaliser: float) -> RowOutput:
    """Return the output of one finite row; ``normaliser`` is NaN when nothing needs it."""
    token, sampled_logprob = _choose(row, position, spec, best_id)
    has_logprobs = spec.logprobs and token is not None
    top_ids = None
    if spec.num_top_logprobs > 0:
        top_ids = _ranked_largest(row, spec.num_top_logprobs)
    return RowOutput(
        position,
        token=token,
        model_logprob=float(row[token]) - normaliser if has_logprobs else None,
        sampled_logprob=sampled_logprob if has_logprobs else None,
        target_logprob=float(row[spec.target_id]) - normaliser if spec.target_id >= 0 else None,
        top_ids=None if top_ids is None else top_ids.astype(np.int32),
        top_logprobs=None if top_ids is None else (row[top_ids].astype(np.float64) - normaliser).astype(np.float32),
        logits=row.copy() if spec.full_logits else None,
    )


def _choose(row: Float32Array, position: int, spec: OutputSpec, best_id: int) -> tuple[int | None, float]:
    """Return the token the row gives, if it gives one, and its log-probability under the law drawn from."""
    if spec.greedy or (spec.sample is not None and spec.sample.temperature == 0):
        return best_id, 0.0
    if spec.sample is None:
        return None, math.nan
    law = sampling_law(row, spec.sample, float(row[best_id]))
    return law.draw(uniform(spec.sample.seed, position, Purpose.SAMPLE))


def _keep(law: Law, indices: IntArray) -> Law:
    """Return the law of the tokens at ``indices`` (intp, ascending) alone."""
    token_ids = indices if law.token_ids is None else law.token_ids[indices]
    return Law(token_ids, law.weights[indices])


def _largest(row: Float32Array, k: int) -> IntArray:
    """Return the ids of the ``k`` largest logits, ascending; at the border the lowest ids win. 0 < k < len(row)."""
    first = len(row) - k
    border = np.partition(row, first)[first]
    token_ids = np.flatnonzero(row >= border)
    surplus = len(token_ids) - k
    if surplus == 0:
        return token_ids
    return np.delete(token_ids, np.flatnonzero(row[token_ids] == border)[-surplus:])


def _ranked_largest(row: Float32Array, k: int) -> IntArray:
    """Return the ids of the ``k`` largest logits (or all), largest first, the lowest id first among equals."""
    if k >= len(row):
        return _ranked(row)
    token_ids = _largest(row, k)
    return token_ids[_ranked(row[token_ids])]


def _ranked(values: Float32Array) -> IntArray:
    """Return the indices of ``values`` (finite), largest value first, the lowest index first among equals.

    One sort of 64-bit keys, value above index, is many times faster than a stable argsort of floats.
    """
    bits = (values + np.float32(0)).view(np.int32)  # adding 0 makes -0.0 and 0.0 the same key
    rising = np.where(bits < 0, bits ^ 0x7FFFFFFF, bits).astype(np.int64)
    keys = (~rising << 32) | np.arange(len(values))
    keys.sort()
    return keys & 0xFFFFFFFF


def _nucleus(values: Float32Array, weights: Float64Array, top_p: float) -> IntArray:
    """Return the indices, ascending, of the smallest set of largest weights whose sum reaches ``top_p`` of the total.

    Tokens lighter than the mean share of the part that may be lost cannot be in the set: together they weigh less than
    that part. Only where rounding spoils the argument are all tokens ranked.
    """
    total = float(weights.sum())
    goal = top_p * total
    for floor in ((total - goal) / len(weights), 0.0):
        candidates = np.flatnonzero(weights >= floor)
        ranked = candidates[_ranked(values[candidates])]
        sums = np.cumsum(weights[ranked])
        if sums[-1] >= goal:
            break
    return np.sort(ranked[: int(sums.searchsorted(goal)) + 1])
