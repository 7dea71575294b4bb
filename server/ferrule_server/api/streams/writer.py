"""Writes the messages of one call that is answered piece by piece, and ends the call.

    messages() --> write task --> client
         ^             |
         '-- has_news  '-- end: everything is written, or an error

A write in flight is never cancelled. grpc.aio notes only when a write returns that its batch was sent. The status after
a cancelled write can therefore be a batch that gRPC refuses, and the client would wait for ever. Only the write task
decides that everything is written, between two writes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final, Protocol

import grpc
from google.protobuf.message import Message

from ferrule_server.api.rpc.calls import Context, refuse
from ferrule_server.api.rpc.state import Ending, ServerState
from ferrule_server.api.rpc.status import fault_of
from ferrule_server.api.security.principal import caller_of
from ferrule_server.errors import FerruleError
from ferrule_server.fairness.turns import spawn

_LOG = logging.getLogger(__name__)

_HANG_UP_S: Final = 1.0
"""If the client has hung up, gRPC cancels the call within this time after the write that failed."""
_LAST_WRITE_S: Final = 0.1
"""How long the status waits for the write in flight; a status that is sent earlier still arrives after it."""


class Stream(Ending, Protocol):
    """A call that is answered piece by piece. Used on the event loop only."""

    def messages(self) -> Iterator[Message | None]:
        """Yield the messages in order, None while none is ready; return once the call is complete.

        The iterator is resumed after the message has been written. A FerruleError that it raises ends the call.
        """
        ...

    def abandon(self) -> None:
        """Drop everything that is not written: the call has ended."""
        ...


class Writer:
    """Writes the messages of one call and ends the call.

    Invariant: the first ``end`` decides the status, and nothing more is written after it.

    Args:
        rpc: The method.
        state: The server, which can end the call too.
        context: The call.

    Attributes:
        caller: The caller of the call.
        is_ended: Whether the status is decided.
        has_news: To be set when a message may be ready, or the call complete.
    """

    def __init__(self, rpc: str, state: ServerState, context: Context) -> None:
        self._rpc = rpc
        self._state = state
        self._context = context
        self.caller = caller_of(context)
        self.is_ended = False
        self._has_begun = False
        self.has_news = asyncio.Event()
        self._status: asyncio.Future[FerruleError | None] = asyncio.get_running_loop().create_future()

    async def run(self, stream: Stream, read: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Serve the call until everything is written or an error ends it.

        If the client reads nothing at all, the status waits for what is in flight. Then this coroutine waits too, until
        the client hangs up or the server stops.

        Args:
            stream: The call.
            read: Reads the client's frames; None: there is only the request.
        """
        self._state.streams.add(stream)  # before the first await: a drain must know of the call
        try:
            error = await self._serve(stream, read)
        finally:
            self.end(None)
            stream.abandon()
            self._state.streams.discard(stream)
        if error is not None:
            refuse(self._context, self._rpc, error)

    def end(self, error: FerruleError | None) -> None:
        """End the call with ``error``, or with OK if it is None. Later calls change nothing."""
        self.is_ended = True
        self.has_news.set()
        if not self._status.done():  # a traceback would keep the frames of the call, and the call, in a cycle
            self._status.set_result(None if error is None else error.with_traceback(None))

    async def _serve(self, stream: Stream, read: Callable[[], Coroutine[Any, Any, None]] | None) -> FerruleError | None:
        """Read and write until the call has ended; return its error, None for OK."""
        reader = None
        if read is not None:
            begin = self._start(self._begin())  # a client may wait for the metadata before it sends its first frame
            await asyncio.wait([begin])
            if begin.exception() is not None:
                return await self._status
            reader = self._start(read())
        writer = self._start(self._write(stream))
        try:
            error = await self._status
            await asyncio.wait([writer], timeout=_LAST_WRITE_S)
        finally:
            if reader is not None:
                reader.cancel()
        return error

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task of the call; if it fails, the call ends."""
        task = spawn(work)
        task.add_done_callback(self._check)
        return task

    def _check(self, task: asyncio.Task[None]) -> None:
        failure = None if task.cancelled() else task.exception()
        if isinstance(failure, FerruleError):
            self.end(failure)
        elif isinstance(failure, grpc.aio.BaseError):
            asyncio.get_running_loop().call_later(_HANG_UP_S, self._end_unless_hung_up, failure)
        elif failure is not None:
            self.end(fault_of(failure, self._rpc))

    async def _write(self, stream: Stream) -> None:
        for message in stream.messages():
            if self.is_ended:
                return
            if message is None:
                self.has_news.clear()
                await self.has_news.wait()
                continue
            if not self._has_begun:
                await self._begin()
            await self._context.write(message)
        self.end(None)

    async def _begin(self) -> None:
        """Send the metadata apart from the first message: a status could overtake that."""
        self._has_begun = True
        await self._context.send_initial_metadata(())

    def _end_unless_hung_up(self, failure: grpc.aio.BaseError) -> None:
        """End the call after an operation that gRPC failed; a client that hung up is not a fault."""
        if self._status.done():
            _LOG.debug("client hung up rpc=%s principal=%s", self._rpc, self.caller.principal)
        else:
            self.end(fault_of(failure, self._rpc))
