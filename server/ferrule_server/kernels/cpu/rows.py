"""What is done with one row of a step, by the kind of the stage."""

from __future__ import annotations

from ferrule_server.kernels.cpu import lanes as simd
from ferrule_server.kernels.cpu.activations import (
    add_normed,
    embed_row,
    layer_norm_row,
    load_element,
    mix_inputs,
    norm_row,
    quantise_row,
    rotation_row,
    scale_row,
    store_input,
    store_row,
)
from ferrule_server.kernels.cpu.experts import add_experts, gather, group_pairs, route, sigmoid
from ferrule_server.kernels.cpu.head import clear_output, merge_output
from ferrule_server.kernels.cpu.heads import norm_heads
from ferrule_server.kernels.cpu.kernel import Record, kernel
from ferrule_server.kernels.cpu.kinds import Kind, Rows
from ferrule_server.kernels.cpu.plan import Plan
from ferrule_server.kernels.cpu.records import model_at, step_at
from ferrule_server.kernels.cpu.scalars import read_float32, read_int32


@kernel
def count_rows(model: Record, step: Record, rows: int) -> int:
    """Return how many rows there are of a sort."""
    if rows == Rows.PAIRS:
        return step.num_rows * model.num_used
    if rows == Rows.ALL:
        return 1
    return step.num_outputs if rows == Rows.OUTPUTS else step.num_rows


@kernel
def run_row(plan: Plan, here: Record, stage: Record, row: int) -> None:
    """Run a stage for one row; ``row`` is the number of an output if the stage is of outputs."""
    model, step = model_at(here.model), step_at(here.step)
    kind = stage.kind
    if kind == Kind.EMBED:
        _embed(plan, model, step, row)
    elif kind == Kind.QUANTISE:
        source, out = stage.inputs + row * stage.input_bytes, stage.out + row * stage.out_bytes
        quantise_row(plan, source, stage.num_tiles, stage.is_int8, out)
    elif kind == Kind.NORM_HEADS:
        norm_heads(plan, here, stage, row)
    elif kind == Kind.ADD_NORMED:
        place = 4 * row * model.hidden_size
        out, source = step.hidden + place, step.added + place
        add_normed(out, source, stage.weight, model.hidden_size, model.norm_eps, stage.factor)
    elif kind == Kind.SCALE:
        scale_row(step.hidden + 4 * row * model.hidden_size, model.hidden_size, stage.factor)
    elif kind == Kind.MIX_INPUTS:
        mix_inputs(plan, model, step, stage, row)
    elif kind == Kind.CLEAR_OUTPUT:
        clear_output(step, row)
    elif kind == Kind.MERGE_OUTPUT:
        merge_output(model, step, row)
    elif kind in (Kind.NORM, Kind.LAYER_NORM, Kind.COPY):
        _norm(plan, model, step, stage, row)
    else:
        _run_experts(plan, model, step, stage, row)


@kernel
def _run_experts(plan: Plan, model: Record, step: Record, stage: Record, row: int) -> None:
    """Run a stage of a mixture for one row."""
    kind = stage.kind
    if kind == Kind.ROUTE:
        route(model, step, stage, row)
    elif kind == Kind.GROUP_PAIRS:
        group_pairs(model, step)
    elif kind == Kind.GATHER:
        gather(step, stage, row)
    elif kind == Kind.ADD_EXPERTS:
        add_experts(model, step, stage, row)
    elif kind == Kind.GATE_SHARED:
        factor = sigmoid(simd.splat(read_float32(stage.kept + row * stage.kept_bytes)))
        out = stage.out + row * stage.out_bytes
        for i in range(0, stage.size, simd.LANES):
            x = load_element(plan, out, i) if not plan.has_wide_inputs else simd.load(out + 4 * i)
            store_input(plan, out, i, simd.multiply(x, factor))


@kernel
def _embed(plan: Plan, model: Record, step: Record, row: int) -> None:
    """Write a row of the residual stream, and its rotations."""
    embed_row(plan, model, read_int32(step.token_ids + 4 * row), step.hidden + 4 * row * model.hidden_size)
    position, size = read_int32(step.positions + 4 * row), 4 * model.head_dim
    for i in range(model.num_rotations):
        out = step.rotations + (row * model.num_rotations + i) * size
        rotation_row(position, model.rotations + i * size, model.head_dim, out)


@kernel
def _norm(plan: Plan, model: Record, step: Record, stage: Record, row: int) -> None:
    """Write a row of the residual stream as inputs of a linear layer, normed by the kind of the stage."""
    source = read_int32(step.output_rows + 4 * row) if stage.rows == Rows.OUTPUTS else row
    hidden, out = step.hidden + 4 * source * model.hidden_size, step.normed + row * step.normed_bytes
    if stage.kind == Kind.NORM:
        norm_row(plan, hidden, stage.weight, model.hidden_size, model.norm_eps, out)
    elif stage.kind == Kind.LAYER_NORM:
        layer_norm_row(plan, hidden, stage.weight, stage.bias, model.hidden_size, model.norm_eps, out)
    else:
        store_row(plan, hidden, model.hidden_size, out)
