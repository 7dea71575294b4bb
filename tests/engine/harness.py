"""Runs an engine over the fake executor without gRPC: submit jobs, wait for outcomes."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

from ferrule_server.durability.directory import Wanted
from ferrule_server.durability.files import Files
from ferrule_server.engine import host_calls
from ferrule_server.engine.appends.lanes import Lanes
from ferrule_server.engine.assembly.assemble import Setup
from ferrule_server.engine.durable.opening import open_durability
from ferrule_server.engine.engine import Engine
from ferrule_server.engine.faults.failpoints import Failpoints, NoFailpoints
from ferrule_server.engine.jobs import AppendJob, AppendResult, Job, Outcome, OutputRequest
from ferrule_server.engine.settings import EngineSettings
from ferrule_server.errors import FerruleError
from ferrule_server.executor.base import OutputSpec
from ferrule_server.executor.reference import PagedReferenceExecutor
from ferrule_server.kv.append_rule import Verdict
from ferrule_server.kv.block_pool import BlockPool
from ferrule_server.kv.handle import Handle, StalePolicy
from ferrule_server.kv.new_sequence import NewSequence
from ferrule_server.kv.sequence_store import SequenceStore
from ferrule_server.quotas import LimitsOf, unlimited
from tests.fakes import FakeExecutor

T = TypeVar("T")

GREEDY = OutputRequest(OutputSpec(greedy=True))
NOTHING = OutputRequest(None)


def check_lanes(lanes: Lanes) -> None:
    """Check what the class says of lanes and branches."""
    waiting = [run.waiting or () for run in lanes._lanes.values()]
    assert sum(map(len, waiting)) == lanes.num_waiting
    held = {run for run in lanes.running if not run.reservation.verdict.creates}
    assert set(lanes._lanes.values()) == held, "a lane without its append, or the other way round"
    branches = {run for run in lanes.running if run.reservation.verdict is Verdict.FORK}
    listed = {run: sequence for sequence, runs in lanes._branches.items() for run in runs}
    assert set(listed) == branches, "a branch is not listed, or one that is none"
    assert all(run.reservation.sequence is sequence for run, sequence in listed.items())
    assert all(lanes._branches.values()), "a sequence without branches is listed"


class Pending:
    """A sink for one job: wait for its outcome."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._outcomes: list[Outcome] = []
        self.num_flushes = 0

    def deliver(self, job: Job[object], outcome: Outcome) -> None:
        """Take the outcome; a second one fails the test that reads it."""
        self._outcomes.append(outcome)
        self._event.set()

    def flush(self) -> None:
        """Count the flushes."""
        self.num_flushes += 1

    @property
    def is_done(self) -> bool:
        """Whether the outcome is there."""
        return self._event.is_set()

    def outcome(self) -> Outcome:
        """Wait for the one outcome."""
        assert self._event.wait(60), "no outcome within 60 s"
        assert len(self._outcomes) == 1, "a job was delivered twice"
        return self._outcomes[0]

    def result(self) -> AppendResult:
        """Wait for the outcome of an append that must succeed."""
        outcome = self.outcome()
        if isinstance(outcome, FerruleError):
            raise outcome
        assert isinstance(outcome, AppendResult)
        return outcome

    def error(self) -> FerruleError:
        """Wait for the outcome of a job that must fail."""
        outcome = self.outcome()
        assert isinstance(outcome, FerruleError), f"expected an error, got {outcome}"
        return outcome


