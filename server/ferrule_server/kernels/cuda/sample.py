"""One token for each row, in two launches: penalties, bias, mask, temperature, top-k, top-p, min-p, one Philox draw.

Maths of the distribution: that of ``executor.sampling.distributions``. The weight of a token is a whole number,
``w = round(exp2((l - m) log2(e) / T) 2^39)``, m the largest logit; a sum of weights is exact, so that it depends on no
order, and stays below 2^59. Tokens rank by logit, equal ones by lowest id.

* top-k and top-p keep a prefix of that rank; ``radix_select`` finds where it ends.
* min-p drops a token with ``l - m < T ln(min_p)``, which the host computes in float64 and rounds.
* The draw: with u = (x0 + 1/2) / 2^32, x0 the first word of Philox4x32-10, the first token by id at which the weight
  kept so far exceeds u times the whole of it: ``floor((2 x0 + 1) W / 2^33)``, exactly.
* Temperature 0 keeps the largest logit alone, the lowest id among equals.

Where float32 shows: an exponent ``e`` (in powers of two) carries a relative error of 2^-22.4, so a weight is off by
1.3e-7 |e| + 2.5e-7 of itself at most, and by 2^-40; a border of the distribution moves by the mean of that, about 1e-6
of the whole weight. Another token than that of the float64 distribution comes out only where u, top_p or a min-p
threshold is so close to a border. The logarithm of the probability is off by at most 1e-5.

Maths of penalties, bias and mask: ``l / r`` (l > 0) or ``l * r``, minus ``c * frequency + presence``, for a token with
c > 0 occurrences; plus the bias; -inf where the mask forbids it. ``executor.sampling.shaping`` is in float64, this in
float32, with ``1 / r`` rounded by the host, one rounding for the product and what is subtracted, one for the bias: a
result is within ``2^-22 (|l r'| + c |frequency| + |presence| + |bias|)`` of the definition (r' is r or 1 / r), so that
two tokens closer than that may change places. What lies beyond float32 becomes the largest float32, never infinity.
Tokens that no entry names and the mask allows keep their bits.

Bytes moved: 4 per logit and launch, from L2 after the first; 8 more where a row is shaped, twice 4 more for each of
top-k and top-p that its row has (once for both with few tokens kept).

Source: Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import numpy as np

from ferrule_server.kernels.cuda import best_token, logit_rows, radix_select
from ferrule_server.kernels.cuda import intrinsics as ptx
from ferrule_server.kernels.cuda.constants import LN_2
from ferrule_server.kernels.cuda.intrinsics import F32, I32, U32, U64, Address, Vec4, device
from ferrule_server.kernels.cuda.logit_rows import DEFAULT_SLICE, DEFAULT_WARPS, NEGATIVE_INFINITY
from ferrule_server.kernels.cuda.radix_select import ALL_IDS, LOWEST, SCRATCH, select_shared_bytes
from ferrule_server.kernels.cuda.spec import KernelSpec, ModelShape
from ferrule_server.kernels.cuda.specialise import i32, registers, unrolled
from ferrule_server.kernels.cuda.ticket import arrive

__all__ = ["BORDER_BYTES", "RECORD", "draw", "mask_bytes", "shape_and_select", "specs"]

RECORD = np.dtype(
    [
        *((name, "<i4") for name in ("row", "source", "k", "is_greedy")),
        *((name, "<u8") for name in ("top_p", "seed")),
        *((name, "<u4") for name in ("position", "purpose")),
        *((name, "<f4") for name in ("scale", "bound")),
        *((name, "<i4") for name in ("mask", "first_entry", "end_entry", "unused")),
        *((name, "<f4") for name in ("repetition", "inverse_repetition", "frequency", "presence")),
    ]
)
"""What is done with a row.

