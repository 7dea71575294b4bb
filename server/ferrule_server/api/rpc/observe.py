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
import re
import time
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Final, Protocol

import grpc

from ferrule_server.api.security.principal import Caller
from ferrule_server.engine.jobs import AppendResult, GenerateFrame, Job, Outcome, StepTiming
from ferrule_server.kv.handle import Handle

_LOG = logging.getLogger(__name__)

_CLOCK_SLACK_S: Final = 0.01
_TRACEPARENT: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.{0,200})?"
)
"""The header of W3C Trace Context: version, trace id, span id of whoever calls, flags."""


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


class Trace(Protocol):
    """The span of a call, kept by an observer that traces.

    Attributes:
        trace_id, span_id: As W3C Trace Context writes them: 32 and 16 hexadecimal digits.
    """

    trace_id: str
    span_id: str

    def record_step(self, timing: StepTiming) -> None:
        """Take note of what ran for the call."""
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
        trace: Its span; None where nobody traces it.
        begin_ns: When it began, on the monotonic clock. end_ns: when it ended, 0 before.
        code: How it has ended; None before. Of a call that was cancelled this is CANCELLED, or DEADLINE_EXCEEDED where
            the client's deadline had passed.
        reason: Of our ErrorInfo; empty for OK and where the error is none of ours.
    """

    __slots__ = (
        "_context",
        "_handle",
        "_handle_id",
        "_observers",
        "begin_ns",
        "caller",
        "code",
        "end_ns",
        "reason",
        "rpc",
        "service",
        "trace",
    )

    def __init__(
        self, service: str, rpc: str, context: grpc.aio.ServicerContext[Any, Any], observers: Sequence[Observer] = ()
    ) -> None:
        self.service = service
        self.rpc = rpc
        self._context = context
        self._observers = observers
        self.caller: Caller | None = None
        self.trace: Trace | None = None
        self._handle: Handle | None = None
        self._handle_id = ""
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
            self.code = self._set_code(grpc.StatusCode.OK) if kind is None else self._code_of(kind)
        for observer in self._observers:
            try:
                observer.end(self)
            except Exception:  # noqa: BLE001  (as above)
                _LOG.exception("observer failed rpc=%s", self.rpc)

    def record_refusal(self, code: grpc.StatusCode, reason: str, handle_id: str = "") -> None:
        """Take note of why the call is about to be aborted."""
        self.code, self.reason = code, reason
        self._handle_id = handle_id

    def record_job(self, job: Job[object]) -> None:
        """Take note of what the call asks of the engine, where it is one job."""
        handle: Handle | None = getattr(job, "handle", None)
        if handle is None:
            handles: tuple[Handle, ...] = getattr(job, "handles", ())
            handle = handles[0] if len(handles) == 1 else None
        self._handle = handle

    def record_outcome(self, outcome: Outcome) -> None:
        """Take note of what the engine answered to the one job."""
        if self._handle is None:
            self._handle = _made_by(outcome)
        self.record_step(outcome)

    def record_step(self, outcome: Outcome) -> None:
        """Take note of what the engine answered to one job of several."""
        timing: StepTiming | None = None if self.trace is None else getattr(outcome, "timing", None)
        if self.trace is not None and timing is not None and timing.started_ns and not _is_old(outcome):
            self.trace.record_step(timing)

    def record_outcomes(self, outcomes: Iterable[Outcome]) -> None:
        """Take note of what the engine answered to many jobs, in any order."""
        if self.trace is not None:
            for outcome in sorted(outcomes, key=_started_ns):
                self.record_step(outcome)

    @property
    def principal(self) -> str:
        """Who asks; empty until admission, and where it refused whoever asked."""
        return "" if self.caller is None else self.caller.principal

    @property
    def handle_id(self) -> str:
        """Loggable name of the one sequence it is about; empty where there is none, or several.

        That is the one of the handle that the request names or its refusal, else the one that it made.
        """
        if not self._handle_id and self._handle is not None:
            self._handle_id = self._handle.handle_id
        return self._handle_id

    @property
    def trace_id(self) -> str:
        """The trace the call is part of, in hexadecimal: its span's, or what its client sent; empty where none is."""
        if self.trace is not None:
            return self.trace.trace_id
        for key, value in self.metadata:
            if key == "traceparent":
                found = _TRACEPARENT.fullmatch(str(value))
                return "" if found is None else found[1]
        return ""

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
        if issubclass(kind, Exception):
            return self._set_code(grpc.StatusCode.UNKNOWN)  # also an AbortError of whoever aborts by itself
        # Cancelled, or its generator was closed. gRPC rounds a client's timeout up by as much as 1 % on the wire: where
        # the client's own clock ends the call, a little seems to be left here.
        left_s = self._context.time_remaining()
        has_expired = left_s is not None and left_s <= _CLOCK_SLACK_S + 0.01 * (self.duration_ns * 1e-9 + left_s)
        return grpc.StatusCode.DEADLINE_EXCEEDED if has_expired else grpc.StatusCode.CANCELLED

    def _set_code(self, default: grpc.StatusCode) -> grpc.StatusCode:
        """Return the code that the method has set; where it is OK or none, what gRPC takes in its place."""
        code: object = self._context.code()
        return code if isinstance(code, grpc.StatusCode) and code is not grpc.StatusCode.OK else default


def _made_by(outcome: Outcome) -> Handle | None:
    """Return the handle of a sequence that an answer brings; of several branches the first."""
    if isinstance(outcome, AppendResult):
        return outcome.handle
    if isinstance(outcome, GenerateFrame) and outcome.branches:
        return outcome.branches[0].handle
    return None


def _started_ns(outcome: Outcome) -> int:
    """Return when what was answered began to run; 0: nothing was run."""
    timing: StepTiming | None = getattr(outcome, "timing", None)
    return 0 if timing is None else timing.started_ns


def _is_old(outcome: Outcome) -> bool:
    """Whether an answer was kept from an earlier call, so nothing was run for this one."""
    return isinstance(outcome, AppendResult) and outcome.replayed and not outcome.recomputed


# Each call runs in a task of its own and so in a context of its own: a value set there ends with the call.
_CALL: Final[ContextVar[Call | None]] = ContextVar("ferrule_call", default=None)


def current_call() -> Call | None:
    """Return the call that the running task serves; None where it serves none, and on the engine's side."""
    return _CALL.get()
