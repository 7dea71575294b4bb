"""Where what a row keeps ends: top-k and top-p by one CTA, a radix select over whole numbers.

Maths: tokens rank by logit, equal ones by lowest id, which makes a rank of 52 bits that no two tokens share. top-k adds
up ones and top-p weights, ``w = round(exp2((l - m) log2(e) / T) 2^39)`` with m the largest logit: the last token kept
is the one at which the sum, from the best token on, reaches the goal: k, or ``floor(top_p W)``, W the weight of what
top-k left. Sums of whole numbers depend on no order.

The select goes from coarse to fine. First the whole row is sorted into bins of 1/32 of a logit below the largest one,
where few tokens share a bin, so that additions to shared memory seldom collide. The tokens that are still in question,
those up to the bin of the goal for top-k and those inside of it for top-p, go into a list in shared memory, and from
there on digits of the rank decide, over the list alone. What top-k has listed serves top-p too. If a bin does not fit
the list, which takes thousands of nearly equal logits, all digits are found over the whole row: slower, with the same
result.

A weight is added to two halves of 32 bits, with its carry: there are no 64-bit additions to shared memory that are one
instruction.

Bytes moved: 4 per logit, from L2, once to find the bin and once to list.

Source: radix select, after the radix sort of Merrill and Grimshaw, "High Performance and Scalable Radix Sorting", 2011;
sampling without a sort after the rejection sampler of FlashInfer (Ye et al., 2024), here as an exact search.
"""

from __future__ import annotations

from ferrule_server.kernels.cuda import intrinsics as ptx
from ferrule_server.kernels.cuda import logit_rows
from ferrule_server.kernels.cuda.intrinsics import F32, I32, U32, U64, Address, device
from ferrule_server.kernels.cuda.logit_rows import ID_BITS
from ferrule_server.kernels.cuda.specialise import i32, registers, unrolled

__all__ = ["ALL_IDS", "LOWEST", "ONE", "PROBABILITY_BITS", "SCRATCH", "find_border", "select_shared_bytes", "weight_of"]

ONE = 549755813888.0
"""The weight of the largest logit, 2^39: a row of 2^20 tokens stays below 2^59."""
PROBABILITY_BITS = 62
LOWEST = -3.4028234663852886e38
ALL_IDS = (1 << ID_BITS) - 1
LOWEST_RANK = (0xFF7FFFFF << ID_BITS) | ALL_IDS
"""Of the lowest float32: what ranks behind is -inf."""
RANK_BITS = 32 + ID_BITS
RANGE = 64
"""Logits below the largest one that have bins of their own."""

COUNTER = 0
SCRATCH = 16
FOUND = SCRATCH + 8 * 32
"""Bin (u32), what it must still reach (u64, 8 bytes further)."""
BINS = FOUND + 16
"""Lower halves, upper halves, then the list."""


def select_shared_bytes(bits: int, room: int) -> int:
    """Return the dynamic shared memory of a select with so many bits to a digit and so much room in its list."""
    return BINS + (8 << bits) + 8 * room


@device
def weight_of(bits: U32, peak: F32, scale: F32) -> U64:
    """Return the weight of the logit of these bits."""
    below = ptx.fma(ptx.bits_float(bits), 1.0, -peak)
    return ptx.round_u64(ptx.fma(ptx.exp2(ptx.fma(below, scale, 0.0)), ONE, 0.0))


