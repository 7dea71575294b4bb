"""The loops of ``ferrule bench`` on a clock of the test's own, and the figures made of their records."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import signal
import statistics
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from ferrule_cli.load import interrupts
from ferrule_cli.load.loops import Bounds, Refused, Run, Work, arrival_times, prompt_lengths
from ferrule_cli.load.records import OK, Record, Summary, percentile, quantiles_ms, summarize
from ferrule_cli.load.watch import Watch, watching


class FakeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock stands still while something can run, and else jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0

    def time(self) -> float:
        """Return the time of the fake clock."""
        return self.now

    def _run_once(self) -> None:
        timers = [one.when() for one in self._scheduled if not one.cancelled()]  # type: ignore[attr-defined]
        if not self._ready and timers:  # type: ignore[attr-defined]
            self.now = max(self.now, min(timers))
        super()._run_once()  # type: ignore[misc]


def run_of(seconds: Callable[[int], float], bounds: Bounds, work: Work | None = None) -> Run:
    """Return a run of requests that have one token after a time that depends on their number, or of ``work``."""

    async def answer(number: int, record: Record) -> None:
        await asyncio.sleep(seconds(number))
        record.note(0, asyncio.get_running_loop().time())

    return Run(work or answer, itertools.repeat(16), bounds)


def figures_of(run: Run, running: Coroutine[Any, Any, None]) -> Summary:
    """Run a loop on a fake clock, and return its figures; nothing is under way afterwards."""
    with asyncio.Runner(loop_factory=FakeLoop) as runner:
        runner.run(running)
    assert run.num_under_way == 0
    return summarize(run.records, run.begin_s, run.end_s)


# ---- the open loop --------------------------------------------------------------------------------------------------


def test_an_open_loop_begins_requests_when_they_are_due() -> None:
    """At the times drawn beforehand, however long the earlier requests take; the warm-up comes before."""
    run = run_of(lambda _: 3.0, Bounds(warm_up_s=2.0, duration_s=8.0))
    figures = figures_of(run, run.open(5.0, "seed", max_in_flight=1000))
    assert [record.intended_s for record in run.records] == [100.0 + at for at in arrival_times(5.0, 10.0, "seed")]
    assert all(record.sent_s == pytest.approx(record.intended_s) for record in run.records)
    assert {record.outcome for record in run.records} == {OK}
    assert (run.begin_s, figures.seconds) == (102.0, 8.0)
    assert figures.first_token_ms.p99 == pytest.approx(3000.0)


def test_an_open_loop_counts_the_wait_for_a_place() -> None:
    """A server that stands still for 4 s is charged for every request that was due meanwhile: none is omitted."""
    run = run_of(lambda number: 0.01 if number else 4.0, Bounds(0.0, 5.0))
    figures = figures_of(run, run.open(20.0, "seed", max_in_flight=1))
    blocked_until = run.records[0].sent_s + 4.0
    waiting = [record for record in run.records[1:] if record.intended_s < blocked_until]
    assert len(waiting) > 50
    assert all(record.sent_s >= blocked_until for record in waiting)
    assert 1000 < figures.first_token_ms.p50 < 2500
    assert figures.late_ms.p99 > 3500
    closed = run_of(lambda number: 0.01 if number else 4.0, Bounds(0.0, 5.0, max_requests=len(run.records)))
    assert figures_of(closed, closed.closed(1)).first_token_ms.p90 == pytest.approx(10.0)  # it hides the stop


def test_an_open_loop_has_no_more_under_way_than_it_may() -> None:
    """What is under way when the patience is over is cancelled, and with what found no place it is unfinished."""
    under_way: list[int] = []
    ended: list[int] = []

    async def work(number: int, _: Record) -> None:
        under_way.append(run.num_under_way)
        try:
            await asyncio.sleep(1.5)
        finally:
            await asyncio.sleep(0.01)
            ended.append(number)

    run = run_of(lambda _: 0.0, Bounds(0.0, 5.0, patience_s=1.0), work)
    figures = figures_of(run, run.open(10.0, "seed", max_in_flight=3))
    assert max(under_way) == 3
    assert len(ended) == len(under_way) == 12  # three at a time from 0 s, 1.5 s, 3 s and 4.5 s on
    assert figures.num_unfinished == len(run.records) - 9


def test_an_open_loop_keeps_no_task_for_what_waits() -> None:
    """Thousands that wait for a place are records in a queue; they begin in their order, and their wait counts."""
    num_tasks: list[int] = []

    async def work(number: int, record: Record) -> None:
        num_tasks.append(len(asyncio.all_tasks()))
        await asyncio.sleep(1.0 if number < 3 else 1e-4)
        record.note(0, asyncio.get_running_loop().time())

    run = run_of(lambda _: 0.0, Bounds(0.0, 1.0), work)
    figures = figures_of(run, run.open(10_000.0, "seed", max_in_flight=3))
    assert figures.num_ok == len(run.records) > 9000
    assert max(num_tasks) <= 3 + 2  # the workers, the arrivals, and what waits for the end
    assert [record.sent_s for record in run.records] == sorted(record.sent_s for record in run.records)
    assert 400 < figures.first_token_ms.p50 < 900
    assert figures.late_ms.p99 > 900


def test_arrivals_are_a_poisson_process_with_a_seed() -> None:
    """As many as the rate says, at times that are the same for the same seed; the gaps vary as much as their mean."""
    times = list(arrival_times(100.0, 50.0, "a"))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert 4700 < len(times) < 5300
    assert 0.9 < math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean < 1.1
    assert times == list(arrival_times(100.0, 50.0, "a")) != list(arrival_times(100.0, 50.0, "b"))


def test_prompts_do_not_depend_on_the_gaps_before_them() -> None:
    """With one seed, long prompts come after short gaps as often as after long ones: else queues would be too short."""
    times = list(arrival_times(100.0, 50.0, "seed"))
    gaps = [after - before for before, after in itertools.pairwise([0.0, *times])]
    ranks = [rank_of(values) for values in (gaps, list(itertools.islice(prompt_lengths(16, 4096, "seed"), len(gaps))))]
    assert abs(statistics.correlation(*ranks)) < 0.05


def rank_of(values: list[float] | list[int]) -> list[float]:
    """Return the rank of each value among all."""
    ranks = [0.0] * len(values)
    for rank, place in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        ranks[place] = float(rank)
    return ranks


# ---- the closed loop, and both --------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", ["closed", "open"])
def test_a_run_ends_after_so_many_requests(loop: str) -> None:
    """Those of the warm-up do not count; rates are of the time that the requests took, or of the whole duration."""
    run = run_of(lambda _: 0.5, Bounds(1.0, 1000.0, max_requests=10))
    figures = figures_of(run, run.closed(2) if loop == "closed" else run.open(2.0, "seed", max_in_flight=9))
    assert (figures.num_ok, figures.num_unfinished) == (10, 0)
    assert figures.seconds == pytest.approx(2.5) if loop == "closed" else 2.0 < figures.seconds < 20.0
    timed = run_of(lambda _: 0.5, Bounds(1.0, 4.0))
    figures = figures_of(timed, timed.closed(4))
    assert (figures.num_ok, figures.requests_per_s, figures.prompt_tokens_per_s) == (4 * 8, 8.0, 16 * 8.0)


def test_a_refused_user_pauses_as_the_server_asks() -> None:
    """Every refusal is counted, and the loop goes on."""

    async def work(number: int, _: Record) -> None:
        if number % 2 == 0:
            raise Refused("QUEUE_FULL", 0.4)
        await asyncio.sleep(0.1)

    run = run_of(lambda _: 0.0, Bounds(0.0, 5.0, patience_s=0.5), work)
    assert figures_of(run, run.closed(1)).errors == {"QUEUE_FULL": 10}
    assert [record.outcome for record in run.records] == ["QUEUE_FULL", OK] * 10
    assert run.records[1].sent_s == pytest.approx(run.records[0].sent_s + 0.4)


@pytest.mark.parametrize("loop", ["closed", "open"])
def test_a_run_that_is_cancelled_keeps_what_it_has(loop: str) -> None:
    """Its figures are those of the time until then."""
    run = run_of(lambda number: 3600.0 if number > 4 else 0.5, Bounds(0.0, 60.0))

    async def main() -> None:
        task = asyncio.create_task(run.closed(2) if loop == "closed" else run.open(5.0, "seed", max_in_flight=9))
        await asyncio.sleep(4.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    figures = figures_of(run, main())
    assert figures.seconds == pytest.approx(4.0)
    assert (figures.num_ok, figures.errors) == (5, {})
    assert figures.num_unfinished >= 2


def test_a_fault_of_the_generator_is_not_a_figure() -> None:
    """What nobody expected is raised, at once."""

    async def work(number: int, _: Record) -> None:
        assert number < 3
        await asyncio.sleep(0.1)

    run = run_of(lambda _: 0.0, Bounds(0.0, 1e9), work)
    with pytest.raises(AssertionError):
        figures_of(run, run.closed(2))


# ---- figures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.9, 90), (0.99, 99), (1.0, 100), (0.001, 1), (0.501, 51)])
def test_percentiles_are_values_that_happened(share: float, value: float) -> None:
    """Nearest rank: the smallest value that so many do not exceed."""
    assert percentile([float(n) for n in range(1, 101)], share) == value
    assert quantiles_ms(n / 1000 for n in range(10)).p99 == 9.0


def test_a_summary_counts_what_the_window_holds() -> None:
    """Tokens by their arrival; latencies of requests that were due in the window, also if they ended after it."""
    records = [
        Record(16, 0.5, 0.5, {0: [0.9, 1.1]}, OK),  # due before: its token inside counts, its latency does not
        Record(16, 1.0, 1.2, {0: [1.5, 2.5, 2.5], 1: [1.7]}, OK),
        Record(16, 1.9, 1.9, {0: [4.0]}, OK),
        Record(16, 2.1, 2.1, {0: [2.5]}, OK),
        *(Record(16, 1.2, 1.2, {}, "QUEUE_FULL") for _ in range(3)),
        Record(16, 1.3, 1.3, {0: [1.4]}, "KV_BLOCKS_EXHAUSTED"),
        Record(16, 1.3),
    ]
    summary = summarize(records, 1.0, 2.0)
    assert (summary.tokens_per_s, summary.requests_per_s, summary.prompt_tokens_per_s) == (4, 1, 32)
    assert (summary.first_token_ms.num, summary.first_token_ms.p99) == (3, 2100.0)
    assert (summary.inter_token_ms.num, summary.inter_token_ms.p99) == (2, 1000.0)
    assert (summary.end_to_end_ms.num, summary.end_to_end_ms.p50) == (2, 1500.0)
    assert summary.late_ms.p99 == pytest.approx(200.0)
    assert (summary.num_ok, summary.num_unfinished) == (2, 1)
    assert summary.errors == {"KV_BLOCKS_EXHAUSTED": 1, "QUEUE_FULL": 3}
    empty = json.loads(json.dumps(summarize([], 0.0, 1.0).as_json(), allow_nan=False))
    assert empty["inter_token_ms"]["p50"] is None


def test_prompts_are_spread_over_the_logarithm() -> None:
    """As many in each doubling, none out of bounds, the same for the same seed."""
    lengths = list(itertools.islice(prompt_lengths(16, 1024, "a"), 6000))
    assert (min(lengths), max(lengths)) == (16, 1024)
    per_doubling = [sum(16 << n <= length < 32 << n for length in lengths) for n in range(6)]
    assert all(900 < count < 1100 for count in per_doubling)
    assert lengths[:50] == list(itertools.islice(prompt_lengths(16, 1024, "a"), 50))
    assert set(itertools.islice(prompt_lengths(7, 7, "a"), 50)) == {7}


def test_a_generator_that_is_the_limit_says_so() -> None:
    """A loop that is blocked is late."""

    async def run() -> Watch:
        async with watching() as watch:
            for _ in range(4):
                await asyncio.sleep(0.011)
                time.sleep(0.05)
        return watch

    assert "ms late" in asyncio.run(run()).limit
    assert Watch(0.3, 1.0).limit == ""
    assert Watch(0.95, 1.0).limit == "its processor time, 95% of a core"


def test_a_stall_of_the_generator_counts_for_every_tick_that_it_missed() -> None:
    """One second among 100 ticks is not one late tick of 100; it is seen also if the load ends with it."""

    async def run(num_after: int) -> Watch:
        async with watching() as watch:
            await asyncio.sleep(0.02)
            time.sleep(1.0)
            for _ in range(num_after):
                await asyncio.sleep(0.011)
        return watch

    for num_after in (150, 0):
        watch = asyncio.run(run(num_after))
        assert watch.lag_p99_ms > 900
        assert "ms late" in watch.limit


# ---- interrupts -----------------------------------------------------------------------------------------------------


def test_a_clean_up_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some time after the first signal, as by a second one, with all tasks; what the work has is its result."""
    monkeypatch.setattr(interrupts, "MOST_S", 0.3)
    monkeypatch.setattr(interrupts, "_SLOW_S", 0.1)
    steps: list[str] = []

    async def user() -> None:
        for _ in range(4):  # its request, and three steps of its clean-up
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(4)
        steps.append("user ended")

    async def work() -> str:
        users = [asyncio.create_task(user()) for _ in range(2)]
        await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)
        with contextlib.suppress(asyncio.CancelledError):
            try:
                await asyncio.sleep(60)
            finally:
                for one in users:
                    one.cancel()
                await asyncio.gather(*users, return_exceptions=True)
        return "figures"

    begin_s = time.monotonic()
    assert interrupts.run_interruptible(work, lambda: steps.append("slow")) == ("figures", signal.SIGINT)
    assert steps[0] == "slow"
    assert steps[1:] == ["user ended"] * 2
    assert time.monotonic() - begin_s < 3
