"""The stepper: one step from the appends in flight to committed tokens.

    plan     choose the rows                 batcher, or the step that lookahead has queued
    run      copy shared blocks, then run the executor                           runner, lookahead
    commit   add each append whose last row has run to its sequence              commits

Before it a step waits briefly until the clients of the last one send their next tokens. Without this *gather window*,
clients that need a moment to answer split into two halves that alternate for ever at half the batch::

    step:   A+B | A | B | A | B ...      each step costs nearly as much as A+B would
    window: A+B |~ A+B |~ A+B ...        a short wait joins them again

If a step fails, its appends are run one by one, so that only those that fail again are answered with an error.
"""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass, field
from itertools import islice

from ferrule_server.engine.appends.commits import Commits
from ferrule_server.engine.appends.lanes import Lanes
from ferrule_server.engine.appends.running import RunningAppend
from ferrule_server.engine.faults.failpoints import Failing
from ferrule_server.engine.faults.unexpected import fault
from ferrule_server.engine.metrics.counters import EngineCounters
from ferrule_server.engine.settings import EngineSettings
from ferrule_server.engine.steps.batcher import Batcher, Chunk
from ferrule_server.engine.steps.lookahead import Lookahead
from ferrule_server.engine.steps.runner import StepOutcome, StepRunner
from ferrule_server.engine.steps.warmup import Warmup
from ferrule_server.errors import Cancelled, FerruleError
from ferrule_server.executor.base import DeviceLost, Executor, PipelinedExecutor
from ferrule_server.fairness.turns import Shares
from ferrule_server.kv.sequence_store import SequenceStore

_LOG = logging.getLogger(__name__)


