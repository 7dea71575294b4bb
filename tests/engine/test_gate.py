"""The gate: what it lets in, what it refuses and why, and that nothing stays counted."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping

import pytest

from ferrule_server.engine import host_calls
from ferrule_server.engine.bridge.gate import MAX_HOST_CALLS, Gate
from ferrule_server.engine.jobs import (
    AppendJob,
    AppendResult,
    Entry,
    ForkJob,
    ForwardFrame,
    GenerateFrame,
    Job,
    Outcome,
    OutputRequest,
    StepTiming,
)
from ferrule_server.errors import Cancelled, FerruleError, HandleStale, QueueFull, QuotaExceeded
from ferrule_server.kv.handle import Handle
from ferrule_server.quotas import UNLIMITED, QuotaLimits
from tests.engine.harness import NOTHING, Harness, Pending, append
from tests.engine.streams import forward, generate, start

HANDLE = Handle("test.e1.x", 4, bytes(16))
OTHER = Handle("test.e1.y", 4, bytes(16))
SINK = Pending()


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


def prompt(num_tokens: int, principal: str = "me") -> AppendJob:
    """A prompt for a new sequence."""
    return AppendJob(principal, (1,) * num_tokens, None, OutputRequest(None))


def decode(principal: str = "me", handle: Handle = HANDLE, num_tokens: int = 1) -> AppendJob:
    """An append to a sequence."""
    return AppendJob(principal, (1,) * num_tokens, handle, OutputRequest(None))


def gate_of(max_jobs: int = 100, limits: Mapping[str, QuotaLimits] | QuotaLimits = UNLIMITED) -> tuple[Gate, Clock]:
    """A gate with a clock of its own, and limits for everybody or by name."""
    clock = Clock()

    def limits_of(principal: str) -> QuotaLimits:
        return limits if isinstance(limits, QuotaLimits) else limits.get(principal, UNLIMITED)

    return Gate(max_jobs, limits_of, clock), clock


def try_jobs(gate: Gate, *jobs: Job[object]) -> list[FerruleError | None]:
    """Send jobs as one frame; returns the error of each, None for those let in."""
    entries: list[Entry] = [(job, SINK) for job in jobs]
    accepted, refused = gate.admit(entries)
    errors: dict[Job[object], Outcome] = {job: error for job, _, error in refused}
    assert [job for job, _ in accepted] == [job for job in jobs if job not in errors], "order is kept"
    return [errors.get(job) for job in jobs]  # type: ignore[misc]


def finish(gate: Gate, *jobs: Job[object], outcome: Outcome | None = None, rows_run: int | None = None) -> None:
    """Deliver jobs, by default after all their rows were run."""
    for job in jobs:
        if isinstance(job, AppendJob):
            job.rows_run = len(job.token_ids) if rows_run is None else rows_run
    gate.finish([(job, SINK, outcome or AppendResult(HANDLE)) for job in jobs])


def test_the_queue_holds_so_many_jobs_and_no_more() -> None:
    """Appends and forks count until they are delivered; a refused one is not counted."""
    gate, _ = gate_of(max_jobs=2)
    first, fork = decode(), ForkJob("me", OTHER, 4, 1)
    assert try_jobs(gate, first, fork) == [None, None]
    (error,) = try_jobs(gate, prompt(3))
    assert isinstance(error, QueueFull)
    assert error.retry_after_s is not None
    assert 0.0 < error.retry_after_s <= 5.0
    finish(gate, first)
    assert try_jobs(gate, prompt(3)) == [None]
    gate.check_integrity()


def test_what_frees_things_is_never_refused() -> None:
    """A full queue takes releases."""
    gate, _ = gate_of(max_jobs=1)
    assert try_jobs(gate, decode(), host_calls.release("me", (HANDLE,)), decode(handle=OTHER))[:2] == [None, None]
    assert gate.num_jobs == 1
    gate.finish([(host_calls.release("me", (HANDLE,)), SINK, AppendResult(HANDLE))])
    assert gate.num_jobs == 1


def test_one_frame_may_fill_the_whole_queue_of_a_server_of_ones_own() -> None:
    """4096 items from one principal, and not one more."""
    gate, _ = gate_of(max_jobs=4096)
    jobs = [decode(handle=Handle(f"id{i}", 1, bytes(16))) for i in range(4096)]
    assert try_jobs(gate, *jobs) == [None] * 4096
    assert isinstance(try_jobs(gate, decode())[0], QueueFull)
    finish(gate, *jobs)
    assert gate.num_jobs == 0
    gate.check_integrity()


def test_whoever_floods_leaves_room_for_others() -> None:
    """While two are about, thousands of tiny jobs of one do not shut out the other."""
    gate, _ = gate_of(max_jobs=90)
    first = decode("calm")
    assert try_jobs(gate, first) == [None]
    finish(gate, first)
    errors = try_jobs(gate, *(prompt(1, "flood") for _ in range(1000)))
    assert sum(error is None for error in errors) == 80
    assert all(isinstance(error, QueueFull) for error in errors[80:])
    assert try_jobs(gate, *(decode("calm", Handle(f"id{i}", 1, bytes(16))) for i in range(8))) == [None] * 8


def test_who_comes_to_a_full_queue_gets_in_when_it_moves() -> None:
    """A newcomer is refused once and then preferred to the one that fills the queue."""
    gate, _ = gate_of(max_jobs=10)
    jobs = [prompt(1, "flood") for _ in range(10)]
    assert try_jobs(gate, *jobs) == [None] * 10
    assert isinstance(try_jobs(gate, decode("calm"))[0], QueueFull)
    finish(gate, jobs[0])
    assert isinstance(try_jobs(gate, prompt(1, "flood"))[0], QueueFull)
    assert try_jobs(gate, decode("calm")) == [None]


def test_a_principal_that_is_alone_again_may_fill_the_queue_again() -> None:
    """Others count for a minute after they were last seen."""
    gate, clock = gate_of(max_jobs=9)
    visit = decode("calm")
    try_jobs(gate, visit)
    finish(gate, visit)
    jobs = [prompt(1, "flood") for _ in range(9)]
    assert isinstance(try_jobs(gate, *jobs)[8], QueueFull)
    clock.now += 61.0
    assert try_jobs(gate, prompt(1, "flood")) == [None]


ROWS, RATE = "QUEUED_ROWS", "PREFILL_RATE"


@pytest.mark.parametrize(
    ("limits", "first", "refused", "quota", "figures", "is_worth_waiting"),
    [
        (QuotaLimits(queued_rows=10), prompt(8), prompt(3), ROWS, ("8", "10", "3"), True),
        (QuotaLimits(queued_rows=10), None, prompt(11), ROWS, ("0", "10", "11"), False),
        (QuotaLimits(queued_rows=1), decode(num_tokens=0), decode(handle=OTHER), ROWS, ("1", "1", "1"), True),
        (QuotaLimits(queued_rows=6), None, generate(None, 1, 2, 3, num_branches=4), ROWS, ("0", "6", "7"), False),
        (QuotaLimits(queued_rows=0), None, generate(HANDLE), ROWS, ("0", "0", "1"), False),
        (QuotaLimits(queued_rows=8), None, forward(*range(9)), ROWS, ("0", "8", "9"), False),
        (QuotaLimits(prefill_tokens_per_s=0), None, prompt(1), RATE, ("0", "0", ""), False),
    ],
    ids=["rows", "never fits", "query", "branches", "loop", "forward", "nothing"],
)
def test_a_quota_refuses_with_its_figures_and_only_the_job_that_is_too_much(
    limits: QuotaLimits,
    first: Job[object] | None,
    refused: Job[object],
    quota: str,
    figures: tuple[str, str, str],
    *,
    is_worth_waiting: bool,
) -> None:
    """Of one principal: another one is let in, and the same job where the quota is as large as it needs."""
    gate, _ = gate_of(limits={"me": limits})
    assert first is None or try_jobs(gate, first) == [None]
    error, other = try_jobs(gate, refused, prompt(2000, "other"))
    assert isinstance(error, QuotaExceeded)
    assert (error.reason, other) == (f"QUOTA_{quota}", None)
    assert tuple(error.metadata.get(name, "") for name in ("used", "limit", "needed")) == figures
    assert (error.retry_after_s is not None) == is_worth_waiting
    if first is not None:
        finish(gate, first)
        assert try_jobs(gate, refused) == [None]
    if quota == ROWS:
        assert try_jobs(gate_of(limits=QuotaLimits(queued_rows=int(figures[2])))[0], refused) == [None]
    gate.check_integrity()


def test_a_prompt_longer_than_the_burst_is_taken_and_the_next_one_waits() -> None:
    """The bucket may be overdrawn once; RetryInfo says when it is not any more."""
    gate, clock = gate_of(limits=QuotaLimits(prefill_tokens_per_s=100))
    assert try_jobs(gate, prompt(1000)) == [None]
    (error,) = try_jobs(gate, prompt(1))
    assert isinstance(error, QuotaExceeded)
    assert error.reason == "QUOTA_PREFILL_RATE"
    assert error.metadata == {"quota": "PREFILL_RATE", "used": "1000", "limit": "100"}
    assert error.retry_after_s is not None
    assert 9.0 <= error.retry_after_s <= 9.1
    clock.now += 8.9
    assert isinstance(try_jobs(gate, prompt(1))[0], QuotaExceeded)
    clock.now += error.retry_after_s - 8.9
    assert try_jobs(gate, prompt(1)) == [None]


def test_over_time_the_rate_is_kept_whatever_the_prompts() -> None:
    """100 s of asking as often as allowed give 100 s of tokens, one burst and one prompt at most."""
    rng = random.Random(3)
    gate, clock = gate_of(limits=QuotaLimits(prefill_tokens_per_s=100))
    taken = 0
    for _ in range(10_000):
        job = prompt(rng.randint(1, 300))
        if try_jobs(gate, job) == [None]:
            taken += len(job.token_ids)
            finish(gate, job)
        clock.now += 0.01
    assert 100 * 100 * 0.98 <= taken <= 100 * 100 + 100 + 300


def test_decodes_do_not_count_for_the_prefill_rate() -> None:
    """One token behind a handle is a decode; more, or a new sequence, is not."""
    gate, _ = gate_of(limits=QuotaLimits(prefill_tokens_per_s=2))
    assert try_jobs(gate, prompt(5)) == [None]
    assert try_jobs(gate, decode()) == [None]
    assert isinstance(try_jobs(gate, decode(num_tokens=2))[0], QuotaExceeded)
    assert isinstance(try_jobs(gate, prompt(1))[0], QuotaExceeded)


def test_what_was_not_run_is_given_back() -> None:
    """Errors before a step, replays from the record and joins cost nothing; half a prompt costs half."""
    outcomes: list[Outcome] = [HandleStale("h", 1, 2), AppendResult(HANDLE, replayed=True), Cancelled()]
    for outcome in outcomes:
        gate, _ = gate_of(limits=QuotaLimits(prefill_tokens_per_s=100))
        job = prompt(100)
        assert try_jobs(gate, job) == [None]
        assert isinstance(try_jobs(gate, prompt(1))[0], QuotaExceeded)
        finish(gate, job, outcome=outcome, rows_run=0)
        assert try_jobs(gate, prompt(1)) == [None], outcome
    gate, _ = gate_of(limits=QuotaLimits(prefill_tokens_per_s=100))
    job = prompt(300)
    try_jobs(gate, job)
    finish(gate, job, outcome=Cancelled(), rows_run=150)
    (error,) = try_jobs(gate, prompt(1))
    assert isinstance(error, QuotaExceeded)
    assert error.metadata["used"] == "150"


def test_giving_back_never_makes_a_bucket_fuller_than_full() -> None:
    """A long job that is cancelled after its debt was worked off leaves no credit."""
    gate, clock = gate_of(limits=QuotaLimits(prefill_tokens_per_s=100))
    job = prompt(500)
    try_jobs(gate, job)
    clock.now += 60.0
    finish(gate, job, outcome=Cancelled(), rows_run=0)
    assert try_jobs(gate, prompt(99), prompt(1)) == [None, None]
    assert isinstance(try_jobs(gate, prompt(1))[0], QuotaExceeded)


def test_a_refused_job_costs_nothing_of_any_quota() -> None:
    """All bounds are looked at before any is charged."""
    gate, _ = gate_of(max_jobs=1, limits=QuotaLimits(queued_rows=5, prefill_tokens_per_s=5))
    first = prompt(1)
    assert try_jobs(gate, first) == [None]
    for _ in range(50):
        assert try_jobs(gate, prompt(5))[0] is not None
    finish(gate, first)
    assert try_jobs(gate, prompt(4)) == [None]
    gate.check_integrity()


def test_a_job_does_not_overtake_a_refused_one_on_its_sequence() -> None:
    """Items of a frame on one sequence are judged in order: behind a refused one all are refused."""
    gate, _ = gate_of(limits=QuotaLimits(queued_rows=5))
    large, small, elsewhere = decode(num_tokens=6), decode(), decode(handle=OTHER)
    errors = try_jobs(gate, large, small, elsewhere)
    assert errors[0] is errors[1] is not None
    assert errors[2] is None
    assert gate.refused == {"QUOTA_QUEUED_ROWS": 2}
    assert try_jobs(gate, small) == [None], "only within the frame"


def test_limits_that_change_under_way_leave_the_counts_right() -> None:
    """The token file is read again while jobs run."""
    limits = {"me": QuotaLimits(queued_rows=10, prefill_tokens_per_s=10)}
    gate, _ = gate_of(limits=limits)
    first, second = prompt(10), prompt(10)
    assert try_jobs(gate, first) == [None]
    limits["me"] = UNLIMITED
    assert try_jobs(gate, second) == [None]
    limits["me"] = QuotaLimits(queued_rows=15, prefill_tokens_per_s=10)
    assert isinstance(try_jobs(gate, prompt(1))[0], QuotaExceeded)
    finish(gate, first, second, rows_run=0)
    assert try_jobs(gate, prompt(1)) == [None]
    gate.check_integrity()


def test_principals_that_come_and_go_are_forgotten_unless_they_owe() -> None:
    """Nobody escapes a debt by waiting for others to come, and memory is bounded."""
    gate, clock = gate_of(limits=QuotaLimits(prefill_tokens_per_s=1))
    debtor = prompt(1000, "debtor")
    try_jobs(gate, debtor)
    finish(gate, debtor)
    for i in range(10_000):
        job = decode(f"principal {i}")
        try_jobs(gate, job)
        finish(gate, job)
        clock.now += 0.01
    assert len(gate._jobs.held) + len(gate._host_calls.held) + len(gate._prefills.buckets) <= 200
    assert isinstance(try_jobs(gate, prompt(1, "debtor"))[0], QuotaExceeded)
    gate.check_integrity()


def test_retry_after_follows_how_fast_the_queue_moves() -> None:
    """A queue that is worked off in half a second asks for half a second, and never for less than a moment."""
    gate, clock = gate_of(max_jobs=100)
    waiting = [prompt(1) for _ in range(100)]
    try_jobs(gate, *waiting)
    for _ in range(500):
        clock.now += 0.01
        done, waiting = waiting[:2], waiting[2:]
        finish(gate, *done)
        new = [prompt(1), prompt(1)]
        try_jobs(gate, *new)
        waiting += new
    (error,) = try_jobs(gate, prompt(1))
    assert isinstance(error, QueueFull)
    assert error.retry_after_s is not None
    assert 0.4 <= error.retry_after_s <= 0.6


def test_many_threads_leave_nothing_behind() -> None:
    """Submitting and delivering on several threads at once keeps the counts."""
    gate = Gate(50, lambda _: QuotaLimits(queued_rows=40, prefill_tokens_per_s=10**9))

    def work(index: int) -> None:
        rng = random.Random(index)
        for _ in range(300):
            jobs: list[Job[object]] = [prompt(rng.randint(1, 9), f"p{rng.randint(0, 3)}") for _ in range(5)]
            accepted, _ = gate.admit([(job, SINK) for job in jobs])
            gate.finish([(job, sink, Cancelled()) for job, sink in accepted])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert gate.num_jobs == 0
    gate.check_integrity()


def test_a_refusal_does_not_wait_for_the_step_that_runs() -> None:
    """The engine thread is in a step; the refusal is delivered all the same."""
    with Harness(max_waiting_jobs=1) as harness:
        running = harness.hold(append(None, 1, 2))
        assert isinstance(harness.submit(append(None, 3)).error(), QueueFull)
        assert harness.engine.snapshot().refused == {"QUEUE_FULL": 1}
        harness.let_go()
        running.result()
        harness.submit(append(None, 3)).result()


def test_an_engine_that_has_answered_everything_has_an_empty_gate() -> None:
    """Results, errors, cancelled and released jobs all give their places back."""
    with Harness() as harness:
        first = harness.prefill(1, 2, 3)
        harness.submit(append(None, *([1] * 10_000))).error()
        stale = append(first.handle, 9)
        harness.decode(first.handle, 4)
        harness.submit(stale).error()
        long = harness.hold(append(None, *([5] * 200), output=NOTHING))
        cancelled = append(None, 6)
        cancelled.is_cancelled = True
        late = harness.submit(cancelled)
        harness.let_go()
        long.result()
        late.error()
        harness.release(first.handle)
        gate = harness.engine._parts.gate
    assert gate.num_jobs == 0
    gate.check_integrity()


def test_rows_that_ran_are_noted_on_the_job() -> None:
    """What the gate gives back is what the engine did not spend a step on."""
    with Harness(max_step_rows=8) as harness:
        job = append(None, *([1] * 20))
        handle = harness.submit(job).result().handle
        assert job.rows_run == 20
        first, again = append(handle, 2, 3), append(handle, 2, 3)
        harness.submit(first).result()
        assert harness.submit(again).result().replayed
        assert (first.rows_run, again.rows_run) == (2, 0)


def test_a_stream_holds_its_place_until_its_last_frame() -> None:
    """Frames before it change nothing; an error ends it as well."""
    gate, _ = gate_of(max_jobs=2, limits=QuotaLimits(queued_rows=16))
    for more, last in (
        (GenerateFrame((), StepTiming()), GenerateFrame((), StepTiming(), is_last=True)),
        (ForwardFrame(0, (), StepTiming()), ForwardFrame(0, (), StepTiming(), is_last=True)),
        (GenerateFrame((), StepTiming()), Cancelled()),
    ):
        jobs: list[Job[object]] = [generate(HANDLE, 1, 2, num_branches=3), forward(1, 2, 3)]
        assert try_jobs(gate, *jobs) == [None, None]
        finish(gate, jobs[0], outcome=more)
        assert gate.num_jobs == 2
        assert isinstance(try_jobs(gate, decode(handle=OTHER))[0], QueueFull)
        finish(gate, *jobs, outcome=last)
        assert gate.num_jobs == 0
        gate.check_integrity()


def test_a_generate_that_has_begun_is_a_row_for_each_branch() -> None:
    """A chat that goes on for long must not hold the rows of its prompt, nor what the rate charged for cached ones."""
    gate, _ = gate_of(limits=QuotaLimits(queued_rows=20, prefill_tokens_per_s=8))
    first = generate(None, *range(16), num_branches=3)
    assert try_jobs(gate, first) == [None]
    assert isinstance(try_jobs(gate, decode(handle=OTHER), forward(1, 2))[1], QuotaExceeded)
    finish(gate, first, outcome=GenerateFrame((), StepTiming()))  # all 16 were found in the prefix cache
    finish(gate, first, outcome=GenerateFrame((), StepTiming()))
    second = generate(None, *range(13), num_branches=3)
    assert try_jobs(gate, second) == [None]
    for job in (first, second):
        finish(gate, job, outcome=GenerateFrame((), StepTiming(), is_last=True))
    gate.check_integrity()
    assert gate.num_jobs == 1


def test_prompts_of_streams_count_for_the_prefill_rate_and_what_was_not_run_is_given_back() -> None:
    """One token behind a handle is a decode, whoever appends it."""
    for job in (generate(None, *range(60)), generate(HANDLE, *range(60)), forward(*range(60))):
        gate, _ = gate_of(limits=QuotaLimits(prefill_tokens_per_s=50))
        assert try_jobs(gate, job) == [None]
        assert isinstance(try_jobs(gate, prompt(1))[0], QuotaExceeded)
        job.rows_run = 20
        finish(gate, job, outcome=Cancelled())
        assert try_jobs(gate, prompt(1)) == [None]
        gate.check_integrity()
    gate, _ = gate_of(limits=QuotaLimits(prefill_tokens_per_s=0))
    assert try_jobs(gate, generate(HANDLE, 1), generate(OTHER)) == [None, None]


def test_a_prompt_that_a_generate_ran_is_not_given_back_with_its_first_token() -> None:
    """The next one waits, as after a prefill."""
    with Harness(limits_of=lambda _: QuotaLimits(prefill_tokens_per_s=1)) as harness:
        first = start(harness, generate(None, *([1] * 100), max_tokens=3))
        assert first.refusal() is None
        second = start(harness, generate(None, *([2] * 100), max_tokens=3))
        assert isinstance(second.refusal(), QuotaExceeded)


def test_a_stream_behind_a_refused_job_on_its_sequence_is_refused_too() -> None:
    """It would draw from other tokens than it was sent for."""
    gate, _ = gate_of(limits=QuotaLimits(queued_rows=4))
    errors = try_jobs(gate, decode(num_tokens=5), generate(HANDLE, 1), forward(1), generate(OTHER, 1))
    assert [error is None for error in errors] == [False, False, True, True]


def test_host_jobs_have_places_of_their_own_for_each_principal() -> None:
    """A flood of them is QUEUE_FULL; a full queue of appends keeps nobody from them, nor does another's flood."""
    gate, _ = gate_of(max_jobs=1)
    assert try_jobs(gate, decode()) == [None]
    renewals = [host_calls.keep_alive("alice", (), None) for _ in range(MAX_HOST_CALLS)]
    assert try_jobs(gate, *renewals) == [None] * MAX_HOST_CALLS
    (full,) = try_jobs(gate, host_calls.release("alice", ()))
    assert isinstance(full, QueueFull)
    assert try_jobs(gate, host_calls.release("bob", ())) == [None]
    gate.finish([(renewals[0], SINK, ())])
    assert try_jobs(gate, host_calls.release("alice", ())) == [None]
    gate.check_integrity()
