"""One step of a decoder as one function that every thread runs, from token ids to outputs.

    embed                rows: embedding, rotation angles, norm of the first layer
    project    ------ x layers: units of heads: q, k, v; norm, rotation; K and V into the pool
    attend       |       (task, KV head); partials are merged after another barrier
    add          |       units: output layer of attention, added to the residual stream
    norm         |       rows
    activate     |       units: gate and up, silu(gate) * up
    add          |       units: the last layer, added to the residual stream
    norm       ------    rows: norm of the next layer; after the last one, of the output rows
    head                 units of logits, then rows: the results of the threads are merged

Every line is a stage that ends at a barrier. Some models change the list:

* Quantised weights: the norms write integers, and two more stages over rows quantise the outputs of attention and of
  the activation.
* All heads of a row normed together: a stage over rows after ``project``.
* A norm of what is added: ``add`` writes its output beside the residual stream, and ``norm`` adds it.
* Attention and feed-forward part in parallel: both read the same rows, and the first ``norm`` is left out.
* A second embedding: the step begins by preparing what the layers read of it (rows, units of the projection), and each
  layer ends by adding it (rows, units of the gate, units of the projection).

Threads claim units; rows are shared out evenly. The results do not depend on which thread computes them. The first unit
of a thread is fixed, so that it can prefetch its weights while it waits at the barrier.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ferrule_server.kernels.cpu.activations import (
    add_normed,
    embed_row,
    finish_input,
    layer_norm_row,
    norm_row,
    quantise_row,
    rotation_row,
    scale_row,
    store_row,
)
from ferrule_server.kernels.cpu.head import clear_outputs, merge_outputs
from ferrule_server.kernels.cpu.kernel import Record, kernel
from ferrule_server.kernels.cpu.lanes import I8, I64, Builder, Value, pointer
from ferrule_server.kernels.cpu.linear import (
    ACTIVATE,
    ADD_ATTENTION,
    ADD_FEED_FORWARD,
    ADD_INPUT,
    ATTEND,
    GATE_INPUT,
    PROJECT,
    PROJECT_INPUTS,
    READ_LOGITS,
    finish_rows,
    first_weights,
)
from ferrule_server.kernels.cpu.plan import Plan
from ferrule_server.kernels.cpu.records import LAYER, layer_at, model_at, step_at
from ferrule_server.kernels.cpu.scalars import read_int32
from ferrule_server.kernels.cpu.sync import barrier, begin_step, end_step, is_aborted, park, release, reset, share
from ferrule_server.kernels.cpu.tiles import begin_tiles, end_tiles

__all__ = ["num_stages", "work"]

_STAGES_PER_LAYER: Final = 8
_LAYER_BYTES: Final = LAYER.itemsize


def num_stages(num_layers: int) -> int:
    """Return how many stages a step has in which work is claimed."""
    return num_layers * _STAGES_PER_LAYER + 2


@intrinsic
def _call(typing, kernel, model, layer, step, sync, thread, stage, kind, ahead):  # type: ignore[no-untyped-def]
    """Call the machine code of a kernel; a plan has no value at run time."""

    def emit(context: Any, builder: Builder, _signature: Any, args: Any) -> Value:
        function = ir.FunctionType(I64, [I8.as_pointer(), *[I64] * 8])
        builder.call(pointer(builder, args[0], function), [ir.Constant(I8.as_pointer(), None), *args[1:]])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), emit


@kernel
def work(plan: Plan, model_address: int, step_address: int, sync: int, thread: int) -> int:
    """Run this thread's part of every step: thread 0 of one step, another one until the block is aborted.

    Thread 0 begins the step, and returns 1 if it was completed, else 0. Other threads are parked between steps.
    """
    step = step_at(step_address)
    if thread == 0:
        reset(sync, step.num_stages, step.num_threads)
        for other in range(1, step.num_threads):
            release(sync, other)
        begin_step(sync)
        is_complete = _run(plan, model_address, step_address, sync, thread)
        end_step(sync)
        return is_complete
    while True:
        park(sync, thread)
        if is_aborted(sync):
            return 0
        _run(plan, model_address, step_address, sync, thread)


@kernel
def _run(plan: Plan, model_address: int, step_address: int, sync: int, thread: int) -> bool:
    """Run one thread's part of a step; return False if the step was aborted."""
    begin_tiles(plan)
    is_complete = _run_stages(plan, model_address, step_address, sync, thread)
    end_tiles(plan)
    return is_complete


