"""Open streams: frames out, frames in, and a limit on the wait between them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import grpc

from ferrule.v1 import executor_pb2
from ferrule_client._timeouts import CLOSE_S, too_late
from ferrule_client.sync._wire import Reader, Wire

__all__ = ["OpenCall", "open_frames", "open_replies"]

# Replies that may wait unread; then the server has to wait, too.
_WINDOW = 8

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")
_Requests = SimpleQueue[executor_pb2.StreamDecodeRequest | None]

# The call, or why there is none. Not one or the other: gRPC's call object is an exception too.
_Opened = SimpleQueue[tuple[Reader[_Reply] | None, Exception | None]]


class OpenCall(Generic[_Reply]):
    """One open call. Not safe to use from two threads at once.

    The caller's thread touches queues and, but for a cancel, nothing of gRPC; a thread opens and reads the call::

        caller  -> requests queue -> gRPC
        caller <-  replies queue <-  reader thread <- gRPC

    Two reasons: a queue can be waited on with a timeout, where gRPC only has one deadline for the whole stream; and
    Ctrl-C then never strikes inside gRPC's locks, which stay locked for ever when it does (1 time in 20 while frames
    fly; the threads that need them then hang, the one that closes the channel too).

    Args:
        open_call: Opens it; called in the thread.
        instance: The one it is for; empty: any.
        requests: Frames to send, and None at the end. None: none are sent, and the call ends by itself.

    Attributes:
        is_closed: True: it was closed or cancelled by this side.
    """

    def __init__(
        self, open_call: Callable[[], Reader[_Reply]], instance: str, requests: _Requests | None = None
    ) -> None:
        self.instance = instance
        self.is_closed = False
        self._requests = requests
        self._replies: SimpleQueue[_Reply | grpc.RpcError | None] = SimpleQueue()
        self._room = threading.Semaphore(_WINDOW)
        self._is_waiting = False
        opened: _Opened[_Reply] = SimpleQueue()
        # The thread holds the queues and the call, not this object, so that forgetting the call ends it.
        arguments = (open_call, opened, self._replies, self._room)
        name = "ferrule-replies" if requests is None else "ferrule-stream"
        threading.Thread(target=_read, args=arguments, name=name, daemon=True).start()
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
        assert self._requests is not None
        self._requests.put(frame)

    def flush(self, timeout: float | None) -> None:
        """Return when what was handed over is on its way: at once here, where a thread sends it; for asyncio's twin."""

    def receive(self, timeout: float | None) -> _Reply:
        """Return the next reply.

        Raises:
            DeadlineExceededError: Nothing came in so many seconds; None means no limit.
            grpc.RpcError: The call failed.
            StopIteration: The server ended the call.
        """
        self._is_waiting = True
        try:
            reply = self._replies.get(timeout=timeout)
        except Empty:
            raise too_late(timeout) from None
        self._room.release()
        if reply is None:
            raise StopIteration
        if isinstance(reply, grpc.RpcError):
            raise reply
        self._is_waiting = False
        return reply

    def close(self) -> None:
        """End the call: in order when nothing is under way, at once otherwise. Closing twice changes nothing."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._requests is not None:
            self._requests.put(None)
        if self._is_waiting or not self._has_ended():
            self._call.cancel()
        self._room.release()

    def cancel(self) -> None:
        """End the call at once, whatever is under way."""
        self._is_waiting = True
        self.close()

    def _has_ended(self) -> bool:
        """Wait a moment for the server's own end of the call, so that it does not see a cancel.

        That of a call that ends by itself is awaited in the background.
        """
        if self._requests is None:
            return True
        try:
            while True:
                reply = self._replies.get(timeout=CLOSE_S)
                if reply is None or isinstance(reply, grpc.RpcError):
                    return True
                self._room.release()
        except Empty:
            return False


def open_frames(wire: Wire, instance: str) -> OpenCall[executor_pb2.StreamDecodeResponse]:
    """Open one StreamDecode at an instance (empty: any), without a deadline of its own."""
    requests: _Requests = SimpleQueue()
    metadata = wire.labels.of(instance)
    return OpenCall(functools.partial(wire.open_stream, _drain(requests), metadata), instance, requests)


def open_replies(
    wire: Wire, method: grpc.UnaryStreamMultiCallable[_Request, _Reply], request: _Request, instance: str
) -> OpenCall[_Reply]:
    """Open one call that answers with a stream of replies, without a deadline of its own."""
    metadata = wire.labels.of(instance)
    open_call: Callable[[], Any] = functools.partial(method, request, metadata=metadata)  # Any: a Reader
    return OpenCall(open_call, instance)


def _drain(requests: _Requests) -> Iterator[executor_pb2.StreamDecodeRequest]:
    while (frame := requests.get()) is not None:
        yield frame


def _read(
    open_call: Callable[[], Reader[_Reply]],
    opened: _Opened[_Reply],
    replies: SimpleQueue[_Reply | grpc.RpcError | None],
    room: threading.Semaphore,
) -> None:
    """Open a call and read it to its end, as far as there is room for its replies."""
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
