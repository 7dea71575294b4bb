"""Forms one mixed step out of the running appends. Pure: integers in, arrays out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ferrule_server.engine.running import RunningAppend
from ferrule_server.executor.base import NO_SLOT, NULL_BLOCK, Int32Array, OutputSpec, StepBatch

DECODE_ROWS = 8
"""An append with at most this many rows left is scheduled like a decode: whole, before any prefill chunk."""

PREFILL_SHARE = 8
"""While a prefill waits, one row in this many is kept for it, however many decodes come back each step."""


@dataclass(slots=True)
class Chunk:
    """Rows ``run.cursor .. run.cursor + num_rows`` of one append, scheduled for the next step."""

    run: RunningAppend
    num_rows: int


def plan_step(running: Iterable[RunningAppend], max_rows: int) -> list[Chunk]:
    """Choose the rows of the next step: decodes first, then prefill chunks; neither can starve the other.

    Decodes go in order of arrival. Of the room for prefills the oldest has at least half, so that it ends; the rest
    goes to the shortest, so that a short prompt does not wait for a long one.

    Args:
        running: Appends with rows left, oldest first.
        max_rows: Most rows in the step, at least 2.

    Returns:
        Chunks with at least one row each, one per append; their sum is at most ``max_rows``.
    """
    decodes: list[RunningAppend] = []
    prefills: list[RunningAppend] = []
    for run in running:
        (decodes if run.remaining <= DECODE_ROWS else prefills).append(run)
    kept = max(1, max_rows // PREFILL_SHARE) if prefills else 0
    chunks, room = _fill(decodes, max_rows - kept)
    if prefills:
        chunks += _plan_prefills(prefills, room + kept)
    return chunks


def _plan_prefills(prefills: list[RunningAppend], room: int) -> list[Chunk]:
    """Share the room: half of it, or all that is left over, to the oldest, the rest to the shortest first."""
    oldest, others = prefills[0], sorted(prefills[1:], key=lambda run: run.remaining)
    chunks, room_left = _fill(others, room // 2)
    return [Chunk(oldest, min(oldest.remaining, room - room // 2 + room_left)), *chunks]


def _fill(runs: Iterable[RunningAppend], room: int) -> tuple[list[Chunk], int]:
    """Give each append in turn as many rows as it has left and the room allows; returns the room left over."""
    chunks: list[Chunk] = []
    for run in runs:
        if room <= 0:
            break
        num_rows = min(run.remaining, room)
        chunks.append(Chunk(run, num_rows))
        room -= num_rows
    return chunks, room


def build_batch(chunks: Sequence[Chunk], block_size: int) -> StepBatch:
    """Turn chunks into the arrays of one step.

    Args:
        chunks: What :func:`plan_step` chose, at least one.
        block_size: Slots per block of the pool.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    output_rows: list[int] = []
    output_specs: list[OutputSpec] = []
    cu_seqlens_q = [0]
    kv_lens: list[int] = []
    for chunk in chunks:
        run, first, base = chunk.run, chunk.run.cursor, len(token_ids)
        end = run.start + first + chunk.num_rows
        chunk_positions = range(run.start + first, end)
        token_ids += run.token_ids[first : first + chunk.num_rows]
        positions += chunk_positions
        slots += _slots(run, chunk_positions, block_size)
        for row, spec in _output_specs(run, first, chunk.num_rows):
            output_rows.append(base + row - first)
            output_specs.append(spec)
        cu_seqlens_q.append(len(token_ids))
        kv_lens.append(end)
    return StepBatch(
        token_ids=np.array(token_ids, np.int32),
        positions=np.array(positions, np.int32),
        slot_mapping=np.array(slots, np.int32),
        cu_seqlens_q=np.array(cu_seqlens_q, np.int32),
        kv_lens=np.array(kv_lens, np.int32),
        block_tables=_block_tables(chunks, kv_lens, block_size),
        output_rows=np.array(output_rows, np.int32),
        output_specs=tuple(output_specs),
    )


def _slots(run: RunningAppend, positions: range, block_size: int) -> list[int]:
    """Slots of these positions, NO_SLOT for rows that only read."""
    if run.reservation is None:
        return [NO_SLOT] * len(positions)
    table = run.block_ids
    return [table[position // block_size] * block_size + position % block_size for position in positions]


def _output_specs(run: RunningAppend, first: int, num_rows: int) -> Iterable[tuple[int, OutputSpec]]:
    """(row of the append, spec) of the rows in this chunk that return something, ascending."""
    if num_rows == len(run.token_ids):
        return run.specs.items()
    return [(row, run.specs[row]) for row in range(first, first + num_rows) if row in run.specs]


def _block_tables(chunks: Sequence[Chunk], kv_lens: Sequence[int], block_size: int) -> Int32Array:
    """int32 [num_seqs, max_blocks]: only the blocks that hold the first ``kv_len`` tokens, NULL_BLOCK beyond."""
    counts = [-(-kv_len // block_size) for kv_len in kv_lens]
    tables = np.full((len(chunks), max(counts)), NULL_BLOCK, np.int32)
    for row, (chunk, count) in enumerate(zip(chunks, counts, strict=True)):
        tables[row, :count] = chunk.run.block_ids[:count]
    return tables
