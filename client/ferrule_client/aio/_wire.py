"""What touches the network, for asyncio: the channel to one server, its calls and pauses; the twin of the sync one."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import gc
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, TypeVar

import grpc
import grpc.aio

from ferrule.v1 import admin_pb2_grpc, executor_pb2_grpc, tokenizer_pb2_grpc
from ferrule_client._channel import (
    CHANNEL_OPTIONS,
    Extra,
    Labels,
    Metadata,
    secrets_of,
    warn_of_plain_token,
)
from ferrule_client.errors import CallCancelledError
from ferrule_client.types import TlsConfig

_Request = TypeVar("_Request")
_Reply = TypeVar("_Reply")


class Cancellable(Protocol):
    """An open stream."""

    def cancel(self) -> None:
        """End it at once, and wake who waits on it."""
        ...


class Wire:
    """One channel and the stubs on it, for the tasks of one event loop.

    Its arguments are those of ``Connection``. ``streams`` is what closing the channel has to end itself, as gRPC does
    not end all of it.

    Raises:
        RuntimeError: No event loop runs.
    """

    def __init__(self, target: str, token: str | None, tls: bool | TlsConfig | None, extra: Extra | None) -> None:
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError("AsyncClient needs a running event loop: make it in a coroutine") from None
        self._labels = Labels(token, extra)
        self.channel = _open_channel(target, tls, has_token=bool(token))
        self.streams: weakref.WeakSet[Cancellable] = weakref.WeakSet()
        self.executor = executor_pb2_grpc.ModelExecutorServiceStub(self.channel)
        self.tokenizer = tokenizer_pb2_grpc.TokenizerServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)

    async def call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Reply],
        request: _Request,
        timeout: float | None,
        instance: str = "",
    ) -> _Reply | None:
        """Run one call once, in at most so many seconds, and return the reply; cancelling the task cancels it."""
        metadata = self.metadata(instance)
        with OwnCancellation():
            return await method(request, timeout=timeout, metadata=metadata)

    def metadata(self, instance: str) -> Metadata:
        """Return what travels with a call for an instance, or for any if it is empty.

        Raises:
            RuntimeError: The caller stands on another loop, where grpc.aio would hang.
        """
        if not is_running(self._loop):
            raise RuntimeError("this client belongs to another event loop; make one in each")
        return self._labels.of(instance)

    def on_loop(self, callback: Callable[[], object]) -> None:
        """Run a callback on the loop: now, if the caller stands on it, else soon; never, if it is closed."""
        if is_running(self._loop):
            callback()
        else:
            with contextlib.suppress(RuntimeError):  # closed: what was to be ended has ended with it
                self._loop.call_soon_threadsafe(callback)

    async def pause(self, seconds: float) -> None:
        """Wait. A channel of grpc.aio goes on connecting automatically meanwhile."""
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        """Close the channel; calls under way are cancelled. Closing twice changes nothing."""
        for stream in list(self.streams):
            stream.cancel()
        await self.channel.close()


class OwnCancellation:
    """Within it, ``CancelledError`` means that the running task was cancelled, and a task that was always gets it.

    gRPC breaks both directions. A call that somebody else ends, by closing its channel, raises ``CancelledError`` in a
    task that nobody cancelled; that becomes ``CallCancelledError``. And a call that is cancelled just as it ends by
    itself may swallow the cancellation, and the task, or a timeout around it, would never hear of it.
    """

    __slots__ = ("_num_before", "_task")

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._num_before = self._num_cancellations()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        is_cancelled = self._num_cancellations() > self._num_before
        if isinstance(error, asyncio.CancelledError):
            if not is_cancelled:
                text = "the call was ended from outside: the client or the stream was closed"
                raise CallCancelledError(grpc.StatusCode.CANCELLED, "CANCELLED", text) from None
        elif is_cancelled and (error is None or isinstance(error, Exception)):
            raise asyncio.CancelledError from None

    def _num_cancellations(self) -> int:
        return 0 if self._task is None else self._task.cancelling()


def is_running(loop: asyncio.AbstractEventLoop) -> bool:
    """Return whether the caller stands on that loop."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


def _open_channel(target: str, tls: bool | TlsConfig | None, *, has_token: bool) -> grpc.aio.Channel:
    if not tls:
        if has_token:
            warn_of_plain_token(target)
        return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS)
    _collect_at_exit()
    credentials, options = secrets_of(tls)
    return grpc.aio.secure_channel(target, credentials, options=options)


@functools.cache
def _collect_at_exit() -> None:
    """Collect garbage at exit: gRPC 1.75 waits 2 s there for an encrypted channel that only a cycle holds."""
    for _ in range(2):  # an object with a finaliser goes with the second
        atexit.register(gc.collect)
