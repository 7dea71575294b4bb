"""A step's arrays into the fields that its upload copies: rows, padded to their bucket, work list and block tables."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ferrule_server.executor.base import NO_SLOT, NULL_BLOCK, Int32Array, StepBatch
from ferrule_server.executor.cuda.buffers import TABLE_WIDTH
from ferrule_server.executor.cuda.layout import Array
from ferrule_server.kernels.cuda.work_list import FIELDS, WorkLists

_SEQ = FIELDS.index("seq")


def fill_inputs(
    arrays: Mapping[str, Array],
    batch: StepBatch,
    num_rows_bucket: int,
    *,
    work_lists: WorkLists,
    block_size: int,
) -> int:
    """Write ``token_ids``, ``positions``, ``slot_mapping`` and ``work`` of a step, and nothing else.

    Rows up to the bucket are padding: token 0 at position 0 without a slot, in no item of the work list.

    Args:
        arrays: The fields of ``DecodeBuffers.inputs`` on the host, whatever they hold.
        batch: At most ``num_rows_bucket`` rows, at most ``work_list.MAX_NEW`` with a slot in each sequence, the last.
        num_rows_bucket: Rows that the kernels will run.
        work_lists: Makes the work list.
        block_size: Slots per block.

    Returns:
        How many rows of ``work`` are in use.

    Raises:
        WorkListError: The rows with slots are too many, or not the last of their sequence.
    """
    items = work_lists.items(batch.cu_seqlens_q, batch.kv_lens, batch.slot_mapping, batch.positions)
    _fill_rows(arrays, batch, num_rows_bucket)
    return _fill_work(arrays["work"], items, batch, block_size)


def _fill_rows(arrays: Mapping[str, Array], batch: StepBatch, num_rows_bucket: int) -> None:
    """Write the fields with one value per row."""
    for name, values, padding in (
        ("token_ids", _token_ids(batch), 0),
        ("positions", batch.positions, 0),
        ("slot_mapping", batch.slot_mapping, NO_SLOT),
    ):
        arrays[name][: batch.num_rows] = values
        arrays[name][batch.num_rows : num_rows_bucket] = padding


def _token_ids(batch: StepBatch) -> Int32Array:
    """Return the tokens; -2 - j: the j-th that the step before chose."""
    if batch.feedback is None:
        return batch.token_ids
    return np.where(batch.feedback >= 0, -2 - batch.feedback, batch.token_ids)


def _fill_work(work: Array, items: Int32Array, batch: StepBatch, block_size: int) -> int:
    """Write the items and behind them the block tables, and let each item say where its table begins."""
    num_items = len(items)
    num_rows = -(-batch.kv_lens // (block_size * TABLE_WIDTH))
    ends = num_items + np.cumsum(num_rows)
    width = int(num_rows.max())
    tables = _padded(batch.block_tables, width * TABLE_WIDTH).reshape(batch.num_seqs, width, TABLE_WIDTH)
    work[:num_items] = items
    work[:num_items, _SEQ] = (ends - num_rows).take(items[:, _SEQ])
    work[num_items : ends[-1]] = tables[np.arange(width) < num_rows[:, None]]
    return int(ends[-1])


def _padded(tables: Int32Array, width: int) -> Int32Array:
    """Return tables of another width; what is cut off nobody needs."""
    if tables.shape[1] == width:
        return tables
    padded = np.full((len(tables), width), NULL_BLOCK, np.int32)
    kept = min(width, tables.shape[1])
    padded[:, :kept] = tables[:, :kept]
    return padded
