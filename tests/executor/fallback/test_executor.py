"""Where steps run, two of them in flight, and that nobody notices when the kernels fail in the midst of it."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule_server.executor.base import (
    OutputSpec,
    PipelinedExecutor,
    SampleSpec,
    StepBatch,
)
from ferrule_server.executor.cuda.gpu import GpuError
from ferrule_server.executor.fallback.executor import FallbackExecutor
from tests.executor.fallback.reference_world import GREEDY, MAX_ROWS, PLAN, Torch, World, device_of, started, tokens_of
from tests.model.stepping import Piece, PooledSequence, Stepper

# ---- where steps run ------------------------------------------------------------------------------------------------


def test_it_is_an_executor_that_takes_steps_ahead() -> None:
    """The engine recognises it."""
    assert isinstance(World().executor, PipelinedExecutor)


def test_torch_serves_until_the_runner_is_made() -> None:
    """No step waits for it: the gap behind a decode makes it."""
    world = World()
    assert (world.executor.state.name, world.executor.state.preparation) == ("numba-cuda", "")
    assert not world.executor.tend()
    world.executor.run(world.decode(4))
    assert (world.executor.runner, world.runner, world.executor.state.num_torch_steps) == (None, None, 1)
    assert world.executor.tend()
    world.executor.run(world.decode(5))
    assert world.executor.runner is world.made()
    assert (len(world.made().batches), len(world.torch.batches)) == (1, 1)


def test_a_prompt_is_for_torch_and_makes_no_runner() -> None:
    """It is made lazily: behind the first sequence that is small enough for it."""
    world = World()
    world.stepper.run(Piece(world.seqs[0], range(3, 30)))
    assert not world.executor.tend()
    assert world.executor.runner is None
    world.stepper.run(Piece(world.seqs[0], [4]))
    assert world.executor.tend()
    del world.torch.batches[1:]
    world.stepper.run(Piece(world.seqs[0], [4]), Piece(world.seqs[1], range(3, 30)))
    assert [batch.num_rows for batch in world.made().batches] == [1]
    assert [batch.num_rows for batch in world.torch.batches] == [27, 27]
    state = world.executor.state
    assert (state.num_torch_steps, state.num_launched_steps) == (3, 1)


def test_rows_of_a_mixed_step_come_in_the_order_that_was_asked() -> None:
    """Each output is that of its own row, wherever it ran; what is too much for one step of the kernels is several."""
    world, plain = World(), Stepper(Torch())
    for stepper in (world.stepper, plain):
        seqs = [PooledSequence() for _ in range(12)]
        for n, seq in enumerate(seqs):
            stepper.run(Piece(seq, range(2, 5 + n)))
        world.executor.tend()
        sizes = [1, 20, 1, 3, 1, 1, 18, 1, 4, 1, 1, 1]
        pieces = [Piece(seq, range(1, 1 + size), spec=GREEDY) for seq, size in zip(seqs, sizes, strict=True)]
        rows = stepper.run(*pieces)
        if stepper is world.stepper:
            mixed = rows
    assert mixed == rows
    assert {batch.num_rows for batch in world.made().batches[-2:]} == {8, 7}
    assert world.torch.batches[-1].num_rows == 38


def test_an_empty_step_runs_nothing() -> None:
    """Not even in torch's count."""
    world = World()
    empty = np.empty(0, np.int32)
    batch = StepBatch(empty, empty, empty, np.zeros(1, np.int32), empty, np.empty((0, 1), np.int32), empty, ())
    assert world.executor.run(batch).rows == []
    assert world.executor.state.num_torch_steps == 0


def test_the_state_tells_of_graphs() -> None:
    """Those that are wanted, those that exist, and what they take."""
    world = started()
    assert world.executor.state.preparation == "capturing graphs, 1 left"
    assert not world.executor.tend()
    state = world.executor.state
    assert (state.name, state.preparation, state.captured_batch_sizes) == ("numba-cuda", "", (1,))
    assert state.memory == replace(PLAN, graphs=3, free=57)


