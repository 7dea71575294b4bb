"""What output rows ask of the kernels, and what they return.

The kernels give the best token, the k best, the log of the sum of exponentials, entropy, the logit of one known token,
and the token that is chosen. All that needs more is read from the row of logits, which the kernels then write to
memory. A value does not depend on what else its row returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct

import numpy as np
import numpy.typing as npt

from ferrule_server.executor.base import Float32Array, Int32Array, OutputSpec, RowOutput, SampleSpec, Shaping
from ferrule_server.executor.cpu.memory import StepMemory
from ferrule_server.executor.sampling.distributions import SMALLEST_TEMPERATURE, Choice, log_share
from ferrule_server.executor.sampling.drafts import proposal
from ferrule_server.executor.sampling.ranking import ranked_largest
from ferrule_server.executor.sampling.selection import fill_logprobs, logprobs, needs_normaliser, requested_ids
from ferrule_server.kernels.cpu.records import MOST_TOP, WANTS_LOGITS, WANTS_SUMS

_PLAIN = (OutputSpec(), OutputSpec(greedy=True))
"""The commonest specs, which need the best token at most."""
_COLDEST = SampleSpec(top_k=1)
"""Draws what a temperature of 0 draws."""
_NO_SHAPING = Shaping()
_CHOICE = Struct("11qQq6d")
"""CHOICE, as Python writes it."""
_BIAS = np.dtype([("token", np.int64), ("amount", np.float64)])


def ask(
    memory: StepMemory, positions: Sequence[int], specs: Sequence[OutputSpec], histories: Sequence[Int32Array | None]
) -> int:
    """Write what each output needs of the kernels, and return how many choose a token from their logits.

    Args:
        memory: Before the step.
        positions: Index in its sequence of each row's own token.
        specs: What each row returns.
        histories: As ``StepBatch.histories``; its arrays stay as they are until the step has run.
    """
    count = len(specs)
    memory.wants[:count], memory.targets[:count], memory.top_counts[:count] = 0, -1, 0
    memory.choices["is_drawn"][:count] = 0
    memory.kept.clear()
    num_choices = 0
    for i, spec in enumerate(specs):
        if _is_plain(spec):
            continue
        memory.wants[i] = WANTS_LOGITS * _needs_logits(spec) | WANTS_SUMS * needs_normaliser(spec)
        memory.targets[i] = spec.target_id
        is_kept = spec.num_top_logprobs <= MOST_TOP
        memory.top_counts[i] = min(spec.num_top_logprobs, memory.vocab_size) if is_kept else 0
        if _needs_choice(spec):
            fields = _choice(memory, spec, positions[i] + 1, histories[i] if histories else None)
            _CHOICE.pack_into(memory.choices.data, i * _CHOICE.size, *fields)
            num_choices += 1
    return num_choices


def _choice(memory: StepMemory, spec: OutputSpec, position: int, history: Int32Array | None) -> tuple[float, ...]:
    """Return the fields of CHOICE; what they refer to is kept by the memory."""

    def address(values: npt.ArrayLike | None, kind: npt.DTypeLike) -> int:
        if values is None:
            return 0
        memory.kept.append(np.ascontiguousarray(values, kind))
        return memory.kept[-1].ctypes.data

    sample = spec.sample if spec.sample is not None and spec.sample.temperature else _COLDEST
    draft, shaped = spec.draft, spec.shaping or _NO_SHAPING
    counted = history if shaped.has_penalties else None
    bits = memory.all_tokens if spec.shaping is not None else None
    if shaped.mask is not None:
        missing = -len(shaped.mask.bits) % 8
        bits = np.pad(shaped.mask.bits, (0, missing)) if missing else shaped.mask.bits
    tokens, probabilities = (None, None) if draft is None else proposal(draft)
    return (
        address(counted, np.int32), address(bits, np.uint8), address(list(shaped.bias) or None, _BIAS),
        address(tokens, np.int32), address(probabilities, np.float64),
        1 if sample is _COLDEST and draft is None else 2, 0 if counted is None else len(counted), len(shaped.bias),
        sample.top_k, -1 if draft is None else draft.token_id, 0 if tokens is None else len(tokens),
        sample.seed, position,
        shaped.repetition_penalty, shaped.frequency_penalty, shaped.presence_penalty,
        1 / max(sample.temperature, SMALLEST_TEMPERATURE), sample.top_p, sample.min_p,
    )  # fmt: skip


def _is_plain(spec: OutputSpec) -> bool:
    """Whether an output needs the best token at most; draws are told at once, without comparing specs."""
    return spec.sample is None and spec in _PLAIN


def _needs_logits(spec: OutputSpec) -> bool:
    """Whether an output needs its whole row of logits."""
    return bool(spec.full_logits or _needs_choice(spec) or spec.logprob_ids or spec.num_top_logprobs > MOST_TOP)


def _needs_choice(spec: OutputSpec) -> bool:
    """Whether the token of an output is not just the one with the largest logit."""
    is_drawn = spec.sample is not None and spec.sample.temperature != 0
    return is_drawn or spec.draft is not None or (spec.shaping is not None and (spec.greedy or spec.sample is not None))


def read_outputs(memory: StepMemory, positions: Sequence[int], specs: Sequence[OutputSpec]) -> list[RowOutput]:
    """Return what each output requests; values are copies.

    Args:
        memory: After the step.
        positions: Index in its sequence of each row's own token.
        specs: As they were asked.
    """
    rows = []
    results = memory.results[: len(specs)].tolist()
    for i, (position, spec, result) in enumerate(zip(positions, specs, results, strict=True)):
        row = RowOutput(position + 1, is_finite=result[0] >= 0)
        rows.append(row)
        if row.is_finite and not _is_plain(spec):
            _Output(memory, i, spec, result).fill(row)
        elif row.is_finite and spec.greedy:
            row.token = int(result[0])
    return rows


@dataclass(frozen=True, slots=True)
class _Output:
    """One output in the memory of a step.

    Attributes:
        memory: After the step.
        place: Index of the output.
        spec: What it returns.
        results: Its results, RESULT_FIELDS.
    """

    memory: StepMemory
    place: int
    spec: OutputSpec
    results: list[float]

    def fill(self, row: RowOutput) -> None:
        """Write what the row returns."""
        choice = self._choice()
        if choice is not None:
            row.token, row.is_accepted = choice.token, choice.is_accepted
        if needs_normaliser(self.spec):
            self._fill_logprobs(row, choice)
        if self.spec.full_logits:
            row.logits = self._logits.copy()
        if self.spec.hidden_state:
            row.hidden_state = self.memory.hidden_state(self.place)

    def _choice(self) -> Choice | None:
        if not _needs_choice(self.spec):
            return Choice(int(self.results[0]), 0.0) if self.spec.greedy or self.spec.sample is not None else None
        token, weight, total, is_accepted = self.results[5:]
        logprob = log_share(weight, total) if self.spec.logprobs else 0.0
        return Choice(int(token), logprob, None if self.spec.draft is None else is_accepted > 0)

    @property
    def _logits(self) -> Float32Array:
        return self.memory.logits[self.place, : self.memory.vocab_size]

    def _fill_logprobs(self, row: RowOutput, choice: Choice | None) -> None:
        best_id, best_logit, normaliser, entropy, target_logit = self.results[:5]
        known = {int(best_id): best_logit, self.spec.target_id: target_logit}
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
