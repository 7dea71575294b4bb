"""Replays of kernels that leave something behind: each is found out."""

from __future__ import annotations

import numpy as np
import pytest

from ferrule_server.kernels.cuda.intrinsics import (
    Address,
    atomic_increment_wrapping,
    grid_launch_dependents,
    grid_wait,
    store_u32,
    thread_id,
)
from tests.kernels.cuda.replay import replay, without_wrapping
from tools.cuda_simulator import Launch, Memory


def first_to_come(ticket: Address, out: Address) -> None:
    """Let the thread with ticket 0 store."""
    grid_launch_dependents()
    grid_wait()
    if atomic_increment_wrapping(ticket, 31) == 0:
        store_u32(out, 7)
    if thread_id() == 0:
        store_u32(out + 4, 8)


def _memory() -> tuple[Memory, Launch]:
    memory = Memory()
    ticket = memory.put("ticket", np.zeros(1, np.uint32), mutable=True)
    out = memory.empty("out", 3, np.uint32)
    return memory, Launch(first_to_come, {}, (ticket, out), grid=1, num_threads=32)


def test_outputs_begin_as_they_were_placed() -> None:
    """What is poisoned is poison again, what is marked has its mark; inputs stay as the run before left them."""
    memory, launch = _memory()
    poison = memory.get("out").tolist()
    mark = np.arange(40000)
    marked, kept = (memory.put(name, mark, mutable=True, offset=48) for name in ("marked", "kept"))
    for address in (marked, kept):
        memory.write(address, mark + 1)
    for seed in range(3):
        replay(memory, [launch], outputs=("out", "marked"), counters=("ticket",), seed=seed)
        assert memory.get("out").tolist() == [7, 8, poison[2]]
        assert (memory.get("marked") == mark).all()
        assert (memory.get("kept") == mark + 1).all()
    memory.reset("out")
    assert memory.get("out").tolist() == poison


def test_a_ticket_that_does_not_wrap_is_found() -> None:
    """At once, by the counter; without looking there, by the output of the second run."""
    memory, launch = _memory()
    launch = Launch(first_to_come, {}, launch.args, 1, 32, specialised=without_wrapping(first_to_come, {}))
    with pytest.raises(AssertionError, match=r"ticket must be 0 for the next run, is \[32\]"):
        replay(memory, [launch], outputs=("out",), counters=("ticket",))
    assert memory.get("out")[0] == 7
    replay(memory, [launch], outputs=("out",), seed=1)
    assert memory.get("out")[0] == 0xA5A5A5A5
