"""Drivers: requests that are answered piece by piece, out of appends and forks that the engine makes itself.

A driver lives on the engine thread. What it asks for goes through the lanes like anybody's, so leases, quotas, records
and fairness are theirs; what comes of it is handed back right after the commit, so that its next append is in the
next step::

    lanes -- outcome --> collect    during a step, or at once where there is nothing to run
                         turn       after each step: drivers take their outcomes and enter what comes next,
                                    then each that has something to say gives one frame
                                    +- no reader has room: the driver is parked until its window opens

A parked driver has nothing in flight and so pins nothing: should its sequence end meanwhile, it goes on to hear why.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from array import array
from collections import deque
from collections.abc import Callable, Collection
from typing import Protocol

from ferrule_server.engine.appends.lanes import Lanes
from ferrule_server.engine.appends.running import RunningAppend
from ferrule_server.engine.faults import fault
from ferrule_server.engine.jobs import (
    GenerateJob,
    Job,
    LaneJob,
    Outcome,
    OutputRequest,
    Sink,
    StreamJob,
)
from ferrule_server.engine.metrics.counters import EngineCounters
from ferrule_server.errors import Cancelled, FerruleError
from ferrule_server.kv.handle import Handle
from ferrule_server.kv.sequence_store import SequenceStore

Why = Callable[[Handle | None], FerruleError]
"""Makes the error with which everything ends, for what lies behind a handle."""


class Driver(Protocol):
    """One stream job on its way, between two frames."""

    @property
    def job(self) -> StreamJob[object]:
        """What is asked."""
        ...

    @property
    def sink(self) -> Sink:
        """Who asked."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether the last frame, or an error, has been given."""
        ...

    def begin(self, at: float) -> None:
        """Enter the first append; leases are judged at ``at`` on the store's clock."""
        ...

    def take(self, branch: int, job: LaneJob[object], outcome: Outcome, /) -> None:
        """Take what came of an append or a fork, and enter what comes next."""
        ...

    def resume(self, ended: Collection[str] = (), /) -> None:
        """Continue after a pause: the window is open again, or sequences have ended, by their handle_ids."""
        ...

    def end(self, why: Why) -> None:
        """Give up what is not finished; nothing is entered any more, and the next frame is the last."""
        ...

    def next_frame(self) -> Outcome | None:
        """Return what there is to say since the last time, None where there is nothing. Sets ``is_over``."""
        ...


class DriverSink:
    """Where the outcomes of one branch of a driver go. Called on the engine thread, not on the event loop.

    Attributes:
        spent: The branch's append that was committed last, for :meth:`Drivers.enter_again`; None: it takes a new one.
    """

    __slots__ = ("branch", "driver", "spent")

    def __init__(self, driver: Driver, branch: int) -> None:
        self.driver = driver
        self.branch = branch
        self.spent: RunningAppend | None = None

    def deliver(self, job: Job[object], outcome: Outcome) -> None:
        """Hand the outcome to the driver."""
        self.driver.take(self.branch, job, outcome)  # type: ignore[arg-type]  # drivers enter no other jobs

    def flush(self) -> None:
        """Nothing: frames are made at the end of the turn."""


