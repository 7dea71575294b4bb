"""Sixteen tokens times sixteen query rows in registers: loads of K and V, scores, masks, softmax and the sums.

How the fragments lie is told in :mod:`ferrule_server.kernels.cuda.attention_mma`.
"""

from __future__ import annotations

from ferrule_server.kernels.cuda.attention_mma_memory import TAIL_PAD, TAIL_TOKENS, Registers, flag_offset, tail_offset
from ferrule_server.kernels.cuda.intrinsics import (
    I32,
    Address,
    bf16_high,
    bf16_low,
    device,
    exp2,
    load_v4,
    max_f32,
    mma_bf16,
    pack_bf16,
    permute_bytes,
    select_f32,
    shared_load_i32,
    shared_load_u64,
    shared_load_v4,
    shuffle_xor_f32,
)
from ferrule_server.kernels.cuda.partials import MASKED
from ferrule_server.kernels.cuda.specialise import i32, registers, unrolled

__all__ = [
    "add_values",
    "hide_future",
    "hide_outside_tree",
    "load_keys",
    "load_sight",
    "load_values",
    "no_tile",
    "scale_down",
    "scores",
    "soften",
    "tail_keys",
    "tail_values",
]

SCALE_LOG2 = {64: 0.18033688011112042, 128: 0.12751743082459868}
"""log2(e) / sqrt(head_dim)."""
HALVES = (0x5410, 0x7632)
"""Byte selectors that put the lower, and the upper, halves of two words together."""


# Loads of one tile of 16 tokens: k[i, s] is token 8 i + g at dims 32 s + 8 t, v[i, h] dims 64 h + 8 g of token 2 t,
# 2 t + 1, 2 t + 8, 2 t + 9.


