"""GetServerView: the server at one moment as a message, which all calls within a tenth of a second share.

A block map has a byte for each block, or for each run of blocks if the pool has more blocks than cells. A byte is 0 for
an empty block, 1 for a block that only the prefix cache holds, and n + 1 for a block with n owners.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ferrule.v1 import admin_pb2
from ferrule_server.api.responses import describe, outputs
from ferrule_server.api.responses.times import duration, timestamp
from ferrule_server.api.rpc.calls import run_job
from ferrule_server.api.rpc.state import ServerState, Serving
from ferrule_server.engine import host_calls
from ferrule_server.engine.host_calls import PrincipalSeen, View
from ferrule_server.engine.jobs import CacheInfo
from ferrule_server.engine.metrics.durability import DurabilityFigures
from ferrule_server.engine.metrics.timings import HistogramReading
from ferrule_server.kv.block_pool import count_shared

FRESH_S: Final = 0.1
"""For how long a snapshot answers later calls too."""

_NOBODY: Final = ""
_PIECE: Final = 64
"""Sequences converted between two turns of the event loop: half a millisecond."""
_PIECE_BLOCKS: Final = 16384
"""Refcounts copied between two turns of the event loop."""
_MAX_BYTE: Final = 255


@dataclass(frozen=True, slots=True)
class _Bounds:
    """The largest lists that a view may hold.

    A snapshot is taken with one of two sizes of each list, so requests with many different bounds share snapshots.
    """

    max_cells: int
    max_sequences: int
    max_principals: int

    @property
    def taken(self) -> tuple[int, int]:
        """The numbers of sequences and principals in the snapshot that the view is made from."""
        return _size(self.max_sequences, _SEQUENCES), _size(self.max_principals, _PRINCIPALS)


_CELLS: Final = (1024, 16384)
_SEQUENCES: Final = (256, 1024)
_PRINCIPALS: Final = (64, 1024)
"""The default of each bound, and its maximum."""

_TIMES: Final = ("step", "queue", "first_token", "inter_token", "decode")
_MAX_MESSAGES: Final = 8
"""Messages kept of one snapshot. Displays use few bounds; a message for any other bounds is made for each call."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The view, the owners of each block as an array, and the sequences as messages."""

    view: View
    owners: npt.NDArray[np.int32] = field(repr=False)
    sequences: list[admin_pb2.SequenceView] = field(repr=False)


@dataclass(eq=False, slots=True)
class _Taken:
    """A snapshot, taken or under way, and the messages made from it.

    Attributes:
        task: Takes the snapshot.
        begun_at: When it was requested, on the clock of the views.
    """

    task: asyncio.Task[_Snapshot]
    begun_at: float
    messages: dict[_Bounds, admin_pb2.ServerView] = field(default_factory=dict)


