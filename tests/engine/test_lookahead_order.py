"""Lookahead: who waits for whom, what is not queued, and whatever can break while a step is in the queue."""

from __future__ import annotations

import dataclasses
import logging
import random
import time

import pytest

from ferrule_server.engine import engine as engine_module
from ferrule_server.engine import host_calls
from ferrule_server.engine.assembly.assemble import Setup
from ferrule_server.engine.engine import Engine
from ferrule_server.engine.faults.failpoints import Failpoints, Place
from ferrule_server.engine.jobs import (
    AppendJob,
    Entry,
    Finish,
    Follow,
    GenerateJob,
    OutputRequest,
    StopRules,
    WarmupJob,
    WarmupResult,
    Window,
)
from ferrule_server.engine.steps import lookahead
from ferrule_server.engine.steps.lookahead import Lookahead
from ferrule_server.engine.steps.stepper import Stepper
from ferrule_server.errors import Draining, HandleLost
from ferrule_server.executor.base import DeviceLost, OutputSpec, SampleSpec, Shaping
from ferrule_server.kv.new_sequence import NewSequence
from tests.chaos import test_engine_random
from tests.engine.deferred import Call, DeferredExecutor, DeferredHarness, Rounds, check_pool, what_became_of
from tests.engine.harness import GREEDY, Harness, append, wait_until
from tests.engine.streams import UNSEEDED, Branch, drawn_with, generate, start
from tests.engine.test_streams_random import NUM_OPS, Client
from tests.fakes import FakeExecutor, fake_next_token


def long_job(max_tokens: int = 40, num_branches: int = 1) -> GenerateJob:
    """A Generate of some length."""
    return generate(None, 1, 2, 3, output=GREEDY, max_tokens=max_tokens, num_branches=num_branches)


@pytest.fixture(scope="module")
def expected() -> list[tuple[object, ...]]:
    """What two branches of it are on an engine that waits for each step."""
    with Harness() as plain:
        return [what_became_of(branch) for branch in start(plain, long_job(num_branches=2)).branches()]


def tokens_of(branches: list[Branch]) -> list[tuple[object, ...]]:
    """All that a reader learns of each."""
    return [what_became_of(branch) for branch in branches]


# ---- who waits -------------------------------------------------------------------------------------------------------


def rows_of_steps(harness: DeferredHarness) -> list[int]:
    """Rows of each step so far, as the device saw them."""
    return [batch.num_rows for batch in harness.inner.batches]


def test_who_comes_while_a_step_is_queued_waits_for_that_one_only() -> None:
    """Then everybody has a part in one step, which is not followed by a guess."""
    with Harness() as plain:
        known = plain.prefill(1, 2, 3).rows[0].token
    harness = DeferredHarness()
    rounds = Rounds(harness)
    stream = rounds.start(long_job())
    rounds.run(5)
    counters = harness.engine.counters
    assert (harness.deferred.num_pending, counters.steps, counters.queued_steps) == (1, 5, 4)
    newcomer = rounds.ask(append(None, 1, 2, 3))
    rounds.run(1)
    assert not newcomer.is_done
    assert (harness.deferred.num_pending, counters.steps, counters.queued_steps) == (0, 6, 4)
    rounds.run(1)
    assert newcomer.result().rows[0].token == known
    assert (rows_of_steps(harness)[-1], counters.steps, counters.queued_steps) == (4, 7, 4)
    rounds.finish()
    assert len(stream.branch().tokens) == 40


def test_who_decodes_step_by_step_beside_a_generate_is_in_every_second_step() -> None:
    """For some steps after an append that a client comes back for, nothing is queued; then it is again."""
    harness = DeferredHarness(gather_share=0.0)
    rounds = Rounds(harness)
    stream = rounds.start(long_job(60))
    first = rounds.ask(append(None, 7))
    rounds.run(1)
    handle, token = first.result().handle, first.result().rows[0].token
    for _ in range(10):
        assert token is not None
        rounds.run(1)  # while the client is away
        decode = rounds.ask(append(handle, token))
        rounds.run(1)
        handle, token = decode.result().handle, decode.result().rows[0].token
    assert harness.engine.counters.queued_steps == 0
    rounds.run(10)
    assert harness.engine.counters.queued_steps == 6
    rounds.finish()
    assert len(stream.branch().tokens) == 60


