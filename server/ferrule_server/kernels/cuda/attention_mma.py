"""Paged attention of up to 16 query rows per KV head on tensor cores: verify steps, trees and small chunks.

Maths: ``out[r] = sum_t p[r, t] v[t] / sum_t p[r, t]`` with ``p = exp2((q . k) * scale * log2(e) - max)`` over the
tokens row r sees; all sums are float32. The rows of a tile are ``group * query tokens`` of one sequence and KV head,
token by token; rows that are left over repeat the last token and are not stored.

Two products run on ``mma.sync`` m16n8k16 without any layout change (no ldmatrix, no shared memory for K and V):

* ``S = Q K^T``, 8 tokens as the columns. Lane ``4 g + t`` loads the 16 bytes at dims ``32 slab + 8 t`` of token g and
  uses them as the k-slots of two mma steps; Q is permuted alike by being read with the same rule.
* ``P V``: the C layout of two tiles of S, packed to bf16, is the A fragment of rows x 16 tokens. Lane (g, t) loads the
  16 bytes at dims ``64 half + 8 g`` of tokens 2t, 2t+1, 2t+8, 2t+9; byte permutes pair the tokens, and dim ``8 g + j``
  is column g of tile j. Column 2t of tile j of the output is then dim ``16 t + j``, column 2t+1 dim ``16 t + 8 + j``:
  a lane ends up with 16 neighbouring dims of rows g and g+8.

A split (SPLIT tokens at a fixed place of the sequence) is cut into tiles of 16 tokens, tile i belongs to warp
``i % WARPS``; each warp keeps its own running maximum, and the warps merge in order through shared memory. The next
tile's K and V are loaded while this one is worked on, across splits. Splits are folded as
:mod:`ferrule_server.kernels.cuda.work_list` says, partials by the CTA that arrives last. No order of a sum depends on
the grid, on how splits were dealt, or on other rows.

The step's new tokens lie in shared memory: every CTA whose splits hold some of them normalises, rotates and rounds
their K itself, together with Q, and one of them writes K and V to the pool; nobody reads those back. Old tokens of the
same tile of 16 are copied next to them (together the *tail*), so that a tile comes wholly from the pool or wholly from
shared memory.

Rounding: P is rounded to bf16 for the product, and the sum that divides is the sum of the rounded values, so that the
weights still add up to 1. What this adds to the error of one rounding of the output is at most
``2^-8 * sum_t w[t] |v[t] - out|`` (w the softmax weights, each off by at most 2^-9 of itself before and after
division).

Bytes moved: every token's K and V once per tile of rows, ``4 * head_dim`` a token, and partials where a tile has more
than one split: ``(4 * head_dim + 8) * rows`` per split, written and read once.

Source: online softmax after "Online normalizer calculation for softmax" (Milakov and Gimelshein, 2018), split KV after
"Flash-Decoding" (Dao et al., 2023), fragments after the PTX ISA, "Matrix Fragments for mma.m16n8k16".
"""

from __future__ import annotations

from typing import Any

from ferrule_server.kernels.cuda.append import kv_address, rotate_head
from ferrule_server.kernels.cuda.intrinsics import (
    F32,
    I32,
    Address,
    Offset,
    barrier,
    bf16_high,
    bf16_low,
    cta_id,
    device,
    exp2,
    fma,
    grid_launch_dependents,
    grid_wait,
    load_i32,
    load_u32,
    load_v4,
    max_f32,
    mma_bf16,
    pack_bf16,
    permute_bytes,
    reciprocal,
    select_f32,
    shared_load_f32,
    shared_load_f32x4,
    shared_load_i32,
    shared_load_u64,
    shared_load_v4,
    shared_store_f32,
    shared_store_f32x4,
    shared_store_i32,
    shared_store_u32,
    shared_store_v4,
    shuffle_xor_f32,
    store_u32,
    store_v4,
    thread_id,
)
from ferrule_server.kernels.cuda.partials import (
    EMPTY,
    MASKED,
    arrives_last,
    clear,
    fold,
    fold_partials,
    store_partial,
)
from ferrule_server.kernels.cuda.spec import KernelSpec, ModelShape
from ferrule_server.kernels.cuda.specialise import Constant, i32, registers, unrolled
from ferrule_server.kernels.cuda.work_list import MAX_NEW, SEGMENT, SPLIT

__all__ = ["ROWS", "attention_mma", "shared_bytes", "spec", "specs", "variants"]

