"""Paged attention: every row over its own sequence, reading the blocks of the pool in place.

The tokens of a sequence are taken in tiles of 256, at fixed places. Each tile gives, for each query, the largest score,
the sum of the weights and the weighted sum of V; tiles are merged in order ("FlashAttention", Dao et al., 2022)::

    task      some rows of a sequence x one KV head    the query heads of the rows share every load of K and V
    tile 0    tile 1    tile 2 ...                     merged as they come, or kept as partials and merged later

So the bits of a row depend only on its own sequence up to it. They do not depend on how rows are grouped into tasks,
or on whether the tiles of a task were shared out to several threads. In layers with a window, blocks that no row of a
task sees are left out, which changes nothing either, because the weights of hidden tokens are 0. Rows of a tree of
drafts see what their ancestor masks say; a path through a tree has other bits than the same tokens in a chain, because
its tokens lie elsewhere.
"""

from __future__ import annotations

import numpy as np

from ferrule_server.kernels.cpu import lanes as simd
from ferrule_server.kernels.cpu.activations import clear_values, copy_values, softcap, store_input
from ferrule_server.kernels.cpu.attention_block import MOST_QUERIES, score_block, weigh_block
from ferrule_server.kernels.cpu.kernel import Record, kernel
from ferrule_server.kernels.cpu.plan import Plan
from ferrule_server.kernels.cpu.records import layer_at, model_at, stage_at, step_at, thread_at
from ferrule_server.kernels.cpu.scalars import read_float32, read_int32, read_int64, write_float32
from ferrule_server.kernels.cpu.sync import claim

TILE_TOKENS = 256
MOST_ANCESTORS = 64
"""Rows of one sequence, in a step in which rows do not see all rows before them."""
TASK_FIELDS = 7
"""int32 fields of a task: sequence, first row, rows, first tile, end of tiles, tiles of the sequence, partial.

``partial`` is the number of the partial of KV head 0 and tile 0, or -1: the tiles are merged as they come. There is one
for each KV head and tile of the sequence, tiles of a head together; it holds all queries of the rows.
"""

_MOST_TASK_QUERIES = 16
_BLOCK = 16
_LOWEST = np.float32(-np.inf)
_LEAST = np.float32(np.finfo(np.float32).min)
"""Instead of the largest score where every token is hidden."""


