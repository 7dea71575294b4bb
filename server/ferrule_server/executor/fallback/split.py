"""Split a step into parts: those that the fast path runs, and one that torch runs.

A sequence goes to the fast path if it has few rows in the step, else to torch. That depends only on the sequence, so
the computation of a row does not depend on its neighbours. If one part cannot hold all rows, there are several.

Parts of different sequences may run in any order: no sequence reads a slot that another one writes in the same step.
Pieces of one sequence run in order, because a later piece reads what an earlier one writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ferrule_server.executor.base import Int32Array, StepBatch

SMALL_ROWS = 16
"""The most rows of a sequence in a step that the fast path runs: decodes, verifies, short appends."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a step.

    Attributes:
        batch: These rows alone; the step's own batch if the part is the whole step.
        outputs: int32 [num_outputs of the part], the indices of its outputs in the step, ascending.
        is_fast: Whether the fast path runs it, or torch.
    """

    batch: StepBatch
    outputs: Int32Array
    is_fast: bool


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows ``begin .. end`` of the step, all of one sequence."""

    seq: int
    begin: int
    end: int


def split_step(
    batch: StepBatch, *, max_rows: int, max_seq_rows: int, small_rows: int | None = SMALL_ROWS
) -> list[Part]:
    """Return the parts of a step, each row in exactly one.

    A part for the fast path has at most one piece of a sequence. The rows with a slot are the last ones of a piece.

    Args:
        batch: The step; at least one row in each sequence.
        max_rows: The most rows of a part for the fast path.
        max_seq_rows: The most rows of one sequence in such a part.
        small_rows: The most rows of a sequence that the fast path runs, at least 1; None: it runs every sequence.

    Returns:
        Parts for the fast path first, because the host does not wait for them. Empty if the step is empty.
    """
    if not batch.num_rows:
        return []
    if batch.num_rows == batch.num_seqs <= max_rows:  # decodes: most steps
        return [_whole(batch, is_fast=True)]
    counts = np.diff(batch.cu_seqlens_q)
    is_small = np.full(len(counts), fill_value=True) if small_rows is None else counts <= small_rows
    breaks = _breaks(batch)
    if is_small.all() and batch.num_rows <= max_rows and counts.max() <= max_seq_rows and not len(breaks):
        return [_whole(batch, is_fast=True)]
    if not is_small.any():
        return [_whole(batch, is_fast=False)]
    begins, small = batch.cu_seqlens_q.tolist(), np.flatnonzero(is_small).tolist()
    pieces = _packed(begins, small, breaks.tolist(), max_rows, max_seq_rows)
    parts = [_part(batch, each, is_fast=True) for each in pieces]
    large = [_Piece(seq, *begins[seq : seq + 2]) for seq in np.flatnonzero(~is_small).tolist()]
    return [*parts, _part(batch, large, is_fast=False)] if large else parts


def _breaks(batch: StepBatch) -> Int32Array:
    """Return the rows without a slot that follow a row with a slot in their sequence: a piece must begin there."""
    has_slot = batch.slot_mapping >= 0
    rows = np.flatnonzero(has_slot[:-1] & ~has_slot[1:]) + 1
    return np.setdiff1d(rows, batch.cu_seqlens_q).astype(np.int32)


def _packed(
    begins: Sequence[int], seqs: Iterable[int], breaks: Sequence[int], max_rows: int, max_seq_rows: int
) -> Iterator[list[_Piece]]:
    """Yield the pieces of each part: sequences one after the other, cut where a part is full.

    Args:
        begins: First row of each sequence, and the number of all rows.
        seqs: Indices of the sequences, ascending.
        breaks: Rows where a piece must begin.
        max_rows: The most rows of a part.
        max_seq_rows: The most rows of a piece.
    """
    pieces: list[_Piece] = []
    room = max_rows
    for seq in seqs:
        begin = begins[seq]
        while begin < begins[seq + 1]:
            if not room or (pieces and pieces[-1].seq == seq):
                yield pieces
                pieces, room = [], max_rows
            end = min(begins[seq + 1], begin + min(room, max_seq_rows), *(row for row in breaks if row > begin))
            pieces.append(_Piece(seq, begin, end))
            room -= end - begin
            begin = end
    yield pieces


def _whole(batch: StepBatch, *, is_fast: bool) -> Part:
    return Part(batch, np.arange(len(batch.output_rows), dtype=np.int32), is_fast)


def _part(batch: StepBatch, pieces: Sequence[_Piece], *, is_fast: bool) -> Part:
    """Return the batch of some pieces, ascending by row."""
    rows = np.concatenate([np.arange(piece.begin, piece.end) for piece in pieces])
    ends = np.cumsum([0, *(piece.end - piece.begin for piece in pieces)], dtype=np.int32)
    place = np.full(batch.num_rows, -1, np.int32)
    place[rows] = np.arange(len(rows))
    output_places = place[batch.output_rows]
    outputs = np.flatnonzero(output_places >= 0).astype(np.int32)
    part = StepBatch(
        token_ids=batch.token_ids[rows],
        positions=batch.positions[rows],
        slot_mapping=batch.slot_mapping[rows],
        cu_seqlens_q=ends,
        kv_lens=batch.positions[[piece.end - 1 for piece in pieces]] + 1,
        block_tables=batch.block_tables[[piece.seq for piece in pieces]],
        output_rows=output_places[outputs],
        output_specs=tuple(batch.output_specs[i] for i in outputs),
        histories=tuple(batch.histories[i] for i in outputs) if batch.histories else (),
        feedback=None if batch.feedback is None else batch.feedback[rows],
    )
    return Part(part, outputs, is_fast)
