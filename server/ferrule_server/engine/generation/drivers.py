"""Drivers: requests that are answered piece by piece, by appends and forks that the engine enters itself.

A driver lives on the engine thread. Its appends pass through the lanes like all others, so leases, quotas, records and
fairness apply to them. Their outcomes are handed back right after the commit, so that the next append is in the next
step::

    lanes -- outcome --> Outcomes   during a step, or at once if there is nothing to run
                         turn       after each step: drivers take their outcomes and enter what comes next,
                                    then each that has news gives one frame
                                    +- no reader has room: the driver is parked until its window opens

A parked driver has nothing in flight and pins nothing. If its sequence ends meanwhile, it resumes in order to report
why.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from array import array
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from ferrule_server.engine.appends.lanes import Lanes
from ferrule_server.engine.appends.running import RunningAppend
from ferrule_server.engine.faults.unexpected import fault
from ferrule_server.engine.jobs import SEED_BITS, GenerateJob, Job, LaneJob, Outcome, OutputRequest, Sink, StreamJob
from ferrule_server.engine.metrics.counters import EngineCounters
from ferrule_server.errors import Cancelled, FerruleError
from ferrule_server.kv.handle import Handle
from ferrule_server.kv.sequence_store import SequenceStore

Why = Callable[[Handle | None], FerruleError]
"""Returns the error with which a driver or branch ends, given its handle."""


class Driver(Protocol):
    """One stream job in progress, between two frames.

    Attributes:
        sink: Receives the frames.
        is_over: Whether the last frame, or an error, has been given.
    """

    sink: Sink
    is_over: bool

    @property
    def job(self) -> StreamJob[object]:
        """The request."""

    def begin(self, at: float) -> None:
        """Enter the first append; leases are judged at ``at`` on the store's clock."""

    def take(self, branch: int, job: LaneJob[object], outcome: Outcome, /) -> None:
        """Take the outcome of an append or a fork, and enter what comes next."""

    def resume(self, ended: Collection[str] = (), /) -> None:
        """Continue after a pause: the window is open again, or sequences have ended, by their handle_ids."""

    def end(self, why: Why) -> None:
        """Give up all unfinished work; nothing more is entered, and the next frame is the last."""

    def next_frame(self) -> Outcome | None:
        """Return the news since the last frame, None if there is none. Sets ``is_over``."""


@dataclass(eq=False, slots=True)
class DriverSink:
    """Names the branch of a driver that an outcome is for. It is never delivered to: see :class:`Outcomes`."""

    driver: Driver
    branch: int


Returned = tuple[DriverSink, LaneJob[object], Outcome]


class Outcomes:
    """The outcomes of all jobs, each kept once until somebody takes it.

    Args:
        counters: Counts what clients are refused.

    Attributes:
        finished: For clients: to be handed over after this turn.
        returned: For drivers: to be taken in the next turn.
    """

    def __init__(self, counters: EngineCounters) -> None:
        self._counters = counters
        self.finished: list[tuple[Job[object], Sink, Outcome]] = []
        self.returned: deque[Returned] = deque()

    def collect(self, job: Job[object], sink: Sink, outcome: Outcome) -> None:
        """Keep the outcome of a job."""
        if isinstance(sink, DriverSink):
            self.returned.append((sink, job, outcome))  # type: ignore[arg-type]  # drivers enter no other jobs
            return
        if isinstance(outcome, FerruleError):
            self._counters.refuse(job.principal, outcome.reason)
        self.finished.append((job, sink, outcome))


