"""Open streams for asyncio: frames out, frames in, and a limit on the wait between them."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar, cast

import grpc
import grpc.aio

from ferrule.v1 import executor_pb2
from ferrule_client.aio._wire import OwnCancellation, Wire
from ferrule_client.errors import CallCancelledError, DeadlineExceededError, FerruleError

__all__ = ["ReplyCall", "StreamCall"]

_CLOSE_S = 2.0

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")


class StreamCall:
    """One open StreamDecode. Not safe to use from two tasks at once; no task of its own runs.

    Args:
        wire: Where to open it.
        instance: The one it is for; empty: any.
    """

    def __init__(self, wire: Wire, instance: str = "") -> None:
        self._wire = wire
        self._call = wire.open_stream(instance)
        self._unsent: list[executor_pb2.StreamDecodeRequest] = []
        self._limit: asyncio.Timeout | None = None
        self._is_waiting = False
        self._is_closed = False
        wire.streams.add(self)

    @property
    def is_over(self) -> bool:
        """True: the call ended while nothing was under way on it, as where its server drained; open another one."""
        return self._call.done()

    def send(self, frame: executor_pb2.StreamDecodeRequest) -> None:
        """Take one frame; ``flush`` or ``receive`` writes it, so that their limit covers the writing too."""
        self._unsent.append(frame)

    async def flush(self, timeout: float | None) -> None:
        """Return when what was handed over is on its way; errors as of ``receive``."""
        self._is_waiting = True
        try:
            with OwnCancellation(), self._wire.nudged():
                async with asyncio.timeout(timeout) as self._limit:
                    await self._write()
        except TimeoutError:
            raise self._why_late(timeout) from None
        finally:
            self._limit = None

    async def receive(self, timeout: float | None) -> executor_pb2.StreamDecodeResponse:
        """Return the next frame.

        Args:
            timeout: Seconds to wait; None means no limit.

        Raises:
            DeadlineExceededError: Nothing came in time.
            grpc.RpcError: The call failed.
            CallCancelledError: The stream or the client was closed meanwhile.
            StopAsyncIteration: The server ended the call.
        """
        self._is_waiting = True
        try:
            with OwnCancellation(), self._wire.nudged():
                async with asyncio.timeout(timeout) as self._limit:
                    await self._write()
                    reply = await self._call.read()
        except TimeoutError:
            raise self._why_late(timeout) from None
        finally:
            self._limit = None
        if not isinstance(reply, executor_pb2.StreamDecodeResponse):
            raise StopAsyncIteration
        self._is_waiting = False
        return reply

    async def close(self) -> None:
        """End the call: in order when nothing is under way, at once otherwise. Closing twice changes nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if not self._is_waiting:
                await self._wait_for_end()
        finally:
            self._stop()

    def cancel(self) -> None:
        """End the call at once, whatever is under way. Finalisers may call in, from any thread."""
        self._is_closed = True
        self._wire.on_loop(self._stop)

    def _why_late(self, timeout: float | None) -> FerruleError:
        if self._is_closed:
            return CallCancelledError(grpc.StatusCode.CANCELLED, "CANCELLED", "the stream was closed")
        return _too_late(timeout)

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
                async with asyncio.timeout(_CLOSE_S):
                    await self._call.done_writing()
                    while isinstance(await self._call.read(), executor_pb2.StreamDecodeResponse):
                        pass
        except (TimeoutError, grpc.RpcError, FerruleError):  # whichever way, it is over
            return


class ReplyCall(Generic[_Reply]):
    """One open call that answers with a stream of replies; no task of its own runs, and nothing is read ahead.

    Args:
        wire: Where to open it.
        method: A method of the stub.
        request: Its request.
        instance: The one it is for; empty: any.

    Attributes:
        instance: As given.
        is_over: True: it was closed or cancelled by this side.
    """

    def __init__(
        self,
        wire: Wire,
        method: grpc.aio.UnaryStreamMultiCallable[_Request, _Reply],
        request: _Request,
        instance: str = "",
    ) -> None:
        self.instance = instance
        self._wire = wire
        self._call = wire.open_replies(method, request, instance)
        self._limit: asyncio.Timeout | None = None
        self.is_over = False
        wire.streams.add(self)

    async def receive(self, timeout: float | None) -> _Reply:
        """Return the next reply.

        Args:
            timeout: Seconds to wait; None means no limit.

        Raises:
            DeadlineExceededError: Nothing came in time.
            grpc.RpcError: The call failed.
            CallCancelledError: The call or the client was closed meanwhile.
            StopAsyncIteration: The server ended the call.
        """
        try:
            with OwnCancellation(), self._wire.nudged():
                async with asyncio.timeout(timeout) as self._limit:
                    reply = await self._call.read()
        except TimeoutError:
            if self.is_over:
                raise CallCancelledError(grpc.StatusCode.CANCELLED, "CANCELLED", "the call was closed") from None
            raise _too_late(timeout) from None
        finally:
            self._limit = None
        if reply is grpc.aio.EOF:
            raise StopAsyncIteration
        return cast("_Reply", reply)

    async def close(self) -> None:
        """Take leave of a call whose last reply has come: wait a moment for its end."""
        self.is_over = True
        try:
            with OwnCancellation():
                async with asyncio.timeout(_CLOSE_S):
                    while await self._call.read() is not grpc.aio.EOF:
                        pass
        except (TimeoutError, grpc.RpcError, FerruleError):  # whichever way, it is over
            return
        finally:
            self._stop()

    def cancel(self) -> None:
        """End the call at once, whatever is under way. Finalisers may call in, from any thread."""
        self.is_over = True
        self._wire.on_loop(self._stop)

    def _stop(self) -> None:
        """Cancel the call, and wake who waits."""
        self._call.cancel()
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())


def _too_late(timeout: float | None) -> DeadlineExceededError:
    text = f"no frame came on the stream within {timeout:.3g} s; give the call a longer timeout"
    return DeadlineExceededError(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", text)
