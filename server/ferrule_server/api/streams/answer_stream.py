"""Calls that are answered piece by piece, Generate and Forward: as fast as the client reads, and no faster.

    engine thread -- deliver --> messages (merge what waits) -- write task --> client
          ^                                                         |
          '------------- resume, once the window is open again -----'

The engine may run ahead of the reader by the job's window. What is delivered counts in ``Window.sent_bytes``, what gRPC
has taken in ``Window.taken_bytes``; gRPC itself holds a few MiB before it makes a write wait. A reader that stops
parks its own call and nothing else.

A write in flight is never cancelled: see the note in ``stream``. The write task alone decides when all is written,
between two writes.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import grpc
from google.protobuf.message import Message

from ferrule_server.api.receiving.turns import spawn
from ferrule_server.api.rpc.calls import HANG_UP_S, Context, cancel, refuse
from ferrule_server.api.rpc.observe import current_call
from ferrule_server.api.rpc.refusals import Refusals
from ferrule_server.api.rpc.state import ServerState
from ferrule_server.api.rpc.status import fault_of
from ferrule_server.api.security.principal import caller_of
from ferrule_server.engine.engine import Engine
from ferrule_server.engine.jobs import ForwardFrame, GenerateFrame, Job, Outcome, StreamJob
from ferrule_server.errors import FerruleError

_LOG = logging.getLogger(__name__)

_LAST_WRITE_S: Final = 0.1
"""How long the status waits for the write in flight; a status sent earlier still arrives behind it."""

Frame = GenerateFrame | ForwardFrame


class Reply(NamedTuple):
    """A message to write, and the rows of the engine that are in it."""

    message: Message
    num_rows: int


class Replies(Protocol):
    """Turns frames of the engine into messages. Used on the event loop only."""

    def add(self, frame: Frame) -> None:
        """Take the next frame of the engine."""
        ...

    def next(self) -> Reply | None:
        """Return the next message, made of as much as waits and fits; None: nothing waits."""
        ...


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call asks for, and how it is answered.

    Attributes:
        rpc: The method.
        job: For the engine.
        replies: Turns its frames into messages.
        refusals: Branches that failed, logged after each step; None: there are no branches.
    """

    rpc: str
    job: StreamJob[object]
    replies: Replies
    refusals: Refusals | None = None


class AnswerStream:
    """One call answered piece by piece; also the sink of its job and an ``Ending``.

    Invariant: each row delivered waits in ``replies``, or was written and is counted in ``Window.taken_bytes``, until
    the call has ended; afterwards nothing is delivered any more, and its job is cancelled unless it was over.

    Args:
        state: The server.
        engine: Runs the job.
        context: The call.
        answer: What it asks for, and how it is answered.
    """

    def __init__(self, state: ServerState, engine: Engine, context: Context, answer: Answer) -> None:
        self._state = state
        self._engine = engine
        self._context = context
        self._rpc = answer.rpc
        self._job = answer.job
        self._replies = answer.replies
        self._refusals = answer.refusals
        self.caller = caller_of(context)
        self._call = current_call()
        self._has_news = asyncio.Event()
        self._has_begun = False
        self._is_over = False
        self._failure: FerruleError | None = None
        self._ended: asyncio.Future[FerruleError | None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Serve the call until everything is written, or something ends it.

        Where the client reads nothing at all, its status waits behind what it has not read, and so does this
        coroutine until the client goes away or the server stops.
        """
        self._state.streams.add(self)  # before the first await: from here on a drain knows of it
        try:
            error = await self._serve()
        finally:
            self._abandon()
            if self._refusals is not None:
                self._refusals.log(is_last=True)
            self._state.streams.discard(self)
        if error is not None:
            refuse(self._context, self._rpc, error)

    async def _serve(self) -> FerruleError | None:
        """Run the job and write its answers; return why it has ended, None for OK."""
        if self._call is not None:
            self._call.record_job(self._job)
        self._engine.submit([(self._job, self)])
        writer = spawn(self._guarded_write())
        error = await self._ended
        await asyncio.wait([writer], timeout=_LAST_WRITE_S)
        return error

    def end(self, error: FerruleError | None) -> None:
        """End the call: with ``error``, or None for OK. Later calls change nothing."""
        self._has_news.set()
        if not self._ended.done():  # a traceback would keep the call's frames in a cycle
            self._ended.set_result(None if error is None else error.with_traceback(None))

    def is_quiet(self, quiet_s: float) -> bool:  # noqa: ARG002  (something is under way until the call ends)
        """Whether nothing is under way: never, before the call has ended."""
        return False

    # ---- engine side ------------------------------------------------------------------------------------------------

    def deliver(self, job: Job[object], outcome: Outcome) -> None:  # noqa: ARG002  (there is one job)
        """Take the next frame, or the error that ends the call once what came before it is written."""
        if self._ended.done():
            self._is_over = self._is_over or not isinstance(outcome, Frame) or outcome.is_last
            return
        try:
            if isinstance(outcome, FerruleError):
                self._is_over, self._failure = True, outcome
            else:
                assert isinstance(outcome, Frame)
                self._replies.add(outcome)
                if self._call is not None:
                    self._call.record_outcome(outcome)
                self._is_over = outcome.is_last
        except Exception as failure:  # noqa: BLE001  (fault_of logs it)
            self.end(fault_of(failure, self._rpc))

    def flush(self) -> None:
        """Wake the writer."""
        if self._refusals is not None:
            self._refusals.log(is_last=self._is_over)
        self._has_news.set()

    # ---- client side ------------------------------------------------------------------------------------------------

    async def _guarded_write(self) -> None:
        try:
            await self._write()
        except FerruleError as error:
            self.end(error)
        except grpc.aio.BaseError as failure:
            await self._end_unless_hung_up(failure)
        except Exception as failure:  # noqa: BLE001  (fault_of logs it)
            self.end(fault_of(failure, self._rpc))

    async def _end_unless_hung_up(self, failure: grpc.aio.BaseError) -> None:
        """Judge a write that gRPC failed: a client that hung up is no fault, and its call is cancelled."""
        await asyncio.wait([self._ended], timeout=HANG_UP_S)
        if self._ended.done():
            _LOG.debug("hung up rpc=%s principal=%s", self._rpc, self.caller.principal)
        else:
            self.end(fault_of(failure, self._rpc))

    async def _write(self) -> None:
        """Write what is there; return once the call has ended, or all is written and so it ends."""
        while not self._ended.done():
            reply = self._replies.next()
            if reply is not None:
                self.caller.check()
                await self._begin()
                await self._context.write(reply.message)
                self._take(reply.num_rows)
            elif self._is_over:
                self.end(self._failure)
            else:
                self._has_news.clear()
                await self._has_news.wait()

    async def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            await self._context.send_initial_metadata(())  # not with the first write: a status may overtake that

    def _take(self, num_rows: int) -> None:
        """Count rows as taken; let the engine go on if it may have found the window closed before.

        The engine adds to ``sent_bytes`` before it looks whether the window is open, and here ``taken_bytes`` moves
        before ``sent_bytes`` is looked at: one of the two sees what the other has written.
        """
        window = self._job.window
        taken_before = window.taken_bytes
        window.taken_bytes = taken_before + num_rows * self._job.row_bytes
        if window.sent_bytes - taken_before >= window.limit_bytes and window.is_open:
            self._engine.resume(self._job)

    def _abandon(self) -> None:
        """Nobody reads any more: a job that is not over stops within a step."""
        self.end(None)
        if not self._is_over:
            cancel(self._job)
            self._engine.resume(self._job)  # so that one that is parked hears of it
