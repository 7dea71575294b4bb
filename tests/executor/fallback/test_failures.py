"""When the kernels fail: everything is run in torch, as if nothing had happened, or the device is lost for good."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ferrule_server.errors import ConfigError
from ferrule_server.executor.base import DeviceLost
from ferrule_server.executor.cuda.gpu import GpuError, GpuLost
from ferrule_server.executor.fallback.executor import FallbackExecutor
from tests.executor.fallback.reference_world import (
    GREEDY,
    MAX_ROWS,
    ReferenceRunner,
    StreamGpu,
    Torch,
    World,
    device_of,
    started,
    tokens_of,
)
from tests.model.stepping import Piece, PooledSequence, Stepper

# ---- when the kernels fail ------------------------------------------------------------------------------------------


ERRORS = [
    pytest.param(GpuError("the launch was refused"), "the launch was refused", id="refused"),
    pytest.param(RuntimeError('Function "cuFuncLoad" not found'), 'Function "cuFuncLoad" not found', id="symbol"),
    pytest.param(KeyError("boom"), "KeyError: 'boom'", id="bug"),
]
"""What may be raised on the way over the kernels: whatever it is, torch can do it."""


@pytest.mark.parametrize("call", ["submit", "result"])
@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize(("error", "reason"), ERRORS)
def test_failed_steps_are_run_again_in_torch(
    call: str, nth: int, error: Exception, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever of two in flight fails: rows and pool are as if nothing had happened, and it is said once."""
    world, plain = started(), started()
    world.gpu.fail(call, error, nth)
    first = world.executor.submit(world.decode(4, 5))
    second = world.executor.submit(world.fed(1, 0))
    rows = [first.result(), second.result()]
    expected = [plain.executor.run(plain.decode(4, 5))]
    expected.append(plain.executor.run(plain.decode(*reversed(tokens_of(expected[0])))))  # type: ignore[arg-type]
    assert rows == expected
    assert world.pool() == plain.pool()
    world.executor.run(world.decode(1, 2))
    state = world.executor.state
    assert (state.name, state.fallback_reason) == ("torch", reason)
    assert state.num_launched_steps >= 2
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage() for record in warnings] == [f"event=torch_serves reason={reason!r}"]
    assert warnings[0].exc_info is not None
    assert warnings[0].exc_info[1] is error
    assert world.made().is_closed


def test_a_step_submitted_after_the_kernels_failed_runs_in_torch() -> None:
    """It is done at once, fed back tokens included."""
    world, plain = started(), started()
    first, second = world.decode(4), world.fed(0)
    world.gpu.fail("result", GpuError("no"))
    pending = world.executor.submit(first)
    rows = [pending.result()]
    assert not world.executor.can_submit(second)
    rows.append(world.executor.submit(second).result())
    expected = [plain.executor.run(plain.decode(4))]
    expected.append(plain.executor.run(plain.decode(tokens_of(expected[0])[0] or 0)))
    assert rows == expected


@pytest.mark.parametrize(("error", "reason"), ERRORS)
def test_a_failed_part_of_a_step_is_run_again_alone(error: Exception, reason: str) -> None:
    """What ran before it stays, what comes behind it goes to torch."""
    world, plain = World(), Stepper(Torch())
    for stepper in (world.stepper, plain):
        seqs = [PooledSequence() for _ in range(10)]
        if stepper is world.stepper:
            world.start()
            world.gpu.fail("result", error, nth=2)
        rows = stepper.run(*(Piece(seq, [n], spec=GREEDY) for n, seq in enumerate(seqs)))
        if stepper is world.stepper:
            split = rows
    assert split == rows
    assert [batch.num_rows for batch in world.torch.batches[1:]] == [2]
    assert world.executor.state.fallback_reason == reason


@pytest.mark.parametrize(("error", "reason"), ERRORS)
def test_a_failed_capture_leaves_everything_to_torch(error: Exception, reason: str) -> None:
    """The gap does not fail, and nothing more is to be done in the next."""
    world = started()
    world.gpu.fail("capture", error)
    assert not world.executor.tend()
    state = world.executor.state
    assert (state.name, state.preparation, state.fallback_reason) == ("torch", "", reason)
    assert not world.executor.tend()
    world.executor.run(world.decode(3))


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        pytest.param(GpuError("gemv does not load: bad image\nlog"), "gemv does not load: bad image", id="load"),
        pytest.param(ValueError("takes 3 arguments"), "takes 3 arguments", id="bug"),
        pytest.param(GpuError("no memory for logits"), "no memory for logits", id="memory"),
    ],
)
def test_a_runner_that_cannot_be_made_is_done_without(error: Exception, reason: str) -> None:
    """The step that wanted it runs in torch, and no later one tries again."""
    calls = []

    def make_runner() -> ReferenceRunner:
        calls.append(error)
        raise error

    world = World(make_runner=make_runner)
    for _ in range(2):
        assert tokens_of(world.executor.run(world.decode(3))) != []
        assert not world.executor.tend()
    state = world.executor.state
    assert (state.name, state.fallback_reason, state.num_torch_steps, len(calls)) == ("torch", reason, 2, 1)


