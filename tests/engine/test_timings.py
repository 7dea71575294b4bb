"""Timings: what the engine says of how long things took, on a clock that only executors move."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from ferrule_server.engine import engine
from ferrule_server.engine.engine import Engine
from ferrule_server.engine.generation import forward
from ferrule_server.engine.generation import generate as generation
from ferrule_server.engine.jobs import Acceptance, AppendJob, Drafts, Window
from ferrule_server.engine.metrics.timings import EngineTimings, HistogramReading
from ferrule_server.engine.steps import lookahead
from ferrule_server.engine.steps import runner as steps
from ferrule_server.executor.base import StepBatch, StepResult
from tests.engine.deferred import DeferredExecutor
from tests.engine.harness import GREEDY, NOTHING, Harness, append
from tests.engine.streams import forward as forward_job
from tests.engine.streams import generate, start
from tests.fakes import FakeExecutor

MS = 1_000_000
STEP_NS = 3 * MS


class StandingTime:
    """Stands in for the module ``time`` in the engine: its nanoseconds stand still unless somebody moves them."""

    time_ns = staticmethod(time.time_ns)
    monotonic = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self.now_ns = 1_000 * MS

    def monotonic_ns(self) -> int:
        """Return the time."""
        return self.now_ns


class TimedExecutor(FakeExecutor):
    """Each step takes STEP_NS of that time.

    Attributes:
        meanwhile: Called once in the middle of the next step.
    """

    def __init__(self, clock: StandingTime) -> None:
        super().__init__()
        self.clock = clock
        self.meanwhile: Callable[[], object] | None = None

    def run(self, batch: StepBatch) -> StepResult:
        """Run, and let the time go by."""
        self.clock.now_ns += MS
        if (meanwhile := self.meanwhile) is not None:
            self.meanwhile = None
            meanwhile()
        self.clock.now_ns += STEP_NS - MS
        return super().run(batch)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StandingTime:
    """The engine's clock."""
    standing = StandingTime()
    for module in (engine, forward, generation, lookahead, steps):
        monkeypatch.setattr(module, "time", standing)
    return standing


@pytest.fixture
def executor(clock: StandingTime) -> TimedExecutor:
    """What moves it."""
    return TimedExecutor(clock)


def readings(harness: Harness) -> dict[str, HistogramReading]:
    """What the engine has measured; of one that is closed, so that nothing is under way."""
    return dict(harness.engine.counters.timings)


def told(reading: HistogramReading) -> tuple[int, float]:
    """How many were observed, and how many steps they took together."""
    return reading.count, round(reading.sum * 1e9 / STEP_NS, 3)


def test_a_prompt_in_chunks_has_its_first_output_with_the_last_chunk(executor: TimedExecutor) -> None:
    """Three steps for a prompt of ten tokens, four rows at most in each; it waited for none of them."""
    with Harness(executor, max_step_rows=4) as harness:
        harness.prefill(*range(10))
    seen = readings(harness)
    assert told(seen["first_token"]) == (1, 3.0)
    assert told(seen["queue"]) == (1, 0.0)
    assert told(seen["step"]) == (3, 3.0)
    assert (seen["step_rows"].sum, seen["step_sequences"].sum) == (10, 3)
    assert seen["decode"].count == seen["inter_token"].count == 0


def test_a_prompt_that_returns_no_rows_has_no_first_token(executor: TimedExecutor) -> None:
    """Parts of a prompt that a client sends one after the other are one prompt: the part that answers counts."""
    with Harness(executor) as harness:
        first = harness.prefill(1, 2, 3, output=NOTHING)
        harness.decode(first.handle, 4, 5, 6)
    seen = readings(harness)
    assert told(seen["first_token"]) == (1, 1.0)
    assert seen["queue"].count == 2


def test_a_decode_is_measured_from_submission_to_the_end_of_its_step(executor: TimedExecutor) -> None:
    """What comes in the middle of a step waits for the rest of it, then takes one."""
    with Harness(executor) as harness:
        one, other = harness.prefill(1, 2), harness.prefill(3, 4)
        late = []
        executor.meanwhile = lambda: late.append(harness.submit(append(other.handle, 5)))
        harness.decode(one.handle, 5)
        late[0].result()
    seen = readings(harness)
    waited = (STEP_NS - MS) / STEP_NS
    assert told(seen["decode"]) == (2, round(1 + waited + 1, 3))
    assert told(seen["queue"]) == (4, round(waited, 3))


def test_a_verify_counts_as_a_decode(executor: TimedExecutor) -> None:
    """Both are what a client does again and again."""
    with Harness(executor) as harness:
        handle = harness.prefill(1, 2, 3).handle
        drafts = Drafts(2, Acceptance.EXACT)
        harness.submit(AppendJob("me", (4, 5, 6), handle, GREEDY, drafts=drafts)).result()
    assert told(readings(harness)["decode"]) == (1, 1.0)


def test_what_takes_no_step_is_not_measured(executor: TimedExecutor) -> None:
    """A replay is answered from its record, and a query appends nothing: neither is a decode; the query did queue."""
    with Harness(executor) as harness:
        handle = harness.prefill(1, 2, 3).handle
        tip = harness.decode(handle, 4)
        assert harness.decode(handle, 4).replayed
        harness.decode(tip.handle)
    seen = readings(harness)
    assert told(seen["decode"]) == (1, 1.0)
    assert seen["queue"].count == 3