@dataclass(eq=False)
class Drivers:
    """The stream jobs in progress.

    Invariant: a driver is active from its start to its last frame, and gives exactly one last frame or error; if it is
    not parked, it has an append or a fork in the lanes, or an outcome that waits here. If none is active, a turn has
    nothing to do.

    Args:
        store: Gives the time, and resolves handles.
        lanes: Receives appends and forks.
        counters: Counts how branches ended, and how long tokens took.
        check_loop: Refuses a Generate whose request_id belongs to another request.
        release: Releases a sequence, whatever is in flight on it.
        outcomes: Takes each frame or error, and has the outcomes of the appends and forks that drivers enter.
        seed_key: 16 secret bytes from which seeds are derived.

    Attributes:
        active: The drivers in progress.
        parked: Those of them that wait for their readers, and the sequences that each continues then.
    """

    store: SequenceStore
    lanes: Lanes
    counters: EngineCounters
    check_loop: Callable[[GenerateJob, bytes], None]
    release: Callable[[Handle, str], object]
    outcomes: Outcomes
    seed_key: bytes = field(repr=False)
    active: dict[Driver, None] = field(default_factory=dict, init=False)
    parked: dict[Driver, set[str]] = field(default_factory=dict, init=False)
    _touched: dict[Driver, None] = field(default_factory=dict, init=False)
    _ended: set[str] = field(default_factory=set, init=False)
    _is_woken: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        """Share what is returned."""
        self._returned = self.outcomes.returned

    @property
    def has_work(self) -> bool:
        """Whether a turn would do something."""
        return bool(self._returned or self._touched or self._is_woken)

    # ---- for the engine ---------------------------------------------------------------------------------------------

    def start(self, driver: Driver, at: float) -> None:
        """Start a driver; leases are judged at ``at`` on the store's clock. A driver that raises has not begun."""
        self.active[driver] = None
        try:
            driver.begin(at)
        except BaseException:
            self._leave(driver)
            raise

    def wake(self) -> None:
        """Make the next turn check for open windows and cancelled jobs."""
        self._is_woken = bool(self.active)

    def note_ended(self, handle_id: str) -> None:
        """Record that a sequence has ended, so that a driver that is parked on it resumes."""
        if self.parked:
            self._ended.add(handle_id)
            self._is_woken = True

    def turn(self) -> None:
        """Let every driver take its outcomes and enter what comes next; then deliver a frame of each.

        Cancelled drivers end after that, so that they know which sequences they have created; their last appends are
        not run.
        """
        self._is_woken = False
        self._give_all()
        while self.parked:
            self._unpark()
            if not self._returned:
                break
            self._give_all()  # refused at once: another driver may take its place
        for driver in [driver for driver in self.active if driver.job.is_cancelled]:
            self._end(driver, lambda _: Cancelled())
        if self._touched:
            touched, self._touched = self._touched, {}
            for driver in touched:
                self._deliver(driver)

    def end_some(self, is_ended: Callable[[StreamJob[object]], bool], why: Why) -> None:
        """End the drivers of some jobs."""
        for driver in [driver for driver in self.active if is_ended(driver.job)]:
            self._end(driver, why)

    def end_all(self, why: Why) -> None:
        """End every driver; waiting outcomes are dropped."""
        self._returned.clear()
        for driver in list(self.active):
            self._end(driver, why)
        self._touched.clear()
        self.parked.clear()

    # ---- for drivers ------------------------------------------------------------------------------------------------

    def enter(
        self, job: LaneJob[object], sink: DriverSink, at: float | None = None, spent: RunningAppend | None = None
    ) -> RunningAppend | None:
        """Enter an append or a fork, as :meth:`Lanes.enter` does; a refusal is handed back like any outcome."""
        try:
            at = self.store.clock() if at is None else at
            return self.lanes.enter(job, sink, at, spent)  # type: ignore[arg-type]  # lanes only hand it to Outcomes
        except FerruleError as error:
            self._returned.append((sink, job, error))
        except Exception:  # noqa: BLE001 - a bug must end its own branch only
            self._returned.append((sink, job, fault(f"job failed kind={type(job).__name__}")))
        return None

    def touch(self, driver: Driver) -> None:
        """Record that the driver has news at the end of this turn."""
        self._touched[driver] = None

    def park(self, driver: Driver, handle: Handle) -> None:
        """Park the driver until its window opens or the sequence of ``handle`` has ended."""
        handle_id = handle.handle_id
        self.parked.setdefault(driver, set()).add(handle_id)
        try:
            self.store.resolve(handle, driver.job.principal)
        except FerruleError:  # it ended before a driver was parked on it
            self.note_ended(handle_id)

    def seed_for(self, job: StreamJob[object]) -> int | None:
        """Return the seed that the job draws with: its own, or a new one; None if nothing is drawn.

        With a request_id the new seed is the same for equal requests, so that a repeated request draws the same tokens:
        it is a digest with a secret key of this server run, or of its journal, so it cannot be guessed.
        """
        spec = job.output.spec
        if spec is None or spec.sample is None:
            return None
        if job.output.is_seeded:
            return spec.sample.seed
        if not job.request_id:
            return secrets.randbits(SEED_BITS)
        handle = tuple(job.handle) if isinstance(job, GenerateJob) and job.handle is not None else None
        digest = hashlib.blake2b(key=self.seed_key, digest_size=8)
        digest.update(repr((job.principal, job.request_id, handle, len(job.token_ids))).encode())
        digest.update(array("I", job.token_ids).tobytes())
        return int.from_bytes(digest.digest(), "little") >> (64 - SEED_BITS)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _give_all(self) -> None:
        while self._returned:
            sink, job, outcome = self._returned.popleft()
            if sink.driver not in self.active:
                continue
            try:
                sink.driver.take(sink.branch, job, outcome)
            except Exception:  # noqa: BLE001 - a bug must end its own driver only
                error = fault(f"stream failed kind={type(sink.driver.job).__name__}")
                self._end(sink.driver, lambda _, error=error: error)  # type: ignore[misc]

    def _unpark(self) -> None:
        """Resume drivers whose window is open or whose sequence has ended."""
        ended, self._ended = self._ended, set()
        for driver, handle_ids in list(self.parked.items()):
            if driver.job.window.is_open or not ended.isdisjoint(handle_ids):
                self._resume(driver, ended)

    def _resume(self, driver: Driver, ended: Collection[str]) -> None:
        del self.parked[driver]
        try:
            driver.resume(ended)
        except Exception:  # noqa: BLE001 - a bug must end its own driver only
            error = fault(f"stream could not be resumed kind={type(driver.job).__name__}")
            self._end(driver, lambda _: error)

    def _end(self, driver: Driver, why: Why) -> None:
        """End a driver and deliver its last frame; later outcomes are ignored."""
        self.parked.pop(driver, None)
        try:
            driver.end(why)
        except Exception:  # noqa: BLE001 - the caller must get an answer
            self._lose(driver, fault("a stream could not be ended"))
        else:
            self._deliver(driver)

    def _deliver(self, driver: Driver) -> None:
        """Deliver the news of the driver; after its last frame it leaves."""
        if driver not in self.active:
            return
        try:
            outcome = driver.next_frame()
            assert outcome is not None or not driver.is_over, "a driver is over and gave no last frame"
        except Exception:  # noqa: BLE001 - the caller must get an answer
            self._lose(driver, fault("a frame could not be made"))
            return
        if driver.is_over:
            self._leave(driver)
        if outcome is not None:
            self.outcomes.collect(driver.job, driver.sink, outcome)

    def _lose(self, driver: Driver, error: FerruleError) -> None:
        self._leave(driver)
        self.parked.pop(driver, None)
        self.outcomes.collect(driver.job, driver.sink, error)

    def _leave(self, driver: Driver) -> None:
        """Forget a driver that is over; if it was the last one, its remaining outcomes are dropped."""
        del self.active[driver]
        if not self.active:
            self._returned.clear()
            self._touched.pop(driver, None)
            self._is_woken = False


def seeded(output: OutputRequest, seed: int | None) -> OutputRequest:
    """Return the same request with the seed ``seed``; None: nothing is drawn."""
    spec = output.spec
    if seed is None or spec is None or spec.sample is None:
        return output
    return dataclasses.replace(
        output, spec=dataclasses.replace(spec, sample=dataclasses.replace(spec.sample, seed=seed)), is_seeded=True
    )
