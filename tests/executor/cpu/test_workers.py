"""The threads of a step: whatever ends one of them, nobody waits for it."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from ferrule_server.executor.base import DeviceLost
from ferrule_server.executor.cpu.workers import _NICENESS, StepAborted, Workers
from ferrule_server.kernels.cpu.sync import SyncBlock
from tests.executor.cpu.models import lose_a_thread, running, write_tiny
from tests.model.stepping import Piece, PooledSequence, Stepper


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3."""
    return write_tiny(tmp_path_factory.mktemp("tiny"))


def test_a_failed_thread_ends_the_step_and_every_later_one(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Within seconds and as a lost device: nothing runs afterwards."""
    caplog.set_level(logging.CRITICAL)
    with running(folder) as executor:
        stepper = Stepper(executor)
        stepper.run(Piece(PooledSequence(), [1, 2, 3]))
        lose_a_thread(executor)
        begun = time.monotonic()
        for _ in range(2):
            with pytest.raises(DeviceLost, match="the kernels of the processor failed: a thread"):
                stepper.run(Piece(PooledSequence(), [1, 2, 3]))
        assert time.monotonic() - begun < 5


def test_a_thread_that_fails_during_a_step_ends_it_within_a_second(caplog: pytest.LogCaptureFixture) -> None:
    """The caller waits at a barrier of the kernels, and leaves it."""
    caplog.set_level(logging.CRITICAL)
    waits: list[float] = []
    sync = SyncBlock(1)

    def run(thread: int) -> int:
        if thread:
            time.sleep(0.2)
            raise SystemExit
        begun = time.monotonic()
        while not SyncBlock.is_aborted_at(sync.address):
            time.sleep(0.001)
        waits.append(time.monotonic() - begun)
        return 0

    workers = Workers(run, 3, sync)
    with pytest.raises(StepAborted):
        workers.run_step()
    assert waits
    assert waits[0] < 1
    with pytest.raises(StepAborted, match="earlier step has ended"):
        workers.run_step()
    workers.close()


def test_a_block_that_was_aborted_says_so_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread that has aborted the step may live for a while; the next step is refused all the same, and not begun."""
    caplog.set_level(logging.CRITICAL)
    abort, num_begun, may_end = SyncBlock.abort, [0], threading.Event()
    sync = SyncBlock(1)

    def abort_and_linger(block: SyncBlock, num_threads: int) -> None:
        abort(block, num_threads)
        if threading.current_thread() is not threading.main_thread():
            may_end.wait(10)

    def run(thread: int) -> int:
        if thread:
            raise SystemExit
        num_begun[0] += 1
        while not SyncBlock.is_aborted_at(sync.address):
            time.sleep(0.001)
        return 0

    monkeypatch.setattr(SyncBlock, "abort", abort_and_linger)
    workers = Workers(run, 2, sync)
    with pytest.raises(StepAborted):
        workers.run_step()
    begun_before = num_begun[0]
    assert workers._threads[0].is_alive()
    for _ in range(3):
        with pytest.raises(StepAborted, match="earlier step has ended"):
            workers.run_step()
    assert num_begun[0] == begun_before
    may_end.set()
    workers.close()


def test_a_caller_that_leaves_a_step_ends_it_for_all() -> None:
    """The other threads would wait at a barrier of that step for good, or take part in the next one."""
    left = queue.SimpleQueue[bool]()
    sync = SyncBlock(1)

    def run(thread: int) -> int:
        if not thread:
            raise KeyboardInterrupt
        give_up = time.monotonic() + 5
        while not SyncBlock.is_aborted_at(sync.address) and time.monotonic() < give_up:
            time.sleep(0.001)
        left.put(SyncBlock.is_aborted_at(sync.address))
        return 0

    workers = Workers(run, 2, sync)
    with pytest.raises(KeyboardInterrupt):
        workers.run_step()
    assert left.get(timeout=10)
    with pytest.raises(StepAborted, match="earlier step has ended"):
        workers.run_step()
    workers.close()


def test_closing_ends_the_threads(folder: Path) -> None:
    """Also those that have never run a step."""
    with running(folder, num_threads=4) as executor:
        threads = executor._workers._threads
        assert all(thread.is_alive() for thread in threads)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no niceness of their own")
@pytest.mark.parametrize("is_refused", [False, True])
def test_only_threads_that_compute_alone_are_nice(is_refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's thread does other work too. A sandbox that refuses the call ends no thread."""
    if is_refused:
        monkeypatch.setattr(os, "nice", Mock(side_effect=PermissionError))
    found: queue.SimpleQueue[int] = queue.SimpleQueue()
    sync = SyncBlock(1)

    def run(thread: int) -> int:
        if thread:
            found.put(os.getpriority(os.PRIO_PROCESS, 0))
        return 1

    before = os.getpriority(os.PRIO_PROCESS, 0)
    workers = Workers(run, 3, sync)
    wanted = before if is_refused else min(19, before + _NICENESS)
    assert [found.get(timeout=10) for _ in range(2)] == [wanted] * 2
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    workers.close()