def test_who_joins_an_append_of_a_generate_is_a_client_too() -> None:
    """It is answered with it, and comes back."""
    harness = DeferredHarness(gather_share=0.0)
    rounds = Rounds(harness)
    stream = rounds.start(long_job())
    rounds.run(5)
    branch = stream.so_far()[0]
    joining = rounds.ask(append(branch.handles[-1], branch.tokens[-1]))
    rounds.run(1)
    assert joining.result().replayed
    assert (harness.engine.counters.joined, harness.engine.counters.queued_steps) == (1, 4)
    rounds.run(4)
    assert harness.engine.counters.queued_steps == 4
    rounds.run(1)
    assert harness.engine.counters.queued_steps == 5
    rounds.finish()


def test_time_that_two_steps_share_is_counted_once() -> None:
    """A queued step begins when the one before it ends."""
    harness = DeferredHarness(FakeExecutor(step_time_s=0.002))
    rounds = Rounds(harness)
    stream = rounds.start(long_job(30))
    begun_ns = time.monotonic_ns()
    rounds.finish()
    elapsed_ns = time.monotonic_ns() - begun_ns
    counters = harness.engine.counters
    assert 30 * 2_000_000 <= counters.step_ns <= elapsed_ns
    assert counters.prefill_ns + counters.decode_ns == counters.step_ns
    assert len(stream.branch().tokens) == 30


def test_a_lane_in_which_somebody_waits_is_not_followed() -> None:
    """Whatever waits has its turn at the commit, and changes what comes next."""
    harness = DeferredHarness()
    rounds = Rounds(harness)
    stream = rounds.start(long_job())
    rounds.run(5)
    rounds.ask(append(stream.so_far()[0].handles[-1], 30))
    rounds.run(1)
    assert (harness.deferred.num_pending, harness.engine.counters.queued_steps) == (0, 4)
    rounds.finish()


# ---- what is not queued ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "num_queued"),
    [
        (OutputSpec(greedy=True, shaping=Shaping(repetition_penalty=1.5)), 0),
        (OutputSpec(greedy=True, full_logits=True), 0),
        (OutputSpec(sample=SampleSpec(seed=3), hidden_state=True), 0),
        (OutputSpec(greedy=True, shaping=Shaping(bias=((3, 1.5), (7, -2.0)))), 18),
    ],
    ids=["penalties", "logits", "hidden", "bias"],
)
def test_outputs_that_need_the_host_are_not_queued(spec: OutputSpec, num_queued: int) -> None:
    """Penalties count the tokens before; the rest is the executor's to say. A bias is the same for every row."""
    job = generate(None, 1, 2, 3, output=OutputRequest(spec), max_tokens=20)
    with Harness() as plain:
        whole = start(plain, dataclasses.replace(job)).branch()
    with DeferredHarness() as harness:
        harness.deferred.takes_histories = True
        assert start(harness, job).branch().tokens == whole.tokens
        assert harness.engine.counters.queued_steps == num_queued


def test_nothing_is_queued_for_a_reader_that_has_no_room_for_it() -> None:
    """A stream that stands still after each token throws nothing away."""
    harness = DeferredHarness()
    rounds = Rounds(harness)
    job = generate(None, 1, 2, 3, output=GREEDY, max_tokens=20, window=Window(64))
    stream = rounds.start(job)
    for _ in range(25):
        rounds.run(2)
        job.window.taken_bytes = job.window.sent_bytes
        harness.engine.resume(job)
    rounds.finish()
    assert len(stream.branch().tokens) == 20
    counters = harness.engine.counters
    assert (counters.queued_steps, counters.discarded_rows) == (0, 0)


