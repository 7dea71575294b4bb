"""Log the five likeliest tokens of every output row, to find out why a model says what it says."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from typing import Final

from ferrule_server.engine.steps.batcher import Chunk
from ferrule_server.executor.base import OutputSpec, RowOutput, StepBatch
from ferrule_server.kv.append_rule import Verdict

_LOG = logging.getLogger(__name__)
_NUM_LOGGED: Final = 5


def warn() -> None:
    """Warn, once, that the log shows what is generated."""
    _LOG.warning("debug_top_tokens=on: the log shows what every sequence says; switch it off where others may read it")


def with_top_tokens(batch: StepBatch) -> StepBatch:
    """Return the step, asking also for the likeliest tokens of each output row."""
    return dataclasses.replace(batch, output_specs=tuple(map(_with_top, batch.output_specs)))


def log_top_tokens(chunks: Iterable[Chunk], asked: Sequence[OutputSpec], rows: Sequence[RowOutput]) -> list[RowOutput]:
    """Log each row of a step and return the rows as they were requested.

    Args:
        chunks: The step.
        asked: The requested output of each row, before :func:`with_top_tokens`.
        rows: The rows that the executor returned.
    """
    handle_ids = (_handle_id(chunk) for chunk in chunks for _ in range(chunk.run.num_outputs(chunk.num_rows)))
    for handle_id, row in zip(handle_ids, rows, strict=True):
        _LOG.info("top tokens handle_id=%s position=%d best=%s", handle_id, row.position, _best(row))
    return [_without_top(row, spec.num_top_logprobs) for row, spec in zip(rows, asked, strict=True)]


def _with_top(spec: OutputSpec) -> OutputSpec:
    if spec.num_top_logprobs >= _NUM_LOGGED:
        return spec
    return dataclasses.replace(spec, num_top_logprobs=_NUM_LOGGED)


def _without_top(row: RowOutput, num_asked: int) -> RowOutput:
    if row.top_ids is None or row.top_logprobs is None or num_asked >= len(row.top_ids):
        return row
    if not num_asked:
        return dataclasses.replace(row, top_ids=None, top_logprobs=None)
    return dataclasses.replace(row, top_ids=row.top_ids[:num_asked], top_logprobs=row.top_logprobs[:num_asked])


def _handle_id(chunk: Chunk) -> str:
    sequence = chunk.run.sequence
    return "new" if sequence is None or chunk.run.verdict is Verdict.FORK else sequence.handle_id


def _best(row: RowOutput) -> str:
    """Return the likeliest tokens of a row with their log-probabilities, the likeliest first."""
    if row.top_ids is None or row.top_logprobs is None:
        return "none (not finite)"
    pairs = zip(row.top_ids[:_NUM_LOGGED].tolist(), row.top_logprobs[:_NUM_LOGGED].tolist(), strict=True)
    return " ".join(f"{token_id}:{logprob:.4f}" for token_id, logprob in pairs)
