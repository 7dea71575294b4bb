"""Open streams: frames out, frames in, and a limit on the wait between them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

import grpc

from ferrule.v1 import executor_pb2
from ferrule_client.errors import DeadlineExceededError
from ferrule_client.sync._wire import FrameReader, Metadata, ReplyReader, Wire

__all__ = ["ReplyCall", "StreamCall"]

_CLOSE_S = 2.0

# Replies that may wait unread; then the server has to wait, too.
_WINDOW = 8

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")

_Requests = SimpleQueue[executor_pb2.StreamDecodeRequest | None]
_Replies = SimpleQueue[executor_pb2.StreamDecodeResponse | grpc.RpcError | None]

# The call, or why there is none. Not one or the other: gRPC's call object is an exception too.
_Opened = SimpleQueue[tuple[FrameReader | None, Exception | None]]


class StreamCall:
    """One open StreamDecode. Not safe to use from two threads at once.

    The caller's thread touches queues and, but for a cancel, nothing of gRPC; a thread opens and reads the call::

        caller  -> requests queue -> gRPC
        caller <-  replies queue <-  reader thread <- gRPC

    Two reasons: a queue can be waited on with a timeout, where gRPC only has one deadline for the whole stream; and
    Ctrl-C then never strikes inside gRPC's locks, which stay locked for ever when it does (1 time in 20 while frames
    fly; the threads that need them then hang, the one that closes the channel too).

    Args:
        wire: Where to open it.
        instance: The one it is for; empty: any.
    """

    def __init__(self, wire: Wire, instance: str = "") -> None:
        self._requests: _Requests = SimpleQueue()
        self._replies: _Replies = SimpleQueue()
        self._nudger = wire.nudger
        self._is_waiting = False
        self._is_closed = False
        opened: _Opened = SimpleQueue()
        # The thread holds the queues and the call, not this object, so that forgetting a stream ends it.
        arguments = (wire, wire.labels.of(instance), self._requests, opened, self._replies)
        threading.Thread(target=_run, args=arguments, name="ferrule-stream", daemon=True).start()
        call, error = opened.get()
        if call is None:
            assert error is not None  # the reader puts one of the two
            raise error
        self._call = call

    @property
    def is_over(self) -> bool:
        """True: the call ended while nothing was under way on it, as where its server drained; open another one."""
        return not (self._is_waiting or self._replies.empty())

    def send(self, frame: executor_pb2.StreamDecodeRequest) -> None:
        """Hand one frame over; it is on its way."""
        self._requests.put(frame)

    def flush(self, timeout: float | None) -> None:
        """Return when what was handed over is on its way: at once here, where a thread sends it; for asyncio's twin."""

    def receive(self, timeout: float | None) -> executor_pb2.StreamDecodeResponse:
        """Return the next frame.

        Args:
            timeout: Seconds to wait; None means no limit.

        Raises:
            DeadlineExceededError: Nothing came in time.
            grpc.RpcError: The call failed.
            StopIteration: The server ended the call.
        """
        self._is_waiting = True
        try:
            with self._nudger:
                reply = self._replies.get(timeout=timeout)
        except Empty:
            raise _too_late(timeout) from None
        if reply is None:
            raise StopIteration
        if isinstance(reply, grpc.RpcError):
            raise reply
        self._is_waiting = False
        return reply

    def close(self) -> None:
        """End the call: in order when nothing is under way, at once otherwise. Closing twice changes nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._requests.put(None)
        if self._is_waiting or not self._has_ended():
            self._call.cancel()

    def cancel(self) -> None:
        """End the call at once, whatever is under way."""
        self._is_waiting = True
        self.close()

    def _has_ended(self) -> bool:
        """Wait a moment for the server's own end of the call, so that it does not see a cancel."""
        try:
            while isinstance(self._replies.get(timeout=_CLOSE_S), executor_pb2.StreamDecodeResponse):
                pass
        except Empty:
            return False
        return True


class ReplyCall(Generic[_Reply]):
    """One open call that answers with a stream of replies; read by a thread, for the reasons of ``StreamCall``.

    A few replies wait for the caller; while it does not take them, no more are read and the server has to wait.

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
        method: grpc.UnaryStreamMultiCallable[_Request, _Reply],
        request: _Request,
        instance: str = "",
    ) -> None:
        self.instance = instance
        self._replies: SimpleQueue[_Reply | grpc.RpcError | None] = SimpleQueue()
        self._room = threading.Semaphore(_WINDOW)
        self._nudger = wire.nudger
        self.is_over = False
        opened: SimpleQueue[tuple[ReplyReader[_Reply] | None, Exception | None]] = SimpleQueue()

        # The thread holds the queues and the call, not this object, so that forgetting the call ends it.
        open_call = functools.partial(wire.open_replies, method, request, wire.labels.of(instance))
        arguments = (open_call, opened, self._replies, self._room)
        threading.Thread(target=_read, args=arguments, name="ferrule-replies", daemon=True).start()
        call, error = opened.get()
        if call is None:
            assert error is not None  # the reader puts one of the two
            raise error
        self._call = call

    def receive(self, timeout: float | None) -> _Reply:
        """Return the next reply.

        Args:
            timeout: Seconds to wait; None means no limit.

        Raises:
            DeadlineExceededError: Nothing came in time.
            grpc.RpcError: The call failed.
            StopIteration: The server ended the call.
        """
        try:
            with self._nudger:
                reply = self._replies.get(timeout=timeout)
        except Empty:
            raise _too_late(timeout) from None
        self._room.release()
        if reply is None:
            raise StopIteration
        if isinstance(reply, grpc.RpcError):
            raise reply
        return reply

    def close(self) -> None:
        """Take leave of a call whose last reply has come: its end is awaited in the background."""
        self.is_over = True
        self._room.release()

    def cancel(self) -> None:
        """End the call at once, whatever is under way."""
        self.is_over = True
        self._call.cancel()
        self._room.release()


def _too_late(timeout: float | None) -> DeadlineExceededError:
    text = f"no frame came on the stream within {timeout:.3g} s; give the call a longer timeout"
    return DeadlineExceededError(grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED", text)


def _drain(requests: _Requests) -> Iterator[executor_pb2.StreamDecodeRequest]:
    while (frame := requests.get()) is not None:
        yield frame


def _run(wire: Wire, metadata: Metadata, requests: _Requests, opened: _Opened, replies: _Replies) -> None:
    """Open the call and read it to its end."""
    try:
        call = wire.open_stream(_drain(requests), metadata)
    except Exception as error:  # noqa: BLE001 - the caller's thread raises it
        opened.put((None, error))
        return
    opened.put((call, None))
    try:
        while True:
            replies.put(next(call))
    except StopIteration:
        replies.put(None)
    except grpc.RpcError as error:
        replies.put(error)


def _read(
    open_call: Callable[[], ReplyReader[_Reply]],
    opened: SimpleQueue[tuple[ReplyReader[_Reply] | None, Exception | None]],
    replies: SimpleQueue[_Reply | grpc.RpcError | None],
    room: threading.Semaphore,
) -> None:
    """Open a call that answers with a stream and read it to its end, as far as there is room for its replies."""
    try:
        call = open_call()
    except Exception as error:  # noqa: BLE001 - the caller's thread raises it
        opened.put((None, error))
        return
    opened.put((call, None))
    try:
        while room.acquire():
            replies.put(next(call))
    except StopIteration:
        replies.put(None)
    except grpc.RpcError as error:
        replies.put(error)
