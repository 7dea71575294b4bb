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
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping

from ferrule_server.durability.records import End
from ferrule_server.engine.appends.admission import Admission
from ferrule_server.engine.appends.caches import Caches
from ferrule_server.engine.appends.cold import Cold, lost
from ferrule_server.engine.appends.commits import Commits
from ferrule_server.engine.appends.creations import Creations
from ferrule_server.engine.appends.endings import Endings
from ferrule_server.engine.appends.lanes import Lanes
from ferrule_server.engine.appends.records import ReplayRecords
from ferrule_server.engine.bridge.delivery import Delivery, Later
from ferrule_server.engine.bridge.gate import Finished, Gate
from ferrule_server.engine.bridge.inbox import Inbox
from ferrule_server.engine.durable.confirmations import Confirmations
from ferrule_server.engine.durable.opening import Durability
from ferrule_server.engine.failpoints import Failpoints
from ferrule_server.engine.faults import fault
from ferrule_server.engine.generation.drivers import Driver, Drivers, DriverSink
from ferrule_server.engine.generation.forward import ForwardPass
from ferrule_server.engine.generation.generate import Generation
from ferrule_server.engine.host_calls import Host
from ferrule_server.engine.jobs import (
    Entry,
    ForwardJob,
    GenerateJob,
    HostCall,
    Job,
    LaneJob,
    Outcome,
    QueuedJob,
    Sink,
    StreamJob,
    WarmupJob,
)
from ferrule_server.engine.metrics.counters import EngineCounters, EngineSnapshot, OwnFigures
from ferrule_server.engine.metrics.durability import DurabilityFigures
from ferrule_server.engine.settings import EngineSettings
from ferrule_server.engine.shares import Shares
from ferrule_server.engine.steps.gather import GatherWindow
from ferrule_server.engine.steps.stepper import Stepper
from ferrule_server.engine.steps.warmup import Warmup
from ferrule_server.engine.viewer import Viewer
from ferrule_server.errors import Cancelled, Draining, DurabilityLost, FerruleError, HandleExpired
from ferrule_server.executor.base import DeviceLost, Executor, KvLost
from ferrule_server.kv.metrics import KvMetrics
from ferrule_server.kv.sequence_store import SequenceStore
from ferrule_server.quotas import LimitsOf, unlimited

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
        executor: Owned by the engine from now on; closed with it.
        store: Owned by the engine from now on.
        settings: Limits.
        post: Runs a callable on the event loop's thread, such as ``loop.call_soon_threadsafe``.
        later: Runs a callable on that thread after some seconds, such as ``loop.call_later``; None: frames of a
            Generate never wait for others.
        on_failure: Called once, on the engine thread, when the engine cannot continue, such as after a lost device.
        limits_of: The quotas of a principal.
        shares: Counts the work for each principal; None: the counts are not read.
        durability: The journal of durable sequences and what it described at start; None: there are none.
        failpoints: For tests: where to fail on purpose.

    Attributes:
        restored_masks: Packed bits of registered token masks, by principal and fingerprint, from the journal.

    Raises:
        OSError: The journal cannot be written.
    """

    def __init__(
        self,
        executor: Executor,
        store: SequenceStore,
        settings: EngineSettings,
        post: Callable[[Callable[[], None]], object],
        on_failure: Callable[[], object] = lambda: None,
        *,
        later: Later | None = None,
        limits_of: LimitsOf = unlimited,
        shares: Shares | None = None,
        durability: Durability | None = None,
        failpoints: Failpoints | None = None,
    ) -> None:
        self.info = executor.info
        self.counters = EngineCounters()
        self._executor = executor
        self._store = store
        self._settings = settings
        self._on_failure = on_failure
        self._inbox = Inbox()
        self._shares = Shares() if shares is None else shares
        self._failpoints = failpoints
        self._records = ReplayRecords(settings.retained_bytes, limits_of)
        self._creations = Creations(store.clock)
        self._journal = journal = None if durability is None else durability.journal
        caches = Caches(
            store,
            self.info.bytes_per_block,
            lambda sequence: self._lanes.num_pending(sequence),  # noqa: PLW0108 - the lanes are made after it
            lambda sequence: self._lanes.warm(sequence),  # noqa: PLW0108
            journal,
        )
        admission = Admission(store, self._records, self._creations, self.counters)
        self._lanes = Lanes(
            store,
            admission,
            caches,
            creations=self._creations,
            cold=Cold(store, self.counters, settings.restore_wait_tokens),
            counters=self.counters,
            finish=self._finish,
            journal=journal,
            failpoints=failpoints,
        )
        self._gather = GatherWindow(settings)
        self._endings = Endings(store, self._lanes, self._gather.forget, self.counters, failpoints)
        self._drivers = Drivers(
            store,
            self._lanes,
            self.counters,
            check_loop=self._creations.check_loop,
            release=self._endings.release_one,
            finish=self._finish,
            seed_key=secrets.token_bytes(16) if durability is None else durability.seed_key,
        )
        self._warmup = Warmup(executor, settings.max_step_rows, self._finish)
        self._stepper = Stepper(
            executor,
            store,
            settings,
            self._lanes,
            Commits(store, self._records, self._creations, self.counters, journal, failpoints),
            warmup=self._warmup,
            gather=self._gather,
            counters=self.counters,
            shares=self._shares,
            failpoints=failpoints,
        )
        self._endings.subscribe(
            self._records.forget, self._stepper.forget, self._creations.note_ended, self._drivers.note_ended
        )
        if journal is not None:
            self._endings.subscribe(journal.note_ended)
        self._gate = Gate(settings.max_waiting_jobs, limits_of)
        self._delivery = Delivery(post, self._gate, later)
        self.restored_masks: Mapping[tuple[str, bytes], bytes] = {}
        self._confirmations: Confirmations | None = None
        if durability is not None:
            self.restored_masks = durability.state.masks
            self._confirmations = Confirmations(durability.journal, store, self._delivery)
            self._confirmations.restore(durability, self._records, self._creations, lambda: self._inbox.put([]))
        viewer = Viewer(store, self._gate, self.counters.own, self._lanes.num_pending, self.snapshot)
        self._host = Host(caches, self._endings, viewer, journal)
        self._is_stopping = False
        self._is_failed = False
        self._is_closed = False
        self._next_expiry_check = 0.0
        self._taken_until: float | None = None
        self._hold_s = 0.0
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
        entries, refused = self._gate.admit(entries)
        if refused:
            self._delivery.refuse(refused)
        if not entries:
            return
        now_ns = time.monotonic_ns()
        for job, _ in entries:
            job.submitted_ns = now_ns  # type: ignore[misc]  # each kind of job has the slot
        for first in range(0, len(entries), self._settings.max_step_rows):  # no more than that can share a step
            self._inbox.put(entries[first : first + self._settings.max_step_rows])
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

    def snapshot(self) -> EngineSnapshot:
        """Return a copy of the engine's current state; takes 20 us, from any thread, at most one step old."""
        return EngineSnapshot(
            counters=self.counters.copy(),
            num_running=len(self._lanes.running),
            num_waiting=self._lanes.num_waiting,
            num_sequences=len(self._store.registry),
            num_durable=0 if self._journal is None else len(self._journal),
            total_blocks=self.info.num_blocks - 1,
            free_blocks=self.num_free_blocks(),
            is_failed=self._is_failed,
            refused_at_gate=self._gate.refused,
            num_streams=len(self._drivers.active),
            num_parked=self._drivers.num_parked,
            num_arrived=len(self._inbox),
        )

    def num_free_blocks(self) -> int:
        """Return how many blocks of the pool are free; from any thread, at most one step old."""
        return self._store.pool.num_free

    def kv_metrics(self) -> KvMetrics:
        """Return counters and state of the KV pool; from any thread, at most one step old."""
        return self._store.metrics()

    def own_figures(self, principal: str) -> OwnFigures:
        """Return the figures of one principal; cheap, from any thread, at most one step old."""
        return OwnFigures(
            self._store.registry.count(principal),
            self.counters.own.look(principal),
            self._store.ledger.own.look(principal),
            self._gate.refused_of(principal),
        )

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not self._is_stopping:
                try:
                    self._round()
                except DeviceLost:
                    self._lose_device()
                except KvLost:
                    _LOG.exception("event=kv_lost every handle is lost, new ones can be made")
                    self._lose_kv()
        except Exception:  # noqa: BLE001 - whatever failed, the server must report that nothing runs any more
            _LOG.exception("the engine failed and cannot continue")
            self._is_failed = True
            self._on_failure()
        finally:
            self._shut_down()

    def _round(self) -> None:
        """Take new jobs, run a step if appends wait for one, hand over the results, and tend executor and journal."""
        self._take()
        if self._confirmations is not None and self._confirmations.journal.tend():
            self._confirmations.lose()
            self._drivers.end_some(self._confirmations.is_durable, lambda _: DurabilityLost())
        self._expire()
        self._turn()
        if self._lanes.running:
            self._stepper.step()
            self._hold_s = min(self._stepper.hold_s, _POLL_S)
            self._turn()
            self.counters.timings.settle()
        if self._warmup.queue:
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
                self._accept(job, sink, at)
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
        """Return the next jobs that arrived together; None if the loop should continue without more."""
        patience_s = self._patience_s()
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

    def _patience_s(self) -> float:
        """Return how many seconds to wait for the next job.

        It is 0 if rows are ready to run and all awaited rows have returned.
        """
        if self._lanes.running:
            return max(self._gather.remaining_s(time.monotonic()), self._hold_s)
        has_work = self._drivers.active and self._drivers.has_work
        has_work = has_work or (self._journal is not None and self._journal.has_work)
        if self._delivery.finished or has_work or self._stepper.has_work:
            return 0.0
        is_waiting = self._warmup.queue or (self._journal is not None and self._journal.is_lost)
        most_s = _POLL_S if is_waiting else _IDLE_S
        expiry_s = self._store.next_expiry()
        return most_s if expiry_s is None else min(most_s, max(0.001, expiry_s))

    def _expire(self) -> None:
        """Free sequences whose leases ended before the time up to which jobs have been taken.

        Jobs left in the inbox arrived later. If this fails, it is tried again, so that no sequence stays forever.
        """
        now = time.monotonic()
        if now < self._next_expiry_check:
            return
        self._next_expiry_check = now + 0.05
        if self._journal is not None and self._journal.is_lost:
            self._store.renew_restored()  # their owners cannot do that now
        try:
            if self._failpoints is not None and self._store.next_expiry() == 0.0:
                self._failpoints.hit("during_free")
            expired = self._store.expire(self._taken_until)
        except Exception:  # noqa: BLE001 - the next check tries again
            fault("leases could not be ended")
            return
        for handle_id in expired:
            self.counters.expired += 1
            if self._journal is not None:
                self._journal.note_ended(handle_id, End.EXPIRED)
            self._endings.notify(handle_id)
            _LOG.info("lease expired handle_id=%s", handle_id)

    def _turn(self) -> None:
        """Let streams continue, then hand over all finished jobs."""
        if self._drivers.active:
            self._drivers.turn()
        self._hand_over()

    def _hand_over(self) -> None:
        if self._journal is not None:
            self._journal.close_group()
        if self._delivery.finished:
            (self._delivery if self._confirmations is None else self._confirmations).hand_over()

    def _shut_down(self) -> None:
        """Answer all jobs and close the executor; if one part raises, the others are still done."""
        parts: tuple[Callable[[], object], ...] = (
            lambda: self._lanes.end_all(lambda _: Draining()),
            lambda: self._drivers.end_all(lambda _: Draining()),
            lambda: self._warmup.end_all(Draining),
            self._answer_rest,
            *(() if self._confirmations is None else (self._confirmations.close,)),
            self._stepper.close,
            self._executor.close,
        )
        for part in parts:
            try:
                part()
            except Exception:  # noqa: BLE001 - the parts after it must still be done
                fault("a part of the engine could not be shut down")

    def _answer_rest(self) -> None:
        self._is_closed = True
        with contextlib.suppress(RuntimeError):  # the event loop may be closed already: then no caller waits
            self._hand_over()
            self._refuse_rest()

    def _refuse_rest(self) -> None:
        """Answer the jobs in the inbox of a closed engine. Each is answered once, by the thread that takes it out."""
        refused: list[Finished] = [(job, sink, Draining()) for job, sink in self._inbox.drain()]
        if refused:
            self._delivery.deliver(refused)

    # ---- taking jobs ------------------------------------------------------------------------------------------------

    def _arrival(self, submitted_ns: int) -> float:
        """Return when a job was submitted, on the store's clock: a step since then must not cost it its lease."""
        return self._store.clock() - (time.monotonic_ns() - submitted_ns) * 1e-9

    def _accept(self, job: Job[object], sink: Sink, at: float) -> None:
        """Carry out a host call, queue a job in the lane of its sequence, or start it. Never raises.

        Args:
            job: The request.
            sink: Receives its outcome.
            at: Time of arrival on the store's clock, at which leases are judged.
        """
        try:
            if self._is_stopping:
                raise Draining
            if isinstance(job, QueuedJob) and job.handle is not None:
                self._gather.came_back(job.handle.cache_id, time.monotonic())
            if self._confirmations is not None:
                self._confirmations.check(job)
            if isinstance(job, LaneJob):
                self._lanes.enter(job, sink, at)
            elif isinstance(job, HostCall):
                self._finish(job, sink, job.carry_out(self._host, at))
            elif isinstance(job, StreamJob):
                self._start_stream(job, sink, at)
            else:
                assert isinstance(job, WarmupJob)
                self._warmup.add(job, sink)
        except FerruleError as error:
            if isinstance(error, HandleExpired):
                self._next_expiry_check = 0.0  # what is answered now must be recorded with this round
            self._finish(job, sink, error)
        except Exception:  # noqa: BLE001 - a bug must end only its own job
            self._finish(job, sink, fault(f"job failed kind={type(job).__name__}"))

    def _start_stream(self, job: StreamJob[object], sink: Sink, at: float) -> None:
        if job.is_cancelled:
            raise Cancelled
        driver: Driver
        if isinstance(job, GenerateJob):
            self.counters.generate(job.principal)
            driver = Generation(job, sink, self._drivers)
        else:
            assert isinstance(job, ForwardJob)
            driver = ForwardPass(job, sink, self._drivers)
        self._drivers.start(driver, at)

    # ---- leaving ----------------------------------------------------------------------------------------------------

    def _finish(self, job: Job[object], sink: Sink, outcome: Outcome) -> None:
        if isinstance(sink, DriverSink):
            self._drivers.collect(job, sink, outcome)  # type: ignore[arg-type]  # drivers enter no other jobs
            return
        if isinstance(outcome, FerruleError):
            self.counters.refuse(job.principal, outcome.reason)
        self._delivery.finished.append((job, sink, outcome))

    # ---- durability -------------------------------------------------------------------------------------------------

    @property
    def is_durable(self) -> bool:
        """Whether sequences can survive the process."""
        return self._journal is not None

    @property
    def is_journal_lost(self) -> bool | None:
        """Whether calls on durable sequences are answered with DURABILITY_LOST; None: there is no journal."""
        return None if self._journal is None else self._journal.is_lost

    def durability(self) -> DurabilityFigures | None:
        """Return the figures of the journal; from any thread."""
        if self._confirmations is None:
            return None
        return self._confirmations.figures(self.counters.restored_tokens)

    # ---- faults -----------------------------------------------------------------------------------------------------

    def _lose_device(self) -> None:
        """Fail everything: no KV can be trusted any more, every handle is lost, and nothing runs again."""
        _LOG.exception("the device is lost: every handle is lost")
        self._is_failed = True
        self._is_stopping = True
        self._lose_kv()
        self._on_failure()

    def _lose_kv(self) -> None:
        """Answer everything in flight, and every handle from now on, with HANDLE_LOST; nothing stays cached.

        Durable sequences stay: what is in flight on them is answered with RESTORING.
        """
        self._lanes.end_all(lambda job: lost(self._store, job.handle))
        self._drivers.end_all(lambda handle: lost(self._store, handle))
        self._warmup.end_all(lambda: lost(self._store, None))
        self._store.lose_all()
        kept = {sequence.handle_id for sequence in self._store.registry}
        self._records.keep_only(kept)
        self._creations.keep_only(kept, self._store.registry.is_durable)
