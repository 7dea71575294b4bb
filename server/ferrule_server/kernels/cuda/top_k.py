"""The k largest logits of rows in rank order: exact radix select by several CTAs per row, then a small sort.

Maths: a float's key is a 32-bit integer that rises with it. The key of the k-th largest logit is found digit by digit
from the top: ``select_count`` counts, for every value of a digit, the keys that agree with the digits found so far; the
CTA that arrives last walks the counts down to the k-th. After the last digit the key is whole, and of the logits equal
to it ("ties") the number still wanted is known; the lowest ids have precedence. ``gather_top_k`` collects the ids of
larger keys in any order, and the last CTA adds the ties, reading again the slices that hold them, and sorts. Only
integers are added atomically: nothing depends on who comes first.

Chain of launches: ``select_count`` once per digit (11, 11 and 10 bits), ``gather_top_k``. ``sample`` begins alike.

Bytes moved: 4 per logit and launch (from L2 after the first), 4 to 8 KiB of counts per row and digit.

Source: radix select as in Merrill and Grimshaw, "High Performance and Scalable Radix Sorting", 2011; bitonic sort after
Batcher, "Sorting networks and their applications", 1968.
"""

from __future__ import annotations

from collections.abc import Callable

from ferrule_server.kernels.cuda.intrinsics import (
    I32,
    Address,
    add_wrapping,
    atomic_add_u32,
    atomic_fetch_add_u32,
    barrier,
    count_ones,
    cta_id,
    device,
    grid_launch_dependents,
    grid_wait,
    load_f32,
    load_i32,
    load_relaxed_u32,
    load_relaxed_u64,
    load_u32,
    max_u32,
    num_ctas,
    order_key,
    shared_add_u32,
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
    KEY_NEGATIVE_INFINITY,
    arrive,
    block_max,
    compare,
    exclusive_sum,
    load_four,
    load_slice,
)
from ferrule_server.kernels.cuda.spec import KernelSpec, ModelShape
from ferrule_server.kernels.cuda.specialise import Constant, i32, registers, unrolled

__all__ = [
    "COUNT",
    "DIGITS",
    "KEY",
    "LARGEST_K",
    "PEAK",
    "RECORD_BYTES",
    "STATE_BYTES",
    "count_shared_bytes",
    "gather_shared_bytes",
    "gather_top_k",
    "select_count",
    "select_specs",
    "specs",
    "variants",
]

DIGITS = ((21, 11), (10, 11), (0, 10))
"""Lowest bit and number of bits of each digit, from the top."""
LARGEST_K = 1024
RECORD_BYTES = 16

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


def gather_shared_bytes(num_slices: int, largest_k: int = LARGEST_K) -> int:
    """Return the dynamic shared memory of a CTA of ``gather_top_k``."""
    return BINS + 8 * largest_k + 8 * num_slices