@device
def find_border(
    source: Address,
    vocab_size: I32,
    k: I32,
    share: U64,
    peak: F32,
    scale: F32,
    *,
    BITS: int,
    ROOM: int,
    SLICE: int,
    WARPS: int,
) -> tuple[F32, I32]:
    """Return the lowest logit that a row keeps, and the last id that is kept of those with this logit.

    Args:
        source: Of the row, whose logits are below infinity.
        vocab_size: Of the row.
        k: Keep so many; 0: all. Where fewer are above -inf, all of those.
        share: top_p in units of 2^-62; 0: all. One of the two is not 0.
        peak: The largest logit, finite.
        scale: log2(e) / T.
        BITS: Of a digit.
        ROOM: Tokens in the list.
        SLICE: As for ``load_slice``.
        WARPS: Per CTA.
    """
    assert (1 << BITS) % (32 * WARPS) == 0
    for j in unrolled((2 << BITS) // (32 * WARPS)):
        ptx.shared_store_u32(BINS + (ptx.thread_id() + 32 * WARPS * j) * 4, 0)
    ptx.barrier()
    border = LOWEST
    last = i32(ALL_IDS)
    limit = LOWEST_RANK
    count = i32(ROOM + 1)  # in the list; more than fit: nothing is listed
    weighs = i32(0 if k > 0 else 1)  # first top-k, which adds up ones, then top-p, which adds up weights
    end = i32(2 if share > 0 else 1)
    while weighs < end:
        goal = k + 0
        part = share * weighs
        place = i32(0)
        is_narrow = i32(weighs | i32(k > ROOM // 2))  # list the bin of the goal alone: what ranks before it may not fit
        if count > ROOM:
            _scan(
                source, vocab_size, border, last, peak, scale, weighs, 0, 0,
                GATHERS=False, BITS=BITS, ROOM=ROOM, SLICE=SLICE, WARPS=WARPS,
            )  # fmt: skip
            if ptx.thread_id() == 0:
                ptx.shared_store_u32(COUNTER, 0)
            place, rest = _find_bin(goal, part, BITS=BITS, WARPS=WARPS)
            last_bin = i32(place if place >= 0 else 1 << BITS)
            _scan(
                source, vocab_size, border, last, peak, scale, weighs, i32(place * is_narrow), last_bin,
                GATHERS=True, BITS=BITS, ROOM=ROOM, SLICE=SLICE, WARPS=WARPS,
            )  # fmt: skip
            count = i32(ptx.shared_load_u32(COUNTER))
            if is_narrow == 1 and count <= ROOM:
                goal = rest
                part = 0
        if place >= 0:
            rank = 0
            known = i32(RANK_BITS)
            while known > 0:
                shift = i32(known - BITS if known > BITS else 0)
                _tally(
                    source, vocab_size, count, limit, rank, known, shift, peak, scale, weighs,
                    BITS=BITS, ROOM=ROOM, WARPS=WARPS,
                )  # fmt: skip
                digit, goal = _find_bin(goal, part, BITS=BITS, WARPS=WARPS)
                part = 0
                rank = rank | (digit << shift)
                known = i32(shift)
            limit = rank + 0
            border = ptx.bits_float(logit_rows.key_bits((rank >> ID_BITS) ^ 0xFFFFFFFF))
            last = i32(rank & ALL_IDS)
        if is_narrow == 1:
            count = i32(ROOM + 1)
        weighs = i32(weighs + 1)
    return (border, last)


@device
def _scan(
    source: Address,
    vocab_size: I32,
    border: F32,
    last: I32,
    peak: F32,
    scale: F32,
    weighs: I32,
    first_bin: I32,
    last_bin: I32,
    *,
    GATHERS: bool,
    BITS: int,
    ROOM: int,
    SLICE: int,
    WARPS: int,
) -> None:
    """Add what a row has kept so far to its bins, or list the tokens of some bins."""
    begin = i32(0)
    while begin < vocab_size:
        words = registers(SLICE // (128 * WARPS))
        logit_rows.load_slice(source, begin, vocab_size, words, STRONG=True, SLICE=SLICE, WARPS=WARPS)
        for g in unrolled(SLICE // (128 * WARPS)):
            for i in unrolled(4):
                token = i32(begin + (32 * WARPS * g + ptx.thread_id()) * 4 + i)
                if logit_rows.is_kept(words[g][i], token, border, last):
                    # 2^23 added, the lowest bits of a float are a whole number.
                    below = ptx.max_f32(ptx.fma(ptx.bits_float(words[g][i]), 1.0, -peak), -(RANGE - 1.0))
                    place = ptx.float_bits(ptx.fma(below, -(1 << BITS) / RANGE, 8388608.0)) & ((1 << BITS) - 1)
                    if GATHERS:
                        if place >= first_bin and place <= last_bin:
                            at = ptx.shared_fetch_add_u32(COUNTER, 1)
                            if at < ROOM:
                                ptx.shared_store_u64(
                                    BINS + (8 << BITS) + at * 8, logit_rows.rank_of(words[g][i], token)
                                )
                    else:
                        _add(place, words[g][i], peak, scale, weighs, BITS=BITS)
        begin = i32(begin + SLICE)
    ptx.barrier()


@device
def _tally(
    source: Address,
    vocab_size: I32,
    count: I32,
    limit: U64,
    rank: U64,
    known: I32,
    shift: I32,
    peak: F32,
    scale: F32,
    weighs: I32,
    *,
    BITS: int,
    ROOM: int,
    WARPS: int,
) -> None:
    """Add the tokens that agree with the known digits of the rank to the bins of the next one."""
    size = i32(count if count <= ROOM else vocab_size)
    index = i32(ptx.thread_id())
    while index < size:
        candidate = 0
        if count <= ROOM:
            candidate = ptx.shared_load_u64(BINS + (8 << BITS) + index * 8)
        else:
            candidate = logit_rows.rank_of(ptx.load_relaxed_u32(source + index * 4), index)
        if candidate <= limit and (candidate ^ rank) >> known == 0:
            bits = logit_rows.key_bits((candidate >> ID_BITS) ^ 0xFFFFFFFF)
            _add((candidate >> shift) & ((1 << BITS) - 1), bits, peak, scale, weighs, BITS=BITS)
        index = i32(index + 32 * WARPS)
    ptx.barrier()


@device
def _add(place: U32, bits: U32, peak: F32, scale: F32, weighs: I32, *, BITS: int) -> None:
    """Add a token to a bin: its weight, or 1."""
    amount = 1
    if weighs == 1:
        amount = weight_of(bits, peak, scale)
    if amount > 0:
        before = ptx.shared_fetch_add_u32(BINS + place * 4, amount & 0xFFFFFFFF)
        carry = (amount + before) >> 32
        if carry > 0:
            ptx.shared_fetch_add_u32(BINS + (4 << BITS) + place * 4, carry)


@device
def _find_bin(goal: U64, share: U64, *, BITS: int, WARPS: int) -> tuple[I32, U64]:
    """Return the bin at which their sum reaches the goal, -1 if none, and what that bin must still reach; empty them.

    Args:
        goal: At least 1.
        share: The goal is this share of everything in the bins instead, where it is not 0.
        BITS: There are 2^BITS bins.
        WARPS: Per CTA.
    """
    first = i32(ptx.thread_id() * ((1 << BITS) // (32 * WARPS)))
    own = registers((1 << BITS) // (32 * WARPS), init=0)
    mine = 0
    for j in unrolled((1 << BITS) // (32 * WARPS)):
        low = i32(BINS + (first + j) * 4)
        own[j] = ptx.shared_load_u32(low) | (ptx.shared_load_u32(low + (4 << BITS)) << 32)
        ptx.shared_store_u32(low, 0)
        ptx.shared_store_u32(low + (4 << BITS), 0)
        mine = mine + own[j]
    before, total = logit_rows.exclusive_sum(mine, SCRATCH, WARPS=WARPS)
    if share > 0:
        goal = ptx.multiply_high_u64(share, total << (64 - PROBABILITY_BITS))
        goal = goal if goal > 0 else 1
    for j in unrolled((1 << BITS) // (32 * WARPS)):
        if before < goal and before + own[j] >= goal:
            ptx.shared_store_u32(FOUND, first + j)
            ptx.shared_store_u64(FOUND + 8, goal - before)
        before = before + own[j]
    ptx.barrier()
    place = i32(-1)
    rest = 0
    if goal <= total:
        place = i32(ptx.shared_load_u32(FOUND))
        rest = ptx.shared_load_u64(FOUND + 8)
    return (place, rest)
