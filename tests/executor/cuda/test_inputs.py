"""Inputs: what the kernels find in the fields of a step is the step, however long and many its sequences are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ferrule_server.executor.base import Int32Array, StepBatch
from ferrule_server.executor.cuda.buffers import Limits, input_layout
from ferrule_server.executor.cuda.inputs import fill_inputs
from ferrule_server.executor.cuda.layout import Array
from ferrule_server.kernels.cuda.spec import ModelShape
from ferrule_server.kernels.cuda.work_list import (
    FIELDS,
    WorkListError,
    WorkLists,
    count_new_tokens,
    make_work_list,
)

BLOCK_SIZE, NUM_CTAS, MAX_BLOCKS, MAX_ROWS = 16, 5, 150, 24
SHAPE = ModelShape(64, 64, 1, 4, 2, 64, 100, has_qk_norm=True)
LAYOUT = input_layout(SHAPE, Limits(MAX_BLOCKS, max_rows=MAX_ROWS, max_requests=1, max_entries=1), NUM_CTAS)
GARBAGE = 0x5A5A5A5A
Seqs = list[tuple[int, int]]

seqs_of_steps = st.lists(
    st.tuples(st.integers(1, 6), st.one_of(st.integers(0, 40), st.integers(0, MAX_BLOCKS * BLOCK_SIZE - 6))),
    min_size=1,
    max_size=4,
)
"""(rows in the step, tokens before them) of each sequence."""


def batch_of(seqs: Seqs, *, more_width: int = 0, feedback: Int32Array | None = None) -> StepBatch:
    """Return a step of these sequences; every block has an id of its own."""
    rows = [count for count, _ in seqs]
    lengths = [count + old for count, old in seqs]
    width = max(-(-length // BLOCK_SIZE) for length in lengths) + more_width
    tables = np.zeros((len(seqs), width), np.int32)
    for seq, length in enumerate(lengths):
        used = -(-length // BLOCK_SIZE)
        tables[seq, :used] = 1000 * (seq + 1) + np.arange(used)
    positions = np.concatenate([np.arange(old, old + count) for count, old in seqs]).astype(np.int32)
    of_row = np.repeat(np.arange(len(seqs)), rows)
    return StepBatch(
        token_ids=np.arange(10, 10 + len(positions), dtype=np.int32),
        positions=positions,
        slot_mapping=tables[of_row, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
        cu_seqlens_q=np.cumsum([0, *rows]).astype(np.int32),
        kv_lens=np.array(lengths, np.int32),
        block_tables=tables,
        output_rows=np.empty(0, np.int32),
        output_specs=(),
        feedback=feedback,
    )


def filled(batch: StepBatch, bucket: int, rows_per_tile: int = 4) -> tuple[dict[str, Array], int]:
    """Return the fields, which held garbage before, and the rows of ``work`` in use."""
    arrays = LAYOUT.arrays(torch.full((LAYOUT.num_bytes // 4,), GARBAGE, dtype=torch.int32).view(torch.uint8))
    used = fill_inputs(arrays, batch, bucket, work_lists=lists_for(rows_per_tile), block_size=BLOCK_SIZE)
    return arrays, used


def lists_for(rows_per_tile: int) -> WorkLists:
    """Return what makes the work lists of steps."""
    heads = SHAPE.num_kv_heads
    return WorkLists(num_kv_heads=heads, rows_per_tile=rows_per_tile, num_ctas=NUM_CTAS, num_places=1000)


def expected_items(batch: StepBatch, rows_per_tile: int) -> Int32Array:
    """Return the work list of a step."""
    return make_work_list(
        cu_seqlens_q=batch.cu_seqlens_q,
        kv_lens=batch.kv_lens,
        num_new=count_new_tokens(batch.slot_mapping, batch.cu_seqlens_q),
        positions=batch.positions,
        num_kv_heads=SHAPE.num_kv_heads,
        rows_per_tile=rows_per_tile,
        num_ctas=NUM_CTAS,
        num_places=1000,
    ).items


@given(seqs_of_steps, st.integers(0, 20), st.sampled_from([1, 4, 16]))
def test_kernels_find_items_and_tables(seqs: Seqs, more_width: int, rows_per_tile: int) -> None:
    """Items are those of the step; from the row an item names, its sequence's table lies, 16 ids to a row."""
    batch = batch_of(seqs, more_width=more_width)
    arrays, used = filled(batch, MAX_ROWS, rows_per_tile)
    expected = expected_items(batch, rows_per_tile)
    items: npt.NDArray[np.int32] = np.array(arrays["work"][: len(expected)], np.int32)
    assert (items[:, 1:] == expected[:, 1:]).all()
    flat = arrays["work"].reshape(-1)
    for item, (seq, *rest) in zip(items.tolist(), expected.tolist(), strict=True):
        if rest[FIELDS.index("num_rows") - 1]:
            num_blocks = -(-int(batch.kv_lens[seq]) // BLOCK_SIZE)
            begin = item[0] * 16
            assert flat[begin : begin + num_blocks].tolist() == batch.block_tables[seq, :num_blocks].tolist()
    assert (arrays["work"][used:] == GARBAGE).all()
    num_table_rows = sum(-(-(count + old) // (BLOCK_SIZE * 16)) for count, old in seqs)
    assert used == len(expected) + num_table_rows


@given(seqs_of_steps)
def test_rows_up_to_the_bucket_are_padding(seqs: Seqs) -> None:
    """Token 0 at position 0 without a slot; nothing behind the bucket is touched, nor any other field."""
    batch = batch_of(seqs)
    bucket = min(batch.num_rows + 1, MAX_ROWS)
    arrays, _ = filled(batch, bucket)
    num_padded, rest = bucket - batch.num_rows, [GARBAGE] * (MAX_ROWS - bucket)
    assert arrays["token_ids"].tolist() == [*batch.token_ids.tolist(), *[0] * num_padded, *rest]
    assert arrays["positions"].tolist() == [*batch.positions.tolist(), *[0] * num_padded, *rest]
    assert arrays["slot_mapping"].tolist() == [*batch.slot_mapping.tolist(), *[-1] * num_padded, *rest]
    fields = {"token_ids", "positions", "slot_mapping", "work"}
    assert all((values == GARBAGE).all() for name, values in arrays.items() if name not in fields)


def test_tokens_of_the_step_before_are_named_by_their_output() -> None:
    """-2 - j stands for the j-th; -1, which stands for none, stays."""
    batch = batch_of([(1, 5), (1, 6), (1, 7), (1, 8)], feedback=np.array([3, -1, 0, -1], np.int32))
    batch.token_ids[3] = -1
    arrays, _ = filled(batch, 4)
    assert arrays["token_ids"][:4].tolist() == [-5, 11, -2, -1]


def test_the_largest_step_fits() -> None:
    """As many rows as the limits allow, each a sequence of the longest kind."""
    batch = batch_of([(1, MAX_BLOCKS * BLOCK_SIZE - 1)] * MAX_ROWS)
    _, used = filled(batch, MAX_ROWS, 1)
    assert used <= LAYOUT.fields["work"].shape[0]
    assert used > MAX_ROWS * (SHAPE.num_kv_heads + 9)


def test_rows_that_only_read_write_nothing() -> None:
    """A query: its sequence has no new tokens."""
    batch = batch_of([(3, 40)])
    batch.slot_mapping[:] = -1
    arrays, _ = filled(batch, 3)
    assert arrays["slot_mapping"][:3].tolist() == [-1] * 3
    assert not arrays["work"][:NUM_CTAS, FIELDS.index("num_new")].any()


def test_what_the_kernels_cannot_do_is_refused_before_anything_is_written() -> None:
    """Too many new tokens, or one in front of a row without a slot."""
    arrays = LAYOUT.arrays(torch.zeros(LAYOUT.num_bytes, dtype=torch.uint8))
    late = batch_of([(3, 5)])
    late.slot_mapping[2] = -1
    many = batch_of([(65, 5)])
    for batch, reason in ((late, "row 2 has no slot"), (many, "65 new tokens")):
        with pytest.raises(WorkListError, match=reason):
            fill_inputs(arrays, batch, batch.num_rows, work_lists=lists_for(1), block_size=BLOCK_SIZE)
    assert not any(values.any() for values in arrays.values())
