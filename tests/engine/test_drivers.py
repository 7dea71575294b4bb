"""Drivers: streams stand still, go on, are cancelled and end with the engine, each exactly once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from ferrule_server.engine import engine as engine_module
from ferrule_server.engine import host_calls
from ferrule_server.engine.faults.failpoints import PLACES, FailpointHit, Failpoints, Place, fail
from ferrule_server.engine.generation.generate import Generation
from ferrule_server.engine.jobs import Finish, GenerateFrame, StopRules, StreamJob, Window
from ferrule_server.errors import (
    Cancelled,
    Draining,
    EngineFault,
    FerruleError,
    HandleExpired,
    HandleLost,
    HandleUnknown,
    QueueFull,
    SlowConsumer,
)
from ferrule_server.executor.base import DeviceLost
from tests.engine.harness import GREEDY, Harness, Pending, append, wait_until
from tests.engine.streams import SteppedExecutor, Stream, drawn_with, forward, generate, start
from tests.fakes import FakeExecutor

FEW = 3 * 64
"""Bytes that three tokens take."""

Make = Callable[[Window], StreamJob[object]]


def narrow_generate(window: Window) -> StreamJob[object]:
    """A Generate that stands still after three tokens."""
    return generate(None, 1, 2, output=drawn_with(5), max_tokens=9, window=window)


def narrow_forward(window: Window) -> StreamJob[object]:
    """A Forward that stands still after its first chunk."""
    return forward(*range(20), window=window)


def stand_still(harness: Harness, make: Make) -> tuple[StreamJob[object], Stream]:
    """Start a stream and wait until its reader leaves no room."""
    job = make(Window(FEW))
    stream = start(harness, job)
    wait_until(lambda: bool(harness.engine._drivers.parked))
    return job, stream


def read(harness: Harness, job: StreamJob[object], num_bytes: int) -> None:
    """Take bytes out of the window, as the event loop does."""
    job.window.taken_bytes += num_bytes
    harness.engine.resume(job)


def take_a_row(harness: Harness, job: StreamJob[object]) -> None:
    """Take a row out of the window and resume the job just when the event loop would."""
    window, taken_before = job.window, job.window.taken_bytes
    window.taken_bytes = taken_before + job.row_bytes
    if window.sent_bytes - taken_before >= window.limit_bytes and window.is_open:
        harness.engine.resume(job)


# ---- the window -----------------------------------------------------------------------------------------------------


def test_a_generate_whose_reader_leaves_no_room_stands_still_and_goes_on_where_it_was(harness: Harness) -> None:
    """Same tokens as without a pause, no step while it stands."""
    whole = start(harness, generate(None, 1, 2, output=drawn_with(5), max_tokens=9)).branch()
    job, stream = stand_still(harness, narrow_generate)
    assert stream.so_far()[0].tokens == whole.tokens[:3]
    num_steps = len(harness.executor.batches)
    time.sleep(0.05)
    assert len(harness.executor.batches) == num_steps
    read(harness, job, 64)
    wait_until(lambda: len(stream.so_far()[0].tokens) == 4)
    read(harness, job, 1 << 20)
    assert stream.branch().tokens == whole.tokens


def test_a_forward_whose_reader_leaves_no_room_stands_still_and_goes_on(harness: Harness) -> None:
    """Chunk by chunk, as the reader takes them."""
    job, stream = stand_still(harness, narrow_forward)
    assert len(stream.outcomes) == 1
    read(harness, job, 800)
    stream.wait_for(2)
    assert not stream.is_over
    read(harness, job, 800)
    assert [frame.first_position for frame in stream.forward()] == [0, 8, 16]


@pytest.mark.parametrize("limit", [1, 300, 1000])
@pytest.mark.parametrize("num_branches", [1, 2, 16])
def test_rows_under_way_count_in_the_window(num_branches: int, limit: int) -> None:
    """However many branches: they wait for room before they are run, or each would put a row into it at once."""
    with Harness(FakeExecutor(num_blocks=400)) as harness:
        window = Window(limit)
        job = generate(None, 1, 2, output=drawn_with(5), num_branches=num_branches, max_tokens=5, window=window)
        job.row_bytes = 100
        stream, most, deadline = start(harness, job), 0, time.monotonic() + 20
        while not stream.is_over:
            assert time.monotonic() < deadline, "it stands still although there is room"
            most = max(most, owed := window.sent_bytes - window.taken_bytes)
            if owed >= 100:
                take_a_row(harness, job)
        assert most <= limit + 100
        free = start(harness, generate(None, 1, 2, output=drawn_with(5), num_branches=num_branches, max_tokens=5))
        assert [branch.tokens for branch in free.branches()] == [branch.tokens for branch in stream.branches()]
        assert {len(branch.tokens) for branch in stream.branches()} == {5}


def test_the_room_of_a_branch_that_is_refused_at_once_is_that_of_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is under way then that would let the others go on, and no idle engine that looks once a second."""
    monkeypatch.setattr(engine_module, "_IDLE_S", 600.0)
    with Harness(FakeExecutor(num_blocks=8)) as harness:
        window = Window(100)
        job = generate(None, 1, 2, 3, output=drawn_with(5), num_branches=6, max_tokens=5, window=window)
        job.row_bytes = 100
        stream, deadline = start(harness, job), time.monotonic() + 20
        while not stream.is_over:
            assert time.monotonic() < deadline, "it stands still although there is room"
            if window.sent_bytes - window.taken_bytes >= 100:
                take_a_row(harness, job)
        finishes = [branch.last.finish for branch in stream.branches()]
        assert Finish.KV_BLOCKS_EXHAUSTED in finishes
        assert set(finishes) <= {Finish.KV_BLOCKS_EXHAUSTED, Finish.MAX_TOKENS}


