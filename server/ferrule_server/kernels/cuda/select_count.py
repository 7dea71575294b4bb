"""The key of the k-th largest logit of each row, by an exact radix select of several CTAs: the first half of a top-k.

Maths: a float's key is a 32-bit integer that rises with it (``order_key``). The key of the k-th largest logit is found
digit by digit from the top: every launch counts, for each value of its digit, the keys that agree with the digits found
so far; the CTA that arrives last walks the counts down to the k-th. After the last digit the key is whole, and of the
logits equal to it ("ties") the number still wanted is known; the lowest ids have precedence. Only integers are added
atomically: nothing depends on who comes first.

Bytes moved: 4 per logit and launch (from L2 after the first), 4 to 8 KiB of counts per row and digit.

Source: radix select, after the radix sort of Merrill and Grimshaw, "High Performance and Scalable Radix Sorting", 2011.
"""

from __future__ import annotations

from ferrule_server.kernels.cuda.intrinsics import (
    I32,
    Address,
    add_wrapping,
    atomic_add_u32,
    barrier,
    cta_id,
    device,
    grid_launch_dependents,
    grid_wait,
    load_i32,
    load_relaxed_u32,
    load_u32,
    max_u32,
    num_ctas,
    order_key,
    shared_add_u32,
    shared_load_u32,
    shared_store_u32,
    store_u32,
    thread_id,
)
from ferrule_server.kernels.cuda.logit_rows import (
    DEFAULT_WARPS,
    KEY_NEGATIVE_INFINITY,
    block_max,
    exclusive_sum,
    load_slice,
)
from ferrule_server.kernels.cuda.spec import KernelSpec
from ferrule_server.kernels.cuda.specialise import Constant, i32, registers, unrolled
from ferrule_server.kernels.cuda.ticket import arrive

__all__ = [
    "COUNT",
    "DIGITS",
    "KEY",
    "PEAK",
    "STATE_BYTES",
    "count_shared_bytes",
    "select_count",
    "select_specs",
]

DIGITS = ((21, 11), (10, 11), (0, 10))
"""Lowest bit and number of bits of each digit, from the top."""

STATE_BYTES = 32
"""What is known of a row between launches; offsets of its words, u32 but for GOAL."""
PEAK = 0
"""Largest key; not between those of -inf and infinity where a logit is NaN or infinity, or none is allowed."""
FROM_NEGATIVE_INFINITY = (1 << 32) - KEY_NEGATIVE_INFINITY
"""Added to a key, so that NaN with a set sign, too, comes out above all numbers: the sum wraps."""
KEY = 4
COUNT = 8
"""Key of the k-th largest logit, as far as it is known, and how many of that key are wanted; 0 and 0: keep all."""

FLAG = 0
SCRATCH = 16
MAXIMA = SCRATCH + 8 * 32
ROW_MAXIMA = MAXIMA + 4 * 32
BINS = ROW_MAXIMA + 4 * 32


def count_shared_bytes(num_bits: int) -> int:
    """Return the dynamic shared memory of a CTA of ``select_count``."""
    return BINS + (4 << num_bits)


