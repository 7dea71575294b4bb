"""Cohorts: what a client scheduled as one step is one step while nobody else decodes; and turns between principals."""

from __future__ import annotations

import heapq
import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import pytest

from ferrule_server.engine.appends.running import RunningAppend
from ferrule_server.engine.jobs import AppendJob, AppendResult
from ferrule_server.engine.steps.batcher import Batcher
from ferrule_server.engine.steps.costs import LONGEST_S
from ferrule_server.errors import Cancelled
from ferrule_server.kv.handle import Handle, StalePolicy
from ferrule_server.kv.sequence import Sequence
from tests.engine.deferred import DeferredHarness
from tests.engine.harness import GREEDY, Harness
from tests.engine.streams import generate, start
from tests.engine.test_batcher import Clock, rows_of, running
from tests.engine.test_batcher import cohort as in_cohort
from tests.fakes import FakeExecutor, fake_next_token

MAX_ROWS = 512
STEP_S, ROW_S = 0.004, 100e-6
"""Cost of a step in the simulation."""
COMMIT_NS = 20_000
"""Time from the end of a step to the plan of the next one."""
AWAY_S = 0.001
"""Time from a result to the next request of the same client."""


# ---- one step, in the engine ------------------------------------------------------------------------------------


def job(principal: str, handle: Handle | None, *token_ids: int, number: int = 0, **fields: object) -> AppendJob:
    """An append job of a principal, in a cohort if a number is given."""
    return AppendJob(principal, token_ids, handle, GREEDY, cohort=number, **fields)  # type: ignore[arg-type]


class Decoder:
    """A principal that decodes without pause on a thread of its own."""

    def __init__(self, harness: Harness, principal: str = "other") -> None:
        self._harness = harness
        self._principal = principal
        self._handle = harness.submit(job(principal, None, 1, 2, 3)).result().handle
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._decode)
        self.num_decodes = 0

    def __enter__(self) -> Decoder:
        self._thread.start()
        while self.num_decodes < 5:
            self._is_over.wait(0.001)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _decode(self) -> None:
        while not self._is_over.is_set():
            self._handle = self._harness.submit(job(self._principal, self._handle, 7)).result().handle
            self.num_decodes += 1
            if self._handle.length > 200:
                self._handle = self._harness.submit(job(self._principal, None, 1, 2, 3)).result().handle


def large() -> FakeExecutor:
    """An executor with room for chunks of 150 tokens, whose steps take a moment."""
    return FakeExecutor(num_blocks=1024, step_time_s=0.002)


def sent(harness: Harness, jobs: list[AppendJob]) -> list[AppendResult]:
    """The results of jobs that are submitted together."""
    return [pending.result() for pending in harness.submit_all(*jobs)]


def are_one_step(results: list[AppendResult]) -> bool:
    """Whether these ran in one step: it began for all of them at once, and none of them took another one."""
    return len({(result.timing.started_ns, result.timing.run_ns) for result in results}) == 1


def test_chunks_beside_a_decoder_of_the_same_principal_are_one_step() -> None:
    """Three chunks of 150 rows: all of their rows run in the same step, whatever the pace allows to prompts."""
    with Harness(large(), max_step_time_s=0.001) as harness, Decoder(harness, "me"):
        for number in range(1, 6):
            results = sent(harness, [job("me", None, *([number] * 150), number=number) for _ in range(3)])
            assert are_one_step(results)
            assert all(result.timing.step_rows >= 450 for result in results)


def test_prompts_that_nobody_scheduled_are_still_paced() -> None:
    """The same rows without a cohort take more than one step."""
    with Harness(large(), max_step_time_s=0.001) as harness, Decoder(harness):
        results = sent(harness, [job("me", None, *([number] * 150)) for number in range(3)])
        assert max(result.timing.step_rows for result in results) < 450