def test_standing_still_costs_nothing_and_pins_nothing(harness: Harness) -> None:
    """No busy waiting: an idle engine looks about once a second."""
    _, stream = stand_still(harness, narrow_generate)
    turns: list[float] = []
    turn = harness.engine._drivers.turn
    harness.engine._drivers.turn = lambda: (turns.append(time.monotonic()), turn())[1]  # type: ignore[func-returns-value,method-assign]
    time.sleep(0.4)
    assert len(turns) <= 2
    (sequence,) = harness.store.registry
    assert sequence.num_pins == 0
    assert not stream.is_over


def test_a_window_that_opens_between_the_look_and_the_pause_is_not_missed(harness: Harness) -> None:
    """A reader on another thread takes every token as it comes; the stream never hangs."""
    job = generate(None, 1, 2, output=GREEDY, max_tokens=60, window=Window(1))
    stream = start(harness, job)
    while not stream.is_over:
        if (owed := job.window.sent_bytes - job.window.taken_bytes) > 0:
            read(harness, job, owed)
    assert len(stream.branch().tokens) == 60


def test_the_lease_of_a_stream_that_stands_still_runs_out_and_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to come back for that; of a Forward the reader hears that it was too slow."""
    monkeypatch.setattr(engine_module, "_IDLE_S", 0.05)
    for make, kind in ((narrow_generate, HandleExpired), (narrow_forward, SlowConsumer)):
        now = [1000.0]
        harness = Harness()
        harness.clock = lambda now=now: now[0]  # type: ignore[misc]
        with harness:
            _, stream = stand_still(harness, make)
            now[0] += 61.0
            outcome = stream.wait()[-1]
            if isinstance(outcome, GenerateFrame):
                assert outcome.branches[0].finish is Finish.ERROR
                outcome = outcome.branches[0].error
            assert isinstance(outcome, kind)
            assert len(harness.store.registry) == 0


def test_a_branch_released_while_it_stands_still_hears_of_it_at_once(harness: Harness) -> None:
    """It ends; the other branch stands still on, and ends when its window opens."""
    job = generate(None, 1, 2, output=drawn_with(5), num_branches=2, max_tokens=9, window=Window(FEW))
    stream = start(harness, job)
    wait_until(lambda: len(harness.engine._drivers.parked) == 1 and not harness.engine._lanes.running)
    victim = stream.so_far()[1].handles[-1]
    harness.release(victim)
    wait_until(lambda: stream.so_far()[1].last.finish is Finish.ERROR)
    assert isinstance(stream.so_far()[1].last.error, HandleUnknown)
    assert not stream.is_over
    read(harness, job, 1 << 20)
    assert stream.branches()[0].last.finish is Finish.MAX_TOKENS


def test_a_sequence_that_has_ended_before_its_stream_stands_still_is_heard_of_too(harness: Harness) -> None:
    """Answered from the record and released in one frame, the reader without any room."""
    handle = harness.prefill(1, 2, 3).handle
    harness.decode(handle, 4)
    job, stream = generate(handle, 4, output=GREEDY, window=Window(1)), Stream()
    harness.engine.submit([(job, stream), (host_calls.release("me", (handle,)), Pending())])
    branch = stream.branch()
    assert (len(branch.tokens), type(branch.last.error)) == (1, HandleUnknown)


def test_resuming_what_does_not_stand_still_does_nothing() -> None:
    """A stream that runs, one that is over, one that never was; and an engine that is closed."""
    with Harness() as harness:
        job = generate(None, 1, 2)
        harness.engine.resume(job)
        stream = start(harness, job)
        harness.engine.resume(job)
        stream.branch()
        harness.engine.resume(job)
        harness.prefill(1)
    harness.engine.resume(job)
    assert len(harness.engine._inbox) == 0


# ---- cancel ---------------------------------------------------------------------------------------------------------


def test_a_cancelled_generate_stops_within_a_step_and_its_handles_stay_good() -> None:
    """What was read can be gone on from; its sequences live on their leases."""
    executor = SteppedExecutor()
    with Harness(executor) as harness:
        job = generate(None, 1, 2, 3, output=GREEDY, num_branches=2, max_tokens=100)
        stream = start(harness, job)
        executor.arrive()
        executor.step(5)
        num_steps = len(executor.batches)
        job.is_cancelled = True
        executor.run_freely()
        branches = stream.branches()
        assert {type(branch.last.error) for branch in branches} == {Cancelled}
        assert len(executor.batches) - num_steps <= 1
        wait_until(lambda: not harness.engine._lanes.running)
        wait_until(lambda: harness.engine.snapshot().num_streams == 0)
        assert len(harness.store.registry) == 2
        result = harness.decode(branches[0].handles[-1], branches[0].tokens[-1])
        assert result.replayed or result.handle.length == branches[0].handles[-1].length + 1


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_a_cancelled_forward_leaves_nothing(num_steps: int) -> None:
    """Its hidden sequence is freed, whichever chunk was under way."""
    executor = SteppedExecutor()
    with Harness(executor) as harness:
        job = forward(*range(40))
        stream = start(harness, job)
        executor.arrive()
        executor.step(num_steps)
        job.is_cancelled = True
        executor.run_freely()
        assert isinstance(stream.wait()[-1], Cancelled)
        wait_until(lambda: len(harness.store.registry) == 0)
        assert harness.store.pool.num_free == 63
        assert len(executor.batches) <= num_steps + 2


def test_a_cancelled_prompt_is_given_up_between_its_chunks() -> None:
    """Nothing of it is committed, and the caller hears the error in place of a first frame."""
    executor = SteppedExecutor()
    with Harness(executor, max_step_rows=4) as harness:
        job = generate(None, *range(30))
        stream = start(harness, job)
        executor.arrive()
        executor.step(2)
        job.is_cancelled = True
        executor.run_freely()
        assert isinstance(stream.error(), Cancelled)
        wait_until(lambda: not harness.engine._lanes.running)
        assert len(harness.store.registry) == 0
        assert job.rows_run == 12


@pytest.mark.parametrize("make", [narrow_generate, narrow_forward])
def test_a_stream_that_stands_still_is_cancelled_by_resuming_it(make: Make) -> None:
    """The engine sleeps; the call wakes it, and the place in the queue is free again."""
    with Harness(max_waiting_jobs=1) as harness:
        job, stream = stand_still(harness, make)
        assert isinstance(harness.submit(append(None, 1)).error(), QueueFull)
        job.cancel()
        harness.engine.resume(job)
        stream.wait()
        harness.prefill(1)


def test_what_is_cancelled_before_it_starts_does_nothing(harness: Harness) -> None:
    """Not a step."""
    for job in (generate(None, 1, 2), forward(1, 2)):
        job.is_cancelled = True
        assert isinstance(start(harness, job).error(), Cancelled)
    assert harness.executor.batches == []


def test_a_sequence_nobody_was_told_of_goes_with_a_cancelled_call() -> None:
    """Cancelled while its prompt ran to the end: there was no frame yet, so its handle is known to nobody."""
    with Harness(failpoints=(failpoints := Failpoints())) as harness:
        job = generate(None, 1, 2)

        def cancel() -> None:
            job.is_cancelled = True

        failpoints.arm("after_commit", cancel)
        assert isinstance(start(harness, job).error(), Cancelled)
        harness.prefill(1)
        assert len(harness.store.registry) == 1


# ---- the end of the engine ------------------------------------------------------------------------------------------


def test_closing_ends_every_stream_with_draining_once() -> None:
    """Before the first frame as the call's error, later in the branches; those that stand still too."""
    executor = SteppedExecutor()
    with Harness(executor, max_step_rows=4) as harness:
        executor.is_stepped = False
        still = [stand_still(harness, make)[1] for make in (narrow_generate, narrow_forward)]
        executor.is_stepped = True
        running = start(harness, generate(None, 1, 2, 3, num_branches=2, max_tokens=100))
        executor.arrive()
        executor.step(4)
        waiting = start(harness, generate(None, *range(30)))
        executor.step(2)
        closing = threading.Thread(target=harness.engine.close)
        closing.start()
        wait_until(lambda: len(harness.engine._inbox) > 0)
        executor.run_freely()
        closing.join()
        assert isinstance(waiting.error(), Draining)
        for branch in running.branches() + still[0].branches():
            assert isinstance(branch.last.error, Draining)
        assert isinstance(still[1].wait()[-1], Draining)
        assert isinstance(start(harness, generate(None, 1)).error(), Draining)
        assert isinstance(start(harness, forward(1)).error(), Draining)


