"""The key at which the weights of a row reach its top-p share, by the same radix select as top-k's, over sums.

Maths: weights are integers, ``round(exp2((l - m) log2(e) / T) 2^39)`` with m the largest logit, so that their sums are
exact whatever the order. Every launch adds up, for each value of its digit, the weights whose keys agree with the
digits found so far; the CTA that arrives last walks them down, from the largest key, to ``floor(top_p W)``, W the
weight of what top-k left. After the last digit it finds how many logits of the key are needed.

A weight goes into shared memory as two halves of 32 bits each: there are no 64-bit additions to shared memory that are
one instruction.

Bytes moved: 4 per logit and launch (from L2), 8 to 16 KiB of sums per row and digit.
"""

from __future__ import annotations

from ferrule_server.kernels.cuda.intrinsics import (
    F32,
    I32,
    U32,
    U64,
    Address,
    atomic_add_u64,
    barrier,
    bits_float,
    cta_id,
    device,
    exp2,
    fma,
    grid_launch_dependents,
    grid_wait,
    load_f32,
    load_i32,
    load_relaxed_u64,
    load_u32,
    load_u64,
    multiply_high_u64,
    num_ctas,
    order_key,
    round_u64,
    shared_add_u32,
    shared_load_u32,
    shared_store_u32,
    store_u32,
    store_u64,
    thread_id,
)
from ferrule_server.kernels.cuda.logit_rows import (
    DEFAULT_WARPS,
    KEY_INFINITY,
    KEY_NEGATIVE_INFINITY,
    exclusive_sum,
    key_bits,
    load_slice,
)
from ferrule_server.kernels.cuda.select_count import COUNT, DIGITS, KEY, PEAK, STATE_BYTES
from ferrule_server.kernels.cuda.spec import KernelSpec
from ferrule_server.kernels.cuda.specialise import Constant, i32, registers, unrolled
from ferrule_server.kernels.cuda.ticket import arrive

__all__ = [
    "BOUND",
    "MASS_COUNT",
    "MASS_KEY",
    "ONE",
    "POSITION",
    "PROBABILITY_BITS",
    "PURPOSE",
    "RECORD_BYTES",
    "SCALE",
    "SEED",
    "TOP_P",
    "mass_shared_bytes",
    "mass_specs",
    "select_mass",
    "weight_of",
]

RECORD_BYTES = 48
POSITION = 12
SCALE = 16
BOUND = 20
PURPOSE = 24
TOP_P = 32
SEED = 40
"""Offsets in a record; row, k and is_greedy stand before them."""

MASS_KEY = 12
GOAL = 16
MASS_COUNT = 24
"""Offsets in the state of a row, behind those of ``top_k``: the key top-p found, the weight still to be reached (u64),
and how many of that key are kept."""

ONE = 549755813888.0
"""The weight of the largest logit, 2^39: the sums of both halves of 4096 weights then fit 32 bits."""
HALF = 20
PROBABILITY_BITS = 62

FLAG = 0
SCRATCH = 16
BINS = SCRATCH + 8 * 32


def mass_shared_bytes(num_bits: int) -> int:
    """Return the dynamic shared memory of a CTA of ``select_mass``."""
    return BINS + (8 << num_bits)


@device
def weight_of(bits: U32, peak: F32, scale: F32) -> U64:
    """Return the weight of the logit of these bits."""
    below = fma(bits_float(bits), 1.0, -peak)
    return round_u64(fma(exp2(fma(below, scale, 0.0)), ONE, 0.0))


