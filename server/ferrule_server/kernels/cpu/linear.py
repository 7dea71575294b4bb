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

from ferrule_server.kernels.cpu import lanes as simd
from ferrule_server.kernels.cpu.activations import clear_values, copy_values, store_input
from ferrule_server.kernels.cpu.calls import call_multiply
from ferrule_server.kernels.cpu.dot import GROUP
from ferrule_server.kernels.cpu.experts import MOST_PAIRS, expert_at, segment_at
from ferrule_server.kernels.cpu.head import read_logits
from ferrule_server.kernels.cpu.heads import project_heads
from ferrule_server.kernels.cpu.kernel import Lanes, Record, kernel
from ferrule_server.kernels.cpu.kinds import Kind, Rows
from ferrule_server.kernels.cpu.plan import Plan
from ferrule_server.kernels.cpu.records import model_at, stage_at, step_at, sums_of, thread_at
from ferrule_server.kernels.cpu.scalars import read_int32
from ferrule_server.kernels.cpu.sync import claim

_CACHED_BYTES: Final = 256 << 10
"""Inputs of a block of rows, so that they stay in the L2 cache beside the weights of a unit."""
_LEAST_BLOCK_ROWS: Final = 32
"""At least as many as are multiplied together with any instructions."""
MOST_BLOCK_ROWS: Final = MOST_PAIRS
"""Rows of a block, however narrow they are, so that their sums stay there too."""

_GELU_LINEAR: Final = np.float32(-2 * math.sqrt(2 / math.pi))
_GELU_CUBIC: Final = np.float32(-2 * math.sqrt(2 / math.pi) * 0.044715)


@kernel
def first_weights(step: Record, stage: Record, thread: int) -> int:
    """Return the address of the weights that a thread multiplies first in a linear layer."""
    first = stage.weight + min(thread, stage.num_units - 1) * stage.unit_bytes
    return first + expert_at(step, 0) * stage.expert_bytes if stage.expert_bytes else first