class GatherWindow:
    """Decides when to stop waiting for the rows of the last step.

    A row *comes back* when a new job names its sequence. The window is open while some row is out, for at most
    ``gather_share`` of the last step. It closes early if nothing has come back for ``gather_gap_s``. Closing forgets
    the rows that are still out, so a client that has left is awaited only once.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._gap_s = settings.gather_gap_s
        self._share = settings.gather_share
        self._out: set[str] = set()
        self._closes_at = 0.0
        self._last_back = 0.0

    def open(self, cache_ids: set[str], step_s: float, now: float) -> None:
        """Start waiting for ``cache_ids``, the sequences of a step that took ``step_s`` seconds."""
        self._out = cache_ids
        self._closes_at = now + self._share * step_s
        self._last_back = now

    def came_back(self, cache_id: str, now: float) -> None:
        """Note that a job has named ``cache_id``."""
        if cache_id in self._out:
            self._out.discard(cache_id)
            self._last_back = now

    def forget(self, cache_id: str) -> None:
        """Stop waiting for ``cache_id``, a sequence that was released."""
        self._out.discard(cache_id)

    def remaining_s(self, now: float) -> float:
        """Return the seconds to wait for another job; 0.0: the step should start, rows still out are forgotten."""
        if self._out:
            left = min(self._closes_at, self._last_back + self._gap_s) - now
            if left > 0.0:
                return left
            self._out = set()
        return 0.0


@dataclass(eq=False)
class Stepper:
    """Runs steps. Used on the engine thread.

    Args:
        executor: Runs the rows.
        store: The sequences.
        settings: Limits.
        lanes: The appends in flight.
        commits: Makes finished appends part of their sequences.
        warmup: Runs steps that touch no sequence, between the others.
        gather: Waits for the sequences of a step to come back with their next token.
        counters: Counts steps.
        shares: Counts for whom a step ran.
        failpoints: Where to fail on purpose.

    Attributes:
        hold_s: After a step that ran nothing: how long all appends have to wait unless another one comes.
    """

    executor: Executor
    store: SequenceStore
    settings: EngineSettings
    lanes: Lanes
    commits: Commits
    warmup: Warmup
    gather: GatherWindow
    counters: EngineCounters
    shares: Shares
    failpoints: Failing
    hold_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        """Make the parts of a step."""
        settings = self.settings
        self.batcher = Batcher(settings.max_step_rows, settings.max_step_time_s)
        self._runner = StepRunner(self.executor, self.counters, self.failpoints, settings.debug_top_tokens)
        self._lookahead: Lookahead | None = None
        if isinstance(self.executor, PipelinedExecutor):
            self._lookahead = Lookahead(self.executor, self._runner, self.store.reservations, self.counters)

    @property
    def has_work(self) -> bool:
        """Return whether there is something to warm up or to prepare now."""
        is_due = self.warmup.queue and not self.warmup.is_waiting
        return bool(is_due) or (self._lookahead is not None and self._lookahead.has_more)

    def step(self) -> None:
        """Run one step and commit what it has finished. A failure ends only the appends that cause it.

        Raises:
            DeviceLost: As the executor says.
        """
        self.hold_s = 0.0
        try:
            chunks = self._plan()
        except Exception:  # noqa: BLE001 - all of these fail; otherwise the same error would come again for ever
            error = fault("no step could be planned")
            for run in list(self.lanes.running):
                self.lanes.fail(run, error)
            return
        if not chunks:
            self.hold_s = self.batcher.hold_s
            return
        self.counters.timings.num_left_out = len(self.lanes.running) - len(chunks)
        try:
            outcome = self._run(chunks, is_alone=self._are_all(chunks))
        except DeviceLost:
            raise
        except Exception:  # noqa: BLE001 - the parts are run alone to find the one at fault
            self._run_apart(chunks)
        else:
            self._commit(chunks, outcome)

    def warm(self) -> None:
        """Run one step of the next warm-up. Other steps wait for at most one such step.

        Raises:
            DeviceLost: As the executor says.
        """
        if self._lookahead is not None:
            self._lookahead.idle()
            self._lookahead.drop()
        self.warmup.run_one()

    def tend(self) -> None:
        """Drop a queued step that no append can claim, and let the executor prepare itself if none is queued.

        Raises:
            DeviceLost: As the executor says.
        """
        if self._lookahead is None:
            return
        try:
            if not self.lanes.running:
                self._lookahead.drop()
            self._lookahead.tend()
        except DeviceLost:
            raise
        except Exception:  # noqa: BLE001 - the executor works without this preparation
            fault("the executor could not be prepared")

    def idle(self) -> None:
        """Note that there are no requests at the moment, so the executor may prepare itself."""
        if self._lookahead is not None:
            self._lookahead.idle()

    def close(self) -> None:
        """Drop the queued step and ignore its errors, which no request depends on."""
        if self._lookahead is not None:
            with contextlib.suppress(Exception):
                self._lookahead.drop()

    # ---- plan -------------------------------------------------------------------------------------------------------

    def _plan(self) -> list[Chunk]:
        """Choose the rows of the next step. Cancelled appends are removed first; a later cancel has no effect."""
        self.failpoints.hit("before_schedule")
        for run in [run for run in self.lanes.running if run.job.is_cancelled and run.is_abandoned]:
            self.lanes.fail(run, Cancelled())
        claimed = [] if self._lookahead is None else self._lookahead.claim(self.lanes.running)
        return claimed or self.batcher.plan(self.lanes.running)

    def _are_all(self, chunks: list[Chunk]) -> bool:
        """Return whether only the appends in this step are waiting for a step, and none of them will have to wait."""
        is_wanted = self.lanes.num_waiting or self.warmup.queue or self.settings.debug_top_tokens
        is_wanted = is_wanted or self.batcher.has_debts
        return len(chunks) == len(self.lanes.running) and not is_wanted

    # ---- run --------------------------------------------------------------------------------------------------------

    def _run(self, chunks: list[Chunk], *, is_alone: bool = False) -> StepOutcome:
        ahead = self._lookahead
        outcome = self._runner.run(chunks) if ahead is None else ahead.run(chunks, is_alone=is_alone)
        self.batcher.learn(chunks, outcome.elapsed_ns)
        appends = [(chunk.run.job.principal, not chunk.run.job.is_internal) for chunk in chunks]
        self.shares.add_service(appends, outcome.elapsed_ns)
        return outcome

    def _run_apart(self, chunks: list[Chunk]) -> None:
        """Run each append of a failed step alone. Only those that fail again are answered with ENGINE_FAULT."""
        _LOG.exception("step failed rows=%d, running its %d parts alone", sum(c.num_rows for c in chunks), len(chunks))
        for chunk in chunks:
            try:
                outcome = self._run([chunk])
            except DeviceLost:
                raise
            except Exception:  # noqa: BLE001 - only the failing append ends
                self.lanes.fail(chunk.run, fault("append failed"))
            else:
                self._commit([chunk], outcome)

    # ---- commit -----------------------------------------------------------------------------------------------------

    def _commit(self, chunks: list[Chunk], outcome: StepOutcome) -> None:
        """Give each append its rows, and commit those that are complete."""
        rows = iter(outcome.rows)
        awaited: set[str] = set()
        for chunk in chunks:
            run, num_rows = chunk.run, chunk.num_rows
            if num_rows == 1 == len(run.token_ids):
                if run.specs:
                    run.outputs.append(next(rows))
            else:
                run.outputs += islice(rows, run.num_outputs(num_rows))
            run.cursor += num_rows
            run.job.rows_run += num_rows
            timing = run.timing
            timing.started_ns = timing.started_ns or outcome.started_ns
            timing.run_ns += outcome.elapsed_ns
            timing.step_rows = outcome.num_rows
            if run.cursor == len(run.token_ids):
                awaited.add(self._complete(run))
            elif run.is_warming:
                self.store.reservations.note_computed(run.reservation, run.cursor)
        awaited.discard("")
        self.gather.open(awaited, outcome.elapsed_ns * 1e-9, time.monotonic())

    def _complete(self, run: RunningAppend) -> str:
        """Commit and answer an append whose rows have all run; return the cache_id that may come back."""
        try:
            answer = self.commits.conclude(run)
        except FerruleError as error:
            self.lanes.fail(run, error)
            return ""
        except Exception:  # noqa: BLE001 - the other appends must still be committed
            self.lanes.fail(run, fault("append could not be committed"))
            return ""
        is_awaited = not run.job.is_internal or bool(run.joined)
        self.lanes.complete(run, answer)
        return answer.handle.cache_id if is_awaited else ""