def test_info_names_what_is_to_run() -> None:
    """Fixed at start."""
    assert World().executor.info.name == "numba-cuda"
    alone = FallbackExecutor(Torch(), device_of(None), reason="there is no GPU")
    assert (alone.info.name, alone.info.fallback_reason) == ("paged-reference", "there is no GPU")


# ---- two steps in flight --------------------------------------------------------------------------------------------


def test_two_steps_are_in_flight() -> None:
    """The second takes tokens of the first before anybody has read them; both are what one after the other gives."""
    world, plain = started(), started()
    first, second = world.decode(4, 5), world.fed(1, 0)
    assert world.executor.can_submit(first)
    pending = [world.executor.submit(first)]
    assert world.executor.can_submit(second)
    pending.append(world.executor.submit(second))
    assert not world.executor.can_submit(world.fed(0, 1))
    assert world.gpu.work
    rows = [tokens_of(step.result()) for step in pending]
    expected = [tokens_of(plain.executor.run(plain.decode(4, 5)))]
    expected.append(tokens_of(plain.executor.run(plain.decode(*reversed(expected[0])))))  # type: ignore[arg-type]
    assert rows == expected
    assert world.pool() == plain.pool()
    assert world.torch.batches[1:] == []


def test_only_whole_decode_steps_are_submitted() -> None:
    """Several rows of a sequence, rows without output, host outputs and too many rows are not."""
    world = World()
    assert not world.executor.can_submit(world.decode(1))
    world.start()
    assert world.executor.can_submit(world.decode(1))
    assert not world.executor.can_submit(world.decode(1, spec=OutputSpec(full_logits=True)))
    assert not world.executor.can_submit(world.stepper.batch(Piece(world.seqs[0], [1, 2], spec=GREEDY)))
    assert not world.executor.can_submit(world.stepper.batch(Piece(world.seqs[0], [1], num_outputs=0)))
    many = [Piece(PooledSequence(), [1], spec=GREEDY) for _ in range(MAX_ROWS + 1)]
    assert not world.executor.can_submit(world.stepper.batch(*many))


def test_tokens_are_fed_back_after_they_were_read() -> None:
    """From the host then: another step may have run on the device meanwhile."""
    world, plain = started(), started()
    first = world.executor.submit(world.decode(4, 5)).result()
    fed = world.fed(0, 1)
    world.executor.run(world.stepper.batch(Piece(PooledSequence(), [9], spec=GREEDY)))
    second = world.executor.submit(fed).result()
    expected = plain.executor.run(plain.decode(4, 5))
    assert first == expected
    assert second == plain.executor.run(plain.decode(*tokens_of(expected)))  # type: ignore[arg-type]


def test_a_row_may_be_fed_and_its_neighbour_not() -> None:
    """-1 leaves the token that is given."""
    world, plain = started(), started()
    first = world.executor.submit(world.decode(4, 5))
    mixed = replace(world.decode(6, 0), feedback=np.array([-1, 0], np.int32))
    world.gpu.fail("submit", GpuError("no"))
    second = world.executor.submit(mixed)
    chosen = tokens_of(plain.executor.run(plain.decode(4, 5)))
    assert tokens_of(first.result()) == chosen
    assert second.result() == plain.executor.run(plain.decode(6, chosen[0] or 0))


def test_feedback_needs_a_step_before() -> None:
    """Else nobody knows the tokens; nothing is run."""
    world = started()
    with pytest.raises(ValueError, match="there was none"):
        world.executor.submit(world.fed(0))
    assert tokens_of(world.executor.submit(world.decode(3)).result()) != []


def test_results_may_be_asked_for_late() -> None:
    """Whoever asks for the second makes both known; the first is there still."""
    world = started()
    first, second = world.executor.submit(world.decode(4)), world.executor.submit(world.fed(0))
    late = second.result()
    assert len(late.rows) == len(first.result().rows) == 1


def test_nothing_is_prepared_while_a_step_is_pending() -> None:
    """A capture may stand beside nothing."""
    world = started()
    step = world.executor.submit(world.decode(4))
    assert not world.executor.tend()
    sizes = [world.executor.state.captured_batch_sizes]
    step.result()
    world.executor.tend()
    sizes.append(world.executor.state.captured_batch_sizes)
    assert sizes == [(), (1,)]