def test_while_the_best_tokens_are_logged_nothing_is_queued(caplog: pytest.LogCaptureFixture) -> None:
    """They are asked for behind the engine's back."""
    with caplog.at_level("INFO"), DeferredHarness(debug_top_tokens=True) as harness:
        start(harness, long_job(10)).branch()
        assert harness.engine.counters.queued_steps == 0
        assert sum("top tokens" in record.message for record in caplog.records) == 10


def test_the_walk_of_a_repeated_generate_is_not_queued_and_goes_on_queued_behind_the_tip() -> None:
    """Replays are answered out of what is there; only what is new is guessed."""
    with DeferredHarness() as harness:
        prompt = harness.prefill(1, 2, 3, output=drawn_with(5))
        first = start(harness, generate(prompt.handle, 9, output=drawn_with(5), max_tokens=20)).branch()
        for _ in range(5):
            harness.prefill(1)
        again = start(harness, generate(prompt.handle, 9, output=drawn_with(5), max_tokens=30)).branch()
        assert again.tokens[:20] == first.tokens
        assert len(again.tokens) == 30
        harness.engine.close()
        check_pool(harness, harness.inner)
        assert harness.engine.counters.discarded_rows == 0


# ---- room ------------------------------------------------------------------------------------------------------------


def test_a_cached_block_that_is_foreseen_is_not_found_any_more() -> None:
    """It is written to, and the Generate stops: a prompt that it was of must be computed again."""
    prompt = tuple(range(20, 32))
    with Harness() as plain:
        tokens = start(plain, generate(None, 9, output=GREEDY, max_tokens=8)).branch().tokens
    assert tokens.index(tokens[-1]) == 7, "the stop would come too early"
    stop = StopRules(token_ids=frozenset({tokens[-1]}))
    with DeferredHarness(FakeExecutor(num_blocks=1 + 3 + 2)) as harness:
        harness.release(harness.prefill(*prompt).handle)
        start(harness, generate(None, 9, output=GREEDY, stop=stop)).branch()
        assert harness.store.pool.num_evictions == 1
        again = harness.prefill(*prompt)
        assert (again.cached_tokens, again.rows[0].token) == (8, fake_next_token(prompt, 32))
        check_pool(harness, harness.inner)


@pytest.mark.parametrize("num_blocks", [8, 12, 14])
def test_without_room_a_generate_ends_where_it_would_have_ended(num_blocks: int) -> None:
    """Blocks run out for one of several, and each block foreseen was another's to take."""

    def run(harness: Harness, executor: FakeExecutor) -> list[tuple[object, ...]]:
        rounds = Rounds(harness)
        streams = [rounds.start(generate(None, each, output=drawn_with(each), max_tokens=40)) for each in range(3)]
        rounds.finish()
        check_pool(harness, executor)
        return tokens_of([stream.branch() for stream in streams])

    plain = Harness(FakeExecutor(num_blocks=num_blocks))
    whole = run(plain, plain.executor)
    assert {end for _, _, end, *_ in whole} >= {Finish.KV_BLOCKS_EXHAUSTED}
    harness = DeferredHarness(FakeExecutor(num_blocks=num_blocks))
    assert run(harness, harness.inner) == whole
    assert harness.deferred.misuse == []


def test_at_the_end_of_the_context_nothing_is_guessed() -> None:
    """The last position is used, and no row lies beyond it."""
    with DeferredHarness(FakeExecutor(max_context=20)) as harness:
        branch = start(harness, generate(None, 1, 2, output=GREEDY, max_tokens=100)).branch()
        assert branch.last.finish is Finish.CONTEXT_FULL
        assert max(int(batch.positions.max()) for batch in harness.inner.batches) == 19
        assert harness.engine.counters.discarded_rows == 0


def test_room_that_is_set_aside_is_foreseen() -> None:
    """Spares come before the pool's blocks."""
    with DeferredHarness() as harness:
        job = long_job()
        job.new = NewSequence(reserved_length=30)
        others = [start(harness, long_job()) for _ in range(2)]
        assert len(start(harness, job).branch().tokens) == 40
        assert [len(other.branch().tokens) for other in others] == [40, 40]
        assert harness.engine.counters.discarded_rows == 0


