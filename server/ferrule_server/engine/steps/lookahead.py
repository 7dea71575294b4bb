"""Lookahead: queue the next step on the device before the tokens of the current one have been read.

Each token of a Generate is an append of its own, which is entered when the token is known. Without lookahead the device
would be idle from the end of a step until the appends of the next one are committed, entered and planned. Instead the
next step is *guessed*: one more row for each Generate, whose token the device takes from the step before::

    device   |---- step n ----|--- step n+1 ---|--- step n+2 ---|
    host        queue n+1     | read n, commit, turn, claim n+1, queue n+2 | read n+1 ...

A guess decides nothing. Appends are entered, judged, reserved and planned as usual. Only then a queued row is *claimed*
for an append that is exactly the same: sequence, position, blocks, token and outputs. Rows that are not claimed are
dropped with their results, and the appends that they were meant for run in the step after.

A claimed row is what the append would have computed. Between queueing a step and claiming or dropping it, the engine
gives the executor no other work, so the pool is as it would be in a run of its own.

A dropped row does no harm. The one slot that it writes lies beyond the tip of its sequence, in a block that no other
sequence has and that the prefix cache does not know (see :meth:`Reservations.foresee`). A fork, truncate or release
meanwhile, or another owner of the block, acts on the device later and writes to a slot before it is read. It can cost
one cached block of the prefix cache.

Only steps that consist of Generates are followed by a guess, and only if no other append waits, no penalty needs a
token that is not known yet, and the reader has room. So a new append waits for at most one step more than without a
guess, and a client that decodes step by step not even that (``_QUIET_STEPS``).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Final

from ferrule_server.engine.appends.running import RunningAppend
from ferrule_server.engine.jobs import Follow
from ferrule_server.engine.metrics.counters import EngineCounters
from ferrule_server.engine.steps.batcher import Chunk, build_next
from ferrule_server.engine.steps.runner import StepOutcome, StepRunner
from ferrule_server.executor.base import DeviceLost, OutputSpec, PendingStep, PipelinedExecutor, StepBatch
from ferrule_server.kv.append_rule import Verdict
from ferrule_server.kv.reservation import Reservations
from ferrule_server.kv.sequence import Sequence

_LOG = logging.getLogger(__name__)

_QUIET_STEPS: Final = 4
"""Number of steps without a guess after a step with an append that a client will come back for. So a client that
decodes step by step beside a Generate has a row in every second step, as without guesses."""


@dataclass(slots=True)
class _Guess:
    """One row of a queued step, and the properties of an append that can claim it.

    Attributes:
        source: Row and output of the step before that chooses the token.
        token: That token after the step before has been read; None: not known, or not finite.
    """

    sequence: Sequence
    start: int
    block_ids: list[int]
    spec: OutputSpec
    source: int
    token: int | None = None

    def is_right(self, run: RunningAppend) -> bool:
        """Return whether this append of one token would run exactly this row, in the same blocks, none copied."""
        held, spec = run.reservation, run.specs.get(0)
        if held.verdict is not Verdict.APPEND or held.start != self.start or run.token_ids != (self.token,):
            return False
        has_blocks = held.block_ids is self.block_ids or held.block_ids == self.block_ids
        return has_blocks and (spec is self.spec or spec == self.spec)


@dataclass(eq=False, slots=True)
class _Submitted:
    """A step in the device's queue; ``guesses`` has one for each row, or none if the tokens were known."""

    pending: PendingStep
    batch: StepBatch
    submitted_ns: int
    guesses: list[_Guess]


