"""TextQueue: whose turn it is, how many places a principal gets, and that nothing is counted wrong whatever happens."""

from __future__ import annotations

from collections import Counter
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ferrule_server.api.texts.queue import TextLane, TextQueue, Ticket
from ferrule_server.errors import QueueFull

T = TypeVar("T")

LONG = TextLane.LONG


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def queue_of(max_jobs: int = 100, max_bytes: int = 1 << 30) -> tuple[TextQueue[str], Clock]:
    """Return an empty queue and its clock."""
    clock = Clock()
    return TextQueue(max_jobs, max_bytes, clock), clock


def taken(queue: TextQueue[T], lane: TextLane = LONG) -> Ticket[T]:
    """Return the job to begin, which there must be."""
    ticket = queue.take(lane)
    assert ticket is not None
    return ticket


def order_of(queue: TextQueue[str], seconds: dict[str, float], count: int) -> str:
    """Return whose jobs run next, a letter for each, when a job of each principal takes so many seconds."""
    order = ""
    for _ in range(count):
        ticket = taken(queue)
        order += ticket.principal
        queue.done(ticket, seconds[ticket.principal])
    return order


def flood(queue: TextQueue[str], name: str, num_bytes: int) -> QueueFull:
    """Put jobs of a principal until one is refused, and return the error."""
    for _ in range(1000):
        try:
            queue.put(name, LONG, num_bytes, "")
        except QueueFull as error:
            return error
    raise AssertionError("the queue has no bound")


def test_a_principal_with_nothing_queued_is_next_after_the_job_that_runs() -> None:
    """However many jobs another one has queued before."""
    queue, _ = queue_of()
    for _ in range(20):
        queue.put("a", LONG, 1, "")
    running = taken(queue)
    queue.put("b", LONG, 1, "")
    assert queue.take(LONG) is None
    queue.done(running, 2.0)
    assert taken(queue).principal == "b"


def test_turns_are_weighted_by_the_time_used() -> None:
    """A principal with short texts has many turns for each of one with long texts."""
    queue, _ = queue_of()
    for name in "ab" * 12:
        queue.put(name, LONG, 1, "")
    assert order_of(queue, {"a": 1.0, "b": 0.25}, 10) == "abbbbabbbb"


def test_jobs_of_one_principal_keep_their_order() -> None:
    """First come, first served."""
    queue, _ = queue_of()
    for item in "123":
        queue.put("a", LONG, 1, item)
    items = ""
    for _ in range(3):
        ticket = taken(queue)
        items += ticket.item
        queue.done(ticket, 0.1)
    assert items == "123"


def test_nobody_saves_up_turns_by_waiting() -> None:
    """A principal that comes late shares from then on; it is not owed the time before."""
    queue, _ = queue_of()
    for _ in range(20):
        queue.put("a", LONG, 1, "")
    assert order_of(queue, {"a": 1.0}, 8) == "a" * 8
    for _ in range(10):
        queue.put("b", LONG, 1, "")
    assert Counter(order_of(queue, {"a": 1.0, "b": 1.0}, 8)) == {"a": 4, "b": 4}


def test_lanes_do_not_wait_for_each_other() -> None:
    """A short text is begun while a long one runs."""
    queue, _ = queue_of()
    for lane in TextLane:
        queue.put("a", lane, 1, lane.value)
    assert [taken(queue, lane).item for lane in TextLane] == ["short", "long", "chat"]


def test_one_that_floods_leaves_half_of_the_places_while_others_are_about() -> None:
    """In jobs and in bytes; alone it leaves a ninth."""
    for max_jobs, num_bytes, limit in ((100, 0, 88), (5000, 10, 880)):
        queue, clock = queue_of(max_jobs, 1000)
        error = flood(queue, "a", num_bytes)
        assert queue.num_jobs == 89
        assert error.metadata["limit"] == str(limit)
        queue, clock = queue_of(max_jobs, 1000)
        queue.put("b", LONG, num_bytes, "")
        flood(queue, "a", num_bytes)
        assert queue.num_jobs == 51
        queue.put("b", LONG, num_bytes, "")
        clock.now += 61
        flood(queue, "b", num_bytes)
        assert 70 <= queue.num_jobs <= 80


def test_a_limit_on_bytes_is_told_in_bytes() -> None:
    """The numbers of the message are in the metadata too."""
    queue, _ = queue_of(max_bytes=10)
    queue.put("a", LONG, 8, "")
    with pytest.raises(QueueFull, match="1 jobs of 8 bytes wait, the limit is 10 bytes; retry later") as caught:
        queue.put("a", LONG, 3, "")
    assert caught.value.metadata == {"num_jobs": "1", "num_bytes": "8", "limit": "10"}


