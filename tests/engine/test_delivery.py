"""Delivery: in order, whatever the event loop has to do in between."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import pytest

from ferrule_server.engine.bridge import delivery as module
from ferrule_server.engine.bridge.delivery import _LOOP_SLICE, Delivery
from ferrule_server.engine.bridge.gate import Finished, Gate
from ferrule_server.engine.jobs import GenerateFrame, GenerateJob, ListResult, StepTiming, WarmupJob
from ferrule_server.errors import Draining
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
        delivery.hand_over([*many(num_others), (job, stream, frame)])
    loop.run()
    assert stream.outcomes == frames
    assert gate.num_jobs == 0


def test_a_large_step_leaves_others_their_turns_on_the_loop() -> None:
    """And each sink is flushed once for it, at its end."""
    loop, own = Loop(), Pending()
    delivery = Delivery(loop.posted.append, Gate(10))
    outcomes = many(3 * _LOOP_SLICE)
    delivery.hand_over([(job, own, outcome) for job, _, outcome in outcomes])
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
    delivery.hand_over(many(_LOOP_SLICE + 1))
    for each in late:
        delivery.refuse(each)
    loop.run()
    assert all(sink.num_flushes == 1 for ((_, sink, _),) in late if isinstance(sink, Pending))
    delivery.hand_over(last := many(1))
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


class Call:
    """A Generate whose first frame has been delivered, so that a pause has begun."""

    def __init__(self, delivery: Delivery, loop: Loop, gate: Gate) -> None:
        self.delivery, self.loop, self.stream = delivery, loop, Stream()
        self.job: GenerateJob = generate(None, 1)
        assert gate.admit([(self.job, self.stream)])[1] == []
        self.say()
        loop.run()

    def say(self, *others: Finished, is_last: bool = False) -> GenerateFrame:
        """Hand over a frame as of a step of its own, after outcomes of others."""
        frame = GenerateFrame((), StepTiming(), is_last=is_last)
        self.delivery.hand_over([*others, (self.job, self.stream, frame)])
        return frame


class Pauses:
    """Calls that the event loop is to make later."""

    def __init__(self) -> None:
        self.delays: list[float] = []
        self.calls: deque[Callable[[], None]] = deque()

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Keep a call."""
        self.delays.append(delay_s)
        self.calls.append(call)

    def end(self) -> None:
        """End the pause in progress."""
        self.calls.popleft()()


class Paused:
    """A delivery with pauses, and Generates in one of them."""

    def __init__(self, num_calls: int = 1) -> None:
        self.loop, self.pauses, self.gate = Loop(), Pauses(), Gate(1000)
        self.delivery = Delivery(self.loop.posted.append, self.gate, self.pauses.later)
        self.calls = [Call(self.delivery, self.loop, self.gate) for _ in range(num_calls)]


def test_frames_gather_during_a_pause_without_waking_the_loop() -> None:
    """The first frame is delivered at once; its pause gathers the next ones, which begin another pause together."""
    paused = Paused(2)
    frames = [[call.say() for call in paused.calls] for _ in range(3)]
    assert not paused.loop.posted
    assert [len(call.stream.outcomes) for call in paused.calls] == [1, 1]
    paused.pauses.end()
    for index, call in enumerate(paused.calls):
        assert call.stream.outcomes[1:] == [each[index] for each in frames]
        assert call.stream.num_flushes == 2
    assert len(paused.pauses.calls) == 1


def test_many_calls_get_their_frames_one_after_the_other() -> None:
    """Other work on the event loop gets its turn in between; a frame that cannot wait still follows those before it."""
    paused = Paused(5)
    paused.delivery._last_pause_s = 0.006
    frames = [call.say() for call in paused.calls]
    paused.pauses.end()
    assert [len(call.stream.outcomes) for call in paused.calls] == [2, 2, 1, 1, 1]
    last = paused.calls[4].say(is_last=True)
    paused.loop.run()
    assert len(paused.calls[4].stream.outcomes) == 1
    while paused.pauses.calls:
        paused.pauses.end()
    assert [call.stream.outcomes[1] for call in paused.calls] == frames
    assert paused.calls[4].stream.outcomes[2] is last
    assert not paused.delivery._chain_of


def test_all_calls_have_their_frames_before_the_next_pause_ends() -> None:
    """However many there are: more of them get theirs at once."""
    paused = Paused(100)
    paused.delivery._last_pause_s = pause_s = 0.010
    for call in paused.calls:
        call.say()
    paused.pauses.end()
    del paused.pauses.delays[:]
    while len(paused.calls[-1].stream.outcomes) < 2:
        paused.pauses.end()
    assert sum(delay for delay in paused.pauses.delays if delay < module._SHORTEST_PAUSE_S) < pause_s


