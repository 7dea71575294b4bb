"""Heads that have been projected: norm, rotation and scale of queries and keys; keys and values go to the pool."""

from __future__ import annotations

import numpy as np

from ferrule_server.kernels.cpu.activations import copy_values, head_scale, norm_head, rotate_head
from ferrule_server.kernels.cpu.kernel import Lanes, Record, kernel
from ferrule_server.kernels.cpu.kinds import Kind
from ferrule_server.kernels.cpu.lanes import LANES, load, multiply, splat, store, store_bfloat16
from ferrule_server.kernels.cpu.plan import Plan
from ferrule_server.kernels.cpu.records import layer_at, model_at, step_at, sums_of
from ferrule_server.kernels.cpu.scalars import read_float32, read_int32


@kernel
def project_heads(plan: Plan, here: Record, stage: Record, unit: int, row: int, num_rows: int) -> None:
    """Finish the heads of a unit, or keep queries and keys if all of a row are to be normed together.

    If values are the projected keys, a head is appended twice: as a value, which is not changed in place, and as a key.
    """
    model, layer, step = model_at(here.model), layer_at(stage.layer), step_at(here.step)
    sums, sum_bytes = sums_of(here, stage)
    first_value = model.num_heads + layer.num_kv_heads
    for i in range(layer.heads_at_once):
        head = stage.first_head + unit * layer.heads_at_once + i
        if head >= stage.end_head:
            return
        for r in range(num_rows):
            place = sums + r * sum_bytes + 4 * i * layer.head_stride
            if stage.kind == Kind.KEEP_HEADS and head < model.num_heads:
                copy_values(place, layer.head_dim, _query(model, layer, step, row + r, head))
            elif stage.kind == Kind.KEEP_HEADS and head < first_value:
                copy_values(place, layer.head_dim, _key(layer, step, row + r, head - model.num_heads))
            elif head < model.num_heads:
                if layer.q_norm != 0:
                    norm_head(place, layer.q_norm, layer.head_dim, model.norm_eps)
                _rotate_query(model, layer, step, row + r, place)
                copy_values(place, layer.head_dim, _query(model, layer, step, row + r, head))
            elif head < first_value:
                if layer.is_value_key != 0:
                    _append_value(plan, model, layer, step, row + r, head - model.num_heads, place)
                if layer.k_norm != 0:
                    norm_head(place, layer.k_norm, layer.head_dim, model.norm_eps)
                _append_key(plan, model, layer, step, row + r, head - model.num_heads, place)
            else:
                _append_value(plan, model, layer, step, row + r, head - first_value, place)


@kernel
def norm_heads(plan: Plan, here: Record, stage: Record, row: int) -> None:
    """Norm all queries and all keys of a row together and finish them."""
    model, layer, step = model_at(here.model), layer_at(stage.layer), step_at(here.step)
    size = layer.head_dim
    norm_head(_query(model, layer, step, row, 0), layer.q_norm, model.num_heads * size, model.norm_eps)
    for head in range(model.num_heads):
        _rotate_query(model, layer, step, row, _query(model, layer, step, row, head))
    norm_head(_key(layer, step, row, 0), layer.k_norm, layer.num_kv_heads * size, model.norm_eps)
    for head in range(layer.num_kv_heads):
        _append_key(plan, model, layer, step, row, head, _key(layer, step, row, head))


@kernel
def _query(model: Record, layer: Record, step: Record, row: int, head: int) -> int:
    return step.queries + 4 * (row * model.num_heads + head) * layer.head_dim


@kernel
def _key(layer: Record, step: Record, row: int, head: int) -> int:
    return step.keys + 4 * (row * layer.num_kv_heads + head) * layer.head_dim


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
def _append_key(plan: Plan, model: Record, layer: Record, step: Record, row: int, head: int, place: int) -> None:
    _rotate(model, layer, step, row, place, np.float32(1))
    _append(plan, layer, step, row, head, place, splat(np.float32(1)))


@kernel
def _append_value(plan: Plan, model: Record, layer: Record, step: Record, row: int, head: int, place: int) -> None:
    factor = head_scale(place, layer.head_dim, model.norm_eps) if model.has_v_norm else splat(np.float32(1))
    _append(plan, layer, step, row, layer.num_kv_heads + head, place, factor)


@kernel
def _append(plan: Plan, layer: Record, step: Record, row: int, head: int, place: int, factor: Lanes) -> None:
    """Write a key head (below num_kv_heads) or a value head, times a number, to the slot of a row, if it has one."""
    slot = read_int32(step.slot_mapping + 4 * row)
    if slot < 0:
        return
    element = 2 if plan.is_bfloat16 else 4
    base = layer.pool + layer.pool_offset + slot // plan.block_size * layer.block_bytes
    out = base + head * layer.head_bytes + slot % plan.block_size * layer.head_dim * element
    for i in range(0, layer.head_dim, LANES):
        x = multiply(load(place + 4 * i), factor)
        if plan.is_bfloat16:
            store_bfloat16(out + 2 * i, x)
        else:
            store(out + 4 * i, x)
