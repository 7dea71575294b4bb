"""The best token of logits as a maximum of keys: a larger logit, then a lower id, has the larger key.

So the best token does not depend on the order in which lanes, warps and CTAs compare. A logit that is NaN or infinite
has the largest key of all, no logit at all the key 0.
"""

from __future__ import annotations

from ferrule_server.kernels.cuda import intrinsics as ptx
from ferrule_server.kernels.cuda import logit_rows
from ferrule_server.kernels.cuda.constants import LOG2
from ferrule_server.kernels.cuda.intrinsics import I32, U32, U64, Address, Offset, device
from ferrule_server.kernels.cuda.logit_rows import NEGATIVE_INFINITY
from ferrule_server.kernels.cuda.specialise import i32, registers, unrolled

__all__ = ["best_of_slice", "best_partial", "cta_max_key", "key_of", "max_key", "token_of", "warp_max_key"]

EXPONENT = 0x7F800000
NOT_FINITE = 0xFFFFFFFF
"""Above the order of every finite number."""
LAST_ID = 0x7FFFFFFF


@device
def key_of(bits: U32, token: I32) -> U64:
    """Return the key of a logit: its order, then the lower id; above 0, and below 2^63."""
    order = ptx.order_key(bits)
    if (bits & EXPONENT) == EXPONENT:
        order = NOT_FINITE
    return (order << 31) | (LAST_ID - token)


@device
def token_of(key: U64) -> I32:
    """Return the token of the largest key: -1 if there is none, or a logit is not finite."""
    token = i32(LAST_ID - (key & LAST_ID))
    if key == 0 or (key >> 31) == NOT_FINITE:
        token = i32(-1)
    return token


@device
def max_key(a: U64, b: U64) -> U64:
    """Return the larger key."""
    return b if b > a else a


@device
def warp_max_key(key: U64, *, COUNT: int) -> U64:
    """Return the largest key of the lanes that are equal modulo COUNT, a power of two."""
    for s in unrolled(5 - LOG2[COUNT]):
        high = ptx.shuffle_xor_u32(key >> 32, 16 >> s)
        low = ptx.shuffle_xor_u32(key & 0xFFFFFFFF, 16 >> s)
        key = max_key(key, (high << 32) | low)
    return key


@device
def best_of_slice(
    row: Address,
    begin: I32,
    vocab_size: I32,
    keys: Offset,
    *,
    STRONG: bool,
    MASKED: bool,
    SLICE: int,
    WARPS: int,
) -> U64:
    """Return in thread 0 the largest key of a slice of a row of logits.

    Args:
        row: As for ``load_slice``.
        begin: First token of the slice.
        vocab_size: Of the row.
        keys: 8 * WARPS bytes of shared memory, free again after the next barrier.
        STRONG: As for ``load_slice``.
        MASKED: Logits of -inf do not count.
        SLICE: As for ``load_slice``.
        WARPS: Per CTA.
    """
    words = registers(SLICE // (128 * WARPS))
    logit_rows.load_slice(row, begin, vocab_size, words, STRONG=STRONG, SLICE=SLICE, WARPS=WARPS)
    best = 0
    for g in unrolled(SLICE // (128 * WARPS)):
        for i in unrolled(4):
            token = i32(begin + (32 * WARPS * g + ptx.thread_id()) * 4 + i)
            key = key_of(words[g][i], token)
            is_counted = i32(words[g][i] != NEGATIVE_INFINITY) if MASKED else i32(token < vocab_size)
            if is_counted == 1:
                best = max_key(best, key)
    best = warp_max_key(best, COUNT=1)
    if (ptx.thread_id() & 31) == 0:
        ptx.shared_store_u64(i32(keys + (ptx.thread_id() >> 5) * 8), best)
    ptx.barrier()
    if ptx.thread_id() == 0:
        best = cta_max_key(keys, WARPS=WARPS)
    return best


@device
def cta_max_key(keys: Offset, *, WARPS: int) -> U64:
    """Return the largest of the keys that the warps left in shared memory."""
    best = ptx.shared_load_u64(keys)
    for warp in unrolled(1, WARPS):
        best = max_key(best, ptx.shared_load_u64(i32(keys + warp * 8)))
    return best


@device
def best_partial(partials: Address, count: I32, *, STEP: int) -> U64:
    """Return the largest of ``count`` keys that CTAs left STEP bytes apart; for a whole warp."""
    best = 0
    index = i32(ptx.thread_id() & 31)
    while index < count:
        best = max_key(best, ptx.load_relaxed_u64(partials + index * STEP))
        index = i32(index + 32)
    return warp_max_key(best, COUNT=1)
