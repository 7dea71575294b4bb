"""Splitting a step: every row in one part, and the parts together are the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ferrule_server.executor.base import OutputSpec, RowOutput, StepBatch
from ferrule_server.executor.fallback.split import SMALL_ROWS, Part, split_step
from ferrule_server.executor.reference import PagedReferenceExecutor
from ferrule_server.kernels.cuda.work_list import count_new_tokens

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Seq:
    """Rows of one sequence in a step; ``num_read`` have no slot, the first ones or the last."""

    num_rows: int
    num_old: int = 0
    num_read: int = 0
    num_outputs: int = 1
    reads_last: bool = False


@st.composite
def seqs_of_steps(draw: st.DrawFn) -> list[Seq]:
    """Return decodes, verifies, queries and long chunks, a few of them."""
    found = []
    for _ in range(draw(st.integers(1, 7))):
        num_rows = draw(st.one_of(st.just(1), st.integers(1, 20), st.integers(1, 200)))
        num_read = draw(st.sampled_from([0, 0, num_rows, num_rows // 2]))
        num_old, num_outputs = draw(st.integers(num_read, 300)), draw(st.integers(0, num_rows))
        found.append(Seq(num_rows, num_old, num_read, num_outputs, draw(st.booleans())))
    return found


def batch_of(seqs: Sequence[Seq]) -> StepBatch:
    """Return a step of these sequences; token r stands in row r, spec i asks for token i."""
    rows = [seq.num_rows for seq in seqs]
    begins = np.cumsum([0, *rows]).astype(np.int32)
    firsts = [seq.num_old - seq.num_read for seq in seqs]
    positions = np.concatenate([np.arange(first, first + n) for first, n in zip(firsts, rows, strict=True)])
    width = max(-(-(first + n) // BLOCK_SIZE) for first, n in zip(firsts, rows, strict=True))
    tables = np.arange(1, len(seqs) * width + 1, dtype=np.int32).reshape(len(seqs), width)
    slots = tables[np.repeat(np.arange(len(seqs)), rows), positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    outputs = [end - k for seq, end in zip(seqs, begins[1:], strict=True) for k in range(seq.num_outputs, 0, -1)]
    for seq, begin, end in zip(seqs, begins[:-1], begins[1:], strict=True):
        slots[slice(end - seq.num_read, end) if seq.reads_last else slice(begin, begin + seq.num_read)] = -1
    return StepBatch(
        token_ids=np.arange(begins[-1], dtype=np.int32),
        positions=positions.astype(np.int32),
        slot_mapping=slots.astype(np.int32),
        cu_seqlens_q=begins,
        kv_lens=positions[begins[1:] - 1].astype(np.int32) + 1,
        block_tables=tables,
        output_rows=np.array(outputs, np.int32),
        output_specs=tuple(OutputSpec(target_id=i) for i in range(len(outputs))),
        histories=tuple(np.array([i], np.int32) if i % 2 else None for i in range(len(outputs))),
        feedback=np.arange(begins[-1], dtype=np.int32)[::-1].copy(),
    )


def seq_of(batch: StepBatch, table: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> int:
    """Return which sequence of a step a block table belongs to."""
    return int((batch.block_tables[:, 0] == table[0]).argmax())


def check_rows(batch: StepBatch, parts: list[Part]) -> None:
    """Every row is in one part, with all that belongs to it, and a sequence's rows come in order."""
    assert sorted(token for part in parts for token in part.batch.token_ids.tolist()) == batch.token_ids.tolist()
    place = {seq: int(batch.cu_seqlens_q[seq]) for seq in range(batch.num_seqs)}
    for part in parts:
        own = part.batch
        rows = own.token_ids
        assert own.feedback is not None
        assert batch.feedback is not None
        for name in ("positions", "slot_mapping", "feedback"):
            assert getattr(own, name).tolist() == getattr(batch, name)[rows].tolist(), name
        assert own.cu_seqlens_q[0] == 0
        assert own.cu_seqlens_q[-1] == own.num_rows
        for index, table in enumerate(own.block_tables):
            begin, end = own.cu_seqlens_q[index : index + 2]
            seq = seq_of(batch, table)
            assert table.tolist() == batch.block_tables[seq].tolist()
            assert rows[begin:end].tolist() == list(range(place[seq], place[seq] + end - begin))
            assert own.kv_lens[index] == own.positions[end - 1] + 1
            place[seq] += int(end - begin)
    assert list(place.values()) == batch.cu_seqlens_q[1:].tolist()