def test_a_pause_without_frames_is_the_last_one() -> None:
    """The next frame is delivered at once again."""
    paused = Paused()
    paused.pauses.end()
    assert not paused.pauses.calls
    (call,) = paused.calls
    call.say()
    paused.loop.run()
    assert len(call.stream.outcomes) == 2


def test_the_last_frame_ends_the_wait_of_those_before_it() -> None:
    """All in their order; so does the error that ends the call."""
    paused = Paused(2)
    ended, failed = paused.calls
    frames = [ended.say(), ended.say(is_last=True)]
    paused.loop.run()
    assert ended.stream.outcomes[1:] == frames
    frame, error = failed.say(), Draining()
    paused.delivery.hand_over([(failed.job, failed.stream, error)])
    paused.loop.run()
    assert failed.stream.outcomes[1:] == [frame, error]
    assert paused.gate.num_jobs == 0


def test_a_frame_that_fills_the_window_does_not_wait() -> None:
    """Its reader must take it before the engine continues."""
    paused = Paused()
    (call,) = paused.calls
    call.say()
    call.job.window.sent_bytes = call.job.window.limit_bytes
    call.say()
    paused.loop.run()
    assert len(call.stream.outcomes) == 3


def test_other_outcomes_never_wait_and_leave_frames_to_the_pause() -> None:
    """A client with a loop of its own gets its token at once, and does not cost others a message for each of theirs."""
    paused = Paused()
    (call,) = paused.calls
    ((job, own, outcome),) = many(1)
    call.say((job, own, outcome))
    assert isinstance(own, Pending)
    paused.loop.run()
    assert own.is_done
    assert len(call.stream.outcomes) == 1
    paused.pauses.end()
    assert len(call.stream.outcomes) == 2


def test_a_frame_that_crosses_while_a_pause_ends_is_delivered() -> None:
    """The engine read that there is a pause and the event loop that nothing came, one just before the other."""
    paused = Paused()
    (call,) = paused.calls
    handed_over = paused.delivery.hand_over

    def end_first(finished: list[Finished]) -> None:
        paused.pauses.end()
        handed_over(finished)

    paused.delivery.hand_over = end_first  # type: ignore[method-assign]
    call.say()
    paused.loop.run()
    assert len(call.stream.outcomes) == 2


def test_pauses_are_longer_the_more_the_event_loop_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the messages of many calls take a bounded share of its time; within limits."""
    worked_s = iter((0.0, 0.001, 0.0011, 9.0, 18.0))
    monkeypatch.setattr(time, "thread_time", lambda: next(worked_s))
    paused = Paused()
    (call,) = paused.calls
    for num_frames in (2, 2, 2, 1):
        for _ in range(num_frames):
            call.say()
        paused.pauses.end()
    shortest, longest = module._SHORTEST_PAUSE_S, module._LONGEST_PAUSE_S
    wanted = [shortest, 0.001 * module._PAUSE_SHARE, shortest, longest, shortest]  # the last one merged nothing
    assert paused.pauses.delays == pytest.approx(wanted)


def test_a_call_that_cannot_wait_leaves_others_to_the_pause() -> None:
    """A new caller gets its first frame at once, and costs the others no message."""
    paused = Paused(3)
    for call in paused.calls:
        call.say()
    new = Call(paused.delivery, paused.loop, paused.gate)
    paused.loop.run()
    assert len(new.stream.outcomes) == 1
    assert [len(call.stream.outcomes) for call in paused.calls] == [1, 1, 1]
    last = paused.calls[1].say(is_last=True)
    paused.loop.run()
    assert [len(call.stream.outcomes) for call in paused.calls] == [1, 3, 1]
    assert paused.calls[1].stream.outcomes[-1] is last
    paused.pauses.end()
    assert [len(call.stream.outcomes) for call in paused.calls] == [2, 3, 2]


def test_a_call_that_has_its_frames_does_not_wait_for_those_of_others() -> None:
    """Its last frame comes at once, while others still wait for their turn."""
    paused = Paused(5)
    paused.delivery._last_pause_s = 0.006
    for call in paused.calls:
        call.say()
    paused.pauses.end()
    first = paused.calls[0]
    last = first.say(is_last=True)
    paused.loop.run()
    assert first.stream.outcomes[-1] is last
    assert len(paused.calls[4].stream.outcomes) == 1
