"""One StreamDecode call: frames out, frames in, and a limit on the wait between them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import grpc

from ferrule.v1 import executor_pb2
from ferrule_client._connection import Connection
from ferrule_client.errors import DeadlineExceededError

__all__ = ["StreamCall", "Watchdog"]

_CLOSE_S = 2.0


class Watchdog:
    """Calls ``on_timeout`` when a wait lasts longer than it was allowed.

    gRPC gives a stream one deadline for its whole life and no timed read, so each wait is watched from a thread. It is
    started at the first limited wait, sleeps through (it is not woken for each wait) and ends with ``close``.

    Args:
        on_timeout: Called from the watching thread; must not block.
    """

    def __init__(self, on_timeout: Callable[[], object]) -> None:
        self._on_timeout = on_timeout
        self._condition = threading.Condition()
        self._deadline = math.inf
        self._wakes_at = math.inf
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self.has_fired = False

    def arm(self, seconds: float | None) -> None:
        """Begin a wait of at most ``seconds``; None means no limit."""
        if seconds is None:
            return
        with self._condition:
            self._deadline = time.monotonic() + seconds
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="ferrule-stream-watchdog", daemon=True)
                self._thread.start()
            elif self._deadline < self._wakes_at:
                self._condition.notify()

    def disarm(self) -> None:
        """End the wait."""
        self._deadline = math.inf

    def close(self) -> None:
        """End the thread. Closing twice changes nothing."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()

    def _watch(self) -> None:
        with self._condition:
            while not self._is_closed:
                self._wakes_at = self._deadline
                left_s = self._deadline - time.monotonic()
                if left_s <= 0:
                    self.has_fired = True
                    self._deadline = math.inf
                    self._on_timeout()
                else:
                    self._condition.wait(None if math.isinf(left_s) else left_s)


class StreamCall:
    """One open StreamDecode. Not safe to use from two threads at once.

    Args:
        connection: Where to open it.
    """

    def __init__(self, connection: Connection) -> None:
        self._frames: SimpleQueue[executor_pb2.StreamDecodeRequest | None] = SimpleQueue()
        self._call = connection.open_stream(self._requests())
        self._watchdog = Watchdog(self._call.cancel)
        self._is_waiting = False
        self._is_closed = False

    def send(self, frame: executor_pb2.StreamDecodeRequest) -> None:
        """Hand one frame to the channel; it is on its way when this returns."""
        self._frames.put(frame)

    def receive(self, timeout: float | None) -> executor_pb2.StreamDecodeResponse:
        """Return the next frame.

        Args:
            timeout: Seconds to wait; None means no limit.

        Raises:
            DeadlineExceededError: Nothing came in time; the call is over.
            grpc.RpcError: The call failed.
            StopIteration: The server ended the call.
        """
        self._is_waiting = True
        self._watchdog.arm(timeout)
        try:
            frame = next(self._call)
        except grpc.RpcError:
            if self._watchdog.has_fired:
                raise DeadlineExceededError(
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                    "DEADLINE_EXCEEDED",
                    f"no frame came on the stream within {timeout:.3g} s; give the call a longer timeout",
                ) from None
            raise
        self._watchdog.disarm()
        self._is_waiting = False
        return frame

    def close(self) -> None:
        """End the call: politely when nothing is under way, at once otherwise. Closing twice changes nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._frames.put(None)
        if self._is_waiting:
            self._call.cancel()
        else:
            self._drain()
        self._watchdog.close()

    def cancel(self) -> None:
        """End the call at once, whatever is under way."""
        self._is_waiting = True
        self.close()

    def _requests(self) -> Iterator[executor_pb2.StreamDecodeRequest]:
        while (frame := self._frames.get()) is not None:
            yield frame

    def _drain(self) -> None:
        """Read up to the server's own end of the call, so that it does not see a cancel."""
        self._watchdog.arm(_CLOSE_S)
        try:
            while True:
                next(self._call)
        except (StopIteration, grpc.RpcError):
            pass