def rows_per_task(num_queries_per_kv: int) -> int:
    """Return how many rows a task has at most."""
    return max(1, _MOST_TASK_QUERIES // num_queries_per_kv)


def _queries_per_task(num_queries_per_kv: int) -> int:
    return rows_per_task(num_queries_per_kv) * num_queries_per_kv


def partial_bytes(head_dim: int, num_queries_per_kv: int) -> int:
    """Return the most bytes of one partial: a weighted sum, a largest score and a sum of weights for each query."""
    queries = _queries_per_task(num_queries_per_kv)
    return queries * 4 * head_dim + _round_up(8 * queries)


def attention_scratch_bytes(head_dim: int, num_queries_per_kv: int) -> int:
    """Return the bytes that :func:`attend` needs for each thread."""
    queries = _queries_per_task(num_queries_per_kv)
    return queries * (4 * head_dim + 4 * TILE_TOKENS) + 2 * partial_bytes(head_dim, num_queries_per_kv)


def _round_up(num_bytes: int) -> int:
    return (num_bytes + 63) // 64 * 64


@kernel
def _state_bytes(plan: Plan, num_queries: int) -> int:
    """Return the bytes of the state of some queries: float32 [num_queries, head_dim], then tops, then sums."""
    return num_queries * 4 * plan.head_dim + (8 * num_queries + 63) // 64 * 64


@kernel
def attend(plan: Plan, thread: int, stage_address: int) -> int:
    """Run a thread's part of the attention of a layer: the tasks that it claims, one KV head at a time."""
    here, stage = thread_at(thread), stage_at(stage_address)
    model, layer, step = model_at(here.model), layer_at(stage.layer), step_at(here.step)
    scratch = step.scratch + here.number * step.scratch_bytes
    num_items = step.num_tasks * layer.num_kv_heads
    item = here.number
    while item < num_items:
        following = claim(here.sync, stage.claim)
        _attend_item(plan, model, layer, step, item, min(following, num_items - 1), scratch)
        item = following
    return 0


@kernel
def merge(plan: Plan, thread: int, stage_address: int) -> int:
    """Run a thread's part of merging the partials of a layer."""
    here, stage = thread_at(thread), stage_at(stage_address)
    layer, step = layer_at(stage.layer), step_at(here.step)
    item = here.number
    while item < step.num_merges * layer.num_kv_heads:
        task = step.merges + item // layer.num_kv_heads * (4 * TASK_FIELDS)
        _merge_partials(plan, layer, step, task, item % layer.num_kv_heads)
        item = claim(here.sync, stage.claim)
    return 0


@kernel
def _task_of(layer: Record, step: Record, item: int) -> int:
    return step.tasks + item // layer.num_kv_heads * (4 * TASK_FIELDS)


@kernel
def _table_of(step: Record, task: int, tile: int) -> int:
    """Return where the blocks of a tile are named."""
    return step.block_tables + 4 * (read_int32(task) * step.table_width + tile * (TILE_TOKENS // _BLOCK))


@kernel
def _first_token(layer: Record, step: Record, row: int, num_rows: int) -> int:
    """Return the first token of their sequence that any of some rows sees."""
    if layer.window == 0:
        return 0
    position = read_int32(step.positions + 4 * row)
    for other in range(row + 1, row + num_rows):
        position = min(position, read_int32(step.positions + 4 * other))
    return max(0, position + 1 - layer.window)


@kernel
def _attend_item(
    plan: Plan, model: Record, layer: Record, step: Record, item: int, following: int, scratch: int
) -> None:
    """Compute one KV head of one task; write the outputs of its rows, or the partials of its tiles.

    The keys of each tile are prefetched during the one before it; ``following`` is the item that comes next.
    """
    task, head = _task_of(layer, step, item), item % layer.num_kv_heads
    group = layer.num_queries_per_kv
    row, num_rows = read_int32(task + 4), read_int32(task + 8)
    first_token = _first_token(layer, step, row, num_rows)
    first_tile, last_tile = max(read_int32(task + 12), first_token // TILE_TOKENS), read_int32(task + 16)
    num_tiles, partial = read_int32(task + 20), read_int32(task + 24)
    num_queries = num_rows * group
    partial_size = _state_bytes(plan, num_queries)
    queries = scratch
    scores = queries + num_queries * 4 * plan.head_dim
    state = scores + num_queries * 4 * TILE_TOKENS
    fresh = state + partial_size
    _gather_queries(plan, model, layer, step, row, num_rows, head, queries)
    keys = layer.pool + layer.pool_offset
    for tile in range(first_tile, last_tile):
        skipped = 0
        if tile + 1 < last_tile:
            next_tile, next_table, next_keys = tile + 1, _table_of(step, task, tile + 1), keys + head * layer.head_bytes
        else:
            next_task = _task_of(layer, step, following)
            next_token = _first_token(layer, step, read_int32(next_task + 4), read_int32(next_task + 8))
            next_tile = max(read_int32(next_task + 12), next_token // TILE_TOKENS)
            skipped = max(0, next_token - next_tile * TILE_TOKENS) // _BLOCK
            next_table = _table_of(step, next_task, next_tile) + 4 * skipped
            next_keys = keys + following % layer.num_kv_heads * layer.head_bytes
        num_next = step.table_width - next_tile * (TILE_TOKENS // _BLOCK)
        place = state if partial < 0 and tile == first_tile else fresh
        if partial >= 0:
            place = step.partials + (partial + head * num_tiles + tile) * step.partial_bytes
        table = _table_of(step, task, tile)
        first_block = max(0, first_token - tile * TILE_TOKENS) // _BLOCK
        length = _score_tile(
            plan, model, layer, step, keys, table, row, num_rows, head, tile, first_block, queries, scores, place
        )
        values = keys + (layer.num_kv_heads + head) * layer.head_bytes
        num_next = min(num_next, TILE_TOKENS // _BLOCK) - skipped
        _weigh(
            plan, layer, values, table, first_block, length, num_queries, scores, place, next_table, num_next, next_keys
        )
        if partial < 0 and tile > first_tile:
            _merge(plan, state, fresh, num_queries)
    if partial < 0:
        _write_rows(plan, layer, step, row, num_rows, head, state)


@kernel
def _merge_partials(plan: Plan, layer: Record, step: Record, task: int, head: int) -> None:
    """Merge the partials of one KV head of some rows in order, and write the outputs of the rows."""
    row, num_rows = read_int32(task + 4), read_int32(task + 8)
    num_tiles, partial = read_int32(task + 20), read_int32(task + 24)
    first_tile = _first_token(layer, step, row, num_rows) // TILE_TOKENS
    state = step.partials + (partial + head * num_tiles + first_tile) * step.partial_bytes
    for tile in range(1, num_tiles - first_tile):
        _merge(plan, state, state + tile * step.partial_bytes, num_rows * layer.num_queries_per_kv)
    _write_rows(plan, layer, step, row, num_rows, head, state)


@kernel
def _gather_queries(
    plan: Plan, model: Record, layer: Record, step: Record, row: int, num_rows: int, head: int, queries: int
) -> None:
    """Copy the queries of one KV head together: row after row, its query heads in order."""
    size = layer.num_queries_per_kv * plan.head_dim
    for i in range(num_rows):
        source = step.queries + 4 * ((row + i) * model.num_heads * plan.head_dim + head * size)
        copy_values(source, size, queries + 4 * i * size)


@kernel
def _score_tile(
    plan: Plan, model: Record, layer: Record, step: Record, keys: int, table: int, row: int, num_rows: int, head: int,
    tile: int, first_block: int, queries: int, scores: int, state: int,
) -> int:  # fmt: skip
    """Write the weights of a tile for each query, from a block on, with the largest score and the sum.

    Returns:
        How many tokens the tile has.
    """
    begin = tile * TILE_TOKENS
    end = min(begin + TILE_TOKENS, read_int32(step.ends + 4 * (row + num_rows - 1)))
    num_blocks = (end - begin + _BLOCK - 1) // _BLOCK
    num_queries = num_rows * layer.num_queries_per_kv
    keys += head * layer.head_bytes
    for block in range(first_block, num_blocks):
        base = keys + read_int32(table + 4 * block) * layer.block_bytes
        values = base + layer.num_kv_heads * layer.head_bytes
        for query in range(0, num_queries, MOST_QUERIES):
            count = min(MOST_QUERIES, num_queries - query)
            place = scores + 4 * (query * TILE_TOKENS + block * _BLOCK)
            ahead = values if query == 0 else 0
            score_block(plan, queries + query * 4 * plan.head_dim, count, base, place, 4 * TILE_TOKENS, ahead)
    for query in range(num_queries):
        own = row + query // layer.num_queries_per_kv
        visible = max(0, min(read_int32(step.ends + 4 * own), end) - begin)
        hidden = min(max(0, _first_token(layer, step, own, 1) - begin), visible)
        place, top = scores + 4 * query * TILE_TOKENS, state + 4 * (num_queries * plan.head_dim + query)
        if model.score_softcap != 0:
            _cap(place, first_block * _BLOCK, num_blocks * _BLOCK, model.score_softcap)
        if step.ancestors != 0:
            first = read_int32(step.begins + 4 * own) - begin
            _hide_strangers(place, first, visible, read_int64(step.ancestors + 8 * own))
        _soften(place, first_block * _BLOCK, num_blocks * _BLOCK, hidden, visible, top, top + 4 * num_queries)
    return end - begin


@kernel
def _cap(scores: int, begin: int, end: int, cap: np.float32) -> None:
    for i in range(begin, end, simd.LANES):
        simd.store(scores + 4 * i, softcap(simd.load(scores + 4 * i), cap))


@kernel
def _hide_strangers(scores: int, first: int, visible: int, ancestors: int) -> None:
    """Hide the tokens first, first + 1, ... of a tile from a row, but for those whose bit is set."""
    for place in range(max(0, first), min(visible, first + MOST_ANCESTORS)):
        if (ancestors >> (place - first)) & 1 == 0:
            write_float32(scores + 4 * place, _LOWEST)


@kernel
def _soften(scores: int, begin: int, end: int, hidden: int, visible: int, top_place: int, sum_place: int) -> None:
    """Replace some scores by weights exp(score - largest); write the largest and the sum of weights.

    Those before ``hidden`` and from ``visible`` on get the weight 0.
    """
    count = visible - hidden
    largest = simd.splat(_LOWEST)
    for i in range(begin, end, simd.LANES):
        largest = simd.maximum(
            simd.select_within(hidden - i, count, simd.load(scores + 4 * i), simd.splat(_LOWEST)), largest
        )
    top = max(simd.max_of(largest), _LEAST)
    total = simd.splat(np.float32(0))
    for i in range(begin, end, simd.LANES):
        weights = simd.exp(simd.subtract(simd.load(scores + 4 * i), simd.splat(top)))
        weights = simd.select_within(hidden - i, count, weights, simd.splat(np.float32(0)))
        simd.store(scores + 4 * i, weights)
        total = simd.add(total, weights)
    write_float32(top_place, top)
    write_float32(sum_place, simd.sum_of(total))


@kernel
def _weigh(
    plan: Plan, layer: Record, values: int, table: int, first_block: int, num_tokens: int, num_queries: int, weights:
    int, sums: int, next_table: int, num_next: int, next_keys: int,
) -> None:  # fmt: skip
    """Write the weighted sum of V of each query, from a block on; meanwhile prefetch the keys of the next tile."""
    clear_values(sums, num_queries * plan.head_dim)
    for first in range(first_block * _BLOCK, num_tokens, _BLOCK):
        base = values + read_int32(table + 4 * (first // _BLOCK)) * layer.block_bytes
        count = min(_BLOCK, num_tokens - first)
        number = first // _BLOCK - first_block
        keys = next_keys + read_int32(next_table + 4 * number) * layer.block_bytes if number < num_next else 0
        for query in range(0, num_queries, MOST_QUERIES):
            place = weights + 4 * (query * TILE_TOKENS + first)
            many = min(MOST_QUERIES, num_queries - query)
            out = sums + query * 4 * plan.head_dim
            weigh_block(plan, place, 4 * TILE_TOKENS, many, base, count, out, keys if query == 0 else 0)


@kernel
def _merge(plan: Plan, state: int, fresh: int, num_queries: int) -> None:
    """Merge the state of a later tile into that of earlier ones; a tile that a query does not see changes nothing."""
    for query in range(num_queries):
        place = 4 * (num_queries * plan.head_dim + query)
        old, new = state + place, fresh + place
        old_sum, new_sum = read_float32(old + 4 * num_queries), read_float32(new + 4 * num_queries)
        if new_sum == 0:
            continue
        largest = max(read_float32(old), read_float32(new))
        keep = simd.exp(simd.splat(read_float32(old) - largest))
        gain = simd.exp(simd.splat(read_float32(new) - largest))
        write_float32(old, largest)
        write_float32(
            old + 4 * num_queries,
            simd.max_of(simd.fma(simd.splat(new_sum), gain, simd.multiply(simd.splat(old_sum), keep))),
        )
        for i in range(0, plan.head_dim, simd.LANES):
            at = 4 * (query * plan.head_dim + i)
            simd.store(state + at, simd.fma(simd.load(fresh + at), gain, simd.multiply(simd.load(state + at), keep)))


@kernel
def _write_rows(plan: Plan, layer: Record, step: Record, row: int, num_rows: int, head: int, state: int) -> None:
    """Write the outputs of a task's rows for the query heads of one KV head."""
    group = layer.num_queries_per_kv
    num_queries = num_rows * group
    for query in range(num_queries):
        out = step.attended + (row + query // group) * step.attended_bytes
        column = (head * group + query % group) * plan.head_dim
        total = simd.splat(read_float32(state + 4 * (num_queries * plan.head_dim + num_queries + query)))
        for i in range(0, plan.head_dim, simd.LANES):
            store_input(plan, out, column + i, simd.divide(simd.load(state + 4 * (query * plan.head_dim + i)), total))
