"""One OpenTelemetry span for each call, sent to a collector by OTLP over gRPC.

    client span  (traceparent in the metadata)
      '-- ferrule.v1.ModelExecutorService/Decode      SERVER, as long as the call
            * queue   when the job was handed to the engine: queue_ns
            * step    when its first step began: run_ns, step_rows

Only this module imports ``opentelemetry``, and only a server that traces imports this module. Names follow the semantic
conventions of OpenTelemetry for RPC; names of our own begin with ``ferrule.``.

Spans are sent by a thread of their own, in batches, from a queue of bounded size: a collector that is slow or absent
costs spans and one log line per minute, but never delays a call.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Final
from urllib.parse import unquote

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, StatusCode, format_span_id, format_trace_id
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ferrule_server import __version__
from ferrule_server.api.rpc.handlers import OPEN_SERVICES
from ferrule_server.api.rpc.observe import Call
from ferrule_server.engine.jobs import StepTiming

_LOG = logging.getLogger(__name__)

_EXPORT_LOGGER: Final = "opentelemetry.exporter.otlp.proto.grpc.exporter"
"""It logs several lines for each lost batch."""
_CALL_LOGGERS: Final = (
    "opentelemetry.sdk._shared_internal",
    "opentelemetry.trace.propagation.tracecontext",
    "opentelemetry.trace.span",
)
"""They log a line for each span that finds the queue full, and for each malformed header, which clients send."""
_PROPAGATED: Final = frozenset({"traceparent", "tracestate"})
_FAULTS: Final = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""Codes that make the span of a server an error by the conventions; the others are errors of the client."""
_UNNAMED: Final = "unknown_service"
_NUM_SHOWN: Final = 32
"""So many steps have events of their own; then the 64th, the 128th, and so on. The totals include all steps."""
_LOG_AGAIN_S: Final = 60.0
_CLOSE_S: Final = 2.0
_HANG_UP_S: Final = 0.5


