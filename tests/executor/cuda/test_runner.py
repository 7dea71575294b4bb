"""Steps on the kernels: what is put into the stream and in which order, buckets, graphs, two steps in flight."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from ferrule_server.executor.base import OutputSpec, RowOutput, SampleSpec, Shaping, StepResult, TokenMask
from ferrule_server.executor.cuda.choice_inputs import DrawMemo, fill_choices
from ferrule_server.executor.cuda.choices import OutputKind, divide
from ferrule_server.executor.cuda.graphs import NODE_BYTES, GraphKey
from ferrule_server.executor.sampling.device_outputs import DeviceOutputs
from tests.executor.cuda.toy_runner import GREEDY, Toy, next_tokens, rows_of

SAMPLED = OutputSpec(sample=SampleSpec(seed=3))
FULL = OutputSpec(greedy=True, full_logits=True, hidden_state=True)
MANY = OutputSpec(greedy=True, num_top_logprobs=1025)
"""More than the kernels have room for: torch selects."""
STEP = ["upload", "record", "launch", "download", "record"]


def tokens_of(result: StepResult) -> list[int | None]:
    """Return the tokens of a step."""
    return [row.token for row in result.rows]


def test_a_step_is_one_upload_its_kernels_and_one_download() -> None:
    """In this order, and then one wait; nothing is allocated."""
    toy = Toy()
    assert tokens_of(toy.runner.run(rows_of([5, 9], [3, 20]))) == next_tokens([5, 9], [3, 20])
    assert [name for name in toy.gpu.names() if name not in ("load", "prepare")] == [*STEP, "wait"]
    upload, download = toy.gpu.calls("upload")[0], toy.gpu.calls("download")[0]
    assert (upload.subject, download.subject, download.num_bytes) == ("inputs", "results", 8)


def test_a_graph_replays_what_was_launched() -> None:
    """One call instead of many; tokens and positions of the new step are used."""
    toy = Toy()
    toy.settle(rows_of([5], [3]))
    toy.gpu.log.clear()
    assert tokens_of(toy.runner.run(rows_of([8], [40]))) == next_tokens([8], [40])
    assert toy.gpu.names() == ["upload", "record", "replay", "download", "record", "wait"]
    runner = toy.runner
    assert (runner.state.num_graph_steps, runner.state.num_launched_steps, runner.state.captured_batch_sizes) == (
        1,
        1,
        (1,),
    )
    assert runner.graph_bytes == 7 * NODE_BYTES


@pytest.mark.parametrize(("num_rows", "bucket"), [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 20)])
def test_a_step_runs_in_the_smallest_bucket(num_rows: int, bucket: int) -> None:
    """Padded rows have neither token nor slot, and no results; the largest bucket is the limit."""
    toy = Toy(max_rows=20)
    tokens, positions = [(5 * n + 2) % 67 for n in range(num_rows)], [n % 16 for n in range(num_rows)]
    toy.runner.run(rows_of([1] * 20, [15] * 20))
    assert tokens_of(toy.runner.run(rows_of(tokens, positions))) == next_tokens(tokens, positions)
    assert toy.num_rows[-1] == bucket
    assert toy.seen[num_rows:] == [0] * (bucket - num_rows)
    slots = toy.runner.buffers.input["slot_mapping"][num_rows:bucket].tolist()
    assert slots == [-1] * (bucket - num_rows)


def test_what_decides_a_graph() -> None:
    """Rows, kind, outputs or none, rows kept or not; neither a verify nor one sequence more nor another length."""
    toy = Toy(max_rows=16)
    toy.runner.run(rows_of([1, 2, 3], [4, 5, 6]))
    toy.runner.run(rows_of([1, 2, 3, 4], [4, 5, 6, 9]))
    toy.runner.run(rows_of([1, 2, 3], [4, 5, 6], counts=[2, 1]))
    toy.runner.run(rows_of([1, 2, 3, 4], [4, 5, 6, 6], counts=[3, 1], outputs=[1]))
    toy.runner.run(rows_of([1, 2, 3], [4, 5, 6], outputs=[]))
    toy.runner.run(rows_of([1, 2, 3], [4, 5, 6], spec=FULL))
    assert toy.runner.state.preparation == "capturing graphs, 3 left"
    toy.capture()
    assert set(toy.runner._graphs.captured) == {
        GraphKey(4, OutputKind.GREEDY),
        GraphKey(4, OutputKind.GREEDY, False),
        GraphKey(4, OutputKind.GREEDY, keeps_rows=True),
    }
    assert toy.runner.state.captured_batch_sizes == (4,)


def test_sampling_takes_a_second_span_each_way_and_its_kernels() -> None:
    """The records behind the block tables; nobody else pays for them."""
    toy = Toy()
    toy.runner.run(rows_of([1], [4], spec=SAMPLED))
    assert [call.subject for call in toy.gpu.calls("upload")] == ["inputs", "inputs"]
    assert "draw" in toy.gpu.calls("launch")[-1].kernels


def test_whole_rows_are_copied_together() -> None:
    """Logits and hidden states of the output rows alone, gathered as they do not follow one another, in a copy each."""
    toy = Toy()
    result = toy.runner.run(rows_of([1, 2, 3, 4], [4, 5, 6, 9], counts=[3, 1], spec=FULL, outputs=[0, 2, 3]))
    rows = result.rows
    assert tokens_of(result) == next_tokens([1, 3, 4], [4, 6, 9])
    assert (set(result.paths), [row.position for row in rows]) == ({"kernels"}, [5, 7, 10])
    for row in rows:
        assert row.logits is not None
        assert int(row.logits.argmax()) == row.token
        assert row.hidden_state is not None
        assert row.hidden_state.shape == (72,)
    assert [call.subject for call in toy.gpu.calls("download")] == ["logits", "hidden", "results"]
    assert toy.gpu.names().count("wait") == 1


def test_rows_that_were_handed_out_stay_as_they_are() -> None:
    """Whatever later steps bring to the same memory."""
    toy = Toy()
    first = toy.runner.run(rows_of([1, 2], [4, 5], spec=FULL)).rows
    before = [(row.logits.tobytes(), row.hidden_state.tobytes()) for row in first]  # type: ignore[union-attr]
    toy.runner.run(rows_of([7, 9], [1, 8], spec=FULL))
    assert before == [(row.logits.tobytes(), row.hidden_state.tobytes()) for row in first]  # type: ignore[union-attr]


@pytest.mark.parametrize(("is_deterministic", "sizes"), [(False, [32, 8]), (True, [1] * 40)])
def test_torch_selects_from_tiles_of_rows(
    is_deterministic: bool, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row once, in order; alone where its bits must not depend on how many there are."""
    toy = Toy(max_rows=40, is_deterministic=is_deterministic)
    seen: list[int] = []
    select = DeviceOutputs.select

    def spy(self: DeviceOutputs, logits: torch.Tensor, *more: Any, **options: Any) -> list[RowOutput]:
        seen.append(len(logits))
        return select(self, logits, *more, **options)

    monkeypatch.setattr(DeviceOutputs, "select", spy)
    tokens, positions = [n % 67 for n in range(40)], [n % 16 for n in range(40)]
    result = toy.runner.run(rows_of(tokens, positions, spec=MANY))
    assert tokens_of(result) == next_tokens(tokens, positions)
    assert set(result.paths) == {"kernels+torch"}
    assert seen == sizes


