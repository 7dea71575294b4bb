"""StreamDecode: many sequences over one stream, one frame per step.

    client frame --> read task --> engine.submit([release, item, item, ...])     one list, so they share a step
                                        |
    client <-- writer <-- queue <-- flush <-- deliver, deliver, ...               one frame per step

The queue is bounded in bytes, and the engine never waits for it: a client that reads too slowly loses its stream
(SLOW_CONSUMER), not its sequences. Everything that was committed can be replayed on a new stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, cast

from google.protobuf.message import Message

from ferrule.v1 import executor_pb2
from ferrule_server.api.requests.fields import check_count
from ferrule_server.api.requests.planned import PlannedAppend
from ferrule_server.api.responses.outputs import fill_append, fill_prefill, fill_verify, release_results
from ferrule_server.api.rpc.calls import Context, admit_new, cancel
from ferrule_server.api.rpc.observe import current_call
from ferrule_server.api.rpc.refusals import Refusals
from ferrule_server.api.rpc.reply_limit import USUAL_REPLY_BYTES, check_reply
from ferrule_server.api.rpc.state import Phase, ServerState
from ferrule_server.api.rpc.status import fault_of, to_status
from ferrule_server.api.streams.batches import Fill, Read
from ferrule_server.api.streams.writer import Writer
from ferrule_server.engine import host_calls
from ferrule_server.engine.jobs import AppendJob, AppendResult, Entry, Job, Outcome
from ferrule_server.errors import FerruleError, InvalidRequest, SlowConsumer
from ferrule_server.fairness.turns import Turns
from ferrule_server.kv.handle import Handle

_RPC: Final = "StreamDecode"
_MANY_ITEMS: Final = 16
"""Frames with fewer items are read without a pause."""
_ERROR_NS: Final = 20_000
"""Cost of an error message on the event loop. Most are written while the engine delivers, outside of any call."""
_FRAME_BYTES: Final = 256
"""Size that a queued frame counts besides its results, so that empty frames count too."""
_RELEASE_BYTES: Final = 32
_FILL: Final[Mapping[str, Fill]] = {"decode": fill_append, "verify": fill_verify, "unified": fill_prefill}
"""How the output of each kind of item is written."""


@dataclass(frozen=True, slots=True)
class _Release:
    """The releases of a client frame, and the errors of its items, which are sent after the releases."""

    handles: tuple[Handle, ...]
    held: list[executor_pb2.StreamResult]


class DecodeStream:
    """One StreamDecode call; also the sink of its jobs.

    Invariant: until the stream has ended, every item read is either in ``_pending`` or has exactly one result. That is
    in ``_releases`` (an error that waits for the releases of its own client frame), ``_frames`` or ``_queue``, or sent.
    Once the stream has ended, nothing more is delivered.

    Args:
        state: The server.
        requests: The client's frames.
        context: The call.

    Raises:
        Starting, Draining: As of :meth:`ServerState.use`.
    """

    def __init__(
        self, state: ServerState, requests: AsyncGenerator[executor_pb2.StreamDecodeRequest], context: Context
    ) -> None:
        serving = state.use()
        self._requests = requests
        self._context = context
        self._engine = serving.engine
        self._inputs = serving.inputs
        self._read: dict[str | None, Read] = {
            "decode": serving.inputs.decode,
            "verify": serving.inputs.verifies.read,
            "unified": serving.inputs.unified,
        }
        self._limits = state.limits
        self._state = state
        self._writer = Writer(_RPC, state, context)
        self.caller = self._writer.caller
        self._principal = self.caller.principal
        call = current_call()
        self._traced_call = call if call is not None and call.trace is not None else None
        self._pending: dict[Job[object], PlannedAppend] = {}
        self._releases: dict[Job[object], _Release] = {}
        self._frames: list[tuple[executor_pb2.StreamDecodeResponse, int]] = []
        self._queue: deque[tuple[executor_pb2.StreamDecodeResponse, int]] = deque()
        self._queued_bytes = 0
        self._refusals = Refusals(_RPC, self._principal)
        self._loop = asyncio.get_running_loop()
        self._last_use_s = self._loop.time()
        self._is_writing = False
        self._is_half_closed = False

    async def run(self) -> None:
        """Serve the stream until the client has half-closed and has every answer, or an error ends it.

        See :meth:`Writer.run`: a client that reads nothing holds one frame and one call.
        """
        await self._writer.run(self, self._read_frames)

    def end(self, error: FerruleError | None) -> None:
        """End the stream with ``error``, or with OK if it is None. Later calls change nothing."""
        self._writer.end(error)

    def is_quiet(self, quiet_s: float) -> bool:
        """Return whether nothing is under way or waits to be written, and nothing was for ``quiet_s`` seconds."""
        return not self._is_busy() and self._loop.time() - self._last_use_s >= quiet_s

    def _is_busy(self) -> bool:
        """Return whether an item or a release has no answer yet, or an answer is not written."""
        return bool(self._pending or self._releases or self._frames or self._queue or self._is_writing)

    def messages(self) -> Iterator[Message | None]:
        """Yield the queued frames until the client has half-closed and has every answer."""
        while not self._is_half_closed or self._is_busy():
            if not self._queue:
                yield None
                continue
            frame, num_bytes = self._queue.popleft()
            self._is_writing = True
            yield frame
            self._is_writing = False
            self._queued_bytes -= num_bytes + _FRAME_BYTES
            self._last_use_s = self._loop.time()

    def abandon(self) -> None:
        """Cancel the jobs that have no step yet, and drop every answer that is not written."""
        for job in self._pending:
            cancel(job)
        self._pending.clear()
        self._queue.clear()
        self._frames.clear()
        self._refusals.log(is_last=True)

    # ---- engine side ------------------------------------------------------------------------------------------------

    def deliver(self, job: Job[object], outcome: Outcome) -> None:
        """Write the outcome of one job into the frame of this step."""
        if self._writer.is_ended:
            return
        try:
            if isinstance(outcome, AppendResult):
                self._add_output(self._pending.pop(job), outcome)
                if self._traced_call is not None:
                    self._traced_call.record_step(outcome)
            elif (release := self._releases.pop(job, None)) is not None:
                self._add_releases(release, outcome)
            else:
                assert isinstance(outcome, FerruleError)
                planned = self._pending.pop(job)
                self._add_error(self._error_result(planned.seq, planned.refusal(outcome)))
        except Exception as failure:  # noqa: BLE001  (fault_of logs it)
            self.end(fault_of(failure, _RPC))

    def flush(self) -> None:
        """Queue the delivered frames for the writer; end the stream if its client is too far behind."""
        if self._refusals.counts:
            self._refusals.log()
        if self._writer.is_ended or not self._frames:
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
        self._writer.has_news.set()

    def _frame(self, num_bytes: int) -> executor_pb2.StreamDecodeResponse:
        """Return the frame for the next ``num_bytes`` of results."""
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
        _FILL[planned.kind](getattr(result, planned.kind), output, planned)

    def _error_result(self, seq: int, error: FerruleError) -> executor_pb2.StreamResult:
        self._refusals.add(error)
        self._state.shares.charge(self._principal, _ERROR_NS)
        return executor_pb2.StreamResult(seq=seq, error=to_status(error))

    def _add_error(self, result: executor_pb2.StreamResult) -> None:
        self._frame(result.ByteSize()).results.append(result)

    def _add_releases(self, release: _Release, outcome: Outcome) -> None:
        if isinstance(outcome, FerruleError):  # a release has no error of its own: the server is stopping
            self.end(outcome)
            return
        results = release_results(release.handles, cast("tuple[int | None, ...]", outcome))
        self._frame(_RELEASE_BYTES * len(results)).releases.extend(results)
        for result in release.held:
            self._add_error(result)

    # ---- client side ------------------------------------------------------------------------------------------------

    async def _read_frames(self) -> None:
        async with contextlib.aclosing(self._requests):
            async for request in self._requests:
                if self._state.phase is Phase.CLOSING:
                    return  # the drain ends the stream once it is quiet; this frame is not accepted
                self._state.use()
                await self._accept(request)
        self._is_half_closed = True
        self._writer.has_news.set()

    async def _accept(self, request: executor_pb2.StreamDecodeRequest) -> None:
        """Hand the releases and items of a frame to the engine in one list; answer bad items at once.

        Raises:
            InvalidRequest: The frame as a whole is refused; no part of it was accepted.
        """
        check_count("items", len(request.items), self._limits.max_items_per_frame, "send several frames")
        entries: list[Entry] = []
        release: Job[object] | None = None
        if request.release:
            handles = self._inputs.caches.named(request.release, "release")
            release = host_calls.release(self._principal, handles)
            entries.append((release, self))
        bad_items = await self._plan_items(request, entries)
        if release is not None:
            self._releases[release] = _Release(handles, bad_items)
        else:
            for result in bad_items:
                self._add_error(result)
        if entries:
            self._engine.submit(entries)
        elif not self._frames:
            self._frame(0)
        if self._frames or bad_items:
            self.flush()

    async def _plan_items(
        self, request: executor_pb2.StreamDecodeRequest, entries: list[Entry]
    ) -> list[executor_pb2.StreamResult]:
        """Add the jobs of a frame's good items to ``entries`` and return the results of its bad ones.

        Other tasks get turns on the event loop: a frame may have thousands of items.
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
                bad_items.append(self._error_result(item.seq, error))
                continue
            planned.seq = item.seq
            self._pending[planned.job] = planned
            entries.append((planned.job, self))
            has_unified = has_unified or planned.kind == "unified"
        if has_unified:
            self._state.as_cohort(job for job, _ in entries if isinstance(job, AppendJob))
        return bad_items

    def _plan(self, item: executor_pb2.StreamItem, index: int) -> PlannedAppend:
        kind = item.WhichOneof("input")
        read = self._read.get(kind)
        if kind is None or read is None:
            raise InvalidRequest(f"items[{index}]", "one of decode, verify and unified must be set")
        planned = read(getattr(item, kind), f"items[{index}].{kind}.", self._principal)
        if planned.reply_bytes > USUAL_REPLY_BYTES:
            check_reply(self._context, planned.reply_bytes, f"{planned.at}logits_policy")
        planned.kind = kind
        if kind == "unified":
            admit_new(self._state, planned.job)
        return planned