# ---- what can break --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["submit", "result", "run"])
@pytest.mark.parametrize("nth", [1, 2, 3, 4, 9])
def test_a_call_that_fails_costs_nobody_a_token(call: Call, nth: int, expected: list[tuple[object, ...]]) -> None:
    """Its rows are run again one by one, and what was queued behind them is thrown away before that."""
    harness = DeferredHarness()
    harness.deferred.fails[call, nth] = RuntimeError("told to fail")
    with harness:
        assert tokens_of(start(harness, long_job(num_branches=2)).branches()) == expected
        assert harness.engine.counters.queued_steps > 20
        harness.engine.close()
        check_pool(harness, harness.inner)
        assert (call, nth) not in harness.deferred.fails or call == "run"


@pytest.mark.parametrize("call", ["submit", "result", "tend"])
@pytest.mark.parametrize("nth", [1, 2, 5])
def test_a_lost_device_loses_every_handle_whatever_is_queued(call: Call, nth: int) -> None:
    """Said once, and nothing is asked of the device any more."""
    harness = DeferredHarness()
    harness.deferred.fails[call, nth] = DeviceLost()
    with harness:
        harness.deferred.num_to_tend = 10
        stream = start(harness, long_job(100))
        stream.wait()
        (last,) = stream.outcomes[-1:]
        error = last if isinstance(last, HandleLost) else stream.so_far()[0].last.error
        assert isinstance(error, HandleLost)
        harness.engine.close()
        num_calls = len(harness.deferred.calls)
        assert harness.num_failures == 1
        assert len(harness.deferred.calls) == num_calls
        assert harness.deferred.calls[-1][0] == call


def test_a_step_that_was_queued_passes_the_same_places() -> None:
    """A failpoint finds every step, whether it was queued or not."""
    failpoints = Failpoints()
    with DeferredHarness(failpoints=failpoints) as harness:
        start(harness, long_job()).branch()
        assert harness.engine.counters.queued_steps == 38
        assert failpoints.num_hits["before_schedule"] == failpoints.num_hits["after_schedule"] == 40


@pytest.mark.parametrize("place", ["before_schedule", "after_schedule", "during_copy", "after_commit"])
@pytest.mark.parametrize("nth", range(1, 9))
def test_wherever_the_engine_breaks_others_go_on(place: Place, nth: int, expected: list[tuple[object, ...]]) -> None:
    """A failpoint anywhere: at most what it hit ends with a fault, and nothing is out of order."""
    failpoints = Failpoints()
    harness = DeferredHarness(failpoints=failpoints)

    def break_down() -> None:
        raise RuntimeError("told to break")

    with harness:
        failpoints.arm(place, break_down, nth)
        stream = start(harness, long_job(num_branches=2))
        stream.wait()
        if place in {"after_schedule", "during_copy"}:  # nothing of the step has been answered
            assert tokens_of(stream.branches()) == expected
        assert len(harness.prefill(4, 5).rows) == 1
        harness.engine.close()
        check_pool(harness, harness.inner)


def test_a_row_that_is_not_finite_ends_its_branch_alone() -> None:
    """What was queued behind it has no token, and is thrown away."""

    def run(harness: Harness, executor: FakeExecutor) -> list[tuple[object, ...]]:
        executor.bad_token_ids = {11}
        jobs = [generate(None, each, output=drawn_with(each), max_tokens=60) for each in range(1, 6)]
        streams = [start(harness, job) for job in jobs]
        return tokens_of([stream.branch() for stream in streams])

    with Harness() as plain:
        whole = run(plain, plain.executor)
    assert len({end for _, _, end, *_ in whole}) == 2
    with DeferredHarness() as harness:
        assert run(harness, harness.inner) == whole


