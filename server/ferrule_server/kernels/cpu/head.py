"""The output head: logits, and what outputs need of them, computed while they are in registers.

Of each row every thread keeps the largest logit and the k largest of the logits that it has computed; for each unit of
64 logits there is the sum of their exponentials. Merging these in order gives the same bits whatever thread computed
which unit. Whole rows of logits are written to memory only for outputs that need them.
"""

from __future__ import annotations

import math

import numpy as np

from ferrule_server.kernels.cpu import lanes as simd
from ferrule_server.kernels.cpu.activations import softcap
from ferrule_server.kernels.cpu.dot import GROUP
from ferrule_server.kernels.cpu.kernel import Record, kernel
from ferrule_server.kernels.cpu.records import (
    BEST_BYTES,
    MOST_TOP,
    RESULT_FIELDS,
    WANTS_LOGITS,
    WANTS_SUMS,
    model_at,
    step_at,
    sums_of,
)
from ferrule_server.kernels.cpu.scalars import read_float32, read_int32, write_float32, write_float64, write_int32

_LOWEST = np.float32(-np.inf)


@kernel
def clear_output(step: Record, row: int) -> None:
    """Begin an output: no thread has seen any of its logits."""
    for thread in range(step.num_threads):
        best = step.best + (thread * step.num_outputs + row) * BEST_BYTES
        write_float32(best, _LOWEST)
        write_int32(best + 4, -1)
        write_float32(best + 8, np.float32(0))
        write_int32(best + 12, 0)
        write_int32(best + 16, 0)


@kernel
def read_logits(here: Record, stage: Record, unit: int, row: int, num_rows: int) -> None:
    """Take what the outputs of some rows need of 64 logits."""
    model, step, thread = model_at(here.model), step_at(here.step), here.number
    sums, sum_bytes = sums_of(here, stage)
    first = unit * GROUP
    width = min(GROUP, model.vocab_size - first)
    for i in range(num_rows):
        output, logits = row + i, sums + i * sum_bytes
        wants = read_int32(step.wants + 4 * output)
        if model.logit_scale != 1 or model.logit_softcap != 0:
            _finish_logits(model, logits)
        if width < GROUP:
            for j in range(0, GROUP, simd.LANES):
                simd.store(logits + 4 * j, simd.select_below(width - j, simd.load(logits + 4 * j), simd.splat(_LOWEST)))
        kept = thread * step.num_outputs + output
        best = step.best + kept * BEST_BYTES
        top = _keep_best(logits, first, width, best)
        if wants & WANTS_LOGITS:
            for j in range(0, 4 * GROUP, 4 * simd.LANES):
                simd.store_past_caches(step.logits + output * step.logit_bytes + 4 * first + j, simd.load(logits + j))
        if wants & WANTS_SUMS:
            num_units = (model.vocab_size + GROUP - 1) // GROUP
            _keep_sums(logits, width, top, step.sums + (output * num_units + unit) * 16)
        count = read_int32(step.top_counts + 4 * output)
        if count > 0:
            _keep_top(logits, first, width, top, count, best, step.tops + kept * MOST_TOP * 8)
        target = read_int32(step.targets + 4 * output) - first
        if 0 <= target < width:
            place = step.results + (output * RESULT_FIELDS + 4) * 8
            write_float64(place, np.float64(read_float32(logits + 4 * target)))


@kernel
def _finish_logits(model: Record, logits: int) -> None:
    """Multiply 64 logits by ``logit_scale`` and cap them."""
    for j in range(0, GROUP, simd.LANES):
        x = simd.multiply(simd.load(logits + 4 * j), simd.splat(model.logit_scale))
        simd.store(logits + 4 * j, softcap(x, model.logit_softcap) if model.logit_softcap != 0 else x)


@kernel
def _keep_best(logits: int, first: int, width: int, best: int) -> float:
    """Return the largest of 64 logits; keep it if it is the largest so far, and whether any is NaN or infinite."""
    top, zero = simd.splat(_LOWEST), simd.splat(np.float32(0))
    invalid = simd.splat(read_float32(best + 8))
    for j in range(0, GROUP, simd.LANES):
        x = simd.load(logits + 4 * j)
        top = simd.maximum(x, top)
        invalid = simd.fma(simd.select_below(width - j, x, zero), zero, invalid)
    largest = simd.max_of(top)
    write_float32(best + 8, simd.sum_of(invalid))
    if largest > read_float32(best):
        write_float32(best, largest)
        for j in range(width):
            if read_float32(logits + 4 * j) == largest:
                write_int32(best + 4, first + j)
                break
    return largest