# ---- two steps in flight --------------------------------------------------------------------------------------------


def test_the_second_step_takes_the_tokens_of_the_first_on_the_device() -> None:
    """Both are put before anything has run; which output a row takes is free."""
    toy = Toy()
    toy.settle(rows_of([1, 1], [1, 1]))
    first = toy.runner.submit(rows_of([5, 9], [3, 20]))
    second = toy.runner.submit(rows_of([0, 0], [21, 4], feedback=[1, 0]))
    chosen = next_tokens([5, 9], [3, 20])
    assert toy.gpu.num_waiting > 0
    assert tokens_of(first.result()) == chosen
    assert tokens_of(second.result()) == next_tokens([chosen[1], chosen[0]], [21, 4])


def test_a_long_pipeline_overwrites_nothing_too_early() -> None:
    """Twenty steps, each put before the one in front of it is read, of different sizes: every token is right."""
    toy = Toy()
    for num_rows in (1, 2, 3):
        toy.settle(rows_of([1] * num_rows, [1] * num_rows))
    known = [3, 4, 5]
    waiting = [toy.runner.submit(rows_of(known, [0, 1, 2]))]
    expected = [next_tokens(known, [0, 1, 2])]
    for step in range(1, 20):
        num_rows = 1 + step % 3
        sources = [(step + n) % len(expected[-1]) for n in range(num_rows)]
        positions = [(5 * step + n) % 200 for n in range(num_rows)]
        batch = rows_of([0] * num_rows, positions, feedback=sources)
        assert toy.runner.can_submit(batch)
        waiting.append(toy.runner.submit(batch))
        assert not toy.runner.can_submit(batch)
        assert tokens_of(waiting[-2].result()) == expected[-1]
        expected.append(next_tokens([expected[-1][source] for source in sources], positions))
    assert tokens_of(waiting[-1].result()) == expected[-1]


def test_a_step_is_submitted_once_its_graph_is_there() -> None:
    """Before that somebody has to leave a gap for the capture."""
    toy = Toy()
    batch = rows_of([5], [3])
    assert not toy.runner.can_submit(batch)
    toy.runner.run(batch)
    assert not toy.runner.can_submit(batch)
    toy.capture()
    assert toy.runner.can_submit(batch)
    assert not toy.runner.can_submit(rows_of([5, 6], [3, 4]))


def test_steps_without_room_for_a_graph_are_submitted_too() -> None:
    """There is nothing to wait for; they are launched for ever."""
    toy = Toy(graph_bytes=1)
    toy.settle(rows_of([5], [3]))
    batch = rows_of([5, 6], [3, 4])
    assert toy.runner.can_submit(batch)
    assert tokens_of(toy.runner.submit(batch).result()) == next_tokens([5, 6], [3, 4])
    assert toy.runner.state.preparation == ""


