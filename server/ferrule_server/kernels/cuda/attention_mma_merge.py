"""How the warps' results of a split become partials or output, and partials output, in attention on tensor cores."""

from __future__ import annotations

from ferrule_server.kernels.cuda.attention_mma_memory import (
    ROWS,
    Registers,
    ends_offset,
    folds_offset,
    slots_offset,
    stats_offset,
)
from ferrule_server.kernels.cuda.constants import LOG2
from ferrule_server.kernels.cuda.intrinsics import (
    I32,
    Address,
    Offset,
    device,
    exp2,
    fma,
    max_f32,
    pack_bf16,
    reciprocal,
    shared_load_f32,
    shared_load_f32x4,
    shared_store_f32,
    shared_store_f32x4,
    shuffle_xor_f32,
    store_u32,
    thread_id,
)
from ferrule_server.kernels.cuda.partials import clear, fold, fold_partials, store_partial
from ferrule_server.kernels.cuda.specialise import i32, registers, unrolled
from ferrule_server.kernels.cuda.work_list import SEGMENT

__all__ = ["combine", "deposit", "merge"]


# Merging. A warp's slot is float32 [ROWS, HEAD_DIM] in chunks of 16 bytes, chunk c of row r at c ^ swizzle(r, c):
# without it the lanes of a store would meet in two banks.


@device
def _swizzled(row: I32, chunk: I32) -> I32:
    """Return where a chunk of four values lies in its row."""
    return i32(chunk ^ (((chunk >> 3) & 1) | ((row & 1) << 1)))


