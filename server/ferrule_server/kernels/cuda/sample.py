"""One token for each row: temperature, top-k, top-p, min-p and one Philox draw, without sorting anything.

Maths: that of ``executor.laws``. The weight of a token is an integer, ``w = round(exp2((l - m) log2(e) / T) 2^39)``,
m the largest logit; a sum of weights is exact, so that it depends on no order, and stays below 2^59. Tokens rank by
logit, equal ones by lowest id. What is kept is a prefix of that rank, so it is said by a key (see ``select_count``):
all larger keys, and of the tokens with that key ("ties") the given number, lowest ids first.

* top-k finds this key by counting keys, digit by digit (``select_count``).
* top-p finds it alike by adding up weights (``select_mass``): the smallest prefix whose weight reaches ``floor(p W)``,
  W the weight of what top-k left.
* min-p drops a token with ``l - m < T ln(min_p)``, which the host computes in float64 and rounds.
* The draw (``draw``): with u = (x0 + 1/2) / 2^32, x0 the first word of Philox4x32-10, the first token by id at which
  the weight kept so far exceeds u times the whole of it: ``floor((2 x0 + 1) W / 2^33)``, exactly.
* Temperature 0 keeps the largest key and one tie, the lowest id.

Where float32 shows: an exponent ``e`` (in powers of two) carries a relative error of 2^-22.4, so a weight is off by
1.3e-7 |e| + 2.5e-7 of itself at most, and by 2^-40; a border of the law moves by the mean of that, about 1e-6 of the
whole weight. Another token than the float64 law's comes out only where u, top_p or a min-p threshold is so close to a
border. The logarithm of the probability is off by at most 1e-5.

Chain of launches: ``select_count`` (first digit and largest key: always), its other digits (where a row has a top-k),
``select_mass`` for each digit (where a row has a top-p), ``draw``.

Bytes moved: 4 per logit and launch, from L2 after the first; per row and digit 8 to 16 KiB of sums.

Source: Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011; sampling without a sort
after the rejection sampler of FlashInfer (Ye et al., 2024), here as an exact search instead of rejections.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ferrule_server.kernels.cuda.intrinsics import (
    F32,
    I32,
    U32,
    U64,
    Address,
    Vec4,
    add_wrapping,
    barrier,
    bits_float,
    cta_id,
    device,
    exp2,
    float_of_u64,
    fma,
    grid_launch_dependents,
    grid_wait,
    load_f32,
    load_i32,
    load_relaxed_u32,
    load_relaxed_u64,
    load_u32,
    load_u64,
    log2,
    max_f32,
    multiply_high,
    multiply_high_u64,
    multiply_low,
    num_ctas,
    order_key,
    round_u64,
    select_f32,
    shared_load_u32,
    shared_load_u64,
    shared_store_u32,
    shared_store_u64,
    store_f32,
    store_i32,
    store_u32,
    store_u64,
    thread_id,
)
from ferrule_server.kernels.cuda.logit_rows import (
    DEFAULT_SLICE,
    DEFAULT_WARPS,
    KEY_INFINITY,
    KEY_NEGATIVE_INFINITY,
    exclusive_sum,
    key_bits,
    load_four,
    load_slice,
)
from ferrule_server.kernels.cuda.select_count import COUNT, KEY, PEAK, STATE_BYTES, select_specs
from ferrule_server.kernels.cuda.select_mass import (
    BOUND,
    MASS_COUNT,
    MASS_KEY,
    ONE,
    POSITION,
    PROBABILITY_BITS,
    PURPOSE,
    RECORD_BYTES,
    SCALE,
    SEED,
    TOP_P,
    mass_specs,
    weight_of,
)
from ferrule_server.kernels.cuda.spec import KernelSpec, ModelShape
from ferrule_server.kernels.cuda.specialise import i32, registers, unrolled
from ferrule_server.kernels.cuda.ticket import arrive

__all__ = [
    "DRAW_SHARED_BYTES",
    "RECORD_BYTES",
    "Sampling",
    "draw",
    "pack_records",
    "passed_by",
    "philox",
    "specs",
]

INVERSE_ONE = 1.8189894035458565e-12
LN_2 = 0.6931471805599453
LARGEST = 3.4028234663852886e38
SMALLEST = 1.1754943508222875e-38

FLAG = 0
SCRATCH = 16
SCRATCH_2 = SCRATCH + 8 * 32
SCRATCH_3 = SCRATCH_2 + 8 * 32
SCRATCH_4 = SCRATCH_3 + 8 * 32
FOUND = SCRATCH_4 + 8 * 32
"""Slice, ties still kept (u32 each), weight still to be passed (u64)."""
DRAW_SHARED_BYTES = FOUND + 16


def draw(
    logits: Address,
    records: Address,
    state: Address,
    partials: Address,
    tickets: Address,
    tokens: Address,
    logprobs: Address,
    totals: Address,
    num_rows: I32,
    vocab_size: I32,
    num_slices: I32,
    *,
    SLICE: int,
    WARPS: int,
) -> None:
    """Draw one token per row.

    Launch: any grid of at least one CTA (``num_ctas_needed`` at most is of use), 32 * WARPS threads,
    ``DRAW_SHARED_BYTES``.

    Args:
        logits: float32 [any, vocab_size], shaped: -inf where the mask forbids a token. Raw and shaped rows may lie
            behind one another in one buffer.
        records: [num_rows, 48 bytes], see ``pack_records``.
        state: [num_rows, STATE_BYTES], holds what ``select_count`` and ``select_mass`` found.
        partials: [num_rows, num_slices, 16 bytes], scratch.
        tickets: int32 [num_rows], zero before the first launch, left zero.
        tokens: int32 [num_rows]; -1 for a row with NaN or infinity, or that allows no token.
        logprobs: float32 [num_rows], natural logarithm of the token's probability under the law; NaN likewise.
        totals: u64 [num_rows], the weight of what was kept; 0 likewise.
        num_rows: Records.
        vocab_size: Logits of a row, below 2^20.
        num_slices: Of a row, at most 32 * WARPS.
        SLICE: Tokens in a slice, a multiple of 128 * WARPS, at most 4096.
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
            record = records + slot * RECORD_BYTES
            known = state + slot * STATE_BYTES
            row = load_i32(record)
            top = load_u32(known + PEAK)
            if row >= 0 and top > KEY_NEGATIVE_INFINITY and top < KEY_INFINITY:
                source = logits + row * (vocab_size * 4)
                peak = bits_float(key_bits(top))
                scale = load_f32(record + SCALE)
                bound = load_f32(record + BOUND)
                has_share = load_u64(record + TOP_P) > 0 and load_i32(record + 8) & 1 == 0
                border = load_u32(known + MASS_KEY if has_share else known + KEY)
                num_ties = load_u32(known + MASS_COUNT if has_share else known + COUNT)
                words = registers(SLICE // WARPS // 128)
                for g in unrolled(SLICE // WARPS // 128):
                    words[g] = (0, 0, 0, 0)
                load_slice(source, i32(part * SLICE), vocab_size, words, THREADS=32 * WARPS, SLICE=SLICE)
                mass = 0
                ties = i32(0)
                for g in unrolled(SLICE // WARPS // 128):
                    mass, ties = measure(mass, ties, words[g], border, peak, scale, bound)
                _mass, mass = exclusive_sum(mass, SCRATCH, WARPS=WARPS)
                _ties, ties = exclusive_sum(ties, SCRATCH_2, WARPS=WARPS)
                partial = partials + slot * (num_slices * 16)
                if thread == 0:
                    store_u64(partial + part * 16, mass)
                    store_u32(partial + part * 16 + 8, ties)
                is_last = arrive(tickets + slot * 4, num_slices, FLAG, ALL_STORE=False)
                if is_last == 1:
                    tie_weight = 0
                    if num_ties > 0:
                        tie_weight = bounded_weight(key_bits(border), peak, scale, bound)
                    x0 = philox(record)
                    total = find_slice(partial, num_slices, num_ties, tie_weight, x0, WARPS=WARPS)
                    barrier()
                    begin = i32(shared_load_u32(FOUND) * SLICE)
                    mass = 0
                    ties = i32(0)
                    group = i32(0)
                    while group < SLICE // WARPS // 128:
                        first = i32(begin + thread * (SLICE // WARPS // 32) + group * 4)
                        mass, ties = measure(
                            mass, ties, load_four(source, first, vocab_size), border, peak, scale, bound
                        )
                        group = i32(group + 1)
                    before, _sum = exclusive_sum(ties, SCRATCH, WARPS=WARPS)
                    left = shared_load_u32(FOUND + 4)
                    kept = ties_kept(left, before, ties)
                    passed, _sum = exclusive_sum(mass + kept * tie_weight, SCRATCH_2, WARPS=WARPS)
                    goal = shared_load_u64(FOUND + 8)
                    if passed <= goal and passed + mass + kept * tie_weight > goal:
                        token = i32(begin + thread * (SLICE // WARPS // 32) - 1)
                        weight = tie_weight
                        while passed <= goal:
                            token = i32(token + 1)
                            bits = load_u32(source + token * 4)
                            key = order_key(bits)
                            weight = bounded_weight(bits, peak, scale, bound)
                            if key < border or (key == border and kept == 0):
                                weight = 0
                            if key == border and kept > 0:
                                kept = kept - 1
                            passed = passed + weight
                        store_i32(tokens + slot * 4, token)
                        store_f32(logprobs + slot * 4, log_share(load_f32(source + token * 4), peak, scale, total))
                        store_u64(totals + slot * 8, total)
            elif row >= 0 and part == 0 and thread == 0:
                store_i32(tokens + slot * 4, -1)
                store_u32(logprobs + slot * 4, 0x7FC00000)
                store_u64(totals + slot * 8, 0)
            part = i32(part + num_ctas())


@device
def bounded_weight(bits: U32, peak: F32, scale: F32, bound: F32) -> U64:
    """Return the weight of a logit, 0 where min-p drops it."""
    weight = weight_of(bits, peak, scale)
    if fma(bits_float(bits), 1.0, -peak) < bound:
        weight = 0
    return weight


@device
def measure(mass: U64, ties: I32, words: Vec4, border: U32, peak: F32, scale: F32, bound: F32) -> tuple[U64, I32]:
    """Return the weight above the border, and the ties, with those of four logits added."""
    for i in unrolled(4):
        key = order_key(words[i])
        below = fma(bits_float(words[i]), 1.0, -peak)
        is_kept = i32(key > border) & i32(below >= bound)
        exponent = select_f32(is_kept, fma(below, scale, 0.0), -1000.0)
        mass = mass + round_u64(fma(exp2(exponent), ONE, 0.0))
        ties = i32(ties + i32(key == border))
    return (mass, ties)


@device
def ties_kept(left: I32, before: I32, ties: I32) -> I32:
    """Return how many of these ties are kept, ``before`` of the ``left`` being taken already."""
    kept = left - before
    kept = kept if kept > 0 else 0
    return kept if kept < ties else ties


@device
def find_slice(partial: Address, num_slices: I32, num_ties: U32, tie_weight: U64, x0: U32, *, WARPS: int) -> U64:
    """Put the slice that holds the token into shared memory, and return the weight of the row."""
    mass = 0
    ties = 0
    if thread_id() < num_slices:
        mass = load_relaxed_u64(partial + thread_id() * 16)
        ties = load_relaxed_u32(partial + thread_id() * 16 + 8)
    before, _sum = exclusive_sum(ties, SCRATCH_3, WARPS=WARPS)
    mass = mass + ties_kept(num_ties, before, ties) * tie_weight
    passed, total = exclusive_sum(mass, SCRATCH_4, WARPS=WARPS)
    goal = passed_by(x0, total)
    if passed <= goal and passed + mass > goal:
        shared_store_u32(FOUND, thread_id())
        shared_store_u32(FOUND + 4, ties_kept(num_ties, before, num_ties))
        shared_store_u64(FOUND + 8, goal - passed)
    return total


@device
def passed_by(x0: U32, total: U64) -> U64:
    """Return ``floor((x0 + 1/2) total / 2^32)``: the token drawn is the first to pass this weight."""
    return multiply_high_u64((2 * x0 + 1) << 30, total << 1)


@device
def philox(record: Address) -> U32:
    """Return the first word of Philox4x32-10 of a row's seed, position and purpose."""
    x0 = load_u32(record + POSITION)
    x1 = load_u32(record + PURPOSE)
    x2 = 0
    x3 = 0
    k0 = load_u32(record + SEED)
    k1 = load_u32(record + SEED + 4)
    turn = i32(0)
    while turn < 10:
        high_0 = multiply_high(x0, 0xD2511F53)
        low_0 = multiply_low(x0, 0xD2511F53)
        high_1 = multiply_high(x2, 0xCD9E8D57)
        low_1 = multiply_low(x2, 0xCD9E8D57)
        x0 = high_1 ^ x1 ^ k0
        x2 = high_0 ^ x3 ^ k1
        x1 = low_1
        x3 = low_0
        k0 = add_wrapping(k0, 0x9E3779B9)
        k1 = add_wrapping(k1, 0xBB67AE85)
        turn = i32(turn + 1)
    return x0


@device
def log_share(logit: F32, peak: F32, scale: F32, total: U64) -> F32:
    """Return the natural logarithm of a token's probability."""
    below = fma(fma(logit, 1.0, -peak), scale, 0.0)
    share = fma(below - log2(fma(float_of_u64(total), INVERSE_ONE, 0.0)), LN_2, 0.0)
    return -max_f32(-share, 0.0)


class Sampling(Protocol):
    """How one token is drawn: what ``executor.base.SampleSpec`` says."""

    @property
    def temperature(self) -> float:
        """At least 0; 0 takes the largest logit."""

    @property
    def top_k(self) -> int:
        """Keep the k largest; 0 keeps all."""

    @property
    def top_p(self) -> float:
        """Keep the smallest set of largest probabilities whose sum reaches it; 1 keeps all."""

    @property
    def min_p(self) -> float:
        """Drop tokens below this share of the largest probability."""

    @property
    def seed(self) -> int:
        """64-bit unsigned key of the draw."""


def pack_records(
    specs: Sequence[Sampling | None],
    rows: Sequence[int],
    positions: Sequence[int],
    vocab_size: int,
    purpose: int = 0,
) -> npt.NDArray[np.int32]:
    """Return the records of rows: int32 [num_rows, 12].

    Words: row of ``logits``, k (0: all), is greedy, position (low 32 bits), float32 log2(e) / T, float32 T ln(min_p),
    purpose, 0, top_p in units of 2^-62 (u64, 0: all), seed (u64).

    Args:
        specs: How each row is drawn; None: greedy.
        rows: Among the logits; -1: nothing to do.
        positions: Index in its sequence of each token to draw.
        vocab_size: Logits of a row.
        purpose: What the numbers are for: ``executor.philox.Purpose``, 0 for a plain draw.
    """
    records = np.zeros((len(specs), 12), np.int32)
    words, wide = records.view(np.uint32), records.view(np.uint64)
    for i, spec in enumerate(specs):
        records[i, 0] = rows[i]
        words[i, 3], words[i, 6] = positions[i] & 0xFFFFFFFF, purpose
        if spec is None or spec.temperature == 0:
            records[i, 2] = 1
            records[i, 4:6] = np.array([1.0, -LARGEST], np.float32).view(np.int32)
            continue
        records[i, 1] = spec.top_k if 0 < spec.top_k < vocab_size else 0
        bound = spec.temperature * math.log(spec.min_p) if spec.min_p > 0 else -LARGEST
        scale = min(max(math.log2(math.e) / spec.temperature, SMALLEST), LARGEST)
        records[i, 4:6] = np.array([scale, max(bound, -LARGEST)], np.float32).view(np.int32)
        wide[i, 4] = max(1, round(spec.top_p * 2.0**PROBABILITY_BITS)) if spec.top_p < 1 else 0
        wide[i, 5] = spec.seed
    return records


def specs(shape: ModelShape) -> list[KernelSpec]:
    """Return the kernels a model of this shape needs, in the order of their launches."""
    return _specs(shape, DEFAULT_SLICE)


def _specs(shape: ModelShape, slice_size: int) -> list[KernelSpec]:
    assert shape.vocab_size < 1 << 20
    items = (("SLICE", slice_size), ("WARPS", DEFAULT_WARPS))
    last = KernelSpec(draw, items, 32 * DEFAULT_WARPS, DRAW_SHARED_BYTES, ctas_per_sm=2, has_ticket=True)
    return [*select_specs(slice_size), *mass_specs(slice_size), last]