def test_a_cancelled_generate_leaves_nothing_in_the_queue() -> None:
    """Its row is thrown away as soon as nobody can claim it."""
    harness = DeferredHarness()
    rounds = Rounds(harness)
    job = long_job()
    rounds.start(job)
    rounds.run(5)
    assert harness.deferred.num_pending == 1
    job.is_cancelled = True
    harness.engine.resume(job)
    rounds.run(1)
    assert (harness.deferred.num_pending, harness.engine.counters.discarded_rows) == (0, 1)
    assert harness.engine.counters.steps == 5


def test_an_engine_that_is_closed_reads_what_is_queued() -> None:
    """Streams end with DRAINING, and the executor is closed with nothing pending."""
    with DeferredHarness(FakeExecutor(step_time_s=0.001)) as harness:
        stream = start(harness, long_job(200))
        stream.wait_for(20)
        harness.engine.close()
        assert isinstance(stream.branch().last.error, Draining)
        assert harness.inner.is_closed


# ---- preparation -----------------------------------------------------------------------------------------------------


def test_an_executor_is_tended_in_the_gaps_and_nothing_is_queued_before_it_is_done() -> None:
    """Once after each step; then steps are queued, and it is let alone."""
    harness = DeferredHarness()
    rounds = Rounds(harness)
    harness.deferred.num_to_tend = 5
    rounds.start(long_job(20))
    rounds.run(5)
    assert [call for call, _ in harness.deferred.calls] == ["run", "tend"] * 5
    rounds.finish()
    assert harness.engine.counters.queued_steps == 20 - 5 - 1
    assert harness.deferred.num_calls["tend"] == 6


