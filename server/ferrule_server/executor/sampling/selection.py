"""Tokens and log-probabilities from logits, on the host in numpy: the same logits give the same token everywhere.

This module is the definition; ``device_outputs`` does the same on a device. The order is that of the contract:
penalties, bias, mask, temperature, top-k, top-p, min-p, renormalise, then one draw against the cumulative distribution
in float64 by ascending token id. exp and the order of every sum are our own, so all processors draw the same tokens.
A GPU may differ in the last bits, and so draw another token if the random number is within about 1e-15 of a border
between two tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ferrule_server.executor.base import Float32Array, Int32Array, OutputSpec, RowOutput, Shaping
from ferrule_server.executor.sampling.distributions import Choice, sampling_distribution, total_of
from ferrule_server.executor.sampling.drafts import decide
from ferrule_server.executor.sampling.exponential import exp_of
from ferrule_server.executor.sampling.philox import Purpose, uniform
from ferrule_server.executor.sampling.ranking import Float64Array, Logits, best_ids, ranked_largest

_LOWEST = float(np.finfo(np.float32).min)


def select_rows(
    logits: Float32Array,
    positions: Sequence[int],
    specs: Sequence[OutputSpec],
    histories: Sequence[Int32Array | None] = (),
    hidden: Float32Array | None = None,
) -> list[RowOutput]:
    """Return what each row's spec requests; the logits are neither changed nor kept.

    Args:
        logits: float32 [num_outputs, vocab_size], row-major, owned by the caller; raw (T=1).
        positions: Index in its sequence of each row's own token, that is
            ``batch.positions[batch.output_rows]``; the token drawn has the next index.
        specs: What each row returns; len == num_outputs.
        histories: As ``StepBatch.histories``.
        hidden: float32 [num_outputs, hidden_size], the input of the output head; needed if a spec requests it.

    Returns:
        One RowOutput for each row, in order. A row with NaN or infinity has ``is_finite`` False and nothing else set.
    """
    if not specs:
        return []
    best = best_ids(logits)
    outputs = []
    for i, (spec, best_id) in enumerate(zip(specs, best, strict=True)):
        output = RowOutput(int(positions[i]) + 1, is_finite=best_id >= 0)
        outputs.append(output)
        if output.is_finite:
            choice = choose(logits[i], output.position, spec, best_id, histories[i] if histories else None)
            _fill_row(output, logits[i], spec, choice)
            if spec.hidden_state:
                assert hidden is not None, "a spec requests hidden states, and none were passed"
                output.hidden_state = hidden[i].copy()
    return outputs


def choose(
    row: Float32Array | None, position: int, spec: OutputSpec, best_id: int, history: Int32Array | None
) -> Choice | None:
    """Return the token that the row gives; None if the spec requests none.

    Args:
        row: float32 [vocab_size], finite, raw; None if the spec takes the largest of the raw logits, or no token.
        position: Index in its sequence of the token to choose.
        spec: How to choose.
        best_id: The id of the largest logit, the lowest among equals.
        history: int32 [n], the tokens that penalties count.
    """
    sample = spec.sample
    if sample is None and not spec.greedy:
        return None
    values: Logits | None = row
    if spec.shaping is not None:
        assert row is not None, "a spec shapes logits, and none were passed"
        values = shape_row(row, spec.shaping, history)
        best_id = int(values.argmax())
    if sample is None or (sample.temperature == 0 and spec.draft is None):
        return Choice(best_id, 0.0)
    assert values is not None, "a spec draws from logits, and none were passed"
    distribution = sampling_distribution(values, sample, float(values[best_id]))
    if spec.draft is not None:
        return decide(distribution, spec.draft, sample.seed, position)
    return distribution.draw(uniform(sample.seed, position, Purpose.SAMPLE))


def shape_row(row: Float32Array, shaping: Shaping, history: Int32Array | None) -> Float64Array:
    """Return the logits to choose from, in float64; the row is not changed.

    Args:
        row: float32 [vocab_size], finite.
        shaping: Penalties, bias and mask.
        history: int32 [n], the tokens that penalties count; None if ``shaping`` has no penalties.

    Returns:
        float64 [vocab_size], owned by the caller; -inf where the mask forbids a token, finite elsewhere. A mask allows
        at least one token.
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


def _fill_row(output: RowOutput, row: Float32Array, spec: OutputSpec, choice: Choice | None) -> None:
    """Fill in the output of one finite row except its hidden state."""
    normaliser, entropy = _normalise(row) if needs_normaliser(spec) else (math.nan, math.nan)
    if choice is not None:
        output.token, output.is_accepted = choice.token, choice.is_accepted
    if token_ids := requested_ids(spec, choice):
        fill_logprobs(output, spec, choice, row[token_ids].astype(np.float64) - normaliser)
    if spec.num_top_logprobs > 0:
        top_ids = ranked_largest(row, spec.num_top_logprobs)
        output.top_ids, output.top_logprobs = top_ids.astype(np.int32), logprobs(row[top_ids], normaliser)
    if spec.entropy:
        output.entropy = entropy
    if spec.full_logits:
        output.logits = row.copy()


def requested_ids(spec: OutputSpec, choice: Choice | None) -> list[int]:
    """Return the tokens whose log-probabilities a row returns: the chosen one, the target, then ``logprob_ids``."""
    chosen = [choice.token] if spec.logprobs and choice is not None else []
    target = [spec.target_id] if spec.target_id >= 0 else []
    return [*chosen, *target, *spec.logprob_ids]


def fill_logprobs(output: RowOutput, spec: OutputSpec, choice: Choice | None, model_logprobs: Float64Array) -> None:
    """Fill in the log-probabilities of a row.

    Args:
        output: Of the row.
        spec: What it returns.
        choice: Its token; None: it has none.
        model_logprobs: float64 [n], at T=1, of its :func:`requested_ids` in their order.
    """
    single = model_logprobs[: len(model_logprobs) - len(spec.logprob_ids)].tolist()
    if spec.logprob_ids:
        output.requested_logprobs = logprobs(model_logprobs[len(single) :], 0.0)
    if spec.target_id >= 0:
        output.target_logprob = single.pop()
    if single and choice is not None:
        output.model_logprob, output.sampled_logprob = single[0], choice.logprob


def logprobs(values: Logits, normaliser: float) -> Float32Array:
    """Return log-probabilities of raw logits: float32 [n], finite even if they are below the range of float32."""
    return np.maximum(values.astype(np.float64) - normaliser, _LOWEST).astype(np.float32)


def _normalise(row: Float32Array) -> tuple[float, float]:
    """Return log(sum(exp(row))) and the entropy, -sum(p * log(p)) in nats, of the raw distribution."""
    peak = row.max()
    below = np.subtract(row, peak, dtype=np.float64)
    weights = exp_of(below)
    total = total_of(weights)
    return float(peak) + math.log(total), max(0.0, math.log(total) - total_of(weights * below) / total)