def test_a_reason_not_to_begin_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """No device, or switched off: torch serves."""
    executor = FallbackExecutor(Torch(), device_of(None), reason="FERRULE_DISABLE_CUDA_RUNNER is set")
    stepper = Stepper(executor)
    stepper.run(Piece(PooledSequence(), [3]))
    assert not executor.tend()
    assert not executor.can_submit(stepper.batch(Piece(PooledSequence(), [3])))
    assert (executor.state.name, executor.state.fallback_reason) == ("torch", "FERRULE_DISABLE_CUDA_RUNNER is set")
    assert [record.levelno for record in caplog.records].count(logging.WARNING) == 1


def test_torch_alone_is_no_fallback(caplog: pytest.LogCaptureFixture) -> None:
    """Where nothing else was asked for, nothing is said."""
    executor = FallbackExecutor(Torch(), device_of(StreamGpu()))
    Stepper(executor).run(Piece(PooledSequence(), [3]))
    assert (executor.state.name, executor.state.fallback_reason, caplog.records) == ("torch", "", [])


def test_a_step_that_torch_cannot_run_either_fails_for_whoever_asks() -> None:
    """Both in flight, since the second needs the first; the executor goes on."""
    world = started()
    first = world.executor.submit(world.decode(4))
    world.torch.error = torch.OutOfMemoryError("CUDA out of memory")
    world.gpu.fail("submit", GpuError("no"))
    second = world.executor.submit(world.fed(0))
    for step in (first, second):
        with pytest.raises(torch.OutOfMemoryError):
            step.result()
    world.torch.error = None
    assert len(world.executor.run(world.decode(5)).rows) == 1


@pytest.mark.parametrize("is_submitted", [True, False])
def test_a_step_that_torch_refuses_too_is_to_blame_itself(is_submitted: bool) -> None:
    """What is wrong with it is no reason to give the kernels up; whoever wanted it is told, and nothing is pending."""
    world = started()
    before = world.executor.submit(world.decode(4))
    world.gpu.fail("submit", IndexError("a token beyond the vocabulary"))
    batch = world.fed(0)
    world.torch.error = IndexError("index out of range")
    with pytest.raises(IndexError, match="out of range"):
        (world.executor.submit if is_submitted else world.executor.run)(batch)
    world.torch.error = None
    assert tokens_of(before.result()) != []
    assert len(world.executor.submit(world.decode(3)).result().rows) == 1
    assert (world.executor.runner, world.executor.state.fallback_reason) == (world.made(), "")


def test_a_step_beyond_the_limits_of_the_kernels_runs_in_torch() -> None:
    """A bug of ours: it costs the kernels, and no row."""
    world, plain = World(), Stepper(Torch())
    world.start()
    world.made().max_rows = 99
    pieces = [Piece(PooledSequence(), [n], spec=GREEDY) for n in range(MAX_ROWS + 1)]
    rows = world.executor.submit(world.stepper.batch(*pieces)).result().rows
    assert rows == plain.run(*(Piece(PooledSequence(), [n], spec=GREEDY) for n in range(MAX_ROWS + 1)))
    assert world.executor.state.fallback_reason == "AssertionError"


def test_memory_that_is_short_beside_the_kernels_costs_one_step_only() -> None:
    """Torch selects from their logits; what is not there now may be there in a moment."""
    world = started()
    world.gpu.fail("submit", torch.OutOfMemoryError("CUDA out of memory"))
    assert len(world.executor.run(world.decode(3)).rows) == 1
    assert world.executor.runner is world.made()


def test_asking_whether_a_step_fits_never_fails() -> None:
    """The kernels are given up with what is in flight, and the answer is no."""
    world, plain = started(), started()
    pending = world.executor.submit(world.decode(4))
    world.gpu.fail("can_submit", KeyError("kind"))
    assert not world.executor.can_submit(world.fed(0))
    assert pending.result() == plain.executor.run(plain.decode(4))
    assert world.executor.state.fallback_reason == "KeyError: 'kind'"
    world, plain = plain, world
    world.gpu.fail("can_submit", GpuLost("gone"))
    assert not world.executor.can_submit(world.decode(4))
    with pytest.raises(DeviceLost, match="gone"):
        world.executor.run(world.decode(4))