@kernel
def linear(plan: Plan, thread: int, stage_address: int) -> int:
    """Run a thread's part of one linear layer: multiply and finish the units that it claims.

    What the thread reads after this stage is prefetched during its last unit.
    """
    here, stage = thread_at(thread), stage_at(stage_address)
    step = step_at(here.step)
    num_rows = step.num_outputs if stage.rows == Rows.OUTPUTS else step.num_rows
    ahead = first_weights(step, stage_at(stage.following), here.number)
    weight, num_units, unit_bytes = stage.weight, stage.num_units, stage.unit_bytes
    inputs, input_bytes, expert_bytes = stage.inputs, stage.input_bytes, stage.expert_bytes
    group_bytes = unit_bytes // stage.groups_at_once
    sums, sum_bytes = sums_of(here, stage)
    block_rows = min(MOST_BLOCK_ROWS, max(_LEAST_BLOCK_ROWS, _CACHED_BYTES // input_bytes))
    num_blocks = read_int32(step.segments) if expert_bytes else (num_rows + block_rows - 1) // block_rows
    num_items = num_units * num_blocks
    item = here.number
    while item < num_items:
        following = claim(here.sync, stage.claim)
        unit, row, expert = item % num_units, item // num_units * block_rows, 0
        count = min(block_rows, num_rows - row)
        if expert_bytes:
            expert, row, count = segment_at(step, item // num_units)
        clear_values(sums, count * sum_bytes // 4)
        first = weight + unit * unit_bytes + expert * expert_bytes
        upcoming = ahead if following >= num_items else weight + following % num_units * unit_bytes
        if expert_bytes and following < num_items:
            upcoming += expert_at(step, following // num_units) * expert_bytes
        for group in range(stage.groups_at_once):
            place = first + group * group_bytes
            call_multiply(
                stage.multiply, place, stage.num_tiles, count, inputs + row * input_bytes, input_bytes,
                sums + 4 * GROUP * group, sum_bytes,
                upcoming if group + 1 == stage.groups_at_once else place + group_bytes,
            )  # fmt: skip
        if stage.bias != 0:
            _add_bias(sums, sum_bytes, count, stage.bias + (expert * num_units + unit) * sum_bytes)
        _finish(plan, here, stage, unit, row, count)
        item = following
    return 0


@kernel
def _add_bias(sums: int, sum_bytes: int, num_rows: int, bias: int) -> None:
    for row in range(num_rows):
        for i in range(0, sum_bytes, 4 * simd.LANES):
            place = sums + row * sum_bytes + i
            simd.store(place, simd.add(simd.load(place), simd.load(bias + i)))


@kernel
def _finish(plan: Plan, here: Record, stage: Record, unit: int, row: int, num_rows: int) -> None:
    """Take the sums of some rows and one unit to where they are needed."""
    kind = stage.kind
    if kind in (Kind.PROJECT, Kind.KEEP_HEADS):
        project_heads(plan, here, stage, unit, row, num_rows)
    elif kind == Kind.ADD:
        _add_residual(here, stage, unit, row, num_rows)
    elif kind == Kind.KEEP:
        _keep(here, stage, unit, row, num_rows)
    elif kind == Kind.ACTIVATE:
        _activate(plan, here, stage, unit, row, num_rows)
    elif kind == Kind.GATE:
        _gate_kept(plan, here, stage, unit, row, num_rows)
    elif kind == Kind.READ_LOGITS:
        read_logits(here, stage, unit, row, num_rows)


@kernel
def _add_residual(here: Record, stage: Record, unit: int, row: int, num_rows: int) -> None:
    """Add the outputs of a unit of 64 to the residual stream."""
    model, step = model_at(here.model), step_at(here.step)
    sums, sum_bytes = sums_of(here, stage)
    first = unit * GROUP
    width = min(GROUP, model.hidden_size - first)
    factor = simd.splat(stage.factor)
    for i in range(num_rows):
        out = step.hidden + 4 * ((row + i) * model.hidden_size + first)
        for j in range(0, width, simd.LANES):
            x = simd.load(sums + i * sum_bytes + 4 * j)
            simd.store(out + 4 * j, simd.add(simd.load(out + 4 * j), simd.multiply(x, factor)))


@kernel
def _activate(plan: Plan, here: Record, stage: Record, unit: int, row: int, num_rows: int) -> None:
    """Write activation(gate) * up of a unit, which holds 32 rows of gate, then the same rows of up.

    Without a gate it holds 64 rows, and the activation of each is written.
    """
    model = model_at(here.model)
    sums, sum_bytes = sums_of(here, stage)
    is_gated, is_gelu = model.is_gated, model.is_gelu
    width = GROUP // 2 if is_gated else GROUP
    for i in range(num_rows):
        out = stage.out + (row + i) * stage.out_bytes
        for j in range(0, width, simd.LANES):
            x = simd.load(sums + i * sum_bytes + 4 * j)
            x = gelu(x) if is_gelu else _silu(x)
            if is_gated:
                x = simd.multiply(x, simd.load(sums + i * sum_bytes + 4 * (width + j)))
            store_input(plan, out, unit * width + j, x)


@kernel
def _keep(here: Record, stage: Record, unit: int, row: int, num_rows: int) -> None:
    """Write the outputs of a unit of 64 as they are."""
    sums, sum_bytes = sums_of(here, stage)
    width = min(GROUP, stage.size - unit * GROUP)
    for i in range(num_rows):
        copy_values(sums + i * sum_bytes, width, stage.kept + (row + i) * stage.kept_bytes + 4 * unit * GROUP)


@kernel
def _gate_kept(plan: Plan, here: Record, stage: Record, unit: int, row: int, num_rows: int) -> None:
    """Write activation(gate) * kept of 64 values."""
    model = model_at(here.model)
    sums, sum_bytes = sums_of(here, stage)
    width = min(GROUP, stage.size - unit * GROUP)
    for i in range(num_rows):
        kept = stage.kept + (row + i) * stage.kept_bytes + 4 * unit * GROUP
        out = stage.out + (row + i) * stage.out_bytes
        for j in range(0, width, simd.LANES):
            x = simd.load(sums + i * sum_bytes + 4 * j)
            x = gelu(x) if model.is_gelu else _silu(x)
            store_input(plan, out, unit * GROUP + j, simd.multiply(x, simd.load(kept + 4 * j)))


@kernel
def _silu(x: Lanes) -> Lanes:
    """Return x / (1 + exp(-x)); where exp would overflow, x times the least that it can be."""
    return simd.divide(x, simd.add(simd.splat(np.float32(1)), simd.exp(simd.subtract(simd.splat(np.float32(0)), x))))


@kernel
def gelu(x: Lanes) -> Lanes:
    """Return x * (1 + tanh(y)) / 2, which is x / (1 + exp(-2 y)), for y = sqrt(2 / pi) * (x + 0.044715 x**3)."""
    cubic = simd.fma(simd.multiply(x, x), simd.splat(_GELU_CUBIC), simd.splat(_GELU_LINEAR))
    return simd.divide(x, simd.add(simd.splat(np.float32(1)), simd.exp(simd.multiply(x, cubic))))
