"""A call as its observers see it: begun before any other code of ours runs, and ended exactly once.

    Call.__enter__ --> begin --> admission --> the method --> Call.__exit__ --> end
                                    |               |              ^
                                    '-- refused ----+-- aborted, --'
                                                        cancelled, broken

``handlers`` enters one around every method of every service. Calls that gRPC answers by itself never get here: methods
that do not exist, messages beyond the limit, and calls that were cancelled before their first message came.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final, Protocol
from urllib.parse import unquote

import grpc

from ferrule_server.api.security.principal import Caller, Context
from ferrule_server.engine.jobs import AppendResult, GenerateFrame, Job, Outcome, StepTiming
from ferrule_server.kv.handle import Handle

_LOG = logging.getLogger(__name__)

_CLOCK_SLACK_S: Final = 0.01
_TRACEPARENT: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.{0,200})?"
)
"""The header of W3C Trace Context: version, trace id, span id of the client, flags."""


class Observer(Protocol):
    """Sees every call.

    It runs on the event loop, so it must not block. What it raises is logged and changes nothing.
    """

    def begin(self, call: Call) -> None:
        """Record that a call has begun; its caller is not known yet."""
        ...

    def end(self, call: Call) -> None:
        """Record that the call has ended: ``code`` and ``reason`` are set."""
        ...


class Trace(Protocol):
    """The span of a call, kept by an observer that traces.

    Attributes:
        trace_id: 32 hexadecimal digits, as in W3C Trace Context.
        span_id: 16 hexadecimal digits.
    """

    trace_id: str
    span_id: str

    def record_step(self, timing: StepTiming) -> None:
        """Record a step that ran for the call."""
        ...


@dataclass(eq=False, slots=True)
class Call:
    """One call under way; entered around all code that serves it.

    Invariant: each observer whose ``begin`` was called has its ``end`` called once.

    Attributes:
        service: Full name, such as ``ferrule.v1.ModelExecutorService``.
        rpc: Name of the method.
        _context: The context that gRPC gives the method.
        _observers: See the call.
        caller: The caller; None until admission, and if admission refused the call.
        trace: Its span; None if no observer traces it.
        begin_ns: When it began, on the monotonic clock.
        end_ns: When it ended; 0 before.
        code: Its status code; None before its end. A call that was cancelled has CANCELLED, or DEADLINE_EXCEEDED if the
            client's deadline had passed.
        reason: The reason in our ErrorInfo; empty for OK, and for errors that are not ours.
    """

    service: str
    rpc: str
    _context: Context
    _observers: Sequence[Observer] = ()
    caller: Caller | None = None
    trace: Trace | None = None
    _handle: Handle | None = None
    _handle_id: str = ""
    begin_ns: int = field(default_factory=time.monotonic_ns)
    end_ns: int = 0
    code: grpc.StatusCode | None = None
    reason: str = ""

    def __enter__(self) -> Call:
        _CALL.set(self)
        for observer in self._observers:
            self._notify(observer.begin)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end_ns = time.monotonic_ns()
        if self.code is None:
            self.code = self._code_or(grpc.StatusCode.OK) if kind is None else self._code_of(kind)
        for observer in self._observers:
            self._notify(observer.end)

    def _notify(self, method: Callable[[Call], None]) -> None:
        try:
            method(self)
        except Exception:  # noqa: BLE001  (logged; an observer never fails the call)
            _LOG.exception("observer failed rpc=%s", self.rpc)

    def record_refusal(self, code: grpc.StatusCode, reason: str, handle_id: str = "") -> None:
        """Record why the call is about to be aborted."""
        self.code, self.reason, self._handle_id = code, reason, handle_id

    def record_job(self, job: Job[object]) -> None:
        """Record the one job that the call submits to the engine."""
        handle: Handle | None = getattr(job, "handle", None)
        if handle is None:
            handles: tuple[Handle, ...] = getattr(job, "handles", ())
            handle = handles[0] if len(handles) == 1 else None
        self._handle = handle

    def record_outcome(self, outcome: Outcome) -> None:
        """Record the outcome of the one job."""
        if self._handle is None:
            self._handle = _made_by(outcome)
        self.record_step(outcome)

    def record_step(self, outcome: Outcome) -> None:
        """Record the outcome of one job of several."""
        timing: StepTiming | None = None if self.trace is None else getattr(outcome, "timing", None)
        if self.trace is not None and timing is not None and timing.started_ns and not _is_old(outcome):
            self.trace.record_step(timing)

    def record_outcomes(self, outcomes: Iterable[Outcome]) -> None:
        """Record the outcomes of several jobs, in any order."""
        if self.trace is not None:
            for outcome in sorted(outcomes, key=_started_ns):
                self.record_step(outcome)

    @property
    def principal(self) -> str:
        """The principal of the caller; empty until admission, and if admission refused the call."""
        return "" if self.caller is None else self.caller.principal

    @property
    def handle_id(self) -> str:
        """Loggable name of the one sequence that the call is about; empty if there is none, or several.

        It is that of the handle which the request or the refusal names, otherwise that of the sequence it created.
        """
        if not self._handle_id and self._handle is not None:
            self._handle_id = self._handle.handle_id
        return self._handle_id

    @property
    def trace_id(self) -> str:
        """The trace id of the span, or the one that the client sent, in hexadecimal; empty if there is none."""
        if self.trace is not None:
            return self.trace.trace_id
        for key, value in self.metadata:
            if key == "traceparent":
                found = _TRACEPARENT.fullmatch(str(value))
                return "" if found is None else found[1]
        return ""

    @property
    def duration_ns(self) -> int:
        """How long the call took, or has taken so far."""
        return (self.end_ns or time.monotonic_ns()) - self.begin_ns

    @property
    def metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """The metadata that the client sent, with keys in lower case. It includes credentials."""
        return self._context.invocation_metadata() or ()

    @property
    def peer(self) -> str:
        """Address of the client as gRPC writes it, such as ``ipv4:127.0.0.1:41234``."""
        return unquote(self._context.peer())

    def _code_of(self, kind: type[BaseException]) -> grpc.StatusCode:
        """Return the code of a call that ends with an exception of this kind and has no recorded code."""
        if issubclass(kind, Exception):
            return self._code_or(grpc.StatusCode.UNKNOWN)  # also an AbortError that a method raises itself
        # Cancelled, or its generator was closed. gRPC rounds a client's timeout up by as much as 1 % on the wire, so if
        # the client's own clock ends the call, a little time is left here.
        left_s = self._context.time_remaining()
        has_expired = left_s is not None and left_s <= _CLOCK_SLACK_S + 0.01 * (self.duration_ns * 1e-9 + left_s)
        return grpc.StatusCode.DEADLINE_EXCEEDED if has_expired else grpc.StatusCode.CANCELLED

    def _code_or(self, default: grpc.StatusCode) -> grpc.StatusCode:
        """Return the code that the method has set, or ``default`` if it is OK or not set."""
        code: object = self._context.code()
        return code if isinstance(code, grpc.StatusCode) and code is not grpc.StatusCode.OK else default


def _made_by(outcome: Outcome) -> Handle | None:
    """Return the handle of the sequence that an outcome created; the first of several branches."""
    if isinstance(outcome, AppendResult):
        return outcome.handle
    if isinstance(outcome, GenerateFrame) and outcome.branches:
        return outcome.branches[0].handle
    return None


def _started_ns(outcome: Outcome) -> int:
    """Return when the first step of an outcome began; 0: nothing was run."""
    timing: StepTiming | None = getattr(outcome, "timing", None)
    return 0 if timing is None else timing.started_ns


def _is_old(outcome: Outcome) -> bool:
    """Whether the outcome was kept from an earlier call, so that nothing was run for this one."""
    return isinstance(outcome, AppendResult) and outcome.replayed and not outcome.recomputed


# Each call runs in a task of its own and so in a context of its own: a value set there ends with the call.
_CALL: Final[ContextVar[Call | None]] = ContextVar("ferrule_call", default=None)


def current_call() -> Call | None:
    """Return the call that the running task serves; None outside of calls, and on the engine thread."""
    return _CALL.get()