def check_outputs(batch: StepBatch, parts: list[Part]) -> None:
    """Every output is in one part, at its row, with its spec and its history."""
    assert sorted(i for part in parts for i in part.outputs.tolist()) == list(range(len(batch.output_rows)))
    for part in parts:
        own = part.batch
        assert own.token_ids[own.output_rows].tolist() == batch.output_rows[part.outputs].tolist()
        assert own.output_rows.tolist() == sorted(own.output_rows.tolist())
        assert [spec.target_id for spec in own.output_specs] == part.outputs.tolist()
        assert all(own.histories[k] is batch.histories[i] for k, i in enumerate(part.outputs))
        assert len(own.histories) == len(part.outputs)


def check_kernel_parts(parts: list[Part], max_rows: int) -> None:
    """What the kernels get they can run."""
    for part in parts:
        if part.is_fast:
            assert part.batch.num_rows <= max_rows
            assert np.diff(part.batch.cu_seqlens_q).max() <= 64
            assert len(set(part.batch.block_tables[:, 0].tolist())) == part.batch.num_seqs
            count_new_tokens(part.batch.slot_mapping, part.batch.cu_seqlens_q)


@given(seqs_of_steps(), st.sampled_from([1, 7, 16, 40, 256]), st.sampled_from([1, 3, 16, 100]))
def test_parts_are_the_step(seqs: list[Seq], max_rows: int, small_rows: int) -> None:
    """Short sequences go to the kernels, others to torch, whoever their neighbours are; kernels come first."""
    batch = batch_of(seqs)
    parts = split_step(batch, max_rows=max_rows, max_seq_rows=64, small_rows=small_rows)
    check_rows(batch, parts)
    check_outputs(batch, parts)
    check_kernel_parts(parts, max_rows)
    for part in parts:
        for table in part.batch.block_tables:
            assert part.is_fast == (seqs[seq_of(batch, table)].num_rows <= small_rows)
    kinds = [part.is_fast for part in parts]
    assert kinds == sorted(kinds, reverse=True)
    assert kinds.count(False) <= 1


@given(seqs_of_steps(), st.sampled_from([5, 64, 256]))
def test_deterministic_parts_are_the_step(seqs: list[Seq], max_rows: int) -> None:
    """All of it is for the kernels, in parts whose bits do not depend on their size."""
    batch = batch_of(seqs)
    parts = split_step(batch, max_rows=min(64, max_rows), max_seq_rows=64, small_rows=None)
    check_rows(batch, parts)
    check_outputs(batch, parts)
    check_kernel_parts(parts, min(64, max_rows))
    assert all(part.is_fast for part in parts)


@pytest.mark.parametrize("small_rows", [SMALL_ROWS, None])
@pytest.mark.parametrize(
    "seqs", [[Seq(1, 4)] * 5, [Seq(3), Seq(1, 9), Seq(SMALL_ROWS, 40)], [Seq(2, 5), Seq(2, 5, num_read=2)]], ids=str
)
def test_a_step_that_is_one_part_is_not_copied(seqs: list[Seq], small_rows: int | None) -> None:
    """The batch itself, and all of its outputs."""
    batch = batch_of(seqs)
    (part,) = split_step(batch, max_rows=64, max_seq_rows=64, small_rows=small_rows)
    assert part.batch is batch
    assert part.is_fast
    assert part.outputs.tolist() == list(range(len(batch.output_rows)))


def test_a_step_of_long_chunks_is_one_part_of_torch() -> None:
    """Without a copy, too."""
    batch = batch_of([Seq(17), Seq(200, 3)])
    (part,) = split_step(batch, max_rows=64, max_seq_rows=64)
    assert part.batch is batch
    assert not part.is_fast


