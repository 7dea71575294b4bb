"""What the kernels over rows of logits share: slices of a row, the order of logits, sums over a CTA.

A row is cut into slices of a fixed number of tokens. The work is every slice of every row, dealt to CTAs in order, so
that no result depends on the grid; which thread holds which token depends on the token's id alone, so that no result
depends on where a row lies either. Beyond the vocabulary a slice reads as -inf.

A row is finished by the CTA that arrives last with a slice of it. No CTA waits for another one.
"""

from __future__ import annotations

from ferrule_server.kernels.cuda import intrinsics as ptx
from ferrule_server.kernels.cuda.intrinsics import F32, I32, U32, U64, Address, Offset, Vec4, device
from ferrule_server.kernels.cuda.specialise import i32, registers, unrolled

__all__ = [
    "DEFAULT_SLICE",
    "DEFAULT_WARPS",
    "ID_BITS",
    "NEGATIVE_INFINITY",
    "exclusive_sum",
    "is_kept",
    "key_bits",
    "load_four",
    "load_slice",
    "num_slices",
    "rank_of",
]

DEFAULT_SLICE = 8192
DEFAULT_WARPS = 16
"""Four loads of 16 bytes for each thread of a CTA: one CTA alone keeps 32 KiB of a row in flight."""
ID_BITS = 20

NEGATIVE_INFINITY = 0xFF800000


def num_slices(vocab_size: int, slice_size: int = DEFAULT_SLICE, num_threads: int = 32 * DEFAULT_WARPS) -> int:
    """Return the number of slices of a row.

    Raises:
        ValueError: The vocabulary has more slices than a CTA has threads: the last CTA gives each thread one.
    """
    count = -(-vocab_size // slice_size)
    if count > num_threads or vocab_size >= 1 << ID_BITS:
        raise ValueError(f"a vocabulary of {vocab_size} is {count} slices, more than {num_threads}, or not below 2^20")
    return count


@device
def key_bits(key: U32) -> U32:
    """Return the bits of the float whose ``order_key`` is given."""
    return key ^ (0x80000000 if key >= 0x80000000 else 0xFFFFFFFF)


@device
def rank_of(bits: U32, token: I32) -> U64:
    """Return a number of 52 bits that rises with the rank: by falling logit, then by rising id."""
    return ((ptx.order_key(bits) ^ 0xFFFFFFFF) << ID_BITS) | token


@device
def is_kept(bits: U32, token: I32, border: F32, last: I32) -> I32:
    """Return 1 for a logit above the border, or at it where the id is at most ``last``; else 0."""
    value = ptx.bits_float(bits)
    return i32(value > border) | (i32(value == border) & i32(token <= last))


@device
def load_slice(
    row: Address, begin: I32, vocab_size: I32, words: list[Vec4], *, STRONG: bool, SLICE: int, WARPS: int
) -> None:
    """Load a slice, coalesced: ``words[g]`` is the bits of tokens ``begin + 4 (32 WARPS g + thread)`` and the next 3.

    Args:
        row: Of the first logit of the row; a multiple of 4, and the fast path needs one of 16.
        begin: First token of the slice.
        vocab_size: Of the row.
        words: registers(SLICE // (128 * WARPS)).
        STRONG: Other CTAs of this grid may have written the row.
        SLICE: Tokens in a slice, a multiple of 128 * WARPS.
        WARPS: Per CTA.
    """
    assert SLICE % (128 * WARPS) == 0
    first = i32(begin + ptx.thread_id() * 4)
    for g in unrolled(SLICE // (128 * WARPS)):
        words[g] = (0, 0, 0, 0)
    if (row & 15) == 0 and begin + SLICE <= vocab_size:
        for g in unrolled(SLICE // (128 * WARPS)):
            if STRONG:
                words[g] = ptx.load_relaxed_v4(row + i32(first + 128 * WARPS * g) * 4)
            else:
                words[g] = ptx.load_v4(row + i32(first + 128 * WARPS * g) * 4)
    else:
        for g in unrolled(SLICE // (128 * WARPS)):
            words[g] = _load_guarded(row, i32(first + 128 * WARPS * g), vocab_size, STRONG=STRONG)


@device
def load_four(row: Address, first: I32, vocab_size: I32) -> Vec4:
    """Return the bits of four tokens of a row, from ``first`` on."""
    words = (0, 0, 0, 0)
    if (row & 15) == 0 and first + 4 <= vocab_size:
        words = ptx.load_v4(row + first * 4)
    else:
        words = _load_guarded(row, first, vocab_size, STRONG=False)
    return words


@device
def _load_guarded(row: Address, first: I32, vocab_size: I32, *, STRONG: bool) -> Vec4:
    bits = registers(4, init=NEGATIVE_INFINITY)
    for i in unrolled(4):
        if first + i < vocab_size:
            if STRONG:
                bits[i] = ptx.load_relaxed_u32(row + (first + i) * 4)
            else:
                bits[i] = ptx.load_u32(row + (first + i) * 4)
    return (bits[0], bits[1], bits[2], bits[3])


@device
def exclusive_sum(value: U64, scratch: Offset, *, WARPS: int) -> tuple[U64, U64]:
    """Return the sum of ``value`` over the threads before this one, and over all; the total is below 2^63.

    Args:
        value: This thread's.
        scratch: 8 * WARPS bytes of shared memory, free again after the next barrier.
        WARPS: Per CTA.
    """
    lane = i32(ptx.thread_id() & 31)
    warp = i32(ptx.thread_id() >> 5)
    upto = value
    for step in unrolled(5):
        other = i32((lane - (1 << step)) & 31)
        parted = ptx.shuffle_u32(upto & 0xFFFFFFFF, other) | (ptx.shuffle_u32(upto >> 32, other) << 32)
        upto = upto + (parted & -i32(lane >= 1 << step))
    if lane == 31:
        ptx.shared_store_u64(scratch + warp * 8, upto)
    ptx.barrier()
    before = upto - value
    total = 0
    for w in unrolled(WARPS):
        part = ptx.shared_load_u64(scratch + w * 8)
        before = before + (part & -i32(warp > w))
        total = total + part
    return (before, total)
