"""Attention of few query rows over the paged KV, on CUDA cores: at most 4 (rows times query heads) per KV head.

Maths: ``out = softmax(q k^T / sqrt(head_dim)) v`` per query head, causal by positions, q and k normalised (QK_NORM) and
rotated in front (:mod:`ferrule_server.kernels.cuda.append`). Sums and exponentials are float32, in units of log2.

A CTA works through the items of its chain (:mod:`ferrule_server.kernels.cuda.work_list`), split by split. In a split
each warp takes tiles of TILE tokens: LANES neighbouring lanes hold a token, 8 values each, for K and for V alike, so
that a load is 16 bytes and a warp's loads are whole rows. The K and the V of the next tile are loaded as soon as those
of this one are used up. Scores are summed over lanes by a transposing reduction (each step halves how many a lane
keeps), the softmax is updated once per tile, and the probabilities reach all lanes through shared memory.

Order of sums, fixed by positions alone: lanes, tiles of a warp, warps, splits of a segment, segments. What a row sees
of a split depends neither on who computes it nor on the other rows of the tile; splits beyond its position add nothing,
exactly. So the result is the same bits for any grid, any dealing and any neighbours.

Bytes moved: K and V of each sequence once per row tile, ``4 * kv_len * head_dim`` per KV head; a partial of
``4 * R * (head_dim + 4)`` bytes per segment (or split) where a tile is shared among CTAs, written and read once.

Source: "Flash-Decoding for long-context inference" (Dao, Haziza, Massa, Sizov, 2023); the code is our own.
"""

from __future__ import annotations

from ferrule_server.kernels.cuda.attention_tile import (
    add_values,
    fold_warps,
    load_blocks,
    load_limits,
    load_tile,
    patch_tile,
    prepare_head,
    publish_warp,
    reduce_scores,
    set_bases,
    update_softmax,
)
from ferrule_server.kernels.cuda.constants import LOG2
from ferrule_server.kernels.cuda.intrinsics import (
    F32,
    I32,
    Address,
    Vec4,
    barrier,
    cta_id,
    device,
    grid_launch_dependents,
    grid_wait,
    load_v4,
    pack_bf16,
    reciprocal,
    shared_load_v4,
    store_u32,
    thread_id,
    warp_barrier,
)
from ferrule_server.kernels.cuda.partials import EMPTY, clear, fold, fold_partials, store_partial
from ferrule_server.kernels.cuda.spec import KernelSpec, ModelShape
from ferrule_server.kernels.cuda.specialise import Constant, i32, registers, unrolled
from ferrule_server.kernels.cuda.ticket import arrive
from ferrule_server.kernels.cuda.work_list import MAX_NEW, SEGMENT, SPLIT

__all__ = ["attention", "shared_bytes", "spec", "specs"]

PADDED = {1: 1, 2: 2, 3: 4, 4: 4}
"""Query rows as the kernel counts them, R: a power of two."""


