"""Paged attention of up to 16 query rows per KV head on tensor cores: decodes, verifies, trees and small chunks.

Maths: ``out[r] = sum_t p[r, t] v[t] / sum_t p[r, t]`` with ``p = exp2((q . k) * scale * log2(e) - max)`` over the
tokens row r sees; all sums are float32. The rows of a tile are ``group * query tokens`` of one sequence and KV head,
token by token.

A split (SPLIT_TOKENS tokens at a fixed place of the sequence) is cut into tiles of 16 tokens, tile i belongs to warp
``i % WARPS`` (:mod:`ferrule_server.kernels.cuda.attention_tile`); each warp keeps its own running maximum, and the
warps merge in order through shared memory. The next tile's K and V are loaded while this one is worked on, across
splits. Splits are folded as :mod:`ferrule_server.kernels.cuda.work_list` says, partials by the CTA that arrives last
(:mod:`ferrule_server.kernels.cuda.attention_merge`). No order of a sum depends on the grid, on how splits were dealt,
or on other rows: a row's bits follow from positions alone.

The step's new tokens lie in shared memory (:mod:`ferrule_server.kernels.cuda.append`): every CTA whose splits hold some
of them normalises, rotates and rounds their K itself, together with Q, and one of them writes K and V to the pool;
nobody reads those back.

Rounding: P is rounded to bf16 for the product, and the sum that divides is the sum of the rounded values, so that the
weights still add up to 1. What this adds to the error of one rounding of the output is at most
``2^-8 * sum_t w[t] |v[t] - out|`` (w the softmax weights, of which bf16 rounds each by at most 2^-8 of itself).

Bytes moved: every token's K and V once per tile of rows, ``4 * head_dim`` a token; where several items share a tile,
``4 * (head_dim + 4)`` per row and partial (a segment of splits, or a split), written and read once.

Source: online softmax after "Online normalizer calculation for softmax" (Milakov and Gimelshein, 2018), split KV after
"Flash-Decoding" (Dao et al., 2023), fragments after the PTX ISA, "Matrix Fragments for mma.m16n8k16".
"""

from __future__ import annotations

from ferrule_server.kernels.cuda import append, attention_merge, attention_tile
from ferrule_server.kernels.cuda import intrinsics as ptx
from ferrule_server.kernels.cuda.append import FLAG, ROWS
from ferrule_server.kernels.cuda.attention_tile import EMPTY, TILE
from ferrule_server.kernels.cuda.constants import LOG2
from ferrule_server.kernels.cuda.intrinsics import F32, I32, Address
from ferrule_server.kernels.cuda.spec import KernelSpec, ModelShape
from ferrule_server.kernels.cuda.specialise import Constant, i32, registers, unrolled
from ferrule_server.kernels.cuda.ticket import arrive
from ferrule_server.kernels.cuda.work_list import SEGMENT, SPLIT