@device
def deposit(
    acc: Registers, top: Registers, total: Registers, warp: I32, g: I32, t: I32, *, HEAD_DIM: int, WARPS: int
) -> None:
    """Put a warp's results into its slot."""
    slot = i32(slots_offset(HEAD_DIM=HEAD_DIM) + warp * (ROWS * HEAD_DIM * 4))
    stats = i32(stats_offset(HEAD_DIM=HEAD_DIM, WARPS=WARPS) + (warp * ROWS + g) * 4)
    for r in unrolled(2):
        row = i32(g + 8 * r)
        for h in unrolled(HEAD_DIM // 64):
            for q in unrolled(4):
                # Values 4 q .. 4 q + 3 of the lane's 16: column 2 t of tiles 0..7, then column 2 t + 1.
                place = i32(slot + row * (HEAD_DIM * 4) + _swizzled(row, i32(16 * h + 4 * t + q)) * 16)
                shared_store_f32x4(
                    place,
                    (
                        acc[h, q % 2 * 4][2 * r + q // 2],
                        acc[h, q % 2 * 4 + 1][2 * r + q // 2],
                        acc[h, q % 2 * 4 + 2][2 * r + q // 2],
                        acc[h, q % 2 * 4 + 3][2 * r + q // 2],
                    ),
                )
        whole = total[r] + shuffle_xor_f32(total[r], 1)
        whole = whole + shuffle_xor_f32(whole, 2)
        if t == 0:
            shared_store_f32(stats + 32 * r, top[r])
            shared_store_f32(stats + (WARPS * ROWS * 4 + 32 * r), whole)


@device
def merge(
    partial: Address,
    out: Address,
    split: I32,
    is_folding: I32,
    closes: I32,
    end_split: I32,
    num_items: I32,
    first_row: I32,
    num_rows: I32,
    kv_head: I32,
    num_kv_heads: I32,
    *,
    HEAD_DIM: int,
    GROUP: int,
    WARPS: int,
) -> None:
    """Merge the warps' results of a split, in order, and pass them on; a thread takes four dims of a row at a time.

    A split of a segment that the item does not hold from its begin becomes a partial; others are folded. What is folded
    becomes a partial where the segment (or the item) ends; or, if the item is all of its tile, the output.

    All threads of a row compute its maximum and its sum of weights, and the first one keeps them for the others. They
    are kept in two places by turns: a thread may still read those of the last turn while the first one writes. The
    barrier before the next merge separates the turn after that.
    """
    slots = slots_offset(HEAD_DIM=HEAD_DIM)
    stats = stats_offset(HEAD_DIM=HEAD_DIM, WARPS=WARPS)
    folds = folds_offset(HEAD_DIM=HEAD_DIM, WARPS=WARPS)
    piece = i32(thread_id())
    while piece < ROWS * HEAD_DIM // 4:
        row = i32(piece >> LOG2[HEAD_DIM // 4])
        column = i32(piece & (HEAD_DIM // 4 - 1))
        if row < num_rows * GROUP:
            target = partial + i32(row * ((HEAD_DIM + 4) * 4))
            new = registers(6, init=0.0)
            clear(new)
            tops = registers(WARPS, init=0.0)
            for w in unrolled(WARPS):
                tops[w] = shared_load_f32(i32(stats + (w * ROWS + row) * 4))
                new[4] = max_f32(new[4], tops[w])
            for w in unrolled(WARPS):
                weight = exp2(tops[w] - new[4])
                new[5] = fma(weight, shared_load_f32(i32(stats + ((WARPS + w) * ROWS + row) * 4)), new[5])
                values = shared_load_f32x4(i32(slots + (w * ROWS + row) * (HEAD_DIM * 4) + _swizzled(row, column) * 16))
                for e in unrolled(4):
                    new[e] = fma(weight, values[e], new[e])
            if is_folding == 0:
                store_partial(target, new, 0.0, column, HEAD_DIM=HEAD_DIM)
            else:
                kept = i32(folds + piece * 16)
                ends = i32(ends_offset(HEAD_DIM=HEAD_DIM, WARPS=WARPS) + row * 8)
                if (split & (SEGMENT - 1)) != 0:
                    _fold_behind(new, kept, ends, split)
                if closes == 0:
                    _keep(new, kept, ends, split, column)
                elif num_items > 1:
                    store_partial(target, new, 1.0, column, HEAD_DIM=HEAD_DIM)
                else:
                    kept = i32(kept + ROWS * HEAD_DIM * 4)
                    ends = i32(ends + 2 * ROWS * 8)
                    segment = i32(split >> LOG2[SEGMENT])
                    if split >= SEGMENT:
                        _fold_behind(new, kept, ends, segment)
                    if split + 1 < end_split:
                        _keep(new, kept, ends, segment, column)
                    else:
                        _store_row(
                            out, new, row, column, first_row, kv_head, num_kv_heads, HEAD_DIM=HEAD_DIM, GROUP=GROUP
                        )
        piece = i32(piece + 32 * WARPS)


@device
def _fold_behind(new: Registers, place: Offset, ends: Offset, turn: I32) -> None:
    """Replace ``new`` by what was kept in the turn before, with ``new`` folded into it."""
    state = registers(6, init=0.0)
    sums = shared_load_f32x4(place)
    for e in unrolled(4):
        state[e] = sums[e]
    before = i32(ends + ((turn & 1) ^ 1) * (ROWS * 8))
    state[4] = shared_load_f32(before)
    state[5] = shared_load_f32(before + 4)
    fold(state, new)
    for e in unrolled(6):
        new[e] = state[e]


@device
def _keep(new: Registers, place: Offset, ends: Offset, turn: I32, column: I32) -> None:
    """Put a state into shared memory: its sums for this thread only, the rest for all threads of the row."""
    shared_store_f32x4(place, (new[0], new[1], new[2], new[3]))
    if column == 0:
        now = i32(ends + (turn & 1) * (ROWS * 8))
        shared_store_f32(now, new[4])
        shared_store_f32(now + 4, new[5])


@device
def _store_row(
    out: Address,
    state: Registers,
    row: I32,
    column: I32,
    first_row: I32,
    kv_head: I32,
    num_kv_heads: I32,
    *,
    HEAD_DIM: int,
    GROUP: int,
) -> None:
    """Store four dims of a query row, divided by its sum of weights and rounded."""
    token = i32((row * ((ROWS * ROWS + GROUP - 1) // GROUP)) >> 8)
    head = i32(kv_head * GROUP + row - token * GROUP)
    scale = reciprocal(state[5])
    place = out + ((first_row + token) * (GROUP * num_kv_heads) + head) * (HEAD_DIM * 2) + column * 8
    store_u32(place, pack_bf16(state[0] * scale, state[1] * scale))
    store_u32(place + 4, pack_bf16(state[2] * scale, state[3] * scale))


@device
def combine(
    partials: Address,
    num_partials: I32,
    out: Address,
    first_row: I32,
    num_rows: I32,
    kv_head: I32,
    num_kv_heads: I32,
    *,
    HEAD_DIM: int,
    GROUP: int,
    WARPS: int,
) -> None:
    """Fold the partials of a tile, in order; a thread takes four dims of a row at a time."""
    piece = i32(thread_id())
    while piece < ROWS * HEAD_DIM // 4:
        row = i32(piece >> LOG2[HEAD_DIM // 4])
        column = i32(piece & (HEAD_DIM // 4 - 1))
        if row < num_rows * GROUP:
            total = registers(6, init=0.0)
            segment = registers(6, init=0.0)
            clear(total)
            clear(segment)
            place = partials + i32(row * ((HEAD_DIM + 4) * 4))
            fold_partials(total, segment, place, num_partials, column, HEAD_DIM=HEAD_DIM, ROWS=ROWS)
            fold(total, segment)
            _store_row(out, total, row, column, first_row, kv_head, num_kv_heads, HEAD_DIM=HEAD_DIM, GROUP=GROUP)
        piece = i32(piece + 32 * WARPS)
