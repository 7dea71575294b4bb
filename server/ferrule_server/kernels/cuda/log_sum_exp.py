"""Largest logit, log-sum-exp, entropy and single log-probabilities of rows of raw logits, at temperature 1.

Maths: with m the largest logit, ``log_sum = ln sum exp(l - m)``, ``entropy = log_sum - sum exp(l - m) (l - m) / sum
exp(l - m)``, log-probability of a token ``(l - m) - log_sum``. Float32 sums in a fixed order: token groups of a
thread, warp butterfly, warps, slices in order. m and log_sum are returned apart, so that a caller who adds them in
float64 loses nothing to a large m. Relative error of the sum about 1e-6 (``ex2.approx``, 2 ulp, and the rounding of its
argument), of a log-probability about 3e-7 of its size and 1e-6 more.

A row with NaN or infinity is not finite: its number of such logits is exact, its other figures mean nothing.

Bytes moved: 4 per logit, once; 16 per slice.
"""

from __future__ import annotations

from ferrule_server.kernels.cuda.constants import LN_2, LOG2_E
from ferrule_server.kernels.cuda.intrinsics import (
    F32,
    I32,
    Address,
    barrier,
    bits_float,
    cta_id,
    device,
    exp2,
    float_of,
    fma,
    grid_launch_dependents,
    grid_wait,
    load_f32,
    load_i32,
    load_relaxed_f32x4,
    log2,
    max_f32,
    num_ctas,
    reciprocal,
    shared_load_f32,
    shared_load_f32x4,
    shared_store_f32,
    shared_store_f32x4,
    shuffle_xor_f32,
    store_f32,
    store_f32x4,
    thread_id,
)
from ferrule_server.kernels.cuda.logit_rows import DEFAULT_SLICE, DEFAULT_WARPS, load_slice
from ferrule_server.kernels.cuda.spec import KernelSpec, ModelShape
from ferrule_server.kernels.cuda.specialise import i32, registers, unrolled
from ferrule_server.kernels.cuda.ticket import arrive

__all__ = ["RECORD_BYTES", "log_sum_exp", "shared_bytes", "specs"]

RECORD_BYTES = 16
LOWEST = -3.4028234663852886e38


def log_sum_exp(
    logits: Address,
    records: Address,
    request_ids: Address,
    tokens: Address,
    figures: Address,
    logprobs: Address,
    partials: Address,
    tickets: Address,
    num_rows: I32,
    vocab_size: I32,
    num_slices: I32,
    *,
    SLICE: int,
    WARPS: int,
) -> None:
    """Normalise rows of logits and look up log-probabilities.

    Launch: any grid of at least one CTA (``num_ctas_needed`` at most is of use), 32 * WARPS threads, ``shared_bytes``.

    Args:
        logits: float32 [any, vocab_size], raw.
        records: int32 [num_rows, 4]: row of ``logits`` (-1: nothing to do), first request, the one after the last,
            unused.
        request_ids: int32 [any], the tokens asked for; -1 - j stands for token j of ``tokens``.
        tokens: int32 [any], chosen by a kernel before this one.
        figures: float32 [num_rows, 4]: largest logit, log_sum, entropy in nats, number of logits not finite.
        logprobs: float32 [any], one for each request; never below the lowest float32, which also answers a token that
            is not one.
        partials: float32 [num_rows, num_slices, 4], scratch.
        tickets: int32 [num_rows], zero before the first launch, left zero.
        num_rows: Records.
        vocab_size: Logits of a row.
        num_slices: Of a row, at most 32 * WARPS.
        SLICE: Tokens in a slice, a multiple of 128 * WARPS.
        WARPS: Per CTA.
    """
    assert SLICE % (128 * WARPS) == 0
    thread = i32(thread_id())
    grid_launch_dependents()
    grid_wait()
    slot = i32(0)
    part = i32(cta_id())
    while slot < num_rows:
        if part >= num_slices:
            part = i32(part - num_slices)
            slot = i32(slot + 1)
        else:
            row = load_i32(records + slot * RECORD_BYTES)
            if row >= 0:
                source = logits + row * (vocab_size * 4)
                partial = partials + slot * (num_slices * 16)
                peak, weight, moment, bad = reduce_slice(
                    source, i32(part * SLICE), vocab_size, SLICE=SLICE, WARPS=WARPS
                )
                if thread == 0:
                    store_f32x4(partial + part * 16, (peak, weight, moment, bad))
                is_last = arrive(tickets + slot * 4, num_slices, FLAG, ALL_STORE=False)
                if is_last == 1:
                    if thread < num_slices:
                        shared_store_f32x4(PARTIALS + thread * 16, load_relaxed_f32x4(partial + thread * 16))
                    barrier()
                    top, log_sum, entropy, count = combine(num_slices)
                    if thread == 0:
                        store_f32x4(figures + slot * 16, (top, log_sum, entropy, count))
                    request = i32(load_i32(records + slot * RECORD_BYTES + 4) + thread)
                    end = load_i32(records + slot * RECORD_BYTES + 8)
                    while request < end:
                        token = load_i32(request_ids + request * 4)
                        if token < 0:
                            token = load_i32(tokens + (-1 - token) * 4)
                        answer = bits_float(0xFF7FFFFF)
                        if token >= 0 and token < vocab_size:
                            below = fma(load_f32(source + token * 4), 1.0, -top)
                            answer = max_f32(fma(below, 1.0, -log_sum), LOWEST)
                        store_f32(logprobs + request * 4, answer)
                        request = i32(request + 32 * WARPS)
            part = i32(part + num_ctas())


