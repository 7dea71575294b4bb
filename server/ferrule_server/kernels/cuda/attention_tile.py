"""A warp's part of attention: 16 tokens times up to 16 query rows in registers, from the loads to the weighted sums.

Both products run on ``mma.sync`` m16n8k16, and nothing changes lanes between them. Lane ``4 g + t``:

* ``S = Q K^T``, 8 tokens as the columns. ``k[i, s]`` is the 16 bytes at dims ``32 s + 8 t`` of token ``8 i + g``, which
  are the k-slots of two steps; Q is permuted alike by being stored with the same rule. ``x[i, 2 n + e]`` is the score
  of token ``8 i + 2 t + e`` and query row ``8 n + g``.
* ``O^T = V^T P^T``, 8 query rows as the columns. What a lane has in ``x``, packed to bf16, is its part of P^T.
  ``v[i, h]`` is the 16 bytes at dims ``64 h + 8 g`` of tokens 2t, 2t+1, 2t+8, 2t+9; byte permutes pair the tokens, so
  that row g of product m is dim ``8 g + 2 m`` and row ``g + 8`` the dim behind it. ``acc[n, h, m]`` holds these two
  dims, each for query rows ``8 n + 2 t`` and ``+ 1``: a lane ends up with 8 neighbouring dims of its query rows.

Query rows from 8 on (n = 1) have a softmax and a second product of their own, which tiles of up to 8 rows skip.
"""

from __future__ import annotations

from ferrule_server.kernels.cuda import intrinsics as ptx
from ferrule_server.kernels.cuda.append import NEW_KEYS, NEW_PAD, NEW_VALUES, Registers
from ferrule_server.kernels.cuda.intrinsics import F32, I32, Address, device
from ferrule_server.kernels.cuda.specialise import i32, registers, unrolled

__all__ = ["EMPTY", "TILE", "attend", "load_keys", "load_values", "scores", "take_new"]

TILE = 16
"""Tokens of one step of the online softmax."""
EMPTY = -1e30
"""Maximum of no scores, in log2 units."""
_MASKED = -1e38
"""A score left out: so far below EMPTY, scaled too, that its weight is 0 even there."""
_SCALE_LOG2 = {64: 0.18033688011112042, 128: 0.12751743082459868}
"""log2(e) / sqrt(head_dim)."""
_LOWER, _UPPER = 0x5410, 0x7632
"""Byte selectors that put the lower, and the upper, halves of two words together."""
_TOKENS = (0, 1, 8, 9)
"""Tokens of ``v[i]``, from the lane's first."""


