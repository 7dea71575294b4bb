"""The engine's inbox: turns between principals, arrival order within each."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from itertools import pairwise
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule_server.engine.bridge.gate import Inbox
from ferrule_server.engine.jobs import Entry, Job, Sink, WarmupJob

MS = 1_000_000
NOBODY = cast("Sink", None)
"""No job of these tests is answered."""


def _number(job: Job[object]) -> int:
    """Return what a job was numbered with."""
    assert isinstance(job, WarmupJob)
    return job.batch_sizes[0]


def _list(principal: str, number: int, num_jobs: int = 1) -> list[Entry]:
    """Jobs that arrive together, numbered by a batch size."""
    jobs = [WarmupJob(principal, (number,)) for _ in range(num_jobs)]
    for job in jobs:
        job.submitted_ns = number
    return [(job, NOBODY) for job in jobs]


def test_lists_of_a_flood_do_not_hold_up_another_principal() -> None:
    """One list of the flood goes first at most, however many wait."""
    inbox = Inbox()
    for number in range(100):
        inbox.put(_list("flood", number))
    inbox.put(_list("victim", 0))
    taken = []
    for _ in range(3):
        entries = inbox.next(0.0)
        assert entries
        taken.append(entries[0][0].principal)
        inbox.charge(5 * MS)
    assert "victim" in taken[:2]


def test_turns_are_of_time_not_of_lists() -> None:
    """Whose lists take a tenth of the time has ten of them taken for one of the other's."""
    inbox = Inbox()
    for number in range(100):
        inbox.put(_list("slow", number))
        inbox.put(_list("fast", number))
    spent_ns: dict[str, int] = defaultdict(int)
    for _ in range(80):
        entries = inbox.next(0.0)
        assert entries
        principal = entries[0][0].principal
        work_ns = 2 * MS if principal == "slow" else MS // 5
        inbox.charge(work_ns)
        spent_ns[principal] += work_ns
    assert 0.5 < spent_ns["fast"] / spent_ns["slow"] < 2.0


def test_time_that_nobody_else_wanted_is_not_made_good() -> None:
    """A principal that had the engine for itself takes turns from the moment another one comes, and not after it."""
    inbox = Inbox()
    for number in range(100):
        inbox.put(_list("first", number))
    for _ in range(50):
        inbox.next(0.0)
        inbox.charge(5 * MS)
    for number in range(100):
        inbox.put(_list("second", number))
    taken = []
    for _ in range(6):
        entries = inbox.next(0.0)
        assert entries
        taken.append(entries[0][0].principal)
        inbox.charge(5 * MS)
    assert 2 <= taken.count("first") <= 4


@settings(max_examples=200)
@given(st.lists(st.one_of(st.sampled_from("abc"), st.none(), st.integers(0, 3 * MS))))
def test_each_list_comes_out_once_and_in_the_order_of_its_principal(moves: list[str | int | None]) -> None:
    """Letters put a list in, None wakes the engine, a number takes a list that costs so much."""
    inbox = Inbox()
    put_in: dict[str, list[int]] = defaultdict(list)
    taken: dict[str, list[int]] = defaultdict(list)
    for number, move in enumerate(moves):
        if isinstance(move, str):
            inbox.put(_list(move, number))
            put_in[move].append(number)
        elif move is None:
            inbox.put([])
        else:
            _take(inbox, move, taken)
    while len(inbox):
        _take(inbox, 0, taken)
    assert taken == put_in
    with pytest.raises(queue.Empty):
        inbox.next(0.0)


def _take(inbox: Inbox, work_ns: int, taken: dict[str, list[int]]) -> None:
    try:
        entries = inbox.next(0.0)
    except queue.Empty:
        return
    for job, _ in entries or ():
        taken[job.principal].append(_number(job))
    inbox.charge(work_ns)


def test_what_waits_is_known_by_its_earliest_arrival() -> None:
    """Leases are judged as of the moment up to which everything has been taken."""
    inbox = Inbox()
    assert inbox.earliest_ns() is None
    inbox.put(_list("a", 7))
    inbox.put(_list("a", 9))
    inbox.put(_list("b", 8))
    inbox.next(0.0)
    assert inbox.earliest_ns() == 8


def test_a_stop_is_heard_before_what_waits_and_the_rest_is_drained() -> None:
    """None comes out at once; the lists are answered by whoever closes the engine, each job once."""
    inbox = Inbox()
    for number in range(5):
        inbox.put(_list("ab"[number % 2], number, num_jobs=2))
    inbox.next(0.0)
    inbox.put(None)
    assert inbox.next(0.0) is None
    assert sorted(_number(job) for job, _ in inbox.drain()) == [1, 1, 2, 2, 3, 3, 4, 4]
    assert len(inbox) == 0


def test_draining_from_several_threads_gives_each_job_to_one() -> None:
    """A job that arrives while the engine closes is answered once."""
    inbox = Inbox()
    drained: list[Entry] = []
    for number in range(2000):
        inbox.put(_list(f"p{number % 50}", number))
    inbox.next(0.0)
    threads = [threading.Thread(target=lambda: drained.extend(inbox.drain())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = sorted(_number(job) for job, _ in drained)
    assert all(first < second for first, second in pairwise(numbers))
    assert len(numbers) == 1999
