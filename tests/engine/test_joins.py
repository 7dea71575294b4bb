"""Joins: an append sent again while the first is in flight or waits is run once and answered to everybody."""

from __future__ import annotations

import dataclasses

import pytest

from ferrule_server.engine.jobs import AppendJob, ForkJob, ForkResult, OutputRequest, TruncateJob, TruncateResult
from ferrule_server.errors import Cancelled, HandleLost, HandleStale, NonFiniteLogits
from ferrule_server.executor.base import DeviceLost, OutputSpec, SampleSpec
from ferrule_server.kv.handle import Handle, StalePolicy
from tests.engine.harness import GREEDY, NOTHING, Harness, append
from tests.fakes import FakeExecutor, fake_next_token

UNSEEDED = OutputRequest(OutputSpec(sample=SampleSpec()), is_seeded=False)
FULL = OutputRequest(OutputSpec(full_logits=True))


@pytest.mark.parametrize("output", [GREEDY, UNSEEDED, FULL, NOTHING])
@pytest.mark.parametrize("on_stale", StalePolicy)
def test_a_duplicate_of_an_append_in_flight_joins_it(output: OutputRequest, on_stale: StalePolicy) -> None:
    """One run; the joiner has the same handle, rows and seed, as a replay. Also long after the first came."""
    with Harness(max_step_rows=4) as harness:
        first = harness.prefill(1, 2, 3)
        num_steps = len(harness.executor.batches)
        tokens = [4] * 10
        original = harness.hold(append(first.handle, *tokens, output=output, on_stale=on_stale))
        again = harness.submit(append(first.handle, *tokens, output=output, on_stale=on_stale))
        harness.let_go()
        assert again.result() == dataclasses.replace(original.result(), replayed=True)
        assert sum(batch.num_rows for batch in harness.executor.batches[num_steps:]) == 10
        assert harness.engine.counters.joined == 1


def test_duplicates_that_wait_together_run_once() -> None:
    """Whoever stands directly behind an equal job joins it when its turn comes."""
    with Harness(max_step_rows=4) as harness:
        first = harness.prefill(1, 2, 3)
        harness.decode(first.handle, 4)
        running = harness.hold(append(first.handle, *([5] * 10), on_stale=StalePolicy.REWIND))
        jobs = [append(first.handle, 6, on_stale=StalePolicy.REWIND) for _ in range(3)]
        jobs[1].is_cancelled = True
        sinks = harness.submit_all(*jobs)
        harness.let_go()
        running.result()
        assert [sinks[0].result().replayed, sinks[2].result().replayed] == [False, True]
        assert isinstance(sinks[1].error(), Cancelled)
        assert sinks[0].result().rows == sinks[2].result().rows


@pytest.mark.parametrize("change", ["tokens", "output", "on_stale", "ttl_s"])
def test_what_differs_does_not_join(change: str) -> None:
    """It waits for its turn and is judged by what the first has done."""
    with Harness(max_step_rows=4) as harness:
        first = harness.prefill(1, 2, 3)
        original = harness.hold(append(first.handle, *([4] * 6)))
        other = append(first.handle, *([4] * 6))
        match change:
            case "tokens":
                other.token_ids = (5,)
            case "output":
                other.output = NOTHING
            case "on_stale":
                other.on_stale = StalePolicy.FORK
            case _:
                other.ttl_s = 99
        late = harness.submit(other)
        harness.let_go()
        original.result()
        if change == "tokens":
            assert isinstance(late.error(), HandleStale)
        else:
            assert late.result().replayed
        assert harness.engine.counters.joined == 0


def test_queries_never_join(harness: Harness) -> None:
    """Two that draw tokens want two draws."""
    first = harness.prefill(1, 2, 3)
    one, two = harness.submit_all(*(append(first.handle, output=UNSEEDED) for _ in range(2)))
    assert one.result().seed != two.result().seed
    assert harness.engine.counters.joined == 0


def test_nobody_overtakes_by_joining() -> None:
    """What waits in between is judged in between: the last append finds the truncate done."""
    with Harness(max_step_rows=4) as harness:
        first = harness.prefill(1, 2, 3)
        one, cut, forked, again = harness.submit_all(
            append(first.handle, 4),
            TruncateJob("me", first.handle, 3),
            ForkJob("me", first.handle, 3, 1),
            append(first.handle, 4),
        )
        assert isinstance(cut.outcome(), TruncateResult)
        assert isinstance(forked.outcome(), ForkResult)
        assert not one.result().replayed
        assert not again.result().replayed
        assert one.result().handle == again.result().handle


@pytest.mark.parametrize("who", ["first", "joiner", "both"])
def test_cancelling_one_caller_does_not_cancel_the_other(who: str) -> None:
    """An append ends only when everybody who asked for it is gone; then it never happened."""
    with Harness(max_step_rows=4) as harness:
        first = harness.prefill(1, 2, 3)
        jobs = [append(first.handle, *([4] * 10)) for _ in range(2)]
        sinks = [harness.hold(jobs[0])]
        sinks.append(harness.submit(jobs[1]))
        jobs[0].is_cancelled = who != "joiner"
        jobs[1].is_cancelled = who != "first"
        harness.let_go()
        if who == "both":
            assert all(isinstance(sink.error(), Cancelled) for sink in sinks)
            assert not harness.decode(first.handle, 5).replayed
        else:
            assert sinks[1 if who == "first" else 0].result().handle.length == 13


def test_a_joined_append_fails_for_everybody() -> None:
    """NaN logits: both hear of it, the handle stays good."""
    executor = FakeExecutor()
    executor.bad_token_ids = {13}
    with Harness(executor) as harness:
        first = harness.prefill(1, 2, 3)
        sinks = harness.submit_all(append(first.handle, 13), append(first.handle, 13))
        assert all(isinstance(sink.error(), NonFiniteLogits) for sink in sinks)
        assert harness.decode(first.handle, 4).rows[0].token == fake_next_token((1, 2, 3, 4), 32)


def test_a_lost_device_is_told_to_everybody(harness: Harness) -> None:
    """In flight, joined and waiting: HANDLE_LOST, once each."""
    handle = harness.prefill(1, 2).handle
    harness.executor.errors[len(harness.executor.batches) + 1] = DeviceLost()
    jobs: list[AppendJob] = [append(handle, 3), append(handle, 3), append(handle, 4)]
    jobs += [append(None, 5, request_id="r"), append(None, 5, request_id="r")]
    for sink in harness.submit_all(*jobs):
        assert isinstance(sink.error(), HandleLost)


def test_replays_that_run_again_are_joined_too() -> None:
    """Rows that were dropped are computed once for all who ask together."""
    with Harness(retained_bytes=0) as harness:
        first: Handle = harness.prefill(1, 2, 3).handle
        harness.decode(first, 4, output=FULL)
        one, two = harness.submit_all(append(first, 4, output=FULL), append(first, 4, output=FULL))
        assert one.result().recomputed
        assert two.result().recomputed
        assert harness.engine.counters.joined == 1
        assert harness.engine.counters.recomputed == 1
