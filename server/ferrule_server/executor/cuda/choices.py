"""What the output rows of a step return: which kernels that needs, and the results as rows on the host.

The meaning is that of ``executor.sampling``. The kernels shape, weigh and normalise in float32, as their pages say.
:data:`KNOWN_FIELDS` lists what they know; rows that ask for anything else are left to torch, row by row
(:attr:`OutputKind.TORCH`). Whole rows of logits and hidden states are copied in either case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, fields, replace
from enum import IntEnum
from operator import is_
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ferrule_server.executor.base import (
    DraftSpec,
    Int32Array,
    OutputSpec,
    RowOutput,
    SampleSpec,
    Shaping,
    StepBatch,
)
from ferrule_server.executor.cuda.buffers import Limits
from ferrule_server.executor.sampling import selection
from ferrule_server.executor.sampling.distributions import Choice
from ferrule_server.executor.sampling.selection import fill_logprobs, logprobs, needs_normaliser

CHOSEN = -1
"""Stands for the row's own token among the ids whose log-probabilities are asked for."""

KNOWN_FIELDS: Final[Mapping[type, frozenset[str]]] = {
    OutputSpec: frozenset({"greedy", "sample", "shaping", "draft", "logprobs", "num_top_logprobs", "target_id"})
    | {"logprob_ids", "entropy", "full_logits", "hidden_state"},
    SampleSpec: frozenset({"temperature", "top_k", "top_p", "min_p", "seed"}),
    Shaping: frozenset(
        {"repetition_penalty", "frequency_penalty", "presence_penalty", "penalty_start", "bias", "mask"}
    ),
    DraftSpec: frozenset({"token_id", "distribution"}),
}
"""The fields of each record that this module takes into account. A row that sets any other field goes to torch."""


class OutputKind(IntEnum):
    """What a row asks for, at most; of a step, what the rows that kernels choose for ask for.

    Each kind runs what the ones before it run. GREEDY: the largest raw logit of each row. SAMPLE: tokens shaped and
    drawn. SCORE: log-probabilities and entropies. TOP: the largest log-probabilities. TORCH: of a row alone, torch
    selects from its logits.
    """

    GREEDY = 0
    SAMPLE = 1
    SCORE = 2
    TOP = 3
    TORCH = 4


@dataclass(frozen=True, slots=True)
class Division:
    """How the output rows of a step are divided between kernels and torch.

    Attributes:
        kind: The largest of the rows that kernels choose for.
        torch_rows: Indices of the outputs that torch selects, ascending.
        keeps_rows: Logits and the rows after the final norm are needed after the step, by torch or by the caller.
    """

    kind: OutputKind = OutputKind.GREEDY
    torch_rows: tuple[int, ...] = ()
    keeps_rows: bool = False


def chooses(spec: OutputSpec) -> bool:
    """Whether a row gives a token."""
    return spec.greedy or spec.sample is not None


def shaping_of(spec: OutputSpec) -> Shaping | None:
    """Return what changes the logits that a row's token is chosen from; None where nothing does."""
    shaping = spec.shaping
    if shaping is None or not chooses(spec):
        return None
    return shaping if shaping.mask is not None or shaping.bias or shaping.has_penalties else None


def are_same(specs: Sequence[OutputSpec], others: Sequence[OutputSpec]) -> bool:
    """Whether these are the very same specs, which is soon told: what goes on for many steps wants one thing."""
    return len(specs) == len(others) and all(map(is_, specs, others))


def divide(specs: Sequence[OutputSpec], histories: Sequence[Int32Array | None], limits: Limits) -> Division:
    """Return which rows the kernels choose for: as many as fit together, in order.

    Args:
        specs: Of the output rows.
        histories: As ``StepBatch.histories``.
        limits: What fits; tokens that occur twice are counted twice.
    """
    kind, torch_rows, num_requests, num_entries = OutputKind.GREEDY, [], 0, 0
    for i, spec in enumerate(specs):
        row_kind = _kind_of_row(spec, limits)
        if row_kind is OutputKind.GREEDY:
            continue
        with_requests = num_requests + (len(requested_ids(spec)) if row_kind >= OutputKind.SCORE else 0)
        with_entries = num_entries + (_num_entries(spec, histories[i] if histories else None) if spec.shaping else 0)
        if row_kind is OutputKind.TORCH or with_requests > limits.max_requests or with_entries > limits.max_entries:
            torch_rows.append(i)
        else:
            kind, num_requests, num_entries = max(kind, row_kind), with_requests, with_entries
    keeps_rows = bool(torch_rows) or any(spec.full_logits or spec.hidden_state for spec in specs)
    return Division(kind, tuple(torch_rows), keeps_rows)


def with_outputs(batch: StepBatch, outputs: Sequence[int]) -> StepBatch:
    """Return a step with some of its outputs alone."""
    if len(outputs) == len(batch.output_specs):
        return batch
    return replace(
        batch,
        output_rows=batch.output_rows[list(outputs)],
        output_specs=tuple(batch.output_specs[i] for i in outputs),
        histories=tuple(batch.histories[i] for i in outputs) if batch.histories else (),
    )