__all__ = ["attention", "spec", "specs"]


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
    masks: Address,
    *,
    HEAD_DIM: int,
    GROUP: int,
    BLOCK_SIZE: int,
    SPLIT_TOKENS: int,
    WARPS: int,
    QK_NORM: bool,
    TREE: bool,
) -> None:
    """Write the attention of every row of a work list, and the K and V of the new tokens.

    Launch: the grid the list was made for, ``32 * WARPS`` threads, ``shared_bytes`` of dynamic shared memory.

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
        partials: float32 [num_places, GROUP, HEAD_DIM + 4], written and read where a tile has several items.
        out: bf16 [rows, GROUP * num_kv_heads, HEAD_DIM].
        pool: bf16 [num_blocks, num_layers, 2, num_kv_heads, BLOCK_SIZE, HEAD_DIM]; slots of new tokens are written.
        block_stride: Bytes from block to block, a multiple of 16.
        layer_stride: Bytes from layer to layer inside a block, a multiple of 16.
        layer: Which layer.
        num_kv_heads: KV heads.
        max_blocks: Width of a table.
        eps: Of the norms.
        masks: uint64 [rows], bit j = the row sees the j-th new token of its sequence (a new row at least itself); it
            sees all older ones. Read where TREE.
        HEAD_DIM: 64 or 128.
        GROUP: Query heads per KV head, at most 16.
        BLOCK_SIZE: Slots of a block: 16, 32 or 64.
        SPLIT_TOKENS: Tokens of a split, a multiple of ``16 * WARPS``; decides the order of sums.
        WARPS: Per CTA; decides the order of sums.
        QK_NORM: Normalise query and key heads (Qwen3).
        TREE: Rows see what ``masks`` says.
    """
    assert HEAD_DIM in (64, 128)
    assert BLOCK_SIZE in LOG2
    assert 1 <= GROUP <= ROWS
    assert SPLIT_TOKENS % (TILE * WARPS) == 0
    assert HEAD_DIM % (16 * WARPS) == 0
    warp = i32(ptx.thread_id() >> 5)
    g = i32((ptx.thread_id() & 31) >> 2)
    t = i32(ptx.thread_id() & 3)
    v_offset = i32(num_kv_heads * (BLOCK_SIZE * HEAD_DIM * 2))
    ptx.grid_launch_dependents()
    ptx.grid_wait()
    index = i32(ptx.cta_id())
    more = i32(1)
    while more != 0:
        item = items + index * 64
        seq, kv_head, first_row, num_rows = ptx.load_v4(item)
        first_split, end_split, kv_len, num_new = ptx.load_v4(item + 16)
        first_new_row, writes_new, _, _ = ptx.load_v4(item + 32)
        place = i32(ptx.load_i32(item + 48))
        if num_rows > 0:
            num_queries = i32(num_rows * GROUP)
            is_tall = i32(num_queries > 8)
            new_begin = i32(kv_len - num_new)
            end = append.smaller(i32(end_split * SPLIT_TOKENS), kv_len)
            pool_end = append.smaller(end, new_begin)
            heads = pool + layer * layer_stride + kv_head * (BLOCK_SIZE * HEAD_DIM * 2)
            table = i32(seq * max_blocks)
            token = i32(first_split * SPLIT_TOKENS + warp * TILE)
            k = registers(2, HEAD_DIM // 32)
            v = registers(4, HEAD_DIM // 64)
            for i in unrolled(2):
                for s in unrolled(HEAD_DIM // 32):
                    k[i, s] = (0, 0, 0, 0)
            for i in unrolled(4):
                for h in unrolled(HEAD_DIM // 64):
                    v[i, h] = (0, 0, 0, 0)
            block = i32(0)
            if token < pool_end:
                block = ptx.load_i32(block_tables + i32(table + (token >> LOG2[BLOCK_SIZE])) * 4)
            base = append.kv_address(heads, block, token, block_stride, BLOCK_SIZE=BLOCK_SIZE, HEAD_DIM=HEAD_DIM)
            attention_tile.load_keys(k, base, i32(pool_end - token), g, t, HEAD_DIM=HEAD_DIM)
            attention_tile.load_values(v, base + v_offset, i32(pool_end - token), g, t, HEAD_DIM=HEAD_DIM)
            append.stage(
                qkv,
                q_norm,
                k_norm,
                rope,
                positions,
                slot_mapping,
                heads,
                block_stride,
                v_offset,
                first_row,
                num_rows,
                first_new_row,
                i32(first_split * SPLIT_TOKENS - new_begin),
                i32(end - new_begin),
                writes_new,
                kv_head,
                num_kv_heads,
                eps,
                HEAD_DIM=HEAD_DIM,
                GROUP=GROUP,
                BLOCK_SIZE=BLOCK_SIZE,
                QK_NORM=QK_NORM,
                WARPS=WARPS,
            )
            sight = registers(2, init=0)
            for n in unrolled(2):
                query = append.smaller(i32(8 * n + g), i32(num_queries - 1))
                row = i32(first_row + append.token_of_row(query, GROUP=GROUP))
                if TREE:
                    sight[n] = ptx.load_u64(masks + row * 8)
                else:
                    sight[n] = ptx.load_i32(positions + row * 4)
            ptx.barrier()
            split = i32(first_split)
            while split * SPLIT_TOKENS < end:
                top = registers(2, init=EMPTY)
                total = registers(2, init=0.0)
                x = registers(2, 4, init=0.0)
                acc = registers(2, HEAD_DIM // 64, 4)
                for n in unrolled(2):
                    for h in unrolled(HEAD_DIM // 64):
                        for m in unrolled(4):
                            acc[n, h, m] = (0.0, 0.0, 0.0, 0.0)
                stop = append.smaller(i32((split + 1) * SPLIT_TOKENS), end)
                while token < stop:
                    if i32(token + TILE) > new_begin:
                        attention_tile.take_new(
                            k, v, i32(token - new_begin), i32(end - new_begin), g, t, HEAD_DIM=HEAD_DIM
                        )
                    # The id of the next block arrives while the scores are computed.
                    following = i32(token + TILE * WARPS)
                    if following < pool_end:
                        block = ptx.load_i32(block_tables + i32(table + (following >> LOG2[BLOCK_SIZE])) * 4)
                    attention_tile.scores(x, k, i32(ptx.thread_id() & 31), HEAD_DIM=HEAD_DIM)
                    base = append.kv_address(
                        heads, block, following, block_stride, BLOCK_SIZE=BLOCK_SIZE, HEAD_DIM=HEAD_DIM
                    )
                    attention_tile.load_keys(k, base, i32(pool_end - following), g, t, HEAD_DIM=HEAD_DIM)
                    for n in unrolled(2):
                        if n <= is_tall:
                            attention_tile.attend(
                                acc,
                                top,
                                total,
                                x,
                                v,
                                sight,
                                token,
                                i32(token - new_begin),
                                i32(end - new_begin),
                                i32(i32(token - split * SPLIT_TOKENS) < TILE * WARPS),
                                t,
                                N=n,
                                HEAD_DIM=HEAD_DIM,
                                TREE=TREE,
                            )
                    attention_tile.load_values(v, base + v_offset, i32(pool_end - following), g, t, HEAD_DIM=HEAD_DIM)
                    token = following
                ptx.barrier()
                for n in unrolled(2):
                    if n <= is_tall:
                        attention_merge.deposit(acc, top, total, N=n, HEAD_DIM=HEAD_DIM, WARPS=WARPS)
                ptx.barrier()
                is_last = i32((split + 1) * SPLIT_TOKENS >= end)
                is_folding = i32((split & -SEGMENT) >= ptx.load_i32(item + 16))
                closes = i32((split & (SEGMENT - 1)) == SEGMENT - 1 or is_last != 0)
                attention_merge.merge(
                    partials + place * (GROUP * (HEAD_DIM + 4) * 4),
                    out,
                    item,
                    split,
                    is_last,
                    is_folding,
                    closes,
                    num_rows,
                    num_kv_heads,
                    HEAD_DIM=HEAD_DIM,
                    GROUP=GROUP,
                    WARPS=WARPS,
                )
                if is_folding == 0 or closes != 0:
                    place = i32(place + num_rows)
                split = i32(split + 1)
            # What is needed from here on is read again: it would take registers all along.
            _, _, tile, num_items = ptx.load_v4(item + 32)
            if num_items > 1:
                finishes = arrive(tickets + tile * 4, num_items, FLAG[HEAD_DIM], ALL_STORE=True)
                if finishes != 0:
                    attention_merge.combine(
                        partials, out, item, num_rows, num_kv_heads, HEAD_DIM=HEAD_DIM, GROUP=GROUP, WARPS=WARPS
                    )
        index = i32(ptx.load_i32(item + 60))
        more = index


def spec(
    shape: ModelShape, *, TREE: bool = False, BLOCK_SIZE: int = 16, SPLIT_TOKENS: int = SPLIT, WARPS: int = 4
) -> KernelSpec:
    """Return the kernel for a model; the other keywords are its constants.

    Along trees it takes more registers than let two CTAs of 64 dims share a multiprocessor with their successors.
    """
    constants: dict[str, Constant] = {
        "BLOCK_SIZE": BLOCK_SIZE,
        "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim,
        "QK_NORM": shape.has_qk_norm,
        "SPLIT_TOKENS": SPLIT_TOKENS,
        "TREE": TREE,
        "WARPS": WARPS,
    }
    return KernelSpec(
        kernel=attention,
        constants=tuple(sorted(constants.items())),
        num_threads=32 * WARPS,
        shared_bytes=append.shared_bytes(shape.head_dim, WARPS=WARPS),
        ctas_per_sm=1 if TREE else 128 // shape.head_dim,
        has_mma=True,
        min_vector_loads=shape.head_dim // 4,
        has_ticket=True,
    )


def specs(shape: ModelShape) -> list[KernelSpec]:
    """Return what a model needs: causal rows, and trees of drafts, which no step launches yet."""
    return [spec(shape, TREE=is_tree) for is_tree in (False, True)]