class Lookahead:
    """Runs steps on an executor that takes the next one before the last one's results are read.

    Invariant: outside :meth:`run` at most one step is pending, and it is a guess; each step submitted is asked for its
    result once, in order, unless the device is lost.

    Args:
        executor: Called from the engine thread only.
        steps: Prepares and counts steps, and runs those that are not queued.
        reservations: Foresees the slots of the next tokens.
        counters: Counts queued steps and discarded rows.

    Attributes:
        has_more: The executor has said that it has more to prepare; read only.
    """

    def __init__(
        self, executor: PipelinedExecutor, steps: StepRunner, reservations: Reservations, counters: EngineCounters
    ) -> None:
        self._executor = executor
        self._steps = steps
        self._reservations = reservations
        self._counters = counters
        self._block_size = executor.info.block_size
        self._pending: deque[_Submitted] = deque()
        self._claimed: list[int] = []
        self._read_ns = 0
        self._num_quiet = 0
        self._is_due = False
        self.has_more = False

    def claim(self, running: Iterable[RunningAppend]) -> list[Chunk]:
        """Return the rows of these appends that the queued step runs; :meth:`run` takes them next. Empty: none."""
        if not self._pending:
            return []
        guesses = self._pending[0].guesses
        row_of: dict[Sequence | None, int] = {guess.sequence: row for row, guess in enumerate(guesses)}
        chunks: list[Chunk] = []
        claimed = self._claimed = []
        for run in running:
            row = row_of.get(run.reservation.sequence)
            if row is not None and guesses[row].is_right(run):
                chunks.append(Chunk(run, 1))
                claimed.append(row)
        return chunks

    def run(self, chunks: list[Chunk], *, is_alone: bool) -> StepOutcome:
        """Run one step: the queued one, if these chunks have been claimed of it, else it is dropped and they are run.

        Args:
            chunks: At least one.
            is_alone: Nothing else waits for a step, so the next one may be queued.

        Raises:
            DeviceLost: As the executor says. Whatever else it raises; nothing is pending then.
        """
        is_followed = self._decide_follow(chunks) and is_alone
        self._is_due = True
        try:
            if self._claimed:
                self._steps.failpoints.hit("after_schedule")
                rows, self._claimed = self._claimed, []
                return self._queue_and_read(self._pending[0], chunks, rows, is_followed=is_followed)
            self.drop()
            batch = self._steps.prepare(chunks)
            if not is_followed or not self._executor.can_submit(batch):
                return self._steps.run_batch(batch, chunks)
            step = self._submit(batch, [])
            return self._queue_and_read(step, chunks, range(len(chunks)), is_followed=True)
        except DeviceLost:
            self._pending.clear()
            raise
        except Exception:  # raised again, with nothing pending, so that the caller can run the parts alone
            self.drop()
            raise

    def drop(self) -> None:
        """Wait for the queued step and drop its results: no append can claim it, or something else has to run.

        Raises:
            DeviceLost: As the executor says.
        """
        self._claimed = []
        while self._pending:
            step = self._pending.popleft()
            self._is_due = True
            self._counters.discarded_rows += len(step.guesses)
            try:
                step.pending.result()
            except DeviceLost:
                self._pending.clear()
                raise
            except Exception:  # noqa: BLE001 - a step that is dropped may fail
                _LOG.warning("a step that is thrown away failed rows=%d", step.batch.num_rows, exc_info=True)

    def idle(self) -> None:
        """Note that no request is run now, so the executor may use what it has prepared meanwhile."""
        self._is_due = True

    def tend(self) -> None:
        """Let the executor do one piece of preparation: after each step and when idle, unless the next one is pending.

        Raises:
            DeviceLost: As the executor says.
        """
        if self._pending or not (self._is_due or self.has_more):
            return
        self._is_due = self.has_more = False
        self.has_more = self._executor.tend()

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _decide_follow(self, chunks: Iterable[Chunk]) -> bool:
        """Return whether a guess may follow a step of these chunks; count steps since the last one of a client."""
        for chunk in chunks:
            if not chunk.run.job.is_internal or chunk.run.joined:
                self._num_quiet = _QUIET_STEPS
                return False
        if self._num_quiet:
            self._num_quiet -= 1
            return False
        return not self.has_more and all(map(_is_token_of_generate, chunks))

    def _queue_and_read(
        self, step: _Submitted, chunks: SequenceOf[Chunk], rows: SequenceOf[int], *, is_followed: bool
    ) -> StepOutcome:
        """Queue a guess of the next step, then wait for the results of this one: ``rows[i]`` is of ``chunks[i]``."""
        if is_followed:
            self._queue_next(step.batch, rows, chunks)
        self._pending.popleft()
        outputs = step.pending.result().rows
        now_ns = time.monotonic_ns()
        started_ns, self._read_ns = max(step.submitted_ns, self._read_ns), now_ns
        outcome = self._steps.finish(step.batch, outputs, started_ns, now_ns - started_ns)
        for guess in self._pending[0].guesses if self._pending else ():
            guess.token = outputs[guess.source].token
        self._counters.discarded_rows += len(outputs) - len(rows)
        outcome.rows = [outputs[row] for row in rows]
        return outcome

    def _queue_next(self, batch: StepBatch, sources: Iterable[int], chunks: Iterable[Chunk]) -> None:
        """Queue one more row for each append that is likely to go on, if the executor takes such a step.

        Args:
            batch: The step that runs now.
            sources: Row of each chunk in that step.
            chunks: The chunks that the step runs.
        """
        rows, reservations = [], []
        for row, chunk in zip(sources, chunks, strict=True):
            if chunk.run.job.follow is Follow.LIKELY:
                rows.append(row)
                reservations.append(chunk.run.reservation)
        guesses: list[_Guess] = []
        specs = batch.output_specs
        for row, reservation, table in zip(rows, reservations, self._reservations.foresee(reservations), strict=True):
            if table is not None and reservation.sequence is not None:
                guesses.append(_Guess(reservation.sequence, reservation.start + 1, table, specs[row], row))
        if not guesses:
            return
        last_ids = [guess.block_ids[-1] for guess in guesses]
        following = build_next(batch, [guess.source for guess in guesses], last_ids, self._block_size)
        if self._executor.can_submit(following):
            self._submit(following, guesses)
            self._counters.queued_steps += 1

    def _submit(self, batch: StepBatch, guesses: list[_Guess]) -> _Submitted:
        submitted_ns = time.monotonic_ns()
        step = _Submitted(self._executor.submit(batch), batch, submitted_ns, guesses)
        self._pending.append(step)
        return step


def _is_token_of_generate(chunk: Chunk) -> bool:
    """Return whether the chunk appends the last token of a Generate and draws the next one from this row alone."""
    run = chunk.run
    if run.reservation.verdict is not Verdict.APPEND or run.job.follow is Follow.UNKNOWN or len(run.token_ids) != 1:
        return False
    spec = run.specs.get(0)
    if spec is None or not (spec.greedy or spec.sample is not None):
        return False
    return spec.shaping is None or not spec.shaping.has_penalties
