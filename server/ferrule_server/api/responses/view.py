"""GetServerView: the server at one moment as a message, the same for everybody who looks within a tenth of a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from ferrule.v1 import admin_pb2
from ferrule_server.api.responses import describe
from ferrule_server.api.responses.block_map import as_array, block_map, num_shared
from ferrule_server.api.rpc.calls import run_job
from ferrule_server.api.rpc.state import ServerState, Serving
from ferrule_server.engine import host_calls
from ferrule_server.engine.metrics.histogram import HistogramReading
from ferrule_server.engine.metrics.views import PrincipalSeen, SequenceSeen, View

FRESH_S: Final = 0.1
"""How long a snapshot is shown to others."""

_NOBODY: Final = ""
_PIECE: Final = 64
"""Sequences put into messages at a time: half a millisecond, then others have their turns."""


@dataclass(frozen=True, slots=True)
class _Bounds:
    """How much a view has at most.

    A snapshot is taken with one of two sizes of each list, so that no order of requests can have many taken.
    """

    max_cells: int
    max_sequences: int
    max_principals: int

    @property
    def taken(self) -> tuple[int, int]:
        """Sequences and principals of the snapshot that the view is made of."""
        return _size(self.max_sequences, _SEQUENCES), _size(self.max_principals, _PRINCIPALS)


_CELLS: Final = (1024, 16384)
_SEQUENCES: Final = (256, 1024)
_PRINCIPALS: Final = (64, 1024)
"""What is given unless told otherwise, and at most."""

_MAX_MESSAGES: Final = 8
"""Kept of one snapshot: displays ask with few bounds, and whoever asks with many gets each made anew."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What was seen, the owners of each block as an array, and the sequences as messages."""

    view: View
    owners: npt.NDArray[np.int32] = field(repr=False)
    sequences: list[admin_pb2.SequenceView] = field(repr=False)


@dataclass(eq=False, slots=True)
class _Taken:
    """A snapshot, taken or on its way, and the messages that were made of it.

    Attributes:
        task: Takes it. begun_at: when that was asked for, on the views' clock.
    """

    task: asyncio.Task[_Snapshot]
    begun_at: float
    messages: dict[_Bounds, admin_pb2.ServerView] = field(default_factory=dict)


class Views:
    """Takes snapshots of a server for all who look, on the event loop.

    Invariant: within FRESH_S at most one snapshot is taken of each pair of sizes, of which there are four.

    Args:
        state: The server.
        clock: Monotonic seconds.
    """

    def __init__(self, state: ServerState, clock: Callable[[], float] = time.monotonic) -> None:
        self._state = state
        self._clock = clock
        self._taken: dict[tuple[int, int], _Taken] = {}

    async def view(self, request: admin_pb2.GetServerViewRequest) -> admin_pb2.ServerView:
        """Return the server as it is, or was FRESH_S ago at most. The message belongs to all: it must not be changed.

        Raises:
            Starting: The model is not loaded yet.
            Draining: The engine runs no more.
        """
        serving = self._state.describe()
        bounds = _bounds(request)
        taken = self._take(serving, bounds.taken)
        snapshot = await asyncio.shield(taken.task)
        message = taken.messages.get(bounds)
        if message is None:
            message = _message(self._state, serving, snapshot, bounds)
            if len(taken.messages) < _MAX_MESSAGES:
                taken.messages[bounds] = message
        return message

    def _take(self, serving: Serving, sizes: tuple[int, int]) -> _Taken:
        """Return the snapshot of these sizes that is fresh or on its way, or have one taken."""
        now = self._clock()
        taken = self._taken.get(sizes)
        if taken is None or (taken.task.done() and now - taken.begun_at >= FRESH_S):
            task = asyncio.create_task(_look(serving, *sizes), context=Context())  # of no call: it is for many
            taken = self._taken[sizes] = _Taken(task, now)
            taken.task.add_done_callback(_heed)
        return taken


async def _look(serving: Serving, max_sequences: int, max_principals: int) -> _Snapshot:
    view = await run_job(serving.engine, host_calls.view(_NOBODY, max_sequences, max_principals))
    sequences = await _sequences(view, serving.engine.info.bytes_per_block)
    return _Snapshot(view, await as_array(view.refcounts), sequences)