def gather_top_k(
    logits: Address,
    records: Address,
    state: Address,
    candidates: Address,
    partials: Address,
    tickets: Address,
    places: Address,
    top_ids: Address,
    top_logits: Address,
    num_rows: I32,
    vocab_size: I32,
    num_slices: I32,
    *,
    K: int,
    SLICE: int,
    WARPS: int,
) -> None:
    """Collect the k largest logits of each row, largest first, the lowest id first among equals.

    Launch: any grid of at least one CTA (``num_ctas_needed`` at most is of use), 32 * WARPS threads,
    ``gather_shared_bytes``.

    Args:
        logits: float32 [any, vocab_size].
        records: int32 [num_rows, 4]: row of ``logits`` (-1: nothing to do), k, 0, 0; ``min(k, vocab_size) <= K``.
        state: What ``select_count`` found, of all digits.
        candidates: u64 [num_rows, K], scratch.
        partials: [num_rows, num_slices, 16 bytes], scratch.
        tickets: int32 [num_rows], zero before the first launch, left zero.
        places: u32 [num_rows], likewise: how many candidates have come.
        top_ids: int32 [num_rows, K]; the first ``min(k, vocab_size)`` of a row are written.
        top_logits: float32 [num_rows, K], likewise.
        num_rows: Records.
        vocab_size: Logits of a row, below 2^20.
        num_slices: Of a row, at most 32 * WARPS.
        K: Room for one row, a power of two.
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
            k = load_i32(records + slot * RECORD_BYTES + 4)
            if row >= 0 and k > 0:
                source = logits + row * (vocab_size * 4)
                border = load_u32(state + slot * STATE_BYTES + KEY)
                num_ties = load_u32(state + slot * STATE_BYTES + COUNT)
                if k >= vocab_size:
                    k = vocab_size + 0
                    border = -1
                    num_ties = 0
                words = registers(SLICE // WARPS // 128)
                for g in unrolled(SLICE // WARPS // 128):
                    words[g] = (0, 0, 0, 0)
                load_slice(source, i32(part * SLICE), vocab_size, words, THREADS=32 * WARPS, SLICE=SLICE)
                above, equal = compare(words, border, COUNT=SLICE // WARPS // 128)
                _before, ties = exclusive_sum(count_ones(equal), SCRATCH, WARPS=WARPS)
                if thread == 0:
                    store_u32(partials + (slot * num_slices + part) * 16, ties)
                while above > 0:
                    bit = count_ones((above & -above) - 1)
                    above = above & (above - 1)
                    token = i32(part * SLICE + (32 * WARPS * (bit >> 2) + thread) * 4 + (bit & 3))
                    if token < vocab_size:
                        key = order_key(load_u32(source + token * 4))
                        place = atomic_fetch_add_u32(places + slot * 4, 1)
                        store_u64(candidates + (slot * K + place) * 8, rank_of(key, token))
                is_last = arrive(tickets + slot * 4, num_slices, FLAG, ALL_STORE=True)
                if is_last == 1:
                    if thread == 0:
                        store_u32(places + slot * 4, 0)
                    place = i32(thread)
                    while place < k - num_ties:
                        found = load_relaxed_u64(candidates + (slot * K + place) * 8)
                        shared_store_u64(BINS + place * 8, found)
                        place = i32(place + 32 * WARPS)
                    if num_ties > 0:
                        add_ties(
                            source,
                            partials + slot * (num_slices * 16),
                            vocab_size,
                            num_slices,
                            border,
                            i32(k - num_ties),
                            num_ties,
                            K=K,
                            SLICE=SLICE,
                            WARPS=WARPS,
                        )
                    sort(i32(k), WARPS=WARPS)
                    place = i32(thread)
                    while place < k:
                        token = i32(shared_load_u64(BINS + place * 8) & 0xFFFFF)
                        store_i32(top_ids + (slot * K + place) * 4, token)
                        store_f32(top_logits + (slot * K + place) * 4, load_f32(source + token * 4))
                        place = i32(place + 32 * WARPS)
            part = i32(part + num_ctas())


@device
def rank_of(key: int, token: int) -> int:
    """Return a number that rises with the rank: by falling key, then by rising id."""
    return ((key ^ 0xFFFFFFFF) << 20) | token


@device
def add_ties(
    source: Address,
    partials: Address,
    vocab_size: I32,
    num_slices: I32,
    border: int,
    num_above: I32,
    num_ties: int,
    *,
    K: int,
    SLICE: int,
    WARPS: int,
) -> None:
    """Put the lowest ids whose key is ``border`` behind the ``num_above`` candidates in shared memory."""
    thread = i32(thread_id())
    ties = 0
    if thread < num_slices:
        ties = load_relaxed_u32(partials + thread * 16)
    before, _total = exclusive_sum(ties, SCRATCH, WARPS=WARPS)
    if thread < num_slices:
        shared_store_u32(BINS + 8 * K + thread * 8, ties)
        shared_store_u32(BINS + 8 * K + thread * 8 + 4, before)
    barrier()
    part = i32(0)
    while part < num_slices:
        if shared_load_u32(BINS + 8 * K + part * 8) > 0 and shared_load_u32(BINS + 8 * K + part * 8 + 4) < num_ties:
            equal = 0
            group = i32(0)
            while group < SLICE // WARPS // 128:
                first = i32(part * SLICE + thread * (SLICE // WARPS // 32) + group * 4)
                words = load_four(source, first, vocab_size)
                for i in unrolled(4):
                    equal = equal | (i32(order_key(words[i]) == border) << (group * 4 + i))
                group = i32(group + 1)
            barrier()
            place, _sum = exclusive_sum(count_ones(equal), SCRATCH, WARPS=WARPS)
            place = place + shared_load_u32(BINS + 8 * K + part * 8 + 4)
            while equal > 0 and place < num_ties:
                token = i32(part * SLICE + thread * (SLICE // WARPS // 32) + count_ones((equal & -equal) - 1))
                shared_store_u64(BINS + (num_above + place) * 8, rank_of(border, token))
                equal = equal & (equal - 1)
                place = place + 1
        part = i32(part + 1)


@device
def sort(count: I32, *, WARPS: int) -> None:
    """Sort ``count`` numbers in shared memory, ascending; a bitonic network over the next power of two."""
    thread = i32(thread_id())
    size = i32(1)
    while size < count:
        size = i32(size << 1)
    place = i32(count + thread)
    while place < size:
        shared_store_u64(BINS + place * 8, 1 << 62)
        place = i32(place + 32 * WARPS)
    barrier()
    width = i32(2)
    while width <= size:
        stride = i32(width >> 1)
        while stride > 0:
            pair = i32(thread)
            while pair < size >> 1:
                low = i32(((pair & -stride) << 1) | (pair & (stride - 1)))
                a = shared_load_u64(BINS + low * 8)
                b = shared_load_u64(BINS + (low + stride) * 8)
                is_rising = 1 if (low & width) == 0 else 0
                is_over = 1 if a > b else 0
                if is_rising == is_over:
                    shared_store_u64(BINS + low * 8, b)
                    shared_store_u64(BINS + (low + stride) * 8, a)
                pair = i32(pair + 32 * WARPS)
            barrier()
            stride = i32(stride >> 1)
        width = i32(width << 1)


def select_specs(slice_size: int) -> list[KernelSpec]:
    """Return ``select_count`` for every digit, in order."""
    made = []
    for shift, bits in DIGITS:
        constants: dict[str, Constant] = {"BITS": bits, "SHIFT": shift, "SLICE": slice_size, "WARPS": DEFAULT_WARPS}
        made.append(_spec(select_count, constants, count_shared_bytes(bits)))
    return made


def specs(shape: ModelShape) -> list[KernelSpec]:
    """Return the kernels a model of this shape needs, in the order of their launches."""
    return _specs(shape, DEFAULT_SLICE)


def variants(shape: ModelShape) -> list[KernelSpec]:
    """Return what a sweep on a GPU tries: the size of slices, which changes no result."""
    return [spec for size in (1024, 2048, 4096) for spec in _specs(shape, size)]


def _specs(shape: ModelShape, slice_size: int) -> list[KernelSpec]:
    constants: dict[str, Constant] = {"K": LARGEST_K, "SLICE": slice_size, "WARPS": DEFAULT_WARPS}
    gather = _spec(gather_top_k, constants, gather_shared_bytes(-(-shape.vocab_size // slice_size)))
    return [*select_specs(slice_size), gather]


def _spec(kernel: Callable[..., None], constants: dict[str, Constant], shared: int) -> KernelSpec:
    items = tuple(sorted(constants.items()))
    return KernelSpec(kernel, items, 32 * DEFAULT_WARPS, shared, ctas_per_sm=2, has_ticket=True)
