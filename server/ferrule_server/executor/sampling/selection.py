"""Tokens and log-probabilities out of logits, on the host in numpy: the same logits give the same token anywhere.

This is the definition; ``device_outputs`` does the same on a device. The order is the contract's: penalties, bias,
mask, temperature, top-k, top-p, min-p, renormalise, then one draw against the cumulative law in float64 by ascending
token id. Platforms may differ in the last bits of ``exp``, so two of them could part only where the random number lies
within about 1e-15 of a border of the law.

Costs are per row: a row that asks for little is not slowed by a neighbour that asks for much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ferrule_server.executor.base import Float32Array, Int32Array, OutputSpec, RowOutput, Shaping
from ferrule_server.executor.sampling.drafts import decide
from ferrule_server.executor.sampling.laws import sampling_law
from ferrule_server.executor.sampling.philox import Purpose, uniform
from ferrule_server.executor.sampling.ranking import Float64Array, Logits, best_ids, ranked_largest

__all__ = ["Choice", "choose", "logprobs", "needs_normaliser", "select_rows", "shape_row"]

_CHUNK_ELEMENTS = 1 << 17
"""Rows are normalised together up to this many logits, so that the float64 copy stays in the L2 cache."""

_LOWEST = float(np.finfo(np.float32).min)


class Choice(NamedTuple):
    """The token a row gives, its log-probability under the law drawn from, and whether it is an accepted draft."""

    token: int | None
    logprob: float
    is_accepted: bool | None = None


_NO_CHOICE = Choice(None, math.nan)


def select_rows(
    logits: Float32Array,
    positions: Sequence[int],
    specs: Sequence[OutputSpec],
    histories: Sequence[Int32Array | None] = (),
    hidden: Float32Array | None = None,
) -> list[RowOutput]:
    """Return what each row's spec asks for; the logits are neither changed nor kept.

    Args:
        logits: float32 [num_outputs, vocab_size], row-major, owned by the caller; raw (T=1).
        positions: Index in its sequence of each row's own token, that is
            ``batch.positions[batch.output_rows]``; the token drawn has the next index.
        specs: What each row returns; len == num_outputs.
        histories: As ``StepBatch.histories``.
        hidden: float32 [num_outputs, hidden_size], what the output head read; needed where a spec asks for it.

    Returns:
        One RowOutput for each row, in order. A row with NaN or infinity has ``is_finite`` False and nothing else set.
    """
    if not specs:
        return []
    best = best_ids(logits)
    wanted = [i for i, spec in enumerate(specs) if best[i] >= 0 and needs_normaliser(spec)]
    normalisers = _log_normalisers(logits, best, wanted)
    outputs = []
    for i, (spec, best_id) in enumerate(zip(specs, best, strict=True)):
        position = int(positions[i]) + 1
        if best_id < 0:
            outputs.append(RowOutput(position, is_finite=False))
            continue
        choice = choose(logits[i], position, spec, best_id, histories[i] if histories else None)
        output = _select_row(logits[i], position, spec, choice, normalisers.get(i, math.nan))
        if spec.hidden_state:
            assert hidden is not None, "hidden states are asked for and were not passed"
            output.hidden_state = hidden[i].copy()
        outputs.append(output)
    return outputs


def choose(row: Float32Array, position: int, spec: OutputSpec, best_id: int, history: Int32Array | None) -> Choice:
    """Return the token the row gives, if it gives one.

    Args:
        row: float32 [vocab_size], finite, raw.
        position: Index in its sequence of the token to choose.
        spec: How to choose.
        best_id: The id of the largest logit, the lowest among equals.
        history: int32 [n], the tokens that penalties count.
    """
    sample = spec.sample
    if sample is None and not spec.greedy:
        return _NO_CHOICE
    values: Logits = row
    if spec.shaping is not None:
        values = shape_row(row, spec.shaping, history)
        best_id = int(values.argmax())
    if sample is None or (sample.temperature == 0 and spec.draft is None):
        return Choice(best_id, 0.0)
    law = sampling_law(values, sample, float(values[best_id]))
    if spec.draft is not None:
        return Choice(*decide(law, spec.draft, sample.seed, position))
    return Choice(*law.draw(uniform(sample.seed, position, Purpose.SAMPLE)))


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


def needs_normaliser(spec: OutputSpec) -> bool:
    """Whether a row's log softmax at T=1 is needed."""
    return spec.logprobs or spec.num_top_logprobs > 0 or spec.target_id >= 0 or bool(spec.logprob_ids) or spec.entropy


def _log_normalisers(logits: Float32Array, best: Sequence[int], rows: list[int]) -> dict[int, float]:
    """Return log(sum(exp(row))) in float64 of each wanted row, by row index."""
    normalisers: dict[int, float] = {}
    size = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    for start in range(0, len(rows), size):
        chunk = rows[start : start + size]
        tops = logits[chunk, [best[i] for i in chunk]].astype(np.float64)
        weights = np.subtract(logits[chunk], tops[:, None], dtype=np.float64)
        sums = np.exp(weights, out=weights).sum(axis=1)
        normalisers.update(zip(chunk, (tops + np.log(sums)).tolist(), strict=True))
    return normalisers


def _select_row(row: Float32Array, position: int, spec: OutputSpec, choice: Choice, normaliser: float) -> RowOutput:
    """Return the output of one finite row but for its hidden state; ``normaliser`` is NaN when nothing needs it."""
    token = choice.token
    output = RowOutput(position, token=token, is_accepted=choice.is_accepted)
    if spec.logprobs and token is not None:
        output.model_logprob = float(row[token]) - normaliser
        output.sampled_logprob = choice.logprob
    if spec.target_id >= 0:
        output.target_logprob = float(row[spec.target_id]) - normaliser
    if spec.num_top_logprobs > 0:
        top_ids = ranked_largest(row, spec.num_top_logprobs)
        output.top_ids, output.top_logprobs = top_ids.astype(np.int32), logprobs(row[top_ids], normaliser)
    if spec.logprob_ids:
        output.requested_logprobs = logprobs(row[list(spec.logprob_ids)], normaliser)
    if spec.entropy:
        output.entropy = _entropy(row)
    if spec.full_logits:
        output.logits = row.copy()
    return output


def logprobs(values: Logits, normaliser: float) -> Float32Array:
    """Return log-probabilities of raw logits: float32 [n], finite also where they are below what float32 reaches."""
    return np.maximum(values.astype(np.float64) - normaliser, _LOWEST).astype(np.float32)


def _entropy(row: Float32Array) -> float:
    """Return -sum(p * log(p)) of the raw distribution, in nats."""
    below = np.subtract(row, row.max(), dtype=np.float64)
    weights = np.exp(below)
    total = float(weights.sum())
    return max(0.0, math.log(total) - float((weights * below).sum()) / total)