@pytest.mark.parametrize("decoder", ["me", "other"])
def test_a_cohort_with_forks_decodes_and_chunks_has_the_tokens_of_each_alone(decoder: str) -> None:
    """Branches that copy a block each, a decode, chunks of an old sequence and a new one; it is cut beside others."""
    with Harness(large(), max_step_time_s=0.001) as harness, Decoder(harness, decoder):
        base = harness.submit(job("me", None, *range(1, 8))).result().handle
        tip = harness.submit(job("me", base, 8)).result().handle
        old = harness.submit(job("me", None, *([9] * 10))).result().handle
        jobs = [
            *(job("me", base, token, number=1, on_stale=StalePolicy.FORK) for token in (20, 21, 22)),
            job("me", tip, 11, number=1),
            job("me", old, *([12] * 100), number=1),
            job("me", None, *([13] * 100), number=1),
        ]
        results = sent(harness, jobs)
        assert are_one_step(results) == (decoder == "me")
        prefixes = [*([*range(1, 8)] for _ in range(3)), [*range(1, 9)], [9] * 10, []]
        for each, prefix, result in zip(jobs, prefixes, results, strict=True):
            tokens = [*prefix, *each.token_ids]
            assert result.handle.length == len(tokens)
            assert result.rows[-1].token == fake_next_token(tokens, 32)


def test_a_cohort_larger_than_a_step_takes_as_few_steps_as_its_rows_need() -> None:
    """1 200 rows in steps of 512."""
    with Harness(large(), max_step_time_s=0.001) as harness:
        num_before = len(harness.executor.batches)
        sent(harness, [job("me", None, *([n] * 150), number=1) for n in range(8)])
        rows = [batch.num_rows for batch in harness.executor.batches[num_before:]]
        assert rows == [512, 512, 176]


def test_a_cancelled_cohort_does_not_run_and_leaves_its_blocks() -> None:
    """Also while it waits for others to go first; those cancelled alone do not take the rest of it along."""
    executor = large()
    with Harness(executor, max_step_time_s=0.001) as harness:
        handle = harness.submit(job("other", None, 1, 2, 3)).result().handle
        num_free = harness.engine.num_free_blocks()
        decode = harness.hold(job("other", handle, 4))
        jobs = [job("me", None, *([2] * 150), number=1) for _ in range(3)]
        kept = [job("me", None, *([3] * 20), number=2) for _ in range(2)]
        pendings = harness.submit_all(*jobs, *kept)
        for each in (*jobs, kept[0]):
            each.is_cancelled = True
        harness.let_go()
        decode.result()
        assert all(isinstance(pending.error(), Cancelled) for pending in pendings[:4])
        harness.release(*(result.handle for result in [pendings[4].result()]))
        assert harness.engine.num_free_blocks() == num_free


def test_a_cohort_beside_a_generate_that_is_queued_ahead_is_one_step() -> None:
    """A queued row is claimed or thrown away first; the tokens of both are those of each alone."""
    with DeferredHarness(large()) as harness:
        stream = start(harness, generate(None, 1, 2, 3, output=GREEDY, max_tokens=60))
        cohorts = [sent(harness, [job("me", None, *([n] * 50), number=n) for _ in range(3)]) for n in range(1, 4)]
        assert all(are_one_step(results) for results in cohorts)
        assert [results[0].rows[-1].token for results in cohorts] == [fake_next_token([n] * 50, 32) for n in (1, 2, 3)]
        tokens = [1, 2, 3]
        for _ in range(60):
            tokens.append(fake_next_token(tokens, 32))
        assert stream.branch().tokens == tokens[3:]


# ---- turns, with a clock that is simulated ----------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class Client:
    """Sends appends again and again: all of them when the last of them is done, and a moment has passed."""

    principal: str
    sizes: list[int]
    is_cohort: bool = True
    away_s: float = AWAY_S
    is_decode: bool = False
    waiting: list[RunningAppend] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    sent_s: float = 0.0
    sequence: Sequence = field(default_factory=lambda: object.__new__(Sequence))

    def __post_init__(self) -> None:
        self.sequence.handle_id = str(id(self))

    def send(self, now_ns: int, number: int) -> list[RunningAppend]:
        """Make the next appends: of 1 row a decode, otherwise a chunk of a new sequence."""
        self.sent_s = now_ns * 1e-9
        self.waiting = [
            running(size, self.principal, self.sequence if size == 1 or self.is_decode else None) for size in self.sizes
        ]
        for run in self.waiting:
            run.job.submitted_ns = now_ns
            if self.is_cohort:
                in_cohort(run, number)
        return self.waiting


