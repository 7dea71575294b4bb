"""Mixtures of experts: which experts a row passes, and its pairs with them, which are sorted by expert.

The weights of an expert are read once in a step, for all rows that pass it. What a pair gives does not depend on the
others, and a row adds its own pairs in the order of their scores, so that its bits are the same in any batch.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ferrule_server.kernels.cpu import lanes as simd
from ferrule_server.kernels.cpu.kernel import Lanes, Record, kernel
from ferrule_server.kernels.cpu.scalars import read_float32, read_int32, write_float32, write_int32

SEGMENT_BYTES: Final = 16
"""Of a segment: int32 expert, first pair and number of pairs; the number of segments stands before the first."""
MOST_PAIRS: Final = 128
"""Pairs of one expert that are multiplied together."""
_LEAST: Final = np.float32(-np.inf)


@kernel
def sigmoid(x: Lanes) -> Lanes:
    """Return 1 / (1 + exp(-x))."""
    one = simd.splat(np.float32(1))
    return simd.divide(one, simd.add(one, simd.exp(simd.subtract(simd.splat(np.float32(0)), x))))


@kernel
def route(model: Record, step: Record, stage: Record, row: int) -> None:
    """Write the experts that a row passes, those of the highest scores first, and their weights; change the scores."""
    scores = stage.inputs + row * stage.input_bytes
    ids, weights = step.expert_ids + 4 * row * model.num_used, step.expert_weights + 4 * row * model.num_used
    top = _top(scores, model.num_experts)
    total = np.float32(0) if model.is_normalised or model.is_sigmoid else _sum_of_exp(scores, model.num_experts, top)
    chosen, invalid = np.float32(0), _invalid(scores, model.num_experts)
    for slot in range(model.num_used):
        best = 0
        for expert in range(1, model.num_experts):
            if read_float32(scores + 4 * expert) > read_float32(scores + 4 * best):
                best = expert
        score = simd.splat(read_float32(scores + 4 * best))
        weight = simd.max_of(sigmoid(score) if model.is_sigmoid else simd.exp(simd.subtract(score, simd.splat(top))))
        write_int32(ids + 4 * slot, best)
        write_float32(weights + 4 * slot, weight)
        write_float32(scores + 4 * best, _LEAST)
        chosen += weight
    divisor = chosen if model.is_normalised else np.float32(1) if model.is_sigmoid else total
    divisor += invalid
    for slot in range(model.num_used):
        write_float32(weights + 4 * slot, read_float32(weights + 4 * slot) / divisor * model.expert_scale)


@kernel
def _top(scores: int, count: int) -> np.float32:
    """Return the highest of float32 scores."""
    top = simd.splat(_LEAST)
    for i in range(0, count, simd.LANES):
        top = simd.maximum(simd.select_below(count - i, simd.load(scores + 4 * i), simd.splat(_LEAST)), top)
    return simd.max_of(top)


@kernel
def _invalid(scores: int, count: int) -> np.float32:
    """Return NaN if a score is not finite, else 0."""
    zero = simd.splat(np.float32(0))
    total = zero
    for i in range(0, count, simd.LANES):
        total = simd.fma(simd.select_below(count - i, simd.load(scores + 4 * i), zero), zero, total)
    return simd.sum_of(total)


@kernel
def _sum_of_exp(scores: int, count: int, top: np.float32) -> np.float32:
    """Return the sum of exp(score - top)."""
    total = simd.splat(np.float32(0))
    for i in range(0, count, simd.LANES):
        x = simd.exp(simd.subtract(simd.load(scores + 4 * i), simd.splat(top)))
        total = simd.add(total, simd.select_below(count - i, x, simd.splat(np.float32(0))))
    return simd.sum_of(total)


@kernel
def group_pairs(model: Record, step: Record) -> None:
    """Sort the pairs of the step by expert, and cut them into segments."""
    num_pairs, num_segments, begin = step.num_rows * model.num_used, 0, 0
    for expert in range(model.num_experts):
        write_int32(step.counts + 4 * expert, 0)
    for pair in range(num_pairs):
        place = step.counts + 4 * read_int32(step.expert_ids + 4 * pair)
        write_int32(place, read_int32(place) + 1)
    for expert in range(model.num_experts):
        end = begin + read_int32(step.counts + 4 * expert)
        write_int32(step.counts + 4 * expert, begin)
        while begin < end:
            num_segments += 1
            segment = step.segments + num_segments * SEGMENT_BYTES
            write_int32(segment, expert)
            write_int32(segment + 4, begin)
            write_int32(segment + 8, min(MOST_PAIRS, end - begin))
            begin += min(MOST_PAIRS, end - begin)
    write_int32(step.segments, num_segments)
    for pair in range(num_pairs):
        place = step.counts + 4 * read_int32(step.expert_ids + 4 * pair)
        number = read_int32(place)
        write_int32(place, number + 1)
        write_int32(step.places + 4 * pair, number)
        write_int32(step.pair_rows + 4 * number, pair // model.num_used)


@kernel
def segment_at(step: Record, number: int) -> tuple[int, int, int]:
    """Return the expert of a segment, its first pair, and its number of pairs."""
    place = step.segments + (1 + number) * SEGMENT_BYTES
    return read_int32(place), read_int32(place + 4), read_int32(place + 8)


@kernel
def expert_at(step: Record, number: int) -> int:
    """Return the expert of a segment."""
    return read_int32(step.segments + (1 + number) * SEGMENT_BYTES)


@kernel
def gather(step: Record, stage: Record, pair: int) -> None:
    """Copy the inputs of a pair from those of its row."""
    source = stage.inputs + read_int32(step.pair_rows + 4 * pair) * stage.input_bytes
    for i in range(0, stage.input_bytes, 4 * simd.LANES):
        simd.store(stage.out + pair * stage.out_bytes + i, simd.load(source + i))


@kernel
def add_experts(model: Record, step: Record, stage: Record, row: int) -> None:
    """Add what the experts of a row have returned to the residual stream, weighted, in the order of their scores."""
    out, first, factor = step.hidden + 4 * row * model.hidden_size, 4 * row * model.num_used, simd.splat(stage.factor)
    for i in range(0, model.hidden_size, simd.LANES):
        total = simd.splat(np.float32(0))
        for slot in range(0, 4 * model.num_used, 4):
            kept = stage.kept + read_int32(step.places + first + slot) * stage.kept_bytes
            weight = simd.splat(read_float32(step.expert_weights + first + slot))
            total = simd.fma(simd.load(kept + 4 * i), weight, total)
        simd.store(out + 4 * i, simd.fma(total, factor, simd.load(out + 4 * i)))
