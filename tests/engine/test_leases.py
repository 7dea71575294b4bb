"""Leases while work is in flight: what renews, what does not, and that everything comes back in time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from ferrule_server.engine import engine as engine_module
from ferrule_server.engine import host_calls
from ferrule_server.engine.jobs import (
    AppendJob,
    ForkJob,
    Job,
    Lease,
    OutputRequest,
    SlotsWanted,
    TruncateJob,
)
from ferrule_server.errors import FerruleError, HandleUnknown
from ferrule_server.executor.base import OutputSpec, StepBatch, StepResult
from ferrule_server.kv.handle import Handle, StalePolicy
from ferrule_server.kv.registry import TOMBSTONE_S
from ferrule_server.kv.sequence_store import DEFAULT_TTL_S
from ferrule_server.quotas import MIN_TTL_S
from tests.engine.harness import Harness, Pending, append

ALL_LOGITS = OutputRequest(OutputSpec(full_logits=True), all_positions=True)
ALL_TOKENS = OutputRequest(OutputSpec(greedy=True), all_positions=True)


class LeaseHarness(Harness):
    """An engine whose leases are told on a clock that stands still."""

    def __init__(self, max_step_rows: int = 512) -> None:
        super().__init__(max_step_rows=max_step_rows)
        self.now_s = 1000.0
        self.clock = lambda: self.now_s

    def __enter__(self) -> LeaseHarness:
        super().__enter__()
        return self

    def left_s(self, handle: Handle) -> float:
        """Return what is left of the lease."""
        return self.store.resolve(handle, "me").expires_at - self.now_s

    def look(self) -> None:
        """Have the engine go round once."""
        self.submit(host_calls.list_caches("me")).outcome()

    def is_empty(self) -> bool:
        """Whether everything is back by now; the engine looks at leases twenty times a second."""
        deadline = time.monotonic() + 60
        while self.store.pool.num_used and time.monotonic() < deadline:
            self.look()
            time.sleep(0.01)
        return not self.store.pool.num_used and not len(self.store.registry)


@pytest.fixture
def harness() -> Iterator[LeaseHarness]:
    """A running engine."""
    with LeaseHarness() as harness:
        yield harness


OPERATIONS: dict[str, Callable[[Handle, Handle], Job[object]]] = {
    "append": lambda tip, _: append(tip, 9),
    "query": lambda tip, _: append(tip),
    "query without rows": lambda tip, _: append(tip, output=OutputRequest(None)),
    "replay from the record": lambda _, behind: append(behind, 4),
    "replay without rows": lambda _, behind: append(behind, 4, output=OutputRequest(None)),
    "recomputed replay": lambda _, behind: append(behind, 4, output=ALL_LOGITS),
    "rewind": lambda _, behind: append(behind, 9, on_stale=StalePolicy.REWIND),
    "branch": lambda _, behind: append(behind, 9, on_stale=StalePolicy.FORK),
    "fork": lambda tip, _: ForkJob("me", tip, 2, 1),
    "truncate": lambda tip, _: TruncateJob("me", tip, 2),
    "reserve": lambda tip, _: host_calls.reserve("me", (SlotsWanted(tip, 20),)),
    "keep-alive": lambda tip, _: host_calls.keep_alive("me", (tip,)),
    "info": lambda tip, _: host_calls.describe("me", tip),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_successful_operation_renews(harness: LeaseHarness, operation: str) -> None:
    """From the moment it is done on, for as long as the lease was."""
    behind = harness.prefill(1, 2, 3).handle
    tip = harness.decode(behind, 4).handle
    harness.now_s += 10.0
    assert harness.left_s(tip) == DEFAULT_TTL_S - 10.0
    outcome = harness.submit(OPERATIONS[operation](tip, behind)).outcome()
    assert not isinstance(outcome, FerruleError)
    assert harness.left_s(tip) == DEFAULT_TTL_S


def test_a_request_id_is_remembered_for_ten_minutes_after_the_end_and_no_longer(harness: LeaseHarness) -> None:
    """Also when nothing else ends meanwhile."""

    def create() -> Job[object]:
        return append(None, 1, 2, request_id="once")

    made = harness.submit(create()).result().handle
    harness.release(made)
    harness.now_s += TOMBSTONE_S - 0.1
    assert isinstance(harness.submit(create()).error(), HandleUnknown)
    harness.now_s += 0.1
    assert harness.submit(create()).result().handle.cache_id != made.cache_id


def test_a_late_duplicate_does_not_shorten_a_lease(harness: LeaseHarness) -> None:
    """It asks for the lease of then; a keep-alive has asked for more since."""
    behind = harness.prefill(1, 2, 3).handle
    job, again = append(behind, 4), append(behind, 4)
    job.ttl_s = again.ttl_s = MIN_TTL_S
    tip = harness.submit(job).result().handle
    assert harness.left_s(tip) == MIN_TTL_S
    harness.submit(host_calls.keep_alive("me", (tip,), 300.0)).outcome()
    result = harness.submit(again).result()
    assert (result.replayed, result.ttl_s, harness.left_s(tip)) == (True, 300.0, 300.0)


def test_what_is_refused_does_not_renew(harness: LeaseHarness) -> None:
    """Nor does a list: it names no sequence in particular."""
    behind = harness.prefill(1, 2, 3).handle
    tip = harness.decode(behind, 4).handle
    harness.now_s += 10.0
    harness.executor.bad_token_ids = {9}
    for job in (
        append(behind, 7),
        append(tip, *[1] * 300),
        append(tip, 9),
        TruncateJob("me", tip, 0),
        ForkJob("me", Handle(tip.cache_id, 9, tip.lineage), 2, 1),
        host_calls.reserve("me", (SlotsWanted(tip, 300),)),
        host_calls.keep_alive("you", (tip,)),
    ):
        harness.submit(job).outcome()
    harness.look()
    assert harness.left_s(tip) == DEFAULT_TTL_S - 10.0


def _start(harness: LeaseHarness) -> tuple[Handle, AppendJob, Pending]:
    """Put an append of several steps in flight, stop it in its first, and let its lease end meanwhile."""
    made = harness.submit(_short(append(None, 1, 2, 3))).result()
    job = append(made.handle, *[4] * 20, output=ALL_TOKENS)
    pending = harness.hold(job)
    harness.now_s += MIN_TTL_S + 1.0
    return made.handle, job, pending


def _short(job: AppendJob) -> AppendJob:
    job.ttl_s = MIN_TTL_S
    return job


def _step_fails(harness: LeaseHarness, _: AppendJob, handle: Handle) -> list[Pending]:
    harness.executor.errors = dict.fromkeys(range(1, 20), RuntimeError("no"))
    return []


def _row_is_not_finite(harness: LeaseHarness, _: AppendJob, handle: Handle) -> list[Pending]:
    harness.executor.bad_token_ids = {4}
    return []


def _cancelled(harness: LeaseHarness, job: AppendJob, handle: Handle) -> list[Pending]:
    job.is_cancelled = True
    return []


def _joined_and_cancelled(harness: LeaseHarness, job: AppendJob, handle: Handle) -> list[Pending]:
    twin = append(job.handle, *job.token_ids, output=job.output)
    pending = harness.submit(twin)
    job.is_cancelled = twin.is_cancelled = True
    return [pending]


def _waiting_ones_fail_too(harness: LeaseHarness, job: AppendJob, handle: Handle) -> list[Pending]:
    gone, cancelled = Handle(handle.cache_id, 9, b"x" * 16), append(handle, 5)
    stale, fork, truncate = append(gone, 1), ForkJob("me", gone, 1, 1), TruncateJob("me", handle, 0)
    pending = harness.submit_all(stale, cancelled, truncate, fork, append(handle, *[6] * 300))
    job.is_cancelled = cancelled.is_cancelled = True
    return pending


@pytest.mark.parametrize(
    "end", [_step_fails, _row_is_not_finite, _cancelled, _joined_and_cancelled, _waiting_ones_fail_too]
)
def test_work_that_ends_without_success_holds_nothing_any_longer(
    end: Callable[[LeaseHarness, AppendJob, Handle], list[Pending]],
) -> None:
    """The lease ended while a slow step ran: a second after the work is over at the latest everything is back."""
    with LeaseHarness(max_step_rows=4) as harness:
        handle, job, pending = _start(harness)
        others = end(harness, job, handle)
        harness.let_go()
        for each in (pending, *others):
            each.error()
        harness.now_s += 1.0
        assert harness.is_empty()
        assert harness.submit(append(handle, 1)).error().REASON == "HANDLE_EXPIRED"


def test_work_in_flight_is_not_cut_by_the_end_of_its_lease() -> None:
    """What came in time is done, and its success renews; a neighbour that nothing pins goes meanwhile."""
    with LeaseHarness(max_step_rows=4) as harness:
        neighbour = harness.submit(_short(append(None, 5, 6, 7))).result().handle
        handle, _, pending = _start(harness)
        waiting = harness.submit(append(handle, 9, on_stale=StalePolicy.REWIND))
        harness.let_go()
        pending.result()
        tip = waiting.result().handle
        assert harness.left_s(tip) == MIN_TTL_S
        assert harness.submit(append(neighbour, 1)).error().REASON == "HANDLE_EXPIRED"
        harness.now_s += MIN_TTL_S
        assert harness.is_empty()


def test_what_came_in_time_is_taken_before_leases_are_looked_at(harness: LeaseHarness) -> None:
    """Two requests come while a long step runs, then a lease ends: the second one is as much in time as the first."""
    kept, stepped = harness.prefill(1, 2, 3).handle, harness.prefill(4, 5, 6).handle
    step = harness.hold(append(stepped, 7))
    harness.now_s += DEFAULT_TTL_S - 0.1
    jobs = (host_calls.describe("me", stepped), host_calls.keep_alive("me", (kept,)))
    _, keep_alive = (harness.submit(job) for job in jobs)
    harness.now_s += 0.2
    for job in jobs:  # the clock of leases jumped, that of arrivals did not
        job.submitted_ns -= 200_000_000
    harness.engine._next_expiry_check = 0.0
    harness.let_go()
    step.result()
    outcome = keep_alive.outcome()
    assert isinstance(outcome, tuple)
    assert isinstance(outcome[0], Lease)


def test_a_flood_of_host_jobs_holds_up_neither_steps_nor_leases(
    harness: LeaseHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in the inbox is taken for a while only; what is left of it was sent later than what is judged by then."""
    monkeypatch.setattr(engine_module, "_TAKE_NS", 0)
    prompt = harness.hold(append(None, 1, 2, 3))
    flood = [harness.submit(host_calls.list_caches("me")) for _ in range(20)]
    decode = harness.submit(append(None, 4))
    more = [harness.submit(host_calls.list_caches("me")) for _ in range(20)]
    num_lists_at_step: list[int] = []
    run = harness.executor.run

    def counting_run(batch: StepBatch) -> StepResult:
        num_lists_at_step.append(sum(each.is_done for each in more))
        return run(batch)

    harness.executor.run = counting_run  # type: ignore[method-assign]
    harness.let_go()
    for each in (prompt, decode, *flood, *more):
        each.outcome()
    assert num_lists_at_step == [0]
