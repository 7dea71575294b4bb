"""The choice of a token from a row of logits: shaping, temperature, top-k, top-p, min-p, a draft, and the draw.

``executor.sampling`` defines what is chosen; this gives the same tokens with the same bits. No row is sorted: where the
tokens that are kept end is found by their bits, 14 at a time::

    bins of all tokens, by the first bits of their logits     the weights of the bins are summed from the largest on
    bins of the tokens of the bin in which the goal lies      by the next bits, until all logits of a bin are equal
    the tokens of the last bin                                by ascending id
"""

from __future__ import annotations

from typing import Final

import numpy as np

from ferrule_server.kernels.cpu.activations import clear_values
from ferrule_server.kernels.cpu.doubles import (
    DIGIT_BITS,
    LEAST,
    digits,
    keep,
    largest,
    logit_at,
    lowest_bit,
    matches,
    rank,
    weigh,
    widen,
)
from ferrule_server.kernels.cpu.kernel import Record, kernel
from ferrule_server.kernels.cpu.plan import Plan
from ferrule_server.kernels.cpu.records import CHOICE, RESULT_FIELDS, choice_at, model_at, stage_at, step_at, thread_at
from ferrule_server.kernels.cpu.scalars import read_float64, read_int32, read_int64, write_float64, write_int32
from ferrule_server.kernels.cpu.sync import claim

RUN: Final = 64
"""Tokens that are summed before their sum is added to that of the row."""
NUM_BINS: Final = 1 << DIGIT_BITS
_CHOICE_BYTES: Final = CHOICE.itemsize


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
    vocab_size = model_at(here.model).vocab_size
    num_runs = (vocab_size + RUN - 1) // RUN
    token, peak, is_wide = int(read_float64(results)), read_float64(results + 8), False
    if choice.mask != 0:
        _shape(here, choice, logits, vocab_size)
        logits, is_wide = here.shaped, True
        token = _largest(logits, num_runs)
        peak = read_float64(logits + 8 * token)
    weight, total, is_accepted = 1.0, 1.0, False
    if choice.is_drawn == 2:
        is_lean = choice.top_p == 1 and choice.top_k == 0 and choice.draft < 0
        total = _weigh(here, choice, logits, is_wide, num_runs, peak, is_lean)
        if choice.draft >= 0:
            token, is_accepted = _judge(here, choice, vocab_size, num_runs, total)
        else:
            run, rest = _find_run(here.sums, num_runs, choice.number * total)
            if is_lean:  # the weights have not been kept
                place, floor = logits + RUN * (8 if is_wide else 4) * run, max(LEAST, choice.min_p)
                weigh(place, is_wide, here.weights + 8 * RUN * run, peak, choice.temperature, floor)
            token = _first_beyond(here.weights, run, rest)
        weight = read_float64(here.weights + 8 * token)
    write_float64(results + 40, np.float64(token))
    write_float64(results + 48, weight)
    write_float64(results + 56, total)
    write_float64(results + 64, np.float64(is_accepted))


