"""How the sums of attention come together: of the warps of a CTA, of splits, of CTAs.

A *state* is what four values of one row know of some tokens, ``registers(6)``: four weighted sums, the maximum score
(log2 units), the sum of weights relative to it. A *partial* is the states of all query rows of a tile in memory:
float32 [rows, HEAD_DIM + 4], HEAD_DIM sums, then (maximum, sum, begins a segment, 0).

Folding in a state of no tokens changes no bit, so partials may be cut as the work list likes: what is folded is always
split by split in a segment, then segment by segment (:mod:`ferrule_server.kernels.cuda.work_list`). A thread takes four
values of a row at a time, always the same ones.
"""

from __future__ import annotations

from ferrule_server.kernels.cuda import intrinsics as ptx
from ferrule_server.kernels.cuda.append import FOLD_ENDS, FOLDS, ROWS, SLOTS, Registers, token_of_row
from ferrule_server.kernels.cuda.attention_tile import EMPTY
from ferrule_server.kernels.cuda.constants import LOG2
from ferrule_server.kernels.cuda.intrinsics import F32, I32, Address, device
from ferrule_server.kernels.cuda.specialise import i32, registers, unrolled
from ferrule_server.kernels.cuda.work_list import SEGMENT

__all__ = ["combine", "deposit", "merge"]

_IN_FLIGHT = 8
"""Partials that a thread loads at a time."""


@device
def _clear(state: Registers) -> None:
    """Make a state that of no tokens."""
    for k in unrolled(6):
        state[k] = EMPTY if k == 4 else 0.0


@device
def _fold(state: Registers, more: Registers) -> None:
    """Fold later tokens into a state; no tokens on either side leave the other side's bits as they are."""
    top = ptx.max_f32(state[4], more[4])
    factor = ptx.exp2(state[4] - top)
    more_factor = ptx.exp2(more[4] - top)
    for k in unrolled(4):
        state[k] = ptx.fma(more[k], more_factor, state[k] * factor)
    state[5] = ptx.fma(more[5], more_factor, state[5] * factor)
    state[4] = top


# A warp's slot is float32 [ROWS, HEAD_DIM] in chunks of 16 bytes, chunk c of row r at c ^ swizzle(r): without it the
# lanes of a store would meet in two banks. Behind the slots lie the maxima of all warps, float32 [WARPS, ROWS], then
# their sums.


@device
def _swizzle(row: I32) -> I32:
    """Return what the numbers of a row's chunks are changed by: the same for rows 2 i and 2 i + 1."""
    return i32(((row >> 1) & 1) | (row & 4))