class Simulation:
    """A batcher, an executor that is a formula, and clients."""

    def __init__(
        self, *clients: Client, max_step_time_s: float | None = None, row_s: dict[str, float] | None = None
    ) -> None:
        self.clock = Clock()
        self.row_s = row_s or {}
        self.batcher = Batcher(MAX_ROWS, max_step_time_s, self.clock)
        self.arrivals = [(self.clock.now_ns + index, index) for index in range(len(clients))]
        self.clients = clients
        self.running: dict[RunningAppend, Client] = {}
        self.steps: list[Counter[str]] = []
        self.busy_s: defaultdict[str, float] = defaultdict(float)
        self.num_sent = 0

    def run(self, seconds: float) -> None:
        """Let the time pass."""
        end_ns = self.clock.now_ns + int(seconds * 1e9)
        while self.clock.now_ns < end_ns:
            self._arrive()
            if not self._step():
                wait_ns = int(self.batcher.hold_s * 1e9) + 1 if self.running else 10**12
                next_ns = self.arrivals[0][0] if self.arrivals else 10**18
                self.clock.now_ns = min(next_ns, self.clock.now_ns + wait_ns)

    def _arrive(self) -> None:
        while self.arrivals and self.arrivals[0][0] <= self.clock.now_ns:
            client = self.clients[heapq.heappop(self.arrivals)[1]]
            self.num_sent += 1
            self.running |= dict.fromkeys(client.send(self.clock.now_ns, self.num_sent), client)

    def _step(self) -> bool:
        chunks = self.batcher.plan(self.running)
        if not chunks:
            assert (self.batcher.hold_s > 0.0) == bool(self.running)
            return False
        assert self.batcher.hold_s == 0.0
        num_rows = sum(rows_of(chunks))
        assert num_rows <= MAX_ROWS
        step_s = STEP_S + sum(self.row_s.get(each.run.job.principal, ROW_S) * each.num_rows for each in chunks)
        self.clock.now_ns += int(step_s * 1e9)
        self.batcher.learn(chunks, int(step_s * 1e9))
        self.clock.now_ns += COMMIT_NS
        self.steps.append(Counter())
        for chunk in chunks:
            self.steps[-1][chunk.run.job.principal] += chunk.num_rows
            chunk.run.cursor += chunk.num_rows
            if not chunk.run.remaining:
                self._end(chunk.run)
        for principal in self.steps[-1]:
            self.busy_s[principal] += step_s / len(self.steps[-1])
        return True

    def _end(self, run: RunningAppend) -> None:
        client = self.running.pop(run)
        client.waiting.remove(run)
        if not client.waiting:
            now_ns = self.clock.now_ns
            client.latencies_s.append(now_ns * 1e-9 - client.sent_s)
            heapq.heappush(self.arrivals, (now_ns + int(client.away_s * 1e9), self.clients.index(client)))


def decoder(principal: str = "calm", away_s: float = AWAY_S) -> Client:
    """A client that decodes token by token."""
    return Client(principal, [1], is_cohort=False, away_s=away_s)


def alone_per_s() -> float:
    """Decodes per second of a decoder alone."""
    return 1.0 / (STEP_S + ROW_S + AWAY_S)


@pytest.mark.parametrize(
    ("sizes", "least"),
    [([512], 0.35), ([171, 171, 170], 0.35), ([256, *([1] * 256)], 0.4), ([1] * 512, 0.45)],
    ids=["1 chunk", "3 chunks", "mixed", "decodes"],
)
@pytest.mark.parametrize("num_streams", [1, 4])
def test_a_decoder_beside_a_flood_of_the_largest_cohorts_keeps_its_part(
    sizes: list[int], least: float, num_streams: int
) -> None:
    """Cohorts of 512 rows without pause, over one connection or four: they are cut, and then others go first."""
    calm = decoder()
    simulation = Simulation(calm, *(Client("flood", sizes, away_s=0.0) for _ in range(num_streams)))
    simulation.run(5.0)
    assert len(calm.latencies_s) / 5.0 >= least * alone_per_s()
    assert max(calm.latencies_s) <= LONGEST_S + 2 * STEP_S
    assert all(STEP_S + ROW_S * sum(step.values()) <= 1.1 * LONGEST_S + STEP_S for step in simulation.steps)
    assert simulation.busy_s["flood"] >= 0.4 * 5.0, "the flood has its share, too"


