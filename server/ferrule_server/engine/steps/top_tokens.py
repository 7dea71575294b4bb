"""Log the five likeliest tokens of every output row, to find out why a model says what it says.

The step itself is run exactly as it was asked for, in the same kernels and the same graph. The best tokens come from a
second run of its rows, as queries, which write no KV and whose results go nowhere else.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from typing import Final

import numpy as np

from ferrule_server.engine.steps.batcher import Chunk
from ferrule_server.executor.base import NO_SLOT, DeviceLost, Executor, OutputSpec, RowOutput, StepBatch, StepResult
from ferrule_server.kv.append_rule import Verdict

_LOG = logging.getLogger(__name__)
_BEST: Final = OutputSpec(num_top_logprobs=5)


def warn() -> None:
    """Log, once, that generated text can be read in the log from now on."""
    _LOG.warning("debug_top_tokens=on: the log shows what every sequence says; switch it off where others may read it")


def log_top_tokens(executor: Executor, batch: StepBatch, chunks: Iterable[Chunk], result: StepResult) -> None:
    """Log each output row of a step that has run: its token, how it was computed, and the best tokens.

    Args:
        executor: It has run the step, and runs its rows again.
        batch: The step.
        chunks: The rows of the step by append.
        result: The result of the step.

    Raises:
        DeviceLost: As the executor raises it.
    """
    query = dataclasses.replace(
        batch,
        slot_mapping=np.full_like(batch.slot_mapping, NO_SLOT),
        output_specs=(_BEST,) * len(batch.output_specs),
        histories=(),
    )
    try:
        best = executor.run(query).rows
    except DeviceLost:
        raise
    except Exception:  # noqa: BLE001 - the step itself has run, and is answered
        _LOG.exception("top tokens of %d rows could not be found", len(result.rows))
        return
    handle_ids = (_handle_id(chunk) for chunk in chunks for _ in range(chunk.run.num_outputs(chunk.num_rows)))
    paths = result.paths or (executor.info.name,) * len(result.rows)
    for handle_id, path, row, top in zip(handle_ids, paths, result.rows, best, strict=True):
        _LOG.info(
            "top tokens handle_id=%s position=%d path=%s token=%s best=%s",
            handle_id,
            row.position,
            path,
            row.token,
            _best(top),
        )


def _handle_id(chunk: Chunk) -> str:
    held = chunk.run.reservation
    sequence = held.sequence
    return "new" if sequence is None or held.verdict is Verdict.FORK else sequence.handle_id


def _best(row: RowOutput) -> str:
    """Return the row's best tokens with their log-probabilities, best first."""
    if row.top_ids is None or row.top_logprobs is None:
        return "none (not finite)"
    pairs = zip(row.top_ids.tolist(), row.top_logprobs.tolist(), strict=True)
    return " ".join(f"{token_id}:{logprob:.4f}" for token_id, logprob in pairs)
