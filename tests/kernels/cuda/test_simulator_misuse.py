"""What a single thread can do wrong: each is an error of its own class, at once and by name."""

from __future__ import annotations

import inspect
import sys

import numpy as np
import pytest

from ferrule_server.kernels.cuda.intrinsics import (
    Address,
    barrier,
    copy_async_stream_16_or_zeros,
    grid_wait,
    load_f32,
    load_relaxed_f32,
    load_stream_v4,
    load_v4,
    shared_load_f32,
    shared_store_f32,
    shuffle_xor_f32,
    store_f32,
    store_u32,
    thread_id,
)
from ferrule_server.kernels.cuda.specialise import i32, u32
from tools import cuda_simulator as simulator
from tools.cuda_simulator import Launch, Memory, run


def misuse(x: Address, y: Address, z: Address, *, HOW: str) -> None:  # noqa: N803
    """Do one thing that is wrong."""
    i = thread_id()
    if HOW == "read before wait":
        load_f32(y)
    if HOW == "read of immutable before wait":
        load_f32(x)
    if HOW == "stream of mutable before wait":
        load_stream_v4(y)
    if HOW == "streaming copy of mutable":
        copy_async_stream_16_or_zeros(16 * i, y, 16)
    if HOW == "strong before wait":
        load_relaxed_f32(y)
    if HOW == "write before wait":
        store_f32(y + 4 * i, 1.0)
    if HOW == "wait in some threads":
        if i < 32:
            grid_wait()
    elif HOW != "no wait":
        grid_wait()
    if HOW == "two waits":
        grid_wait()
    if HOW == "beyond the end":
        load_f32(x + 256)
    if HOW == "before the start":
        load_f32(x - 4)
    if HOW == "vector beyond the end":
        load_v4(x + 256)
    if HOW == "null":
        load_f32(4 * i)
    if HOW == "misaligned":
        load_v4(x + 8)
    if HOW == "write of immutable":
        store_f32(x + 4 * i, 1.0)
    if HOW == "stream of mutable":
        load_stream_v4(y)
    if HOW == "unwritten":
        load_f32(z)
    if HOW == "unwritten shared":
        shared_load_f32(0)
    if HOW == "shared beyond the end":
        shared_store_f32(1024, 0.0)
    if HOW == "shared misaligned":
        shared_store_f32(2, 0.0)
    if HOW == "wide":
        i32(x)
    if HOW == "negative":
        u32(i - 1)
    if HOW == "negative stored":
        store_u32(y + 4 * i, i - 1)
    if HOW == "shuffle in some lanes" and i & 1:
        shuffle_xor_f32(1.0, 1)
    if HOW == "two shuffles":
        if i & 1:
            shuffle_xor_f32(1.0, 2)
        else:
            shuffle_xor_f32(1.0, 2)
    if HOW == "barrier in some threads" and i < 32:
        barrier()
    if HOW == "two barriers":
        if i < 32:
            barrier()
        else:
            barrier()
    if HOW == "endless":
        while i >= 0:
            i = i ^ 1


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (simulator.ReadBeforeWait, "read before wait"),
        (simulator.ReadBeforeWait, "read of immutable before wait"),
        (simulator.ReadOnly, "stream of mutable before wait"),
        (simulator.ReadOnly, "streaming copy of mutable"),
        (simulator.ReadBeforeWait, "strong before wait"),
        (simulator.WroteBeforeWait, "write before wait"),
        (simulator.WaitMissing, "wait in some threads"),
        (simulator.WaitMissing, "no wait"),
        (simulator.WaitMissing, "two waits"),
        (simulator.OutOfBounds, "beyond the end"),
        (simulator.OutOfBounds, "before the start"),
        (simulator.OutOfBounds, "vector beyond the end"),
        (simulator.OutOfBounds, "null"),
        (simulator.Misaligned, "misaligned"),
        (simulator.ReadOnly, "write of immutable"),
        (simulator.ReadOnly, "stream of mutable"),
        (simulator.Uninitialised, "unwritten"),
        (simulator.Uninitialised, "unwritten shared"),
        (simulator.OutOfBounds, "shared beyond the end"),
        (simulator.Misaligned, "shared misaligned"),
        (simulator.PromiseBroken, "wide"),
        (simulator.PromiseBroken, "negative"),
        (simulator.PromiseBroken, "negative stored"),
        (simulator.Divergence, "shuffle in some lanes"),
        (simulator.Divergence, "two shuffles"),
        (simulator.Divergence, "barrier in some threads"),
        (simulator.Divergence, "two barriers"),
        (simulator.Deadlock, "endless"),
    ],
)
def test_misuse_is_an_error_of_its_class(error: type[Exception], how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel, wrong in one way at a time."""
    monkeypatch.setattr("tools.cuda_simulator.grid._MOST_TURNS", 10_000)
    _run("nothing")
    with pytest.raises(error) as caught:
        _run(how)
    assert caught.type is error


def line_of(code: str, times: int = 1) -> int:
    """Return the line of the first, second, ... place in this file that begins with this code."""
    lines = inspect.getsource(sys.modules[__name__]).splitlines()
    return [number for number, line in enumerate(lines, 1) if line.strip().startswith(code)][times - 1]


def test_what_did_not_arrive_is_not_said_to_be_where_it_was_before() -> None:
    """The other warp has passed its wait and ended: it is not at ``grid_wait``."""
    line = line_of('if HOW == "barrier in some threads"') + 1
    with pytest.raises(simulator.Divergence) as caught:
        _run("barrier in some threads")
    assert str(caught.value) == (
        f"misuse: not all threads arrive: 32 at barrier on line {line} of test_simulator_misuse.py, 32 ended"
    )


def test_an_endless_loop_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernel, thread, file and a line of the loop."""
    monkeypatch.setattr("tools.cuda_simulator.grid._MOST_TURNS", 10_000)
    line = line_of("while i >= 0:")
    message = r"misuse: no end after 10001 turns: thread \d+ of CTA \(0, 0\) is on line "
    with pytest.raises(simulator.Deadlock, match=rf"{message}{line} of test_simulator_misuse\.py"):
        _run("endless")


def _run(how: str) -> None:
    memory = Memory()
    x = memory.put("x", np.arange(64, dtype=np.float32))
    y = memory.put("y", np.zeros(64, np.float32), mutable=True)
    z = memory.empty("z", 64, np.float32)
    run(memory, [Launch(misuse, {"HOW": how}, (x, y, z), grid=1, num_threads=64, shared_bytes=1024)])