FLAG = 0
MAXIMA = 16
"""Largest logit of each warp."""
SUMS = 16 + 4 * 32
"""Sums of each warp, 16 bytes each."""
PARTIALS = SUMS + 16 * 32


def shared_bytes(num_slices: int) -> int:
    """Return the dynamic shared memory of a CTA."""
    return PARTIALS + 16 * num_slices


@device
def reduce_slice(source: Address, begin: I32, vocab_size: I32, *, SLICE: int, WARPS: int) -> tuple[F32, F32, F32, F32]:
    """Return of a slice, in thread 0, m, sum exp(l - m), sum exp(l - m) (l - m) and how many logits are not finite."""
    thread = i32(thread_id())
    lane = i32(thread & 31)
    warp = i32(thread >> 5)
    words = registers(SLICE // WARPS // 128)
    for g in unrolled(SLICE // WARPS // 128):
        words[g] = (0, 0, 0, 0)
    load_slice(source, begin, vocab_size, words, THREADS=32 * WARPS, SLICE=SLICE)
    largest = bits_float(0xFF800000)
    num_bad = i32(0)
    for g in unrolled(SLICE // WARPS // 128):
        first = i32(begin + (32 * WARPS * g + thread) * 4)
        for i in unrolled(4):
            largest = max_f32(largest, bits_float(words[g][i]))
            if (words[g][i] & 0x7F800000) == 0x7F800000 and first + i < vocab_size:
                num_bad = i32(num_bad + 1)
    for step in unrolled(5):
        largest = max_f32(largest, shuffle_xor_f32(largest, 1 << step))
    if lane == 0:
        shared_store_f32(MAXIMA + warp * 4, largest)
    barrier()
    for w in unrolled(WARPS):
        largest = max_f32(largest, shared_load_f32(MAXIMA + w * 4))
    weight = 0.0
    moment = 0.0
    for g in unrolled(SLICE // WARPS // 128):
        for i in unrolled(4):
            below = max_f32(fma(bits_float(words[g][i]), 1.0, -largest), -1000.0)
            share = exp2(fma(below, LOG2_E, 0.0))
            weight = fma(share, 1.0, weight)
            moment = fma(share, below, moment)
    bad = float_of(num_bad)
    for step in unrolled(5):
        weight = fma(shuffle_xor_f32(weight, 1 << step), 1.0, weight)
        moment = fma(shuffle_xor_f32(moment, 1 << step), 1.0, moment)
        bad = fma(shuffle_xor_f32(bad, 1 << step), 1.0, bad)
    if lane == 0:
        shared_store_f32x4(SUMS + warp * 16, (weight, moment, bad, 0.0))
    barrier()
    weight = 0.0
    moment = 0.0
    bad = 0.0
    for w in unrolled(WARPS):
        sums = shared_load_f32x4(SUMS + w * 16)
        weight = fma(sums[0], 1.0, weight)
        moment = fma(sums[1], 1.0, moment)
        bad = fma(sums[2], 1.0, bad)
    return (largest, weight, moment, bad)


@device
def combine(num_slices: I32) -> tuple[F32, F32, F32, F32]:
    """Return m, log_sum, entropy and the number of bad logits of a row from its slices in shared memory, in order."""
    largest = bits_float(0xFF800000)
    part = i32(0)
    while part < num_slices:
        largest = max_f32(largest, shared_load_f32(PARTIALS + part * 16))
        part = i32(part + 1)
    weight = 0.0
    moment = 0.0
    count = 0.0
    part = i32(0)
    while part < num_slices:
        sums = shared_load_f32x4(PARTIALS + part * 16)
        below = max_f32(fma(sums[0], 1.0, -largest), -1000.0)
        scale = exp2(fma(below, LOG2_E, 0.0))
        weight = fma(sums[1], scale, weight)
        moment = fma(scale, fma(sums[1], below, sums[2]), moment)
        count = fma(sums[3], 1.0, count)
        part = i32(part + 1)
    log_sum = fma(log2(weight), LN_2, 0.0)  # at least 0: the largest token alone weighs 1
    log_sum = max_f32(log_sum, 0.0)
    entropy = max_f32(fma(-moment, reciprocal(weight), log_sum), 0.0)
    return (largest, log_sum, entropy, count)


def specs(shape: ModelShape) -> list[KernelSpec]:
    """Return the kernels a model of this shape needs."""
    return [_spec(shape, DEFAULT_SLICE)]


def _spec(shape: ModelShape, slice_size: int) -> KernelSpec:
    constants = (("SLICE", slice_size), ("WARPS", DEFAULT_WARPS))
    shared = shared_bytes(-(-shape.vocab_size // slice_size))
    return KernelSpec(log_sum_exp, constants, 32 * DEFAULT_WARPS, shared, ctas_per_sm=2, has_ticket=True)