@kernel
def _run_stages(plan: Plan, model_address: int, step_address: int, sync: int, thread: int) -> bool:
    model, step = model_at(model_address), step_at(step_address)
    has_outputs = step.num_outputs > 0  # after the last barrier the record may already hold the next step
    if step.is_head_only:
        return _run_head(plan, model_address, step_address, sync, thread)
    _embed(plan, model, step, thread)
    if model.input_embedding != 0 and not _embed_inputs(plan, model_address, step_address, sync, thread):
        return False
    first = layer_at(model.layers)
    _norm(plan, model, step, first.attention_norm, first.attention_norm_bias, thread)
    if not barrier(sync, step.num_threads, first_weights(plan, model, first, PROJECT, thread)):
        return False
    for i in range(model.num_layers):
        if not _run_layer(plan, model_address, model.layers + i * _LAYER_BYTES, step_address, sync, thread, i):
            return False
    return not has_outputs or _run_head(plan, model_address, step_address, sync, thread)


@kernel
def _embed(plan: Plan, model: Record, step: Record, thread: int) -> None:
    """Write the residual stream and the rotation of this thread's rows."""
    begin, end = share(step.num_rows, step.num_threads, thread)
    for row in range(begin, end):
        embed_row(plan, model, read_int32(step.token_ids + 4 * row), step.hidden + 4 * row * model.hidden_size)
        position, size = read_int32(step.positions + 4 * row), 4 * model.head_dim
        for i in range(model.num_rotations):
            out = step.rotations + (row * model.num_rotations + i) * size
            rotation_row(position, model.rotations + i * size, model.head_dim, out)


@kernel
def _embed_inputs(plan: Plan, model_address: int, step_address: int, sync: int, thread: int) -> bool:
    """Prepare one thread's part of the second embedding for all layers; return False if the step was aborted."""
    model, step = model_at(model_address), step_at(step_address)
    first, stage = layer_at(model.layers), model.num_layers * _STAGES_PER_LAYER + 1
    _norm(plan, model, step, 0, 0, thread)
    if not barrier(sync, step.num_threads, first_weights(plan, model, first, PROJECT_INPUTS, thread)):
        return False
    ahead = first_weights(plan, model, first, PROJECT, thread)
    if not _stage(
        model.linear_kernel, model_address, model.layers, step_address, sync, thread, stage, PROJECT_INPUTS, ahead
    ):
        return False
    begin, end = share(step.num_rows, step.num_threads, thread)
    for row in range(begin, end):
        token_id = read_int32(step.token_ids + 4 * row)
        for i in range(model.num_layers):
            finish_input(plan, model, token_id, i, step.inputs + 4 * (row * model.num_layers + i) * model.input_size)
    return True


@kernel
def _norm(plan: Plan, model: Record, step: Record, weight: int, bias: int, thread: int) -> None:
    """Write the norm of this thread's rows."""
    begin, end = share(step.num_rows, step.num_threads, thread)
    for row in range(begin, end):
        _norm_row(plan, model, step, row, weight, bias, row)


@kernel
def _norm_row(plan: Plan, model: Record, step: Record, row: int, weight: int, bias: int, place: int) -> None:
    """Write the norm of a row of the residual stream as the inputs in a place; without a weight, the row itself."""
    hidden, normed = step.hidden + 4 * row * model.hidden_size, step.normed + place * step.normed_bytes
    if weight == 0:
        store_row(plan, hidden, model.hidden_size, normed)
    elif model.has_layer_norm:
        layer_norm_row(plan, hidden, weight, bias, model.hidden_size, model.norm_eps, normed)
    else:
        norm_row(plan, hidden, weight, model.hidden_size, model.norm_eps, normed)
    if plan.is_quantised:
        quantise_row(plan, normed, model.hidden_tiles, step.quantised + place * step.quantised_bytes)