def test_a_lost_device_ends_every_stream_with_handle_lost_once(harness: Harness) -> None:
    """No KV can be trusted any more, whatever the stream was at."""
    still = [stand_still(harness, make)[1] for make in (narrow_generate, narrow_forward)]
    harness.executor.errors[len(harness.executor.batches) + 6] = DeviceLost()
    running = start(harness, generate(None, 1, 2, 3, num_branches=2, max_tokens=100))
    for branch in running.branches() + still[0].branches():
        assert isinstance(branch.last.error, HandleLost)
    assert isinstance(still[1].wait()[-1], HandleLost)
    assert harness.num_failures == 1


def test_a_failed_step_ends_only_the_branch_whose_rows_fail_again(harness: Harness) -> None:
    """The rest is run alone and goes on with the same tokens."""
    whole = start(harness, generate(None, 1, 2, output=drawn_with(8), num_branches=2, max_tokens=6)).branches()
    num_steps = len(harness.executor.batches)
    for failing in (4, 5):  # the step of both, then that of the first alone
        harness.executor.errors[num_steps + failing] = RuntimeError("told to fail")
    job = generate(None, 1, 2, output=drawn_with(8), num_branches=2, max_tokens=6)
    branches = start(harness, job).branches()
    ends = [branch.last.finish for branch in branches]
    assert sorted(end.value for end in ends if end) == ["error", "max_tokens"]
    failed = branches[ends.index(Finish.ERROR)]
    assert isinstance(failed.last.error, EngineFault)
    good = ends.index(Finish.MAX_TOKENS)
    assert branches[good].tokens == whole[good].tokens