def test_what_takes_the_host_is_not_submitted() -> None:
    """Outputs that torch selects, and whole rows; masks go with their step."""
    toy = Toy()
    masked = rows_of([5], [3], spec=OutputSpec(sample=SampleSpec(seed=1), shaping=Shaping(mask=mask_of(7))))
    for spec in (FULL, MANY, SAMPLED):
        toy.runner.run(rows_of([5], [3], spec=spec))
    toy.capture()
    assert not toy.runner.can_submit(rows_of([5], [3], spec=FULL))
    assert not toy.runner.can_submit(rows_of([5], [3], spec=MANY))
    assert toy.runner.can_submit(masked)


def test_each_mask_of_a_step_is_copied_once() -> None:
    """However many rows choose under it."""
    toy, masks = Toy(), [mask_of(3), mask_of(40)]
    specs = [OutputSpec(greedy=True, shaping=Shaping(mask=masks[i])) for i in (0, 1, 1, 0)]
    toy.runner.run(dataclasses.replace(rows_of([1] * 4, [3] * 4), output_specs=tuple(specs)))
    copied = toy.runner.buffers.input["masks"].numpy().view(np.uint8)
    assert [row[:9].tobytes() for row in copied[:2]] == [mask.bits.tobytes() for mask in masks]
    assert not copied[2:].any()


# ---- what is remembered of a step -----------------------------------------------------------------------------------


def mask_of(first: int) -> TokenMask:
    """Return a mask of all tokens from ``first`` on."""
    bits = np.packbits(np.arange(72) >= first, bitorder="little")
    bits[8] &= 7
    return TokenMask(hashlib.blake2b(bits.tobytes(), digest_size=16).digest(), bits)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_remembered_of_a_step_is_what_is_found_anew(seed: int) -> None:
    """Who chooses and the records of draws, over steps that want what the one before did, nearly the same, or else."""
    chance, toy, memo = random.Random(seed), Toy(), DrawMemo()
    layout, limits = toy.runner.buffers.input_layout, toy.runner.buffers.limits
    masks = [mask_of(3), mask_of(40)]
    pool = [GREEDY, SAMPLED, OutputSpec(sample=SampleSpec(seed=9)), OutputSpec(sample=SampleSpec(temperature=0))]
    rare = [OutputSpec(greedy=True, logprobs=True), *(OutputSpec(greedy=True, shaping=Shaping(mask=m)) for m in masks)]
    specs, kinds = [SAMPLED], set()
    for _ in range(200):
        if chance.random() < 0.4:
            specs = chance.choices(pool + rare * (chance.random() < 0.2), k=chance.randint(1, 8))
        batch = rows_of([1] * len(specs), [chance.randrange(200) for _ in specs])
        batch = dataclasses.replace(batch, output_specs=tuple(specs))
        division = toy.runner._division(batch)
        kind = division.kind
        kinds.add(kind)
        assert division == divide(batch.output_specs, batch.histories, limits)
        found = []
        for draws in (memo, DrawMemo()):
            views = layout.arrays(torch.full((layout.num_bytes,), 0xA5, dtype=torch.uint8))
            fill_choices(views, batch, GraphKey(8, kind, keeps_rows=True), vocab_size=67, draws=draws)
            found.append({name: values.tobytes() for name, values in views.items()})
        assert found[0] == found[1]
    assert {OutputKind.GREEDY, OutputKind.SAMPLE, OutputKind.SCORE} <= kinds


def test_no_mask_is_kept_alive_for_the_next_step() -> None:
    """It goes with whoever asked for it."""
    toy = Toy()
    mask = mask_of(5)
    toy.runner.run(rows_of([5], [3], spec=OutputSpec(greedy=True, shaping=Shaping(mask=mask))))
    kept = weakref.ref(mask)
    del mask
    gc.collect()
    assert kept() is None


# ---- limits and failures --------------------------------------------------------------------------------------------


def test_deterministic_steps_are_those_of_the_tiles() -> None:
    """At most 64 rows, no products with vectors, and torch selects row by row."""
    toy = Toy(max_rows=80, is_deterministic=True)
    assert toy.runner.max_rows == 64
    toy.runner.run(rows_of([5], [3]))
    kernels = set(toy.gpu.calls("launch")[-1].kernels)
    assert "gemm" in kernels
    assert not kernels & {"gemv", "head"}


def test_nothing_is_allocated_once_it_is_made() -> None:
    """Nor adopted, but for memory of the host that the first whole rows need; graphs give theirs back at the end."""
    toy = Toy()
    toy.runner.run(rows_of([5, 6], [3, 4], spec=FULL))
    assert len(toy.gpu.calls("allocate_pinned")) == 2
    toy.gpu.log.clear()
    for spec in (GREEDY, SAMPLED, FULL):
        toy.runner.run(rows_of([5, 6], [3, 4], spec=spec))
    toy.capture()
    assert not {"allocate", "allocate_pinned", "adopt"} & set(toy.gpu.names())
    assert len(toy.gpu.graphs) == 3
    toy.runner.close()
    assert toy.gpu.graphs == []