@kernel
def _add_normed(model: Record, step: Record, weight: int, factor: np.float32, thread: int) -> None:
    """Add the norm of the output of a part of a layer to this thread's rows; without a weight it is there already."""
    if weight == 0:
        return
    begin, end = share(step.num_rows, step.num_threads, thread)
    for row in range(begin, end):
        place = 4 * row * model.hidden_size
        add_normed(
            step.hidden + place,
            step.added + place,
            weight,
            model.hidden_size,
            model.norm_eps,
            factor,
        )


@kernel
def _scale_rows(model: Record, step: Record, factor: np.float32, thread: int) -> None:
    """Multiply this thread's rows of the residual stream by a number."""
    begin, end = share(step.num_rows, step.num_threads, thread)
    for row in range(begin, end):
        scale_row(step.hidden + 4 * row * model.hidden_size, model.hidden_size, factor)


@kernel
def _quantise(
    plan: Plan, step: Record, sync: int, rows: int, row_bytes: int, num_tiles: int, thread: int, ahead: int
) -> bool:
    """Write this thread's rows as integers and wait for the other threads; return False if the step was aborted."""
    begin, end = share(step.num_rows, step.num_threads, thread)
    for row in range(begin, end):
        quantise_row(plan, rows + row * row_bytes, num_tiles, step.quantised + row * step.quantised_bytes)
    return barrier(sync, step.num_threads, ahead)


@kernel
def _stage(
    kernel: int,
    model: Record,
    layer: Record,
    step: Record,
    sync: int,
    thread: int,
    stage: int,
    kind: np.int64,
    ahead: int,
) -> bool:
    """Run a kernel, then wait for the other threads; return False if the step was aborted."""
    _call(kernel, model, layer, step, sync, thread, stage, kind, ahead)
    return barrier(sync, step_at(step).num_threads, ahead)


@kernel
def _run_layer(
    plan: Plan, model_address: int, layer_address: int, step_address: int, sync: int, thread: int, index: int
) -> bool:
    """Run one thread's part of a layer; return False if the step was aborted."""
    return _run_attention(plan, model_address, layer_address, step_address, sync, thread, index) and _run_feed_forward(
        plan, model_address, layer_address, step_address, sync, thread, index
    )


@kernel
def _run_attention(
    plan: Plan, model_address: int, layer_address: int, step_address: int, sync: int, thread: int, index: int
) -> bool:
    """Run one thread's part of a layer up to the output layer of attention; return False if the step was aborted."""
    model, layer, step = model_at(model_address), layer_at(layer_address), step_at(step_address)
    first, linear = index * _STAGES_PER_LAYER, model.linear_kernel
    ahead = first_weights(plan, model, layer, ADD_ATTENTION, thread)
    if not _stage(linear, model_address, layer_address, step_address, sync, thread, first, PROJECT, ahead):
        return False
    if model.has_row_norm:
        begin, end = share(step.num_rows, step.num_threads, thread)
        finish_rows(plan, model, layer, step, begin, end)
        if not barrier(sync, step.num_threads, ahead):
            return False
    attend, merge = layer.attend_kernel, layer.merge_kernel
    if not _stage(attend, model_address, layer_address, step_address, sync, thread, first + 1, ATTEND, ahead):
        return False
    has_merges = step.num_merges > 0
    if has_merges and not _stage(
        merge, model_address, layer_address, step_address, sync, thread, first + 2, ATTEND, ahead
    ):
        return False
    if plan.is_quantised and not _quantise(
        plan, step, sync, step.attended, step.attended_bytes, layer.query_tiles, thread, ahead
    ):
        return False
    ahead = first_weights(plan, model, layer, ACTIVATE, thread)
    return _stage(linear, model_address, layer_address, step_address, sync, thread, first + 3, ADD_ATTENTION, ahead)


