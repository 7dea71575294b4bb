"""Delivery: in order, whatever the event loop has to do in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ferrule_server.engine.bridge.delivery import _LOOP_SLICE, Delivery
from ferrule_server.engine.bridge.gate import Finished, Gate
from ferrule_server.engine.jobs import GenerateFrame, ListResult, StepTiming, WarmupJob
from tests.engine.harness import Pending
from tests.engine.streams import Stream, generate


class Loop:
    """An event loop that runs what is posted in order, when told to."""

    def __init__(self) -> None:
        self.posted: deque[Callable[[], None]] = deque()

    def run(self) -> None:
        """Run everything posted, also what is posted meanwhile; nothing of it may take the loop for long."""
        while self.posted:
            self.posted.popleft()()


def many(count: int) -> list[Finished]:
    """Outcomes of others, of a kind that the gate does not count."""
    return [(WarmupJob("others"), Pending(), ListResult((), "", 0)) for _ in range(count)]


def test_frames_come_in_order_also_behind_more_outcomes_than_the_loop_takes_at_a_time() -> None:
    """The rest of a large step does not come behind the next step: tokens would change places, or follow the end."""
    loop, stream, job = Loop(), Stream(), generate(None, 1)
    gate = Gate(10)
    delivery = Delivery(loop.posted.append, gate)
    assert gate.admit([(job, stream)]) == ([(job, stream)], [])
    frames = [GenerateFrame((), StepTiming(), is_last=index == 4) for index in range(5)]
    for frame, num_others in zip(frames, (0, 3 * _LOOP_SLICE, 0, _LOOP_SLICE, 0), strict=True):
        delivery.finished = [*many(num_others), (job, stream, frame)]
        delivery.hand_over()
    loop.run()
    assert stream.outcomes == frames
    assert gate.num_jobs == 0


def test_a_large_step_leaves_others_their_turns_on_the_loop() -> None:
    """And each sink is flushed once for it, at its end."""
    loop, own = Loop(), Pending()
    delivery = Delivery(loop.posted.append, Gate(10))
    outcomes = many(3 * _LOOP_SLICE)
    delivery.finished = [(job, own, outcome) for job, _, outcome in outcomes]
    delivery.hand_over()
    turns = 0
    loop.posted.append(lambda: None)
    while loop.posted:
        loop.posted.popleft()()
        turns += 1
    assert turns >= 4
    assert own.num_flushes == 1


def test_small_steps_behind_a_large_one_are_delivered_too() -> None:
    """Whatever their number."""
    loop = Loop()
    delivery = Delivery(loop.posted.append, Gate(10))
    late = [many(1) for _ in range(5)]
    delivery.deliver(many(_LOOP_SLICE + 1))
    for each in late:
        delivery.refuse(each)
    loop.run()
    assert all(sink.num_flushes == 1 for ((_, sink, _),) in late if isinstance(sink, Pending))
    delivery.deliver(last := many(1))
    loop.run()
    assert isinstance(last[0][1], Pending)
    assert last[0][1].is_done


def test_nobody_waits_for_the_slices_of_others() -> None:
    """Thousands of refusals of one stream do not hold up what another one's step gave; its own frames follow them."""
    loop, flood, stream, job = Loop(), Pending(), Stream(), generate(None, 1)
    delivery = Delivery(loop.posted.append, Gate(10))
    delivery.refuse([(job, flood, outcome) for job, _, outcome in many(9 * _LOOP_SLICE)])
    delivery.refuse([(job, stream, GenerateFrame((), StepTiming())), *many(2 * _LOOP_SLICE), *many(1)])
    delivery.refuse([(job, stream, last := GenerateFrame((), StepTiming(), is_last=True))])
    delivery.refuse(alone := many(1))
    for _ in range(4):
        loop.posted.popleft()()
    assert isinstance(alone[0][1], Pending)
    assert alone[0][1].is_done
    assert len(stream.outcomes) == 1
    while len(stream.outcomes) < 2:
        loop.posted.popleft()()
    assert flood.num_flushes == 0
    assert stream.outcomes[-1] is last
    loop.run()
    assert flood.num_flushes == 1
    assert not delivery._chain_of