@pytest.mark.parametrize("error", [GpuError("busy"), RuntimeError("busy")], ids=["refused", "bug"])
def test_a_runner_that_does_not_close_is_let_go(error: Exception) -> None:
    """While it is given up, and at the end of the server."""
    for call in ("capture", "close"):
        world = started()
        world.gpu.fail("close", error)
        if call == "capture":
            world.gpu.fail("capture", GpuError("no"))
            assert not world.executor.tend()
            assert world.executor.state.fallback_reason == "no"
            assert len(world.executor.run(world.decode(3)).rows) == 1
        world.executor.close()
        assert world.gpu.is_closed


def test_the_state_is_whole_at_every_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others read it while a runner is made, while it is given up and afterwards: nothing is lost or seen twice."""
    seen: list[tuple[str, str, str, int, int]] = []

    def look() -> None:
        state = world.executor.state
        steps = state.num_graph_steps, state.num_launched_steps
        seen.append((state.name, state.preparation, state.fallback_reason, *steps))

    def make_runner() -> ReferenceRunner:
        look()
        runner = World.make_runner(world)
        runner.num_graph_steps = 5
        monkeypatch.setattr(runner, "close", look)
        return runner

    world = World(make_runner=make_runner)
    look()
    world.start()
    look()
    world.gpu.fail("capture", GpuError("no"))
    assert not world.executor.tend()
    look()
    assert seen == [
        ("numba-cuda", "", "", 0, 0),
        ("numba-cuda", "loading kernels", "", 0, 0),
        ("numba-cuda", "capturing graphs, 1 left", "", 5, 1),
        ("torch", "", "no", 5, 1),
        ("torch", "", "no", 5, 1),
    ]


# ---- when the device is lost ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["submit", "result", "current", "capture", "synchronize"])
def test_a_lost_device_is_lost_for_every_later_call(call: str) -> None:
    """Whoever notices it first: nothing is run again, because nothing in the pool can be trusted."""
    world = started()
    batches = len(world.torch.batches)
    pending = world.executor.submit(world.decode(4))
    world.gpu.fail(call, GpuLost("an illegal memory access\nadvice"))
    if call == "synchronize":
        world.gpu.fail("result", GpuError("cuBLAS failed"))
    notice = {
        "submit": lambda: world.executor.submit(world.decode(4)),
        "current": lambda: world.executor.copy_blocks(np.array([[1, 2]], np.int32)),
        "capture": lambda: (pending.result(), world.executor.tend()),
    }
    with pytest.raises(DeviceLost, match=r"an illegal memory access$"):
        notice.get(call, pending.result)()
    for later in (
        lambda: world.executor.run(world.decode(3)),
        lambda: world.executor.submit(world.decode(3)),
        lambda: world.executor.copy_blocks(np.array([[1, 2]], np.int32)),
        world.executor.tend,
    ):
        with pytest.raises(DeviceLost):
            later()
    assert len(world.torch.batches) == batches
    world.executor.close()
    assert world.torch.is_closed


class LostError(torch.AcceleratorError):
    """What torch raises on a lost context."""

    error_code = 700


@pytest.mark.parametrize("has_gpu", [True, False])
def test_torch_notices_a_lost_device_too(has_gpu: bool) -> None:
    """Also where the kernels never ran."""
    world = World() if has_gpu else None
    torch_executor = world.torch if world else Torch()
    executor = world.executor if world else FallbackExecutor(torch_executor, device_of(None), reason="no driver")
    torch_executor.error = LostError("CUDA error: an illegal memory access was encountered")
    for _ in range(2):
        with pytest.raises(DeviceLost, match="illegal memory access"):
            Stepper(executor).run(Piece(PooledSequence(), range(3, 30)))
    assert len(torch_executor.batches) == 1


def test_a_library_that_fails_is_asked_behind() -> None:
    """CuBLAS does not say that the context is lost; synchronising does. Where it is not, the error is the caller's."""
    world = World()
    world.torch.error = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx")
    with pytest.raises(RuntimeError, match="CUBLAS"):
        world.stepper.run(Piece(PooledSequence(), range(3, 30)))
    world.gpu.fail("synchronize", GpuLost("gone"))
    with pytest.raises(DeviceLost, match="gone"):
        world.stepper.run(Piece(PooledSequence(), range(3, 30)))


