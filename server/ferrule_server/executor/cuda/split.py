"""A step into parts: what the kernels run, and what torch runs.

A sequence goes to the kernels when it has few rows in the step, else to torch: by the sequence alone, so that how a
row is computed does not depend on its neighbours. What is too much for one launch of the kernels becomes several parts.

Parts may run in any order as far as different sequences go (a slot that one sequence writes in a step is read by no
other in that step); pieces of one sequence stand in order, as a later one reads what an earlier one writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ferrule_server.executor.base import Int32Array, StepBatch
from ferrule_server.kernels.cuda.gemm import MAX_TOKENS
from ferrule_server.kernels.cuda.work_list import MAX_NEW

__all__ = ["SMALL_ROWS", "Part", "split_step"]

SMALL_ROWS = 16
"""A sequence with at most so many rows in a step is work for the kernels: decodes, verifies, short appends."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a step.

    Attributes:
        batch: Them alone; the step's own batch where that is all of it.
        outputs: int32 [num_outputs of the part], which outputs of the step these are, ascending.
        is_for_kernels: Else torch runs it.
    """

    batch: StepBatch
    outputs: Int32Array
    is_for_kernels: bool


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows ``begin .. end`` of the step, all of one sequence."""

    seq: int
    begin: int
    end: int


def split_step(
    batch: StepBatch, *, max_rows: int, small_rows: int = SMALL_ROWS, is_deterministic: bool = False
) -> list[Part]:
    """Return the parts of a step, each row in exactly one.

    A part for the kernels has at most ``max_rows`` rows and one piece of a sequence at most, of no more than
    ``work_list.MAX_NEW`` rows, those with a slot last.

    Args:
        batch: The step; at least one row in each sequence.
        max_rows: Most rows that the kernels take at a time.
        small_rows: Most rows of a sequence that is for the kernels, at least 1.
        is_deterministic: All of it is for the kernels, in parts of at most 64 rows: what gives the same bits whatever
            the number of rows.

    Returns:
        Parts for the kernels first: they do not keep the host waiting. Empty where the step is.
    """
    if not batch.num_rows:
        return []
    most = min(max_rows, MAX_TOKENS) if is_deterministic else max_rows
    if batch.num_rows == batch.num_seqs <= most:  # decodes: most steps
        return [_whole(batch, is_for_kernels=True)]
    counts = np.diff(batch.cu_seqlens_q)
    is_small = np.full(len(counts), fill_value=True) if is_deterministic else counts <= small_rows
    breaks = _breaks(batch)
    if is_small.all() and batch.num_rows <= most and counts.max() <= MAX_NEW and not len(breaks):
        return [_whole(batch, is_for_kernels=True)]
    if not is_small.any():
        return [_whole(batch, is_for_kernels=False)]
    parts = [
        _part(batch, pieces, is_for_kernels=True)
        for pieces in _packed(batch.cu_seqlens_q.tolist(), np.flatnonzero(is_small).tolist(), breaks.tolist(), most)
    ]
    large = [_Piece(seq, *batch.cu_seqlens_q[seq : seq + 2].tolist()) for seq in np.flatnonzero(~is_small).tolist()]
    return [*parts, _part(batch, large, is_for_kernels=False)] if large else parts


def _breaks(batch: StepBatch) -> Int32Array:
    """Return the rows without a slot that follow one with a slot in their sequence: a piece has to begin there."""
    if batch.num_rows == batch.num_seqs:
        return np.empty(0, np.int32)
    has_slot = batch.slot_mapping >= 0
    rows = np.flatnonzero(has_slot[:-1] & ~has_slot[1:]) + 1
    return np.setdiff1d(rows, batch.cu_seqlens_q).astype(np.int32)


def _packed(begins: Sequence[int], seqs: Iterable[int], breaks: Sequence[int], most: int) -> Iterator[list[_Piece]]:
    """Yield the pieces of each part: sequences one after the other, cut where a part is full.

    Args:
        begins: First row of each sequence, and the number of all rows.
        seqs: Which ones, ascending.
        breaks: Rows where a piece has to begin.
        most: Rows of a part.
    """
    pieces: list[_Piece] = []
    room = most
    for seq in seqs:
        begin = begins[seq]
        while begin < begins[seq + 1]:
            if not room or (pieces and pieces[-1].seq == seq):
                yield pieces
                pieces, room = [], most
            end = min(begins[seq + 1], begin + min(room, MAX_NEW), *(row for row in breaks if row > begin))
            pieces.append(_Piece(seq, begin, end))
            room -= end - begin
            begin = end
    yield pieces


def _whole(batch: StepBatch, *, is_for_kernels: bool) -> Part:
    return Part(batch, np.arange(len(batch.output_rows), dtype=np.int32), is_for_kernels)


def _part(batch: StepBatch, pieces: Sequence[_Piece], *, is_for_kernels: bool) -> Part:
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
    return Part(part, outputs, is_for_kernels)
