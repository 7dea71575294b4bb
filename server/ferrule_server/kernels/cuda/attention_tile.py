"""A warp and a tile of tokens, on CUDA cores: queries and new tokens, loads, scores, softmax, weighted values.

LANES neighbouring lanes hold a token, 8 values each (HEAD_DIM is 8 * LANES), so 32 / LANES tokens per load; a tile is
LOADS loads. Of the rows (tokens times query heads) there are R, a power of two. After the scores are reduced a lane
keeps one load's ``KEPT = max(1, R * LOADS / LANES)`` rows; where that is less than one, neighbours keep the same::

    column = lane % LANES    load = column / (LANES / LOADS)    row = column % (LANES / LOADS) * R / (LANES / LOADS)
"""

from __future__ import annotations

from ferrule_server.kernels.cuda.append import Registers, rotate_head, stage_new_token
from ferrule_server.kernels.cuda.constants import LOG2, LOG2_E
from ferrule_server.kernels.cuda.intrinsics import (
    F32,
    I32,
    Address,
    Offset,
    device,
    dot_bf16,
    exp2,
    fma,
    fma_bf16,
    load_i32,
    load_if_v4,
    max_f32,
    select_f32,
    shared_load_f32,
    shared_load_f32x4,
    shared_load_if_v4,
    shared_store_f32,
    shared_store_f32x4,
    shared_store_v4,
    shuffle_xor_f32,
    thread_id,
)
from ferrule_server.kernels.cuda.partials import EMPTY, MASKED, fold
from ferrule_server.kernels.cuda.specialise import i32, registers, unrolled

__all__ = [
    "add_values",
    "fold_warps",
    "load_blocks",
    "load_limits",
    "load_tile",
    "patch_tile",
    "prepare_head",
    "publish_warp",
    "reduce_scores",
    "set_bases",
    "update_softmax",
]


