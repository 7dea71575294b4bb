"""The number of threads while other processes keep cores busy: by a clock of the test, and beside a real process."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from ferrule_server.executor.cpu.crowding import ThreadCount

CALM, CROWDED = (1, 0.001, 0.0), (1, 0.004, 0.8)
"""Rows and seconds of a step, and the share for which threads waited."""


def test_all_threads_run_while_nobody_waits() -> None:
    """Short waits are those for a thread that wakes up, whatever share of the step they are."""
    threads = ThreadCount(4)
    for step in range(100):
        assert threads.at(step) == 4
        threads.add(step, *(CALM if step % 2 else (1, 0.0005, 0.9)))


def test_single_waits_change_nothing() -> None:
    """A call of the server takes a core for a moment, now and then."""
    threads = ThreadCount(2)
    for step in range(100):
        assert threads.at(step) == 2
        threads.add(step, *(CROWDED if step % 6 == 0 else CALM))


def crowd(threads: ThreadCount, now: float, most: int) -> None:
    """Let steps be crowded until there is a thread less."""
    num_rows, seconds, share = CROWDED
    while threads.at(now) == most:
        threads.add(now, num_rows, seconds, share * (most - 1))


@pytest.mark.parametrize("most", [2, 4])
def test_a_crowd_takes_a_thread_for_a_while_and_then_longer(most: int) -> None:
    """All threads are tried again after each pause; the pauses grow up to a limit, and shrink when it is calm."""
    threads, now, pauses = ThreadCount(most), 0.0, []
    for _ in range(8):
        crowd(threads, now, most)
        begin = now
        while threads.at(now) == most - 1:
            threads.add(now, *CALM)
            now += 0.0002
        pauses.append(round(now - begin, 2))
    assert pauses == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 0.64, 0.64]
    for _ in range(60):
        threads.add(now, *CALM)
    crowd(threads, now, most)
    assert threads.at(now + 0.019) == most - 1
    assert threads.at(now + 0.021) == most


def test_more_busy_processes_take_more_threads_but_never_all() -> None:
    """Each time that it is still crowded there is one less."""
    threads = ThreadCount(4)
    for _ in range(30):
        num_rows, seconds, share = CROWDED
        threads.add(1.0, num_rows, seconds * threads.at(1.0) / 4, 3 * share)
    assert threads.at(1.0) == 1
    assert threads.at(2.0) == 4


@pytest.mark.parametrize("step_s", [0.004, 0.04])
def test_all_threads_return_if_fewer_are_not_faster(step_s: float) -> None:
    """Long waits alone decide nothing; after a trial that failed the next one waits, longer each time."""
    threads, now, last, trials = ThreadCount(2), 0.0, -1.0, []
    while now < 20.0:
        is_trial = threads.at(now) == 1
        if is_trial and now - last > 0.2:  # a trial of short steps takes two pauses
            trials.append(now)
        last = now if is_trial else last
        now += step_s
        threads.add(now, 1, step_s, 0.0 if is_trial else 0.8)
    rests = [after - before for before, after in itertools.pairwise(trials)]
    assert 5 <= len(trials) <= 8
    assert all(later > 1.4 * sooner for sooner, later in itertools.pairwise(rests)), rests


def test_steps_are_compared_with_steps_of_as_many_rows() -> None:
    """A step of a prompt among decodes is not taken for a slow one."""
    threads, num_rows, seconds, share = ThreadCount(2), *CROWDED
    for _ in range(20):
        threads.add(0.0, 64, 8 * seconds, 0.0)
        threads.add(0.0, num_rows, seconds, 0.0)
    crowd(threads, 0.0, 2)
    for _ in range(20):
        threads.add(0.001, 64, 6 * seconds, 0.0)
        threads.add(0.001, num_rows, 0.7 * seconds, share)
    assert threads.at(0.001) == 1


def test_long_steps_keep_their_threads() -> None:
    """A thread that comes back still has work to take in them."""
    threads = ThreadCount(2)
    for step in range(10):
        threads.add(step, 1, 0.5, 0.4)
        assert threads.at(step) == 2


@pytest.mark.parametrize(("alone_s", "rows"), [(0.115, [16]), (0.12, [16]), (0.09, range(10**6))])
def test_a_trial_that_is_much_slower_or_cannot_be_judged_ends(alone_s: float, rows: Sequence[int]) -> None:
    """Its steps may be long, or of numbers of rows that have not been seen with all threads."""
    threads, now, alone = ThreadCount(2), 0.0, 0.0
    for step in range(1000):
        count = threads.at(now)
        seconds = 0.063 if count == 2 else alone_s
        now += seconds
        alone += seconds if count == 1 else 0.0
        threads.add(now, rows[step % len(rows)], seconds, 0.3 if count == 2 else 0.0)
    assert alone < 0.1 * now
