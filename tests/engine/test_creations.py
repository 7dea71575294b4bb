"""Creations by request_id: made once, answered alike to everybody who asks again, whatever became of them."""

from __future__ import annotations

import dataclasses
import time

import pytest

from ferrule_server.engine import host_calls
from ferrule_server.engine.appends import creations
from ferrule_server.engine.faults.failpoints import Failpoints
from ferrule_server.engine.jobs import (
    AppendJob,
    ForkJob,
    ForkResult,
    ListResult,
    OutputRequest,
    TruncateJob,
    TruncateResult,
)
from ferrule_server.errors import Cancelled, Draining, HandleExpired, HandleStale, HandleUnknown, RequestIdReused
from ferrule_server.executor.base import OutputSpec, SampleSpec
from ferrule_server.kv.handle import Handle, StalePolicy
from ferrule_server.kv.new_sequence import NewSequence
from tests.engine.harness import GREEDY, NOTHING, Harness, append
from tests.fakes import FakeExecutor, fake_next_token

ALL = OutputRequest(OutputSpec(full_logits=True), all_positions=True)
UNSEEDED = OutputRequest(OutputSpec(sample=SampleSpec()), is_seeded=False)
MANY_UNSEEDED = OutputRequest(OutputSpec(sample=SampleSpec()), all_positions=True, is_seeded=False)


def fork_job(handle: Handle, count: int = 2, request_id: str = "f") -> ForkJob:
    """A fork at the handle's length."""
    return ForkJob("me", handle, handle.length, count, request_id=request_id)


def fork(harness: Harness, handle: Handle, count: int = 2, request_id: str = "f") -> ForkResult:
    """Fork and wait."""
    result = harness.submit(fork_job(handle, count, request_id)).outcome()
    assert isinstance(result, ForkResult), result
    return result


def num_sequences(harness: Harness) -> int:
    """How many live."""
    return harness.engine.snapshot().num_sequences


def branch(handle: Handle, *token_ids: int, request_id: str = "b", output: OutputRequest = GREEDY) -> AppendJob:
    """An append that branches where it is stale."""
    return append(handle, *token_ids, on_stale=StalePolicy.FORK, request_id=request_id, output=output)


@pytest.mark.parametrize("output", [GREEDY, NOTHING, UNSEEDED, ALL, MANY_UNSEEDED])
def test_a_prefill_sent_again_makes_nothing_and_gets_the_same_answer(harness: Harness, output: OutputRequest) -> None:
    """Handle, rows and seed are those of the first answer; nothing is run."""
    first = harness.submit(append(None, 1, 2, 3, output=output, request_id="r")).result()
    num_steps = len(harness.executor.batches)
    again = harness.submit(append(None, 1, 2, 3, output=output, request_id="r")).result()
    assert again.replayed
    assert not again.recomputed
    assert (again.handle, again.rows, again.seed) == (first.handle, first.rows, first.seed)
    assert first.ttl_s == again.ttl_s == 60
    assert len(harness.executor.batches) == num_steps
    assert num_sequences(harness) == 1


@pytest.mark.parametrize("output", [GREEDY, UNSEEDED, ALL, MANY_UNSEEDED])
def test_a_prefill_sent_again_after_its_sequence_went_on_runs_its_rows_without_writing(
    harness: Harness, output: OutputRequest
) -> None:
    """The record is that of a later append by now; the seed of the creation is still known."""
    first = harness.submit(append(None, 1, 2, 3, output=output, request_id="r")).result()
    tip = harness.decode(first.handle, 9).handle
    again = harness.submit(append(None, 1, 2, 3, output=output, request_id="r")).result()
    assert again.replayed
    assert again.recomputed
    assert (again.handle, again.seed) == (first.handle, first.seed)
    assert [row.token for row in again.rows] == [row.token for row in first.rows]
    assert set(harness.executor.batches[-1].slot_mapping.tolist()) == {-1}
    assert harness.decode(tip).rows[0].token == fake_next_token((1, 2, 3, 9), 32)


def test_other_content_under_the_same_id_is_refused(harness: Harness) -> None:
    """Other tokens, policy, lease or kind of request: REQUEST_ID_REUSED, and nothing is made."""
    handle = harness.submit(append(None, 1, 2, request_id="r")).result().handle
    longer = append(None, 1, 2, request_id="r", ttl_s=90)
    for job in (
        append(None, 1, 3, request_id="r"),
        append(None, 1, 2, output=NOTHING, request_id="r"),
        longer,
        fork_job(handle, request_id="r"),
    ):
        assert isinstance(harness.submit(job).error(), RequestIdReused)
    assert num_sequences(harness) == 1