@device
def prepare_head(
    job: I32,
    first_new: I32,
    end_new: I32,
    first_row: I32,
    num_rows: I32,
    first_new_row: I32,
    writes: I32,
    kv_head: I32,
    num_kv_heads: I32,
    row_bytes: I32,
    qkv: Address,
    q_norm: Address,
    k_norm: Address,
    rope: Address,
    positions: Address,
    slot_mapping: Address,
    pool: Address,
    block_stride: Address,
    inside: Address,
    eps: F32,
    *,
    BLOCK_SIZE: int,
    GROUP: int,
    HEAD_DIM: int,
    QK_NORM: bool,
    ROWS: int,
    R: int,
    NEW: int,
    NEW_VALUES: int,
) -> None:
    """Rotate one head into shared memory: jobs below R are query rows, then come the new tokens of this item."""
    lane = i32(thread_id() & (HEAD_DIM // 16 - 1))
    token = i32(first_new + job - R)
    row = i32(first_new_row + token)
    head = i32(num_kv_heads * GROUP + kv_head)
    weight = k_norm
    if job < R:
        query_token = i32(0) if ROWS == 1 else i32(job >> LOG2[GROUP])
        query_head = i32(job - query_token * GROUP)
        if query_head >= GROUP:
            query_head = i32(GROUP - 1)
        if query_token >= num_rows:
            query_token = i32(num_rows - 1)
        row = i32(first_row + query_token)
        head = i32(kv_head * GROUP + query_head)
        weight = q_norm
    elif token >= end_new:
        row = first_row
    source = qkv + row * row_bytes
    rope_row = rope + load_i32(positions + row * 4) * (HEAD_DIM * 4)
    low = registers(4, init=0)
    high = registers(4, init=0)
    rotate_head(
        source + head * (HEAD_DIM * 2),
        weight,
        rope_row,
        lane,
        eps,
        low,
        high,
        HEAD_DIM=HEAD_DIM,
        QK_NORM=QK_NORM,
    )
    if job < R:
        shared_store_v4(i32(job * HEAD_DIM * 2 + lane * 16), (low[0], low[1], low[2], low[3]))
        shared_store_v4(i32(job * HEAD_DIM * 2 + HEAD_DIM + lane * 16), (high[0], high[1], high[2], high[3]))
    elif token < end_new:
        stage_new_token(
            low,
            high,
            source + (num_kv_heads * (GROUP + 1) + kv_head) * (HEAD_DIM * 2),
            slot_mapping + row * 4,
            writes,
            pool,
            block_stride,
            inside,
            kv_head,
            num_kv_heads,
            lane,
            i32(NEW + token * HEAD_DIM * 2),
            i32(NEW_VALUES + token * HEAD_DIM * 2),
            BLOCK_SIZE=BLOCK_SIZE,
            HEAD_DIM=HEAD_DIM,
        )


@device
def load_limits(
    limits: Registers,
    positions: Address,
    first_row: I32,
    num_rows: I32,
    column: I32,
    *,
    GROUP: int,
    ROWS: int,
    R: int,
    LANES: int,
    LOADS: int,
) -> None:
    """Set the last position that each row kept by this lane sees, -1 for rows that are none."""
    for k in unrolled(max(1, R * LOADS // LANES)):
        row = i32(k + ((column & (LANES // LOADS - 1)) * R >> LOG2[LANES // LOADS]))
        token = i32(0) if ROWS == 1 else i32(row >> LOG2[GROUP])
        limits[k] = i32(-1)
        if token < num_rows and row < GROUP * ROWS:
            limits[k] = load_i32(positions + (first_row + token) * 4)


@device
def load_blocks(table: Address, start: I32, bound: I32, blocks: Registers, *, BLOCK_SIZE: int, BLOCKS: int) -> None:
    """Load the ids of the blocks of the tile at ``start``, as far as they hold tokens below ``bound``."""
    for b in unrolled(BLOCKS):
        if start + b * BLOCK_SIZE < bound:
            blocks[b] = load_i32(table + ((start >> LOG2[BLOCK_SIZE]) + b) * 4)


@device
def set_bases(
    bases: Registers,
    blocks: Registers,
    pool: Address,
    block_stride: Address,
    start: I32,
    *,
    BLOCK_SIZE: int,
    BLOCKS: int,
    LANES: int,
) -> None:
    """Set where this lane's keys of the tile at ``start`` begin in each of its blocks, of all 64 bits.

    ``pool`` is where this lane's part of slot 0 lies in block 0.
    """
    for b in unrolled(BLOCKS):
        bases[b] = pool + blocks[b] * block_stride + i32((start & (BLOCK_SIZE - 1)) * (LANES * 16))


@device
def load_tile(
    tile: Registers, bases: Registers, offset: I32, left: I32, *, LANES: int, LOADS: int, BLOCKS: int
) -> None:
    """Load this lane's part of a tile where tokens are left; elsewhere what was there stays: its probability is 0."""
    for i in unrolled(LOADS):
        inside = (i % (LOADS // BLOCKS)) * (32 // LANES) * (LANES * 16)
        tile[i] = load_if_v4(i32(left > i * (32 // LANES)), bases[i // (LOADS // BLOCKS)] + offset + inside, tile[i])


@device
def patch_tile(
    tile: Registers, start: I32, new_begin: I32, end: I32, lane: I32, new: Offset, *, LANES: int, LOADS: int
) -> None:
    """Take the tokens from ``new_begin`` to ``end`` from shared memory, where the first one's row is ``new``."""
    if start + 32 // LANES * LOADS > new_begin:
        offset = i32(new + (lane & (LANES - 1)) * 16)
        for i in unrolled(LOADS):
            token = i32(start + i * (32 // LANES) + (lane >> LOG2[LANES]))
            is_new = i32(token >= new_begin) & i32(token < end)
            tile[i] = shared_load_if_v4(is_new, i32(offset + (token - new_begin) * (LANES * 16)), tile[i])


@device
def reduce_scores(
    scores: Registers, keys: Registers, query: Registers, lane: I32, *, R: int, LANES: int, LOADS: int
) -> None:
    """Set the first KEPT of ``scores``, registers(R * LOADS), to this lane's products of keys and queries.

    The sum over LANES is a transposing one: lanes across a bit exchange halves of what they still hold.
    """
    for i in unrolled(LOADS):
        for r in unrolled(R):
            scores[i * R + r] = dot_bf16(0.0, keys[i], query[r])
    for s in unrolled(LOG2[LANES]):
        for v in unrolled((LOADS * R) >> (s + 1)):
            scores[v] = _exchange(scores[v], scores[v + ((LOADS * R) >> (s + 1))], lane, BIT=LANES >> (s + 1))
        if (LOADS * R) >> (s + 1) == 0:
            scores[0] = scores[0] + shuffle_xor_f32(scores[0], LANES >> (s + 1))


@device
def _exchange(low: F32, high: F32, lane: I32, *, BIT: int) -> F32:
    """Return the sum with the lane across ``BIT``: of ``low`` where this lane has the bit clear, else of ``high``."""
    is_upper = i32(lane & BIT)
    return select_f32(is_upper, high, low) + shuffle_xor_f32(select_f32(is_upper, low, high), BIT)


@device
def update_softmax(
    scores: Registers,
    state: Registers,
    limits: Registers,
    start: I32,
    lane: I32,
    scratch: Offset,
    *,
    R: int,
    LANES: int,
    LOADS: int,
) -> None:
    """Turn this lane's scores into probabilities, in shared memory as float32 [R, 32 / LANES, LOADS].

    Behind them lie R factors for what was summed before. ``state``, registers(2, KEPT), is the maximum so far (the same
    in all lanes of a row) and this lane's share of the sum.
    """
    column = i32(lane & (LANES - 1))
    load = i32(column >> LOG2[LANES // LOADS])
    token_of_lane = i32(lane >> LOG2[LANES])
    token = i32(start + load * (32 // LANES) + token_of_lane)
    for k in unrolled(max(1, R * LOADS // LANES)):
        score = select_f32(i32(token <= limits[k]), scores[k] * (LOG2_E / (8 * LANES) ** 0.5), MASKED)
        top = score
        for s in unrolled(5 - LOG2[LANES // LOADS]):
            top = max_f32(top, shuffle_xor_f32(top, 16 >> s))
        top = max_f32(top, state[0, k])
        probability = exp2(score - top)
        factor = exp2(state[0, k] - top)
        state[1, k] = fma(state[1, k], factor, probability)
        state[0, k] = top
        row = i32(k + ((column & (LANES // LOADS - 1)) * R >> LOG2[LANES // LOADS]))
        if (lane & (max(1, LANES // (R * LOADS)) - 1)) == 0:
            shared_store_f32(i32(scratch + ((row * (32 // LANES) + token_of_lane) * LOADS + load) * 4), probability)
        if lane < LANES // LOADS and (lane & (max(1, LANES // (R * LOADS)) - 1)) == 0:
            shared_store_f32(i32(scratch + (R * (32 // LANES) * LOADS + row) * 4), factor)


@device
def add_values(
    sums: Registers, values: Registers, lane: I32, scratch: Offset, *, R: int, LANES: int, LOADS: int
) -> None:
    """Scale ``sums``, registers(R, 2) of four columns each, and add a tile's values times their probabilities."""
    for r in unrolled(R):
        factor = shared_load_f32(i32(scratch + (R * (32 // LANES) * LOADS + r) * 4))
        for h in unrolled(2):
            old = sums[r, h]
            sums[r, h] = (old[0] * factor, old[1] * factor, old[2] * factor, old[3] * factor)
        place = i32(scratch + (r * (32 // LANES) + (lane >> LOG2[LANES])) * (LOADS * 4))
        for q in unrolled(LOADS // 4):
            weights = shared_load_f32x4(i32(place + q * 16))
            for i in unrolled(4):
                value = values[4 * q + i]
                sums[r, 0] = fma_bf16(weights[i], value[0], value[1], sums[r, 0])
                sums[r, 1] = fma_bf16(weights[i], value[2], value[3], sums[r, 1])


@device
def publish_warp(
    sums: Registers,
    state: Registers,
    merged: Offset,
    lane: I32,
    warp: I32,
    *,
    R: int,
    LANES: int,
    LOADS: int,
    WARPS: int,
) -> None:
    """Sum a split over the warp's lanes into shared memory: float32 [WARPS, R, HEAD_DIM], then [WARPS, R, 2]."""
    column = i32(lane & (LANES - 1))
    for r in unrolled(R):
        half = registers(4, init=0.0)
        for k in unrolled(4):
            half[k] = _exchange(sums[r, 0][k], sums[r, 1][k], lane, BIT=16)
            if LANES == 8:
                half[k] = half[k] + shuffle_xor_f32(half[k], 8)
        if LANES == 16 or (lane & 8) == 0:
            at = i32(merged + (warp * R + r) * (LANES * 32) + column * 32 + (lane >> 4) * 16)
            shared_store_f32x4(at, (half[0], half[1], half[2], half[3]))
    for k in unrolled(max(1, R * LOADS // LANES)):
        total = state[1, k]
        for s in unrolled(5 - LOG2[LANES // LOADS]):
            total = total + shuffle_xor_f32(total, 16 >> s)
        row = i32(k + ((column & (LANES // LOADS - 1)) * R >> LOG2[LANES // LOADS]))
        if lane < LANES // LOADS and (lane & (max(1, LANES // (R * LOADS)) - 1)) == 0:
            at = i32(merged + WARPS * R * LANES * 32 + (warp * R + row) * 8)
            shared_store_f32(at, state[0, k])
            shared_store_f32(at + 4, total)


@device
def fold_warps(segment: Registers, merged: Offset, row: I32, column: I32, *, R: int, LANES: int, WARPS: int) -> None:
    """Sum a split over the warps, in order, and fold it into the segment: the state of columns ``4 * column`` on."""
    tops = registers(WARPS, init=0.0)
    split = registers(6, init=0.0)
    split[4] = EMPTY
    counts = i32(merged + WARPS * R * LANES * 32 + row * 8)
    for w in unrolled(WARPS):
        tops[w] = shared_load_f32(i32(counts + w * R * 8))
        split[4] = max_f32(split[4], tops[w])
    for w in unrolled(WARPS):
        factor = exp2(tops[w] - split[4])
        values = shared_load_f32x4(i32(merged + (w * R + row) * (LANES * 32) + column * 16))
        for k in unrolled(4):
            split[k] = fma(values[k], factor, split[k])
        split[5] = fma(shared_load_f32(i32(counts + w * R * 8 + 4)), factor, split[5])
    fold(segment, split)
