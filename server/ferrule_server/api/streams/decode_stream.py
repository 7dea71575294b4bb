"""StreamDecode: many sequences over one stream, one frame per step.

    client frame --> read task --> engine.submit([release, item, item, ...])     one list, so they share a step
                                        |
    client <-- write task <-- queue <-- flush <-- deliver, deliver, ...           one frame per step

The queue is bounded in bytes and nothing here ever makes the engine wait: a reader that falls behind loses its stream
(SLOW_CONSUMER), not its sequences. Whatever was committed can be replayed on a new stream.

A write in flight is never cancelled: grpc.aio notes that a batch was sent only when its write returns, so the status
behind a cancelled one can be a batch that gRPC refuses, and the client would wait for ever. The write task alone
decides when the stream is done, between two writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Final, cast

import grpc

from ferrule.v1 import executor_pb2
from ferrule_server.api.receiving.turns import Turns, spawn
from ferrule_server.api.requests.planned import PlannedAppend
from ferrule_server.api.responses.outputs import fill_append, fill_unified, fill_verify, release_results
from ferrule_server.api.rpc.calls import HANG_UP_S, Context, admit_new, cancel, refuse
from ferrule_server.api.rpc.observe import current_call
from ferrule_server.api.rpc.refusals import Refusals
from ferrule_server.api.rpc.state import Phase, ServerState, Serving
from ferrule_server.api.rpc.status import fault_of, to_status
from ferrule_server.api.security.principal import caller_of
from ferrule_server.engine import host_calls
from ferrule_server.engine.jobs import AppendJob, AppendResult, Job, Outcome
from ferrule_server.errors import FerruleError, InvalidRequest, SlowConsumer
from ferrule_server.kv.handle import Handle

_LOG = logging.getLogger(__name__)

_RPC: Final = "StreamDecode"
_ITEM_PATHS: Final = tuple(f"items[{index}].decode." for index in range(256))
_MANY_ITEMS: Final = 16
"""Frames with fewer items are read at one go."""
_ERROR_NS: Final = 20_000
"""What an error message costs the event loop: most are written as the engine delivers them, outside of any call."""
_FRAME_BYTES: Final = 256
"""What a queued frame costs besides its results, so that empty ones count too."""
_RELEASE_BYTES: Final = 32
_LAST_WRITE_S: Final = 0.1
"""How long the status waits for the write in flight; a status sent earlier still arrives behind it."""


@dataclass(frozen=True, slots=True)
class _Release:
    """The releases of a client frame, and errors of its items: they come no earlier than the releases."""

    handles: tuple[Handle, ...]
    held: list[executor_pb2.StreamResult]


class DecodeStream:
    """One StreamDecode call; also the sink of its jobs and an ``Ending``.

    Invariant: every item read is either in ``_pending`` or has its result in ``_releases`` (an error that waits for
    the releases of its own client frame), ``_frames``, ``_queue`` or sent, exactly once, until the stream has ended;
    afterwards nothing is delivered any more.

    Args:
        state: The server.
        serving: Its engine and reader.
        requests: The client's frames.
        context: The call.
    """

    def __init__(
        self,
        state: ServerState,
        serving: Serving,
        requests: AsyncGenerator[executor_pb2.StreamDecodeRequest],
        context: Context,
    ) -> None:
        self._requests = requests
        self._engine = serving.engine
        self._inputs = serving.inputs
        self._limits = state.limits
        self._state = state
        self._context = context
        self.caller = caller_of(context)
        self._principal = self.caller.principal
        self._call = current_call()
        self._is_traced = self._call is not None and self._call.trace is not None
        self._pending: dict[Job[object], PlannedAppend] = {}
        self._releases: dict[Job[object], _Release] = {}
        self._frames: list[tuple[executor_pb2.StreamDecodeResponse, int]] = []
        self._queue: deque[tuple[executor_pb2.StreamDecodeResponse, int]] = deque()
        self._queued_bytes = 0
        self._refusals = Refusals(_RPC, self._principal)
        self._loop = asyncio.get_running_loop()
        self._last_use_s = self._loop.time()
        self._is_writing = False
        self._has_news = asyncio.Event()
        self._is_half_closed = False
        self._is_ended = False
        self._ended: asyncio.Future[FerruleError | None] = self._loop.create_future()

    async def run(self) -> None:
        """Serve the stream until the client has half-closed and everything is answered, or something ends it.

        Where the client reads nothing at all, its status waits behind what it has not read, and so does this
        coroutine: one frame and one call held until the client goes away or the server stops.
        """
        self._state.streams.add(self)  # before the first await: from here on a drain knows of it
        try:
            error = await self._serve()
        finally:
            self._abandon()
            self._refusals.log(is_last=True)
            self._state.streams.discard(self)
        if error is not None:
            refuse(self._context, _RPC, error)

    async def _serve(self) -> FerruleError | None:
        """Read and write until the stream has ended; return why, None for OK."""
        try:
            await self._context.send_initial_metadata(())  # not with the first write: a status may overtake that
        except grpc.aio.BaseError as failure:
            await self._end_unless_hung_up(failure)
            return await self._ended
        reader, writer = spawn(self._guarded_read()), spawn(self._guarded_write())
        try:
            error = await self._ended
            await asyncio.wait([writer], timeout=_LAST_WRITE_S)
        finally:
            reader.cancel()
        return error

    def end(self, error: FerruleError | None) -> None:
        """End the stream: with its own status ``error``, or None for OK. Later calls change nothing."""
        self._is_ended = True
        self._has_news.set()
        if not self._ended.done():  # a traceback would keep the client's frame, and this stream, in a cycle
            self._ended.set_result(None if error is None else error.with_traceback(None))

    def is_quiet(self, quiet_s: float) -> bool:
        """Whether nothing is under way or waits to be written, and nothing was for ``quiet_s`` seconds."""
        return not self._is_busy() and self._loop.time() - self._last_use_s >= quiet_s

    def _is_busy(self) -> bool:
        """Whether an item or a release is not answered yet, or an answer not written."""
        return bool(self._pending or self._releases or self._frames or self._queue or self._is_writing)

    # ---- engine side ------------------------------------------------------------------------------------------------

    def deliver(self, job: Job[object], outcome: Outcome) -> None:
        """Write the outcome of one job into the frame of this step."""
        if self._is_ended:
            return
        try:
            if isinstance(outcome, AppendResult):
                self._add_output(self._pending.pop(job), outcome)
                if self._is_traced:
                    self._call.record_step(outcome)  # type: ignore[union-attr]  # what is traced is a call
            elif (release := self._releases.pop(job, None)) is not None:
                self._add_releases(release, outcome)
            else:
                assert isinstance(outcome, FerruleError)
                planned = self._pending.pop(job)
                self._add_error(self._error_result(planned.seq, planned.job.request_id, planned.refusal(outcome)))
        except Exception as failure:  # noqa: BLE001  (fault_of logs it)
            self.end(fault_of(failure, _RPC))

    def flush(self) -> None:
        """Queue what was delivered for the writer; end the stream if its reader is too far behind."""
        self._refusals.log()
        if self._is_ended or not self._frames:
            return
        if self._queued_bytes > self._limits.max_stream_queue_bytes:
            self.end(SlowConsumer(self._queued_bytes, self._limits.max_stream_queue_bytes))
            return
        free_blocks = self._engine.num_free_blocks()
        for frame, num_bytes in self._frames:
            frame.free_blocks = free_blocks
            self._queued_bytes += num_bytes + _FRAME_BYTES
        self._queue.extend(self._frames)
        self._frames.clear()
        self._has_news.set()

    def _frame(self, num_bytes: int) -> executor_pb2.StreamDecodeResponse:
        """Return the frame that the next ``num_bytes`` of results go into."""
        if self._frames:
            frame, held_bytes = self._frames[-1]
            if held_bytes + num_bytes <= self._limits.max_stream_frame_bytes:
                self._frames[-1] = (frame, held_bytes + num_bytes)
                return frame
        frame = executor_pb2.StreamDecodeResponse()
        self._frames.append((frame, num_bytes))
        return frame

    def _add_output(self, planned: PlannedAppend, output: AppendResult) -> None:
        result = self._frame(planned.reply_bytes).results.add()
        result.seq = planned.seq
        request_id = planned.job.request_id
        if request_id:
            result.request_id = request_id
        if planned.kind == "decode":
            fill_append(result.decode, output, planned.plan, request_id)
        elif planned.kind == "verify":
            fill_verify(result.verify, output, planned)
        else:
            fill_unified(result.unified, output, planned)

    def _error_result(self, seq: int, request_id: str, error: FerruleError) -> executor_pb2.StreamResult:
        self._refusals.add(error)
        self._state.shares.charge(self._principal, _ERROR_NS)
        return executor_pb2.StreamResult(seq=seq, request_id=request_id, error=to_status(error))

    def _add_error(self, result: executor_pb2.StreamResult) -> None:
        self._frame(result.ByteSize()).results.append(result)

    def _add_releases(self, release: _Release, outcome: Outcome) -> None:
        if isinstance(outcome, FerruleError):  # a release has no error of its own: the server is going down
            self.end(outcome)
            return
        results = release_results(release.handles, cast("tuple[int | None, ...]", outcome))
        self._frame(_RELEASE_BYTES * len(results)).releases.extend(results)
        for result in release.held:
            self._add_error(result)

    # ---- client side ------------------------------------------------------------------------------------------------

    async def _guarded_read(self) -> None:
        try:
            async with contextlib.aclosing(self._requests):
                await self._read_frames()
        except FerruleError as error:
            self.end(error)
        except grpc.aio.BaseError as failure:
            await self._end_unless_hung_up(failure)
        except Exception as failure:  # noqa: BLE001  (fault_of logs it)
            self.end(fault_of(failure, _RPC))

    async def _guarded_write(self) -> None:
        try:
            await self._write_frames()
        except grpc.aio.BaseError as failure:
            await self._end_unless_hung_up(failure)
        except Exception as failure:  # noqa: BLE001  (fault_of logs it)
            self.end(fault_of(failure, _RPC))

    async def _end_unless_hung_up(self, failure: grpc.aio.BaseError) -> None:
        """Judge a read or write that gRPC failed: a client that hung up is no fault, and its call is cancelled."""
        await asyncio.wait([self._ended], timeout=HANG_UP_S)
        if self._ended.done():
            _LOG.debug("hung up rpc=%s principal=%s", _RPC, self._principal)
        else:
            self.end(fault_of(failure, _RPC))

    async def _read_frames(self) -> None:
        async for request in self._requests:
            if self._state.phase is Phase.CLOSING:
                return  # whoever drains ends the stream once it is quiet; this frame is among what is not taken
            self._state.use()
            await self._accept(request)
        self._is_half_closed = True
        self._has_news.set()

    async def _write_frames(self) -> None:
        """Write what is queued; return once the stream has ended, or is done and so ends with OK."""
        while not self._is_ended:
            if self._queue:
                frame, num_bytes = self._queue.popleft()
                self._is_writing = True
                await self._context.write(frame)
                self._is_writing = False
                self._queued_bytes -= num_bytes + _FRAME_BYTES
                self._last_use_s = self._loop.time()
            elif self._is_half_closed and not self._is_busy():
                self.end(None)
            else:
                self._has_news.clear()
                await self._has_news.wait()

    async def _accept(self, request: executor_pb2.StreamDecodeRequest) -> None:
        """Hand the frame's releases and items to the engine in one list; answer bad items at once.

        Raises:
            InvalidRequest: The frame as a whole is not taken; nothing of it has been done.
        """
        self._inputs.check_items(request)
        entries: list[tuple[Job[object], DecodeStream]] = []
        handles = self._inputs.caches.named(request.release, "release")
        release = host_calls.release(self._principal, handles)
        if handles:
            entries.append((release, self))
        bad_items = await self._plan_items(request, entries)
        if handles:
            self._releases[release] = _Release(handles, bad_items)
        else:
            for result in bad_items:
                self._add_error(result)
        if entries:
            self._engine.submit(entries)  # type: ignore[arg-type]
        elif not self._frames:
            self._frame(0)
        self.flush()

    async def _plan_items(
        self, request: executor_pb2.StreamDecodeRequest, entries: list[tuple[Job[object], DecodeStream]]
    ) -> list[executor_pb2.StreamResult]:
        """Add the jobs of a frame's good items to ``entries`` and return the results of its bad ones.

        Lets others run on the event loop now and then: a frame may have thousands of items.
        """
        bad_items: list[executor_pb2.StreamResult] = []
        has_unified = False
        turns = Turns() if len(request.items) >= _MANY_ITEMS else None
        for index, item in enumerate(request.items):
            if turns is not None:
                await turns.pause()
            try:
                planned = self._plan(item, index)
            except FerruleError as error:
                self._state.calls.refuse_item(error.reason)
                bad_items.append(self._error_result(item.seq, self._inputs.echoed_id(item), error))
                continue
            planned.seq = item.seq
            self._pending[planned.job] = planned
            entries.append((planned.job, self))
            has_unified = has_unified or planned.kind == "unified"
        if has_unified:
            self._share_step(entries)
        return bad_items

    def _share_step(self, entries: list[tuple[Job[object], DecodeStream]]) -> None:
        """Have all items of a frame run in one step: its client has scheduled prompts and decodes together."""
        cohort = next(self._state.cohorts)
        for job, _ in entries:
            if isinstance(job, AppendJob):
                job.cohort = cohort

    def _plan(self, item: executor_pb2.StreamItem, index: int) -> PlannedAppend:
        kind = item.WhichOneof("input")
        if kind == "decode":
            return self._inputs.decode(item.decode, _item_path(index), self._principal)
        if kind == "verify":
            planned = self._inputs.verify(item.verify, f"items[{index}].verify.", self._principal)
        elif kind == "unified":
            planned = self._inputs.unified_item(item.unified, f"items[{index}].unified.", self._principal)
            admit_new(self._state, planned.job)
        else:
            raise InvalidRequest(f"items[{index}]", "one of decode, verify and unified must be set")
        planned.kind = kind
        return planned

    def _abandon(self) -> None:
        """Nobody reads any more: what has no step yet never runs."""
        self.end(None)
        for job in self._pending:
            cancel(job)
        self._pending.clear()
        self._queue.clear()
        self._frames.clear()


def _item_path(index: int) -> str:
    """Return the path of a decode item in its frame; not put together anew for every token decoded."""
    return _ITEM_PATHS[index] if index < len(_ITEM_PATHS) else f"items[{index}].decode."