def select_count(
    logits: Address,
    records: Address,
    state: Address,
    counts: Address,
    partials: Address,
    tickets: Address,
    num_rows: I32,
    vocab_size: I32,
    num_slices: I32,
    record_bytes: I32,
    *,
    SHIFT: int,
    BITS: int,
    SLICE: int,
    WARPS: int,
) -> None:
    """Find one digit of the key of each row's k-th largest logit.

    The first digit (SHIFT + BITS == 32) sets the state of every row and finds its largest key; later ones do nothing
    for a row that keeps all, which is one with k = 0 or k >= vocab_size. A greedy row, with k = 0, keeps the largest
    key alone.

    Launch: any grid of at least one CTA (``num_ctas_needed`` at most is of use), 32 * WARPS threads,
    ``count_shared_bytes``.

    Args:
        logits: float32 [any, vocab_size].
        records: int32 [num_rows, record_bytes / 4]: row of ``logits`` (-1: nothing to do), k, 1 where it is greedy,
            then what others need.
        state: [num_rows, STATE_BYTES], scratch, zero before the first launch.
        counts: u32 [num_rows, 2^BITS], zero before, left zero.
        partials: [num_rows, num_slices, 16 bytes], scratch of the first digit.
        tickets: int32 [num_rows], zero before the first launch, left zero.
        num_rows: Records.
        vocab_size: Logits of a row.
        num_slices: Of a row, at most 32 * WARPS.
        record_bytes: From one record to the next.
        SHIFT: Lowest bit of the digit.
        BITS: Its width; 2^BITS is a multiple of 32 * WARPS.
        SLICE: Tokens in a slice, a multiple of 128 * WARPS.
        WARPS: Per CTA.
    """
    assert SLICE % (128 * WARPS) == 0
    assert (1 << BITS) % (32 * WARPS) == 0
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
            row = load_i32(records + slot * record_bytes)
            k = load_i32(records + slot * record_bytes + 4)
            has_k = 1 if k > 0 and k < vocab_size else 0
            is_open = has_k if SHIFT + BITS < 32 else 1
            if row >= 0 and is_open == 1:
                known = state + slot * STATE_BYTES
                prefix = 0
                if SHIFT + BITS < 32:
                    prefix = load_u32(known + KEY)
                    k = load_u32(known + COUNT)
                words = registers(SLICE // WARPS // 128)
                for g in unrolled(SLICE // WARPS // 128):
                    words[g] = (0, 0, 0, 0)
                load_slice(
                    logits + row * (vocab_size * 4),
                    i32(part * SLICE),
                    vocab_size,
                    words,
                    THREADS=32 * WARPS,
                    SLICE=SLICE,
                )
                if has_k == 1:
                    for j in unrolled((1 << BITS) // (32 * WARPS)):
                        shared_store_u32(BINS + (thread + 32 * WARPS * j) * 4, 0)
                    barrier()
                    for g in unrolled(SLICE // WARPS // 128):
                        for i in unrolled(4):
                            key = order_key(words[g][i])
                            if key >> (SHIFT + BITS) == prefix >> (SHIFT + BITS):
                                shared_add_u32(BINS + ((key >> SHIFT) & ((1 << BITS) - 1)) * 4, 1)
                    barrier()
                    for j in unrolled((1 << BITS) // (32 * WARPS)):
                        count = shared_load_u32(BINS + (thread + 32 * WARPS * j) * 4)
                        if count > 0:
                            atomic_add_u32(counts + ((slot << BITS) + thread + 32 * WARPS * j) * 4, count)
                if SHIFT + BITS == 32:
                    largest = 0
                    for g in unrolled(SLICE // WARPS // 128):
                        for i in unrolled(4):
                            largest = max_u32(largest, add_wrapping(order_key(words[g][i]), FROM_NEGATIVE_INFINITY))
                    largest = block_max(largest, MAXIMA, WARPS=WARPS)
                    if thread == 0:
                        store_u32(partials + (slot * num_slices + part) * 16, largest)
                is_last = arrive(tickets + slot * 4, num_slices, FLAG, ALL_STORE=SHIFT + BITS != 32)
                if is_last == 1:
                    peak = 0
                    if SHIFT + BITS == 32:
                        if thread < num_slices:
                            peak = load_relaxed_u32(partials + (slot * num_slices + thread) * 16)
                        peak = add_wrapping(block_max(peak, ROW_MAXIMA, WARPS=WARPS), KEY_NEGATIVE_INFINITY)
                        if thread == 0:
                            store_u32(known + PEAK, peak)
                    if has_k == 1:
                        find_digit(known, counts + (slot << BITS) * 4, prefix, k, SHIFT=SHIFT, BITS=BITS, WARPS=WARPS)
                    elif thread == 0:
                        is_greedy = 0
                        if SHIFT + BITS == 32:
                            is_greedy = load_i32(records + slot * record_bytes + 8) & 1
                        store_u32(known + KEY, peak if is_greedy == 1 else 0)
                        store_u32(known + COUNT, is_greedy)
            part = i32(part + num_ctas())


@device
def find_digit(known: Address, counts: Address, prefix: int, k: int, *, SHIFT: int, BITS: int, WARPS: int) -> None:
    """Walk the counts down to the k-th key, put its digit and what is still wanted into the state, zero the counts."""
    first = i32((1 << BITS) - 1 - thread_id() * ((1 << BITS) // (32 * WARPS)))
    own = registers((1 << BITS) // (32 * WARPS), init=0)
    mine = 0
    for j in unrolled((1 << BITS) // (32 * WARPS)):
        own[j] = load_relaxed_u32(counts + (first - j) * 4)
        mine = mine + own[j]
    for j in unrolled((1 << BITS) // (32 * WARPS)):
        if own[j] > 0:
            store_u32(counts + (first - j) * 4, 0)
    before, _total = exclusive_sum(mine, SCRATCH, WARPS=WARPS)
    digit = -1
    rest = 0
    for j in unrolled((1 << BITS) // (32 * WARPS)):
        if before < k and before + own[j] >= k:
            digit = first - j
            rest = k - before
        before = before + own[j]
    if digit >= 0:
        store_u32(known + KEY, prefix | (digit << SHIFT))
        store_u32(known + COUNT, rest)


def select_specs(slice_size: int) -> list[KernelSpec]:
    """Return ``select_count`` for every digit, in order."""
    made = []
    for shift, bits in DIGITS:
        constants: dict[str, Constant] = {"BITS": bits, "SHIFT": shift, "SLICE": slice_size, "WARPS": DEFAULT_WARPS}
        items, shared = tuple(sorted(constants.items())), count_shared_bytes(bits)
        made.append(KernelSpec(select_count, items, 32 * DEFAULT_WARPS, shared, ctas_per_sm=2, has_ticket=True))
    return made
