"""What output rows ask of the kernels, and what they return.

The kernels give the best token, the k best, the log of the sum of exponentials, entropy and the logit of one known
token. All that needs more is computed from the row of logits, which the kernels then write to memory. A value does not
depend on what else its row returns.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ferrule_server.executor.base import Int32Array, OutputSpec, RowOutput
from ferrule_server.executor.cpu.records import StepMemory
from ferrule_server.executor.sampling.distributions import Choice
from ferrule_server.executor.sampling.ranking import ranked_largest
from ferrule_server.executor.sampling.selection import (
    choose,
    fill_logprobs,
    logprobs,
    needs_normaliser,
    requested_ids,
)
from ferrule_server.kernels.cpu.records import MOST_TOP, WANTS_LOGITS, WANTS_SUMS

__all__ = ["ask", "read_outputs"]

_PLAIN = (OutputSpec(), OutputSpec(greedy=True))
"""The commonest specs, which need the best token at most."""


def ask(memory: StepMemory, specs: Sequence[OutputSpec]) -> None:
    """Write what each output needs of the kernels."""
    for i, spec in enumerate(specs):
        if spec in _PLAIN:
            memory.wants[i], memory.targets[i], memory.top_counts[i] = 0, -1, 0
            continue
        memory.wants[i] = WANTS_LOGITS * _needs_logits(spec) | WANTS_SUMS * needs_normaliser(spec)
        memory.targets[i] = spec.target_id
        is_kept = spec.num_top_logprobs <= MOST_TOP
        memory.top_counts[i] = min(spec.num_top_logprobs, memory.vocab_size) if is_kept else 0


def _needs_logits(spec: OutputSpec) -> bool:
    """Whether an output needs its whole row of logits."""
    is_drawn = spec.sample is not None and spec.sample.temperature != 0
    is_shaped = spec.shaping is not None and (spec.greedy or spec.sample is not None)
    return bool(
        spec.full_logits
        or is_drawn
        or is_shaped
        or spec.draft is not None
        or spec.logprob_ids
        or spec.num_top_logprobs > MOST_TOP
    )


def read_outputs(
    memory: StepMemory, positions: Sequence[int], specs: Sequence[OutputSpec], histories: Sequence[Int32Array | None]
) -> list[RowOutput]:
    """Return what each output requests; values are copies.

    Args:
        memory: After the step.
        positions: Index in its sequence of each row's own token.
        specs: As they were asked.
        histories: As ``StepBatch.histories``.
    """
    best = memory.results[: len(specs), 0].tolist()
    rows = []
    for i, (position, spec) in enumerate(zip(positions, specs, strict=True)):
        best_id = int(best[i])
        row = RowOutput(position + 1, is_finite=best_id >= 0)
        rows.append(row)
        if not row.is_finite or spec == _PLAIN[0]:
            continue
        if spec == _PLAIN[1]:
            row.token = best_id
            continue
        _fill(memory, i, row, spec, best_id, histories[i] if histories else None)
    return rows


def _fill(
    memory: StepMemory, i: int, row: RowOutput, spec: OutputSpec, best_id: int, history: Int32Array | None
) -> None:
    choice = _choose(memory, i, row, spec, best_id, history)
    if choice is not None:
        row.token, row.is_accepted = choice.token, choice.is_accepted
    if needs_normaliser(spec):
        _fill_logprobs(memory, i, row, spec, choice, best_id)
    if spec.full_logits:
        row.logits = _logits(memory, i).copy()
    if spec.hidden_state:
        row.hidden_state = memory.hidden_state(i)


def _logits(memory: StepMemory, i: int) -> npt.NDArray[np.float32]:
    return memory.logits[i, : memory.vocab_size]


def _choose(
    memory: StepMemory, i: int, row: RowOutput, spec: OutputSpec, best_id: int, history: Int32Array | None
) -> Choice | None:
    if spec.sample is None and not spec.greedy:
        return None
    is_best = spec.shaping is None and spec.draft is None and (spec.sample is None or spec.sample.temperature == 0)
    return Choice(best_id, 0.0) if is_best else choose(_logits(memory, i), row.position, spec, best_id, history)


def _fill_logprobs(
    memory: StepMemory, i: int, row: RowOutput, spec: OutputSpec, choice: Choice | None, best_id: int
) -> None:
    _, best_logit, normaliser, entropy, target_logit = memory.results[i].tolist()
    known = {best_id: best_logit, spec.target_id: target_logit}
    token_ids = requested_ids(spec, choice)
    values = [known[token_id] if token_id in known else float(memory.logits[i, token_id]) for token_id in token_ids]
    if token_ids:
        fill_logprobs(row, spec, choice, np.array(values, np.float64), normaliser)
    if spec.num_top_logprobs > 0:
        ids, logits = _top(memory, i, spec.num_top_logprobs)
        row.top_ids, row.top_logprobs = ids, logprobs(logits, normaliser)
    if spec.entropy:
        row.entropy = entropy


def _top(memory: StepMemory, i: int, count: int) -> tuple[Int32Array, npt.NDArray[np.float32]]:
    """Return the ids and logits of the largest, largest first."""
    if count <= MOST_TOP:
        count = min(count, memory.vocab_size)
        return memory.top_ids[i, :count].copy(), memory.top_logits[i, :count].copy()
    logits = _logits(memory, i)
    ids = ranked_largest(logits, count).astype(np.int32)
    return ids, logits[ids]
