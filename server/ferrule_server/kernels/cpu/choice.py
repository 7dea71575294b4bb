"""The choice of a token from a row of logits: shaping, temperature, top-k, top-p, min-p, a draft, and the draw.

``executor.sampling`` defines what is chosen; this gives the same tokens with the same bits. No row is sorted: where the
tokens that are kept end is found by bins, whose weights are summed from the largest logits on::

    bins of all tokens, by their distance to the largest logit    while the row is weighed
    bins of the tokens of the bin in which the goal lies          while they are many: by the bits of their logits
    the tokens of the last bin                                    one after the other
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from ferrule_server.kernels.cpu.activations import clear_values
from ferrule_server.kernels.cpu.doubles import (
    DIGIT_BITS,
    LEAST,
    WIDE,
    digits,
    keep,
    largest,
    logit_at,
    lowest_bit,
    matches,
    rank,
    sum_before,
    weigh,
    widen,
)
from ferrule_server.kernels.cpu.kernel import Record, kernel
from ferrule_server.kernels.cpu.philox import ACCEPT, RESIDUAL, SAMPLE, uniform
from ferrule_server.kernels.cpu.plan import Plan
from ferrule_server.kernels.cpu.records import CHOICE, RESULT_FIELDS, choice_at, model_at, stage_at, step_at, thread_at
from ferrule_server.kernels.cpu.scalars import (
    read_float64,
    read_int16,
    read_int32,
    read_int64,
    write_float64,
    write_int32,
)
from ferrule_server.kernels.cpu.sync import claim

RUN: Final = 64
"""Tokens that are summed before their sum is added to that of the row."""
_TOGETHER: Final = 8
"""Runs that are weighed before they are sorted into bins: their weights are still in the first cache."""
NUM_BINS: Final = 1 << DIGIT_BITS
_CHOICE_BYTES: Final = CHOICE.itemsize


class _Row(NamedTuple):
    """Logits to choose from: float32 with a mask or 0, or ``WIDE``; -inf after the vocabulary."""

    logits: int
    mask: int
    num_runs: int
    peak: float


@kernel
def choose(plan: Plan, thread: int, stage_address: int) -> int:
    """Choose the tokens of the outputs that this thread claims."""
    here, stage = thread_at(thread), stage_at(stage_address)
    step = step_at(here.step)
    output = here.number
    while output < step.num_outputs:
        choice = choice_at(step.choices + output * _CHOICE_BYTES)
        results = step.results + output * RESULT_FIELDS * 8
        if choice.is_drawn != 0 and read_float64(results) >= 0:
            _choose(here, choice, step.logits + output * step.logit_bytes, results)
        output = claim(here.sync, stage.claim)
    return 0


@kernel
def _choose(here: Record, choice: Record, logits: int, results: int) -> None:
    """Choose one token, and write it with its weight and that of all."""
    num_runs = (model_at(here.model).vocab_size + RUN - 1) // RUN
    token = int(read_float64(results))
    row = _Row(logits, choice.mask, num_runs, read_float64(results + 8))
    if choice.mask != 0:
        if choice.num_counted > 0 or choice.num_biased > 0:
            _shape(here, choice, row)
            row = _Row(here.shaped, WIDE, num_runs, 0.0)
        token = _largest(row)
        row = _Row(row.logits, row.mask, num_runs, _logit(row, token))
    weight, total, is_accepted = 1.0, 1.0, False
    if choice.is_drawn == 2:
        border, last, total = _weigh(here, choice, row)
        if choice.draft >= 0:
            token, is_accepted = _judge(here, choice, num_runs, total)
        else:
            number = uniform(choice.seed, choice.position, SAMPLE)
            run, rest = _find_run(here.sums, num_runs, number * total)
            weights, floor = here.weights + 8 * RUN * run, max(LEAST, choice.min_p)
            weigh(_place(row, run), _mask(row, run), weights, here.sums, 1, row.peak, choice.factor, floor)
            if border > -np.inf:
                _keep_run(row, run, weights, floor, border, last)
            token = _first_beyond(here.weights, run, rest)
        weight = read_float64(here.weights + 8 * token)
    write_float64(results + 40, np.float64(token))
    write_float64(results + 48, weight)
    write_float64(results + 56, total)
    write_float64(results + 64, np.float64(is_accepted))


@kernel
def _shape(here: Record, choice: Record, row: _Row) -> None:
    """Write the logits as float64 after mask, penalties and bias, none of which changes -inf."""
    for run in range(row.num_runs):
        widen(row.logits + 4 * RUN * run, row.mask + 8 * run, here.shaped + 8 * RUN * run)
    if choice.num_counted > 0:
        _penalise(here, choice, RUN * row.num_runs)
    for i in range(choice.num_biased):
        place = here.shaped + 8 * read_int64(choice.bias + 16 * i)
        write_float64(place, read_float64(place) + read_float64(choice.bias + 16 * i + 8))


@kernel
def _penalise(here: Record, choice: Record, num_tokens: int) -> None:
    """Count the tokens of the history, and change the logits of those that occurred."""
    clear_values(here.tokens, num_tokens)
    for i in range(choice.num_counted):
        place = here.tokens + 4 * read_int32(choice.history + 4 * i)
        write_int32(place, read_int32(place) + 1)
    for i in range(choice.num_counted):
        token = read_int32(choice.history + 4 * i)
        place, count = here.shaped + 8 * token, read_int32(here.tokens + 4 * token)
        if count > 0:  # not yet changed
            x = read_float64(place)
            x = x / choice.repetition if x > 0 else x * choice.repetition
            write_float64(place, x - (count * choice.frequency + choice.presence))
            write_int32(here.tokens + 4 * token, 0)


@kernel
def _largest(row: _Row) -> int:
    """Return the token with the largest logit of a row, the lowest id among equals."""
    best, token = -np.inf, 0
    for run in range(row.num_runs):
        x = largest(_place(row, run), _mask(row, run))
        if x > best:
            best, token = x, RUN * run
    while _logit(row, token) != best:
        token += 1
    return token


@kernel
def _place(row: _Row, run: int) -> int:
    """Return the address of the logits of a run."""
    return row.logits + RUN * (8 if row.mask == WIDE else 4) * run


@kernel
def _mask(row: _Row, run: int) -> int:
    """Return the address of the mask of a run; 0 and ``WIDE`` stay."""
    return row.mask + 8 * run if row.mask > 0 else row.mask


@kernel
def _logit(row: _Row, token: int) -> float:
    """Return the logit of a token."""
    return logit_at(row.logits, row.mask, token)


@kernel
def _weigh(here: Record, choice: Record, row: _Row) -> tuple[float, int, float]:
    """Write the sums of the weights of runs; return logit and id of the last token that is kept, and the sum of all.

    The weights themselves are kept only for a draft, and up to there for top-p. A token that weighs less than the least
    cannot be in the nucleus: all such tokens together weigh less than half of what it may leave.
    """
    has_nucleus = choice.top_p < 1
    are_kept = has_nucleus or choice.draft >= 0
    floor = LEAST if has_nucleus else max(LEAST, choice.min_p)
    least = 0.5 * (1.0 - choice.top_p) / (RUN * row.num_runs)
    border, last, total = -np.inf, 0, 0.0
    if 0 < choice.top_k < RUN * row.num_runs:
        border, last = _find_largest(here, row, choice.top_k)
    if has_nucleus:
        clear_values(here.bins, 4 * NUM_BINS)
    together = _TOGETHER if border == -np.inf else 1
    for first in range(0, row.num_runs, together):
        count, weights = min(together, row.num_runs - first), here.weights + (8 * RUN * first if are_kept else 0)
        if border == -np.inf or choice.draft >= 0 or read_float64(here.sums + 8 * first) >= border:
            weigh(_place(row, first), _mask(row, first), weights, here.sums + 8 * first, count,
                  row.peak, choice.factor, floor)  # fmt: skip
            if border > -np.inf:
                part = _keep_run(row, first, weights, floor, border, last)
                write_float64(here.sums + 8 * first, part)
        else:
            write_float64(here.sums + 8 * first, 0.0)
        for run in range(first, first + count):
            part = read_float64(here.sums + 8 * run)
            total += part
            if has_nucleus and part >= least:
                _bin_run(here, row, run, here.weights)
    if has_nucleus:
        border, last, digit = _find_border(here, row, here.weights, choice.top_p * total, least)
        total = _keep(here, choice, row, border, last, digit, least)
    return border, last, total


@kernel
def _keep_run(row: _Row, run: int, weights: int, floor: float, border: float, last: int) -> float:
    """Set the weights of 64 tokens to 0 that rank after a border or are below a floor; return the sum of the others."""
    return keep(_place(row, run), _mask(row, run), weights, floor, border, last - RUN * run)


@kernel
def _keep(here: Record, choice: Record, row: _Row, border: float, last: int, digit: int, least: float) -> float:
    """Write the sums of the weights in the nucleus, and for a draft these weights; return the sum of all.

    Bins tell which tokens are kept, but for the bin of the border itself.
    """
    total = 0.0
    for run in range(row.num_runs):
        part, weights, bins = 0.0, here.weights + 8 * RUN * run, here.digits + 2 * RUN * run
        is_reached = read_float64(here.sums + 8 * run) >= least
        if choice.draft >= 0 or (is_reached and matches(bins, digit) != 0):
            part = _keep_run(row, run, weights, choice.min_p, border, last)
        elif is_reached:
            part = sum_before(weights, bins, digit, choice.min_p)
        write_float64(here.sums + 8 * run, part)
        total += part
    return total


@kernel
def _find_largest(here: Record, row: _Row, count: int) -> tuple[float, int]:
    """Return logit and id of the last of the ``count`` largest logits; the largest of each run are in its sum after.

    Of a long row only the runs are looked at that reach the ``count`` largest of these.
    """
    num_whole = (row.num_runs + RUN - 1) // RUN
    for run in range(RUN * num_whole):
        x = largest(_place(row, run), _mask(row, run)) if run < row.num_runs else -np.inf
        write_float64(here.sums + 8 * run, x)
    cutoff = -np.inf
    if count <= row.num_runs and row.num_runs > 8 * RUN:
        cutoff, _ = _find_equal(here, _Row(here.sums, WIDE, num_whole, row.peak), count, cutoff)
    return _find_equal(here, row, count, cutoff)


@kernel
def _find_equal(here: Record, row: _Row, count: int, cutoff: float) -> tuple[float, int]:
    """Return logit and id of the last of the ``count`` largest logits, in the runs whose sums reach a cutoff."""
    clear_values(here.bins, 4 * NUM_BINS)
    for run in range(row.num_runs):
        if read_float64(here.sums + 8 * run) >= cutoff:
            _bin_run(here, row, run, 0)
    border, last, _ = _find_border(here, row, 0, np.float64(count), cutoff)
    return border, last


@kernel
def _bin_run(here: Record, row: _Row, run: int, weights: int) -> None:
    """Write the bins of 64 tokens, and add their weights to those of the bins; 1 for each if there are no weights."""
    numbers, bins = here.digits + 2 * RUN * run, here.bins
    digits(_place(row, run), _mask(row, run), row.peak, numbers)
    for i in range(RUN):
        _add_to_bin(bins, read_int16(numbers + 2 * i), weights, RUN * run + i)


@kernel
def _add_to_bin(bins: int, digit: int, weights: int, token: int) -> None:
    """Add the weight of a token to its bin; even and odd tokens apart, so that sums wait less for each other."""
    place = bins + 16 * digit + 8 * (token & 1)
    write_float64(place, read_float64(place) + (1.0 if weights == 0 else read_float64(weights + 8 * token)))


@kernel
def _find_border(here: Record, row: _Row, weights: int, goal: float, least: float) -> tuple[float, int, int]:
    """Return logit, id and first bin of the last token that is needed for the weights to reach a goal.

    Args:
        here: With the bins, of all runs whose sums are not less than the least.
        row: What is ranked.
        weights: float64; 0: every token weighs 1.
        goal: Not more than the sum of the weights, but for rounding.
        least: The goal is reached before tokens that weigh less.
    """
    first, reached = _find_bin(here, 0.0, goal)
    count, shift = _keep_row(here, row.num_runs, weights, least, first), 64
    while count > RUN and shift > 0:
        shift = max(0, shift - DIGIT_BITS)
        if not _bin_tokens(here, row, weights, count, shift):
            break
        digit, reached = _find_bin(here, reached, goal)
        count = _keep_tokens(here, row, count, shift, digit)
    _sort_tokens(here, row, count)
    token = -1
    for i in range(count):
        token = read_int32(here.tokens + 4 * i)
        reached += 1.0 if weights == 0 else read_float64(weights + 8 * token)
        if reached >= goal:
            break
    return _logit(row, token), token, first


@kernel
def _keep_row(here: Record, num_runs: int, weights: int, least: float, digit: int) -> int:
    """Write the tokens of a bin of a row, and return how many they are."""
    count = 0
    for run in range(num_runs):
        if read_float64(here.sums + 8 * run) >= least:
            bits = matches(here.digits + 2 * RUN * run, digit)
            while bits != 0:
                token = RUN * run + lowest_bit(bits)
                write_int32(here.tokens + 4 * count, token)
                count += weights == 0 or read_float64(weights + 8 * token) >= least
                bits &= bits - 1
    return count


@kernel
def _bin_tokens(here: Record, row: _Row, weights: int, count: int, shift: int) -> bool:
    """Add the weights of some tokens to bins by bits of their logits, and return whether their logits are different."""
    clear_values(here.bins, 4 * NUM_BINS)
    first, is_different = _logit(row, read_int32(here.tokens)), False
    for i in range(count):
        token = read_int32(here.tokens + 4 * i)
        is_different |= _logit(row, token) != first
        _add_to_bin(here.bins, _digit(row, token, shift), weights, token)
    return is_different


@kernel
def _digit(row: _Row, token: int, shift: int) -> int:
    """Return some bits by which tokens rank, the largest logit first."""
    return ~rank(_logit(row, token)) >> shift & (NUM_BINS - 1)


@kernel
def _keep_tokens(here: Record, row: _Row, count: int, shift: int, digit: int) -> int:
    """Keep the tokens of a bin, and return how many they are."""
    num_kept = 0
    for i in range(count):
        token = read_int32(here.tokens + 4 * i)
        write_int32(here.tokens + 4 * num_kept, token)
        num_kept += _digit(row, token, shift) == digit
    return num_kept


@kernel
def _sort_tokens(here: Record, row: _Row, count: int) -> None:
    """Sort a few tokens, or many equal ones: the largest logit first, the lowest id first among equals."""
    for i in range(1, count):
        token, place = read_int32(here.tokens + 4 * i), here.tokens + 4 * (i - 1)
        x = _logit(row, token)
        while place >= here.tokens and _logit(row, read_int32(place)) < x:
            write_int32(place + 4, read_int32(place))
            place -= 4
        write_int32(place + 4, token)


@kernel
def _find_bin(here: Record, reached: float, goal: float) -> tuple[int, float]:
    """Return the bin in which the goal lies, from the first one on, and what weighs before it."""
    found, before = 0, reached
    for first in range(0, NUM_BINS, RUN // 2):
        if largest(here.bins + 16 * first, WIDE) > 0:
            for digit in range(first, first + RUN // 2):
                part = read_float64(here.bins + 16 * digit) + read_float64(here.bins + 16 * digit + 8)
                if part > 0:
                    found, before = digit, reached
                    reached += part
                    if reached >= goal:
                        return found, before
    return found, before


@kernel
def _judge(here: Record, choice: Record, num_runs: int, total: float) -> tuple[int, bool]:
    """Accept the draft or replace it: return the token, and whether it is the draft."""
    p, q = read_float64(here.weights + 8 * choice.draft) / total, 0.0
    if choice.drafts == 0:
        q = read_float64(choice.probabilities + 8 * choice.draft)
    for i in range(choice.num_drafts):
        if read_int32(choice.drafts + 4 * i) == choice.draft:
            q = read_float64(choice.probabilities + 8 * i)
    if p > 0 and (q == 0 or uniform(choice.seed, choice.position, ACCEPT) < p / q):
        return choice.draft, True
    vocab_size = model_at(here.model).vocab_size
    weights, sums, whole = here.shaped, here.bins, _subtract_drafts(here, choice, vocab_size, num_runs, total)
    if whole == 0:
        weights, sums, whole = here.weights, here.sums, total
    run, rest = _find_run(sums, num_runs, uniform(choice.seed, choice.position, RESIDUAL) * whole)
    return _first_beyond(weights, run, rest), False


@kernel
def _subtract_drafts(here: Record, choice: Record, vocab_size: int, num_runs: int, total: float) -> float:
    """Write max(p - q, 0) over the shaped logits and the sums of its runs over the bins; return the sum of all."""
    for token in range(RUN * num_runs):
        write_float64(here.shaped + 8 * token, read_float64(here.weights + 8 * token) / total)
    for i in range(vocab_size if choice.drafts == 0 else choice.num_drafts):
        token = i if choice.drafts == 0 else read_int32(choice.drafts + 4 * i)
        place = here.shaped + 8 * token
        write_float64(place, read_float64(place) - read_float64(choice.probabilities + 8 * i))
    left = 0.0
    for run in range(num_runs):
        place = here.shaped + 8 * RUN * run
        part = keep(place, WIDE, place, 0.0, -np.inf, 0)
        write_float64(here.bins + 8 * run, part)
        left += part
    return left


@kernel
def _find_run(sums: int, num_runs: int, goal: float) -> tuple[int, float]:
    """Return the run in which the sum of the weights exceeds a goal, and what is left of the goal before it."""
    run, before = 0, 0.0
    while run < num_runs - 1 and before + read_float64(sums + 8 * run) <= goal:
        before += read_float64(sums + 8 * run)
        run += 1
    return run, goal - before


@kernel
def _first_beyond(weights: int, run: int, rest: float) -> int:
    """Return the first token of a run at which the sum of its weights exceeds a number."""
    found, summed = -1, 0.0
    for token in range(RUN * run, RUN * (run + 1)):
        weight = read_float64(weights + 8 * token)
        summed += weight
        if weight > 0:  # where the two sums of a run differ in the last bit, the last token of weight is taken
            found = token
        if summed > rest:
            break
    return found
