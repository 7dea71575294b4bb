"""One step of a decoder as one function that every thread runs, from token ids to outputs.

A step is a list of stages, which ``executor.cpu.stages`` writes when a model is loaded. Of a plain layer they are::

    norm, project           rows: norm of the residual stream; units of heads: q, k, v; norm, rotation; the pool
    attend, merge           tasks of attention; partials, if there are any
    add                     units: output layer of attention, added to the residual stream
    norm, activate          rows; units: gate and up, activation(gate) * up
    add                     units: the last layer, added to the residual stream

A mixture has others in the place of the last two (``experts``): router, the experts of each row, the pairs of rows and
experts in the order of experts, and their inputs; gate and up and the last layer of all pairs; the sum of each row.

In a stage of rows every thread has its share of the rows. Stages of the same rows that follow each other are run row
after row, without a barrier between them. In all others threads claim units; the first of a thread is fixed, so that it
can prefetch its weights while it waits at the barrier. The results do not depend on which thread computes them.
"""

from __future__ import annotations

from typing import Final

from ferrule_server.kernels.cpu.calls import call_stage
from ferrule_server.kernels.cpu.kernel import Record, kernel
from ferrule_server.kernels.cpu.kinds import Kind
from ferrule_server.kernels.cpu.linear import first_weights
from ferrule_server.kernels.cpu.plan import Plan
from ferrule_server.kernels.cpu.records import STAGE, model_at, stage_at, step_at, thread_at
from ferrule_server.kernels.cpu.rows import count_rows, run_row
from ferrule_server.kernels.cpu.sync import barrier, begin_step, end_step, is_aborted, park, release, reset, share
from ferrule_server.kernels.cpu.tiles import begin_tiles, end_tiles

_STAGE_BYTES: Final = STAGE.itemsize


@kernel
def work(plan: Plan, thread: int) -> int:
    """Run this thread's part of every step: thread 0 of one step, another one until the block is aborted.

    Thread 0 begins the step, and returns 1 if it was completed, else 0. Other threads are parked between steps.
    """
    here = thread_at(thread)
    step = step_at(here.step)
    if here.number == 0:
        reset(here.sync, model_at(here.model).num_claims, step.num_threads)
        for other in range(1, step.num_threads):
            release(here.sync, other)
        begin_step(here.sync)
        is_complete = _run(plan, thread)
        end_step(here.sync)
        return is_complete
    while True:
        park(here.sync, here.number)
        if is_aborted(here.sync):
            return 0
        _run(plan, thread)


@kernel
def _run(plan: Plan, thread: int) -> bool:
    """Run one thread's part of a step; return False if the step was aborted."""
    begin_tiles(plan)
    is_complete = _run_stages(plan, thread)
    end_tiles(plan)
    return is_complete


@kernel
def _run_stages(plan: Plan, thread: int) -> bool:
    here = thread_at(thread)
    model, step = model_at(here.model), step_at(here.step)
    number = model.first_of_head if step.is_head_only else 0
    # Read now: after the last barrier the record may already hold the next step.
    end = model.first_of_head if step.num_outputs == 0 else model.num_stages - (step.num_choices == 0)
    while number < end:
        place = model.stages + number * _STAGE_BYTES
        stage = stage_at(place)
        number += stage.num_together
        if stage.kind == Kind.MERGE and step.num_merges == 0:
            continue
        if stage.kernel == 0:
            _run_rows(plan, here, place, stage.num_together)
        else:
            call_stage(stage.kernel, thread, place)
            if stage.is_open:
                continue
        if not barrier(here.sync, step.num_threads, first_weights(step, stage_at(stage.following), here.number)):
            return False
    return True


@kernel
def _run_rows(plan: Plan, here: Record, first: int, num_stages: int) -> None:
    """Run some stages for this thread's rows, row after row."""
    step = step_at(here.step)
    num_rows = count_rows(model_at(here.model), step, stage_at(first).rows)
    begin, end = share(num_rows, step.num_threads, here.number)
    for row in range(begin, end):
        for i in range(num_stages):
            run_row(plan, here, stage_at(first + i * _STAGE_BYTES), row)
