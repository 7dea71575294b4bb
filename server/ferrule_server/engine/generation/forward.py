"""Forward: all rows of some tokens; no sequence is kept.

The tokens are run as appends to a hidden sequence, whose handle is not sent. The first chunk reserves all its room,
so a request that does not fit is refused before anything is sent. The sequence is released with the last chunk, an
error or a cancel, or by its lease if the reader stops reading.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from ferrule_server.engine.generation.drivers import Drivers, DriverSink, Why, seeded
from ferrule_server.engine.jobs import (
    AppendJob,
    AppendResult,
    ForwardFrame,
    ForwardJob,
    LaneJob,
    Outcome,
    OutputRequest,
    Pooling,
    Sink,
)
from ferrule_server.errors import FerruleError, HandleExpired, SlowConsumer
from ferrule_server.executor.base import Float32Array, OutputSpec, RowOutput
from ferrule_server.kv.handle import Handle
from ferrule_server.kv.new_sequence import NewSequence


class ForwardPass:
    """One Forward: ``engine/generation/drivers.py`` describes how it is driven.

    Invariant: ``_start`` tokens are committed; the hidden sequence lives exactly while ``_handle`` is set.

    Args:
        job: The request. sink: receives its frames.
        drivers: Enters its appends.
    """

    def __init__(self, job: ForwardJob, sink: Sink, drivers: Drivers) -> None:
        self.job = job
        self.sink = sink
        self.is_over = False
        self._drivers = drivers
        self._seed = drivers.seed_for(job)
        self._output = seeded(job.output, self._seed)
        self._hidden: npt.NDArray[np.float64] | None = None  # of all rows so far, pooled
        self._start = 0
        self._handle: Handle | None = None
        self._in_flight: AppendJob | None = None
        self._outcome: ForwardFrame | FerruleError | None = None

    # ---- driven -----------------------------------------------------------------------------------------------------

    def begin(self, at: float) -> None:
        """Enter the first chunk."""
        self._enter(at, self.job.submitted_ns)

    def take(self, _: int, job: LaneJob[object], outcome: Outcome, /) -> None:
        """Take the rows of a chunk, or an error, and continue."""
        self._drivers.touch(self)
        assert isinstance(job, AppendJob)
        self._in_flight = None
        self.job.rows_run += job.rows_run
        if isinstance(outcome, AppendResult):
            self._advance(outcome)
        else:
            assert isinstance(outcome, FerruleError)
            self._fail(self._too_slow() if isinstance(outcome, HandleExpired) else outcome)

    def resume(self, _: Collection[str] = (), /) -> None:
        """Enter the next chunk."""
        self._enter()

    def end(self, why: Why) -> None:
        """Give up; the append in flight is dropped."""
        if self._in_flight is not None:
            self._in_flight.is_cancelled = True
            self.job.rows_run += self._in_flight.rows_run
        self._fail(why(None))

    def next_frame(self) -> ForwardFrame | FerruleError | None:
        """Return the rows of the newest chunk, or the error that ends the request."""
        outcome, self._outcome = self._outcome, None
        return outcome

    # ---- chunks -----------------------------------------------------------------------------------------------------

    def _enter(self, at: float | None = None, submitted_ns: int = 0) -> None:
        job = self.job
        stop = min(self._start + job.chunk_rows, len(job.token_ids))
        self._in_flight = AppendJob(
            job.principal,
            job.token_ids[self._start : stop],
            self._handle,
            self._output_of(stop),
            submitted_ns=submitted_ns or time.monotonic_ns(),
            new=NewSequence(len(job.token_ids), reuse_prefix=False, publish_prefix=False),
            is_internal=True,
            keeps_record=False,
        )
        self._drivers.enter(self._in_flight, DriverSink(self, 0), at)

    def _output_of(self, stop: int) -> OutputRequest:
        """Return the output request of the chunk that ends before ``stop``."""
        tokens, output = self.job.token_ids, self._output
        is_last = stop == len(tokens)
        if output.spec is None:
            needs_all = self.job.pooling is Pooling.MEAN
            wants_hidden = needs_all or (is_last and self.job.pooling is Pooling.LAST)
            return OutputRequest(OutputSpec(hidden_state=True) if wants_hidden else None, all_positions=needs_all)
        if self.job.pooling is not Pooling.NONE and not output.spec.hidden_state:
            output = dataclasses.replace(output, spec=dataclasses.replace(output.spec, hidden_state=True))
        if output.wants_targets and not is_last:
            output = dataclasses.replace(output, last_target=tokens[stop])
        return output

    def _advance(self, result: AppendResult) -> None:
        """Give the rows of a committed chunk, and continue or end."""
        first, tokens = self._start, self.job.token_ids
        if not first:
            self._drivers.counters.timings.record_queue(result.timing.queue_ns)
        self._handle, self._start = result.handle, result.handle.length
        self._pool(result.rows)
        is_last = self._start == len(tokens)
        rows = self._visible(result.rows)
        self.job.window.sent_bytes += self.job.row_bytes * len(rows)
        if rows or is_last:
            pooled = self._pooled() if is_last else None
            self._outcome = ForwardFrame(first if rows else 0, rows, result.timing, self._seed, is_last, pooled)
        if is_last:
            self._close()
        elif self.job.window.is_open:
            self._enter()
        else:
            self._drivers.park(self, result.handle)

    def _visible(self, rows: tuple[RowOutput, ...]) -> tuple[RowOutput, ...]:
        """Return the rows without hidden states that only the pooling needs."""
        asked = self.job.output.spec
        if asked is None:
            return ()
        if asked.hidden_state or self.job.pooling is Pooling.NONE:
            return rows
        return tuple(dataclasses.replace(row, hidden_state=None) for row in rows)

    def _pool(self, rows: tuple[RowOutput, ...]) -> None:
        """Combine the hidden states of the next rows with those before, summed in float64."""
        hidden = [row.hidden_state for row in rows if row.hidden_state is not None]
        if self.job.pooling is Pooling.NONE or not hidden:
            return
        if self.job.pooling is Pooling.LAST:
            self._hidden = hidden[-1].astype(np.float64)
            return
        total: npt.NDArray[np.float64] = np.stack(hidden).sum(axis=0, dtype=np.float64)
        self._hidden = total if self._hidden is None else self._hidden + total

    def _pooled(self) -> Float32Array | None:
        """Return the pooled vector, float32 [hidden_size]; None if none is requested."""
        if self._hidden is None:
            return None
        num_rows = len(self.job.token_ids) if self.job.pooling is Pooling.MEAN else 1
        return (self._hidden / num_rows).astype(np.float32)

    # ---- ends -------------------------------------------------------------------------------------------------------

    def _fail(self, error: FerruleError) -> None:
        self._outcome = error
        self._close()

    def _close(self) -> None:
        """End the request, and release the hidden sequence."""
        self.is_over = True
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self._drivers.release(handle, self.job.principal)

    def _too_slow(self) -> SlowConsumer:
        """Return the error for an expired hidden sequence: it can only expire while the reader leaves no room."""
        window = self.job.window
        return SlowConsumer(window.sent_bytes - window.taken_bytes, window.limit_bytes)