@pytest.mark.parametrize("is_pipelined", [False, True])
def test_tokens_of_a_generate_follow_each_other_by_steps(executor: TimedExecutor, *, is_pipelined: bool) -> None:
    """Five tokens: the first behind the prompt, then four gaps of one step each, with steps queued ahead as well."""
    runs_on = DeferredExecutor(executor) if is_pipelined else executor
    with Harness(runs_on) as harness:  # type: ignore[arg-type]
        start(harness, generate(None, *range(6), max_tokens=5)).wait()
    seen = readings(harness)
    assert told(seen["first_token"]) == (1, 1.0)
    assert told(seen["inter_token"]) == (4, 4.0)
    assert told(seen["queue"]) == (1, 0.0)
    assert seen["decode"].count == 0, "a client decodes nothing here"
    assert told(seen["step"]) == (5, 5.0)


def test_branches_have_one_first_token_and_gaps_of_their_own(executor: TimedExecutor) -> None:
    """The other branches begin with a row of their own behind the prompt's: no gap before it, and one for each next."""
    with Harness(executor) as harness:
        start(harness, generate(None, *range(6), max_tokens=4, num_branches=3)).wait()
    seen = readings(harness)
    assert told(seen["first_token"]) == (1, 1.0)
    assert seen["inter_token"].count == 3 * 3


def test_a_wait_for_the_reader_is_no_gap(executor: TimedExecutor) -> None:
    """The token behind a wait for a reader says how slow the reader is, not the server."""
    window = Window(64)  # a row
    with Harness(executor) as harness:
        job = generate(None, *range(6), max_tokens=3, window=window)
        stream = start(harness, job)
        for count in range(1, 3):
            stream.wait_for(count)
            assert harness.engine.snapshot().num_streams == 1
            window.taken_bytes += job.row_bytes
            harness.engine.resume(job)
        stream.wait()
    seen = readings(harness)
    assert told(seen["first_token"]) == (1, 1.0)
    assert seen["inter_token"].count == 0


def test_a_generate_that_is_repeated_measures_only_what_it_draws_anew(executor: TimedExecutor) -> None:
    """Tokens found committed come at once; what follows them counts from the first one that took a step."""
    with Harness(executor) as harness:
        handle = harness.prefill(1, 2, 3).handle
        first = start(harness, generate(handle, output=GREEDY, max_tokens=4)).branch()
        before = readings(harness)
        again = start(harness, generate(handle, output=GREEDY, max_tokens=6)).branch()
        assert again.tokens[:4] == first.tokens
    gaps = readings(harness)["inter_token"].count - before["inter_token"].count
    assert gaps < 5, "a replayed token was measured"


def test_a_prompt_that_is_replayed_has_no_first_token(executor: TimedExecutor) -> None:
    """A Generate sent again finds its prompt appended: nobody waited for it."""
    with Harness(executor) as harness:
        handle = harness.prefill(1, 2, 3).handle
        for _ in range(2):
            start(harness, generate(handle, 4, 5, output=GREEDY, max_tokens=2)).wait()
    seen = readings(harness)
    assert told(seen["first_token"]) == (2, 2.0)  # of the prefill, and of the first Generate
    assert seen["queue"].count == 2


def test_a_forward_waits_once(executor: TimedExecutor) -> None:
    """Its chunks are appends of the engine's own: one wait in the queue, no token."""
    with Harness(executor) as harness:
        start(harness, forward_job(*range(20), chunk_rows=8)).forward()
    seen = readings(harness)
    assert told(seen["queue"]) == (1, 0.0)
    assert told(seen["step"]) == (3, 3.0)
    assert seen["first_token"].count == seen["inter_token"].count == seen["decode"].count == 0


def test_who_finds_no_room_in_a_step_is_left_out(executor: TimedExecutor) -> None:
    """Three prompts and four rows in a step, which the oldest shares with another one: the third waits."""
    seen: list[int] = []
    with Harness(executor, max_step_rows=4) as harness:
        executor.meanwhile = lambda: seen.append(harness.engine.counters.timings.num_left_out)
        for each in harness.submit_all(*(append(None, *range(start, start + 4)) for start in (0, 4, 8))):
            each.result()
        assert harness.engine.counters.timings.num_left_out == 0
    assert seen == [1]


def test_one_moment_for_many_rows_is_one_look_at_the_buckets() -> None:
    """Rows that began together are observed in bulk, with the same result as one by one."""
    timings = EngineTimings()
    timings.record_step(10 * MS, STEP_NS, 4, 4)
    for _ in range(4):
        timings.record_decode(10 * MS - STEP_NS)
        timings.record_queue(MS)
    assert timings.decode.read().count == 0, "not before it is settled"
    timings.settle()
    timings.settle()
    assert told(timings.decode.read()) == (4, 4.0)
    assert told(timings.queue.read()) == (4, round(4 * MS / STEP_NS, 3))


def test_the_engine_has_all_of_them(executor: TimedExecutor) -> None:
    """Whoever reads by name finds each histogram that there is."""
    with Harness(executor) as harness:
        assert isinstance(harness.engine, Engine)
    names = {name for name in EngineTimings.__slots__ if not name.startswith("_")} - {"step_end_ns", "num_left_out"}
    assert set(readings(harness)) == names
