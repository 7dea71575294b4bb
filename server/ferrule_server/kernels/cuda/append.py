"""What stands in front of attention: q/k norm and RoPE of query rows and of new keys, and the append of K and V.

Every CTA whose splits hold a new token computes its K again from the raw output of the projection, keeps K and V in
shared memory and never reads them back; exactly one CTA writes them to the pool. All in float32, rounded to bf16 once
(``qk_norm_rope`` of :mod:`ferrule_server.kernels.reference`).

A head is held by HEAD_DIM / 16 neighbouring lanes: lane t has values 8t..8t+7 and, HEAD_DIM / 2 further, the partners
that RoPE turns them with (Hugging Face's pairing).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ferrule_server.kernels.cuda import intrinsics as ptx
from ferrule_server.kernels.cuda.constants import LOG2
from ferrule_server.kernels.cuda.intrinsics import F32, I32, Address, device
from ferrule_server.kernels.cuda.specialise import i32, registers, unrolled
from ferrule_server.kernels.cuda.work_list import MAX_NEW

__all__ = ["Registers", "kv_address", "larger", "rope_table", "rotate_head", "shared_bytes", "smaller", "stage"]

Registers = Any
"""What ``registers`` makes: known to the specialiser alone, indexed by one or several constants."""

ROWS = 16
"""Query rows of a tile: heads of the group times tokens."""
FRAGMENT_WORDS = (0, 8, 512, 520)
"""Where the four words of 16 bytes of a row lie: two per mma step, the other row of the lane between them."""
NEW_PAD = 16
"""Bytes behind each new K and V in shared memory: spread what a quarter of a warp reads over the banks."""

# Shared memory of attention, by head_dim: Q; K and V of the new tokens; the folded sums of the segment and of those
# before it, then their maxima and sums of weights; the flag of the ticket; results of the warps, their maxima and sums.
_NEW_BYTES = {width: MAX_NEW * (width * 2 + NEW_PAD) for width in (64, 128)}
NEW_KEYS = {width: ROWS * width * 2 for width in (64, 128)}
NEW_VALUES = {width: NEW_KEYS[width] + _NEW_BYTES[width] for width in (64, 128)}
FOLDS = {width: NEW_VALUES[width] + _NEW_BYTES[width] for width in (64, 128)}
FOLD_ENDS = {width: FOLDS[width] + 2 * ROWS * width * 4 for width in (64, 128)}
FLAG = {width: FOLD_ENDS[width] + 2 * ROWS * width * 2 for width in (64, 128)}
SLOTS = {width: FLAG[width] + 16 for width in (64, 128)}


def shared_bytes(head_dim: int, *, WARPS: int) -> int:
    """Return the dynamic shared memory of attention in bytes."""
    return SLOTS[head_dim] + WARPS * ROWS * (head_dim * 4 + 8)


def rope_table(inverse_frequencies: Tensor, max_context: int) -> Tensor:
    """Return the rotation of every position: default and Llama-3 RoPE differ in the frequencies alone.

    Args:
        inverse_frequencies: float32 [head_dim / 2], radians per position.
        max_context: Positions.

    Returns:
        float32 [max_context, head_dim]: cosines of all pairs, then sines; on the device of the frequencies.
    """
    positions = torch.arange(max_context, dtype=torch.float32, device=inverse_frequencies.device)
    angles = torch.outer(positions, inverse_frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=1).contiguous()


@device
def kv_address(
    heads: Address, block: I32, token: I32, block_stride: Address, *, BLOCK_SIZE: int, HEAD_DIM: int
) -> Address:
    """Return where the K of a token in a block lies; ``heads`` is where that of this layer and head begins in block 0.

    ``token`` may be a slot too: what counts is its place in the block. Only that place is 32 bits wide.
    """
    return heads + block * block_stride + i32((token & (BLOCK_SIZE - 1)) * (HEAD_DIM * 2))


@device
def smaller(a: I32, b: I32) -> I32:
    """Return the smaller of two."""
    return i32(a) if a < b else i32(b)


@device
def larger(a: I32, b: I32) -> I32:
    """Return the larger of two."""
    return i32(a) if a > b else i32(b)


@device
def token_of_row(row: I32, *, GROUP: int) -> I32:
    """Return which token of the tile a query row belongs to."""
    return i32((row * ((ROWS * ROWS + GROUP - 1) // GROUP)) >> 8)


@device
def rotate_head(
    source: Address,
    norm_weight: Address,
    rope_row: Address,
    lane: I32,
    eps: F32,
    low: Registers,
    high: Registers,
    *,
    HEAD_DIM: int,
    QK_NORM: bool,
) -> None:
    """Fill ``low`` and ``high``, registers(4), with a head's normalised and rotated values, packed bf16.

    All lanes of the warp take part. ``lane`` counts the lanes of one head; ``low`` are values ``8 * lane`` and
    following, ``high`` their partners. ``rope_row`` is the row of the table of this token's position.
    """
    first = ptx.load_v4(source + lane * 16)
    second = ptx.load_v4(source + HEAD_DIM + lane * 16)
    if QK_NORM:
        first_weights = ptx.load_v4(norm_weight + lane * 16)
        second_weights = ptx.load_v4(norm_weight + HEAD_DIM + lane * 16)
    cos = registers(2)
    sin = registers(2)
    for k in unrolled(2):
        cos[k] = ptx.load_v4(rope_row + lane * 32 + k * 16)
        sin[k] = ptx.load_v4(rope_row + HEAD_DIM * 2 + lane * 32 + k * 16)
    scale = 1.0
    if QK_NORM:
        squares = ptx.dot_bf16(ptx.dot_bf16(0.0, first, first), second, second)
        for s in unrolled(LOG2[HEAD_DIM // 16]):
            squares = squares + ptx.shuffle_xor_f32(squares, (HEAD_DIM // 32) >> s)
        scale = ptx.reciprocal_sqrt(ptx.fma(squares, 1.0 / HEAD_DIM, eps))
    x = registers(2, init=0.0)
    y = registers(2, init=0.0)
    for k in unrolled(4):
        x[0] = ptx.bf16_low(first[k]) * scale
        x[1] = ptx.bf16_high(first[k]) * scale
        y[0] = ptx.bf16_low(second[k]) * scale
        y[1] = ptx.bf16_high(second[k]) * scale
        if QK_NORM:
            x[0] = x[0] * ptx.bf16_low(first_weights[k])
            x[1] = x[1] * ptx.bf16_high(first_weights[k])
            y[0] = y[0] * ptx.bf16_low(second_weights[k])
            y[1] = y[1] * ptx.bf16_high(second_weights[k])
        turned = registers(2, init=0.0)
        partner = registers(2, init=0.0)
        for j in unrolled(2):
            cosine = ptx.bits_float(cos[k // 2][2 * (k % 2) + j])
            sine = ptx.bits_float(sin[k // 2][2 * (k % 2) + j])
            turned[j] = ptx.fma(x[j], cosine, -(y[j] * sine))
            partner[j] = ptx.fma(y[j], cosine, x[j] * sine)
        low[k] = ptx.pack_bf16(turned[0], turned[1])
        high[k] = ptx.pack_bf16(partner[0], partner[1])


@device
def stage(
    qkv: Address,
    q_norm: Address,
    k_norm: Address,
    rope: Address,
    positions: Address,
    slot_mapping: Address,
    heads: Address,
    block_stride: Address,
    v_offset: I32,
    first_row: I32,
    num_rows: I32,
    first_new_row: I32,
    first_new: I32,
    end_new: I32,
    writes_new: I32,
    kv_head: I32,
    num_kv_heads: I32,
    eps: F32,
    *,
    HEAD_DIM: int,
    GROUP: int,
    BLOCK_SIZE: int,
    QK_NORM: bool,
    WARPS: int,
) -> None:
    """Put the query rows of a tile and new tokens, from ``first_new`` (or 0) to ``end_new``, into shared memory.

    Both are normalised and rotated, and have lanes of their own: one pass serves a decode. With ``writes_new`` the
    tokens are written to their slots too. Q lies as ``[HEAD_DIM / 16 steps, 32 lanes, 4 words]``, which are the A
    fragments of the product, rows that are left over as zeros; K and V of each new token lie in one piece.
    """
    num_queries = i32(num_rows * GROUP)
    first_new = larger(first_new, 0)
    num_jobs = i32(num_queries + larger(i32(end_new - first_new), 0))
    lane = i32(ptx.thread_id() & (HEAD_DIM // 16 - 1))
    for step in unrolled(HEAD_DIM // 16 // WARPS):
        for r in unrolled(2):
            if i32((ptx.thread_id() & 31) >> 2) + 8 * r >= num_queries:
                place = i32(step * WARPS * 512 + ptx.thread_id() * 16 + 4 * r)
                ptx.shared_store_u32(place, 0)
                ptx.shared_store_u32(place + 8, 0)
    first = i32((ptx.thread_id() >> 5) * (512 // HEAD_DIM))
    while first < num_jobs:
        job = i32(first + ((ptx.thread_id() & 31) >> LOG2[HEAD_DIM // 16]))
        is_new = i32(job >= num_queries) & i32(job < num_jobs)
        query = smaller(job, i32(num_queries - 1))
        token = token_of_row(query, GROUP=GROUP)
        row = i32(first_row + token)
        head = i32(kv_head * GROUP + query - token * GROUP)
        weight = q_norm
        new = i32(first_new + job - num_queries)
        slot = i32(-1)
        if is_new != 0:
            row = i32(first_new_row + new)
            head = i32(GROUP * num_kv_heads + kv_head)
            weight = k_norm
            if writes_new != 0:
                slot = ptx.load_i32(slot_mapping + row * 4)
        position = ptx.load_i32(positions + row * 4)
        source = qkv + (row * ((GROUP + 2) * num_kv_heads) + head) * (HEAD_DIM * 2)
        parts = registers(4)
        value = source
        if is_new != 0:
            value = source + num_kv_heads * (HEAD_DIM * 2)
        parts[2] = ptx.load_v4(value + lane * 16)
        parts[3] = ptx.load_v4(value + HEAD_DIM + lane * 16)
        low = registers(4, init=0)
        high = registers(4, init=0)
        rope_row = rope + position * (HEAD_DIM * 4)
        rotate_head(source, weight, rope_row, lane, eps, low, high, HEAD_DIM=HEAD_DIM, QK_NORM=QK_NORM)
        parts[0] = (low[0], low[1], low[2], low[3])
        parts[1] = (high[0], high[1], high[2], high[3])
        if job < num_queries:
            # Lane ``lane & 3`` of slab ``lane >> 2`` in the first half of the head, likewise in the second half.
            place = i32((lane >> 2) * 1024 + ((job & 7) * 4 + (lane & 3)) * 16 + (job >> 3) * 4)
            for w in unrolled(4):
                ptx.shared_store_u32(place + FRAGMENT_WORDS[w], low[w])
                ptx.shared_store_u32(place + (FRAGMENT_WORDS[w] + HEAD_DIM * 16), high[w])
        if is_new != 0:
            place = i32(NEW_KEYS[HEAD_DIM] + new * (HEAD_DIM * 2 + NEW_PAD) + lane * 16)
            for i in unrolled(4):
                ptx.shared_store_v4(
                    place + (i // 2 * (NEW_VALUES[HEAD_DIM] - NEW_KEYS[HEAD_DIM]) + i % 2 * HEAD_DIM), parts[i]
                )
            if slot >= 0:
                block = slot >> LOG2[BLOCK_SIZE]
                target = kv_address(heads, block, slot, block_stride, BLOCK_SIZE=BLOCK_SIZE, HEAD_DIM=HEAD_DIM)
                for i in unrolled(4):
                    ptx.store_v4(target + (i // 2 * v_offset + i % 2 * HEAD_DIM) + lane * 16, parts[i])
        first = i32(first + WARPS * (512 // HEAD_DIM))