def test_an_engine_without_work_looks_after_its_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Now and then, so that what was got ready in the background, or failed there, does not wait for a step."""
    monkeypatch.setattr(engine_module, "_IDLE_S", 0.02)
    with DeferredHarness() as harness:
        wait_until(lambda: harness.deferred.num_calls["tend"] >= 2)


def test_an_idle_executor_is_tended_until_it_has_no_more() -> None:
    """And not again before the next step."""
    harness = DeferredHarness()
    harness.deferred.num_to_tend = 50
    with harness:
        harness.prefill(1)
        for _ in range(500):
            if not harness.deferred.num_to_tend:
                break
            harness.release()  # a job that touches no device
        harness.release()
        assert harness.deferred.num_calls["tend"] == 50
        harness.prefill(2)
        harness.release()
        harness.release()
        assert harness.deferred.num_calls["tend"] == 51


def test_a_preparation_that_fails_stops_nobody() -> None:
    """It is logged; the next step asks for more of it."""
    harness = DeferredHarness()
    harness.deferred.num_to_tend = 3
    harness.deferred.fails["tend", 2] = RuntimeError("told to fail")
    with harness:
        assert len(start(harness, long_job(20)).branch().tokens) == 20
        assert harness.engine.counters.queued_steps > 0


def test_a_warm_up_finds_the_queue_empty_where_nobody_runs_any_more() -> None:
    """It came together with the cancel of the only Generate."""
    harness = DeferredHarness()
    rounds = Rounds(harness)
    stream = rounds.start(long_job())
    rounds.run(5)
    assert harness.deferred.num_pending == 1
    handle = stream.so_far()[0].handles[-1]
    _, pending = rounds.ask_all(host_calls.release("me", (handle,)), WarmupJob("admin", (1,)))
    rounds.run(1)
    harness.engine._round()
    assert isinstance(pending.outcome(), WarmupResult)
    assert harness.deferred.misuse == []


def test_a_warm_up_finds_nothing_pending_and_waits_for_one_step() -> None:
    """While it lasts nothing is queued; then it goes on."""
    harness = DeferredHarness()
    rounds = Rounds(harness)
    stream = rounds.start(long_job())
    rounds.run(5)
    pending = rounds.ask(WarmupJob("admin", (1, 2, 3)))
    rounds.run(4)
    outcome = pending.outcome()
    assert isinstance(outcome, WarmupResult)
    assert outcome.batch_sizes == (1, 2, 3)
    rounds.finish()
    assert len(stream.branch().tokens) == 40
    assert harness.deferred.misuse == []
    assert harness.engine.counters.queued_steps == 40 - 2 - 4


# ---- anything --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_anything_beside_anything_keeps_every_handle_true(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Generates and all that others do to their sequences; now and then a call fails."""
    check_anything(seed, 5, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_anything_beside_anything_for_long(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with many more seeds."""
    check_anything(seed, 20, monkeypatch)


def check_anything(seed: int, num_rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a client do anything, with calls that fail at random, and check all that it is told."""
    monkeypatch.setattr(lookahead, "_QUIET_STEPS", 0)  # as many guesses as there can be, right or wrong
    chance = random.Random(seed)
    block_size = chance.choice([1, 2, 4, 8])
    inner = FakeExecutor(
        num_blocks=chance.choice([100, 400, 2000]) // block_size, block_size=block_size, step_time_s=0.0002
    )
    calls: list[Call] = ["submit", "result", "run"]
    with DeferredHarness(inner, is_eager=None, chance=chance, max_step_rows=chance.choice([8, 64])) as harness:
        client = Client(harness, random.Random(seed))
        for _ in range(num_rounds):
            for _ in range(chance.randrange(4) if seed % 2 else 0):
                call = chance.choice(calls)
                nth = harness.deferred.num_calls[call] + chance.randint(1, 50)
                harness.deferred.fails[call, nth] = RuntimeError("told to fail")
            for _ in range(NUM_OPS):
                client.act()
            client.settle()
            client.make_room()
            assert all(not sequence.num_pins for sequence in harness.store.registry)
            check_pool(harness, inner)
            harness.check_integrity()
        assert harness.engine.counters.queued_steps > 0
        assert client.num_checked > 50


@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_is_applied_once_whatever_breaks(
    seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The campaign of ``tests/chaos``, a little of it: lost replies, retries, cancels, faults, and no threads."""
    run_campaign(seed, 500, monkeypatch, caplog)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 110))
def test_random_traffic_for_long(seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The same with more seeds, and more of each."""
    run_campaign(seed, 4000, monkeypatch, caplog)


class GuessingEngine(Engine):
    """Guesses what follows whatever it can, who else may wait, and also behind the appends of clients: mostly wrong."""

    def submit(self, entries: list[Entry]) -> None:
        """Take jobs, behind all of which the same client is said to go on."""
        for job, _ in entries:
            if isinstance(job, AppendJob):
                job.follow = Follow.LIKELY
        super().submit(entries)


def run_campaign(seed: int, num_jobs: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Run one campaign over a deferred executor, longer if by chance no guess has been wrong by its end."""
    caplog.set_level(logging.CRITICAL)  # what breaks on purpose is logged by the thousand
    monkeypatch.setattr(
        Lookahead, "_decide_follow", lambda _, chunks: all(map(lookahead._is_token_of_generate, chunks))
    )
    monkeypatch.setattr(Stepper, "_are_all", lambda _, chunks: bool(chunks))
    engines: list[GuessingEngine] = []

    def new_engine(setup: Setup) -> Engine:
        assert isinstance(setup.executor, FakeExecutor)
        deferred = DeferredExecutor(setup.executor, is_eager=None, chance=random.Random(seed))
        engines.append(GuessingEngine(dataclasses.replace(setup, executor=deferred)))
        return engines[-1]

    monkeypatch.setattr(test_engine_random, "Engine", new_engine)
    monkeypatch.setattr(test_engine_random, "OUTPUTS", (GREEDY, GREEDY, UNSEEDED))
    campaign = test_engine_random.Campaign(seed)
    (engine,) = engines
    while campaign.count["jobs"] < num_jobs or not (engine.counters.discarded_rows or campaign.count["jobs"] > 20_000):
        campaign.tick()
    campaign.finish()
    assert isinstance(engine._setup.executor, DeferredExecutor)
    assert engine._setup.executor.misuse == []
    assert engine.counters.discarded_rows > 0
