"""The linear layers of a decoder, each with what follows it: heads, residual stream, activation.

A layer is cut into *units* of outputs, which the threads claim one by one, and its rows into blocks whose inputs stay
in the L2 cache. The weights of a unit are read once, those of some inputs at a time, and multiplied with a few rows
after the other, while the weights that come next are prefetched::

    unit          inputs 0-255    inputs 256-511   ...     the first weights of the unit that is claimed next
    rows 0-11     sums     ->     sums     ->
    rows 12-23    sums     ->     sums     ->              sums go to the function that finishes them

Between two blocks of inputs the sums lie in the thread's scratch memory. During its last unit a thread prefetches the
weights that it multiplies first in the next layer, and it continues while it waits at the barrier.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from ferrule_server.kernels.cpu.activations import SCALE_BYTES, head_scale, norm_head, rotate_head, store_input
from ferrule_server.kernels.cpu.dot import GROUP, dot_group
from ferrule_server.kernels.cpu.head import read_logits
from ferrule_server.kernels.cpu.kernel import Lanes, Record, kernel
from ferrule_server.kernels.cpu.lanes import (
    LANES,
    add,
    divide,
    exp,
    fma,
    load,
    multiply,
    splat,
    store,
    store_bfloat16,
    subtract,
)
from ferrule_server.kernels.cpu.plan import Plan
from ferrule_server.kernels.cpu.records import layer_at, model_at, step_at
from ferrule_server.kernels.cpu.scalars import read_float32, read_int32
from ferrule_server.kernels.cpu.sync import claim

__all__ = [
    "ACTIVATE",
    "ADD_ATTENTION",
    "ADD_FEED_FORWARD",
    "ADD_INPUT",
    "ATTEND",
    "GATE_INPUT",
    "MOST_BLOCK_ROWS",
    "PROJECT",
    "PROJECT_INPUTS",
    "READ_LOGITS",
    "finish_rows",
    "first_weights",
    "gelu",
    "linear",
    "rows_of_part",
]

_CACHED_BYTES: Final = 256 << 10
"""Inputs of a block of rows, so that they stay in the L2 cache beside the weights of a unit."""
MOST_BLOCK_ROWS: Final = 128
"""Rows of a block, however narrow they are, so that their sums stay there too."""

_GELU_LINEAR: Final = np.float32(-2 * math.sqrt(2 / math.pi))
_GELU_CUBIC: Final = np.float32(-2 * math.sqrt(2 / math.pi) * 0.044715)

# Not plain numbers: Numba would compile what takes a kind again for each number.
PROJECT: Final = np.int64(0)
"""Queries, keys and values of the heads."""
ADD_ATTENTION: Final = np.int64(1)
"""The output layer of attention, added to the residual stream."""
ACTIVATE: Final = np.int64(2)
"""Gate and up of the feed-forward part, and activation(gate) * up; or activation(up)."""
ADD_FEED_FORWARD: Final = np.int64(3)
"""The last layer of the feed-forward part, added to the residual stream."""
READ_LOGITS: Final = np.int64(4)
"""The output head."""
ATTEND: Final = np.int64(5)
"""No linear layer: attention, or merging its partials."""
PROJECT_INPUTS: Final = np.int64(6)
"""What all layers together read of the embedding, added to the second embedding."""
GATE_INPUT: Final = np.int64(7)
"""The gate of what a layer reads of the second embedding: activation(gate) * input."""
ADD_INPUT: Final = np.int64(8)
"""The projection of that, normed and added to the residual stream."""


@kernel
def _weight_of(plan: Plan, model: Record, layer: Record, kind: np.int64) -> tuple[int, int, int, int]:
    """Return the address of the weight of a kind of linear layer, its units, and a unit's groups and tiles."""
    if kind == PROJECT:
        return layer.qkv, layer.num_qkv_units, layer.groups_at_once, model.hidden_tiles
    if kind == ADD_ATTENTION:
        return layer.out, model.num_hidden_units, 1, layer.query_tiles
    if kind == ACTIVATE:
        return layer.gate_up, layer.num_activated_units, 1, model.hidden_tiles
    if kind == ADD_FEED_FORWARD:
        return layer.down, model.num_hidden_units, 1, layer.intermediate_tiles
    if kind == PROJECT_INPUTS:
        return model.input_projection, (model.num_layers * model.input_size + GROUP - 1) // GROUP, 1, model.hidden_tiles
    if kind == GATE_INPUT:
        return layer.input_gate, model.num_input_units, 1, model.hidden_tiles
    if kind == ADD_INPUT:
        return layer.input_projection, model.num_hidden_units, 1, model.input_tiles
    return model.head, model.num_head_units, 1, model.hidden_tiles


