"""What output rows ask of the kernels, and what they return.

The kernels give the best token, the k best, the log of the sum of exponentials, entropy and the logit of one known
token. All that needs more is computed from the row of logits, which the kernels then write to memory. A value does not
depend on what else its row returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ferrule_server.executor.base import Float32Array, Int32Array, OutputSpec, RowOutput
from ferrule_server.executor.cpu.memory import StepMemory
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
    return bool(spec.full_logits or _needs_choice(spec) or spec.logprob_ids or spec.num_top_logprobs > MOST_TOP)


def _needs_choice(spec: OutputSpec) -> bool:
    """Whether the token of an output is not just the one with the largest logit, so that ``choose`` reads the row."""
    is_drawn = spec.sample is not None and spec.sample.temperature != 0
    return is_drawn or spec.draft is not None or (spec.shaping is not None and (spec.greedy or spec.sample is not None))


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
        if spec == _PLAIN[1] and row.is_finite:
            row.token = best_id
        elif spec != _PLAIN[0] and row.is_finite:
            _Output(memory, i, spec, best_id).fill(row, histories[i] if histories else None)
    return rows


@dataclass(frozen=True, slots=True)
class _Output:
    """One output in the memory of a step.

    Attributes:
        memory: After the step.
        place: Index of the output.
        spec: What it returns.
        best_id: The token with the largest logit.
    """

    memory: StepMemory
    place: int
    spec: OutputSpec
    best_id: int

    def fill(self, row: RowOutput, history: Int32Array | None) -> None:
        """Write what the row returns."""
        logits = self._logits if _needs_choice(self.spec) else None  # else they may not be written
        choice = choose(logits, row.position, self.spec, self.best_id, history)
        if choice is not None:
            row.token, row.is_accepted = choice.token, choice.is_accepted
        if needs_normaliser(self.spec):
            self._fill_logprobs(row, choice)
        if self.spec.full_logits:
            row.logits = self._logits.copy()
        if self.spec.hidden_state:
            row.hidden_state = self.memory.hidden_state(self.place)

    @property
    def _logits(self) -> Float32Array:
        return self.memory.logits[self.place, : self.memory.vocab_size]

    def _fill_logprobs(self, row: RowOutput, choice: Choice | None) -> None:
        _, best_logit, normaliser, entropy, target_logit = self.memory.results[self.place].tolist()
        known = {self.best_id: best_logit, self.spec.target_id: target_logit}
        token_ids = requested_ids(self.spec, choice)
        values = [known[i] if i in known else float(self.memory.logits[self.place, i]) for i in token_ids]
        if token_ids:
            fill_logprobs(row, self.spec, choice, np.array(values, np.float64) - normaliser)
        if self.spec.num_top_logprobs > 0:
            row.top_ids, logits = self._top(min(self.spec.num_top_logprobs, self.memory.vocab_size))
            row.top_logprobs = logprobs(logits, normaliser)
        if self.spec.entropy:
            row.entropy = entropy

    def _top(self, count: int) -> tuple[Int32Array, Float32Array]:
        """Return the ids and logits of the largest, largest first."""
        if count <= MOST_TOP:
            return self.memory.top_ids[self.place, :count].copy(), self.memory.top_logits[self.place, :count].copy()
        ids = ranked_largest(self._logits, count).astype(np.int32)
        return ids, self._logits[ids]