``row`` of the raw logits, -1: nothing to do; ``source``: the row that the token is chosen from, another one where it is
shaped; ``k``, 0: all; ``top_p`` in units of 2^-62, 0: all; low 32 bits of the position and the purpose of the draw;
``scale``: log2(e) / T; ``bound``: T ln(min_p); ``mask`` in units of 16 bytes, -1: none; its first entry and the one
after the last; the penalties. A greedy row has neither ``k`` nor ``top_p``.
"""
RECORD_BYTES = RECORD.itemsize
AT = {name: place[1] for name, place in (RECORD.fields or {}).items()}

BORDER_BYTES = 16
"""What is known of a row between the launches: the id of its largest logit (-1: it has none, or a logit is NaN or
infinite), the lowest logit that it keeps (float32), the last id kept of those with this logit."""

BITS = 11
ROOM = 4096
"""Of the select: of a digit, and in its list."""
LARGEST = 3.4028234663852886e38
INVERSE_ONE = 1.8189894035458565e-12

FLAG = 8
"""In front of the scratch that is shared with ``radix_select``."""


def shape_and_select(
    logits: Address,
    rows: Address,
    records: Address,
    entries: Address,
    masks: Address,
    borders: Address,
    partials: Address,
    tickets: Address,
    num_rows: I32,
    vocab_size: I32,
    num_slices: I32,
    *,
    BITS: int,
    ROOM: int,
    SLICE: int,
    WARPS: int,
) -> None:
    """Shape rows of logits, and find the largest logit of each and where what it keeps ends.

    The CTA of a slice copies it through the mask, then the entries of its tokens overwrite theirs. The CTA that arrives
    last with a slice of a row does the rest of that row alone.

    Launch: any grid of at least one CTA (one per row and slice at most is of use), 32 * WARPS threads,
    ``select_shared_bytes``.

    Args:
        logits: float32 [any, vocab_size], where the raw rows are.
        rows: The same buffer; a row named as ``source`` alone is written.
        records: RECORD [num_rows].
        entries: int32 [any, 4]: token, occurrences, float32 bias, unused; of one row the tokens are distinct.
        masks: Bits, token i at bit ``i % 8`` of byte ``i // 8``, 1 = allowed; each mask begins and ends at 16 bytes.
        borders: [num_rows, BORDER_BYTES], written.
        partials: [num_rows, num_slices, 16 bytes], scratch.
        tickets: int32 [num_rows], zero before the first launch, left zero.
        num_rows: Records.
        vocab_size: Logits of a row, below 2^20.
        num_slices: Of a row, at most 32 * WARPS.
        BITS: As for ``find_border``.
        ROOM: As for ``find_border``.
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
            record = records + slot * RECORD_BYTES
            row = ptx.load_i32(record + AT["row"])
            chosen_from = ptx.load_i32(record + AT["source"])
            if row >= 0:
                raw = logits + row * (vocab_size * 4)
                source = rows + chosen_from * (vocab_size * 4)
                partial = partials + slot * (num_slices * 16)
                if row != chosen_from:
                    shape_slice(raw, source, record, entries, masks, i32(part * SLICE), vocab_size, SLICE=SLICE,
                                WARPS=WARPS)  # fmt: skip
                best = best_token.best_of_slice(
                    source, i32(part * SLICE), vocab_size, SCRATCH, STRONG=True, MASKED=True, SLICE=SLICE, WARPS=WARPS
                )
                if thread == 0:
                    ptx.store_u64(partial + part * 16, best)
                if arrive(tickets + slot * 4, num_slices, FLAG, ALL_STORE=False) == 1:
                    token = best_token.token_of(best_token.best_partial(partial, num_slices, STEP=16))
                    border = LOWEST
                    last = i32(ALL_IDS)
                    if token >= 0:
                        peak = ptx.load_relaxed_f32(source + token * 4)
                        k = ptx.load_i32(record + AT["k"])
                        share = ptx.load_u64(record + AT["top_p"])
                        if ptx.load_i32(record + AT["is_greedy"]) > 0:
                            border = peak
                            last = i32(token)
                        elif k > 0 or share > 0:
                            border, last = radix_select.find_border(
                                source, vocab_size, k, share, peak, ptx.load_f32(record + AT["scale"]),
                                BITS=BITS, ROOM=ROOM, SLICE=SLICE, WARPS=WARPS,
                            )  # fmt: skip
                    if thread == 0:
                        known = borders + slot * BORDER_BYTES
                        ptx.store_i32(known, token)
                        ptx.store_f32(known + 4, border)
                        ptx.store_i32(known + 8, last)
            part = i32(part + ptx.num_ctas())