def test_a_bug_in_a_stream_ends_that_stream_alone() -> None:
    """Text finders are others' code: what they raise is a fault with an id, and the others hear nothing of it."""

    class Broken:
        def feed(self, token_id: int) -> bool:
            raise RuntimeError(f"told to fail at {token_id}")

    with Harness() as harness:
        bad, good = Stream(), Stream()
        jobs = [generate(None, 1, 2, stop=StopRules(5, new_text_stop=Broken)), generate(None, 1, 2, max_tokens=5)]
        harness.engine.submit(list(zip(jobs, (bad, good), strict=True)))
        assert isinstance(bad.error(), EngineFault)
        assert len(good.branch().tokens) == 5
        assert harness.engine.snapshot().num_streams == 0


def tell_to_fail(*_: object) -> None:
    """Raise, in place of a method."""
    raise FailpointHit("told to fail")


def test_a_bug_while_ending_or_telling_still_ends_the_stream() -> None:
    """Whoever waits hears something, whatever fails."""
    for broken in ("end", "next_frame"):
        with Harness() as harness:
            job, stream = stand_still(harness, narrow_generate)
            (driver,) = harness.engine._drivers.active

            setattr(driver, broken, tell_to_fail)
            job.cancel()
            harness.engine.resume(job)
            assert isinstance(stream.wait()[-1], EngineFault)