class Tracer:
    """Makes a span of each call; an ``Observer``. The SDK reads further settings from the ``OTEL_*`` variables.

    Args:
        endpoint: Address of the collector: ``http://HOST:PORT``, or ``https://`` for TLS.
        instance: Name of this server.
    """

    def __init__(self, endpoint: str, instance: str) -> None:
        self._exporter = _Exporter(OTLPSpanExporter(endpoint=endpoint), endpoint)
        self._provider = TracerProvider(resource=_resource(instance), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("ferrule_server", __version__)
        self._context_of = TraceContextTextMapPropagator().extract

    def begin(self, call: Call) -> None:
        """Begin the span, as a child of the client's span if it sent one; health checks have no spans."""
        if call.service in OPEN_SERVICES:
            return
        parent = Context()
        if call.trace_id:  # the header is valid
            carrier: dict[str, str] = {}
            for key, value in call.metadata:
                if key in _PROPAGATED:
                    carrier.setdefault(key, str(value))
            parent = self._context_of(carrier, parent)
        method, begin_ns = f"{call.service}/{call.rpc}", time.time_ns()
        names = {"rpc.system.name": "grpc", "rpc.method": method}
        span = self._tracer.start_span(method, parent, SpanKind.SERVER, names, start_time=begin_ns)
        call.trace = CallTrace(span, begin_ns - call.begin_ns)

    def end(self, call: Call) -> None:
        """End the span with the outcome of the call."""
        if isinstance(call.trace, CallTrace):
            call.trace.end(call)

    def close(self) -> None:
        """Send the waiting spans, for two seconds at most, and none afterwards; blocks meanwhile."""
        closing = threading.Thread(target=self._provider.shutdown, name="ferrule-traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)
        if closing.is_alive():
            self._exporter.shutdown()  # gives up the spans that are being sent
            closing.join(_HANG_UP_S)
        self._exporter.detach()


class CallTrace:
    """The span of one call. Used on the event loop only.

    Args:
        span: The span, which has begun.
        offset_ns: Offset from the monotonic clock to the time of day.

    Attributes:
        trace_id: The trace id in hexadecimal.
        span_id: The span id in hexadecimal.
    """

    def __init__(self, span: Span, offset_ns: int) -> None:
        context = span.get_span_context()
        self.trace_id, self.span_id = format_trace_id(context.trace_id), format_span_id(context.span_id)
        self._span = span
        self._offset_ns = offset_ns
        self._last: StepTiming | None = None
        self._num_runs = self._num_steps = self._queue_ns = self._run_ns = 0

    def record_step(self, timing: StepTiming) -> None:
        """Record one outcome; outcomes whose first step is the same count as one step."""
        self._num_runs += 1
        last = self._last
        if last is None or last.started_ns != timing.started_ns:
            self._record_last()
            self._last = timing
        elif timing.run_ns > last.run_ns:
            self._last = timing

    def end(self, call: Call) -> None:
        """End the span."""
        span = self._span
        if not span.is_recording():
            return
        self._record_last()
        code = call.code.name if call.code is not None else ""
        span.set_attributes(self._attributes_of(call, code))
        if code in _FAULTS:
            span.set_status(StatusCode.ERROR, call.reason or None)
        span.end(call.end_ns + self._offset_ns)

    def _attributes_of(self, call: Call, code: str) -> dict[str, str | int]:
        attributes: dict[str, str | int] = {"rpc.response.status_code": code, **_peer(call.peer)}
        if code in _FAULTS:
            attributes["error.type"] = code
        named = {"principal": call.principal, "handle_id": call.handle_id, "reason": call.reason}
        attributes.update({f"ferrule.{key}": value for key, value in named.items() if value})
        if self._num_steps:
            sums = {"answers": self._num_runs, "steps": self._num_steps}
            sums |= {"queue_ns": self._queue_ns, "run_ns": self._run_ns}
            attributes.update({f"ferrule.{key}": value for key, value in sums.items()})
        return attributes

    def _record_last(self) -> None:
        """Count the newest step, and add events for it if it is one of those that have events."""
        timing, self._last = self._last, None
        if timing is None:
            return
        self._num_steps += 1
        self._queue_ns += timing.queue_ns
        self._run_ns += timing.run_ns
        number = self._num_steps
        if number > _NUM_SHOWN and number & (number - 1):
            return
        started_ns = timing.started_ns + self._offset_ns
        queued = {"ferrule.step": number, "ferrule.queue_ns": timing.queue_ns}
        self._span.add_event("queue", queued, started_ns - timing.queue_ns)
        ran = {"ferrule.step": number, "ferrule.run_ns": timing.run_ns, "ferrule.step_rows": timing.step_rows}
        self._span.add_event("step", ran, started_ns)


class _Exporter(SpanExporter):
    """Sends spans through another exporter, and logs when it begins and ceases to fail.

    Args:
        exporter: Sends the spans; the several lines that it logs for each failure are shown at DEBUG only.
        endpoint: The endpoint in log lines.
    """

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._num_lost = 0
        self._quiet_until = 0.0
        self._is_given_up = threading.Event()
        self._cause = ""
        logging.getLogger(_EXPORT_LOGGER).filters.insert(0, self._is_shown)  # the SDK's own filter hides repetitions
        if not _LOG.isEnabledFor(logging.DEBUG):
            for name in _CALL_LOGGERS:
                logging.getLogger(name).setLevel(logging.ERROR)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans, on the thread of the processor, for ten seconds at most unless a variable sets another time."""
        result = self._send(spans)
        if result is not SpanExportResult.SUCCESS:
            self._log_lost(len(spans))
        elif self._num_lost:
            _LOG.info("traces arrive again endpoint=%s lost_spans=%d", self._endpoint, self._num_lost)
            self._num_lost, self._quiet_until = 0, 0.0
        return result

    def _send(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans unless the exporter is shut down, which may happen meanwhile."""
        if self._is_given_up.is_set():
            return SpanExportResult.FAILURE
        try:
            return self._exporter.export(spans)
        except ValueError:
            if not self._is_given_up.is_set():
                raise
            return SpanExportResult.FAILURE  # its channel was closed

    def shutdown(self) -> None:
        """Give up the spans that are being sent; further calls change nothing."""
        if not self._is_given_up.is_set():
            self._is_given_up.set()
            self._exporter.shutdown()

    def detach(self) -> None:
        """Leave the logger of the other exporter, which outlives this one; not before the last span is given up."""
        logging.getLogger(_EXPORT_LOGGER).removeFilter(self._is_shown)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Flush the other exporter; no spans are held here."""
        return self._exporter.force_flush(timeout_millis)

    def _log_lost(self, num_spans: int) -> None:
        self._num_lost += num_spans
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + _LOG_AGAIN_S
            _LOG.warning("traces lost endpoint=%s lost_spans=%d cause=%r", self._endpoint, self._num_lost, self._cause)

    def _is_shown(self, record: logging.LogRecord) -> bool:
        """Keep a line of the other exporter out of the log, unless that shows DEBUG, and remember the cause in it."""
        message = record.getMessage()
        if not message.startswith("Shutdown"):  # which is not a cause
            self._cause = message[:300]
        return _LOG.isEnabledFor(logging.DEBUG)


def _resource(instance: str) -> Resource:
    """Return the resource that sends the spans: the names in the variables, otherwise our own."""
    found = Resource.create()
    own: dict[str, str] = {"ferrule.instance": instance}
    if str(found.attributes.get(SERVICE_NAME, _UNNAMED)).startswith(_UNNAMED):
        own[SERVICE_NAME] = "ferrule"
    if SERVICE_VERSION not in found.attributes:
        own[SERVICE_VERSION] = __version__
    return found.merge(Resource(own))


def _peer(peer: str) -> dict[str, str | int]:
    """Return the address of a client, which gRPC writes as ``ipv4:127.0.0.1:41234`` or ``ipv6:%5B::1%5D:41234``."""
    kind, _, address = unquote(peer).partition(":")
    host, _, port = address.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return {"network.transport": "unix"} if kind == "unix" else {}
    return {"network.transport": "tcp", "network.peer.address": host.strip("[]"), "network.peer.port": int(port)}