def test_the_time_to_wait_follows_how_long_jobs_take() -> None:
    """A place is free when the next job ends."""
    queue, _ = queue_of(max_jobs=1)
    for seconds, at_least in ((0.001, 0.05), (9.0, 1.5)):
        queue.put("a", LONG, 1, "")
        with pytest.raises(QueueFull) as caught:
            queue.put("a", LONG, 1, "")
        queue.done(taken(queue), seconds)
        queue.put("a", LONG, 1, "")
        with pytest.raises(QueueFull) as caught:
            queue.put("a", LONG, 1, "")
        assert caught.value.retry_after_s is not None
        assert at_least <= caught.value.retry_after_s <= 5.0
        queue.done(taken(queue), seconds)


NAMES = st.sampled_from("abcd")
LANES = st.sampled_from(list(TextLane))
MAX_JOBS, MAX_BYTES = 24, 240


class TextQueueMachine(RuleBasedStateMachine):
    """Random callers that put, cancel and finish work, against counts of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.queue: TextQueue[int] = TextQueue(MAX_JOBS, MAX_BYTES, self.clock)
        self.waiting: list[Ticket[int]] = []
        self.running: dict[TextLane, Ticket[int]] = {}
        self.served: dict[TextLane, set[str]] = {lane: set() for lane in TextLane}
        self.fresh: dict[Ticket[int], Counter[str]] = {}
        self.num_put = 0

    def held(self, name: str) -> list[Ticket[int]]:
        """Return the jobs that a principal has waiting or running."""
        return [ticket for ticket in (*self.waiting, *self.running.values()) if ticket.principal == name]

    @rule(name=NAMES, lane=LANES, num_bytes=st.integers(0, MAX_BYTES // 4))
    def put(self, name: str, lane: TextLane, num_bytes: int) -> None:
        """Queue a job; a refusal must have a reason, and changes nothing."""
        jobs = [*self.waiting, *self.running.values()]
        free_jobs = MAX_JOBS - len(jobs)
        free_bytes = MAX_BYTES - sum(ticket.num_bytes for ticket in jobs)
        mine = self.held(name)
        try:
            ticket = self.queue.put(name, lane, num_bytes, self.num_put)
        except QueueFull:
            held_bytes = sum(each.num_bytes for each in mine)
            fits = free_jobs > 0 and num_bytes <= free_bytes
            assert not fits or len(mine) >= free_jobs or held_bytes >= free_bytes, "refused for no reason"
            return
        assert free_jobs > 0
        assert num_bytes <= free_bytes
        is_first = name not in self.served[lane] and not any(each.lane is lane for each in mine)
        if is_first:
            self.fresh[ticket] = Counter()
        self.waiting.append(ticket)
        self.num_put += 1

    @rule(lane=LANES)
    def begin(self, lane: TextLane) -> None:
        """Take the next job of a lane: the oldest of its principal, and nobody is overtaken twice by another."""
        ticket = self.queue.take(lane)
        mine = [each for each in self.waiting if each.lane is lane]
        if lane in self.running or not mine:
            assert ticket is None
            return
        assert ticket is next(each for each in mine if ticket is not None and each.principal == ticket.principal)
        self.waiting.remove(ticket)
        self.running[lane] = ticket
        self.served[lane].add(ticket.principal)
        self.fresh.pop(ticket, None)
        for other, overtaken in self.fresh.items():
            if other.lane is lane:
                overtaken[ticket.principal] += 1
                assert max(overtaken.values()) <= 1, "somebody with nothing queued waits for two jobs of another"

    @precondition(lambda self: self.running)
    @rule(data=st.data(), seconds=st.sampled_from([0.0, 0.001, 0.3, 7.0]))
    def finish(self, data: st.DataObject, seconds: float) -> None:
        """A job ends, after any time."""
        lane = data.draw(st.sampled_from(sorted(self.running, key=lambda lane: lane.value)))
        ticket = self.running.pop(lane)
        assert not self.queue.drop(ticket), "what runs cannot be dropped"
        self.queue.done(ticket, seconds)
        assert not self.queue.drop(ticket), "what is over cannot be dropped"
        if not any(each.lane is lane for each in self.waiting):
            self.served[lane].clear()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        """A caller goes away: its places are free at once."""
        ticket = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        self.fresh.pop(ticket, None)
        assert self.queue.drop(ticket)
        assert not self.queue.drop(ticket)

    @rule(seconds=st.sampled_from([0.1, 30.0, 61.0]))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.clock.now += seconds

    @invariant()
    def counts_are_true(self) -> None:
        """What the queue counts is what the callers have."""
        jobs = [*self.waiting, *self.running.values()]
        assert self.queue.num_jobs == len(jobs)
        assert self.queue.num_bytes == sum(ticket.num_bytes for ticket in jobs)
        self.queue.check_integrity()


TestTextQueueMachine = TextQueueMachine.TestCase
TestTextQueueMachine.settings = settings(max_examples=150, stateful_step_count=60)