def select_mass(
    logits: Address,
    records: Address,
    state: Address,
    masses: Address,
    tickets: Address,
    num_rows: I32,
    vocab_size: I32,
    num_slices: I32,
    *,
    SHIFT: int,
    BITS: int,
    SLICE: int,
    WARPS: int,
) -> None:
    """Find one digit of the key at which the weights of a row, from the top, reach its top-p share.

    Does nothing for a row without top-p, a greedy one, or one that has no law.

    Launch: any grid of at least one CTA (``num_ctas_needed`` at most is of use), 32 * WARPS threads,
    ``mass_shared_bytes``.

    Args:
        logits: float32 [any, vocab_size].
        records: As for ``draw``.
        state: [num_rows, STATE_BYTES], holds what ``select_count`` found.
        masses: u64 [num_rows, 2^BITS], zero before, left zero.
        tickets: int32 [num_rows], zero before the first launch, left zero.
        num_rows: Records.
        vocab_size: Logits of a row, below 2^20.
        num_slices: Of a row, at most 32 * WARPS.
        SHIFT: Lowest bit of the digit.
        BITS: Its width; 2^BITS is a multiple of 32 * WARPS.
        SLICE: Tokens in a slice, a multiple of 128 * WARPS, at most 4096.
        WARPS: Per CTA.
    """
    assert SLICE % (128 * WARPS) == 0
    assert SLICE <= 4096
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
            record = records + slot * RECORD_BYTES
            known = state + slot * STATE_BYTES
            row = load_i32(record)
            is_greedy = load_i32(record + 8) & 1
            share = load_u64(record + TOP_P)
            top = load_u32(known + PEAK)
            if row >= 0 and share > 0 and is_greedy == 0 and top > KEY_NEGATIVE_INFINITY and top < KEY_INFINITY:
                scale = load_f32(record + SCALE)
                peak = bits_float(key_bits(top))
                floor = load_u32(known + KEY)
                prefix = 0
                if SHIFT + BITS < 32:
                    prefix = load_u32(known + MASS_KEY)
                for j in unrolled((2 << BITS) // (32 * WARPS)):
                    shared_store_u32(BINS + (thread + 32 * WARPS * j) * 4, 0)
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
                barrier()
                for g in unrolled(SLICE // WARPS // 128):
                    for i in unrolled(4):
                        key = order_key(words[g][i])
                        if key > floor and key >> (SHIFT + BITS) == prefix >> (SHIFT + BITS):
                            weight = weight_of(words[g][i], peak, scale)
                            if weight > 0:
                                place = BINS + ((key >> SHIFT) & ((1 << BITS) - 1)) * 4
                                shared_add_u32(place, weight & ((1 << HALF) - 1))
                                shared_add_u32(place + (4 << BITS), weight >> HALF)
                barrier()
                for j in unrolled((1 << BITS) // (32 * WARPS)):
                    low = shared_load_u32(BINS + (thread + 32 * WARPS * j) * 4)
                    high = shared_load_u32(BINS + (thread + 32 * WARPS * j) * 4 + (4 << BITS))
                    mass = low + (high << HALF)
                    if mass > 0:
                        atomic_add_u64(masses + ((slot << BITS) + thread + 32 * WARPS * j) * 8, mass)
                is_last = arrive(tickets + slot * 4, num_slices, FLAG, ALL_STORE=True)
                if is_last == 1:
                    find_mass_digit(
                        known,
                        masses + (slot << BITS) * 8,
                        prefix,
                        share,
                        floor,
                        peak,
                        scale,
                        SHIFT=SHIFT,
                        BITS=BITS,
                        WARPS=WARPS,
                    )
            part = i32(part + num_ctas())


@device
def find_mass_digit(
    known: Address,
    masses: Address,
    prefix: U32,
    share: U64,
    floor: U32,
    peak: F32,
    scale: F32,
    *,
    SHIFT: int,
    BITS: int,
    WARPS: int,
) -> None:
    """Walk the weights down to the goal, put the digit and the rest of the goal into the state, zero the weights."""
    first = i32((1 << BITS) - 1 - thread_id() * ((1 << BITS) // (32 * WARPS)))
    tie_bin = i32(-1)
    if floor >> (SHIFT + BITS) == prefix >> (SHIFT + BITS):
        tie_bin = i32((floor >> SHIFT) & ((1 << BITS) - 1))
    tie_mass = load_u32(known + COUNT)
    if tie_mass > 0:
        tie_mass = tie_mass * weight_of(key_bits(floor), peak, scale)
    own = registers((1 << BITS) // (32 * WARPS), init=0)
    mine = 0
    for j in unrolled((1 << BITS) // (32 * WARPS)):
        own[j] = load_relaxed_u64(masses + (first - j) * 8)
        if own[j] > 0:
            store_u64(masses + (first - j) * 8, 0)
        if first - j == tie_bin:
            own[j] = own[j] + tie_mass
        mine = mine + own[j]
    goal = 0
    if SHIFT + BITS < 32:
        goal = load_u64(known + GOAL)
    before, total = exclusive_sum(mine, SCRATCH, WARPS=WARPS)
    if SHIFT + BITS == 32:
        goal = multiply_high_u64(share, total << (64 - PROBABILITY_BITS))
        goal = goal if goal > 0 else 1
    digit = -1
    rest = 0
    for j in unrolled((1 << BITS) // (32 * WARPS)):
        if before < goal and before + own[j] >= goal:
            digit = first - j
            rest = goal - before
        before = before + own[j]
    if digit >= 0:
        key = prefix | (digit << SHIFT)
        store_u32(known + MASS_KEY, key)
        if SHIFT > 0:
            store_u64(known + GOAL, rest)
        else:
            store_u32(known + MASS_COUNT, fewest(weight_of(key_bits(key), peak, scale), rest))


@device
def fewest(weight: U64, goal: U64) -> U32:
    """Return the smallest number of weights that reaches the goal; at most 2^20."""
    count = 0
    step = i32(19)
    while step >= 0:
        if (count + (1 << step)) * weight < goal:
            count = count + (1 << step)
        step = i32(step - 1)
    return count + 1


def mass_specs(slice_size: int) -> list[KernelSpec]:
    """Return ``select_mass`` for every digit, in order."""
    made = []
    for shift, bits in DIGITS:
        constants: dict[str, Constant] = {"BITS": bits, "SHIFT": shift, "SLICE": slice_size, "WARPS": DEFAULT_WARPS}
        items, shared = tuple(sorted(constants.items())), mass_shared_bytes(bits)
        made.append(KernelSpec(select_mass, items, 32 * DEFAULT_WARPS, shared, ctas_per_sm=2, has_ticket=True))
    return made