@pytest.mark.parametrize("broken", ["begin", "resume"])
def test_a_bug_at_the_beginning_or_after_a_pause_ends_that_stream_alone(
    harness: Harness, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told once, and nothing of it stays."""
    monkeypatch.setattr(Generation, broken, tell_to_fail)
    if broken == "begin":
        outcome = start(harness, generate(None, 1)).error()
    else:
        job, stream = stand_still(harness, narrow_generate)
        read(harness, job, 1 << 20)
        outcome = stream.branch().last.error  # type: ignore[assignment]
    assert isinstance(outcome, EngineFault)
    assert harness.engine.snapshot().num_streams == 0
    harness.prefill(1)


@pytest.mark.parametrize("nth", range(1, 8))
@pytest.mark.parametrize("place", PLACES)
def test_wherever_the_engine_breaks_streams_end_once_and_hidden_sequences_go(place: Place, nth: int) -> None:
    """One failure at each place, in each of the first steps, under a Generate of two branches and a Forward."""
    failpoints = Failpoints()
    failpoints.arm(place, fail, nth)
    with Harness(failpoints=failpoints) as harness:
        streams = [Stream(), Stream()]
        jobs: list[StreamJob[object]] = [generate(None, *range(9), num_branches=2, max_tokens=6), forward(*range(20))]
        harness.engine.submit([(jobs[0], streams[0]), (jobs[1], streams[1])])
        for stream in streams:
            stream.wait()
        harness.prefill(5)
        is_told = not isinstance(streams[0].outcomes[0], FerruleError)
        num_forks = int(place == "after_commit" and nth == 3)  # made, and then the failure: its lease ends it
        assert len(harness.store.registry) == (3 if is_told else 1 + num_forks)


# ---- beside others --------------------------------------------------------------------------------------------------


def test_a_stream_holds_one_place_in_the_queue_until_its_last_frame() -> None:
    """However many appends it makes."""
    executor = SteppedExecutor()
    with Harness(executor, max_waiting_jobs=2) as harness:
        stream = start(harness, generate(None, 1, 2, num_branches=2, max_tokens=30))
        executor.arrive()
        executor.step(3)
        other = harness.submit(append(None, 1))
        assert isinstance(start(harness, generate(None, 1)).error(), QueueFull)
        assert harness.engine.snapshot().num_streams == 1
        executor.run_freely()
        other.result()
        stream.branches()
        assert harness.engine._parts.gate.num_jobs == 0
        assert harness.engine.snapshot().num_streams == 0
        assert harness.engine.counters.generates == 1


def test_nobody_waits_for_the_rows_of_a_stream_to_come_back() -> None:
    """Its next rows are there before the window could open; those of clients are still waited for."""
    with Harness(gather_gap_s=30.0, gather_share=30_000.0) as harness:
        begun = time.monotonic()
        assert len(start(harness, generate(None, 1, 2, max_tokens=50, num_branches=2)).branches()) == 2
        assert time.monotonic() - begun < 15.0


def test_outcomes_of_a_stream_that_is_over_are_dropped() -> None:
    """A sequence that is released while its Generate is told of the cancel: two ends, one word."""
    executor = SteppedExecutor()
    with Harness(executor) as harness:
        job = generate(None, 1, 2, max_tokens=100)
        stream = start(harness, job)
        executor.arrive()
        executor.step(3)
        handle = stream.so_far()[0].handles[-1]
        job.is_cancelled = True
        released = harness.submit(host_calls.release("me", (handle,)))
        executor.run_freely()
        released.outcome()
        assert isinstance(stream.branch().last.error, Cancelled | HandleUnknown)
        harness.prefill(1)
        assert not harness.engine._drivers.has_work


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_refusal_by_surprise_is_an_outcome_like_any(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in the lanes ends the branch that met it, at an append made anew or at one that is used again."""
    with Harness(FakeExecutor()) as harness:
        lanes, calls = harness.engine._lanes, iter(range(100))

        def failing(enter: Callable[..., object]) -> Callable[..., object]:
            def fail_third(*args: object) -> object:
                if next(calls) == number:
                    raise RuntimeError("told to fail")
                return enter(*args)

            return fail_third

        monkeypatch.setattr(lanes, "enter", failing(lanes.enter))
        branch = start(harness, generate(None, 1, 2)).branch()
        assert (len(branch.tokens), type(branch.last.error)) == (number, EngineFault)
        error: FerruleError | None = branch.last.error
        assert error is not None
        assert "told" not in error.message
