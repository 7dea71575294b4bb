"""Breaking on purpose: at each place, with each action, what happened and what did not is clear and nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ferrule_server.engine import host_calls
from ferrule_server.engine.faults import failpoints as module
from ferrule_server.engine.faults.failpoints import PLACES, FailpointHit, Failpoints, Place, fail
from ferrule_server.engine.jobs import (
    AppendResult,
    CacheInfo,
    ForkJob,
    ForkResult,
    OutputRequest,
    TruncateJob,
    TruncateResult,
)
from ferrule_server.errors import Cancelled, EngineFault, FerruleError
from ferrule_server.executor.base import OutputSpec, SampleSpec, StepResult
from ferrule_server.kv.handle import Handle
from tests.engine.harness import Harness, append
from tests.fakes import fake_next_token

ROOT = Path(__file__).parents[2]
UNSEEDED = OutputRequest(OutputSpec(sample=SampleSpec()), is_seeded=False)


def arm(harness: Harness, text: str) -> None:
    """Arm more while the engine stands still; hits before count."""
    failpoints = harness.engine._setup.failpoints
    assert isinstance(failpoints, Failpoints)
    for place, armed in Failpoints.parse(text)._armed.items():
        for act, nth in armed:
            failpoints.arm(place, act, None if nth is None else nth + failpoints.num_hits[place])


def disarm(harness: Harness) -> None:
    """Let everything pass again."""
    assert isinstance(harness.engine._setup.failpoints, Failpoints)
    harness.engine._setup.failpoints._armed.clear()


def breakable(max_step_rows: int = 512) -> Harness:
    """A harness with failpoints, none armed yet."""
    return Harness(failpoints=Failpoints(), max_step_rows=max_step_rows)


def length_of(harness: Harness, handle: Handle) -> int:
    """Where the tip is."""
    info = harness.answer(CacheInfo, host_calls.describe("me", handle))
    return info.length


def exercise(harness: Harness) -> list[str]:
    """Pass every place: a prefill, a fork, two appends that copy a shared block, a release; returns what failed."""
    failed: list[str] = []
    first = harness.submit(append(None, 1, 2, 3, request_id="p")).outcome()
    while isinstance(first, FerruleError):
        failed.append(first.REASON)
        first = harness.submit(append(None, 1, 2, 3, request_id="p")).outcome()
    assert isinstance(first, AppendResult)
    fork = ForkJob("me", first.handle, 3, 2, request_id="f")
    forked = harness.submit(fork).outcome()
    while isinstance(forked, FerruleError):
        failed.append(forked.REASON)
        forked = harness.submit(ForkJob("me", first.handle, 3, 2, request_id="f")).outcome()
    assert isinstance(forked, ForkResult)
    todo: list[tuple[Handle, int]] = [(forked.handles[0], 4), (forked.handles[1], 5)]
    while todo:
        sinks = harness.submit_all(*(append(handle, token) for handle, token in todo))
        left = []
        for (handle, token), sink in zip(todo, sinks, strict=True):
            outcome = sink.outcome()
            if isinstance(outcome, FerruleError):
                failed.append(outcome.REASON)
                left.append((handle, token))
            else:
                assert isinstance(outcome, AppendResult)
                assert outcome.rows[0].token == fake_next_token((1, 2, 3, token), 32)
        todo = left
    assert harness.engine.snapshot().num_sequences == 3
    release = harness.release(first.handle, *forked.handles)
    while isinstance(release, FerruleError):
        failed.append(release.REASON)
        release = harness.release(first.handle, *forked.handles)
    snapshot = harness.engine.snapshot()
    assert (snapshot.num_sequences, snapshot.free_blocks) == (0, snapshot.total_blocks)
    return failed


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("action", ["error@1", "error@2", "error@3", "sleep(5)", "sleep(5)@2"])
def test_after_any_failure_a_retry_gives_the_answer_and_nothing_is_lost(place: Place, action: str) -> None:
    """Every place, every action: each retry ends well, nothing is made or appended twice, every block comes back."""
    with breakable() as harness:
        arm(harness, f"{place}={action}")
        failed = exercise(harness)
        assert set(failed) <= {"ENGINE_FAULT"}
        if action.startswith("sleep"):
            assert not failed
        hits = harness.engine._setup.failpoints
        assert isinstance(hits, Failpoints)
        assert hits.num_hits[place] >= 1


def test_exit_ends_the_process_at_once() -> None:
    """As if killed: 137, and nothing runs afterwards."""
    script = (
        "from ferrule_server.engine.faults.failpoints import Failpoints\n"
        "from tests.engine.harness import Harness\n"
        "from tests.engine.test_failpoints import exercise\n"
        "harness = Harness(failpoints=Failpoints.parse('during_copy=exit'))\n"
        "harness.engine.start()\n"
        "exercise(harness)\n"
        "print('alive')\n"
    )
    roots = [ROOT, ROOT / "server", ROOT / "protos"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, roots))}
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (module.EXIT_CODE, ""), done.stderr


def test_cancelled_before_its_step_is_chosen_an_append_never_happened() -> None:
    """The tip is where it was, and the tokens are appended by the next who sends them."""
    with breakable() as harness:
        first = harness.prefill(1, 2, 3).handle
        job = append(first, 4)
        _call_once(harness, "before_schedule", lambda: setattr(job, "is_cancelled", True))
        assert isinstance(harness.submit(job).error(), Cancelled)
        assert length_of(harness, first) == 3
        assert not harness.decode(first, 4).replayed


@pytest.mark.parametrize("place", ["after_schedule", "during_copy", "after_commit"])
def test_cancelled_after_its_step_is_chosen_an_append_is_committed(place: Place) -> None:
    """Too late: it is appended, and whoever sends it again gets the answer, the drawn token too."""
    with breakable() as harness:
        first = harness.prefill(1, 2, 3).handle
        harness.submit(ForkJob("me", first, 3, 1)).outcome()  # the block is shared, so the append copies it
        job = append(first, 4, output=UNSEEDED)
        _call_once(harness, place, lambda: setattr(job, "is_cancelled", True))
        answer = harness.submit(job).result()
        assert length_of(harness, first) == 4
        again = harness.decode(first, 4, output=UNSEEDED)
        assert again.replayed
        assert (again.rows, again.seed) == (answer.rows, answer.seed)


def test_a_reply_lost_after_the_commit_is_replayed() -> None:
    """ENGINE_FAULT instead of the answer: the append is there, its neighbours are answered, a retry gets it."""
    with breakable() as harness:
        one, two = harness.prefill(1, 2).handle, harness.prefill(3, 4).handle
        num_steps = len(harness.executor.batches)
        arm(harness, "after_commit=error@1")
        lost, joined, good = harness.submit_all(
            append(one, 5, output=UNSEEDED), append(one, 5, output=UNSEEDED), append(two, 6)
        )
        assert isinstance(lost.error(), EngineFault)
        assert isinstance(joined.error(), EngineFault)
        assert not good.result().replayed
        assert length_of(harness, one) == 3
        again = harness.decode(one, 5, output=UNSEEDED)
        assert again.replayed
        assert not again.recomputed
        assert again.seed is not None
        assert len(harness.executor.batches) == num_steps + 1


def test_a_creation_lost_after_the_commit_is_found_by_its_id() -> None:
    """With an id a retry finds what was made; without one nothing is left of it."""
    with breakable() as harness:
        arm(harness, "after_commit=error@1")
        assert isinstance(harness.submit(append(None, 1, 2, request_id="r")).error(), EngineFault)
        made = harness.submit(append(None, 1, 2, request_id="r")).result()
        assert made.replayed
        arm(harness, "after_commit=error@1")
        assert isinstance(harness.submit(append(None, 1, 2)).error(), EngineFault)
        assert harness.engine.snapshot().num_sequences == 1


def test_a_truncate_lost_after_the_commit_is_answered_again() -> None:
    """Truncates are idempotent by themselves."""
    with breakable() as harness:
        handle = harness.prefill(*range(12)).handle
        arm(harness, "after_commit=error@1")
        assert isinstance(harness.submit(TruncateJob("me", handle, 5)).error(), EngineFault)
        again = harness.answer(TruncateResult, TruncateJob("me", handle, 5))
        assert (again.handle.length, again.freed_blocks) == (5, 1)


def test_a_failure_before_the_rows_are_chosen_ends_what_is_in_flight_only() -> None:
    """No step can be made: everybody in it hears so, handles stay good, whoever waits goes on."""
    with breakable(max_step_rows=4) as harness:
        one, two = harness.prefill(1, 2).handle, harness.prefill(3, 4).handle
        arm(harness, "before_schedule=error@1")
        first, second, waiting = harness.submit_all(append(one, 5), append(two, 6), append(one, 7))
        assert isinstance(first.error(), EngineFault)
        assert isinstance(second.error(), EngineFault)
        assert waiting.result().rows[0].token == fake_next_token((1, 2, 7), 32)
        assert not harness.decode(two, 6).replayed


@pytest.mark.parametrize("place", ["after_schedule", "during_copy"])
def test_a_step_that_keeps_failing_leaves_no_trace(place: Place) -> None:
    """ENGINE_FAULT for its appends; tips, shared blocks and the pool are as before."""
    with breakable() as harness:
        first = harness.prefill(*range(6)).handle
        branches = harness.answer(ForkResult, ForkJob("me", first, 6, 2))
        free_blocks = harness.engine.snapshot().free_blocks
        arm(harness, f"{place}=error")
        for sink in harness.submit_all(*(append(handle, 9) for handle in (first, *branches.handles))):
            assert isinstance(sink.error(), EngineFault)
        disarm(harness)
        assert harness.engine.snapshot().free_blocks == free_blocks
        for token, handle in enumerate((first, *branches.handles), 10):
            assert harness.decode(handle, token).rows[0].token == fake_next_token((*range(6), token), 32)


def test_a_release_that_fails_half_way_can_be_sent_again() -> None:
    """What was freed is freed, the rest lives on and is freed by the retry."""
    with breakable() as harness:
        handles = [harness.prefill(i, i + 1).handle for i in range(3)]
        arm(harness, "during_free=error@2")
        assert isinstance(harness.submit(host_calls.release("me", tuple(handles))).error(), EngineFault)
        assert harness.engine.snapshot().num_sequences == 2
        assert harness.decode(handles[1], 7).handle.length == 3
        assert harness.release(*handles) == (None, 1, 1)


def test_who_waits_for_a_sequence_hears_of_a_release_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The append in flight has ended; what waited behind it finds the sequence as it was."""
    with Harness(max_step_rows=4) as harness:
        handle = harness.prefill(1, 2).handle
        running = harness.hold(append(handle, *([3] * 12)))
        waiting = harness.submit(append(handle, 4))
        release = harness.store.release
        monkeypatch.setattr(harness.store, "release", lambda *_: fail())
        released = harness.submit(host_calls.release("me", (handle,)))
        harness.let_go()
        assert isinstance(released.error(), EngineFault)
        assert running.error().REASON == "HANDLE_UNKNOWN"
        assert waiting.result().handle.length == 3
        monkeypatch.setattr(harness.store, "release", release)