async def _sequences(view: View, bytes_per_block: int) -> list[admin_pb2.SequenceView]:
    """Return all that were seen, piece by piece: a thousand take milliseconds, and others have turns."""
    made: list[admin_pb2.SequenceView] = []
    for start in range(0, len(view.sequences), _PIECE):
        made += [_sequence(each, view, bytes_per_block) for each in view.sequences[start : start + _PIECE]]
        await asyncio.sleep(0)
    return made


def _heed(task: asyncio.Task[_Snapshot]) -> None:
    """Take note of an error also where everybody who waited for the snapshot has left."""
    if not task.cancelled():
        task.exception()


def _bounds(request: admin_pb2.GetServerViewRequest) -> _Bounds:
    def bound(name: str, usual: int, most: int) -> int:
        return min(getattr(request, name), most) if request.HasField(name) else usual

    return _Bounds(
        bound("max_cells", *_CELLS), bound("max_sequences", *_SEQUENCES), bound("max_principals", *_PRINCIPALS)
    )


def _size(wanted: int, sizes: tuple[int, int]) -> int:
    usual, most = sizes
    return usual if wanted <= usual else most


def _message(state: ServerState, serving: Serving, snapshot: _Snapshot, bounds: _Bounds) -> admin_pb2.ServerView:
    view = snapshot.view
    counters, size = view.snapshot.counters, view.kv.block_size
    message = admin_pb2.ServerView(
        time=_timestamp(view.unix_ns),
        uptime=_duration(view.at_s - state.started_at_s),
        status=describe.status(state, view.snapshot),
        cache_metrics=describe.cache_metrics(serving, view.snapshot, view.kv),
        model_id=serving.engine.info.model.model_id,
        max_step_rows=serving.max_step_rows,
        running_appends=view.snapshot.num_running,
        queued_jobs=view.num_jobs,
        num_step_rows=round(view.timings["step_rows"].sum),
        step_ns=counters.step_ns,
        num_refused=view.snapshot.refused(),
        sequences=snapshot.sequences[: bounds.max_sequences],
        principals=[_principal(each, size) for each in view.principals[: bounds.max_principals]],
        known_principals=view.num_principals,
        step_seconds=_histogram(view.timings["step"]),
        queue_seconds=_histogram(view.timings["queue"]),
        first_token_seconds=_histogram(view.timings["first_token"]),
        inter_token_seconds=_histogram(view.timings["inter_token"]),
        decode_seconds=_histogram(view.timings["decode"]),
    )
    if bounds.max_cells:
        message.block_map.CopyFrom(block_map(snapshot.owners, view.is_cached, bounds.max_cells))
    return message


def _sequence(seen: SequenceSeen, view: View, bytes_per_block: int) -> admin_pb2.SequenceView:
    num_blocks = len(seen.block_ids) + seen.num_spares
    return admin_pb2.SequenceView(
        handle_id=seen.handle_id,
        parent_handle_id=seen.parent_handle_id,
        principal=seen.principal,
        length=seen.length,
        reserved_length=seen.reserved_length,
        num_blocks=num_blocks,
        num_shared_blocks=num_shared(seen.block_ids, view.refcounts),
        kv_bytes=num_blocks * bytes_per_block,
        expires_in=_duration(seen.expires_in_s),
        ttl=_duration(seen.ttl_s),
        age=_duration(seen.age_s),
        num_pending=seen.num_pending,
        is_appending=seen.is_appending,
    )


def _principal(seen: PrincipalSeen, block_size: int) -> admin_pb2.PrincipalView:
    return admin_pb2.PrincipalView(
        principal=seen.name,
        live_sequences=seen.num_sequences,
        kv_tokens=seen.num_blocks * block_size,
        queued_jobs=seen.num_jobs,
        queued_rows=seen.num_rows,
        num_appends=seen.num_appends,
        num_tokens=seen.num_tokens,
        queue_ns=seen.queue_ns,
        run_ns=seen.run_ns,
    )


def _histogram(reading: HistogramReading) -> admin_pb2.Histogram:
    return admin_pb2.Histogram(upper_bounds=reading.bounds, counts=reading.counts, sum=reading.sum)


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(max(0.0, seconds) * 1e9))
    return duration


def _timestamp(unix_ns: int) -> Timestamp:
    stamp = Timestamp()
    stamp.FromNanoseconds(unix_ns)
    return stamp