def _kind_of_row(spec: OutputSpec, limits: Limits) -> OutputKind:
    is_random = spec.sample is not None and spec.sample.temperature != 0
    if any(map(_sets_unknown_field, (spec, spec.sample, spec.shaping, spec.draft))):
        return OutputKind.TORCH
    if spec.num_top_logprobs > limits.largest_k or (spec.draft is not None and is_random):
        return OutputKind.TORCH
    if spec.num_top_logprobs > 0:
        return OutputKind.TOP
    if needs_normaliser(spec):
        return OutputKind.SCORE
    return OutputKind.SAMPLE if is_random or shaping_of(spec) is not None else OutputKind.GREEDY


def _num_entries(spec: OutputSpec, history: Int32Array | None) -> int:
    """Return how many tokens penalties and bias of a row name, at most."""
    shaping = shaping_of(spec)
    if shaping is None:
        return 0
    return len(shaping.bias) + (len(history) if history is not None and shaping.has_penalties else 0)


def _sets_unknown_field(record: object) -> bool:
    """Whether a record has a value, other than the default, in a field that :data:`KNOWN_FIELDS` does not list."""
    return type(record) not in _WHOLLY_KNOWN and any(
        getattr(record, field.name) != field.default for field in _unknown_fields(type(record))
    )


def _unknown_fields(record: type) -> list[Field[Any]]:
    known = frozenset().union(*(KNOWN_FIELDS.get(each, ()) for each in record.__mro__))
    return [field for field in fields(record) if field.name not in known]


_WHOLLY_KNOWN: Final = frozenset({type(None), *(record for record in KNOWN_FIELDS if not _unknown_fields(record))})
"""Types of records that need no closer look."""


def requested_ids(spec: OutputSpec) -> list[int]:
    """Return the tokens whose log-probabilities a row returns, CHOSEN for its own."""
    return selection.requested_ids(spec, Choice(CHOSEN, 0.0) if chooses(spec) else None)


Results = Mapping[str, npt.NDArray[Any]]


def read_choices(
    results: Results, batch: StepBatch, kind: OutputKind, *, vocab_size: int, stores_logits: bool
) -> list[RowOutput]:
    """Return the output rows of a step; nothing of the results is kept.

    Args:
        results: Fields of the results by name.
        batch: The step, with the outputs that kernels choose for.
        kind: Of the step.
        vocab_size: Logits of a row.
        stores_logits: As in ``GraphKey``.
    """
    rows, specs = batch.output_rows, batch.output_specs
    best = results["greedy" if stores_logits else "tokens"][rows].tolist()
    tokens = best if kind is OutputKind.GREEDY else results["tokens"][: len(rows)].tolist()
    positions = (batch.positions[rows] + 1).tolist()
    outputs = [
        RowOutput(position, token)  # most rows of most steps; what else there is takes a closer look
        if best_id >= 0 and token >= 0 and spec.draft is None and (spec.greedy or spec.sample is not None)
        else _chosen_row(position, spec, best_id, token)
        for position, spec, best_id, token in zip(positions, specs, best, tokens, strict=True)
    ]
    if kind >= OutputKind.SCORE:
        _fill_scores(outputs, specs, results, vocab_size)
    return outputs


def _chosen_row(position: int, spec: OutputSpec, best_id: int, token: int) -> RowOutput:
    """Return a row with its token; not finite where its raw logits were not, or no token came of them."""
    if best_id < 0:
        return RowOutput(position, is_finite=False)
    if not chooses(spec):
        return RowOutput(position)
    if token < 0:
        return RowOutput(position, is_finite=False)
    is_accepted = None if spec.draft is None else token == spec.draft.token_id
    return RowOutput(position, token, is_accepted=is_accepted)


def _fill_scores(outputs: Sequence[RowOutput], specs: Sequence[OutputSpec], results: Results, vocab_size: int) -> None:
    """Fill in what the log softmax at T=1 gives."""
    figures = results["figures"][: len(specs)].astype(np.float64)
    normalisers = (figures[:, 0] + figures[:, 1]).tolist()
    begin = slot = 0
    for i, (output, spec) in enumerate(zip(outputs, specs, strict=True)):
        end = begin + len(requested_ids(spec))
        if output.is_finite:
            is_random = spec.sample is not None and spec.sample.temperature != 0
            sampled_logprob = float(results["chosen_logprobs"][i]) if is_random else 0.0
            choice = None if output.token is None else Choice(output.token, sampled_logprob)
            fill_logprobs(output, spec, choice, results["requested"][begin:end].astype(np.float64))
            output.entropy = float(figures[i, 2]) if spec.entropy else None
            if spec.num_top_logprobs > 0:
                count = min(spec.num_top_logprobs, vocab_size)
                _fill_top(output, results, slot, count, normalisers[i])
        begin, slot = end, slot + (spec.num_top_logprobs > 0)


def _fill_top(output: RowOutput, results: Results, slot: int, count: int, normaliser: float) -> None:
    """Fill in the ``count`` largest log-probabilities, which lie at ``slot``."""
    output.top_ids = results["top_ids"][slot, :count].copy()
    output.top_logprobs = logprobs(results["top_logits"][slot, :count], normaliser)