def test_ids_belong_to_their_principal(harness: Harness) -> None:
    """Somebody else's equal id is another one."""
    mine = harness.submit(append(None, 1, 2, request_id="r")).result()
    job = append(None, 1, 2, request_id="r", principal="you")
    other = harness.submit(job).result()
    assert not other.replayed
    assert other.handle.cache_id != mine.handle.cache_id


def test_prefills_of_one_frame_with_one_id_are_run_once(harness: Harness) -> None:
    """The second joins the first: one run, both answered, the second as a replay."""
    first, second = harness.submit_all(append(None, 1, 2, request_id="r"), append(None, 1, 2, request_id="r"))
    assert not first.result().replayed
    assert second.result().replayed
    assert first.result().handle == second.result().handle
    assert first.result().rows == second.result().rows
    assert [batch.num_rows for batch in harness.executor.batches] == [2]
    assert harness.engine.counters.joined == 1


def test_a_joined_prefill_goes_on_as_long_as_one_caller_waits() -> None:
    """One caller leaves: the other is answered. All leave: nothing was made, and the id is free again."""
    with Harness(max_step_rows=4) as harness:
        for num_gone in (1, 2):
            jobs = [append(None, *([num_gone] * 20), request_id=f"r{num_gone}") for _ in range(2)]
            sinks = harness.hold_all(*jobs)
            for job in jobs[:num_gone]:
                job.is_cancelled = True
            harness.let_go()
            if num_gone == 1:
                assert sinks[1].result().handle.length == 20
            else:
                assert all(isinstance(sink.error(), Cancelled) for sink in sinks)
        harness.executor.gate = None
        assert num_sequences(harness) == 1
        assert not harness.submit(append(None, 7, request_id="r2")).result().replayed


def test_a_duplicate_takes_over_from_a_caller_that_is_gone() -> None:
    """It comes after the first caller has left and before the engine has noticed: the work goes on."""
    with Harness(max_step_rows=4) as harness:
        first, second = append(None, *([1] * 20), request_id="r"), append(None, *([1] * 20), request_id="r")
        harness.hold(first)
        first.is_cancelled = True
        again = harness.submit(second)
        harness.let_go()
        assert again.result().handle.length == 20
        assert sum(batch.num_rows for batch in harness.executor.batches) == 20


def test_a_failed_prefill_leaves_its_id_free() -> None:
    """NaN logits, an engine fault, no room: the same id may be used again, for anything."""
    executor = FakeExecutor(num_blocks=9)
    executor.bad_token_ids = {13}
    with Harness(executor) as harness:
        one, two = harness.submit_all(append(None, 13, request_id="r"), append(None, 13, request_id="r"))
        assert one.error().REASON == two.error().REASON == "NON_FINITE_LOGITS"
        step = len(executor.batches)
        executor.errors = {step + 1: RuntimeError("together"), step + 2: RuntimeError("alone")}
        assert harness.submit(append(None, 1, request_id="r")).error().REASON == "ENGINE_FAULT"
        assert harness.submit(append(None, *([1] * 60), request_id="r")).error().REASON == "EXCEEDS_POOL"
        assert not harness.submit(append(None, 5, request_id="r")).result().replayed
        assert num_sequences(harness) == 1


def test_a_released_creation_is_not_made_again(harness: Harness) -> None:
    """Its answer is the truth: HANDLE_UNKNOWN."""
    first = harness.submit(append(None, 1, 2, request_id="r")).result()
    harness.release(first.handle)
    error = harness.submit(append(None, 1, 2, request_id="r")).error()
    assert isinstance(error, HandleUnknown)
    assert error.REASON == "HANDLE_UNKNOWN"
    assert isinstance(harness.submit(append(None, 1, 3, request_id="r")).error(), RequestIdReused)
    assert num_sequences(harness) == 0


