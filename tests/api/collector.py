"""An OpenTelemetry collector that keeps what it is sent: the stubs are opentelemetry-proto's own, nothing is ours."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from concurrent import futures
from types import TracebackType

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

Value = str | int | float | bool


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Listens on loopback from entering to leaving; port 0 lets the system choose.

    Attributes:
        endpoint: For ``--otlp-endpoint``.
        resource: Attributes of whoever sent last.
    """

    def __init__(self, port: int = 0) -> None:
        self._spans: list[Span] = []
        self._lock = threading.Lock()
        self.resource: dict[str, Value] = {}
        self._server = grpc.server(futures.ThreadPoolExecutor(2), options=[("grpc.so_reuseport", 0)])
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.endpoint = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Collector:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(None).wait(5)

    def Export(  # noqa: N802  (the protocol's name)
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Keep the spans."""
        with self._lock:
            for resource_spans in request.resource_spans:
                self.resource = attributes_of(resource_spans.resource.attributes)
                for scope_spans in resource_spans.scope_spans:
                    self._spans.extend(scope_spans.spans)
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self) -> list[Span]:
        """Everything that has come."""
        with self._lock:
            return list(self._spans)

    def wait(self, trace_id: str, timeout_s: float = 60.0) -> Span:
        """Return the one span of a trace, once it has come."""
        deadline = time.monotonic() + timeout_s
        while not (found := [span for span in self.spans if span.trace_id.hex() == trace_id]):
            assert time.monotonic() < deadline, f"no span of trace {trace_id} came"
            time.sleep(0.005)
        assert len(found) == 1
        return found[0]


def attributes_of(pairs: Iterable[KeyValue]) -> dict[str, Value]:
    """Return attributes as a dict."""
    return {pair.key: _value_of(pair) for pair in pairs}


def _value_of(pair: KeyValue) -> Value:
    values: Mapping[str, Value] = {
        "string_value": pair.value.string_value,
        "int_value": pair.value.int_value,
        "double_value": pair.value.double_value,
        "bool_value": pair.value.bool_value,
    }
    return values[pair.value.WhichOneof("value") or ""]
