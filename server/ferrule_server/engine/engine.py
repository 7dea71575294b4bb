"""The engine: one thread that owns the sequence store and the executor, so neither needs a lock.

The life of a request::

    event loop                                engine thread
    ----------                                -------------
    submit([(job, sink), ...]) -- inbox -->   take: host calls are carried out, appends judged and reserved  lanes
                                              gather: wait briefly for the rows of the last step to return
                                              step: plan, copy-on-write copies, executor.run        steps, lookahead
                                              commit: tips move, leases are renewed, records are kept        commits
                                          turn: Generates and Forwards enter their next appends            drivers
    sink.deliver, sink.flush  <-- one call -- hand over all finished jobs, once per step

If an append is cancelled before its step, it has no effect. Once its last rows are planned, it is committed even if its
caller has gone, and a retry is answered as a replay.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from functools import partial

from ferrule_server.engine.appends.cold import lost
from ferrule_server.engine.assembly.assemble import Setup, assemble
from ferrule_server.engine.faults.unexpected import fault
from ferrule_server.engine.generation.forward import ForwardPass
from ferrule_server.engine.generation.generate import Generation
from ferrule_server.engine.jobs import (
    Entry,
    ForwardJob,
    GenerateJob,
    HostCall,
    Job,
    LaneJob,
    QueuedJob,
    Sink,
    StreamJob,
    WarmupJob,
)
from ferrule_server.engine.metrics.counters import EngineCounters
from ferrule_server.engine.metrics.durability import DurabilityFigures
from ferrule_server.errors import Cancelled, Draining, DurabilityLost, FerruleError, HandleExpired
from ferrule_server.executor.base import DeviceLost
from ferrule_server.kv.handle import Handle

_LOG = logging.getLogger(__name__)
_IDLE_S = 1.0
"""Longest sleep of an idle engine: leases are checked at least this often."""
_POLL_S = 0.05
"""Interval between checks of an executor that still prepares what a warm-up needs."""
_TAKE_NS = 50_000_000
"""Longest time for which jobs are taken while others wait for a step or a result; the rest is taken after that. This
is many times what a full step of appends takes, so it only cuts off floods of forks, lists and keep-alives."""
_TAKE_SHARED_NS = 5_000_000
"""The same limit while several principals are active: a flood of one delays the steps of others by no more than
this."""


class Engine:
    """Turns jobs into steps on a thread of its own.

    Invariants:
        * every accepted job is delivered to its sink exactly once; a Generate or Forward gives any number of frames
          before that;
        * a sequence has at most one append in flight, not counting branches from it, and a lane exactly while it has
          one;
        * what a request_id created is created once, and every repeated request gets the same answer;
        * between steps ``store.check_integrity()`` holds, even after failures.

    Args:
        setup: What it is made from.

    Attributes:
        info: What the executor says of itself and its model.
        counters: What has happened so far; written by the engine thread.
        snapshot: Returns a copy of the current state; takes some tens of us, from any thread, at most one step
            old.
        own_figures: Returns the figures of one principal; cheap, from any thread, at most one step old.
        kv_metrics: Returns counters and state of the KV pool; from any thread, at most one step old.
        is_durable: Whether sequences can survive the process.
        restored_masks: Packed bits of registered token masks, by principal and fingerprint, from the journal.

    Raises:
        OSError: The journal cannot be written.
    """

    def __init__(self, setup: Setup) -> None:
        self.info = setup.executor.info
        self.counters = EngineCounters()
        self._setup = setup
        self._parts = parts = assemble(setup, self.counters)
        self._lanes, self._drivers, self._stepper = parts.lanes, parts.drivers, parts.stepper
        self._inbox, self._outlet, self._outcomes = parts.inbox, parts.outlet, parts.outcomes
        self._store, self._shares = setup.store, setup.shares
        self.snapshot, self.own_figures = parts.gauges.snapshot, parts.gauges.own_figures
        self.kv_metrics, self.is_durable = setup.store.metrics, parts.outlet.has_journal
        self._journal, self.restored_masks = parts.outlet.journal, parts.outlet.masks
        self._is_stopping = self._is_closed = False
        self._next_expiry_check = self._hold_s = 0.0
        self._lease_ends_at = math.inf
        self._taken_until: float | None = None
        self._thread = threading.Thread(target=self._main, name="ferrule-engine", daemon=True)

    # ---- any thread -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, entries: list[Entry]) -> None:
        """Hand over jobs that arrived together; they are judged in this order and share a step if they can.

        Never blocks and never raises. Jobs beyond a limit are refused here, without waiting for a step. Once the engine
        is closed, jobs are answered with DRAINING.
        """
        entries, refused = self._parts.gate.admit(entries)
        if refused:
            self._parts.delivery.refuse(refused)
        if not entries:
            return
        now_ns = time.monotonic_ns()
        for job, _ in entries:
            job.submitted_ns = now_ns  # type: ignore[misc]  # each kind of job has the slot
        for first in range(0, len(entries), self._setup.settings.max_step_rows):  # no more than that can share a step
            self._inbox.put(entries[first : first + self._setup.settings.max_step_rows])
        if self._is_closed:
            self._refuse_rest()

    def resume(self, job: StreamJob[object]) -> None:
        """Continue a job that waited for room in its window, or end it if it has been cancelled.

        A job that does not wait, or is over, is not affected.
        """
        if (job.is_cancelled or job.window.is_open) and not self._is_closed:
            self._inbox.put([])

    def close(self) -> None:
        """Stop after the current step and answer all unfinished jobs with DRAINING. Blocks until done."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def num_free_blocks(self) -> int:
        """Return how many blocks of the pool are free; from any thread, at most one step old."""
        return self._store.pool.num_free

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        is_lost = False
        try:
            while not self._is_stopping:
                self._round()
        except DeviceLost:  # no KV can be trusted any more
            is_lost = True
            self._fail("the device is lost: every handle is lost")
        except Exception:  # noqa: BLE001 - whatever failed, the server must report that nothing runs any more
            self._fail("the engine failed and cannot continue")
        finally:
            self._shut_down(is_lost=is_lost)

    def _fail(self, text: str) -> None:
        """Log the exception under way, and report that nothing runs any more."""
        _LOG.exception(text)
        self._parts.gauges.is_failed = True
        self._setup.on_failure()

    def _round(self) -> None:
        """Take new jobs, run a step if appends wait for one, hand over the results, and tend executor and journal."""
        self._take()
        if self._outlet.has_journal and (undelivered := self._outlet.tend()) is not None:
            self._outcomes.finished += undelivered
            self._drivers.end_some(self._outlet.concerns, lambda _: DurabilityLost())
        if time.monotonic() >= self._next_expiry_check:
            self._expire()
        self._turn()
        if self._lanes.running:
            self._stepper.step()
            self._hold_s = min(self._stepper.hold_s, _POLL_S)
            self._turn()
            self.counters.timings.settle()
        if self._parts.warmup.queue:
            self._stepper.warm()
            self._turn()
        if not self._is_stopping:
            self._stepper.tend()

    def _take(self) -> None:
        """Carry out what is in the inbox. Sleep for more only to gather, or if nothing is left to run or hand over.

        Afterwards ``_taken_until`` is None if everything was taken, or the time up to which all arrived jobs were
        taken.
        """
        busy_ns = 0
        while (entries := self._next_entries()) is not None:
            if not entries:
                self._drivers.wake()
                continue
            begun_ns = time.monotonic_ns()
            at = self._arrival(entries[0][0].submitted_ns)
            for job, sink in entries:
                if self._accept(job, sink, at):
                    self._next_expiry_check = 0.0  # what is answered now must be recorded with this round
            work_ns = time.monotonic_ns() - begun_ns
            busy_ns += work_ns
            self._inbox.charge(work_ns)
            if self._shares.is_contended:
                self._shares.add_host_work(entries[0][0].principal, work_ns)
            if busy_ns >= (_TAKE_SHARED_NS if self._shares.is_contended else _TAKE_NS):
                earliest_ns = self._inbox.earliest_ns()
                self._taken_until = at if earliest_ns is None else min(at, self._arrival(earliest_ns))
                return
        self._taken_until = None

    def _next_entries(self) -> list[Entry] | None:
        """Return the next jobs that arrived together; None if the loop should continue without more.

        It does not wait if rows are ready to run and all awaited rows have returned.
        """
        patience_s = 0.0
        if self._lanes.running:
            patience_s = max(self._parts.gather.remaining_s(time.monotonic()), self._hold_s)
        elif not (
            self._outcomes.finished
            or self._journal.has_work
            or self._stepper.has_work
            or (self._drivers.active and self._drivers.has_work)
        ):
            is_waiting = self._parts.warmup.queue or self._journal.is_lost
            until_lease_s = max(0.001, self._lease_ends_at - time.monotonic())
            patience_s = min(_POLL_S if is_waiting else _IDLE_S, until_lease_s)
        try:
            entries = self._inbox.next(patience_s)
        except queue.Empty:
            if patience_s > 0.0 and not self._lanes.running:
                self._stepper.idle()
            return None
        finally:
            self._hold_s = 0.0
        self._is_stopping = self._is_stopping or entries is None
        return entries

    def _expire(self) -> None:
        """Free sequences whose leases ended before the time up to which jobs have been taken.

        Jobs left in the inbox arrived later. If this fails, it is tried again, so that no sequence stays forever.
        """
        now = time.monotonic()
        self._next_expiry_check = self._lease_ends_at = now + 0.05
        if self._journal.is_lost:
            self._store.renew_restored()  # their owners cannot do that now
        try:
            self._parts.endings.expire(self._taken_until)
            expiry_s = self._store.next_expiry()  # a lease that begins later lasts longer than the engine ever sleeps
            self._lease_ends_at = now + (_IDLE_S if expiry_s is None else expiry_s)
        except Exception:  # noqa: BLE001 - the next check tries again
            fault("leases could not be ended")

    def _turn(self) -> None:
        """Let streams continue, then hand over all finished jobs."""
        if self._drivers.active or self._outcomes.returned:
            self._drivers.turn()
        finished = self._outcomes.finished
        if finished or self._journal.has_open:
            self._outcomes.finished = []
            self._outlet.hand_over(finished)

    def _shut_down(self, *, is_lost: bool) -> None:
        """Answer all jobs and close the executor; if one part raises, the others are still done.

        Without a device what is in flight is lost, but durable sequences are restored by the next process.
        """
        why: Callable[[Handle | None], FerruleError] = partial(lost, self._store) if is_lost else lambda _: Draining()
        parts: tuple[Callable[[], object], ...] = (
            lambda: self._lanes.end_all(lambda job: why(job.handle)),
            lambda: self._drivers.end_all(why),
            lambda: self._parts.warmup.end_all(lambda: why(None)),
            *((self._parts.endings.lose_all,) if is_lost else ()),
            self._answer_rest,
            self._outlet.close,
            self._stepper.close,
            self._setup.executor.close,
        )
        for part in parts:
            try:
                part()
            except Exception:  # noqa: BLE001 - the parts after it must still be done
                fault("a part of the engine could not be shut down")

    def _answer_rest(self) -> None:
        self._is_closed = True
        with contextlib.suppress(RuntimeError):  # the event loop may be closed already: then no caller waits
            self._turn()
            self._refuse_rest()

    def _refuse_rest(self) -> None:
        """Answer the jobs in the inbox of a closed engine. Each is answered once, by the thread that takes it out."""
        self._parts.delivery.hand_over([(job, sink, Draining()) for job, sink in self._inbox.drain()])

    # ---- taking jobs ------------------------------------------------------------------------------------------------

    def _accept(self, job: Job[object], sink: Sink, at: float) -> bool:
        """Carry out a host call, queue a job in the lane of its sequence, or start it; never raises.

        Args:
            job: The request.
            sink: Receives its outcome, which is the reason if the job is refused.
            at: Time of arrival on the store's clock, at which leases are judged.

        Returns:
            Whether it was refused because a lease has ended.
        """
        try:
            if self._is_stopping:
                raise Draining
            self._dispatch(job, sink, at)
        except FerruleError as error:
            self._outcomes.collect(job, sink, error)
            return isinstance(error, HandleExpired)
        except Exception:  # noqa: BLE001 - a bug must end only its own job
            self._outcomes.collect(job, sink, fault(f"job failed kind={type(job).__name__}"))
        return False

    def _dispatch(self, job: Job[object], sink: Sink, at: float) -> None:
        """Send a job where its kind belongs."""
        if isinstance(job, QueuedJob) and job.handle is not None:
            self._parts.gather.came_back(job.handle.cache_id, time.monotonic())
        if self._journal.is_lost and isinstance(job, QueuedJob) and self._outlet.concerns(job):
            raise DurabilityLost
        if isinstance(job, LaneJob):
            self._lanes.enter(job, sink, at)
        elif isinstance(job, HostCall):
            self._outcomes.collect(job, sink, job.carry_out(self._parts.host, at))
        elif isinstance(job, WarmupJob):
            self._parts.warmup.add(job, sink)
        else:
            assert isinstance(job, GenerateJob | ForwardJob)
            if job.is_cancelled:
                raise Cancelled
            if isinstance(job, GenerateJob):
                self.counters.generate(job.principal)
                self._drivers.start(Generation(job, sink, self._drivers), at)
            else:
                self._drivers.start(ForwardPass(job, sink, self._drivers), at)

    def _arrival(self, submitted_ns: int) -> float:
        """Return when a job was submitted, on the store's clock: a step since then must not cost it its lease."""
        return self._store.clock() - (time.monotonic_ns() - submitted_ns) * 1e-9

    # ---- durability -------------------------------------------------------------------------------------------------

    @property
    def is_journal_lost(self) -> bool | None:
        """Whether calls on durable sequences are answered with DURABILITY_LOST; None: there is no journal."""
        return self._journal.is_lost if self._outlet.has_journal else None

    def durability(self) -> DurabilityFigures | None:
        """Return the figures of the journal; from any thread."""
        return self._journal.figures(self.counters.restored_tokens)
