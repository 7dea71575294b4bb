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

A split (SPLIT_TOKENS tokens at a fixed place of the sequence) is cut into tiles of 16 tokens, tile i belongs to warp
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
``2^-8 * sum_t w[t] |v[t] - out|`` (w the softmax weights, of which bf16 rounds each by at most 2^-8 of itself).

Bytes moved: every token's K and V once per tile of rows, ``4 * head_dim`` a token; where several items share a tile,
``4 * (head_dim + 4)`` per row and partial (a segment of splits, or a split), written and read once.

Source: online softmax after "Online normalizer calculation for softmax" (Milakov and Gimelshein, 2018), split KV after
"Flash-Decoding" (Dao et al., 2023), fragments after the PTX ISA, "Matrix Fragments for mma.m16n8k16".
"""

from __future__ import annotations

from ferrule_server.kernels.cuda.attention_mma_memory import (
    ROWS,
    TILE,
    flag_offset,
    larger,
    shared_bytes,
    smaller,
    token_address,
)
from ferrule_server.kernels.cuda.attention_mma_merge import combine, deposit, merge
from ferrule_server.kernels.cuda.attention_mma_stage import HEADS_PER_WARP, stage_queries, stage_tokens
from ferrule_server.kernels.cuda.attention_mma_tile import (
    add_values,
    hide_future,
    hide_outside_tree,
    load_keys,
    load_sight,
    load_values,
    no_tile,
    scale_down,
    scores,
    soften,
    tail_keys,
    tail_values,
)
from ferrule_server.kernels.cuda.constants import LOG2
from ferrule_server.kernels.cuda.intrinsics import (
    F32,
    I32,
    Address,
    barrier,
    cta_id,
    grid_launch_dependents,
    grid_wait,
    load_i32,
    load_v4,
    thread_id,
)
from ferrule_server.kernels.cuda.partials import EMPTY
from ferrule_server.kernels.cuda.spec import KernelSpec, ModelShape
from ferrule_server.kernels.cuda.specialise import Constant, i32, registers, unrolled
from ferrule_server.kernels.cuda.ticket import arrive
from ferrule_server.kernels.cuda.work_list import SEGMENT, SPLIT

__all__ = ["ROWS", "attention_mma", "shared_bytes", "spec", "specs"]


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
    SPLIT_TOKENS: int,
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
        masks: uint32 [rows, 2], bit j of the two words = the row sees the j-th new token of its sequence (a new
            row at least itself); it sees all older ones. Read where TREE.
        HEAD_DIM: 64 or 128.
        GROUP: Query heads per KV head, at most 16.
        BLOCK_SIZE: Slots of a block: 16, 32 or 64.
        SPLIT_TOKENS: Tokens of a split, a multiple of ``16 * WARPS``.
        WARPS: Per CTA; decides the order of sums.
        QK_NORM: Normalise query and key heads (Qwen3).
        TREE: Rows see what ``masks`` says.
    """
    assert HEAD_DIM in (64, 128)
    assert BLOCK_SIZE in LOG2
    assert 1 <= GROUP <= ROWS
    assert SPLIT_TOKENS % (TILE * WARPS) == 0
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
        first_partial, _, _, _ = load_v4(item + 48)
        if num_rows > 0:
            new_begin = i32(kv_len - num_new)
            tail = i32(new_begin & -TILE)
            end = smaller(i32(end_split * SPLIT_TOKENS), i32(kv_len))
            pool_end = smaller(end, tail)
            heads = pool + layer * layer_stride + kv_head * (BLOCK_SIZE * HEAD_DIM * 2)
            table = block_tables + seq * max_blocks * 4
            token = i32(first_split * SPLIT_TOKENS + warp * TILE)
            k = registers(2, HEAD_DIM // 32)
            v = registers(4, HEAD_DIM // 64)
            no_tile(k, v, HEAD_DIM=HEAD_DIM)
            tile_base = heads
            if token < pool_end:
                block = load_i32(table + (token >> LOG2[BLOCK_SIZE]) * 4)
                tile_base = token_address(heads, block, token, block_stride, BLOCK_SIZE=BLOCK_SIZE, HEAD_DIM=HEAD_DIM)
                load_keys(k, tile_base, g, t, HEAD_DIM=HEAD_DIM)
                load_values(v, tile_base + v_offset, g, t, HEAD_DIM=HEAD_DIM)
            stage_queries(
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
            staged = i32(larger(i32(first_split * SPLIT_TOKENS), tail))
            while staged < ((end + TILE - 1) & -TILE):
                stage_tokens(
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
                load_sight(sight, g, HEAD_DIM=HEAD_DIM, WARPS=WARPS, TREE=False)
            split = i32(first_split)
            partial = i32(first_partial)
            while split < end_split:
                top = registers(2, init=EMPTY)
                total = registers(2, init=0.0)
                acc = registers(HEAD_DIM // 64, 8)
                for h in unrolled(HEAD_DIM // 64):
                    for j in unrolled(8):
                        acc[h, j] = (0.0, 0.0, 0.0, 0.0)
                for n in unrolled(SPLIT_TOKENS // (TILE * WARPS)):
                    following = i32(token + TILE * WARPS)
                    if token < end:
                        if token >= tail:
                            tail_keys(k, i32(token - tail), g, t, HEAD_DIM=HEAD_DIM)
                            tail_values(v, i32(token - tail), g, t, HEAD_DIM=HEAD_DIM)
                        # The id of the next block arrives while the scores are computed.
                        block = i32(0)
                        if following < pool_end:
                            block = load_i32(table + (following >> LOG2[BLOCK_SIZE]) * 4)
                        x = registers(2, 4, init=0.0)
                        scores(x, k, i32(thread_id() & 31), HEAD_DIM=HEAD_DIM)
                        if following < pool_end:
                            tile_base = token_address(
                                heads, block, following, block_stride, BLOCK_SIZE=BLOCK_SIZE, HEAD_DIM=HEAD_DIM
                            )
                            load_keys(k, tile_base, g, t, HEAD_DIM=HEAD_DIM)
                        if TREE:
                            if token >= tail:
                                load_sight(sight, g, HEAD_DIM=HEAD_DIM, WARPS=WARPS, TREE=True)
                                hide_outside_tree(x, sight, i32(token - new_begin + 2 * t), i32(end - new_begin))
                        else:
                            hide_future(x, sight, i32(token + 2 * t))
                        p = registers(4, init=0)
                        decay = registers(2, init=0.0)
                        soften(p, decay, x, top, total)
                        if n > 0:
                            scale_down(acc, decay, HEAD_DIM=HEAD_DIM)
                        add_values(acc, p, v, HEAD_DIM=HEAD_DIM)
                        if following < pool_end:
                            load_values(v, tile_base + v_offset, g, t, HEAD_DIM=HEAD_DIM)
                    token = following
                barrier()
                deposit(acc, top, total, warp, g, t, HEAD_DIM=HEAD_DIM, WARPS=WARPS)
                barrier()
                is_folding = i32((split & -SEGMENT) >= first_split)
                closes = i32((split & (SEGMENT - 1)) == SEGMENT - 1 or split + 1 == end_split)
                merge(
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
            # What is needed from here on is read again: it would take registers all along.
            if num_items > 1:
                tile = load_i32(item + 40)
                flag = flag_offset(HEAD_DIM=HEAD_DIM, WARPS=WARPS)
                is_last = arrive(tickets + tile * 4, num_items, flag, ALL_STORE=True)
                if is_last != 0:
                    _, tile_first_partial, tile_num_partials, _ = load_v4(item + 48)
                    combine(
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
        index = i32(load_i32(item + 60))
        more = index


def spec(
    shape: ModelShape, *, TREE: bool, BLOCK_SIZE: int = 16, WARPS: int = 4, ctas_per_sm: int | None = None
) -> KernelSpec:
    """Return the kernel for a model; the other keywords are its constants."""
    constants: dict[str, Constant] = {
        "BLOCK_SIZE": BLOCK_SIZE,
        "GROUP": shape.group,
        "HEAD_DIM": shape.head_dim,
        "QK_NORM": shape.has_qk_norm,
        "SPLIT_TOKENS": SPLIT,
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