@pytest.mark.parametrize("call", ["copy_blocks", "copy_slots", "read_blocks", "write_blocks", "run"])
def test_whatever_comes_behind_a_pending_step_finds_it_done(call: str) -> None:
    """Also where it fails then: it has been run again before anything is copied."""
    world, plain = started(), started()
    batch = world.decode(4)
    step = world.executor.submit(batch)
    world.gpu.fail("result", GpuError("late"))
    block = int(batch.slot_mapping[0]) // world.stepper.block_size
    spare = world.stepper.free[-1]
    if call == "copy_blocks":
        world.executor.copy_blocks(np.array([[block, spare]], np.int32))
    elif call == "copy_slots":
        world.executor.copy_slots(batch.slot_mapping[:1].repeat(2).reshape(1, 2) + np.array([0, 1], np.int32))
    elif call == "write_blocks":
        world.executor.write_blocks(np.array([spare], np.int32), world.executor.read_blocks(np.array([3], np.int32)))
    elif call == "read_blocks":
        world.executor.read_blocks(np.array([block], np.int32))
    else:
        world.executor.run(world.decode(9))
    assert world.executor.state.fallback_reason == "late"
    expected = plain.executor.run(plain.decode(4))
    assert step.result() == expected
    if call == "copy_blocks":
        data = world.executor.read_blocks(np.array([block, spare], np.int32))
        np.testing.assert_array_equal(data[0], data[1])


# ---- all of it at random --------------------------------------------------------------------------------------------

ACTIONS = st.lists(st.sampled_from(["run", "submit", "fed", "read", "copy", "tend"]), max_size=14)


@settings(max_examples=60)
@given(
    actions=ACTIONS,
    call=st.sampled_from(["submit", "result", "capture", "can_submit"]),
    nth=st.integers(1, 12),
    error=st.sampled_from([GpuError, KeyError, torch.OutOfMemoryError]),
)
def test_a_failure_anywhere_changes_no_row_and_no_slot(
    actions: list[str], call: str, nth: int, error: type[Exception]
) -> None:
    """Steps one after the other on one executor are the definition; the other one pipelines, and its kernels fail."""
    worlds = started(), started()
    worlds[0].gpu.fail(call, error("no"), nth)
    got = _play(worlds[0], actions, is_pipelined=True)
    assert got == _play(worlds[1], actions, is_pipelined=False)
    assert worlds[0].pool() == worlds[1].pool()


def _play(world: World, actions: list[str], *, is_pipelined: bool) -> list[list[int | None]]:
    """Return the tokens of every step, in order."""
    pending: deque[Any] = deque()
    got: list[list[int | None]] = []
    latest: list[int | None] = []

    def read() -> None:
        got.append(tokens_of(pending.popleft().result()))

    for index, action in enumerate(actions):
        spec = OutputSpec(sample=SampleSpec(seed=index)) if index % 2 else GREEDY
        if action in ("submit", "fed"):
            is_fed = action == "fed" and bool(latest or pending)
            if is_pipelined:
                if len(pending) == 2:
                    read()
                batch = world.fed(1, 0, spec=spec) if is_fed else world.decode(4, 5, spec=spec)
                world.executor.can_submit(batch)
                pending.append(world.executor.submit(batch))
            else:
                tokens = [token or 0 for token in reversed(latest)] if is_fed else [4, 5]
                latest = tokens_of(world.executor.run(world.decode(*tokens, spec=spec)))
                got.append(latest)
                continue
            latest = [0, 0]
        elif action == "read" and pending:
            read()
        elif action == "run":
            while pending:
                read()
            got.append(tokens_of(world.executor.run(world.decode(9, spec=spec))))
        elif action == "copy":
            source, target = world.seqs[0].blocks[0], world.stepper.free[-1 - index % 3]
            world.executor.copy_blocks(np.array([[source, target]], np.int32))
        elif action == "tend":
            world.executor.tend()
    while pending:
        read()
    return got