class Views:
    """Takes snapshots of a server and shares them between calls. Used on the event loop.

    Invariant: within FRESH_S at most one snapshot is taken of each of the four pairs of sizes.

    Args:
        state: The server.
        clock: Monotonic seconds.
    """

    def __init__(self, state: ServerState, clock: Callable[[], float] = time.monotonic) -> None:
        self._state = state
        self._clock = clock
        self._taken: dict[tuple[int, int], _Taken] = {}

    async def view(self, request: admin_pb2.GetServerViewRequest) -> admin_pb2.ServerView:
        """Return the server as it was at most FRESH_S ago. The message is shared and must not be changed.

        Raises:
            Starting: The model is not loaded yet.
            Draining: The engine has stopped.
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
        """Return the fresh or pending snapshot of these sizes; start one if there is none."""
        now = self._clock()
        taken = self._taken.get(sizes)
        if taken is None or (taken.task.done() and now - taken.begun_at >= FRESH_S):
            task = asyncio.create_task(_look(serving, *sizes), context=Context())  # it belongs to no single call
            taken = self._taken[sizes] = _Taken(task, now)
            taken.task.add_done_callback(_retrieve_error)
        return taken


async def _look(serving: Serving, max_sequences: int, max_principals: int) -> _Snapshot:
    view = await run_job(serving.engine, host_calls.view(_NOBODY, max_sequences, max_principals))
    sequences = await _sequences(view)
    return _Snapshot(view, await as_array(view.refcounts), sequences)


async def _sequences(view: View) -> list[admin_pb2.SequenceView]:
    """Convert the sequences piece by piece: a thousand take milliseconds, which would hold up the event loop."""
    messages: list[admin_pb2.SequenceView] = []
    for start in range(0, len(view.sequences), _PIECE):
        messages += [_sequence(each, view) for each in view.sequences[start : start + _PIECE]]
        await asyncio.sleep(0)
    return messages


async def as_array(refcounts: list[int]) -> npt.NDArray[np.int32]:
    """Convert the refcounts piece by piece: those of a large pool take milliseconds."""
    owners = np.empty(len(refcounts), np.int32)
    for start in range(0, len(refcounts), _PIECE_BLOCKS):
        owners[start : start + _PIECE_BLOCKS] = refcounts[start : start + _PIECE_BLOCKS]
        await asyncio.sleep(0)
    return owners


def _retrieve_error(task: asyncio.Task[_Snapshot]) -> None:
    """Retrieve the error of a snapshot, because every call that waited for it may have been cancelled."""
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
    times: dict[str, Any] = {f"{name}_times": _histogram(view.timings[name]) for name in _TIMES}
    message = admin_pb2.ServerView(
        time=timestamp(view.unix_ns),
        uptime=duration(view.at_s - state.started_at_s),
        status=describe.status(state, view.snapshot),
        cache_metrics=describe.cache_metrics(serving, view.snapshot, view.kv),
        running_appends=view.snapshot.num_running,
        queued_jobs=view.num_jobs,
        num_step_rows=round(view.timings["step_rows"].sum),
        step_ns=counters.step_ns,
        num_refused=view.snapshot.refused,
        sequences=snapshot.sequences[: bounds.max_sequences],
        principals=[_principal(each, size) for each in view.principals[: bounds.max_principals]],
        known_principals=view.num_principals,
        **times,
    )
    if (journal := serving.engine.durability()) is not None:
        _fill_journal(message, journal)
    if bounds.max_cells:
        message.block_map.CopyFrom(block_map(snapshot.owners, view.is_cached, bounds.max_cells))
    return message


def _fill_journal(message: admin_pb2.ServerView, journal: DurabilityFigures) -> None:
    message.journal_state = admin_pb2.JOURNAL_STATE_HEALTHY if journal.is_healthy else admin_pb2.JOURNAL_STATE_LOST
    message.durable_sequences = journal.num_sequences
    message.cold_sequences = journal.num_cold
    message.tokens_to_recompute = journal.tokens_to_recompute
    message.sync_times.CopyFrom(_histogram(journal.sync_times))


def _sequence(seen: CacheInfo, view: View) -> admin_pb2.SequenceView:
    num_shared_blocks = count_shared(seen.block_ids, view.refcounts, has_gaps=view.has_gaps)
    summary = outputs.cache_summary(seen, view.unix_ns, num_shared_blocks)
    return admin_pb2.SequenceView(summary=summary, **describe.same_fields(admin_pb2.SequenceView, seen))


def _principal(seen: PrincipalSeen, block_size: int) -> admin_pb2.PrincipalView:
    return admin_pb2.PrincipalView(
        principal=seen.name,
        live_sequences=seen.num_sequences,
        kv_tokens=seen.num_blocks * block_size,
        queued_jobs=seen.num_jobs,
        queued_rows=seen.num_rows,
        **describe.same_fields(admin_pb2.PrincipalView, seen),
    )


def _histogram(reading: HistogramReading) -> admin_pb2.Histogram:
    bounds = [round(bound * 1e9) for bound in reading.bounds]
    return admin_pb2.Histogram(upper_bounds_ns=bounds, counts=reading.counts, sum_ns=round(reading.sum * 1e9))


def block_map(owners: npt.NDArray[np.int32], is_cached: bytes, max_cells: int) -> admin_pb2.BlockMap:
    """Return the map of a pool in at most ``max_cells`` cells.

    Args:
        owners: int32 [num_blocks], the owners of each block, the null block at index 0; not changed.
        is_cached: A byte for each block, 1 if only the prefix cache holds it.
        max_cells: At least 1.
    """
    owners = owners[1:]
    marks = np.minimum(owners + (owners > 0), _MAX_BYTE).astype(np.uint8)
    marks |= np.frombuffer(is_cached, np.uint8)[1:]
    cell_blocks = max(1, -(-len(marks) // max_cells))
    starts = np.arange(0, len(marks), cell_blocks)
    num_held = np.add.reduceat((owners > 0).astype(np.int64), starts)
    sizes = np.diff(starts, append=len(marks))
    return admin_pb2.BlockMap(
        cell_blocks=cell_blocks,
        cells=np.maximum.reduceat(marks, starts).tobytes(),
        fill=(-(-num_held * _MAX_BYTE // sizes)).astype(np.uint8).tobytes(),
        num_shared=np.bincount(np.minimum(owners, 4), minlength=5)[2:].tolist(),
    )
