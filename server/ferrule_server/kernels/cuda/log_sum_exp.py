"""Largest logit, log-sum-exp, entropy and single log-probabilities of rows of raw logits, at temperature 1.

Maths: with m the largest logit, ``log_sum = ln sum exp(l - m)``, ``entropy = log_sum - sum exp(l - m) (l - m) / sum
exp(l - m)``, log-probability of a token ``(l - m) - log_sum``. Float32 sums in a fixed order, those of tokens, warps
and slices each relative to its own largest logit. m and log_sum are returned apart, so that a caller who adds them in
float64 loses nothing to a large m. Relative error of the sum about 1e-6 (``ex2.approx``, 2 ulp, and the rounding of its
argument), of a log-probability about 3e-7 of its size and 1e-6 more.

The figures of a row with NaN or infinity mean nothing.

Bytes moved: 4 per logit, once; 16 per slice.
"""

from __future__ import annotations

from ferrule_server.kernels.cuda import intrinsics as ptx
from ferrule_server.kernels.cuda import vectors
from ferrule_server.kernels.cuda.constants import LN_2, LOG2_E
from ferrule_server.kernels.cuda.intrinsics import F32, I32, Address, Offset, device
from ferrule_server.kernels.cuda.logit_rows import (
    DEFAULT_SLICE,
    DEFAULT_WARPS,
    NEGATIVE_INFINITY,
    load_slice,
    num_slices,
)
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
        figures: float32 [num_rows, 4]: largest logit, log_sum, entropy in nats, unused.
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
    thread = i32(ptx.thread_id())
    ptx.grid_launch_dependents()
    ptx.grid_wait()
    slot = i32(0)
    part = i32(ptx.cta_id())
    while slot < num_rows:
        if part >= num_slices:
            part = i32(part - num_slices)
            slot = i32(slot + 1)
        else:
            row = ptx.load_i32(records + slot * RECORD_BYTES)
            if row >= 0:
                source = logits + row * (vocab_size * 4)
                partial = partials + slot * (num_slices * 16)
                peak, weight, moment = reduce_slice(source, i32(part * SLICE), vocab_size, SLICE=SLICE, WARPS=WARPS)
                if thread == 0:
                    ptx.store_f32x4(partial + part * 16, (peak, weight, moment, 0.0))
                if arrive(tickets + slot * 4, num_slices, FLAG, ALL_STORE=False) == 1:
                    if thread < num_slices:
                        ptx.shared_store_f32x4(PARTIALS + thread * 16, ptx.load_relaxed_f32x4(partial + thread * 16))
                    ptx.barrier()
                    top, weight, moment = combine(PARTIALS, num_slices)
                    # At least 0: the largest token alone weighs 1.
                    log_sum = ptx.max_f32(ptx.fma(ptx.log2(weight), LN_2, 0.0), 0.0)
                    if thread == 0:
                        entropy = ptx.max_f32(ptx.fma(-moment, ptx.reciprocal(weight), log_sum), 0.0)
                        ptx.store_f32x4(figures + slot * 16, (top, log_sum, entropy, 0.0))
                    request = i32(ptx.load_i32(records + slot * RECORD_BYTES + 4) + thread)
                    end = ptx.load_i32(records + slot * RECORD_BYTES + 8)
                    while request < end:
                        token = ptx.load_i32(request_ids + request * 4)
                        if token < 0:
                            token = ptx.load_i32(tokens + (-1 - token) * 4)
                        answer = ptx.bits_float(0xFF7FFFFF)
                        if token >= 0 and token < vocab_size:
                            below = ptx.fma(ptx.load_f32(source + token * 4), 1.0, -top)
                            answer = ptx.max_f32(ptx.fma(below, 1.0, -log_sum), LOWEST)
                        ptx.store_f32(logprobs + request * 4, answer)
                        request = i32(request + 32 * WARPS)
            part = i32(part + ptx.num_ctas())


FLAG = 0
SUMS = 16
"""Of each warp, 16 bytes each, then of each slice."""
PARTIALS = SUMS + 16 * 32


def shared_bytes(num_slices: int) -> int:
    """Return the dynamic shared memory of a CTA."""
    return PARTIALS + 16 * num_slices


@device
def reduce_slice(source: Address, begin: I32, vocab_size: I32, *, SLICE: int, WARPS: int) -> tuple[F32, F32, F32]:
    """Return of a slice m, sum exp(l - m) and sum exp(l - m) (l - m)."""
    words = registers(SLICE // WARPS // 128)
    load_slice(source, begin, vocab_size, words, STRONG=False, SLICE=SLICE, WARPS=WARPS)
    largest = ptx.bits_float(NEGATIVE_INFINITY)
    for g in unrolled(SLICE // WARPS // 128):
        for i in unrolled(4):
            largest = ptx.max_f32(largest, ptx.bits_float(words[g][i]))
    largest = warp_max(largest)
    weight = 0.0
    moment = 0.0
    for g in unrolled(SLICE // WARPS // 128):
        for i in unrolled(4):
            below = ptx.max_f32(ptx.fma(ptx.bits_float(words[g][i]), 1.0, -largest), -1000.0)
            share = ptx.exp2(ptx.fma(below, LOG2_E, 0.0))
            weight = ptx.fma(share, 1.0, weight)
            moment = ptx.fma(share, below, moment)
    weight = vectors.warp_sum(weight)
    moment = vectors.warp_sum(moment)
    if (ptx.thread_id() & 31) == 0:
        ptx.shared_store_f32x4(SUMS + (ptx.thread_id() >> 5) * 16, (largest, weight, moment, 0.0))
    ptx.barrier()
    return combine(SUMS, WARPS)


@device
def combine(sums: Offset, count: I32) -> tuple[F32, F32, F32]:
    """Return m and the two sums of the whole from those of its parts in shared memory; each warp does it."""
    largest = ptx.bits_float(NEGATIVE_INFINITY)
    part = i32(ptx.thread_id() & 31)
    while part < count:
        largest = ptx.max_f32(largest, ptx.shared_load_f32(sums + part * 16))
        part = i32(part + 32)
    largest = warp_max(largest)
    weight = 0.0
    moment = 0.0
    part = i32(ptx.thread_id() & 31)
    while part < count:
        own = ptx.shared_load_f32x4(sums + part * 16)
        below = ptx.max_f32(ptx.fma(own[0], 1.0, -largest), -1000.0)
        scale = ptx.exp2(ptx.fma(below, LOG2_E, 0.0))
        weight = ptx.fma(own[1], scale, weight)
        moment = ptx.fma(scale, ptx.fma(own[1], below, own[2]), moment)
        part = i32(part + 32)
    weight = vectors.warp_sum(weight)
    moment = vectors.warp_sum(moment)
    return (largest, weight, moment)


@device
def warp_max(value: F32) -> F32:
    """Return the largest value of the warp."""
    for step in unrolled(5):
        value = ptx.max_f32(value, ptx.shuffle_xor_f32(value, 1 << step))
    return value


def specs(shape: ModelShape) -> list[KernelSpec]:
    """Return the kernels a model of this shape needs."""
    items = (("SLICE", DEFAULT_SLICE), ("WARPS", DEFAULT_WARPS))
    shared = shared_bytes(num_slices(shape.vocab_size))
    return [KernelSpec(log_sum_exp, items, 32 * DEFAULT_WARPS, shared, min_vector_loads=4, has_ticket=True)]