@kernel
def _group_bytes(plan: Plan, num_tiles: int) -> int:
    return num_tiles * plan.tile_bytes + plan.group_end_bytes


@kernel
def first_weights(plan: Plan, model: Record, layer: Record, kind: np.int64, thread: int) -> int:
    """Return the address of the weights that a thread multiplies first in a linear layer of a kind."""
    weight, num_units, groups_at_once, num_tiles = _weight_of(plan, model, layer, kind)
    return weight + min(thread, num_units - 1) * groups_at_once * _group_bytes(plan, num_tiles)


@kernel
def linear(
    plan: Plan,
    model_address: int,
    layer_address: int,
    step_address: int,
    sync: int,
    thread: int,
    stage: int,
    kind: np.int64,
    ahead: int,
) -> int:
    """Run this thread's part of one linear layer of a kind: multiply and finish the units that it claims.

    ``ahead`` is the address of what the thread reads after this stage; it is prefetched during the last unit.
    """
    model, layer, step = model_at(model_address), layer_at(layer_address), step_at(step_address)
    weight, num_units, groups_at_once, num_tiles = _weight_of(plan, model, layer, kind)
    inputs, input_bytes, num_rows = step.normed, step.normed_bytes, step.num_rows
    if kind == ADD_ATTENTION:
        inputs, input_bytes = step.attended, step.attended_bytes
    elif kind in (ADD_FEED_FORWARD, ADD_INPUT):
        inputs, input_bytes = step.activated, step.activated_bytes
    elif kind == READ_LOGITS:
        num_rows = step.num_outputs
    if plan.is_quantised:
        inputs, input_bytes = step.quantised, step.quantised_bytes
    group_bytes = _group_bytes(plan, num_tiles)
    sums = step.scratch + thread * step.scratch_bytes
    sum_bytes = 4 * GROUP * groups_at_once
    block_rows = min(MOST_BLOCK_ROWS, max(plan.rows_at_once, _CACHED_BYTES // input_bytes))
    num_items = num_units * ((num_rows + block_rows - 1) // block_rows)
    item = thread
    while item < num_items:
        following = claim(sync, stage)
        unit, row = item % num_units, item // num_units * block_rows
        count = min(block_rows, num_rows - row)
        _clear(sums, count * sum_bytes)
        here = weight + unit * groups_at_once * group_bytes
        upcoming = ahead if following >= num_items else weight + following % num_units * groups_at_once * group_bytes
        for group in range(groups_at_once):
            _multiply(
                plan,
                here + group * group_bytes,
                num_tiles,
                count,
                inputs + row * input_bytes,
                input_bytes,
                sums + 4 * GROUP * group,
                sum_bytes,
                upcoming if group + 1 == groups_at_once else here + (group + 1) * group_bytes,
            )
            if plan.group_end_bytes:
                scales = here + (group + 1) * group_bytes - plan.group_end_bytes
                _scale(sums + 4 * GROUP * group, sum_bytes, count, scales)
        _finish(plan, model, layer, step, thread, kind, unit, row, count, sums, sum_bytes)
        item = following
    return 0


@kernel
def _clear(sums: int, num_bytes: int) -> None:
    for place in range(sums, sums + num_bytes, 4 * LANES):
        store(place, splat(np.float32(0)))


@kernel
def _scale(sums: int, sum_bytes: int, num_rows: int, scales: int) -> None:
    """Multiply the sums of some rows by a scale for each of 64 outputs."""
    for i in range(0, GROUP, LANES):
        scale = load(scales + 4 * i)
        for row in range(num_rows):
            place = sums + row * sum_bytes + 4 * i
            store(place, multiply(load(place), scale))


@kernel
def rows_of_part(plan: Plan, num_rows: int, num_parts: int) -> int:
    """Return the rows of each part but the last: about equal ones, and whole tiles.

    A tile that reached into the next part would add to the sums of rows that are added to again there.
    """
    rows = (num_rows + num_parts - 1) // num_parts
    return (rows + plan.rows_stored - 1) // plan.rows_stored * plan.rows_stored


@kernel
def lines_of_part(plan: Plan, num_parts: int) -> int:
    """Return how many cache lines of later weights each part of the rows prefetches, for each tile of inputs."""
    lines = (plan.tile_bytes // 64 + num_parts - 1) // num_parts
    return lines if plan.is_quantised else max(32, lines // 32 * 32)


@kernel
def _multiply(
    plan: Plan,
    weight: int,
    num_tiles: int,
    num_rows: int,
    inputs: int,
    input_bytes: int,
    sums: int,
    sum_bytes: int,
    ahead: int,
) -> None:
    """Add the products of rows and a group to sums; ``ahead`` is the address of the group that comes next."""
    tile_bytes = plan.tile_bytes
    input_tile_bytes = plan.input_tile_bytes
    num_parts = (num_rows + plan.rows_at_once - 1) // plan.rows_at_once
    part_rows = rows_of_part(plan, num_rows, num_parts)
    num_lines = lines_of_part(plan, num_parts)
    for first in range(0, num_tiles, plan.tiles_at_once):
        count = min(plan.tiles_at_once, num_tiles - first)
        next_tiles = weight + (first + count) * tile_bytes if first + count < num_tiles else ahead
        for part in range(num_parts):
            row = part * part_rows
            here = inputs + row * input_bytes
            dot_group(
                plan,
                weight + first * tile_bytes,
                count,
                min(part_rows, num_rows - row),
                here + first * input_tile_bytes,
                input_bytes,
                here + num_tiles * input_tile_bytes + first // plan.tiles_at_once * SCALE_BYTES,
                sums + row * sum_bytes,
                sum_bytes,
                next_tiles + part * num_lines * 64 * count,
                num_lines,
            )


@kernel
def _finish(
    plan: Plan,
    model: Record,
    layer: Record,
    step: Record,
    thread: int,
    kind: np.int64,
    unit: int,
    row: int,
    num_rows: int,
    sums: int,
    sum_bytes: int,
) -> None:
    """Take the sums of some rows and one unit to where they are needed."""
    if kind == PROJECT:
        _project_heads(plan, model, layer, step, unit, row, num_rows, sums, sum_bytes)
    elif kind == ADD_ATTENTION:
        _add_residual(model, step, unit, row, num_rows, sums, sum_bytes, layer.out_bias, model.has_norm_after)
    elif kind == ACTIVATE:
        _activate(plan, model, layer, step, unit, row, num_rows, sums, sum_bytes)
    elif kind == ADD_FEED_FORWARD:
        _add_residual(model, step, unit, row, num_rows, sums, sum_bytes, layer.down_bias, model.has_norm_after)
    elif kind == PROJECT_INPUTS:
        _keep_inputs(model, step, unit, row, num_rows, sums, sum_bytes)
    elif kind == GATE_INPUT:
        _gate_input(plan, model, step, layer.input_offset, unit, row, num_rows, sums, sum_bytes)
    elif kind == ADD_INPUT:
        _add_residual(model, step, unit, row, num_rows, sums, sum_bytes, 0, 1)
    else:
        read_logits(model, step, thread, unit, row, num_rows, sums, sum_bytes)


@kernel
def _add_bias(sums: int, sum_bytes: int, num_rows: int, bias: int, size: int) -> None:
    if bias == 0:
        return
    for row in range(num_rows):
        for i in range(0, size, LANES):
            place = sums + row * sum_bytes + 4 * i
            store(place, add(load(place), load(bias + 4 * i)))


@kernel
def _add_residual(
    model: Record,
    step: Record,
    unit: int,
    row: int,
    num_rows: int,
    sums: int,
    sum_bytes: int,
    bias: int,
    is_normed: int,
) -> None:
    """Add the outputs of a unit of 64 to the residual stream, or write them beside it if they are to be normed."""
    _add_bias(sums, sum_bytes, num_rows, bias + 4 * GROUP * unit if bias else 0, GROUP)
    first = unit * GROUP
    width = min(GROUP, model.hidden_size - first)
    factor = splat(model.residual_scale)
    for i in range(num_rows):
        place = 4 * ((row + i) * model.hidden_size + first)
        for j in range(0, width, LANES):
            x = load(sums + i * sum_bytes + 4 * j)
            if is_normed:
                store(step.added + place + 4 * j, x)
            else:
                out = step.hidden + place + 4 * j
                store(out, add(load(out), multiply(x, factor)))


@kernel
def _activate(
    plan: Plan,
    model: Record,
    layer: Record,
    step: Record,
    unit: int,
    row: int,
    num_rows: int,
    sums: int,
    sum_bytes: int,
) -> None:
    """Write activation(gate) * up of a unit, which holds 32 rows of gate, then the same rows of up.

    Without a gate it holds 64 rows, and the activation of each is written.
    """
    bias = layer.gate_up_bias
    _add_bias(sums, sum_bytes, num_rows, bias + 4 * GROUP * unit if bias else 0, GROUP)
    is_gated, is_gelu = model.is_gated, model.is_gelu
    width = GROUP // 2 if is_gated else GROUP
    for i in range(num_rows):
        out = step.activated + (row + i) * step.activated_bytes
        for j in range(0, width, LANES):
            x = load(sums + i * sum_bytes + 4 * j)
            x = gelu(x) if is_gelu else _silu(x)
            if is_gated:
                x = multiply(x, load(sums + i * sum_bytes + 4 * (width + j)))
            store_input(plan, out, unit * width + j, x)


@kernel
def _keep_inputs(model: Record, step: Record, unit: int, row: int, num_rows: int, sums: int, sum_bytes: int) -> None:
    """Write 64 of the values that layers read of the second embedding."""
    size = model.num_layers * model.input_size
    width = min(GROUP, size - unit * GROUP)
    for i in range(num_rows):
        _copy(sums + i * sum_bytes, width, step.inputs + 4 * ((row + i) * size + unit * GROUP))


@kernel
def _gate_input(
    plan: Plan, model: Record, step: Record, begin: int, unit: int, row: int, num_rows: int, sums: int, sum_bytes: int
) -> None:
    """Write activation(gate) * input of 64 values of the second embedding; those of a layer begin at ``begin``."""
    width = min(GROUP, model.input_size - unit * GROUP)
    for i in range(num_rows):
        inputs = step.inputs + 4 * ((row + i) * model.num_layers * model.input_size + begin + unit * GROUP)
        out = step.activated + (row + i) * step.activated_bytes
        for j in range(0, width, LANES):
            x = load(sums + i * sum_bytes + 4 * j)
            x = gelu(x) if model.is_gelu else _silu(x)
            store_input(plan, out, unit * GROUP + j, multiply(x, load(inputs + 4 * j)))


@kernel
def _silu(x: Lanes) -> Lanes:
    """Return x / (1 + exp(-x)); where exp would overflow, x times the least that it can be."""
    return divide(x, add(splat(np.float32(1)), exp(subtract(splat(np.float32(0)), x))))


@kernel
def gelu(x: Lanes) -> Lanes:
    """Return x * (1 + tanh(y)) / 2, which is x / (1 + exp(-2 y)), for y = sqrt(2 / pi) * (x + 0.044715 x**3)."""
    cubic = fma(multiply(x, x), splat(_GELU_CUBIC), splat(_GELU_LINEAR))
    return divide(x, add(splat(np.float32(1)), exp(multiply(x, cubic))))


@kernel
def _project_heads(
    plan: Plan,
    model: Record,
    layer: Record,
    step: Record,
    unit: int,
    row: int,
    num_rows: int,
    sums: int,
    sum_bytes: int,
) -> None:
    """Finish the heads of a unit: norm, rotation and scale of queries and keys; keys and values go to the pool.

    If values are the projected keys, a head is appended twice: as a value, which is not changed in place, and as a key.
    """
    bias = layer.qkv_bias
    _add_bias(
        sums,
        sum_bytes,
        num_rows,
        bias + 4 * GROUP * layer.groups_at_once * unit if bias else 0,
        GROUP * layer.groups_at_once,
    )
    for i in range(layer.heads_at_once):
        head = unit * layer.heads_at_once + i
        if head >= layer.num_projected_heads:
            return
        for r in range(num_rows):
            place = sums + r * sum_bytes + 4 * i * layer.head_stride
            if model.has_row_norm and head < model.num_heads + layer.num_kv_heads:
                _keep_head(model, layer, step, row + r, head, place)
            elif head < model.num_heads:
                _finish_query(model, layer, step, row + r, head, place)
            else:
                if layer.is_value_key != 0:
                    _append(plan, model, layer, step, row + r, head - model.num_heads + layer.num_kv_heads, place)
                _append(plan, model, layer, step, row + r, head - model.num_heads, place)


@kernel
def _keep_head(model: Record, layer: Record, step: Record, row: int, head: int, place: int) -> None:
    """Write a query or key head to where all heads of a row are normed together."""
    out = step.queries + 4 * (row * model.num_heads + head) * layer.head_dim
    if head >= model.num_heads:
        out = step.keys + 4 * (row * layer.num_kv_heads + head - model.num_heads) * layer.head_dim
    _copy(place, layer.head_dim, out)


@kernel
def finish_rows(plan: Plan, model: Record, layer: Record, step: Record, begin: int, end: int) -> None:
    """Norm all queries and all keys of some rows together and rotate them; keys go to the pool."""
    head_bytes = 4 * layer.head_dim
    for row in range(begin, end):
        queries = step.queries + row * model.num_heads * head_bytes
        norm_head(queries, layer.q_norm, model.num_heads * layer.head_dim, model.norm_eps)
        for head in range(model.num_heads):
            _rotate_query(model, layer, step, row, queries + head * head_bytes)
        keys = step.keys + row * layer.num_kv_heads * head_bytes
        norm_head(keys, layer.k_norm, layer.num_kv_heads * layer.head_dim, model.norm_eps)
        for head in range(layer.num_kv_heads):
            _append(plan, model, layer, step, row, head, keys + head * head_bytes)


@kernel
def _finish_query(model: Record, layer: Record, step: Record, row: int, head: int, place: int) -> None:
    if layer.q_norm != 0:
        norm_head(place, layer.q_norm, layer.head_dim, model.norm_eps)
    _rotate_query(model, layer, step, row, place)
    _copy(place, layer.head_dim, step.queries + 4 * (row * model.num_heads + head) * layer.head_dim)


@kernel
def _copy(source: int, size: int, target: int) -> None:
    for i in range(0, size, LANES):
        store(target + 4 * i, load(source + 4 * i))


@kernel
def _rotate_query(model: Record, layer: Record, step: Record, row: int, place: int) -> None:
    scale = layer.score_scale
    if step.temperatures != 0:
        scale *= read_float32(step.temperatures + 4 * row)
    _rotate(model, layer, step, row, place, scale)


@kernel
def _rotate(model: Record, layer: Record, step: Record, row: int, place: int, scale: np.float32) -> None:
    """Rotate a head by the angles of a row, and multiply it by a number."""
    cosines = step.rotations + 4 * row * model.num_rotations * model.head_dim + layer.rotation_offset
    rotate_head(place, layer.head_dim, cosines, cosines + 2 * model.head_dim, scale)


@kernel
def _append(plan: Plan, model: Record, layer: Record, step: Record, row: int, head: int, place: int) -> None:
    """Write a key head (below num_kv_heads) or a value head to the slot of a row, if it has one."""
    slot = read_int32(step.slot_mapping + 4 * row)
    if slot < 0:
        return
    factor = splat(np.float32(1))
    if head < layer.num_kv_heads:
        if layer.k_norm != 0 and not model.has_row_norm:
            norm_head(place, layer.k_norm, layer.head_dim, model.norm_eps)
        _rotate(model, layer, step, row, place, np.float32(1))
    elif model.has_v_norm:
        factor = head_scale(place, layer.head_dim, model.norm_eps)
    element = 2 if plan.is_bfloat16 else 4
    base = layer.pool + layer.pool_offset + slot // plan.block_size * layer.block_bytes
    out = base + head * layer.head_bytes + slot % plan.block_size * layer.head_dim * element
    for i in range(0, layer.head_dim, LANES):
        x = multiply(load(place + 4 * i), factor)
        if plan.is_bfloat16:
            store_bfloat16(out + 2 * i, x)
        else:
            store(out + 4 * i, x)