@kernel
def _keep_sums(logits: int, width: int, top: float, place: int) -> None:
    """Write the largest logit, the sum of exp(logit - largest), and of that times (logit - largest)."""
    total, weighted, zero = simd.splat(np.float32(0)), simd.splat(np.float32(0)), simd.splat(np.float32(0))
    for j in range(0, width, simd.LANES):
        below = simd.subtract(simd.load(logits + 4 * j), simd.splat(top))
        weights = simd.select_below(width - j, simd.exp(below), zero)
        total = simd.add(total, weights)
        weighted = simd.fma(weights, simd.select_below(width - j, below, zero), weighted)
    write_float32(place, top)
    write_float32(place + 4, simd.sum_of(total))
    write_float32(place + 8, simd.sum_of(weighted))


@kernel
def _keep_top(logits: int, first: int, width: int, top: float, count: int, best: int, entries: int) -> None:
    """Keep the ``count`` largest logits seen so far with their ids: largest first, among equals the lowest id first."""
    known = read_int32(best + 12)
    if known == count and top <= read_float32(entries + 8 * (known - 1)):
        return
    for j in range(width):
        x = read_float32(logits + 4 * j)
        if known == count and x <= read_float32(entries + 8 * (known - 1)):
            continue
        place = min(known, count - 1)
        while place > 0 and read_float32(entries + 8 * (place - 1)) < x:
            write_float32(entries + 8 * place, read_float32(entries + 8 * (place - 1)))
            write_int32(entries + 8 * place + 4, read_int32(entries + 8 * (place - 1) + 4))
            place -= 1
        write_float32(entries + 8 * place, x)
        write_int32(entries + 8 * place + 4, first + j)
        known = min(known + 1, count)
    write_int32(best + 12, known)


@kernel
def merge_output(model: Record, step: Record, row: int) -> None:
    """Merge what the threads have kept of one row into its results."""
    results = step.results + row * RESULT_FIELDS * 8
    top, token, invalid = _LOWEST, -1, np.float32(0)
    for thread in range(step.num_threads):
        best = step.best + (thread * step.num_outputs + row) * BEST_BYTES
        x, candidate = read_float32(best), read_int32(best + 4)
        invalid += read_float32(best + 8)
        if candidate >= 0 and (x > top or (x == top and candidate < token)):
            top, token = x, candidate
    write_float64(results, np.float64(token if invalid == 0 else -1))
    write_float64(results + 8, np.float64(top))
    if token >= 0 and read_int32(step.wants + 4 * row) & WANTS_SUMS:
        _merge_sums(model, step, row, np.float64(top), results)
    count = read_int32(step.top_counts + 4 * row)
    if count > 0:
        _merge_top(step, row, count)


@kernel
def _merge_sums(model: Record, step: Record, row: int, top: float, results: int) -> None:
    """Write the log of the sum of exp(logit), and the entropy."""
    num_units = (model.vocab_size + GROUP - 1) // GROUP
    total, weighted = 0.0, 0.0
    for unit in range(num_units):
        place = step.sums + (row * num_units + unit) * 16
        below = np.float64(read_float32(place)) - top
        factor = math.exp(below)
        part = np.float64(read_float32(place + 4))
        total += factor * part
        weighted += factor * (np.float64(read_float32(place + 8)) + below * part)
    write_float64(results + 16, top + math.log(total))
    write_float64(results + 24, max(0.0, math.log(total) - weighted / total))


@kernel
def _merge_top(step: Record, row: int, count: int) -> None:
    """Write the largest logits and their ids; the lists of the threads are ordered."""
    out = step.top_results + row * MOST_TOP * 8
    for rank in range(count):
        chosen, value, token = -1, _LOWEST, 0
        for thread in range(step.num_threads):
            best = step.best + (thread * step.num_outputs + row) * BEST_BYTES
            taken = read_int32(best + 16)
            entry = step.tops + ((thread * step.num_outputs + row) * MOST_TOP + taken) * 8
            if taken < read_int32(best + 12):
                x, candidate = read_float32(entry), read_int32(entry + 4)
                if chosen < 0 or x > value or (x == value and candidate < token):
                    chosen, value, token = thread, x, candidate
        best = step.best + (chosen * step.num_outputs + row) * BEST_BYTES
        write_int32(best + 16, read_int32(best + 16) + 1)
        write_float32(out + 8 * rank, value)
        write_int32(out + 8 * rank + 4, token)