@device
def shape_slice(
    raw: Address,
    target: Address,
    record: Address,
    entries: Address,
    masks: Address,
    begin: I32,
    vocab_size: I32,
    *,
    SLICE: int,
    WARPS: int,
) -> None:
    """Write a slice of a row with its penalties, bias and mask."""
    mask = ptx.load_i32(record + AT["mask"])
    words = registers(SLICE // (128 * WARPS))
    logit_rows.load_slice(raw, begin, vocab_size, words, STRONG=False, SLICE=SLICE, WARPS=WARPS)
    for g in unrolled(SLICE // (128 * WARPS)):
        first = i32(begin + (32 * WARPS * g + ptx.thread_id()) * 4)
        if first < vocab_size:
            bits = 15
            if mask >= 0:
                bits = ptx.load_u32(masks + mask * 16 + (first >> 5) * 4) >> (first & 31)
            store_masked(target, first, vocab_size, words[g], bits)
    ptx.barrier()
    entry = i32(ptx.load_i32(record + AT["first_entry"]) + ptx.thread_id())
    end = ptx.load_i32(record + AT["end_entry"])
    while entry < end:
        change = ptx.load_v4(entries + entry * 16)
        if change[0] >= begin and change[0] < begin + SLICE:
            value = ptx.load_f32(raw + change[0] * 4)
            ptx.store_f32(target + change[0] * 4, changed(value, change, record, masks, mask))
        entry = i32(entry + 32 * WARPS)
    ptx.barrier()


@device
def store_masked(target: Address, first: I32, vocab_size: I32, words: Vec4, bits: U32) -> None:
    """Store four logits, -inf where the low four bits forbid them."""
    allowed = registers(4)
    for i in unrolled(4):
        allowed[i] = words[i] if bits & (1 << i) else NEGATIVE_INFINITY
    if (target & 15) == 0 and first + 4 <= vocab_size:
        ptx.store_v4(target + first * 4, (allowed[0], allowed[1], allowed[2], allowed[3]))
    else:
        for i in unrolled(4):
            if first + i < vocab_size:
                ptx.store_u32(target + (first + i) * 4, allowed[i])


@device
def changed(logit: F32, change: Vec4, record: Address, masks: Address, mask: I32) -> F32:
    """Return a logit with its penalties, bias and mask."""
    value = logit
    if change[1] > 0:
        factor = ptx.load_f32(record + AT["repetition"])
        if value > 0.0:
            factor = ptx.load_f32(record + AT["inverse_repetition"])
        loss = ptx.fma(
            ptx.float_of(change[1]), ptx.load_f32(record + AT["frequency"]), ptx.load_f32(record + AT["presence"])
        )
        value = ptx.fma(value, factor, -loss)
    value = ptx.fma(value, 1.0, ptx.bits_float(change[2]))
    value = ptx.max_f32(-ptx.max_f32(-value, -LARGEST), -LARGEST)
    if mask >= 0:
        bits = ptx.load_u32(masks + mask * 16 + (change[0] >> 5) * 4) >> (change[0] & 31)
        if (bits & 1) == 0:
            value = ptx.bits_float(NEGATIVE_INFINITY)
    return value


SCRATCH_2 = SCRATCH + 8 * 32
SCRATCH_3 = SCRATCH_2 + 8 * 32
FOUND = SCRATCH_3 + 8 * 32
"""Slice (u32), weight still to be passed (u64, 8 bytes further)."""
DRAW_SHARED_BYTES = FOUND + 16


def draw(
    logits: Address,
    records: Address,
    borders: Address,
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

    Launch: any grid of at least one CTA (one per row and slice at most is of use), 32 * WARPS threads,
    ``DRAW_SHARED_BYTES``.

    Args:
        logits: float32 [any, vocab_size], raw and shaped rows.
        records: RECORD [num_rows].
        borders: [num_rows, BORDER_BYTES], what ``shape_and_select`` found.
        partials: [num_rows, num_slices, 16 bytes], scratch.
        tickets: int32 [num_rows], zero before the first launch, left zero.
        tokens: int32 [num_rows]; -1 for a row with NaN or infinity, or that allows no token.
        logprobs: float32 [num_rows], natural logarithm of the token's probability under the distribution that it is
            drawn from; NaN likewise.
        totals: u64 [num_rows], the weight of what was kept; 0 likewise.
        num_rows: Records.
        vocab_size: Logits of a row, below 2^20.
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
            record = records + slot * RECORD_BYTES
            known = borders + slot * BORDER_BYTES
            if ptx.load_i32(record + AT["row"]) >= 0:
                best = ptx.load_i32(known)
                if best >= 0:
                    source = logits + ptx.load_i32(record + AT["source"]) * (vocab_size * 4)
                    peak = ptx.load_f32(source + best * 4)
                    border = ptx.load_f32(known + 4)
                    last = ptx.load_i32(known + 8)
                    scale = ptx.load_f32(record + AT["scale"])
                    bound = ptx.load_f32(record + AT["bound"])
                    words = registers(SLICE // (128 * WARPS))
                    logit_rows.load_slice(
                        source, i32(part * SLICE), vocab_size, words, STRONG=False, SLICE=SLICE, WARPS=WARPS
                    )
                    mass = 0
                    for g in unrolled(SLICE // (128 * WARPS)):
                        first = i32(part * SLICE + (32 * WARPS * g + thread) * 4)
                        mass = mass + mass_of(words[g], first, border, last, peak, scale, bound)
                    _before, mass = logit_rows.exclusive_sum(mass, SCRATCH, WARPS=WARPS)
                    partial = partials + slot * (num_slices * 16)
                    if thread == 0:
                        ptx.store_u64(partial + part * 16, mass)
                    if arrive(tickets + slot * 4, num_slices, FLAG, ALL_STORE=False) == 1:
                        goal, total = find_slice(partial, num_slices, philox(record), WARPS=WARPS)
                        begin = i32(ptx.shared_load_u32(FOUND) * SLICE + thread * (SLICE // (32 * WARPS)))
                        mass = 0
                        for g in unrolled(SLICE // (128 * WARPS)):
                            first = i32(begin + 4 * g)
                            four = logit_rows.load_four(source, first, vocab_size)
                            mass = mass + mass_of(four, first, border, last, peak, scale, bound)
                        passed, _sum = logit_rows.exclusive_sum(mass, SCRATCH_3, WARPS=WARPS)
                        if passed <= goal and passed + mass > goal:
                            token = i32(begin - 1)
                            while passed <= goal:
                                token = i32(token + 1)
                                bits = ptx.load_u32(source + token * 4)
                                passed = passed + kept_weight(bits, token, border, last, peak, scale, bound)
                            logit = ptx.load_f32(source + token * 4)
                            ptx.store_i32(tokens + slot * 4, token)
                            ptx.store_f32(logprobs + slot * 4, log_share(logit, peak, scale, total))
                            ptx.store_u64(totals + slot * 8, total)
                elif part == 0 and thread == 0:
                    ptx.store_i32(tokens + slot * 4, -1)
                    ptx.store_u32(logprobs + slot * 4, 0x7FC00000)
                    ptx.store_u64(totals + slot * 8, 0)
            part = i32(part + ptx.num_ctas())


@device
def kept_weight(bits: U32, token: I32, border: F32, last: I32, peak: F32, scale: F32, bound: F32) -> U64:
    """Return the weight of a token, 0 where it is not kept."""
    is_in = logit_rows.is_kept(bits, token, border, last) & i32(ptx.fma(ptx.bits_float(bits), 1.0, -peak) >= bound)
    return radix_select.weight_of(bits, peak, scale) & -is_in


@device
def mass_of(words: Vec4, first: I32, border: F32, last: I32, peak: F32, scale: F32, bound: F32) -> U64:
    """Return the weight of what is kept of four tokens."""
    mass = 0
    for i in unrolled(4):
        mass = mass + kept_weight(words[i], i32(first + i), border, last, peak, scale, bound)
    return mass


@device
def find_slice(partial: Address, num_slices: I32, x0: U32, *, WARPS: int) -> tuple[U64, U64]:
    """Return the weight to be passed in the slice of the token, and that of the row; the slice is at FOUND."""
    mass = 0
    if ptx.thread_id() < num_slices:
        mass = ptx.load_relaxed_u64(partial + ptx.thread_id() * 16)
    passed, total = logit_rows.exclusive_sum(mass, SCRATCH_2, WARPS=WARPS)
    goal = passed_by(x0, total)
    if passed <= goal and passed + mass > goal:
        ptx.shared_store_u32(FOUND, ptx.thread_id())
        ptx.shared_store_u64(FOUND + 8, goal - passed)
    ptx.barrier()
    return (ptx.shared_load_u64(FOUND + 8), total)


@device
def passed_by(x0: U32, total: U64) -> U64:
    """Return ``floor((x0 + 1/2) total / 2^32)``: the token drawn is the first to pass this weight."""
    return ptx.multiply_high_u64((2 * x0 + 1) << 30, total << 1)


@device
def philox(record: Address) -> U32:
    """Return the first word of Philox4x32-10 of a row's seed, position and purpose."""
    x0 = ptx.load_u32(record + AT["position"])
    x1 = ptx.load_u32(record + AT["purpose"])
    x2 = 0
    x3 = 0
    k0 = ptx.load_u32(record + AT["seed"])
    k1 = ptx.load_u32(record + (AT["seed"] + 4))
    turn = i32(0)
    while turn < 10:
        high_0 = ptx.multiply_high(x0, 0xD2511F53)
        low_0 = ptx.multiply_low(x0, 0xD2511F53)
        high_1 = ptx.multiply_high(x2, 0xCD9E8D57)
        low_1 = ptx.multiply_low(x2, 0xCD9E8D57)
        x0 = high_1 ^ x1 ^ k0
        x2 = high_0 ^ x3 ^ k1
        x1 = low_1
        x3 = low_0
        k0 = ptx.add_wrapping(k0, 0x9E3779B9)
        k1 = ptx.add_wrapping(k1, 0xBB67AE85)
        turn = i32(turn + 1)
    return x0


@device
def log_share(logit: F32, peak: F32, scale: F32, total: U64) -> F32:
    """Return the natural logarithm of a token's probability."""
    below = ptx.fma(ptx.fma(logit, 1.0, -peak), scale, 0.0)
    share = ptx.fma(below - ptx.log2(ptx.fma(ptx.float_of_u64(total), INVERSE_ONE, 0.0)), LN_2, 0.0)
    return -ptx.max_f32(-share, 0.0)


def mask_bytes(vocab_size: int) -> int:
    """Return the bytes one mask takes among the others: a multiple of 16."""
    return -(-vocab_size // 128) * 16


def specs(shape: ModelShape) -> list[KernelSpec]:
    """Return the kernels a model of this shape needs, in the order of their launches."""
    logit_rows.num_slices(shape.vocab_size)
    sizes = (("SLICE", DEFAULT_SLICE), ("WARPS", DEFAULT_WARPS))
    threads, shared = 32 * DEFAULT_WARPS, select_shared_bytes(BITS, ROOM)
    items = (("BITS", BITS), ("ROOM", ROOM), *sizes)
    return [
        KernelSpec(shape_and_select, items, threads, shared, min_vector_loads=4, has_ticket=True),
        KernelSpec(draw, sizes, threads, DRAW_SHARED_BYTES, min_vector_loads=4, has_ticket=True),
    ]