def test_a_creation_truncated_below_its_answer_is_stale(harness: Harness) -> None:
    """Truncated, and rewritten: neither is what was answered."""
    first = harness.submit(append(None, 1, 2, 3, request_id="r")).result()
    cut = harness.answer(TruncateResult, TruncateJob("me", first.handle, 2))
    error = harness.submit(append(None, 1, 2, 3, request_id="r")).error()
    assert isinstance(error, HandleStale)
    assert error.metadata["tip_length"] == "2"
    rewritten = harness.decode(cut.handle, 9).handle
    assert isinstance(harness.submit(append(None, 1, 2, 3, request_id="r")).error(), HandleStale)
    harness.submit(TruncateJob("me", rewritten, 2)).outcome()
    harness.decode(cut.handle, 3)
    assert harness.submit(append(None, 1, 2, 3, request_id="r")).result().handle == first.handle


def test_repeating_renews_the_lease_and_never_shortens_it(harness: Harness) -> None:
    """A late duplicate must not undo a keep-alive."""
    first = harness.submit(append(None, 1, 2, request_id="r")).result()
    harness.submit(host_calls.keep_alive("me", (first.handle,), 1000.0)).outcome()
    assert harness.submit(append(None, 1, 2, request_id="r")).result().ttl_s == 1000
    made = fork(harness, first.handle)
    assert (made.ttl_s, made.replayed) == (1000, False)
    harness.submit(host_calls.keep_alive("me", made.handles, 500.0)).outcome()
    again = fork(harness, first.handle)
    assert (again.ttl_s, again.replayed) == (500, True)


def test_a_repeat_waits_for_what_is_in_flight_on_the_sequence_it_made() -> None:
    """Rows are never read while somebody may rewrite them; two that wait run once."""
    with Harness(max_step_rows=4) as harness:
        first = harness.submit(append(None, 1, 2, 3, output=ALL, request_id="r")).result()
        running = harness.hold(append(first.handle, *([4] * 20)))
        again = harness.submit_all(*(append(None, 1, 2, 3, output=ALL, request_id="r") for _ in range(2)))
        harness.let_go()
        running.result()
        for each in again:
            assert [row.logits.tolist() for row in each.result().rows if row.logits is not None] == [
                row.logits.tolist() for row in first.rows if row.logits is not None
            ]
        assert [batch.num_rows for batch in harness.executor.batches[-1:]] == [3]


def test_a_repeat_that_waits_hears_of_the_release() -> None:
    """The sequence goes while the repeat stands in its lane: HANDLE_UNKNOWN, and no run on freed blocks."""
    with Harness(max_step_rows=4) as harness:
        first = harness.submit(append(None, 1, 2, 3, request_id="r")).result()
        running = harness.hold(append(first.handle, *([4] * 20)))
        again = harness.submit(append(None, 1, 2, 3, request_id="r"))
        released = harness.submit(host_calls.release("me", (first.handle,)))
        harness.let_go()
        assert isinstance(running.error(), HandleUnknown)
        assert isinstance(again.error(), HandleUnknown)
        released.outcome()
        assert num_sequences(harness) == 0


def test_a_fork_sent_again_gets_the_same_branches(harness: Harness) -> None:
    """Also after the source was released, and while some branches are gone."""
    source = harness.prefill(1, 2, 3).handle
    made = fork(harness, source, 3)
    assert fork(harness, source, 3) == dataclasses.replace(made, replayed=True)
    harness.release(source, made.handles[0])
    assert fork(harness, source, 3).handles == made.handles
    assert num_sequences(harness) == 2
    harness.release(*made.handles)
    assert isinstance(harness.submit(fork_job(source, 3)).error(), HandleUnknown)
    assert harness.engine.kv_metrics().num_forks == 3


def test_a_fork_sent_again_renews_the_leases_of_its_branches(harness: Harness) -> None:
    """Who gets the answer only now has the whole lease before it, of the same duration."""
    now = time.monotonic()
    harness.clock = lambda: now
    job = dataclasses.replace(fork_job(harness.prefill(1, 2, 3).handle), ttl_s=50.0)
    first = harness.answer(ForkResult, job)
    now += 40.0
    again = harness.answer(ForkResult, dataclasses.replace(job))
    assert (again.handles, again.ttl_s, again.replayed) == (first.handles, 50.0, True)
    for handle in again.handles:
        info = harness.answer(ListResult, host_calls.list_caches("me"))
        (lease,) = (each.lease for each in info.caches if each.handle_id == handle.handle_id)
        assert lease.expires_in_s == 50.0


