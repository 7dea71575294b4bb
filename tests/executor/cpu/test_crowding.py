"""The number of threads while other processes keep cores busy: by a clock of the test, and beside a real process."""

from __future__ import annotations

import pytest

from ferrule_server.executor.cpu.crowding import ThreadCount

CALM, CROWDED = (0.001, 0.0), (0.004, 0.8)
"""Seconds of a step, and the share for which threads waited."""


def test_all_threads_run_while_nobody_waits() -> None:
    """Short waits are those for a thread that wakes up, whatever share of the step they are."""
    threads = ThreadCount(4)
    for step in range(100):
        assert threads.at(step) == 4
        threads.add(step, *(CALM if step % 2 else (0.0005, 0.9)))


def test_single_waits_change_nothing() -> None:
    """A call of the server takes a core for a moment, now and then."""
    threads = ThreadCount(2)
    for step in range(100):
        assert threads.at(step) == 2
        threads.add(step, *(CROWDED if step % 6 == 0 else CALM))


@pytest.mark.parametrize("most", [2, 4])
def test_a_crowd_takes_a_thread_for_a_while_and_then_longer(most: int) -> None:
    """All threads are tried again after each pause; the pauses grow up to a limit, and shrink when it is calm."""
    threads, now, pauses = ThreadCount(most), 0.0, []
    seconds, share = CROWDED
    for _ in range(8):
        while threads.at(now) == most:
            threads.add(now, seconds, share * (most - 1))
        begin = now
        while threads.at(now) == most - 1:
            threads.add(now, *CALM)
            now += 0.0002
        pauses.append(round(now - begin, 2))
    assert pauses == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 0.64, 0.64]
    for _ in range(60):
        threads.add(now, *CALM)
    while threads.at(now) == most:
        threads.add(now, seconds, share * (most - 1))
    assert threads.at(now + 0.019) == most - 1
    assert threads.at(now + 0.021) == most


def test_more_busy_processes_take_more_threads_but_never_all() -> None:
    """Each time that it is still crowded there is one less."""
    threads = ThreadCount(4)
    for _ in range(10):
        threads.add(1.0, CROWDED[0], 3 * CROWDED[1])
    assert threads.at(1.0) == 1
    assert threads.at(2.0) == 4


def test_long_steps_keep_their_threads() -> None:
    """A thread that comes back still has work to take in them."""
    threads = ThreadCount(2)
    for step in range(10):
        threads.add(step, 0.5, 0.4)
        assert threads.at(step) == 2
