"""Generation: the decode loop on the server, for one sequence or several branches of one.

Each token is an append of its own, just as if a client sent it. So tokens, handles, records and leases are those of
step-by-step decoding with the same seed::

    prefill (or query) -- t0 --> append [t0] -- t1 --> append [t1] -- ...        branch 0
        +- fork n-1 -- query, seed + i -- t0' --> append [t0'] -- ...            branch i

Before a branch reaches the tip, it passes over committed tokens: a repeated request, or one that continues from a
handle behind the tip, is answered with replays as long as it draws the same tokens, and then by its ``on_stale``.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from ferrule_server.engine.appends.creations import FORK, loop_of, part_of
from ferrule_server.engine.appends.running import RunningAppend
from ferrule_server.engine.generation.drivers import Drivers, DriverSink, Why, seeded
from ferrule_server.engine.generation.stops import StopCheck
from ferrule_server.engine.jobs import (
    AppendJob,
    AppendResult,
    BranchFrame,
    Finish,
    Follow,
    ForkJob,
    ForkResult,
    GenerateFrame,
    GenerateJob,
    LaneJob,
    Outcome,
    OutputRequest,
    Sink,
    StepTiming,
)
from ferrule_server.errors import BlocksExhausted, Cancelled, ContextExceeded, ExceedsPool, FerruleError
from ferrule_server.executor.base import RowOutput
from ferrule_server.kv.handle import Handle, StalePolicy

_SEEDS: Final = 1 << 64


@dataclass(eq=False, slots=True)
class _Branch:
    """One sequence that is being continued, and the last drawn token, which is not in it yet.

    Attributes:
        output: What each of its appends returns, drawn with ``seed``.
        on_stale, request_id: Of its next append; once it is at the tip, FAIL and empty.
        handle: Covers all tokens before ``token``.
        in_flight: Its append in progress. spent: its last append if it can be run again with the next token.
        rows: Drawn since the last frame.
        drawn_ns: When the token was drawn; 0: the time to the next token is not measured.
        finish: Why it ended; None: it continues. error: set with Finish.ERROR.
    """

    index: int
    sink: DriverSink
    output: OutputRequest
    seed: int | None
    stops: StopCheck
    on_stale: StalePolicy
    request_id: str
    handle: Handle | None = None
    token: int = -1
    in_flight: AppendJob | None = None
    spent: RunningAppend | None = None
    rows: list[RowOutput] = field(default_factory=list)
    finish: Finish | None = None
    error: FerruleError | None = None
    has_sent: bool = False
    drawn_ns: int = 0


class Generation:
    """One Generate: ``engine/generation/drivers.py`` describes how it is driven.

    Invariant: a branch that continues has an append in flight, is parked, or waits for the fork that creates it; the
    ``_num_in_flight`` appends never return more rows than the reader has room for, except for one.

    Args:
        job: The request. sink: receives its frames.
        drivers: Enters its appends.
    """

    def __init__(self, job: GenerateJob, sink: Sink, drivers: Drivers) -> None:
        self.job = job
        self.sink = sink
        self.is_over = False
        self._drivers = drivers
        self._counters, self._timings = drivers.counters, drivers.counters.timings
        self._branches = _branches_of(job, self, drivers.seed_for(job))
        self._loop = loop_of(job) if job.request_id else b""
        self._num_live = job.num_branches
        self._num_in_flight = 0
        self._first: AppendJob | None = None
        self._fork: ForkJob | None = None
        self._orphans: list[Handle] = []
        self._touched: list[_Branch] = []
        self._parked: list[_Branch] = []
        self._has_sent = False
        self._error: FerruleError | None = None
        self._timing = StepTiming()
        self._cached_tokens, self._is_replayed = 0, False

    # ---- driven -----------------------------------------------------------------------------------------------------

    def begin(self, at: float) -> None:
        """Enter the prompt, or the query of the handle's last row.

        Raises:
            RequestIdReused: Another request has created something with this request_id.
        """
        job, branch = self.job, self._branches[0]
        self._drivers.check_loop(job, self._loop)
        first = self._append_job(branch, job.token_ids, job.handle, job.ttl_s, job.request_id)
        first.new, first.submitted_ns = job.new, job.submitted_ns
        self._first = branch.in_flight = first
        self._num_in_flight = 1
        self._drivers.enter(first, branch.sink, at)

    def take(self, branch: int, job: LaneJob[object], outcome: Outcome) -> None:
        """Take a token, the forks, or an error, and continue."""
        self._drivers.touch(self)
        self._num_in_flight -= isinstance(job, AppendJob)
        if isinstance(outcome, AppendResult):
            self._take_token(self._branches[branch], job, outcome)
        elif isinstance(outcome, ForkResult):
            self._start_branches(outcome.handles)
        else:
            assert isinstance(outcome, FerruleError)
            self._refuse(self._branches[branch], job, outcome)

    def resume(self, ended: Collection[str] = ()) -> None:
        """Continue parked branches: as many as the reader has room for, and those whose sequences have ended."""
        parked, self._parked = self._parked, []
        for branch in parked:
            assert branch.handle is not None
            if branch.handle.handle_id in ended:
                self._enter(branch)  # to learn how it ended, whether the reader has room or not
            else:
                self._append(branch)

    def end(self, why: Why) -> None:
        """Stop every branch that continues. Before the first frame, the call as a whole fails."""
        if self._fork is not None:
            self._fork.is_cancelled = True
        self._parked.clear()
        for branch in self._branches:
            if branch.in_flight is not None:
                branch.in_flight.is_cancelled = True
        if not self._has_sent:
            self._fail(why(self.job.handle))
            return
        for branch in self._branches:
            if branch.finish is None:
                self._finish(branch, Finish.ERROR, why(branch.handle))

    def next_frame(self) -> GenerateFrame | FerruleError | None:
        """Return the tokens of the branches since the last frame, and how branches ended."""
        if self._error is not None:
            self._close()
            return self._error
        if self._fork is not None or not self._touched:
            return None
        touched, self._touched = self._touched, []
        frames = tuple(map(self._frame_of, sorted(touched, key=lambda branch: branch.index)))
        self._has_sent = True
        self._orphans.clear()
        if not self._num_live:
            self._close()
        timing = self._timing if any(frame.rows for frame in frames) else StepTiming()
        return GenerateFrame(frames, timing, self.is_over)

    # ---- tokens -----------------------------------------------------------------------------------------------------

    def _take_token(self, branch: _Branch, job: LaneJob[object], result: AppendResult) -> None:
        """Take the token that was drawn after the appended ones."""
        (row,) = result.rows
        assert row.token is not None, "a Generate chooses tokens"
        if not branch.rows:
            self._touched.append(branch)
        branch.rows.append(row)
        branch.handle, branch.token, branch.in_flight = result.handle, row.token, None
        self.job.window.sent_bytes += self.job.row_bytes
        self._timing = result.timing
        branch.drawn_ns = 0 if result.replayed else self._timings.record_token(branch.drawn_ns)
        if branch.on_stale is not StalePolicy.FAIL and _is_at_tip(job, result):
            branch.on_stale, branch.request_id = StalePolicy.FAIL, ""
        finish = branch.stops.after(row.token)
        if finish is not None:
            self._finish(branch, finish)
        if job is self._first:
            self.job.rows_run = job.rows_run  # the gate refunds the others with the first frame
            self._settle(result)
        if self._fork is None and finish is None:
            self._append(branch)

    def _settle(self, result: AppendResult) -> None:
        """Keep what the first frame reports of the committed prompt, and fork the other branches."""
        self._cached_tokens, self._is_replayed = result.cached_tokens, result.replayed
        if not result.replayed:
            self._timings.record_queue(result.timing.queue_ns)
            self._timings.record_first_token(self.job.submitted_ns)
        handle = self.job.handle
        if (handle is None or handle.cache_id != result.handle.cache_id) and not result.replayed:
            self._note_created(result.handle)
        if len(self._branches) > 1:
            request_id = part_of(self.job.request_id, FORK)
            handle, count = result.handle, len(self._branches) - 1
            self._fork = ForkJob(
                self.job.principal, handle, handle.length, count, request_id=request_id, loop=self._loop
            )
            self._fork.submitted_ns = time.monotonic_ns()
            self._drivers.enter(self._fork, self._branches[0].sink)

    def _start_branches(self, handles: tuple[Handle, ...]) -> None:
        """Begin each forked branch with a row of its own, and continue the first branch."""
        self._fork = None
        self._note_created(*handles)
        for branch, handle in zip(self._branches[1:], handles, strict=True):
            branch.handle = handle
            self._append(branch)
        if self._branches[0].finish is None:
            self._append(self._branches[0])

    def _note_created(self, *handles: Handle) -> None:
        """Remember new sequences: without a request_id, only the first frame names them."""
        if not self.job.request_id:
            self._orphans += handles

    def _append_job(
        self, branch: _Branch, token_ids: tuple[int, ...], handle: Handle | None, ttl_s: float | None, request_id: str
    ) -> AppendJob:
        """Return the append of some tokens to the sequence of a handle, from which the branch draws its next token."""
        job = AppendJob(self.job.principal, token_ids, handle, branch.output, branch.on_stale, ttl_s, request_id)
        job.is_internal, job.loop = True, self._loop
        return job

    def _append(self, branch: _Branch) -> None:
        """Append the last drawn token, or begin with a query, as soon as the reader has room."""
        if self._has_room():
            self._enter(branch)
        else:
            assert branch.handle is not None
            branch.drawn_ns = 0
            self._parked.append(branch)
            self._drivers.park(self, branch.handle)

    def _has_room(self) -> bool:
        """Return whether the window is still open once the rows in flight have come."""
        window, job = self.job.window, self.job
        return window.sent_bytes + self._num_in_flight * job.row_bytes - window.taken_bytes < window.limit_bytes

    def _enter(self, branch: _Branch) -> None:
        spent = branch.spent
        if spent is None:
            token_ids = (branch.token,) if branch.token >= 0 else ()
            job = self._append_job(branch, token_ids, branch.handle, None, branch.request_id)
        else:  # the same job with the next token
            job = spent.job
            job.token_ids, job.handle, job.on_stale, job.rows_run = (branch.token,), branch.handle, branch.on_stale, 0
            job.follow = Follow.UNKNOWN
        job.submitted_ns = time.monotonic_ns()
        branch.in_flight = job
        self._num_in_flight += 1
        if branch.stops.is_next_last:
            job.follow = Follow.NOTHING
        elif self._has_room():  # for one more after this one
            job.follow = Follow.LIKELY
        run = self._drivers.enter(job, branch.sink, None, spent)
        if run is not spent:
            branch.spent = run if run is not None and run.is_repeatable else None

    # ---- ends -------------------------------------------------------------------------------------------------------

    def _refuse(self, branch: _Branch, job: LaneJob[object], error: FerruleError) -> None:
        """Handle a failed append or fork: before the first frame it fails the call, later only the branch."""
        if job is self._first or job is self._fork:
            self._fail(error)
        elif isinstance(error, ContextExceeded):
            self._finish(branch, Finish.CONTEXT_FULL)
        elif isinstance(error, BlocksExhausted | ExceedsPool):
            self._finish(branch, Finish.KV_BLOCKS_EXHAUSTED)
        else:
            self._finish(branch, Finish.ERROR, error)

    def _finish(self, branch: _Branch, finish: Finish, error: FerruleError | None = None) -> None:
        branch.finish, branch.error, branch.in_flight, branch.spent = finish, error, None, None
        self._num_live -= 1
        self._counters.finished["cancelled" if isinstance(error, Cancelled) else finish.value] += 1
        if branch not in self._touched:
            self._touched.append(branch)

    def _fail(self, error: FerruleError) -> None:
        """Fail the call as a whole. Sequences that no client could find are released."""
        self._error = error
        orphans, self._orphans = self._orphans, []
        for handle in orphans:
            self._drivers.release(handle, self.job.principal)

    def _close(self) -> None:
        assert self._first is not None
        self.is_over = True
        self.job.rows_run = self._first.rows_run
        for branch in self._branches:
            branch.spent = None
        self._branches.clear()  # breaks the cycle with their sinks, so the garbage collector is not needed

    def _frame_of(self, branch: _Branch) -> BranchFrame:
        rows, branch.rows = tuple(branch.rows), []
        frame = BranchFrame(branch.index, branch.handle if rows else None, rows, None, branch.finish, branch.error)
        if not branch.has_sent:
            branch.has_sent = True
            frame.seed = branch.seed if rows else None
            if branch.index == 0:
                frame.cached_tokens, frame.replayed = self._cached_tokens, self._is_replayed
        return frame


def _branches_of(job: GenerateJob, driver: Generation, seed: int | None) -> list[_Branch]:
    output = dataclasses.replace(job.output, all_positions=False)
    # Only an append that may create a branch needs it; a new sequence was created with it already.
    may_fork = job.handle is not None and job.on_stale is StalePolicy.FORK
    request_id = job.request_id if may_fork else ""
    branches: list[_Branch] = []
    for index in range(job.num_branches):
        sink, stops = DriverSink(driver, index), StopCheck(job.stop)
        own_seed = None if seed is None else (seed + index) % _SEEDS
        own_id = part_of(request_id, f"branch{index}") if index else request_id
        branches.append(_Branch(index, sink, seeded(output, own_seed), own_seed, stops, job.on_stale, own_id))
    return branches


def _is_at_tip(job: LaneJob[object], result: AppendResult) -> bool:
    """Return whether the append is the sequence's last one, so that the branch has reached the tip."""
    return isinstance(job, AppendJob) and bool(job.token_ids) and not result.replayed