def test_a_fork_of_which_everything_expired_says_so(harness: Harness) -> None:
    """HANDLE_EXPIRED, not a second set of branches."""
    now = [time.monotonic()]
    harness.clock = lambda: now[0]
    source = harness.prefill(1, 2, 3).handle
    fork(harness, source, 2)
    now[0] += 61
    harness.end_leases()
    assert isinstance(harness.submit(fork_job(source, 2)).error(), HandleExpired)


def test_a_refused_fork_leaves_its_id_free(harness: Harness) -> None:
    """A fork of nothing made nothing."""
    source = harness.prefill(1, 2, 3).handle
    gone = Handle(source.cache_id, 4, source.lineage)
    assert harness.submit(ForkJob("me", gone, 4, 1, request_id="f")).error().REASON == "HANDLE_STALE"
    assert not fork(harness, source).replayed


def test_forks_that_wait_in_one_lane_with_one_id_make_one_set_of_branches() -> None:
    """The second is judged after the first and finds what it made."""
    with Harness(max_step_rows=4) as harness:
        source = harness.prefill(1, 2, 3).handle
        running = harness.hold(append(source, *([4] * 20)))
        first, second, other = harness.submit_all(fork_job(source), fork_job(source), fork_job(source, 3))
        harness.let_go()
        running.result()
        one, two = first.outcome(), second.outcome()
        assert isinstance(one, ForkResult)
        assert two == dataclasses.replace(one, replayed=True)
        assert isinstance(other.error(), RequestIdReused)


@pytest.mark.parametrize("output", [GREEDY, UNSEEDED, NOTHING])
def test_a_branch_sent_again_is_the_same_branch(harness: Harness, output: OutputRequest) -> None:
    """on_stale=FORK with a request_id branches once, even when the source changes or goes."""
    first = harness.prefill(1, 2, 3).handle
    tip = harness.decode(first, 4).handle
    made = harness.submit(branch(first, 9, output=output)).result()
    assert made.handle.cache_id != first.cache_id
    again = harness.submit(branch(first, 9, output=output)).result()
    assert again == dataclasses.replace(made, replayed=True)
    harness.submit(TruncateJob("me", tip, 3)).outcome()  # at the tip again: it would append now
    assert harness.submit(branch(first, 9, output=output)).result().handle == made.handle
    harness.release(first)
    again = harness.submit(branch(first, 9, output=output)).result()
    assert (again.handle, again.seed) == (made.handle, made.seed)
    assert num_sequences(harness) == 1
    tip = harness.decode(made.handle, 5).handle
    recomputed = harness.submit(branch(first, 9, output=output)).result()
    assert (recomputed.handle, recomputed.seed) == (made.handle, made.seed)
    assert [row.token for row in recomputed.rows] == [row.token for row in made.rows]


def test_branches_without_an_id_are_one_each(harness: Harness) -> None:
    """Equal branches without an id, or with different ones, are different wishes, in flight and afterwards."""
    first = harness.prefill(1, 2, 3).handle
    harness.decode(first, 4)
    jobs = [branch(first, 9, request_id=request_id) for request_id in ("", "", "a", "b", "b")]
    results = [each.result() for each in harness.submit_all(*jobs)]
    assert len({result.handle.cache_id for result in results}) == 4
    assert [result.replayed for result in results] == [False, False, False, False, True]
    assert results[3].handle == results[4].handle


def test_an_id_is_not_used_where_the_append_rule_does_without(harness: Harness) -> None:
    """At the tip, as a replay or as a rewind an append is idempotent by itself, whatever its id was used for."""
    first = harness.submit(append(None, 1, 2, 3, request_id="b")).result().handle
    assert harness.submit(branch(first, 4)).result().handle.length == 4
    assert harness.submit(branch(first, 4)).result().replayed
    assert isinstance(harness.submit(branch(first, 9)).error(), RequestIdReused)
    rewound = append(first, 8, on_stale=StalePolicy.REWIND, request_id="b")
    assert harness.submit(rewound).result().handle.length == 4
    assert num_sequences(harness) == 1