class Drivers:
    """The stream jobs under way.

    Invariant: a driver is active from its start to its last frame, and each is given exactly one last frame or error;
    one that is not parked has an append or a fork in the lanes, or its outcome waits here. If none is active, a turn
    has nothing to do.

    Args:
        store: Tells the time and the model's name for sequences.
        lanes: Where appends and forks go.
        counters: Told how branches ended, and how long tokens took.
        check_loop: Refuses a Generate whose request_id belongs to another request.
        release: Gives a sequence back, whatever is in flight on it.
        finish: Takes each frame or error.

    Attributes:
        active: The drivers under way.
    """

    def __init__(
        self,
        store: SequenceStore,
        lanes: Lanes,
        counters: EngineCounters,
        *,
        check_loop: Callable[[GenerateJob, bytes], None],
        release: Callable[[Handle, str], object],
        finish: Callable[[Job[object], Sink, Outcome], None],
    ) -> None:
        self.check_loop = check_loop
        self.release = release
        self.counters = counters
        self._store = store
        self._lanes = lanes
        self._finish = finish
        self._seed_key = secrets.token_bytes(16)
        self.active: dict[Driver, None] = {}
        self._parked: dict[Driver, set[str]] = {}
        self._touched: dict[Driver, None] = {}
        self._outcomes: deque[tuple[DriverSink, LaneJob[object], Outcome]] = deque()
        self._ended: set[str] = set()
        self._is_woken = False

    @property
    def num_parked(self) -> int:
        """Drivers that wait for their readers."""
        return len(self._parked)

    @property
    def has_work(self) -> bool:
        """Whether a turn would do something."""
        return bool(self._outcomes or self._touched or self._is_woken)

    # ---- for the engine ---------------------------------------------------------------------------------------------

    def start(self, driver: Driver, at: float) -> None:
        """Let a driver begin; leases are judged at ``at`` on the store's clock. One that raises has not begun."""
        self.active[driver] = None
        try:
            driver.begin(at)
        except BaseException:
            self._leave(driver)
            raise

    def collect(self, job: LaneJob[object], sink: DriverSink, outcome: Outcome) -> None:
        """Keep what came of an append or a fork for the next turn."""
        if sink.driver in self.active:
            self._outcomes.append((sink, job, outcome))

    def wake(self) -> None:
        """A window may have opened, or a caller may be gone: the next turn looks."""
        self._is_woken = bool(self.active)

    def note_ended(self, handle_id: str) -> None:
        """Record that a sequence has ended, so that a driver that is parked on it resumes."""
        if self._parked:
            self._ended.add(handle_id)
            self._is_woken = True

    def turn(self) -> None:
        """Let every driver take its outcomes and enter what comes next; then deliver a frame of each.

        Who is cancelled ends after that, so that it knows what it has made; what it entered last is not run any more.
        """
        self._is_woken = False
        self._give_all()
        while self._parked:
            self._unpark()
            if not self._outcomes:
                break
            self._give_all()  # refused at once: another driver may take its place
        for driver in [driver for driver in self.active if driver.job.is_cancelled]:
            self._end(driver, lambda _: Cancelled())
        if self._touched:
            touched, self._touched = self._touched, {}
            for driver in touched:
                self._deliver(driver)

    def end_all(self, why: Why) -> None:
        """End every driver; outcomes that wait are dropped."""
        self._outcomes.clear()
        for driver in list(self.active):
            self._end(driver, why)
        self._touched.clear()
        self._parked.clear()

    # ---- for drivers ------------------------------------------------------------------------------------------------

    def enter(self, job: LaneJob[object], sink: DriverSink, at: float | None = None) -> None:
        """Enter an append or a fork; a refusal is handed back like any outcome."""
        try:
            self._lanes.enter(job, sink, self._store.clock() if at is None else at)
        except FerruleError as error:
            self._outcomes.append((sink, job, error))
        except Exception:  # noqa: BLE001 - a bug must end its own branch only
            self._outcomes.append((sink, job, fault(f"job failed kind={type(job).__name__}")))

    def enter_again(self, run: RunningAppend, sink: DriverSink) -> None:
        """Enter the next append of a job whose last one is done, and which says by now what is next: as :meth:`enter`.

        Args:
            run: The last one, ``sink.spent``.
            sink: Of its branch.
        """
        try:
            if self._lanes.enter_again(run, self._store.clock()):
                return
        except FerruleError as error:
            self._outcomes.append((sink, run.job, error))
            return
        except Exception:  # noqa: BLE001 - a bug must end its own branch only
            self._outcomes.append((sink, run.job, fault("job failed kind=AppendJob")))
            return
        sink.spent = None
        self.enter(run.job, sink)

    def touch(self, driver: Driver) -> None:
        """The driver has something to say at the end of this turn."""
        self._touched[driver] = None

    def park(self, driver: Driver, handle: Handle) -> None:
        """Let the driver go on when its window opens, or when the sequence of ``handle`` has ended."""
        handle_id = handle.handle_id
        self._parked.setdefault(driver, set()).add(handle_id)
        try:
            self._store.resolve(handle, driver.job.principal)
        except FerruleError:  # it ended before a driver was parked on it
            self.note_ended(handle_id)

    def seed_for(self, job: StreamJob[object]) -> int | None:
        """Return what the job draws with: its own seed, or a new one; None where nothing is drawn.

        With a request_id a new one is the same for the same request, so that a repeated one draws the same tokens: a
        digest with a key of this run, which nobody can guess.
        """
        spec = job.output.spec
        if spec is None or spec.sample is None:
            return None
        if job.output.is_seeded:
            return spec.sample.seed
        if not job.request_id:
            return secrets.randbits(64)
        handle = tuple(job.handle) if isinstance(job, GenerateJob) and job.handle is not None else None
        digest = hashlib.blake2b(key=self._seed_key, digest_size=8)
        digest.update(repr((job.principal, job.request_id, handle, len(job.token_ids))).encode())
        digest.update(array("I", job.token_ids).tobytes())
        return int.from_bytes(digest.digest(), "little")

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _give_all(self) -> None:
        while self._outcomes:
            sink, job, outcome = self._outcomes.popleft()
            if sink.driver not in self.active:
                continue
            try:
                sink.driver.take(sink.branch, job, outcome)
            except Exception:  # noqa: BLE001 - a bug must end its own driver only
                error = fault(f"stream failed kind={type(sink.driver.job).__name__}")
                self._end(sink.driver, lambda _, error=error: error)  # type: ignore[misc]

    def _unpark(self) -> None:
        """Let drivers go on whose window is open, or whose sequence has ended."""
        ended, self._ended = self._ended, set()
        for driver, handle_ids in list(self._parked.items()):
            if driver.job.window.is_open or not ended.isdisjoint(handle_ids):
                self._resume(driver, ended)

    def _resume(self, driver: Driver, ended: Collection[str]) -> None:
        del self._parked[driver]
        try:
            driver.resume(ended)
        except Exception:  # noqa: BLE001 - a bug must end its own driver only
            error = fault(f"stream could not be resumed kind={type(driver.job).__name__}")
            self._end(driver, lambda _: error)

    def _end(self, driver: Driver, why: Why) -> None:
        """End a driver and hand over its last word; outcomes that still come are not its own any more."""
        self._parked.pop(driver, None)
        try:
            driver.end(why)
        except Exception:  # noqa: BLE001 - the caller must get an answer
            self._lose(driver, fault("a stream could not be ended"))
        else:
            self._deliver(driver)

    def _deliver(self, driver: Driver) -> None:
        """Hand over what the driver has to say; with its last word it leaves."""
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
            self._finish(driver.job, driver.sink, outcome)

    def _lose(self, driver: Driver, error: FerruleError) -> None:
        self._leave(driver)
        self._parked.pop(driver, None)
        self._finish(driver.job, driver.sink, error)

    def _leave(self, driver: Driver) -> None:
        """Forget a driver that is over; what the last one leaves behind concerns nobody."""
        del self.active[driver]
        if not self.active:
            self._outcomes.clear()
            self._touched.pop(driver, None)
            self._is_woken = False


def seeded(output: OutputRequest, seed: int | None) -> OutputRequest:
    """Return the same request, drawn with ``seed``; None: nothing is drawn."""
    spec = output.spec
    if seed is None or spec is None or spec.sample is None:
        return output
    return dataclasses.replace(
        output, spec=dataclasses.replace(spec, sample=dataclasses.replace(spec.sample, seed=seed)), is_seeded=True
    )