@device
def deposit(acc: Registers, top: Registers, total: Registers, *, N: int, HEAD_DIM: int, WARPS: int) -> None:
    """Put a warp's results of 8 query rows into its slot."""
    warp, g, t = i32(ptx.thread_id() >> 5), i32((ptx.thread_id() & 31) >> 2), i32(ptx.thread_id() & 3)
    slot = i32(SLOTS[HEAD_DIM] + (warp * ROWS + 2 * t) * (HEAD_DIM * 4))
    places = registers(2, init=0)
    for q in unrolled(2):
        places[q] = i32(slot + ((2 * g + q) ^ _swizzle(i32(2 * t))) * 16)
    for r in unrolled(2):
        for h in unrolled(HEAD_DIM // 64):
            for q in unrolled(2):
                first, second = acc[N, h, 2 * q], acc[N, h, 2 * q + 1]
                ptx.shared_store_f32x4(
                    i32(places[q] + ((8 * N + r) * HEAD_DIM * 4 + h * 256)),
                    (first[r], first[r + 2], second[r], second[r + 2]),
                )
    whole = total[N] + ptx.shuffle_xor_f32(total[N], 1)
    whole = whole + ptx.shuffle_xor_f32(whole, 2)
    if t == 0:
        stats = i32(SLOTS[HEAD_DIM] + WARPS * ROWS * HEAD_DIM * 4 + (warp * ROWS + 8 * N + g) * 4)
        ptx.shared_store_f32(stats, top[N])
        ptx.shared_store_f32(stats + WARPS * ROWS * 4, whole)


@device
def merge(
    partial: Address,
    out: Address,
    item: Address,
    split: I32,
    is_last: I32,
    is_folding: I32,
    closes: I32,
    num_rows: I32,
    num_kv_heads: I32,
    *,
    HEAD_DIM: int,
    GROUP: int,
    WARPS: int,
) -> None:
    """Merge the warps' results of a split, in order, and pass them on.

    A split of a segment that the item does not hold from its begin becomes a partial; others are folded. What is folded
    becomes a partial where the segment (or the item) ends; or, if the item is all of its tile, the output.
    """
    piece = i32(ptx.thread_id())
    while piece < num_rows * (GROUP * HEAD_DIM // 4):
        row = i32(piece >> LOG2[HEAD_DIM // 4])
        column = i32(piece & (HEAD_DIM // 4 - 1))
        new = registers(6, init=0.0)
        _clear(new)
        stats = i32(SLOTS[HEAD_DIM] + WARPS * ROWS * HEAD_DIM * 4 + row * 4)
        tops = registers(WARPS, init=0.0)
        for w in unrolled(WARPS):
            tops[w] = ptx.shared_load_f32(i32(stats + w * ROWS * 4))
            new[4] = ptx.max_f32(new[4], tops[w])
        for w in unrolled(WARPS):
            weight = ptx.exp2(tops[w] - new[4])
            new[5] = ptx.fma(weight, ptx.shared_load_f32(i32(stats + (WARPS + w) * ROWS * 4)), new[5])
            slot = i32(SLOTS[HEAD_DIM] + (w * ROWS + row) * (HEAD_DIM * 4))
            values = ptx.shared_load_f32x4(i32(slot + (column ^ _swizzle(row)) * 16))
            for k in unrolled(4):
                new[k] = ptx.fma(weight, values[k], new[k])
        if is_folding == 0:
            _store_partial(partial, new, 0.0, row, column, HEAD_DIM=HEAD_DIM)
        else:
            if (split & (SEGMENT - 1)) != 0:
                _fold_behind(new, piece, OF=0, HEAD_DIM=HEAD_DIM)
            if closes == 0:
                _keep(new, piece, OF=0, HEAD_DIM=HEAD_DIM)
            elif ptx.load_i32(item + 44) > 1:
                _store_partial(partial, new, 1.0, row, column, HEAD_DIM=HEAD_DIM)
            else:
                if split >= SEGMENT:
                    _fold_behind(new, piece, OF=1, HEAD_DIM=HEAD_DIM)
                if is_last == 0:
                    _keep(new, piece, OF=1, HEAD_DIM=HEAD_DIM)
                else:
                    _store_row(out, item, new, row, column, num_kv_heads, HEAD_DIM=HEAD_DIM, GROUP=GROUP)
        piece = i32(piece + 32 * WARPS)


@device
def _keep(new: Registers, piece: I32, *, OF: int, HEAD_DIM: int) -> None:
    """Keep this thread's state of the segment (0) or of the segments before it (1) in shared memory."""
    place = i32(FOLDS[HEAD_DIM] + (OF * ROWS * HEAD_DIM // 4 + piece) * 16)
    ends = i32(FOLD_ENDS[HEAD_DIM] + (OF * ROWS * HEAD_DIM // 4 + piece) * 8)
    ptx.shared_store_f32x4(place, (new[0], new[1], new[2], new[3]))
    ptx.shared_store_f32(ends, new[4])
    ptx.shared_store_f32(ends + 4, new[5])


@device
def _fold_behind(new: Registers, piece: I32, *, OF: int, HEAD_DIM: int) -> None:
    """Replace ``new`` by what was kept, with ``new`` folded into it."""
    state = registers(6, init=0.0)
    ends = i32(FOLD_ENDS[HEAD_DIM] + (OF * ROWS * HEAD_DIM // 4 + piece) * 8)
    sums = ptx.shared_load_f32x4(i32(FOLDS[HEAD_DIM] + (OF * ROWS * HEAD_DIM // 4 + piece) * 16))
    for k in unrolled(4):
        state[k] = sums[k]
    state[4] = ptx.shared_load_f32(ends)
    state[5] = ptx.shared_load_f32(ends + 4)
    _fold(state, new)
    for k in unrolled(6):
        new[k] = state[k]


@device
def _store_partial(partial: Address, state: Registers, begins: F32, row: I32, column: I32, *, HEAD_DIM: int) -> None:
    """Store a state in a partial; ``begins`` is 1 where it holds its segment from the begin on."""
    place = partial + i32(row * ((HEAD_DIM + 4) * 4))
    ptx.store_f32x4(place + column * 16, (state[0], state[1], state[2], state[3]))
    if column == 0:
        ptx.store_f32x4(place + HEAD_DIM * 4, (state[4], state[5], begins, 0.0))


@device
def _store_row(
    out: Address, item: Address, state: Registers, row: I32, column: I32, heads: I32, *, HEAD_DIM: int, GROUP: int
) -> None:
    """Store four dims of a query row, divided by its sum of weights and rounded; ``heads`` counts KV heads."""
    _, kv_head, first_row, _ = ptx.load_v4(item)
    token = token_of_row(row, GROUP=GROUP)
    head = i32(kv_head * GROUP + row - token * GROUP)
    scale = ptx.reciprocal(state[5])
    place = out + ((first_row + token) * (GROUP * heads) + head) * (HEAD_DIM * 2) + column * 8
    ptx.store_u32(place, ptx.pack_bf16(state[0] * scale, state[1] * scale))
    ptx.store_u32(place + 4, ptx.pack_bf16(state[2] * scale, state[3] * scale))


@device
def combine(
    partials: Address,
    out: Address,
    item: Address,
    num_rows: I32,
    num_kv_heads: I32,
    *,
    HEAD_DIM: int,
    GROUP: int,
    WARPS: int,
) -> None:
    """Fold the partials of an item's tile, in order, as one CTA that had all splits would have, into the output."""
    _, first_place, count, _ = ptx.load_v4(item + 48)
    piece = i32(ptx.thread_id())
    while piece < num_rows * (GROUP * HEAD_DIM // 4):
        row = i32(piece >> LOG2[HEAD_DIM // 4])
        column = i32(piece & (HEAD_DIM // 4 - 1))
        total = registers(6, init=0.0)
        segment = registers(6, init=0.0)
        _clear(total)
        _clear(segment)
        place = partials + first_place * (GROUP * (HEAD_DIM + 4) * 4) + i32(row * ((HEAD_DIM + 4) * 4))
        done = i32(0)
        while done < count:
            sums = registers(_IN_FLIGHT)
            ends = registers(_IN_FLIGHT)
            for u in unrolled(_IN_FLIGHT):
                sums[u] = (0.0, 0.0, 0.0, 0.0)
                ends[u] = (0.0, 0.0, 0.0, 0.0)
                if done + u < count:
                    at = place + (done + u) * num_rows * (GROUP * (HEAD_DIM + 4) * 4)
                    sums[u] = ptx.load_relaxed_f32x4(at + column * 16)
                    ends[u] = ptx.load_relaxed_f32x4(at + HEAD_DIM * 4)
            for u in unrolled(_IN_FLIGHT):
                if done + u < count:
                    if ends[u][2] > 0.5:
                        _fold(total, segment)
                        _clear(segment)
                    more = registers(6, init=0.0)
                    for k in unrolled(4):
                        more[k] = sums[u][k]
                    more[4] = ends[u][0]
                    more[5] = ends[u][1]
                    _fold(segment, more)
            done = i32(done + _IN_FLIGHT)
        _fold(total, segment)
        _store_row(out, item, total, row, column, num_kv_heads, HEAD_DIM=HEAD_DIM, GROUP=GROUP)
        piece = i32(piece + 32 * WARPS)