ROWS = 16
"""Query rows of a tile: heads of the group times tokens."""
TILE = 16
"""Tokens of one step of the online softmax."""

Registers = Any
"""An array of variables; what it is in Python only the specialiser knows."""

LOG2 = {16: 4, 32: 5, 64: 6}
SCALE_LOG2 = {64: 0.18033688011112042, 128: 0.12751743082459868}
"""log2(e) / sqrt(head_dim)."""


def attention_mma(
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
    masks: Address,
    *,
    HEAD_DIM: int,
    GROUP: int,
    BLOCK_SIZE: int,
    SPLIT: int,
    WARPS: int,
    QK_NORM: bool,
    TREE: bool,
) -> None:
    """Write the attention of every row of a work list, and the K and V of the new tokens.

    Launch: the grid the list was made for, ``32 * WARPS`` threads, :func:`shared_bytes` of dynamic shared memory.

    Args:
        qkv: bf16 [rows, (GROUP + 2) * num_kv_heads * HEAD_DIM], output of the projection: q heads, k heads, v heads.
        q_norm: bf16 [HEAD_DIM], immutable; read where QK_NORM.
        k_norm: Likewise.
        rope: float32 [max_context, HEAD_DIM], cosines of all pairs, then sines; immutable.
        positions: int32 [rows], what rows are rotated by; without TREE also the last token they see.
        slot_mapping: int32 [rows], slot of each new token; -1 = do not write.
        block_tables: int32 [seqs, max_blocks]; entries beyond the old tokens are not read.
        items: int32 [num_items, 16] of :mod:`ferrule_server.kernels.cuda.work_list`, made with ``rows_per_tile`` of
            ``16 // GROUP``.
        tickets: uint32 [num_tiles], 0 before and after.
        partials: float32 [num_partials, 16, HEAD_DIM + 4], written and read where a tile has several items.
        out: bf16 [rows, GROUP * num_kv_heads, HEAD_DIM].
        pool: bf16 [num_blocks, num_layers, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM]; slots of new tokens are written.
        block_stride: Bytes from block to block, a multiple of 16.
        layer_stride: Bytes from layer to layer inside a block, a multiple of 16.
        layer: Which layer.
        num_kv_heads: KV heads.
        max_blocks: Width of a table.
        eps: Of the norms.
        masks: uint32 [rows, 2], bit j of the two words = the row sees the j-th new token of its sequence; it sees all
            older ones. Read where TREE.
        HEAD_DIM: 64 or 128.
        GROUP: Query heads per KV head, at most 16.
        BLOCK_SIZE: Slots of a block: 16, 32 or 64.
        SPLIT: Tokens of a split, a multiple of ``16 * WARPS``.
        WARPS: Per CTA; decides the order of sums.
        QK_NORM: Normalise query and key heads (Qwen3).
        TREE: Rows see what ``masks`` says.
    """
    assert HEAD_DIM in (64, 128)
    assert BLOCK_SIZE in LOG2
    assert 1 <= GROUP <= ROWS
    assert SPLIT % (TILE * WARPS) == 0
    warp = i32(thread_id() >> 5)
    g = i32((thread_id() & 31) >> 2)
    t = i32(thread_id() & 3)
    v_offset = i32(num_kv_heads * (BLOCK_SIZE * HEAD_DIM * 2))
    grid_launch_dependents()
    grid_wait()
    index = i32(cta_id())
    more = i32(1)
    while more != 0:
        item = items + index * 64
        seq, kv_head, first_row, num_rows = load_v4(item)
        first_split, end_split, kv_len, num_new = load_v4(item + 16)
        first_new_row, writes_new, _, num_items = load_v4(item + 32)
        first_partial, _, _, more = load_v4(item + 48)
        if num_rows > 0:
            new_begin = i32(kv_len - num_new)
            tail = i32(new_begin & -TILE)
            end = _smaller(i32(end_split * SPLIT), i32(kv_len))
            pool_end = _smaller(end, tail)
            heads = pool + layer * layer_stride + kv_head * (BLOCK_SIZE * HEAD_DIM * 2)
            table = block_tables + seq * max_blocks * 4
            token = i32(first_split * SPLIT + warp * TILE)
            k = registers(2, HEAD_DIM // 32)
            v = registers(4, HEAD_DIM // 64)
            _clear(k, v, HEAD_DIM=HEAD_DIM)
            tile_base = heads
            if token < pool_end:
                tile_base = _token_address(heads, table, token, block_stride, BLOCK_SIZE=BLOCK_SIZE, HEAD_DIM=HEAD_DIM)
                _load_keys(k, tile_base, g, t, HEAD_DIM=HEAD_DIM)
                _load_values(v, tile_base + v_offset, g, t, HEAD_DIM=HEAD_DIM)
            _stage_queries(
                qkv,
                q_norm,
                rope,
                positions,
                masks,
                i32(first_row),
                i32(num_rows),
                kv_head,
                num_kv_heads,
                eps,
                HEAD_DIM=HEAD_DIM,
                GROUP=GROUP,
                WARPS=WARPS,
                QK_NORM=QK_NORM,
                TREE=TREE,
            )
            staged = i32(_larger(i32(first_split * SPLIT), tail))
            while staged < ((end + TILE - 1) & -TILE):
                _stage_tokens(
                    qkv,
                    k_norm,
                    rope,
                    positions,
                    slot_mapping,
                    heads,
                    block_stride,
                    v_offset,
                    table,
                    staged,
                    end,
                    tail,
                    new_begin,
                    first_row,
                    first_new_row,
                    writes_new,
                    kv_head,
                    num_kv_heads,
                    eps,
                    HEAD_DIM=HEAD_DIM,
                    GROUP=GROUP,
                    BLOCK_SIZE=BLOCK_SIZE,
                    QK_NORM=QK_NORM,
                )
                staged = i32(staged + WARPS * HEADS_PER_WARP[HEAD_DIM])
            barrier()
            sight = registers(2, init=0)
            if not TREE:
                _load_sight(sight, g, HEAD_DIM=HEAD_DIM, WARPS=WARPS, TREE=False)
            split = i32(first_split)
            partial = i32(first_partial)
            while split < end_split:
                top = registers(2, init=EMPTY)
                total = registers(2, init=0.0)
                acc = registers(HEAD_DIM // 64, 8)
                for h in unrolled(HEAD_DIM // 64):
                    for j in unrolled(8):
                        acc[h, j] = (0.0, 0.0, 0.0, 0.0)
                for n in unrolled(SPLIT // (TILE * WARPS)):
                    following = i32(token + TILE * WARPS)
                    if token < end:
                        if token >= tail:
                            _tail_keys(k, i32(token - tail), g, t, HEAD_DIM=HEAD_DIM)
                            _tail_values(v, i32(token - tail), g, t, HEAD_DIM=HEAD_DIM)
                        x = registers(2, 4, init=0.0)
                        _scores(x, k, i32(thread_id() & 31), HEAD_DIM=HEAD_DIM)
                        if following < pool_end:
                            tile_base = _token_address(
                                heads, table, following, block_stride, BLOCK_SIZE=BLOCK_SIZE, HEAD_DIM=HEAD_DIM
                            )
                            _load_keys(k, tile_base, g, t, HEAD_DIM=HEAD_DIM)
                        if TREE:
                            if token >= tail:
                                _load_sight(sight, g, HEAD_DIM=HEAD_DIM, WARPS=WARPS, TREE=True)
                                _hide_outside_tree(x, sight, i32(token - new_begin + 2 * t), i32(num_new))
                        else:
                            _hide_future(x, sight, i32(token + 2 * t))
                        p = registers(4, init=0)
                        decay = registers(2, init=0.0)
                        _soften(p, decay, x, top, total)
                        if n > 0:
                            _decay(acc, decay, HEAD_DIM=HEAD_DIM)
                        _add_values(acc, p, v, HEAD_DIM=HEAD_DIM)
                        if following < pool_end:
                            _load_values(v, tile_base + v_offset, g, t, HEAD_DIM=HEAD_DIM)
                    token = following
                barrier()
                _deposit(acc, top, total, warp, g, t, HEAD_DIM=HEAD_DIM, WARPS=WARPS)
                barrier()
                is_folding = i32((split & -SEGMENT) >= first_split)
                closes = i32((split & (SEGMENT - 1)) == SEGMENT - 1 or split + 1 == end_split)
                _merge(
                    partials + partial * (ROWS * (HEAD_DIM + 4) * 4),
                    out,
                    split,
                    is_folding,
                    closes,
                    end_split,
                    num_items,
                    first_row,
                    num_rows,
                    kv_head,
                    num_kv_heads,
                    HEAD_DIM=HEAD_DIM,
                    GROUP=GROUP,
                    WARPS=WARPS,
                )
                if is_folding == 0 or closes != 0:
                    partial = i32(partial + 1)
                split = i32(split + 1)
            if num_items > 1:
                # Read again: what is needed here alone would take registers all along.
                tile = load_i32(item + 40)
                is_last = arrives_last(tickets + tile * 4, num_items, _flag_offset(HEAD_DIM=HEAD_DIM, WARPS=WARPS))
                if is_last != 0:
                    _, tile_first_partial, tile_num_partials, _ = load_v4(item + 48)
                    _combine(
                        partials + tile_first_partial * (ROWS * (HEAD_DIM + 4) * 4),
                        tile_num_partials,
                        out,
                        first_row,
                        num_rows,
                        kv_head,
                        num_kv_heads,
                        HEAD_DIM=HEAD_DIM,
                        GROUP=GROUP,
                        WARPS=WARPS,
                    )
        index = i32(more)


# Shared memory: Q, K of the tail, V of the tail, results of the warps, their maxima and sums, what is folded of a
# segment and of the segments before it, a flag, what each row sees (two words).
TAIL_PAD = 16
"""Bytes behind each row of the tail: spread what a quarter of a warp reads over all banks."""
TAIL_TOKENS = MAX_NEW + TILE
FOLD_BYTES = 24
"""What a thread keeps of one piece (four dims of a row): a state of :mod:`ferrule_server.kernels.cuda.partials`."""


@device
def _tail_offset(*, HEAD_DIM: int) -> Offset:
    """Return where the K of the tail begins."""
    return ROWS * HEAD_DIM * 2


@device
def _slots_offset(*, HEAD_DIM: int) -> Offset:
    """Return where the results of the warps begin."""
    return ROWS * HEAD_DIM * 2 + 2 * TAIL_TOKENS * (HEAD_DIM * 2 + TAIL_PAD)


@device
def _stats_offset(*, HEAD_DIM: int, WARPS: int) -> Offset:
    """Return where the maxima (float32 [WARPS, ROWS]) and then the sums of the warps begin."""
    return _slots_offset(HEAD_DIM=HEAD_DIM) + WARPS * ROWS * HEAD_DIM * 4


@device
def _folds_offset(*, HEAD_DIM: int, WARPS: int) -> Offset:
    """Return where the folded pieces of the segment, then those of the segments before it, begin."""
    return _stats_offset(HEAD_DIM=HEAD_DIM, WARPS=WARPS) + WARPS * ROWS * 8


@device
def _flag_offset(*, HEAD_DIM: int, WARPS: int) -> Offset:
    """Return where the word lies that tells all threads what the ticket was; what rows see is 16 bytes further."""
    return _folds_offset(HEAD_DIM=HEAD_DIM, WARPS=WARPS) + 2 * (ROWS * HEAD_DIM // 4) * FOLD_BYTES


@device
def _smaller(a: I32, b: I32) -> I32:
    """Return the smaller of two."""
    return a if a < b else b


@device
def _larger(a: I32, b: I32) -> I32:
    """Return the larger of two."""
    return a if a > b else b


# Loads of one tile of 16 tokens: k[i, s] is token 8 i + g at dims 32 s + 8 t, v[i, h] dims 64 h + 8 g of token 2 t,
# 2 t + 1, 2 t + 8, 2 t + 9.


@device
def _clear(k: Registers, v: Registers, *, HEAD_DIM: int) -> None:
    """Give the fragments a value where no tile is loaded."""
    for i in unrolled(2):
        for s in unrolled(HEAD_DIM // 32):
            k[i, s] = (0, 0, 0, 0)
    for i in unrolled(4):
        for h in unrolled(HEAD_DIM // 64):
            v[i, h] = (0, 0, 0, 0)


@device
def _token_address(
    heads: Address, table: Address, token: I32, block_stride: Address, *, BLOCK_SIZE: int, HEAD_DIM: int
) -> Address:
    """Return where the K of a token lies; ``heads`` is where that of this layer and head begins in block 0."""
    block = load_i32(table + (token >> LOG2[BLOCK_SIZE]) * 4)
    return kv_address(
        heads, block, block_stride, 0, 0, i32(token & (BLOCK_SIZE - 1)), BLOCK_SIZE=BLOCK_SIZE, HEAD_DIM=HEAD_DIM
    )


@device
def _load_keys(k: Registers, base: Address, g: I32, t: I32, *, HEAD_DIM: int) -> None:
    """Begin to load the K of a tile."""
    place = base + i32(g * (HEAD_DIM * 2) + t * 16)
    for i in unrolled(2):
        for s in unrolled(HEAD_DIM // 32):
            k[i, s] = load_v4(place + (i * HEAD_DIM * 16 + s * 64))


@device
def _load_values(v: Registers, base: Address, g: I32, t: I32, *, HEAD_DIM: int) -> None:
    """Begin to load the V of a tile."""
    place = base + i32(t * (HEAD_DIM * 4) + g * 16)
    for i in unrolled(4):
        for h in unrolled(HEAD_DIM // 64):
            v[i, h] = load_v4(place + ((i % 2 + i // 2 * 8) * HEAD_DIM * 2 + h * 128))


@device
def _tail_keys(k: Registers, token: I32, g: I32, t: I32, *, HEAD_DIM: int) -> None:
    """Read the K of a tile of the tail; ``token`` counts from its beginning."""
    place = i32(_tail_offset(HEAD_DIM=HEAD_DIM) + (token + g) * (HEAD_DIM * 2 + TAIL_PAD) + t * 16)
    for i in unrolled(2):
        for s in unrolled(HEAD_DIM // 32):
            k[i, s] = shared_load_v4(place + (i * 8 * (HEAD_DIM * 2 + TAIL_PAD) + s * 64))


@device
def _tail_values(v: Registers, token: I32, g: I32, t: I32, *, HEAD_DIM: int) -> None:
    """Read the V of a tile of the tail; ``token`` counts from its beginning."""
    row = i32(token + 2 * t + TAIL_TOKENS)
    place = i32(_tail_offset(HEAD_DIM=HEAD_DIM) + row * (HEAD_DIM * 2 + TAIL_PAD) + g * 16)
    for i in unrolled(4):
        for h in unrolled(HEAD_DIM // 64):
            v[i, h] = shared_load_v4(place + ((i % 2 + i // 2 * 8) * (HEAD_DIM * 2 + TAIL_PAD) + h * 128))


# Query, new keys and new values.


@device
def _token_of_row(row: I32, num_rows: I32, *, GROUP: int) -> I32:
    """Return which token of the tile a query row belongs to; the last one for rows that are left over."""
    return _smaller(i32((row * ((ROWS * ROWS + GROUP - 1) // GROUP)) >> 8), i32(num_rows - 1))


@device
def _stage_queries(
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
    r = i32(thread_id() >> LOG2_LANES[HEAD_DIM])
    while r < ROWS:
        token = _token_of_row(r, num_rows, GROUP=GROUP)
        head = i32(kv_head * GROUP + _smaller(i32(r - token * GROUP), GROUP - 1))
        row = i32(first_row + token)
        position = load_i32(positions + row * 4)
        if lane == 0:
            sight = i32(_flag_offset(HEAD_DIM=HEAD_DIM, WARPS=WARPS) + 16 + r * 8)
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


FRAGMENT_WORDS = (0, 8, 512, 520)
"""Where the four words of 16 bytes of a row lie: two per mma step, the other row of the lane between them."""
LOG2_LANES = {64: 2, 128: 3}
"""Of the lanes that share a head in the prologue."""
HEADS_PER_WARP = {64: 8, 128: 4}


@device
def _stage_tokens(
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
    token = i32(staged + (thread_id() >> LOG2_LANES[HEAD_DIM]))
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
        old = lane * 16 + _token_address(heads, table, token, block_stride, BLOCK_SIZE=BLOCK_SIZE, HEAD_DIM=HEAD_DIM)
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
        target = lane * 16 + kv_address(
            heads,
            slot >> LOG2[BLOCK_SIZE],
            block_stride,
            0,
            0,
            i32(slot & (BLOCK_SIZE - 1)),
            BLOCK_SIZE=BLOCK_SIZE,
            HEAD_DIM=HEAD_DIM,
        )
        store_v4(target, parts[0])
        store_v4(target + HEAD_DIM, parts[1])
        store_v4(target + v_offset, parts[2])
        store_v4(target + v_offset + HEAD_DIM, parts[3])
    if token < ((end + TILE - 1) & -TILE):
        place = i32(_tail_offset(HEAD_DIM=HEAD_DIM) + (token - tail) * (HEAD_DIM * 2 + TAIL_PAD) + lane * 16)
        shared_store_v4(place, parts[0])
        shared_store_v4(place + HEAD_DIM, parts[1])
        shared_store_v4(place + TAIL_TOKENS * (HEAD_DIM * 2 + TAIL_PAD), parts[2])
        shared_store_v4(place + (TAIL_TOKENS * (HEAD_DIM * 2 + TAIL_PAD) + HEAD_DIM), parts[3])


# One tile. x[i, e] is the C layout of the scores of tokens 8 i ..: rows g, g, g + 8, g + 8 and columns 2 t, 2 t + 1,
# 2 t, 2 t + 1.


@device
def _load_sight(sight: Registers, g: I32, *, HEAD_DIM: int, WARPS: int, TREE: bool) -> None:
    """Load what rows g and g + 8 see: the last position, or with TREE 64 bits."""
    place = i32(_flag_offset(HEAD_DIM=HEAD_DIM, WARPS=WARPS) + 16 + g * 8)
    for r in unrolled(2):
        if TREE:
            sight[r] = shared_load_u64(place + 64 * r)
        else:
            sight[r] = shared_load_i32(place + 64 * r)


@device
def _scores(x: Registers, k: Registers, lane: I32, *, HEAD_DIM: int) -> None:
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
def _hide_future(x: Registers, sight: Registers, token: I32) -> None:
    """Hide what comes after a row's own position; ``token`` is that of the lane's first column."""
    for i in unrolled(2):
        for e in unrolled(4):
            x[i, e] = select_f32(i32(token + (8 * i + e % 2)) > sight[e // 2], MASKED, x[i, e])


@device
def _hide_outside_tree(x: Registers, sight: Registers, new: I32, num_new: I32) -> None:
    """Hide new tokens whose bit is not set; ``new`` counts the lane's first column from the first new token."""
    for i in unrolled(2):
        for e in unrolled(2):
            j = i32(new + (8 * i + e))
            for r in unrolled(2):
                hides = (j >= 0) & ((j >= num_new) | (((sight[r] >> (j & 63)) & 1) == 0))
                x[i, 2 * r + e] = select_f32(hides, MASKED, x[i, 2 * r + e])


@device
def _soften(p: Registers, decay: Registers, x: Registers, top: Registers, total: Registers) -> None:
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
def _decay(acc: Registers, decay: Registers, *, HEAD_DIM: int) -> None:
    """Scale what was added up under an older maximum."""
    for h in unrolled(HEAD_DIM // 64):
        for j in unrolled(8):
            c = acc[h, j]
            acc[h, j] = (c[0] * decay[0], c[1] * decay[0], c[2] * decay[1], c[3] * decay[1])


@device
def _add_values(acc: Registers, p: Registers, v: Registers, *, HEAD_DIM: int) -> None:
    """Add the weighted V of 16 tokens; tile j of half h has dim ``64 h + 8 n + j`` as column n."""
    for h in unrolled(HEAD_DIM // 64):
        for j in unrolled(8):
            low = permute_bytes(v[0, h][j // 2], v[1, h][j // 2], HALVES[j % 2])
            high = permute_bytes(v[2, h][j // 2], v[3, h][j // 2], HALVES[j % 2])
            acc[h, j] = mma_bf16((p[0], p[1], p[2], p[3]), (low, high), acc[h, j])


HALVES = (0x5410, 0x7632)
"""Byte selectors that put the lower, and the upper, halves of two words together."""


# Merging. A warp's slot is float32 [ROWS, HEAD_DIM] in chunks of 16 bytes, chunk c of row r at c ^ swizzle(r, c):
# without it the lanes of a store would meet in two banks.


@device
def _swizzled(row: I32, chunk: I32) -> I32:
    """Return where a chunk of four values lies in its row."""
    return i32(chunk ^ (((chunk >> 3) & 1) | ((row & 1) << 1)))


@device
def _deposit(
    acc: Registers, top: Registers, total: Registers, warp: I32, g: I32, t: I32, *, HEAD_DIM: int, WARPS: int
) -> None:
    """Put a warp's results into its slot."""
    slot = i32(_slots_offset(HEAD_DIM=HEAD_DIM) + warp * (ROWS * HEAD_DIM * 4))
    stats = i32(_stats_offset(HEAD_DIM=HEAD_DIM, WARPS=WARPS) + (warp * ROWS + g) * 4)
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
def _merge(
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
    """
    slots = _slots_offset(HEAD_DIM=HEAD_DIM)
    stats = _stats_offset(HEAD_DIM=HEAD_DIM, WARPS=WARPS)
    folds = _folds_offset(HEAD_DIM=HEAD_DIM, WARPS=WARPS)
    piece = i32(thread_id())
    while piece < ROWS * HEAD_DIM // 4:
        row = i32(piece >> LOG2_PIECES[HEAD_DIM])
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
                ends = i32(folds + ROWS * HEAD_DIM // 4 * 16 + piece * 8)
                if (split & (SEGMENT - 1)) != 0:
                    _fold_behind(new, kept, ends)
                if closes == 0:
                    _keep(new, kept, ends)
                elif num_items > 1:
                    store_partial(target, new, 1.0, column, HEAD_DIM=HEAD_DIM)
                else:
                    kept = i32(kept + ROWS * HEAD_DIM // 4 * FOLD_BYTES)
                    ends = i32(ends + ROWS * HEAD_DIM // 4 * FOLD_BYTES)
                    if split >= SEGMENT:
                        _fold_behind(new, kept, ends)
                    if split + 1 < end_split:
                        _keep(new, kept, ends)
                    else:
                        _store_row(
                            out, new, row, column, first_row, kv_head, num_kv_heads, HEAD_DIM=HEAD_DIM, GROUP=GROUP
                        )
        piece = i32(piece + 32 * WARPS)


@device
def _fold_behind(new: Registers, place: Offset, ends: Offset) -> None:
    """Replace ``new`` by what is kept, with ``new`` folded into it."""
    state = registers(6, init=0.0)
    sums = shared_load_f32x4(place)
    for e in unrolled(4):
        state[e] = sums[e]
    state[4] = shared_load_f32(ends)
    state[5] = shared_load_f32(ends + 4)
    fold(state, new)
    for e in unrolled(6):
        new[e] = state[e]


@device
def _keep(new: Registers, place: Offset, ends: Offset) -> None:
    """Put a state into shared memory, for this thread only."""
    shared_store_f32x4(place, (new[0], new[1], new[2], new[3]))
    shared_store_f32(ends, new[4])
    shared_store_f32(ends + 4, new[5])


LOG2_PIECES = {64: 4, 128: 5}
"""Of the pieces of four dims in a row."""


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
def _combine(
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
        row = i32(piece >> LOG2_PIECES[HEAD_DIM])
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


def shared_bytes(head_dim: int, *, WARPS: int) -> int:
    """Return the dynamic shared memory of a launch in bytes."""
    query = ROWS * head_dim * 2
    tail = 2 * TAIL_TOKENS * (head_dim * 2 + TAIL_PAD)
    results = WARPS * ROWS * (head_dim * 4 + 8)
    return query + tail + results + 2 * (ROWS * head_dim // 4) * FOLD_BYTES + 16 + ROWS * 8


def spec(
    shape: ModelShape, *, TREE: bool, BLOCK_SIZE: int = 16, WARPS: int = 4, ctas_per_sm: int | None = None
) -> KernelSpec:
    """Return the kernel for a model; the other keywords are its constants."""
    constants: dict[str, Constant] = {
        "BLOCK_SIZE": BLOCK_SIZE,
        "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim,
        "QK_NORM": shape.has_qk_norm,
        "SPLIT": SPLIT,
        "TREE": TREE,
        "WARPS": WARPS,
    }
    return KernelSpec(
        kernel=attention_mma,
        constants=tuple(sorted(constants.items())),
        num_threads=32 * WARPS,
        shared_bytes=shared_bytes(shape.head_dim, WARPS=WARPS),
        ctas_per_sm=ctas_per_sm or (2 if shape.head_dim == 64 else 1),
        has_mma=True,
        min_vector_loads=shape.head_dim // 4,
        has_ticket=True,
    )


def specs(shape: ModelShape) -> list[KernelSpec]:
    """Return what a model needs: causal rows and trees."""
    return [spec(shape, TREE=is_tree) for is_tree in (False, True)]


def variants(shape: ModelShape) -> list[KernelSpec]:
    """Return what a sweep on a GPU tries: fewer warps, other block sizes."""
    few = [spec(shape, TREE=False, WARPS=2)]
    return [*few, *(spec(shape, TREE=False, BLOCK_SIZE=size) for size in (32, 64))]