def test_a_decoder_beside_two_floods_keeps_a_third() -> None:
    """The time of one is not time that the other leaves to the decoder: a third, less what the pace allows anyway."""
    calm = decoder()
    Simulation(calm, *(Client(name, [512], away_s=0.0) for name in ("a", "b"))).run(10.0)
    assert len(calm.latencies_s) / 10.0 >= 0.25 * alone_per_s()


def test_a_flood_of_cohorts_alone_never_waits() -> None:
    """One principal, however many connections: as many rows as there are, without a pause; cohorts share steps."""
    simulation = Simulation(*(Client("flood", [200], away_s=0.0) for _ in range(4)))
    simulation.run(5.0)
    assert {step["flood"] for step in simulation.steps[3:]} == {400}
    assert simulation.busy_s["flood"] >= 4.98


def test_a_principal_whose_others_have_left_does_not_wait() -> None:
    """Debts are owed to those who are there."""
    simulation = Simulation(Client("flood", [512], away_s=0.0), decoder())
    simulation.run(1.0)
    assert simulation.batcher.plan({}) == [], "all of them may have been cancelled"
    simulation.running = {run: client for run, client in simulation.running.items() if client.principal == "flood"}
    simulation.arrivals = [each for each in simulation.arrivals if each[1] == 0]
    simulation.run(0.2)
    num_steps = len(simulation.steps)
    simulation.run(1.0)
    assert (len(simulation.steps) - num_steps) * (STEP_S + ROW_S * MAX_ROWS) >= 0.95


def test_a_decoder_that_seldom_comes_costs_a_flood_little() -> None:
    """A client that decodes twice a second waits for one cohort each time; in between the flood has the engine."""
    calm = decoder(away_s=0.5)
    simulation = Simulation(calm, Client("flood", [512], away_s=0.0))
    simulation.run(10.0)
    assert simulation.busy_s["flood"] >= 0.85 * 10.0
    assert max(calm.latencies_s) <= 2 * (STEP_S + ROW_S * MAX_ROWS)


def test_cohorts_of_two_principals_alternate() -> None:
    """Those that do not fit one step together, however many of them one principal has waiting."""
    few, many = Client("few", [300], away_s=0.0), [Client("many", [300], away_s=0.0) for _ in range(8)]
    simulation = Simulation(few, *many)
    simulation.run(5.0)
    assert all(len(step) == 1 for step in simulation.steps)
    principals = [next(iter(step)) for step in simulation.steps]
    assert principals.count("few") == pytest.approx(len(principals) / 2, abs=2)
    assert sum(simulation.busy_s.values()) >= 4.98, "nobody waits for somebody who waits as well"


def test_cohorts_of_two_principals_that_fit_together_share_a_step() -> None:
    """Whole, both of them: neither has a decode."""
    simulation = Simulation(Client("a", [10, 12, 80], away_s=0.0), Client("b", [10, 190], away_s=0.0))
    simulation.run(5.0)
    shared = [step for step in simulation.steps if len(step) == 2]
    assert all(step == {"a": 102, "b": 200} for step in shared)
    assert len(shared) >= 0.9 * len(simulation.steps)


def test_a_cohort_beside_prompts_of_others_is_whole() -> None:
    """Nobody else decodes: decodes and a chunk are one step, though another principal floods with prompts."""
    simulation = Simulation(Client("a", [*([1] * 100), 100], away_s=0.0), Client("b", [300], is_cohort=False))
    simulation.run(5.0)
    assert {step["a"] for step in simulation.steps} == {0, 200}
    assert sum(step["a"] > 0 for step in simulation.steps) >= 50
    assert sum(step["b"] for step in simulation.steps) >= 5000