@kernel
def _run_feed_forward(
    plan: Plan, model_address: int, layer_address: int, step_address: int, sync: int, thread: int, index: int
) -> bool:
    """Run one thread's part of the rest of a layer; return False if the step was aborted."""
    model, layer, step = model_at(model_address), layer_at(layer_address), step_at(step_address)
    first, linear = index * _STAGES_PER_LAYER, model.linear_kernel
    has_input = layer.input_gate != 0
    ahead = first_weights(plan, model, layer, ACTIVATE, thread)
    if model.is_parallel:
        if plan.is_quantised and not _quantise(
            plan, step, sync, step.normed, step.normed_bytes, model.hidden_tiles, thread, ahead
        ):
            return False
    else:
        _add_normed(model, step, layer.attention_out_norm, model.residual_scale, thread)
        _norm(plan, model, step, layer.mlp_norm, layer.mlp_norm_bias, thread)
        if not barrier(sync, step.num_threads, ahead):
            return False
    ahead = first_weights(plan, model, layer, ADD_FEED_FORWARD, thread)
    if not _stage(linear, model_address, layer_address, step_address, sync, thread, first + 4, ACTIVATE, ahead):
        return False
    if plan.is_quantised and not _quantise(
        plan, step, sync, step.activated, step.activated_bytes, layer.intermediate_tiles, thread, ahead
    ):
        return False
    is_last = index + 1 == model.num_layers
    following = layer_at(layer_address if is_last else layer_address + _LAYER_BYTES)
    after = first_weights(plan, model, following, READ_LOGITS if is_last else PROJECT, thread)
    ahead = first_weights(plan, model, layer, GATE_INPUT, thread) if has_input else after
    if not _stage(linear, model_address, layer_address, step_address, sync, thread, first + 5, ADD_FEED_FORWARD, ahead):
        return False
    _add_normed(model, step, layer.mlp_out_norm, model.residual_scale, thread)
    if has_input and not _add_input(plan, model_address, layer_address, step_address, sync, thread, first + 6, after):
        return False
    if layer.scale != 1:
        _scale_rows(model, step, layer.scale, thread)
    if is_last:
        has_changed = model.has_norm_after or has_input or layer.scale != 1
        return not has_changed or barrier(sync, step.num_threads, after)
    _norm(plan, model, step, following.attention_norm, following.attention_norm_bias, thread)
    return barrier(sync, step.num_threads, after)


@kernel
def _add_input(
    plan: Plan,
    model_address: int,
    layer_address: int,
    step_address: int,
    sync: int,
    thread: int,
    stage: int,
    after: int,
) -> bool:
    """Run one thread's part of adding the second embedding; return False if the step was aborted."""
    model, layer, step = model_at(model_address), layer_at(layer_address), step_at(step_address)
    linear = model.linear_kernel
    _norm(plan, model, step, 0, 0, thread)
    if not barrier(sync, step.num_threads, first_weights(plan, model, layer, GATE_INPUT, thread)):
        return False
    ahead = first_weights(plan, model, layer, ADD_INPUT, thread)
    if not _stage(linear, model_address, layer_address, step_address, sync, thread, stage, GATE_INPUT, ahead):
        return False
    if plan.is_quantised and not _quantise(
        plan, step, sync, step.activated, step.activated_bytes, model.input_tiles, thread, ahead
    ):
        return False
    if not _stage(linear, model_address, layer_address, step_address, sync, thread, stage + 1, ADD_INPUT, after):
        return False
    _add_normed(model, step, layer.input_norm, np.float32(1), thread)
    return True


@kernel
def _run_head(plan: Plan, model_address: int, step_address: int, sync: int, thread: int) -> bool:
    """Run one thread's part of the output head; return False if the step was aborted."""
    model, step = model_at(model_address), step_at(step_address)
    begin, end = share(step.num_outputs, step.num_threads, thread)
    for i in range(begin, end):
        row = read_int32(step.output_rows + 4 * i)
        _norm_row(plan, model, step, row, model.final_norm, model.final_norm_bias, i)
    clear_outputs(step, thread)
    layer = layer_at(model.layers)
    if not barrier(sync, step.num_threads, first_weights(plan, model, layer, READ_LOGITS, thread)):
        return False
    stage, ahead = model.num_layers * _STAGES_PER_LAYER, first_weights(plan, model, layer, PROJECT, thread)
    if not _stage(
        model.linear_kernel, model_address, model.layers, step_address, sync, thread, stage, READ_LOGITS, ahead
    ):
        return False
    for i in range(begin, end):
        merge_outputs(model, step, i)
    return barrier(sync, step.num_threads, ahead)