@device
def load_keys(k: Registers, base: Address, left: I32, g: I32, t: I32, *, HEAD_DIM: int) -> None:
    """Begin to load the K of a tile, of which ``left`` tokens are in the pool; of others it stays what it was."""
    place = base + i32(g * (HEAD_DIM * 2) + t * 16)
    for i in unrolled(2):
        for s in unrolled(HEAD_DIM // 32):
            k[i, s] = ptx.load_if_v4(i32(left > i32(g + 8 * i)), place + (i * HEAD_DIM * 16 + s * 64), k[i, s])


@device
def load_values(v: Registers, base: Address, left: I32, g: I32, t: I32, *, HEAD_DIM: int) -> None:
    """Begin to load the V of a tile, likewise: what stays is finite, and its weight is 0."""
    place = base + i32(t * (HEAD_DIM * 4) + g * 16)
    for i in unrolled(4):
        for h in unrolled(HEAD_DIM // 64):
            v[i, h] = ptx.load_if_v4(
                i32(left > i32(2 * t + _TOKENS[i])), place + (_TOKENS[i] * HEAD_DIM * 2 + h * 128), v[i, h]
            )


@device
def take_new(k: Registers, v: Registers, token: I32, num_new: I32, g: I32, t: I32, *, HEAD_DIM: int) -> None:
    """Take new tokens of a tile from shared memory; ``token``, its first, counts from the first new one."""
    for i in unrolled(2):
        j = i32(token + g + 8 * i)
        for s in unrolled(HEAD_DIM // 32):
            place = i32(NEW_KEYS[HEAD_DIM] + j * (HEAD_DIM * 2 + NEW_PAD) + t * 16 + s * 64)
            k[i, s] = ptx.shared_load_if_v4(i32(j >= 0) & i32(j < num_new), place, k[i, s])
    for i in unrolled(4):
        j = i32(token + 2 * t + _TOKENS[i])
        for h in unrolled(HEAD_DIM // 64):
            place = i32(NEW_VALUES[HEAD_DIM] + j * (HEAD_DIM * 2 + NEW_PAD) + g * 16 + h * 128)
            v[i, h] = ptx.shared_load_if_v4(i32(j >= 0) & i32(j < num_new), place, v[i, h])


@device
def scores(x: Registers, k: Registers, lane: I32, *, HEAD_DIM: int) -> None:
    """Multiply the query rows with 16 tokens; each half of 128 dims has a sum of its own, so that none waits long."""
    sums = registers(2, HEAD_DIM // 64)
    for i in unrolled(2):
        for h in unrolled(HEAD_DIM // 64):
            sums[i, h] = (0.0, 0.0, 0.0, 0.0)
    for s in unrolled(HEAD_DIM // 32):
        for step in unrolled(2):
            q = ptx.shared_load_v4(i32(lane * 16 + (2 * s + step) * 512))
            for i in unrolled(2):
                sums[i, s // 2] = ptx.mma_bf16(q, (k[i, s][2 * step], k[i, s][2 * step + 1]), sums[i, s // 2])
    for i in unrolled(2):
        for e in unrolled(4):
            x[i, e] = sums[i, 0][e]
            if HEAD_DIM == 128:
                x[i, e] = x[i, e] + sums[i, 1][e]


@device
def attend(
    acc: Registers,
    top: Registers,
    total: Registers,
    x: Registers,
    v: Registers,
    sight: Registers,
    token: I32,
    new: I32,
    num_new: I32,
    is_first: I32,
    t: I32,
    *,
    N: int,
    HEAD_DIM: int,
    TREE: bool,
) -> None:
    """Add 16 tokens to the sums of 8 query rows.

    Args:
        acc: Weighted sums.
        top: Each lane's query row: its maximum so far.
        total: Likewise: this lane's part of its sum of weights.
        x: Scores.
        v: Values.
        sight: Each lane's query row: its position, with TREE 64 bits, the new tokens it sees.
        token: The first of the tile.
        new: The same, counted from the first new token.
        num_new: New tokens as far as the item goes.
        is_first: There are no sums yet.
        t: Lane.
        N: Which query rows.
        HEAD_DIM: Width of a head.
        TREE: Rows see all old tokens, and of the new ones those of their bits.
    """
    for i in unrolled(2):
        for e in unrolled(2):
            is_hidden = i32(i32(token + 2 * t + (8 * i + e)) > sight[N])
            if TREE:
                j = i32(new + 2 * t + (8 * i + e))
                is_hidden = i32(j >= 0) & (i32(j >= num_new) | i32(((sight[N] >> (j & 63)) & 1) == 0))
            x[i, 2 * N + e] = ptx.select_f32(is_hidden, _MASKED, x[i, 2 * N + e])
    p = registers(2, init=0)
    decay = _soften(p, x, top, total, N=N, HEAD_DIM=HEAD_DIM)
    if is_first == 0:
        _scale_down(acc, decay, t, N=N, HEAD_DIM=HEAD_DIM)
    for h in unrolled(HEAD_DIM // 64):
        for m in unrolled(4):
            dims = (
                ptx.permute_bytes(v[0, h][m], v[1, h][m], _LOWER),
                ptx.permute_bytes(v[0, h][m], v[1, h][m], _UPPER),
                ptx.permute_bytes(v[2, h][m], v[3, h][m], _LOWER),
                ptx.permute_bytes(v[2, h][m], v[3, h][m], _UPPER),
            )
            acc[N, h, m] = ptx.mma_bf16(dims, (p[0], p[1]), acc[N, h, m])


@device
def _soften(p: Registers, x: Registers, top: Registers, total: Registers, *, N: int, HEAD_DIM: int) -> F32:
    """Turn scores into weights, bf16; update the row's maximum and sum, and return what scales its older sums."""
    peak = ptx.max_f32(ptx.max_f32(x[0, 2 * N], x[0, 2 * N + 1]), ptx.max_f32(x[1, 2 * N], x[1, 2 * N + 1]))
    peak = ptx.max_f32(peak, ptx.shuffle_xor_f32(peak, 1))
    peak = ptx.max_f32(peak, ptx.shuffle_xor_f32(peak, 2))
    new_top = ptx.max_f32(top[N], peak * _SCALE_LOG2[HEAD_DIM])
    decay = ptx.exp2(top[N] - new_top)
    top[N] = new_top
    total[N] = total[N] * decay
    for i in unrolled(2):
        first = ptx.exp2(ptx.fma(x[i, 2 * N], _SCALE_LOG2[HEAD_DIM], -new_top))
        second = ptx.exp2(ptx.fma(x[i, 2 * N + 1], _SCALE_LOG2[HEAD_DIM], -new_top))
        p[i] = ptx.pack_bf16(first, second)
        # As products: sums the compiler is free to add in another order, for some query rows and not for others.
        total[N] = ptx.fma(ptx.bf16_low(p[i]), 1.0, total[N])
        total[N] = ptx.fma(ptx.bf16_high(p[i]), 1.0, total[N])
    return decay


@device
def _scale_down(acc: Registers, decay: F32, t: I32, *, N: int, HEAD_DIM: int) -> None:
    """Scale what was added up under an older maximum; the factors of this lane's sums are with other lanes."""
    first = ptx.bits_float(ptx.shuffle_u32(ptx.float_bits(decay), i32(8 * t)))
    second = ptx.bits_float(ptx.shuffle_u32(ptx.float_bits(decay), i32(8 * t + 4)))
    for h in unrolled(HEAD_DIM // 64):
        for m in unrolled(4):
            c = acc[N, h, m]
            acc[N, h, m] = (c[0] * first, c[1] * second, c[2] * first, c[3] * second)