@pytest.mark.parametrize("call", ["submit", "run", "result", "capture", "can_submit"])
def test_an_error_of_any_kind_may_be_the_first_sign(call: str) -> None:
    """The stream is asked before anything is run again."""
    world = started()
    batches = len(world.torch.batches)
    pending = world.executor.submit(world.decode(4)) if call == "result" else None
    world.gpu.fail("submit" if call == "run" else call, RuntimeError("boom"))
    world.gpu.fail("synchronize", GpuLost("gone"))
    notice: dict[str, Any] = {
        "submit": lambda: world.executor.submit(world.decode(4)),
        "run": lambda: world.executor.run(world.decode(4)),
        "result": lambda: pending and pending.result(),
        "capture": world.executor.tend,
        "can_submit": lambda: world.executor.can_submit(world.decode(4)) or world.executor.run(world.decode(4)),
    }
    with pytest.raises(DeviceLost, match="gone"):
        notice[call]()
    assert len(world.torch.batches) == batches


def test_memory_that_is_short_in_torch_is_an_error_of_its_step() -> None:
    """Neither the device nor the kernels are to blame."""
    world = started()
    world.torch.error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        world.stepper.run(Piece(PooledSequence(), range(3, 30)))
    assert world.executor.state.fallback_reason == ""
    world.executor.run(world.decode(4))


# ---- deterministic --------------------------------------------------------------------------------------------------


def test_deterministic_mode_has_no_other_way() -> None:
    """Torch runs nothing, and what fails on the kernels ends the device."""
    world = started(is_deterministic=True)
    assert world.torch.batches == []
    world.gpu.fail("submit", GpuError("no"))
    with pytest.raises(DeviceLost, match="no"):
        world.executor.run(world.decode(3))


@pytest.mark.parametrize("call", ["submit", "run", "result", "can_submit"])
def test_a_bug_in_deterministic_mode_is_an_error_of_its_step(call: str) -> None:
    """Nobody else may run it, so it is told to whoever asked; everything else goes on with the same bits."""
    world = started(is_deterministic=True)
    world.gpu.fail("submit" if call == "run" else call, KeyError("boom"))
    if call == "can_submit":
        assert not world.executor.can_submit(world.decode(4))
    else:
        with pytest.raises(KeyError, match="boom"):
            world.executor.run(world.decode(4)) if call == "run" else world.executor.submit(world.decode(4)).result()
    assert len(world.executor.submit(world.decode(3)).result().rows) == 1
    assert (world.executor.runner, world.torch.batches) == (world.made(), [])


@pytest.mark.parametrize("error", [GpuError("no"), KeyError("no")], ids=["refused", "bug"])
def test_a_failed_capture_in_deterministic_mode_is_a_lost_device(error: Exception) -> None:
    """The stream may still be capturing."""
    world = started(is_deterministic=True)
    world.gpu.fail("capture", error)
    with pytest.raises(DeviceLost, match="no"):
        world.executor.tend()


@pytest.mark.parametrize("why", ["no kernels", "make"])
def test_deterministic_mode_does_not_begin_without_kernels(why: str) -> None:
    """The message says what is missing."""

    def fail() -> Any:
        raise GpuError(f"reason: {why}\nmore")

    options: dict[str, dict[str, Any]] = {
        "no kernels": {"make_runner": None, "reason": f"reason: {why}"},
        "make": {"make_runner": fail},
    }
    with pytest.raises(ConfigError, match=f"--deterministic needs the kernels: reason: {why}$"):
        World(is_deterministic=True, **options[why])


# ---- closing --------------------------------------------------------------------------------------------------------


def test_closing_gives_everything_back() -> None:
    """The runner once the stream is idle; a pending step is let go."""
    world = started()
    world.executor.submit(world.decode(4))
    world.executor.close()
    assert (world.made().is_closed, world.torch.is_closed, world.gpu.is_closed) == (True, True, True)


def test_the_page_names_tests_that_exist() -> None:
    """``server/ferrule_server/executor/cuda/README.md`` says of each failure which test shows what happens."""
    here = Path(__file__).parent
    page = (here.parents[2] / "server" / "ferrule_server" / "executor" / "cuda" / "README.md").read_text()
    named = re.findall(r"`(\w+/test_\w+\.py)::(test_\w+)`", page)
    assert len(named) > 6
    assert [name for file, name in named if f"def {name}(" not in (here.parent / file).read_text()] == []