def test_a_branch_in_flight_ends_with_its_source_and_frees_its_id() -> None:
    """Released source: HANDLE_UNKNOWN to everybody who joined; nothing was made."""
    with Harness(max_step_rows=4) as harness:
        first = harness.prefill(1, 2, 3).handle
        harness.decode(first, 4)
        one, two = harness.hold_all(*(branch(first, *([9] * 20)) for _ in range(2)))
        harness.submit(host_calls.release("me", (first,)))
        harness.let_go()
        assert isinstance(one.error(), HandleUnknown)
        assert isinstance(two.error(), HandleUnknown)
        harness.executor.gate = None
        assert num_sequences(harness) == 0
        assert not harness.submit(append(None, 5, request_id="b")).result().replayed


def test_a_duplicate_that_waits_for_a_released_source_still_gets_its_branch() -> None:
    """The branch was made while it waited: that is the truth, not the end of the source."""
    failpoints = Failpoints()
    with Harness(max_step_rows=4, failpoints=failpoints) as harness:
        first = harness.prefill(1, 2, 3).handle
        harness.decode(first, 4)
        release = host_calls.release("me", (first,))
        failpoints.arm("before_schedule", lambda: harness.submit(release), nth=6)  # among the steps of the long one
        other, made, long, again = harness.submit_all(
            append(first, 8, on_stale=StalePolicy.FORK),
            branch(first, 9),
            append(first, *([7] * 20), on_stale=StalePolicy.FORK),
            branch(first, 9),
        )
        assert other.result().handle.cache_id != first.cache_id
        assert isinstance(long.error(), HandleUnknown)
        assert again.result() == dataclasses.replace(made.result(), replayed=True)
        assert num_sequences(harness) == 2


def test_while_draining_only_what_was_made_is_answered() -> None:
    """A new prompt is refused; one that is in flight or done is not new."""
    with Harness(max_step_rows=4) as harness:
        done = harness.submit(append(None, 1, 2, request_id="done")).result()
        harness.hold(append(None, *([1] * 8), request_id="flight"))
        jobs = [append(None, 1, 2, request_id="done"), append(None, *([1] * 8), request_id="flight")]
        jobs += [append(None, 1, request_id="new"), append(None, 1)]
        for job in jobs:
            job.new = NewSequence(is_repeat_only=True)
        sinks = harness.submit_all(*jobs)
        harness.let_go()
        assert sinks[0].result().handle == done.handle
        assert sinks[1].result().replayed
        assert isinstance(sinks[2].error(), Draining)
        assert isinstance(sinks[3].error(), Draining)


def test_dead_creations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that ended first is forgotten first; live ones are never."""
    monkeypatch.setattr(creations, "MAX_DEAD", 3)
    with Harness() as harness:
        alive = harness.submit(append(None, 1, request_id="alive")).result().handle
        for index in range(5):
            handle = harness.submit(append(None, 2, request_id=str(index))).result().handle
            harness.release(handle)
        assert len(harness.engine._lanes.creations) == 4
        assert harness.submit(append(None, 1, request_id="alive")).result().handle == alive
        assert isinstance(harness.submit(append(None, 2, request_id="2")).error(), HandleUnknown)
        assert not harness.submit(append(None, 2, request_id="1")).result().replayed


def test_only_what_is_answered_again_counts_as_a_replay(harness: Harness) -> None:
    """A repeat that is refused, because all it made has ended or no seed is known, is counted as refused."""
    first = harness.prefill(1, 2)
    harness.release(*fork(harness, first.handle).handles)
    harness.submit(fork_job(first.handle)).error()
    harness.decode(harness.decode(first.handle, 3, output=UNSEEDED).handle, 4)
    assert harness.submit(append(first.handle, 3, output=UNSEEDED)).error().REASON == "INVALID_FIELD"
    assert harness.engine.counters.replays == 0
    harness.decode(first.handle, 3)
    assert harness.engine.counters.replays == 1


def test_who_makes_and_ends_thousands_frees_nobody_elses_request_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered is bounded, and the one who has most of it pays for that."""
    monkeypatch.setattr(creations, "MAX_DEAD", 3)
    with Harness() as harness:
        first = harness.submit(append(None, 1, 2, request_id="r")).result()
        harness.release(first.handle)
        for number in range(6):
            job = append(None, 1, 2, request_id=f"n{number}", principal="flood")
            made = harness.submit(job).result()
            harness.submit(host_calls.release("flood", (made.handle,))).outcome()
        assert isinstance(harness.submit(append(None, 1, 2, request_id="r")).error(), HandleUnknown)
        assert len(harness.engine._lanes.creations) == 3
