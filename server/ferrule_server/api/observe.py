"""Every call as an observer sees it: begun before anything of ours runs, ended exactly once, however it ends.

    Call.__enter__ --> begin --> admission --> the method --> Call.__exit__ --> end
                                    |               |              ^
                                    '-- refused ----+-- aborted, --'
                                                        cancelled, broken

``handlers`` puts this around every method of every service. What gRPC answers by itself never gets here: a method that
does not exist, a message beyond the limit, a call that was cancelled before its first message came.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Final, Protocol

import grpc

from ferrule_server.api.principal import Caller

_LOG = logging.getLogger(__name__)


class Observer(Protocol):
    """Is told of every call.

    It runs on the event loop, so it never blocks. What it raises is logged and changes nothing.
    """

    def begin(self, call: Call) -> None:
        """Take note that a call has begun; nobody is admitted yet."""
        ...

    def end(self, call: Call) -> None:
        """Take note that it has ended: ``code`` and ``reason`` are set."""
        ...


class Call:
    """One call under way; entered around everything that serves it.

    Invariant: each observer whose ``begin`` was called has its ``end`` called once.

    Args:
        service: Full name, such as ``ferrule.v1.ModelExecutorService``.
        rpc: Name of the method.
        context: gRPC's side of it.
        observers: Are told.

    Attributes:
        caller: Who asks; None until admission, and where it refused whoever asked.
        handle_id: Of the handle that the request names, where it names one; else empty.
        begin_ns: When it began, on the monotonic clock. end_ns: when it ended, 0 before.
        code: How it has ended; None before. Of a call that was cancelled this is CANCELLED, or DEADLINE_EXCEEDED where
            the client's deadline had passed.
        reason: Of our ErrorInfo; empty for OK and where the error is none of ours.
    """

    __slots__ = (
        "_context",
        "_observers",
        "begin_ns",
        "caller",
        "code",
        "end_ns",
        "handle_id",
        "reason",
        "rpc",
        "service",
    )

    def __init__(
        self, service: str, rpc: str, context: grpc.aio.ServicerContext[Any, Any], observers: Sequence[Observer] = ()
    ) -> None:
        self.service = service
        self.rpc = rpc
        self._context = context
        self._observers = observers
        self.caller: Caller | None = None
        self.handle_id = ""
        self.begin_ns = time.monotonic_ns()
        self.end_ns = 0
        self.code: grpc.StatusCode | None = None
        self.reason = ""

    def __enter__(self) -> Call:
        _CALL.set(self)
        for observer in self._observers:
            try:
                observer.begin(self)
            except Exception:  # noqa: BLE001  (logged; a call never fails for whoever watches it)
                _LOG.exception("observer failed rpc=%s", self.rpc)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_ns = time.monotonic_ns()
        if self.code is None:
            self.code = grpc.StatusCode.OK if kind is None else self._code_of(kind)
        for observer in self._observers:
            try:
                observer.end(self)
            except Exception:  # noqa: BLE001  (as above)
                _LOG.exception("observer failed rpc=%s", self.rpc)

    def refused(self, code: grpc.StatusCode, reason: str, handle_id: str = "") -> None:
        """Take note of why the call is about to be aborted."""
        self.code, self.reason = code, reason
        if handle_id:
            self.handle_id = handle_id

    @property
    def principal(self) -> str:
        """Who asks; empty until admission, and where it refused whoever asked."""
        return "" if self.caller is None else self.caller.principal

    @property
    def duration_ns(self) -> int:
        """How long the call took, or takes so far."""
        return (self.end_ns or time.monotonic_ns()) - self.begin_ns

    @property
    def metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """What the client sent with the call, as gRPC gives it: keys in lower case, credentials among them."""
        return self._context.invocation_metadata() or ()

    @property
    def peer(self) -> str:
        """Address of the client as gRPC writes it, such as ``ipv4:127.0.0.1:41234``."""
        return self._context.peer()

    def _code_of(self, kind: type[BaseException]) -> grpc.StatusCode:
        """Return how a call ends that an exception of this kind leaves, which nobody has said more about."""
        if issubclass(kind, grpc.aio.AbortError):
            return self._context.code()
        if issubclass(kind, Exception):
            return grpc.StatusCode.UNKNOWN  # what gRPC answers
        left_s = self._context.time_remaining()  # cancelled, or its generator was closed
        has_expired = left_s is not None and left_s <= 0
        return grpc.StatusCode.DEADLINE_EXCEEDED if has_expired else grpc.StatusCode.CANCELLED


# Each call runs in a task of its own and so in a context of its own: a value set there ends with the call.
_CALL: Final[ContextVar[Call | None]] = ContextVar("ferrule_call", default=None)


def current_call() -> Call | None:
    """Return the call that the running task serves; None where it serves none, and on the engine's side."""
    return _CALL.get()