@device
def no_tile(k: Registers, v: Registers, *, HEAD_DIM: int) -> None:
    """Give the fragments a value where no tile is loaded."""
    for i in unrolled(2):
        for s in unrolled(HEAD_DIM // 32):
            k[i, s] = (0, 0, 0, 0)
    for i in unrolled(4):
        for h in unrolled(HEAD_DIM // 64):
            v[i, h] = (0, 0, 0, 0)


@device
def load_keys(k: Registers, base: Address, g: I32, t: I32, *, HEAD_DIM: int) -> None:
    """Begin to load the K of a tile."""
    place = base + i32(g * (HEAD_DIM * 2) + t * 16)
    for i in unrolled(2):
        for s in unrolled(HEAD_DIM // 32):
            k[i, s] = load_v4(place + (i * HEAD_DIM * 16 + s * 64))


@device
def load_values(v: Registers, base: Address, g: I32, t: I32, *, HEAD_DIM: int) -> None:
    """Begin to load the V of a tile."""
    place = base + i32(t * (HEAD_DIM * 4) + g * 16)
    for i in unrolled(4):
        for h in unrolled(HEAD_DIM // 64):
            v[i, h] = load_v4(place + ((i % 2 + i // 2 * 8) * HEAD_DIM * 2 + h * 128))


@device
def tail_keys(k: Registers, token: I32, g: I32, t: I32, *, HEAD_DIM: int) -> None:
    """Read the K of a tile of the tail; ``token`` counts from its beginning."""
    place = i32(tail_offset(HEAD_DIM=HEAD_DIM) + (token + g) * (HEAD_DIM * 2 + TAIL_PAD) + t * 16)
    for i in unrolled(2):
        for s in unrolled(HEAD_DIM // 32):
            k[i, s] = shared_load_v4(place + (i * 8 * (HEAD_DIM * 2 + TAIL_PAD) + s * 64))


@device
def tail_values(v: Registers, token: I32, g: I32, t: I32, *, HEAD_DIM: int) -> None:
    """Read the V of a tile of the tail; ``token`` counts from its beginning."""
    row = i32(token + 2 * t + TAIL_TOKENS)
    place = i32(tail_offset(HEAD_DIM=HEAD_DIM) + row * (HEAD_DIM * 2 + TAIL_PAD) + g * 16)
    for i in unrolled(4):
        for h in unrolled(HEAD_DIM // 64):
            v[i, h] = shared_load_v4(place + ((i % 2 + i // 2 * 8) * (HEAD_DIM * 2 + TAIL_PAD) + h * 128))


# One tile. x[i, e] is the C layout of the scores of tokens 8 i ..: rows g, g, g + 8, g + 8 and columns 2 t, 2 t + 1,
# 2 t, 2 t + 1.


@device
def load_sight(sight: Registers, g: I32, *, HEAD_DIM: int, WARPS: int, TREE: bool) -> None:
    """Load what rows g and g + 8 see: the last position, or with TREE 64 bits."""
    place = i32(flag_offset(HEAD_DIM=HEAD_DIM, WARPS=WARPS) + 16 + g * 8)
    for r in unrolled(2):
        if TREE:
            sight[r] = shared_load_u64(place + 64 * r)
        else:
            sight[r] = shared_load_i32(place + 64 * r)


@device
def scores(x: Registers, k: Registers, lane: I32, *, HEAD_DIM: int) -> None:
    """Multiply the query rows with 16 tokens; the results are scaled for ``exp2``."""
    sums = registers(2)
    for i in unrolled(2):
        sums[i] = (0.0, 0.0, 0.0, 0.0)
    for s in unrolled(HEAD_DIM // 32):
        for step in unrolled(2):
            fragment = shared_load_v4(i32(lane * 16 + (2 * s + step) * 512))
            for i in unrolled(2):
                sums[i] = mma_bf16(fragment, (k[i, s][2 * step], k[i, s][2 * step + 1]), sums[i])
    for i in unrolled(2):
        for e in unrolled(4):
            x[i, e] = sums[i][e] * SCALE_LOG2[HEAD_DIM]


@device
def hide_future(x: Registers, sight: Registers, token: I32) -> None:
    """Hide what comes after a row's own position; ``token`` is that of the lane's first column."""
    for i in unrolled(2):
        for e in unrolled(4):
            x[i, e] = select_f32(i32(token + (8 * i + e % 2)) > sight[e // 2], MASKED, x[i, e])


@device
def hide_outside_tree(x: Registers, sight: Registers, new: I32, end: I32) -> None:
    """Hide new tokens whose bit is not set; ``new`` (of the lane's first column) and ``end`` count from the first."""
    for i in unrolled(2):
        for e in unrolled(2):
            j = i32(new + (8 * i + e))
            for r in unrolled(2):
                hides = (j >= 0) & ((j >= end) | (((sight[r] >> (j & 63)) & 1) == 0))
                x[i, 2 * r + e] = select_f32(hides, MASKED, x[i, 2 * r + e])


@device
def soften(p: Registers, decay: Registers, x: Registers, top: Registers, total: Registers) -> None:
    """Turn scores into weights: bf16 in A layout; updates each row's maximum and this lane's part of its sum."""
    for r in unrolled(2):
        peak = max_f32(max_f32(x[0, 2 * r], x[0, 2 * r + 1]), max_f32(x[1, 2 * r], x[1, 2 * r + 1]))
        peak = max_f32(peak, shuffle_xor_f32(peak, 1))
        peak = max_f32(top[r], max_f32(peak, shuffle_xor_f32(peak, 2)))
        decay[r] = exp2(top[r] - peak)
        top[r] = peak
        for i in unrolled(2):
            p[2 * i + r] = pack_bf16(exp2(x[i, 2 * r] - peak), exp2(x[i, 2 * r + 1] - peak))
        sums = bf16_low(p[r]) + bf16_high(p[r]) + (bf16_low(p[2 + r]) + bf16_high(p[2 + r]))
        total[r] = total[r] * decay[r] + sums


@device
def scale_down(acc: Registers, decay: Registers, *, HEAD_DIM: int) -> None:
    """Scale what was added up under an older maximum."""
    for h in unrolled(HEAD_DIM // 64):
        for j in unrolled(8):
            c = acc[h, j]
            acc[h, j] = (c[0] * decay[0], c[1] * decay[0], c[2] * decay[1], c[3] * decay[1])


@device
def add_values(acc: Registers, p: Registers, v: Registers, *, HEAD_DIM: int) -> None:
    """Add the weighted V of 16 tokens; tile j of half h has dim ``64 h + 8 n + j`` as column n."""
    for h in unrolled(HEAD_DIM // 64):
        for j in unrolled(8):
            low = permute_bytes(v[0, h][j // 2], v[1, h][j // 2], HALVES[j % 2])
            high = permute_bytes(v[2, h][j // 2], v[3, h][j // 2], HALVES[j % 2])
            acc[h, j] = mma_bf16((p[0], p[1], p[2], p[3]), (low, high), acc[h, j])