def test_principals_with_as_many_decodes_as_each_other_share_their_steps() -> None:
    """Their rows are cheaper together: nobody waits for somebody who has had as much."""
    simulation = Simulation(*(Client(name, [1] * 64) for name in ("a", "b")))
    simulation.run(5.0)
    assert sum(simulation.busy_s.values()) >= 0.98 * 5.0
    for name in ("a", "b"):
        assert sum(step[name] for step in simulation.steps) >= 0.95 * 5.0 * 64 / (2 * (STEP_S + 64 * ROW_S))


def test_clients_with_few_rows_never_wait_for_each_other() -> None:
    """Eight principals that decode one sequence each, at eight rhythms, and one that seldom comes."""
    clients = [decoder(f"p{number}", 0.001 + 0.0003 * number) for number in range(8)]
    simulation = Simulation(*clients, decoder("rare", away_s=0.05))
    simulation.run(5.0)
    assert all(len(client.latencies_s) / 5.0 >= 0.5 * alone_per_s() for client in clients)
    assert sum(simulation.busy_s.values()) >= 0.9 * 5.0


def test_the_first_rows_of_a_kind_are_few() -> None:
    """Nobody knows yet that a row takes 8 ms, and after a pause nobody remembers."""
    simulation = Simulation(decoder(), Client("flood", [1] * 64, away_s=1.5), row_s={"flood": 0.008})
    simulation.run(20.0)
    assert max(step["flood"] for step in simulation.steps if step["calm"]) <= 4


def test_an_append_that_cannot_be_cut_runs_though_its_rows_are_dear() -> None:
    """Eight tokens in one decode, each of 8 ms, beside others; and thirty such principals take turns."""
    calm, few = decoder(), Client("few", [8], is_cohort=False, is_decode=True)
    simulation = Simulation(calm, few, row_s={"few": 0.008})
    simulation.run(5.0)
    assert len(few.latencies_s) >= 0.2 * 5.0 / 0.064
    names = [f"p{number}" for number in range(30)]
    many = [Client(name, [1] * 8) for name in names]
    simulation = Simulation(calm := decoder(), *many, row_s=dict.fromkeys(names, 0.011))
    simulation.run(20.0)
    assert max(sum(step.values()) for step in simulation.steps[200:]) <= 4
    assert all(sum(step[name] for step in simulation.steps) >= 20 for name in names)
    assert max(calm.latencies_s[-50:]) <= LONGEST_S + 0.011 + 2 * STEP_S
    assert len(calm.latencies_s) / 20.0 >= 2 / 31 * alone_per_s()


def test_a_row_that_is_dear_has_a_step_of_its_own() -> None:
    """64 decodes that take 8 ms a row: no step has more of them than 25 ms allow, and the calm one has its part."""
    calm, flood = decoder(), Client("flood", [1] * 64, away_s=0.0)
    simulation = Simulation(calm, flood, row_s={"flood": 0.008})
    simulation.run(10.0)
    assert max(step["flood"] for step in simulation.steps[50:]) <= 4
    assert len(calm.latencies_s) / 10.0 >= 0.4 * alone_per_s()
    assert simulation.busy_s["flood"] >= 0.4 * 10.0


def test_a_cohort_within_the_pace_costs_nothing() -> None:
    """A chunk of 20 rows in every step beside a decoder: they share steps or alternate, and the engine never idles."""
    calm, steady = decoder(), Client("steady", [1, 20])
    simulation = Simulation(calm, steady)
    simulation.run(10.0)
    assert len(calm.latencies_s) / 10.0 >= 0.45 * alone_per_s()
    assert len(steady.latencies_s) / 10.0 >= 0.45 * alone_per_s()


def test_a_prompt_beside_cohorts_without_pause_ends() -> None:
    """What a cohort's step leaves out goes into the next one, the same principal's prompt too, clock or no clock."""
    for principal in ("flood", "other"):
        slow = Client(principal, [1000], is_cohort=False)
        simulation = Simulation(
            *(Client("flood", [512], away_s=0.0) for _ in range(2)), slow, decoder("flood"), max_step_time_s=60.0
        )
        simulation.run(5.0)
        assert len(slow.latencies_s) >= 10, principal
