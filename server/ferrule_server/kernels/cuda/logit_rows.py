"""What the kernels over rows of logits share: slices of a row, keys that order as floats do, sums over a CTA.

A row is cut into slices of a fixed number of tokens. The work is every slice of every row, dealt to CTAs in order, so
that no result depends on the grid; which thread holds which token depends on the token's id alone, so that no result
depends on where a row lies either. Beyond the vocabulary a slice reads as -inf.

A row is finished by the CTA that arrives last with a slice of it. Nobody waits for anybody.
"""

from __future__ import annotations

from ferrule_server.kernels.cuda.intrinsics import (
    I32,
    U32,
    U64,
    Address,
    Offset,
    Vec4,
    barrier,
    device,
    load_u32,
    load_v4,
    max_u32,
    order_key,
    shared_load_u32,
    shared_load_u64,
    shared_store_u32,
    shared_store_u64,
    shuffle_u32,
    shuffle_xor_u32,
    thread_id,
)
from ferrule_server.kernels.cuda.specialise import i32, unrolled

__all__ = [
    "DEFAULT_SLICE",
    "DEFAULT_WARPS",
    "KEY_INFINITY",
    "KEY_NEGATIVE_INFINITY",
    "block_max",
    "compare",
    "exclusive_sum",
    "key_bits",
    "load_four",
    "load_slice",
    "num_ctas_needed",
    "num_slices",
]

DEFAULT_SLICE = 4096
DEFAULT_WARPS = 8

NEGATIVE_INFINITY = 0xFF800000
KEY_INFINITY = 0xFF800000
"""Key of +inf: NaN with a clear sign lies above it."""
KEY_NEGATIVE_INFINITY = 0x007FFFFF
"""Key of -inf: NaN with a set sign lies below it."""


def num_slices(vocab_size: int, slice_size: int = DEFAULT_SLICE, num_threads: int = 32 * DEFAULT_WARPS) -> int:
    """Return the number of slices of a row.

    Raises:
        ValueError: The vocabulary has more slices than a CTA has threads: the last CTA gives each thread one.
    """
    count = -(-vocab_size // slice_size)
    if count > num_threads or vocab_size >= 1 << 20:
        raise ValueError(f"a vocabulary of {vocab_size} is {count} slices, more than {num_threads}, or not below 2^20")
    return count


def num_ctas_needed(num_rows: int, vocab_size: int, slice_size: int = DEFAULT_SLICE) -> int:
    """Return how many CTAs find work; more are of no use, fewer share it."""
    return num_rows * -(-vocab_size // slice_size)


@device
def key_bits(key: U32) -> U32:
    """Return the bits of the float of a key."""
    bits = key ^ 0xFFFFFFFF
    if key >= 0x80000000:
        bits = key ^ 0x80000000
    return bits


@device
def load_slice(row: Address, begin: I32, vocab_size: I32, words: list[Vec4], *, THREADS: int, SLICE: int) -> None:
    """Load a slice, coalesced: ``words[g]`` is the bits of tokens ``begin + 4 (THREADS g + thread)`` and the next 3.

    Args:
        row: Of the first logit of the row; a multiple of 4, and the fast path needs one of 16.
        begin: First token of the slice.
        vocab_size: Of the row.
        words: registers(SLICE // THREADS // 4).
        THREADS: Per CTA.
        SLICE: Tokens in a slice.
    """
    first = i32(begin + thread_id() * 4)
    if (row & 15) == 0 and begin + SLICE <= vocab_size:
        for g in unrolled(SLICE // THREADS // 4):
            words[g] = load_v4(row + i32(first + 4 * THREADS * g) * 4)
    else:
        for g in unrolled(SLICE // THREADS // 4):
            words[g] = _load_guarded(row, i32(first + 4 * THREADS * g), vocab_size)


@device
def load_four(row: Address, first: I32, vocab_size: I32) -> Vec4:
    """Return the bits of four tokens of a row, from ``first`` on."""
    words = (0, 0, 0, 0)
    if (row & 15) == 0 and first + 4 <= vocab_size:
        words = load_v4(row + first * 4)
    else:
        words = _load_guarded(row, first, vocab_size)
    return words


@device
def _load_guarded(row: Address, first: I32, vocab_size: I32) -> Vec4:
    a = NEGATIVE_INFINITY
    b = NEGATIVE_INFINITY
    c = NEGATIVE_INFINITY
    d = NEGATIVE_INFINITY
    if first < vocab_size:
        a = load_u32(row + first * 4)
    if first + 1 < vocab_size:
        b = load_u32(row + first * 4 + 4)
    if first + 2 < vocab_size:
        c = load_u32(row + first * 4 + 8)
    if first + 3 < vocab_size:
        d = load_u32(row + first * 4 + 12)
    return (a, b, c, d)


@device
def compare(words: list[Vec4], border: int, *, COUNT: int) -> tuple[U32, U32]:
    """Return one bit for each of the 4 * COUNT <= 32 logits: its key is above ``border``, its key is ``border``."""
    above = 0
    equal = 0
    for g in unrolled(COUNT):
        for i in unrolled(4):
            key = order_key(words[g][i])
            above = above | (i32(key > border) << (4 * g + i))
            equal = equal | (i32(key == border) << (4 * g + i))
    return (above, equal)


@device
def exclusive_sum(value: U64, scratch: Offset, *, WARPS: int) -> tuple[U64, U64]:
    """Return the sum of ``value`` over the threads before this one, and over all; the total is below 2^63.

    Args:
        value: This thread's.
        scratch: 8 * WARPS bytes of shared memory, free again after the next barrier.
        WARPS: Per CTA.
    """
    lane = i32(thread_id() & 31)
    warp = i32(thread_id() >> 5)
    upto = value
    for step in unrolled(5):
        other = i32((lane - (1 << step)) & 31)
        parted = shuffle_u32(upto & 0xFFFFFFFF, other) | (shuffle_u32(upto >> 32, other) << 32)
        upto = upto + (parted & -i32(lane >= 1 << step))
    if lane == 31:
        shared_store_u64(scratch + warp * 8, upto)
    barrier()
    before = upto - value
    total = 0
    for w in unrolled(WARPS):
        part = shared_load_u64(scratch + w * 8)
        before = before + (part & -i32(warp > w))
        total = total + part
    return (before, total)


@device
def block_max(value: U32, scratch: Offset, *, WARPS: int) -> U32:
    """Return the largest ``value`` of the CTA, in all threads; ``scratch`` (4 * WARPS bytes) as in the sum above."""
    largest = value
    for step in unrolled(5):
        largest = max_u32(largest, shuffle_xor_u32(largest, 1 << step))
    if (thread_id() & 31) == 0:
        shared_store_u32(scratch + (thread_id() >> 5) * 4, largest)
    barrier()
    for w in unrolled(WARPS):
        largest = max_u32(largest, shared_load_u32(scratch + w * 4))
    return largest
