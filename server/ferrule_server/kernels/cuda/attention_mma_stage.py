"""What attention on tensor cores puts into shared memory first: queries, what they see, and the tail of K and V."""

from __future__ import annotations

from ferrule_server.kernels.cuda.append import rotate_head
from ferrule_server.kernels.cuda.attention_mma_memory import (
    ROWS,
    TAIL_PAD,
    TAIL_TOKENS,
    TILE,
    flag_offset,
    smaller,
    tail_offset,
    token_address,
    token_of_row,
)
from ferrule_server.kernels.cuda.constants import LOG2
from ferrule_server.kernels.cuda.intrinsics import (
    F32,
    I32,
    Address,
    device,
    load_i32,
    load_u32,
    load_v4,
    shared_store_i32,
    shared_store_u32,
    shared_store_v4,
    store_v4,
    thread_id,
)
from ferrule_server.kernels.cuda.specialise import i32, registers, unrolled

__all__ = ["HEADS_PER_WARP", "stage_queries", "stage_tokens"]

FRAGMENT_WORDS = (0, 8, 512, 520)
"""Where the four words of 16 bytes of a row lie: two per mma step, the other row of the lane between them."""
HEADS_PER_WARP = {64: 8, 128: 4}


@device
def stage_queries(
    qkv: Address,
    q_norm: Address,
    rope: Address,
    positions: Address,
    masks: Address,
    first_row: I32,
    num_rows: I32,
    kv_head: I32,
    num_kv_heads: I32,
    eps: F32,
    *,
    HEAD_DIM: int,
    GROUP: int,
    WARPS: int,
    QK_NORM: bool,
    TREE: bool,
) -> None:
    """Put the query rows into shared memory, normalised and rotated, as A fragments, and what they see.

    ``[HEAD_DIM / 16 steps, 32 lanes, 4 words]``: a lane reads the fragment of an mma step with one load.
    """
    lane = i32(thread_id() & (HEAD_DIM // 16 - 1))
    r = i32(thread_id() >> LOG2[HEAD_DIM // 16])
    while r < ROWS:
        token = token_of_row(r, num_rows, GROUP=GROUP)
        head = i32(kv_head * GROUP + smaller(i32(r - token * GROUP), GROUP - 1))
        row = i32(first_row + token)
        position = load_i32(positions + row * 4)
        if lane == 0:
            sight = i32(flag_offset(HEAD_DIM=HEAD_DIM, WARPS=WARPS) + 16 + r * 8)
            if TREE:
                shared_store_u32(sight, load_u32(masks + row * 8))
                shared_store_u32(sight + 4, load_u32(masks + row * 8 + 4))
            else:
                shared_store_i32(sight, position)
        low = registers(4, init=0)
        high = registers(4, init=0)
        rotate_head(
            qkv + (row * ((GROUP + 2) * num_kv_heads) + head) * (HEAD_DIM * 2),
            q_norm,
            rope + position * (HEAD_DIM * 4),
            lane,
            eps,
            low,
            high,
            HEAD_DIM=HEAD_DIM,
            QK_NORM=QK_NORM,
        )
        # Lane ``lane & 3`` of slab ``lane >> 2`` in the first half of the head, likewise HEAD_DIM / 64 slabs further.
        place = i32((lane >> 2) * 1024 + ((r & 7) * 4 + (lane & 3)) * 16 + (r >> 3) * 4)
        for w in unrolled(4):
            shared_store_u32(place + FRAGMENT_WORDS[w], low[w])
            shared_store_u32(place + (FRAGMENT_WORDS[w] + HEAD_DIM * 16), high[w])
        r = i32(r + WARPS * HEADS_PER_WARP[HEAD_DIM])


@device
def stage_tokens(
    qkv: Address,
    k_norm: Address,
    rope: Address,
    positions: Address,
    slot_mapping: Address,
    heads: Address,
    block_stride: Address,
    v_offset: I32,
    table: Address,
    staged: I32,
    end: I32,
    tail: I32,
    new_begin: I32,
    first_row: I32,
    first_new_row: I32,
    writes_new: I32,
    kv_head: I32,
    num_kv_heads: I32,
    eps: F32,
    *,
    HEAD_DIM: int,
    GROUP: int,
    BLOCK_SIZE: int,
    QK_NORM: bool,
) -> None:
    """Put K and V of some tokens of the tail, from ``staged`` to ``end``, into shared memory.

    A new one is normalised, rotated and, with ``writes_new``, written to its slot; an old one is copied from the pool;
    beyond the end there are zeros, to the end of the tile.
    """
    lane = i32(thread_id() & (HEAD_DIM // 16 - 1))
    token = i32(staged + (thread_id() >> LOG2[HEAD_DIM // 16]))
    row = i32(first_row)
    slot = i32(-1)
    if token >= new_begin and token < end:
        row = i32(first_new_row + token - new_begin)
        if writes_new != 0:
            slot = load_i32(slot_mapping + row * 4)
    source = qkv + (row * ((GROUP + 2) * num_kv_heads) + GROUP * num_kv_heads + kv_head) * (HEAD_DIM * 2)
    turn = rope + load_i32(positions + row * 4) * (HEAD_DIM * 4)
    low = registers(4, init=0)
    high = registers(4, init=0)
    rotate_head(source, k_norm, turn, lane, eps, low, high, HEAD_DIM=HEAD_DIM, QK_NORM=QK_NORM)
    parts = registers(4)
    parts[0] = (low[0], low[1], low[2], low[3])
    parts[1] = (high[0], high[1], high[2], high[3])
    if token < new_begin:
        block = load_i32(table + (token >> LOG2[BLOCK_SIZE]) * 4)
        old = token_address(heads, block, token, block_stride, BLOCK_SIZE=BLOCK_SIZE, HEAD_DIM=HEAD_DIM) + lane * 16
        parts[0] = load_v4(old)
        parts[1] = load_v4(old + HEAD_DIM)
        parts[2] = load_v4(old + v_offset)
        parts[3] = load_v4(old + v_offset + HEAD_DIM)
    elif token < end:
        parts[2] = load_v4(source + num_kv_heads * (HEAD_DIM * 2) + lane * 16)
        parts[3] = load_v4(source + num_kv_heads * (HEAD_DIM * 2) + HEAD_DIM + lane * 16)
    else:
        for i in unrolled(4):
            parts[i] = (0, 0, 0, 0)
    if slot >= 0:
        block = slot >> LOG2[BLOCK_SIZE]
        target = token_address(heads, block, slot, block_stride, BLOCK_SIZE=BLOCK_SIZE, HEAD_DIM=HEAD_DIM) + lane * 16
        store_v4(target, parts[0])
        store_v4(target + HEAD_DIM, parts[1])
        store_v4(target + v_offset, parts[2])
        store_v4(target + v_offset + HEAD_DIM, parts[3])
    if token < ((end + TILE - 1) & -TILE):
        place = i32(tail_offset(HEAD_DIM=HEAD_DIM) + (token - tail) * (HEAD_DIM * 2 + TAIL_PAD) + lane * 16)
        shared_store_v4(place, parts[0])
        shared_store_v4(place + HEAD_DIM, parts[1])
        shared_store_v4(place + TAIL_TOKENS * (HEAD_DIM * 2 + TAIL_PAD), parts[2])
        shared_store_v4(place + (TAIL_TOKENS * (HEAD_DIM * 2 + TAIL_PAD) + HEAD_DIM), parts[3])