def attention(
    qkv: Address,
    q_norm: Address,
    k_norm: Address,
    rope: Address,
    positions: Address,
    slot_mapping: Address,
    block_tables: Address,
    items: Address,
    tickets: Address,
    partials: Address,
    out: Address,
    pool: Address,
    block_stride: Address,
    layer_stride: Address,
    layer: I32,
    num_kv_heads: I32,
    max_blocks: I32,
    eps: F32,
    *,
    BLOCK_SIZE: int,
    GROUP: int,
    HEAD_DIM: int,
    MAX_NEW_TOKENS: int,
    QK_NORM: bool,
    ROWS: int,
    SPLIT_TOKENS: int,
    TILE: int,
    WARPS: int,
) -> None:
    """Attend the rows of a step in one layer and append their K and V.

    Launch: the grid the items were made for, ``32 * WARPS`` threads, ``shared_bytes`` of dynamic shared memory.

    Args:
        qkv: bf16 [rows, (num_kv_heads * (GROUP + 2)) * HEAD_DIM], raw: query heads, key heads, value heads.
        q_norm: bf16 [HEAD_DIM], immutable; read where QK_NORM.
        k_norm: bf16 [HEAD_DIM], immutable; read where QK_NORM.
        rope: float32 [max_context, HEAD_DIM], cosines of all pairs, then sines; immutable.
        positions: int32 [rows].
        slot_mapping: int32 [rows], -1 = do not write.
        block_tables: int32 [seqs, max_blocks].
        items: int32 [num_items, 16], made for tiles of ROWS rows.
        tickets: int32 [tiles], zero before the first launch and again after each.
        partials: float32 [partials, R, HEAD_DIM + 4], R rows and then their (maximum, sum, begins a segment, 0).
        out: bf16 [rows, num_kv_heads * GROUP * HEAD_DIM].
        pool: bf16 [num_blocks, num_layers, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM].
        block_stride: Bytes from block to block.
        layer_stride: Bytes from layer to layer.
        layer: Which layer.
        num_kv_heads: KV heads.
        max_blocks: Width of the block tables.
        eps: Of the norms.
        BLOCK_SIZE: Slots per block: 16, 32 or 64.
        GROUP: Query heads per KV head.
        HEAD_DIM: 64 or 128.
        MAX_NEW_TOKENS: New tokens per sequence at most.
        QK_NORM: Normalise query and key heads.
        ROWS: Query tokens per tile; ``GROUP * ROWS`` is at most 4.
        SPLIT_TOKENS: Tokens of a split, a multiple of ``WARPS * TILE``.
        TILE: Tokens that a warp takes at a time: 4 to 16 loads of K per lane, at most as many as lanes per token.
        WARPS: Per CTA.
    """
    assert GROUP * ROWS in (1, 2, 3, 4)
    assert ROWS == 1 or GROUP in (1, 2)
    assert SPLIT_TOKENS % (WARPS * TILE) == 0
    assert TILE * HEAD_DIM // 256 in (4, 8, 16)
    assert TILE <= 32
    assert PADDED[GROUP * ROWS] * HEAD_DIM <= 128 * WARPS
    grid_launch_dependents()
    grid_wait()
    index = i32(cta_id())
    is_more = i32(1)
    while is_more > 0:
        first = load_v4(items + index * 64)
        second = load_v4(items + index * 64 + 16)
        third = load_v4(items + index * 64 + 32)
        fourth = load_v4(items + index * 64 + 48)
        if first[3] > 0:
            _attend_item(
                first,
                second,
                third,
                fourth,
                qkv,
                q_norm,
                k_norm,
                rope,
                positions,
                slot_mapping,
                block_tables + first[0] * (max_blocks * 4),
                tickets,
                partials,
                out,
                pool,
                block_stride,
                layer * layer_stride,
                num_kv_heads,
                eps,
                BLOCK_SIZE=BLOCK_SIZE,
                GROUP=GROUP,
                HEAD_DIM=HEAD_DIM,
                QK_NORM=QK_NORM,
                ROWS=ROWS,
                SPLIT_TOKENS=SPLIT_TOKENS,
                TILE=TILE,
                WARPS=WARPS,
                R=PADDED[GROUP * ROWS],
                LANES=HEAD_DIM // 8,
                LOADS=TILE * HEAD_DIM // 256,
                PASSES=SPLIT_TOKENS // (WARPS * TILE),
                BLOCKS=max(1, TILE // BLOCK_SIZE),
                NEW=PADDED[GROUP * ROWS] * HEAD_DIM * 2,
                SCRATCH=PADDED[GROUP * ROWS] * HEAD_DIM * 2 + MAX_NEW_TOKENS * HEAD_DIM * 4,
                MERGED=PADDED[GROUP * ROWS] * HEAD_DIM * 2
                + MAX_NEW_TOKENS * HEAD_DIM * 4
                + WARPS * min(2, SPLIT_TOKENS // (WARPS * TILE)) * PADDED[GROUP * ROWS] * (TILE + 4) * 4,
                NEW_VALUES=PADDED[GROUP * ROWS] * HEAD_DIM * 2 + MAX_NEW_TOKENS * HEAD_DIM * 2,
            )
        index = i32(fourth[3])
        is_more = index


@device
def _attend_item(
    first: Vec4,
    second: Vec4,
    third: Vec4,
    fourth: Vec4,
    qkv: Address,
    q_norm: Address,
    k_norm: Address,
    rope: Address,
    positions: Address,
    slot_mapping: Address,
    table: Address,
    tickets: Address,
    partials: Address,
    out: Address,
    pool: Address,
    block_stride: Address,
    inside: Address,
    num_kv_heads: I32,
    eps: F32,
    *,
    BLOCK_SIZE: int,
    GROUP: int,
    HEAD_DIM: int,
    QK_NORM: bool,
    ROWS: int,
    SPLIT_TOKENS: int,
    TILE: int,
    WARPS: int,
    R: int,
    LANES: int,
    LOADS: int,
    PASSES: int,
    BLOCKS: int,
    NEW: int,
    NEW_VALUES: int,
    SCRATCH: int,
    MERGED: int,
) -> None:
    """Do one item. Its fields are the four vectors; R.. are sizes and shared offsets made of the kernel's constants.

    The next item may begin at once: queries and new tokens were last read before the last split's barrier, and all else
    is written only after the barrier behind the next item's queries.
    """
    lane = i32(thread_id() & 31)
    warp = i32(thread_id() >> 5)
    kv_head, first_row, num_rows = i32(first[1]), i32(first[2]), i32(first[3])
    kv_len, num_new = i32(second[2]), i32(second[3])
    new_begin = i32(kv_len - num_new)
    end = i32(second[1] * SPLIT_TOKENS)
    end = kv_len if end > kv_len else end
    pool_end = new_begin if end > new_begin else end

    # The first tile is on its way while queries and new keys are rotated.
    step = WARPS * TILE
    start = i32(second[0] * SPLIT_TOKENS + warp * TILE)
    key_bytes = i32(num_kv_heads * (BLOCK_SIZE * HEAD_DIM * 2))
    lane_pool = pool + inside + i32(kv_head * (BLOCK_SIZE * HEAD_DIM * 2) + lane * 16)
    blocks = registers(BLOCKS, init=0)
    bases = registers(BLOCKS, init=0)
    load_blocks(table, start, pool_end, blocks, BLOCK_SIZE=BLOCK_SIZE, BLOCKS=BLOCKS)
    set_bases(bases, blocks, lane_pool, block_stride, start, BLOCK_SIZE=BLOCK_SIZE, BLOCKS=BLOCKS, LANES=LANES)
    load_blocks(table, start + step, pool_end, blocks, BLOCK_SIZE=BLOCK_SIZE, BLOCKS=BLOCKS)
    keys = registers(LOADS)
    values = registers(LOADS)
    for i in unrolled(LOADS):
        keys[i] = (0, 0, 0, 0)
        values[i] = (0, 0, 0, 0)
    left = i32(pool_end - start - (lane >> LOG2[LANES]))
    load_tile(keys, bases, 0, left, LANES=LANES, LOADS=LOADS, BLOCKS=BLOCKS)
    load_tile(values, bases, key_bytes, left, LANES=LANES, LOADS=LOADS, BLOCKS=BLOCKS)
    limits = registers(max(1, R * LOADS // LANES), init=0)
    load_limits(
        limits,
        positions,
        first_row,
        num_rows,
        i32(lane & (LANES - 1)),
        GROUP=GROUP,
        ROWS=ROWS,
        R=R,
        LANES=LANES,
        LOADS=LOADS,
    )

    first_new, end_new = i32(second[0] * SPLIT_TOKENS - new_begin), i32(end - new_begin)
    first_new = i32(0) if first_new < 0 else first_new
    end_new = first_new if end_new < first_new else end_new
    row_bytes = i32(num_kv_heads * ((GROUP + 2) * HEAD_DIM * 2))
    job = i32(warp * (512 // HEAD_DIM))
    while job < R + end_new - first_new:
        prepare_head(
            i32(job + (lane >> LOG2[HEAD_DIM // 16])),
            first_new,
            end_new,
            first_row,
            num_rows,
            i32(third[0]),
            i32(third[1]),
            kv_head,
            num_kv_heads,
            row_bytes,
            qkv,
            q_norm,
            k_norm,
            rope,
            positions,
            slot_mapping,
            pool,
            block_stride,
            inside,
            eps,
            BLOCK_SIZE=BLOCK_SIZE,
            GROUP=GROUP,
            HEAD_DIM=HEAD_DIM,
            QK_NORM=QK_NORM,
            ROWS=ROWS,
            R=R,
            NEW=NEW,
            NEW_VALUES=NEW_VALUES,
        )
        job = i32(job + WARPS * (512 // HEAD_DIM))
    barrier()
    patch_tile(keys, start, new_begin, end, lane, NEW, LANES=LANES, LOADS=LOADS)
    patch_tile(values, start, new_begin, end, lane, NEW_VALUES, LANES=LANES, LOADS=LOADS)
    query = registers(R)
    for r in unrolled(R):
        query[r] = shared_load_v4(i32(r * HEAD_DIM * 2 + (lane & (LANES - 1)) * 16))

    # A thread below R * HEAD_DIM / 4 folds four columns of a row.
    owns = thread_id() < R * HEAD_DIM // 4
    row = i32((thread_id() >> LOG2[HEAD_DIM // 4]) & (R - 1))
    column = i32(thread_id() & (HEAD_DIM // 4 - 1))
    row_partials = partials + i32(row * ((HEAD_DIM + 4) * 4))
    place = row_partials + fourth[0] * (R * (HEAD_DIM + 4) * 4)
    total = registers(6, init=0.0)
    segment = registers(6, init=0.0)
    clear(total)
    clear(segment)
    begins = 0.0
    split = i32(second[0])
    end_split = i32(second[1])
    while split < end_split:
        state = registers(2, max(1, R * LOADS // LANES), init=0.0)
        for k in unrolled(max(1, R * LOADS // LANES)):
            state[0, k] = EMPTY
        sums = registers(R, 2)
        for r in unrolled(R):
            sums[r, 0] = (0.0, 0.0, 0.0, 0.0)
            sums[r, 1] = (0.0, 0.0, 0.0, 0.0)
        done = i32(0)
        while done < PASSES:
            scratch = i32(SCRATCH + (warp * min(PASSES, 2) + (done & 1)) * (R * (TILE + 4) * 4))
            scores = registers(LOADS * R, init=0.0)
            reduce_scores(scores, keys, query, lane, R=R, LANES=LANES, LOADS=LOADS)
            here = start
            start = i32(start + step)
            set_bases(bases, blocks, lane_pool, block_stride, start, BLOCK_SIZE=BLOCK_SIZE, BLOCKS=BLOCKS, LANES=LANES)
            load_blocks(table, start + step, pool_end, blocks, BLOCK_SIZE=BLOCK_SIZE, BLOCKS=BLOCKS)
            left = i32(pool_end - start - (lane >> LOG2[LANES]))
            load_tile(keys, bases, 0, left, LANES=LANES, LOADS=LOADS, BLOCKS=BLOCKS)
            patch_tile(keys, start, new_begin, end, lane, NEW, LANES=LANES, LOADS=LOADS)
            update_softmax(scores, state, limits, here, lane, scratch, R=R, LANES=LANES, LOADS=LOADS)
            warp_barrier()
            add_values(sums, values, lane, scratch, R=R, LANES=LANES, LOADS=LOADS)
            load_tile(values, bases, key_bytes, left, LANES=LANES, LOADS=LOADS, BLOCKS=BLOCKS)
            patch_tile(values, start, new_begin, end, lane, NEW_VALUES, LANES=LANES, LOADS=LOADS)
            done = i32(done + 1)
        merged = i32(MERGED + (split & 1) * (WARPS * R * (HEAD_DIM + 4) * 4))
        publish_warp(sums, state, merged, lane, warp, R=R, LANES=LANES, LOADS=LOADS, WARPS=WARPS)
        barrier()
        if owns:
            if (split & (SEGMENT - 1)) == 0:
                fold(total, segment)
                clear(segment)
                begins = 1.0
            fold_warps(segment, merged, row, column, R=R, LANES=LANES, WARPS=WARPS)
            if third[3] > 1:
                is_whole = (split + 1) & (SEGMENT - 1) == 0 or split + 1 == end_split
                if begins < 0.5 or is_whole:
                    store_partial(place, segment, begins, column, HEAD_DIM=HEAD_DIM)
                    place = place + R * (HEAD_DIM + 4) * 4
                    clear(segment)
                    begins = 0.0
        split = i32(split + 1)
    finishes = i32(1)
    if third[3] > 1:
        finishes = arrive(tickets + third[2] * 4, i32(third[3]), SCRATCH, ALL_STORE=True)
        if owns and finishes > 0:
            place = row_partials + fourth[1] * (R * (HEAD_DIM + 4) * 4)
            fold_partials(total, segment, place, i32(fourth[2]), column, HEAD_DIM=HEAD_DIM, ROWS=R)
    token = i32(0) if ROWS == 1 else i32(row >> LOG2[GROUP])
    if owns and finishes > 0 and token < num_rows and row < GROUP * ROWS:
        fold(total, segment)
        inverse = reciprocal(total[5])
        head = i32(kv_head * GROUP + row - token * GROUP)
        at = (
            out
            + (first_row + token) * (num_kv_heads * (GROUP * HEAD_DIM * 2))
            + i32(head * (HEAD_DIM * 2) + column * 8)
        )
        store_u32(at, pack_bf16(total[0] * inverse, total[1] * inverse))
        store_u32(at + 4, pack_bf16(total[2] * inverse, total[3] * inverse))


def shared_bytes(
    *, GROUP: int, ROWS: int, HEAD_DIM: int, TILE: int, WARPS: int, MAX_NEW_TOKENS: int, SPLIT_TOKENS: int
) -> int:
    """Return the dynamic shared memory of a launch: queries, new K and V, probabilities, two sets of warps' sums."""
    rows, passes = PADDED[GROUP * ROWS], SPLIT_TOKENS // (WARPS * TILE)
    scratch = WARPS * rows * (TILE + 4) * 4 * min(passes, 2)
    return rows * HEAD_DIM * 2 + MAX_NEW_TOKENS * HEAD_DIM * 4 + scratch + 2 * WARPS * rows * (HEAD_DIM + 4) * 4


def spec(
    *,
    GROUP: int,
    ROWS: int,
    HEAD_DIM: int,
    QK_NORM: bool,
    BLOCK_SIZE: int = 16,
    TILE: int | None = None,
    WARPS: int = 4,
    SPLIT_TOKENS: int = SPLIT,
    MAX_NEW_TOKENS: int = MAX_NEW,
    ctas_per_sm: int = 1,
) -> KernelSpec:
    """Return the kernel; the keywords are its constants, TILE is 16 tokens of 128 values or 32 of 64 if left out."""
    tile = TILE or 2048 // HEAD_DIM
    sizes = {"GROUP": GROUP, "ROWS": ROWS, "HEAD_DIM": HEAD_DIM, "TILE": tile, "WARPS": WARPS}
    sizes |= {"MAX_NEW_TOKENS": MAX_NEW_TOKENS, "SPLIT_TOKENS": SPLIT_TOKENS}
    constants: dict[str, Constant] = {**sizes, "BLOCK_SIZE": BLOCK_SIZE, "QK_NORM": QK_NORM}
    return KernelSpec(
        kernel=attention,
        constants=tuple(sorted(constants.items())),
        num_threads=32 * WARPS,
        shared_bytes=shared_bytes(**sizes),
        ctas_per_sm=ctas_per_sm,
        min_vector_loads=4 * tile * HEAD_DIM // 256,
        has_ticket=True,
    )


def specs(shape: ModelShape) -> list[KernelSpec]:
    """Return what a model needs for as many query tokens as make at most 4 rows of a KV head."""
    return [
        spec(GROUP=shape.group, ROWS=rows, HEAD_DIM=shape.head_dim, QK_NORM=shape.has_qk_norm)
        for rows in range(1, 4 // shape.group + 1)
        if rows == 1 or shape.group * rows in PADDED
    ]
