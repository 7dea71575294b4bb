"""Open streams for asyncio: frames out, frames in, and a limit on the wait between them; the twin of the sync ones."""

from __future__ import annotations

import asyncio
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from ferrule.v1 import executor_pb2
from ferrule_client._timeouts import CLOSE_S, too_late
from ferrule_client.aio._wire import OwnCancellation, Wire
from ferrule_client.errors import CallCancelledError, FerruleError

__all__ = ["OpenCall", "open_frames", "open_replies"]

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")


class OpenCall(Generic[_Reply]):
    """One open call. Not safe to use from two tasks at once; no task of its own runs, and nothing is read ahead.

    Args:
        wire: Where it was opened.
        call: The call of gRPC's.
        instance: The one it is for; empty: any.
        sends: True: frames are sent on it.

    Attributes:
        is_closed: True: it was closed or cancelled by this side.
    """

    def __init__(self, wire: Wire, call: Any, instance: str, *, sends: bool) -> None:  # Any: a call of either kind
        self.instance = instance
        self.is_closed = False
        self._wire = wire
        self._call = call
        self._sends = sends
        self._unsent: list[object] = []
        self._limit: asyncio.Timeout | None = None
        self._is_waiting = False
        wire.streams.add(self)

    @property
    def is_over(self) -> bool:
        """True: the call ended while nothing was under way on it, as where its server drained; open another one."""
        return bool(self._call.done())

    def send(self, frame: object) -> None:
        """Take one frame; ``flush`` or ``receive`` writes it, so that their limit covers the writing too."""
        self._unsent.append(frame)

    async def flush(self, timeout: float | None) -> None:
        """Return when what was handed over is on its way; errors as of ``receive``."""
        await self._within(timeout, reads=False)

    async def receive(self, timeout: float | None) -> _Reply:
        """Return the next reply.

        Raises:
            DeadlineExceededError: Nothing came in so many seconds; None means no limit.
            grpc.RpcError: The call failed.
            CallCancelledError: The call or the client was closed meanwhile.
            StopAsyncIteration: The server ended the call.
        """
        reply: _Reply | object = await self._within(timeout, reads=True)
        if reply is grpc.aio.EOF:
            raise StopAsyncIteration
        self._is_waiting = False
        return reply  # type: ignore[return-value]

    async def close(self) -> None:
        """End the call: in order when nothing is under way, at once otherwise. Closing twice changes nothing."""
        if self.is_closed:
            return
        self.is_closed = True
        try:
            if not self._is_waiting:
                await self._wait_for_end()
        finally:
            self._stop()

    def cancel(self) -> None:
        """End the call at once, whatever is under way. Finalisers may call in, from any thread."""
        self.is_closed = True
        self._wire.on_loop(self._stop)

    async def _within(self, timeout: float | None, *, reads: bool) -> object:
        self._is_waiting = True
        try:
            with OwnCancellation():
                async with asyncio.timeout(timeout) as self._limit:
                    await self._write()
                    return await self._call.read() if reads else None
        except TimeoutError:
            if self.is_closed:
                raise CallCancelledError(grpc.StatusCode.CANCELLED, "CANCELLED", "the call was closed") from None
            raise too_late(timeout) from None
        finally:
            self._limit = None

    def _stop(self) -> None:
        """Cancel the call, and wake who waits: for ever, if gRPC's own task for the call had not run before."""
        self._call.cancel()
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())

    async def _write(self) -> None:
        while self._unsent:
            try:
                await self._call.write(self._unsent.pop(0))
            except asyncio.InvalidStateError:  # the call has ended; reading says why
                return

    async def _wait_for_end(self) -> None:
        """Wait a moment for the server's own end of the call, so that it does not see a cancel."""
        try:
            with OwnCancellation():
                async with asyncio.timeout(CLOSE_S):
                    if self._sends:
                        await self._call.done_writing()
                    while await self._call.read() is not grpc.aio.EOF:
                        pass
        except (TimeoutError, grpc.RpcError, FerruleError):  # whichever way, it is over
            return


def open_frames(wire: Wire, instance: str) -> OpenCall[executor_pb2.StreamDecodeResponse]:
    """Open one StreamDecode at an instance (empty: any), without a deadline of its own."""
    return OpenCall(wire, wire.executor.StreamDecode(metadata=wire.metadata(instance)), instance, sends=True)


def open_replies(
    wire: Wire, method: grpc.aio.UnaryStreamMultiCallable[_Request, _Reply], request: _Request, instance: str
) -> OpenCall[_Reply]:
    """Open one call that answers with a stream of replies, without a deadline of its own."""
    return OpenCall(wire, method(request, metadata=wire.metadata(instance)), instance, sends=False)