@kernel
def _shape(here: Record, choice: Record, logits: int, vocab_size: int) -> None:
    """Write the logits as float64 after mask, penalties and bias, none of which changes -inf."""
    for first in range(0, vocab_size, RUN):
        count = min(8, (vocab_size - first + 7) // 8)
        widen(logits + 4 * first, choice.mask + first // 8, count, here.shaped + 8 * first)
        for token in range(first + 8 * count, first + RUN):
            write_float64(here.shaped + 8 * token, -np.inf)
    if choice.num_counted > 0:
        _penalise(here, choice, (vocab_size + RUN - 1) // RUN * RUN)
    for i in range(choice.num_biased):
        place = here.shaped + 8 * read_int64(choice.bias + 16 * i)
        write_float64(place, read_float64(place) + read_float64(choice.bias + 16 * i + 8))


@kernel
def _penalise(here: Record, choice: Record, num_tokens: int) -> None:
    """Count the tokens of the history, and change the logits of those that occurred."""
    clear_values(here.digits, num_tokens)
    for i in range(choice.num_counted):
        place = here.digits + 4 * read_int32(choice.history + 4 * i)
        write_int32(place, read_int32(place) + 1)
    for i in range(choice.num_counted):
        token = read_int32(choice.history + 4 * i)
        place, count = here.shaped + 8 * token, read_int32(here.digits + 4 * token)
        if count > 0:  # not yet changed
            x = read_float64(place)
            x = x / choice.repetition if x > 0 else x * choice.repetition
            write_float64(place, x - (count * choice.frequency + choice.presence))
            write_int32(here.digits + 4 * token, 0)


@kernel
def _largest(logits: int, num_runs: int) -> int:
    """Return the token with the largest of a row of float64 logits, the lowest id among equals."""
    best, token = -np.inf, 0
    for run in range(num_runs):
        x = largest(logits + 8 * RUN * run, True)
        if x > best:
            best, token = x, RUN * run
    while read_float64(logits + 8 * token) != best:
        token += 1
    return token


@kernel
def _weigh(
    here: Record, choice: Record, logits: int, is_wide: bool, num_runs: int, peak: float, is_lean: bool
) -> float:
    """Write the weights of a row, unless it is lean, and the sums of its runs, and return the sum of all."""
    has_nucleus = choice.top_p < 1
    floor = LEAST if has_nucleus else max(LEAST, choice.min_p)
    border, last, total, run_bytes = -np.inf, 0, 0.0, RUN * (8 if is_wide else 4)
    if 0 < choice.top_k < RUN * num_runs:
        border, last = _find_largest(here, logits, is_wide, num_runs, choice.top_k)
    for run in range(num_runs):
        weights = here.weights if is_lean else here.weights + 8 * RUN * run
        part = weigh(logits + run_bytes * run, is_wide, weights, peak, choice.temperature, floor)
        write_float64(here.sums + 8 * run, part)
        total += part
    if choice.top_k > 0:
        total = _keep(here, logits, is_wide, num_runs, floor, border, last)
    if has_nucleus:
        # Tokens below the cutoff together weigh less than half of what the nucleus may leave.
        cutoff = max(LEAST, 0.5 * (1.0 - choice.top_p) * total / (RUN * num_runs))
        goal = choice.top_p * total
        border, last = _find_border(here, logits, is_wide, num_runs, here.weights, goal, cutoff)
        total = _keep(here, logits, is_wide, num_runs, choice.min_p, border, last)
    return total


@kernel
def _keep(here: Record, logits: int, is_wide: bool, num_runs: int, floor: float, border: float, last: int) -> float:
    """Set the weights of tokens to 0 that are not kept, and return the sum of the others."""
    total = 0.0
    for run in range(num_runs):
        place, weights = logits + RUN * (8 if is_wide else 4) * run, here.weights + 8 * RUN * run
        part = keep(place, is_wide, weights, floor, border, last - RUN * run)
        write_float64(here.sums + 8 * run, part)
        total += part
    return total


@kernel
def _find_largest(here: Record, logits: int, is_wide: bool, num_runs: int, count: int) -> tuple[float, int]:
    """Return logit and id of the last of the ``count`` largest logits; of long rows, only where runs reach it."""
    num_whole = (num_runs + RUN - 1) // RUN
    for run in range(RUN * num_whole):
        x = largest(logits + RUN * (8 if is_wide else 4) * run, is_wide) if run < num_runs else -np.inf
        write_float64(here.sums + 8 * run, x)
    cutoff = -np.inf
    if count <= num_runs and num_runs > 8 * RUN:
        cutoff, _ = _find_border(here, here.sums, True, num_whole, 0, np.float64(count), cutoff)
    return _find_border(here, logits, is_wide, num_runs, 0, np.float64(count), cutoff)


@kernel
def _find_border(
    here: Record, logits: int, is_wide: bool, num_runs: int, weights: int, goal: float, cutoff: float
) -> tuple[float, int]:
    """Return logit and id of the last token that is needed for the weights to reach a goal, from the largest logit on.

    Args:
        here: With memory for digits, tokens and bins; the largest or the sum of each run.
        logits: Of the row.
        is_wide: They are float64.
        num_runs: Of 64 tokens.
        weights: float64; 0: every token weighs 1.
        goal: Not more than the sum of the weights, but for rounding.
        cutoff: The goal is reached before tokens that weigh less; or, if every token weighs 1, whose logits are less.
    """
    _bin_row(here, logits, is_wide, num_runs, weights, cutoff)
    digit, reached = _find_bin(here, 0.0, goal)
    count, shift = _keep_row(here, num_runs, cutoff, digit), 64 - DIGIT_BITS
    while shift > 0:
        shift = max(0, shift - DIGIT_BITS)
        if not _bin_tokens(here, logits, is_wide, weights, count, shift):
            break
        digit, reached = _find_bin(here, reached, goal)
        count = _keep_tokens(here, count, digit)
    token = -1
    for i in range(count):
        token = read_int32(here.tokens + 4 * i)
        reached += 1.0 if weights == 0 else read_float64(weights + 8 * token)
        if reached >= goal:
            break
    return logit_at(logits, is_wide, token), token


@kernel
def _bin_row(here: Record, logits: int, is_wide: bool, num_runs: int, weights: int, cutoff: float) -> None:
    """Write the first digits of the tokens of all runs that reach the cutoff, and add their weights to bins."""
    clear_values(here.bins, 2 * NUM_BINS)
    for run in range(num_runs):
        if read_float64(here.sums + 8 * run) >= cutoff:
            digits(logits + RUN * (8 if is_wide else 4) * run, is_wide, here.digits + 4 * RUN * run)
            for token in range(RUN * run, RUN * (run + 1)):
                _add_to_bin(here, weights, token, read_int32(here.digits + 4 * token))


@kernel
def _keep_row(here: Record, num_runs: int, cutoff: float, digit: int) -> int:
    """Write the tokens of a bin of a row, and return how many they are."""
    count = 0
    for run in range(num_runs):
        if read_float64(here.sums + 8 * run) >= cutoff:
            bits = matches(here.digits + 4 * RUN * run, digit)
            while bits != 0:
                write_int32(here.tokens + 4 * count, RUN * run + lowest_bit(bits))
                count += 1
                bits &= bits - 1
    return count


@kernel
def _bin_tokens(here: Record, logits: int, is_wide: bool, weights: int, count: int, shift: int) -> bool:
    """Add the weights of some tokens to bins by other digits, and return whether their logits are different."""
    clear_values(here.bins, 2 * NUM_BINS)
    first, is_different = logit_at(logits, is_wide, read_int32(here.tokens)), False
    for i in range(count):
        token = read_int32(here.tokens + 4 * i)
        x = logit_at(logits, is_wide, token)
        is_different |= x != first
        digit = rank(x) >> shift & (NUM_BINS - 1)
        write_int32(here.digits + 4 * token, digit)
        _add_to_bin(here, weights, token, digit)
    return is_different


@kernel
def _keep_tokens(here: Record, count: int, digit: int) -> int:
    """Keep the tokens of a bin, and return how many they are."""
    num_kept = 0
    for i in range(count):
        token = read_int32(here.tokens + 4 * i)
        write_int32(here.tokens + 4 * num_kept, token)
        num_kept += read_int32(here.digits + 4 * token) == digit
    return num_kept


@kernel
def _add_to_bin(here: Record, weights: int, token: int, digit: int) -> None:
    """Add the weight of a token to its bin."""
    place = here.bins + 8 * digit
    write_float64(place, read_float64(place) + (1.0 if weights == 0 else read_float64(weights + 8 * token)))


@kernel
def _find_bin(here: Record, reached: float, goal: float) -> tuple[int, float]:
    """Return the bin in which the goal lies, from the last one on, and what weighs before it."""
    found, before = 0, reached
    for first in range(NUM_BINS - RUN, -1, -RUN):
        if largest(here.bins + 8 * first, True) > 0:
            for digit in range(first + RUN - 1, first - 1, -1):
                part = read_float64(here.bins + 8 * digit)
                if part > 0:
                    found, before = digit, reached
                    reached += part
                    if reached >= goal:
                        return found, before
    return found, before


@kernel
def _judge(here: Record, choice: Record, vocab_size: int, num_runs: int, total: float) -> tuple[int, bool]:
    """Accept the draft or replace it: return the token, and whether it is the draft."""
    p, q = read_float64(here.weights + 8 * choice.draft) / total, 0.0
    if choice.drafts == 0:
        q = read_float64(choice.probabilities + 8 * choice.draft)
    for i in range(choice.num_drafts):
        if read_int32(choice.drafts + 4 * i) == choice.draft:
            q = read_float64(choice.probabilities + 8 * i)
    if p > 0 and (q == 0 or choice.number < p / q):
        return choice.draft, True
    weights, sums, whole = here.shaped, here.bins, _subtract_drafts(here, choice, vocab_size, num_runs, total)
    if whole == 0:
        weights, sums, whole = here.weights, here.sums, total
    run, rest = _find_run(sums, num_runs, choice.residual_number * whole)
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
        part = keep(place, True, place, 0.0, -np.inf, 0)
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
