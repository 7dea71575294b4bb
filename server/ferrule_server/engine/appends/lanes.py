"""Lanes: one job at a time on each sequence, in order of arrival.

At most one append is in flight on a sequence. Other appends, forks and truncates wait in its lane, and are judged when
their turn comes. A release acts at once and ends what is in flight.

If a job is sent again while the first one is in flight, it joins it: the append is run once, both are answered, and it
continues as long as one of them waits for it. Only the next job in line may join, so that jobs are judged in order of
arrival::

    lane of a sequence:   append A  <-  append A  <-  truncate  <-  append A
                          in flight     joins         waits         waits, is judged after the truncate

A cold sequence is computed in its lane: see ``cold.py``.

A branch (``on_stale=FORK``) is judged in its turn as well, but holds no lane. Once its blocks are reserved, later
changes of its source sequence do not affect them, so many branches of one sequence run in one step.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

from ferrule_server.engine.appends.admission import Admission
from ferrule_server.engine.appends.cold import Cold
from ferrule_server.engine.appends.creations import Creations
from ferrule_server.engine.appends.running import Reports, RunningAppend
from ferrule_server.engine.faults.failpoints import Failing
from ferrule_server.engine.faults.unexpected import fault
from ferrule_server.engine.jobs import (
    AppendJob,
    AppendResult,
    ForkJob,
    ForkResult,
    Job,
    LaneJob,
    Outcome,
    Sink,
    TruncateJob,
    TruncateResult,
)
from ferrule_server.engine.metrics.counters import EngineCounters
from ferrule_server.errors import Cancelled, Draining, FerruleError, HandleUnknown
from ferrule_server.kv.append_rule import Verdict, check_handle
from ferrule_server.kv.handle import Handle
from ferrule_server.kv.sequence import Sequence
from ferrule_server.kv.sequence_store import SequenceStore

LaneEntry = tuple[LaneJob[object], Sink]
_REQUEST = attrgetter("token_ids", "handle", "output", "on_stale", "ttl_s", "drafts")


@dataclass(eq=False)
class Lanes:
    """The appends in flight, and the jobs that wait for them.

    Invariant: a sequence has a lane exactly while an append is in flight on it, and at most one is; branches in flight
    are listed by their source sequence; ``num_waiting`` is the number of jobs in all lanes; a waiting job pins its
    sequence.

    Args:
        store: The sequences; called from the engine thread only.
        admission: Turns jobs into running appends.
        creations: The sequences created for each request_id.
        cold: Starts the computation of cold sequences.
        counters: Counts replays and joins.
        finish: Takes the outcome of each job, once.
        journal: Writes what happens to durable sequences.
        failpoints: Where to fail on purpose.

    Attributes:
        running: The appends in flight, oldest first.
    """

    store: SequenceStore
    admission: Admission
    creations: Creations
    cold: Cold
    counters: EngineCounters
    finish: Callable[[Job[object], Sink, Outcome], None]
    journal: Reports
    failpoints: Failing
    running: dict[RunningAppend, None] = field(default_factory=dict, init=False)
    num_waiting: int = field(default=0, init=False)
    _lanes: dict[Sequence, RunningAppend] = field(default_factory=dict, init=False)
    _branches: dict[Sequence, dict[RunningAppend, None]] = field(default_factory=dict, init=False)

    # ---- coming -----------------------------------------------------------------------------------------------------

    def enter(
        self, job: LaneJob[object], sink: Sink, at: float, spent: RunningAppend | None = None
    ) -> RunningAppend | None:
        """Judge the job now, or after the append that is in flight on its sequence.

        Args:
            job: The request.
            sink: Receives its outcome.
            at: Time of arrival on the store's clock, at which leases are judged.
            spent: The last append of the same job, which has the next token and the answered handle now: repeatable and
                not in flight. It is used again if it can be, so that no new objects are made.

        Returns:
            The append that is in flight for the job on a sequence that exists; None: there is none yet.

        Raises:
            FerruleError: The job is refused; nothing changed.
        """
        if job.is_cancelled:
            raise Cancelled
        if spent is not None and self._enter_again(spent, at):
            return spent
        if job.request_id and self._take_repeat(job, sink, at):
            return None
        if job.handle is None:
            assert isinstance(job, AppendJob)
            if job.new.is_repeat_only:
                raise Draining
            self.running[self.admission.create(job, sink)] = None
            return None
        sequence = self.store.resolve(job.handle, job.principal, at)
        run = self._lanes.get(sequence)
        if run is None:
            if isinstance(job, AppendJob):
                self._proceed(self.admission.append(job, sink, sequence), job, sink, sequence)
            else:
                self._judge(job, sink, sequence)
            run = self._lanes.get(sequence)
            return run if run is not None and run.job is job else None
        if not run.waiting and self._may_join(job, run):
            self._join(job, sink, run)
        else:
            self._wait(job, sink, run, sequence)
        return None

    def warm(self, sequence: Sequence) -> None:
        """Compute a cold sequence, for a caller that cannot wait for it.

        Raises:
            ContextExceeded, ExceedsPool, BlocksExhausted, QuotaExceeded: There is no room.
            Restoring: It is being computed now.
        """
        run = self._lanes.get(sequence)
        if run is None:
            run = self.cold.start(sequence, self.running)
            self._begin(run, sequence)
        raise self.cold.restoring(run)

    def _enter_again(self, run: RunningAppend, at: float) -> bool:
        """Let a finished append run again if its sequence is live, idle and at the handle of the job.

        Raises:
            ContextExceeded, ExceedsPool, BlocksExhausted, QuotaExceeded: There is no room; nothing was reserved.
        """
        reservation, handle = run.reservation, run.job.handle
        sequence = reservation.sequence
        if sequence is None or sequence.is_released or sequence in self._lanes:
            return False
        if sequence.expires_at <= at and not sequence.num_pins:
            return False
        assert handle is not None
        if handle.length != len(sequence.chain.token_ids) or sequence.chain.at(handle.length) != handle.lineage:
            return False
        reservations = self.store.reservations
        if not reservations.reserve_again(reservation):
            reservation = reservations.reserve_append(sequence, 1)
        run.restart(reservation)
        self.running[run] = None
        self._lanes[sequence] = run
        return True

    def num_pending(self, sequence: Sequence) -> int:
        """Return how many jobs are in flight or waiting on the sequence, not counting those that joined."""
        run, num_branches = self._lanes.get(sequence), len(self._branches.get(sequence, ()))
        return num_branches if run is None else num_branches + 1 + len(run.waiting or ())

    def _take_repeat(self, job: LaneJob[object], sink: Sink, at: float) -> bool:
        """Answer a job that repeats a creation in flight or done; return False if it repeats none.

        Raises:
            RequestIdReused: Its request_id created something else.
            HandleUnknown, HandleExpired: Every sequence that was created has ended.
            HandleStale: The answered tokens are no longer there.
        """
        creation = self.creations.find(job)
        if creation is None:
            return False
        if isinstance(job, ForkJob):
            result = self._repeat_fork(job, creation.handles, at)
            self.counters.replay(job.principal)
            self.finish(job, sink, result)
            return True
        assert isinstance(job, AppendJob)
        if creation.run is not None:
            self._join(job, sink, creation.run)
            return True
        sequence = self.store.resolve(creation.handles[0], job.principal, at)
        if (run := self._lanes.get(sequence)) is not None:
            self._wait(job, sink, run, sequence)
        else:
            self._proceed(self.admission.replay_creation(job, sink, sequence, creation), job, sink, sequence)
        return True

    def _repeat_fork(self, job: ForkJob, handles: tuple[Handle, ...], at: float) -> ForkResult:
        """Answer a fork again with the handles that it created, and renew the leases of the live ones.

        Each lease keeps its duration.

        Raises:
            HandleUnknown, HandleExpired: None of them is live; this is the error of the first one.
        """
        granted: list[float] = []
        gone: list[FerruleError] = []
        for handle in handles:
            try:
                granted.append(self.store.renew(self.store.resolve(handle, job.principal, at)))
            except FerruleError as error:
                gone.append(error)
        if not granted:
            raise gone[0]
        return ForkResult(handles, min(granted), replayed=True)

    def _judge(self, job: LaneJob[object], sink: Sink, sequence: Sequence) -> None:
        """Carry out or start a job whose turn it is: no append is in flight on the sequence.

        Raises:
            FerruleError: An append is refused, see :meth:`Admission.append`; nothing changed.
            HandleStale: The sequence does not hold the tokens of the handle of a fork or truncate.
            TruncateBeyond: The new length of a truncate is outside [1, length of its handle].
            KvGivenBack: What a row after the new length attends to was given back.
            QuotaExceeded, BlocksExhausted: There is no room for a fork, or for the reserved room after a truncate.
        """
        if isinstance(job, AppendJob):
            self._proceed(self.admission.append(job, sink, sequence), job, sink, sequence)
            return
        result: ForkResult | TruncateResult
        if isinstance(job, ForkJob):
            check_handle(sequence, job.handle)
            branches = self.store.fork(sequence, job.length, job.count, job.ttl_s)
            result = ForkResult(tuple(branch.handle_at() for branch in branches), branches[0].ttl_s)
            creation = self.creations.begin(job) if job.request_id else None
            if creation is not None:
                self.creations.finish(creation, result.handles)
            if sequence.is_durable:
                self.journal.note_fork(sequence, result, creation)
        else:
            assert isinstance(job, TruncateJob)
            freed_blocks = self.store.truncate(sequence, job.handle, job.new_length)
            result = TruncateResult(sequence.handle_at(), freed_blocks)
            if sequence.is_durable:
                self.journal.note_truncate(sequence, job, freed_blocks)
        self.failpoints.hit("after_commit")
        self.finish(job, sink, result)

    def _proceed(
        self, admitted: RunningAppend | AppendResult | None, job: AppendJob, sink: Sink, sequence: Sequence
    ) -> None:
        """Let the append run, answer it, or let it wait until its cold sequence is computed."""
        if admitted is None:
            run = self.cold.start(sequence, self.running)
            self._begin(run, sequence)
            self._wait(job, sink, run, sequence)
        elif isinstance(admitted, AppendResult):
            self.finish(job, sink, admitted)
        else:
            self._begin(admitted, sequence)

    def _begin(self, run: RunningAppend, sequence: Sequence) -> None:
        """Let an append run, in the lane of its sequence unless it is a branch."""
        self.running[run] = None
        verdict = run.reservation.verdict
        if verdict is Verdict.FORK:
            self._branches.setdefault(sequence, {})[run] = None
        else:
            self._lanes[sequence] = run
            if verdict is Verdict.REWIND and sequence.is_durable:
                self.journal.note_rewind(sequence)  # its tail is gone, whatever happens to the append

    def _wait(self, job: LaneJob[object], sink: Sink, run: RunningAppend, sequence: Sequence) -> None:
        if run.is_warming and run.remaining > self.cold.wait_tokens:
            raise self.cold.restoring(run)
        if run.waiting is None:
            run.waiting = deque()
        run.waiting.append((job, sink))
        self.num_waiting += 1
        sequence.num_pins += 1  # the job came within the lease, so the lease lasts until it is judged

    def _join(self, job: LaneJob[object], sink: Sink, run: RunningAppend) -> None:
        assert isinstance(job, AppendJob)
        self.counters.joined += 1
        run.joined += ((job, sink),)

    # ---- leaving ----------------------------------------------------------------------------------------------------

    def complete(self, run: RunningAppend, answer: AppendResult) -> None:
        """Answer all jobs of a committed append, and let the next job in its lane proceed."""
        held = run.reservation
        if held.verdict is Verdict.APPEND and not run.joined and not run.waiting:  # the most common case
            assert held.sequence is not None
            assert run.sink is not None
            del self.running[run], self._lanes[held.sequence]
            self.finish(run.job, run.sink, answer)
            return
        self._leave(run)
        self._answer(run, answer)
        for job, sink in run.joined:
            self.finish(job, sink, dataclasses.replace(answer, replayed=True))
        self.advance(run)

    def fail(self, run: RunningAppend, error: FerruleError) -> None:
        """Free what the append reserved and answer it with ``error``; its handle stays as it was."""
        try:
            self._drop(run, error)
        finally:
            if run.is_warming:  # what waits for the tokens would only run them again
                self._refuse_waiting(run, lambda _: error)
            self.advance(run)

    def stop(self, handle: Handle, principal: str) -> RunningAppend | None:
        """End what is in flight on a sequence that is about to be released, and on its branches, with HANDLE_UNKNOWN.

        Returns:
            The append that held its lane, for :meth:`advance` once the sequence is released; None if there was none.
        """
        try:
            sequence = self.store.resolve(handle, principal)
        except FerruleError:  # no append is in flight on a sequence that does not exist or has expired
            return None
        for branch in list(self._branches.get(sequence, ())):
            self._drop(branch, HandleUnknown(sequence.handle_id))
        run = self._lanes.get(sequence)
        if run is not None:
            self._drop(run, HandleUnknown(sequence.handle_id))
        return run

    def advance(self, run: RunningAppend) -> None:
        """Judge the jobs that waited for ``run``, until one of them is in flight."""
        sequence = run.reservation.sequence
        if sequence is None or run.reservation.verdict is Verdict.FORK:
            return
        del self._lanes[sequence]
        waiting, run.waiting = run.waiting, None
        while waiting:
            self.num_waiting -= 1
            self._take_turn(*waiting.popleft(), sequence)
            if (successor := self._lanes.get(sequence)) is not None:
                self._wait_behind(successor, waiting, sequence)
                return

    def end_all(self, why: Callable[[LaneJob[object]], FerruleError]) -> None:
        """Free and answer everything in flight and all waiting jobs, even if something cannot be freed."""
        self._lanes.clear()
        for run in list(self.running):
            try:
                self._drop(run, why(run.job))
            except Exception:  # noqa: BLE001 - the others still wait for an answer
                fault("what an append holds could not be taken back")
            self._refuse_waiting(run, why)
        self._branches.clear()

    def _drop(self, run: RunningAppend, error: FerruleError) -> None:
        """Free what the append holds and answer all its jobs, even if freeing raises."""
        try:
            self.store.reservations.abort(run.reservation)
            if run.creation is not None:
                self.creations.abandon(run.creation)
            self._leave(run)
        finally:
            self.running.pop(run, None)  # so that it is answered only once
            self._answer(run, error)
            for job, sink in run.joined:
                self.finish(job, sink, error)

    def _answer(self, run: RunningAppend, outcome: Outcome) -> None:
        """Answer the first job of an append, if it was asked for."""
        if run.sink is not None:
            self.finish(run.job, run.sink, outcome)

    def _refuse_waiting(self, run: RunningAppend, why: Callable[[LaneJob[object]], FerruleError]) -> None:
        """Answer the jobs that wait for ``run`` with errors, and take back their pins."""
        waiting, run.waiting = run.waiting or (), None
        for job, sink in waiting:
            assert run.reservation.sequence is not None, "only sequences have lanes"
            run.reservation.sequence.num_pins -= 1
            self.num_waiting -= 1
            self.finish(job, sink, why(job))

    def _leave(self, run: RunningAppend) -> None:
        del self.running[run]
        source = run.reservation.sequence
        if source is not None and run.reservation.verdict is Verdict.FORK:
            branches = self._branches[source]
            del branches[run]
            if not branches:
                del self._branches[source]

    def _wait_behind(self, run: RunningAppend, waiting: deque[LaneEntry], sequence: Sequence) -> None:
        """Let the next jobs with the same request join ``run``, which is now in flight, and the rest wait for it."""
        while waiting and self._may_join(waiting[0][0], run):
            self.num_waiting -= 1
            sequence.num_pins -= 1
            self._join(*waiting.popleft(), run)
        if run.waiting is None:
            run.waiting = waiting
        else:  # the job that has to wait for the computation of the sequence
            run.waiting += waiting

    def _take_turn(self, job: LaneJob[object], sink: Sink, sequence: Sequence) -> None:
        """Judge a job that waited; the pin of its waiting has kept the sequence until now. Never raises."""
        at = self.store.clock()
        try:
            if job.is_cancelled:
                raise Cancelled
            if job.request_id and self._take_repeat(job, sink, at):
                return
            if sequence.is_released:
                raise HandleUnknown(sequence.handle_id)
            self._judge(job, sink, sequence)
        except FerruleError as error:
            self.finish(job, sink, error)
        except Exception:  # noqa: BLE001 - a bug must end only its own job
            self.finish(job, sink, fault(f"job failed kind={type(job).__name__}"))
        finally:
            sequence.num_pins -= 1

    @staticmethod
    def _may_join(job: LaneJob[object], run: RunningAppend) -> bool:
        """Return whether the job is the same request as ``run``, so that one answer serves both.

        A query never joins: two queries that draw tokens need two draws. Branches do not come here: each request may
        need one of its own, unless the request_id says that it is the same.
        """
        return isinstance(job, AppendJob) and bool(job.token_ids) and _REQUEST(job) == _REQUEST(run.job)
