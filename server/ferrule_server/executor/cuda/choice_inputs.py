"""The records that the kernels behind the logits read, filled in for the output rows of a step.

Slot i of the draws, of the shapings and of the scores is output i; the top log-probabilities of those that ask for them
follow one another. A shaped row is drawn from its place behind the raw rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ferrule_server.executor.base import Int32Array, OutputSpec, SampleSpec, Shaping, StepBatch
from ferrule_server.executor.cuda.choices import (
    CHOSEN,
    ChoiceCounts,
    OutputKind,
    are_same,
    chooses,
    requested_ids,
    shaping_of,
)
from ferrule_server.executor.sampling.selection import needs_normaliser
from ferrule_server.kernels.cuda import sample, shape_logits

__all__ = ["DrawMemo", "fill_choices"]

Views = Mapping[str, npt.NDArray[Any]]

_NUM_CACHED = 4096
_NOTHING_TO_DO = -1


class DrawMemo:
    """The records of the last step's draws: but for positions those of the next one too, where its rows want the same.

    What shapes logits is never kept: masks are to go when nobody else refers to them.
    """

    def __init__(self) -> None:
        self._specs: tuple[OutputSpec, ...] = ()
        self._rows = b""
        self._records = np.zeros((0, 0), np.int32)

    def records(self, batch: StepBatch, first_shaped: int, vocab_size: int) -> Int32Array:
        """Return records as :func:`_draw_records` does, not to be changed."""
        specs, rows = batch.output_specs, batch.output_rows.tobytes()
        if rows != self._rows or not are_same(specs, self._specs):
            records = _draw_records(batch, first_shaped, vocab_size)
            if any(spec.shaping is not None for spec in specs):
                return records
            self._specs, self._rows, self._records = specs, rows, records
        return self._records


def fill_choices(
    views: Views,
    batch: StepBatch,
    num_rows_bucket: int,
    kind: OutputKind,
    mask_slots: Mapping[bytes, int],
    *,
    vocab_size: int,
    draws: DrawMemo | None = None,
) -> ChoiceCounts:
    """Fill in the records of every kernel that the kind runs.

    Args:
        views: Fields of the staged inputs by name.
        batch: The step.
        num_rows_bucket: Records that the kernels look at.
        kind: Of the step; nothing is filled for GREEDY and TORCH.
        mask_slots: Where the masks of the step lie, by fingerprint.
        vocab_size: Logits of a row.
        draws: Remembers the records of the last step, of the same vocabulary and fields.
    """
    if kind in (OutputKind.GREEDY, OutputKind.TORCH):
        return ChoiceCounts()
    num_entries = _fill_shapings(views, batch, num_rows_bucket, mask_slots, vocab_size)
    _fill_draws(views, batch, num_rows_bucket, vocab_size, draws or DrawMemo())
    num_requests = _fill_scores(views, batch, num_rows_bucket) if kind >= OutputKind.SCORE else 0
    num_tops = _fill_tops(views, batch, num_rows_bucket, vocab_size) if kind >= OutputKind.TOP else 0
    return ChoiceCounts(num_requests, num_entries, num_tops)


def _fill_draws(views: Views, batch: StepBatch, num_slots: int, vocab_size: int, draws: DrawMemo) -> None:
    """Fill in how each token is drawn, and from which row."""
    records, num_outputs = views["draw_records"], len(batch.output_specs)
    records[num_outputs:num_slots, 0] = _NOTHING_TO_DO
    records[:num_outputs] = draws.records(batch, len(records), vocab_size)
    records[:num_outputs, 3] = batch.positions[batch.output_rows] + 1


def _draw_records(batch: StepBatch, first_shaped: int, vocab_size: int) -> Int32Array:
    """Return how each token is drawn but for its position, and from which row; shaped ones from ``first_shaped`` on."""
    specs = batch.output_specs
    words = b"".join([_draw_words(_sample_of(spec), vocab_size) for spec in specs])
    records = np.frombuffer(words, np.int32).reshape(len(specs), -1).copy()
    records[:, 0] = [
        _row_drawn_from(spec, row, first_shaped + i)
        for i, (spec, row) in enumerate(zip(specs, batch.output_rows.tolist(), strict=True))
    ]
    return records


def _sample_of(spec: OutputSpec) -> SampleSpec | None:
    """Return how a token is drawn, None: it is the largest."""
    return None if spec.sample is None or spec.sample.temperature == 0 else spec.sample


@lru_cache(_NUM_CACHED)
def _draw_words(spec: SampleSpec | None, vocab_size: int) -> bytes:
    """Return the record of a draw but for its row and position: the same for every token of a text."""
    return sample.pack_records([spec], [_NOTHING_TO_DO], [0], vocab_size).tobytes()


def _row_drawn_from(spec: OutputSpec, row: int, shaped_row: int) -> int:
    """Return the row of the logits that a token is drawn from."""
    if not chooses(spec):
        return _NOTHING_TO_DO
    return row if shaping_of(spec) is None else shaped_row


def _fill_shapings(
    views: Views, batch: StepBatch, num_slots: int, mask_slots: Mapping[bytes, int], vocab_size: int
) -> int:
    """Fill in what changes logits before a draw; return the number of entries.

    Args:
        views: Fields of the staged inputs.
        batch: The step.
        num_slots: Records that the kernel looks at.
        mask_slots: Where masks lie.
        vocab_size: Logits of a row.
    """
    records = views["shape_records"]
    records[:num_slots, 0] = _NOTHING_TO_DO
    shapings = [(i, shaping_of(spec)) for i, spec in enumerate(batch.output_specs) if spec.shaping is not None]
    found = {i: shaping for i, shaping in shapings if shaping is not None}
    borders = _fill_entries(views["entries"], batch, found, vocab_size)
    mask_units = shape_logits.mask_bytes(vocab_size) // 16
    for i, shaping in found.items():
        mask = -1 if shaping.mask is None else mask_slots[shaping.mask.fingerprint] * mask_units
        records[i] = _shaping_words(shaping.repetition_penalty, shaping.frequency_penalty, shaping.presence_penalty)
        records[i, :4] = (batch.output_rows[i], mask, borders[i], borders[i + 1])
    return borders[-1]


def _fill_entries(
    entries: Int32Array, batch: StepBatch, shapings: Mapping[int, Shaping], vocab_size: int
) -> Sequence[int]:
    """Fill in the tokens that penalties or a bias name, output by output; return where each begins, and the end.

    All outputs are packed at once: token t of output i goes as ``i * vocab_size + t``, which orders them.
    """
    num_outputs = len(batch.output_specs)
    histories = [
        history + np.int32(i * vocab_size)
        for i, history in enumerate(batch.histories)
        if history is not None and i in shapings
    ]
    bias = [(i * vocab_size + token, amount) for i, shaping in shapings.items() for token, amount in shaping.bias]
    if not histories and not bias:
        return [0] * (num_outputs + 1)
    packed = _packed(np.concatenate(histories) if histories else np.empty(0, np.int32), bias)
    begins: list[int] = packed[:, 0].searchsorted(np.arange(num_outputs + 1) * vocab_size).tolist()
    packed[:, 0] %= vocab_size
    entries[: len(packed)] = packed
    return begins


def _packed(history: Int32Array, bias: Sequence[tuple[int, float]]) -> Int32Array:
    """Return entries ascending; without a bias, which is the rule, in a third of the time."""
    if bias:
        return shape_logits.pack_entries(Shaping(presence_penalty=1.0, bias=tuple(bias)), history)
    token_ids, counts = np.unique(history, return_counts=True)
    packed = np.zeros((len(token_ids), 4), np.int32)
    packed[:, 0], packed[:, 1] = token_ids, counts
    return packed


@lru_cache(_NUM_CACHED)
def _shaping_words(repetition: float, frequency: float, presence: float) -> Int32Array:
    """Return the record of a shaping but for row, mask and entries; not to be changed."""
    return shape_logits.pack_record(Shaping(repetition, frequency, presence), _NOTHING_TO_DO, -1, (0, 0))


def _fill_scores(views: Views, batch: StepBatch, num_slots: int) -> int:
    """Fill in whose log-probabilities are asked for; return the number of requests."""
    records: list[tuple[int, int, int, int]] = []
    requests: list[int] = []
    for i, (row, spec) in enumerate(zip(batch.output_rows.tolist(), batch.output_specs, strict=True)):
        begin = len(requests)
        requests += [-1 - i if token == CHOSEN else token for token in requested_ids(spec)]
        records.append((row if needs_normaliser(spec) else _NOTHING_TO_DO, begin, len(requests), 0))
    _write_records(views["score_records"], records, num_slots)
    views["request_ids"][: len(requests)] = requests
    return len(requests)


def _fill_tops(views: Views, batch: StepBatch, num_slots: int, vocab_size: int) -> int:
    """Fill in which rows return their largest log-probabilities, one behind the other; return how many do."""
    records = [
        (row, min(spec.num_top_logprobs, vocab_size), 0, 0)
        for row, spec in zip(batch.output_rows.tolist(), batch.output_specs, strict=True)
        if spec.num_top_logprobs > 0
    ]
    _write_records(views["top_records"], records, num_slots)
    return len(records)


def _write_records(target: Int32Array, records: Sequence[tuple[int, ...]], num_slots: int) -> None:
    """Write records, and behind them such that say there is nothing to do."""
    target[len(records) : num_slots, 0] = _NOTHING_TO_DO
    if records:
        target[: len(records)] = records