def test_an_empty_step_has_no_parts() -> None:
    """Nothing to do."""
    none = np.empty(0, np.int32)
    batch = StepBatch(none, none, none, np.zeros(1, np.int32), none, np.empty((0, 0), np.int32), none, ())
    assert split_step(batch, max_rows=4, max_seq_rows=64) == []


def test_decodes_that_are_too_many_become_several_parts() -> None:
    """Each as large as it may be."""
    parts = split_step(batch_of([Seq(1, 3)] * 10), max_rows=4, max_seq_rows=64)
    assert [part.batch.num_rows for part in parts] == [4, 4, 2]
    assert all(part.is_fast for part in parts)


@pytest.mark.parametrize("seqs", [[Seq(90)], [Seq(3), Seq(90, 2), Seq(40)]], ids=str)
def test_attention_takes_so_many_new_rows_of_a_sequence(seqs: list[Seq]) -> None:
    """Also where more would be for the kernels: the rest of the sequence is in the next part."""
    batch = batch_of(seqs)
    parts = split_step(batch, max_rows=256, max_seq_rows=64, small_rows=100)
    check_rows(batch, parts)
    check_kernel_parts(parts, 256)
    assert len(parts) == 2


def test_a_step_without_feedback_and_histories_has_none_in_parts() -> None:
    """As most steps."""
    batch = replace(batch_of([Seq(1, 3), Seq(30)]), feedback=None, histories=())
    parts = split_step(batch, max_rows=4, max_seq_rows=64)
    assert [(part.batch.feedback, part.batch.histories) for part in parts] == [(None, ()), (None, ())]


def run(executor: PagedReferenceExecutor, parts: Sequence[Part], num_outputs: int) -> list[RowOutput]:
    """Run parts in order and return their outputs in the order of the step."""
    found: dict[int, RowOutput] = {}
    for part in parts:
        found.update(zip(part.outputs.tolist(), executor.run(part.batch).rows, strict=True))
    return [found[i] for i in range(num_outputs)]


@pytest.mark.parametrize("small_rows", [SMALL_ROWS, None])
def test_an_executor_runs_parts_as_it_runs_the_step(small_rows: int | None) -> None:
    """The same numbers come out, and the pool holds the same."""
    seqs = [Seq(70), Seq(1), Seq(9), Seq(150), Seq(2), Seq(16), Seq(17)]
    batch = replace(batch_of(seqs), feedback=None, histories=())
    specs = tuple(replace(spec, target_id=i % 9, greedy=True) for i, spec in enumerate(batch.output_specs))
    batch = replace(batch, output_specs=specs)
    whole, parted = (
        PagedReferenceExecutor(max_context=512, block_size=BLOCK_SIZE, kv_memory_bytes=1 << 20) for _ in range(2)
    )
    parts = split_step(batch, max_rows=20, max_seq_rows=64, small_rows=small_rows)
    assert len(parts) > 2
    outputs = run(parted, parts, len(specs))
    assert outputs == whole.run(batch).rows
    blocks = batch.block_tables.reshape(-1)
    assert (parted.read_blocks(blocks) == whole.read_blocks(blocks)).all()


def test_a_part_carries_every_field_of_its_step() -> None:
    """A field added to StepBatch must be split too, or the fast path and torch would not see it."""
    step = batch_of([Seq(1, 5), Seq(1, 9)])
    histories = tuple(np.array([number], np.int32) for number in range(len(step.output_rows)))
    step = replace(step, histories=histories, feedback=np.array([1, 0], np.int32))
    (part,) = split_step(step, max_rows=8, max_seq_rows=8, small_rows=SMALL_ROWS)
    for field in fields(StepBatch):
        given, kept = getattr(step, field.name), getattr(part.batch, field.name)
        assert given is not None, f"this test leaves out {field.name}"
        assert len(given), f"this test leaves out {field.name}"
        np.testing.assert_array_equal(kept, given, err_msg=field.name)
    two = split_step(step, max_rows=1, max_seq_rows=1, small_rows=SMALL_ROWS)
    assert [len(getattr(part.batch, field.name)) for part in two for field in fields(StepBatch)].count(0) == 0