class Harness:
    """An engine over a :class:`FakeExecutor`; ``post`` runs at once on the engine's thread.

    Attributes:
        clock: The clock of the store; a test may replace it.
    """

    def __init__(
        self,
        executor: FakeExecutor | None = None,
        *,
        limits_of: LimitsOf = unlimited,
        durable: Path | None = None,
        files: Files | None = None,
        failpoints: Failpoints | None = None,
        **settings: float,
    ) -> None:
        self.executor = executor or FakeExecutor()
        info = self.executor.info
        self.clock: Callable[[], float] = time.monotonic
        durability = None
        if durable is not None:
            wanted = Wanted("test", info.model.fingerprint, info.model.dtype, info.block_size)
            durability = open_durability(durable, wanted, files, segment_bytes=1 << 16)
        self.store = SequenceStore(
            BlockPool(info.num_blocks, info.block_size),
            instance="test",
            epoch="e1",
            max_context=info.model.max_context,
            max_ttl_s=3600,
            clock=self._now,
            limits_of=limits_of,
            durable_epoch=None if durability is None else durability.epoch,
        )
        self.num_failures = 0
        self.engine = Engine(
            Setup(
                self.executor,
                self.store,
                EngineSettings(**{"max_step_time_s": 60.0, **settings}),  # type: ignore[arg-type]
                self._post,
                self._fail,
                limits_of=limits_of,
                durability=durability,
                failpoints=failpoints or NoFailpoints(),
            )
        )

    def _now(self) -> float:
        return self.clock()

    def _post(self, call: Callable[[], None]) -> None:
        call()

    def _fail(self) -> None:
        self.num_failures += 1

    def __enter__(self) -> Harness:
        self.engine.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.engine.close()
        if kind is None:
            self.check_integrity()
            self.engine._parts.gate.check_integrity()
            assert self.engine._parts.gate.num_jobs == 0, "a job that was delivered is still counted"

    def check_integrity(self) -> None:
        """Check everything the engine owns; only while it stands still."""
        self.store.check_integrity()
        self.engine._lanes.admission.records.check_integrity()
        self.engine._lanes.creations.check_integrity({each.handle_id for each in self.store.registry})
        check_lanes(self.engine._lanes)

    def submit(self, job: Job[object]) -> Pending:
        """Submit one job alone."""
        return self.submit_all(job)[0]

    def submit_all(self, *jobs: Job[object]) -> list[Pending]:
        """Submit jobs as one frame."""
        sinks = [Pending() for _ in jobs]
        self.engine.submit(list(zip(jobs, sinks, strict=True)))
        return sinks

    def answer(self, kind: type[T], job: Job[object]) -> T:
        """Submit one job alone and wait for its outcome, which must be of that kind."""
        outcome = self.submit(job).outcome()
        assert isinstance(outcome, kind), f"expected {kind.__name__}, got {outcome}"
        return outcome

    def hold(self, job: Job[object]) -> Pending:
        """Submit one job alone, and stop its first step until :meth:`let_go`."""
        return self.hold_all(job)[0]

    def hold_all(self, *jobs: Job[object]) -> list[Pending]:
        """Submit jobs as one frame, and stop their first step until :meth:`let_go`."""
        self.executor.is_waiting.clear()
        self.executor.gate = threading.Event()
        pending = self.submit_all(*jobs)
        assert self.executor.is_waiting.wait(10), "no step within 10 s"
        return pending

    def let_go(self) -> None:
        """Let the step that is held run, and all that follow."""
        assert self.executor.gate is not None
        self.executor.gate.set()

    def end_leases(self) -> None:
        """Keep the engine busy until it has ended every lease."""
        deadline = time.monotonic() + 60
        while self.engine.snapshot().num_sequences:
            assert time.monotonic() < deadline, "a lease goes on"
            self.submit(host_calls.list_caches("me")).outcome()
            time.sleep(0.01)

    def prefill(self, *token_ids: int, output: OutputRequest = GREEDY) -> AppendResult:
        """Make a sequence and wait."""
        return self.submit(append(None, *token_ids, output=output)).result()

    def decode(self, handle: Handle, *token_ids: int, output: OutputRequest = GREEDY) -> AppendResult:
        """Append and wait."""
        return self.submit(append(handle, *token_ids, output=output)).result()

    def release(self, *handles: Handle) -> Outcome:
        """Release and wait."""
        return self.submit(host_calls.release("me", handles)).outcome()


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait for what happens on another thread."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "not within 60 s"
        time.sleep(0.002)


def paged_harness(block_size: int = 16) -> Harness:
    """An engine over the paged reference executor, whose logits are the same bits in whatever steps they are run."""
    executor = PagedReferenceExecutor(kv_memory_bytes=4 << 20, block_size=block_size)
    return Harness(cast("FakeExecutor", executor), max_step_rows=24)


def logits_of(result: AppendResult) -> bytes:
    """The bits of the last row's logits."""
    logits = result.rows[-1].logits
    assert logits is not None
    return logits.tobytes()


def append(
    handle: Handle | None,
    *token_ids: int,
    output: OutputRequest = GREEDY,
    on_stale: StalePolicy = StalePolicy.FAIL,
    principal: str = "me",
    **fields: Any,  # of the job, or of its NewSequence
) -> AppendJob:
    """An append job, as a rule of the principal ``me``."""
    return AppendJob(principal, token_ids, handle, output, on_stale, **with_new(fields))


def with_new(given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a job, with those of its NewSequence in one."""
    names = {each.name for each in dataclasses.fields(NewSequence)}
    new = NewSequence(**{name: value for name, value in given.items() if name in names})
    return {"new": new, **{name: value for name, value in given.items() if name not in names}}