def test_leases_that_could_not_be_ended_are_ended_later() -> None:
    """A failure while freeing must not keep a sequence for ever, nor end the engine."""
    with breakable() as harness:
        now = time.monotonic()
        harness.clock = lambda: now
        harness.prefill(1, 2)
        arm(harness, "during_free=error@1")
        harness.clock = lambda: now + 61
        harness.end_leases()
        assert harness.engine.counters.expired == 1
        assert isinstance(harness.engine._setup.failpoints, Failpoints)
        assert harness.engine._setup.failpoints.num_hits["during_free"] == 2


@pytest.mark.parametrize("num_neighbours", [0, 2])
def test_a_commit_that_fails_ends_its_own_append_only(
    harness: Harness, num_neighbours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its neighbours have rows, so they are committed and not run again."""
    handles = [harness.prefill(i, i + 1).handle for i in range(1 + num_neighbours)]
    num_steps = len(harness.executor.batches)
    commit = harness.store.commit

    def failing(reservation: object, *rest: object) -> object:
        if getattr(reservation, "sequence", None) is sequence:
            raise RuntimeError("commit")
        return commit(reservation, *rest)  # type: ignore[arg-type]

    sequence = harness.store.resolve(handles[0], "me")
    monkeypatch.setattr(harness.store, "commit", failing)
    bad, *good = harness.submit_all(*(append(handle, 9) for handle in handles))
    assert isinstance(bad.error(), EngineFault)
    for index, each in enumerate(good, 1):
        assert each.result().rows[0].token == fake_next_token((index, index + 1, 9), 32)
    assert len(harness.executor.batches) == num_steps + 1
    monkeypatch.setattr(harness.store, "commit", commit)
    assert not harness.decode(handles[0], 9).replayed


def test_an_executor_that_gives_too_few_rows_is_found_out(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows must never reach the wrong append."""
    handle = harness.prefill(1, 2).handle
    run = harness.executor.run
    monkeypatch.setattr(harness.executor, "run", lambda batch: _without_rows(run(batch)))
    assert isinstance(harness.submit(append(handle, 3)).error(), EngineFault)
    monkeypatch.setattr(harness.executor, "run", run)
    assert not harness.decode(handle, 3).replayed


@pytest.mark.parametrize(
    "text",
    ["nowhere=error", "after_commit", "after_commit=crash", "after_commit=error@0", "after_commit=sleep", "=error"],
)
def test_text_that_arms_nothing_is_refused(text: str) -> None:
    """A typing error must not look like a server that never breaks."""
    with pytest.raises(ValueError, match="is not a failpoint"):
        Failpoints.parse(text)


def test_text_arms_places_and_counts_hits() -> None:
    """Several terms; ``@n`` acts at the n-th hit only."""
    slept: list[float] = []
    failpoints = Failpoints.parse(" after_commit=error@2 ; during_free=sleep(5);; after_commit=error@4;")
    failpoints.arm("during_copy", lambda: slept.append(1))
    failpoints.hit("after_commit")
    for _ in range(2):
        with pytest.raises(FailpointHit):
            failpoints.hit("after_commit")
        failpoints.hit("after_commit")
    failpoints.hit("during_free")
    failpoints.hit("during_copy")
    failpoints.hit("before_schedule")
    assert slept == [1]
    assert failpoints.num_hits["after_commit"] == 5
    with pytest.raises(FailpointHit):
        fail()


def _call_once(harness: Harness, place: Place, act: Callable[[], object]) -> None:
    """Call ``act`` at the next hit of the place."""
    failpoints = harness.engine._setup.failpoints
    assert isinstance(failpoints, Failpoints)
    failpoints.arm(place, act, failpoints.num_hits[place] + 1)


def _without_rows(result: StepResult) -> StepResult:
    return StepResult(result.rows[:-1])
