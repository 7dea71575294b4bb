"""Traces: what a collector that is not ours receives of real calls."""

from __future__ import annotations

import contextvars
import logging
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from ferrule.v1 import cache_pb2, executor_pb2
from ferrule_server import __version__, composition
from ferrule_server.api.rpc.observe import Call
from ferrule_server.api.telemetry import tracing
from ferrule_server.api.telemetry.tracing import Tracer
from ferrule_server.config import ServerConfig
from ferrule_server.errors import ConfigError
from tests.api.collector import Collector, attributes_of
from tests.api.harness import GREEDY, PROMPT, RunningServer, StreamClient, decode_item, wait_until

_FAST = {"OTEL_BSP_SCHEDULE_DELAY": "20", "OTEL_EXPORTER_OTLP_TIMEOUT": "0.3"}
_SERVICE = "ferrule.v1.ModelExecutorService"

Traced = tuple[RunningServer, Collector]


@pytest.fixture(scope="module")
def traced() -> Iterator[Traced]:
    """A server that traces, and what receives it."""
    with pytest.MonkeyPatch.context() as patch, Collector() as collector:
        for name, value in _FAST.items():
            patch.setenv(name, value)
        tracer = Tracer(collector.endpoint, "here")
        with RunningServer(observers=(tracer,)) as server:
            yield server, collector
        tracer.close()


def parent(number: int, flags: str = "01") -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return a trace id, and the metadata of a client that is part of it."""
    trace_id = f"{number:032x}"
    return trace_id, (("traceparent", f"00-{trace_id}-00f067aa0ba902b7-{flags}"), ("tracestate", "vendor=7,other=a"))


def events_of(span: Span, name: str) -> list[tuple[int, Mapping[str, Any]]]:
    """Return time and attributes of each event of a name."""
    return [(event.time_unix_nano, attributes_of(event.attributes)) for event in span.events if event.name == name]


def test_a_call_is_a_span_below_that_of_its_client(traced: Traced) -> None:
    """Ids, state and names are as W3C Trace Context and the conventions for RPC say; the resource tells the sender."""
    server, collector = traced
    trace_id, metadata = parent(1)
    before_ns = time.time_ns()
    handle = server.prefill().kv_cache
    request = executor_pb2.DecodeRequest(input=decode_item(handle, 5))
    server.stub.Decode(request, timeout=10, metadata=metadata)
    span = collector.wait(trace_id)
    assert span.parent_span_id.hex() == "00f067aa0ba902b7"
    assert span.trace_state == "vendor=7,other=a"
    assert (span.name, span.kind) == (f"{_SERVICE}/Decode", Span.SPAN_KIND_SERVER)
    assert before_ns <= span.start_time_unix_nano < span.end_time_unix_nano <= time.time_ns()
    assert span.status.code == Status.STATUS_CODE_UNSET
    attributes = attributes_of(span.attributes)
    info = server.info(handle)
    expected = {
        "rpc.system.name": "grpc",
        "rpc.method": f"{_SERVICE}/Decode",
        "rpc.response.status_code": "OK",
        "network.transport": "tcp",
        "network.peer.address": "127.0.0.1",
        "ferrule.principal": "local",
        "ferrule.handle_id": info.summary.handle_id,
    }
    assert {key: attributes.get(key) for key in expected} == expected
    assert "ferrule.reason" not in attributes
    assert collector.resource["service.name"] == "ferrule"
    assert collector.resource["service.version"] == __version__
    assert collector.resource["ferrule.instance"] == "here"


def test_events_tell_when_a_job_waited_and_ran(traced: Traced) -> None:
    """The times are those of the reply's timing, and lie within the span: queue first, then the step."""
    server, collector = traced
    trace_id, metadata = parent(2)
    request = executor_pb2.PrefillRequest(input=executor_pb2.PrefillInput(input_ids=PROMPT, logits_policy=GREEDY))
    timing = server.stub.Prefill(request, timeout=10, metadata=metadata).output.timing
    span = collector.wait(trace_id)
    ((queued_ns, queued),) = events_of(span, "queue")
    ((started_ns, ran),) = events_of(span, "step")
    assert queued["ferrule.queue_ns"] == timing.queue_ns == started_ns - queued_ns
    assert (ran["ferrule.run_ns"], ran["ferrule.step_rows"]) == (timing.run_ns, timing.step_rows)
    assert span.start_time_unix_nano <= queued_ns
    assert started_ns + timing.run_ns <= span.end_time_unix_nano
    attributes = attributes_of(span.attributes)
    assert (attributes["ferrule.answers"], attributes["ferrule.steps"]) == (1, 1)
    assert (attributes["ferrule.queue_ns"], attributes["ferrule.run_ns"]) == (timing.queue_ns, timing.run_ns)


def test_an_answer_that_was_kept_is_no_step(traced: Traced) -> None:
    """A replay has run nothing for this call."""
    server, collector = traced
    handle = server.prefill().kv_cache
    for number in (3, 4):
        trace_id, metadata = parent(number)
        request = executor_pb2.DecodeRequest(input=decode_item(handle, 5))
        server.stub.Decode(request, timeout=10, metadata=metadata)
        span = collector.wait(trace_id)
        assert len(events_of(span, "step")) == (1 if number == 3 else 0)


def test_a_long_stream_tells_its_first_steps_and_every_power_of_two(traced: Traced) -> None:
    """70 steps of two items: 32 and the 64th are told, the totals count all."""
    server, collector = traced
    trace_id, metadata = parent(5)
    handles = [server.prefill().kv_cache, server.prefill(range(30, 50)).kv_cache]
    stream = StreamClient(server.stub, metadata=metadata)
    for _ in range(70):
        stream.send(*(decode_item(handle, 5) for handle in handles))
        results = list(stream.read().results)
        while len(results) < 2:
            results.extend(stream.read().results)
        for result in results:
            handles[result.seq] = result.decode.kv_cache
    assert stream.rest() == []
    span = collector.wait(trace_id)
    attributes = attributes_of(span.attributes)
    assert attributes["ferrule.answers"] == 140
    num_steps = attributes["ferrule.steps"]
    assert isinstance(num_steps, int)
    assert 70 <= num_steps <= 140
    told = [event["ferrule.step"] for _, event in events_of(span, "step")]
    assert told == [*range(1, 33), *(number for number in (64, 128) if number <= num_steps)]
    times = [at for at, _ in events_of(span, "step")]
    assert times == sorted(times)
    assert "ferrule.handle_id" not in attributes  # it names many


def test_a_generate_tells_its_steps(traced: Traced) -> None:
    """One for the prompt and one for each token behind the first."""
    server, collector = traced
    trace_id, metadata = parent(6)
    request = executor_pb2.GenerateRequest(input_ids=PROMPT, logits_policy=GREEDY, max_tokens=6, ignore_eos=True)
    replies = list(server.stub.Generate(request, timeout=20, metadata=metadata))
    assert replies
    span = collector.wait(trace_id)
    attributes = attributes_of(span.attributes)
    assert attributes["ferrule.steps"] == 6
    times = [at for at, _ in events_of(span, "step")]
    assert len(times) == 6
    assert times == sorted(set(times))
    assert span.start_time_unix_nano < times[0]
    assert times[-1] < span.end_time_unix_nano


def test_a_refused_call_says_why(traced: Traced) -> None:
    """Code and reason, and no error of the server's: it is the client's affair."""
    server, collector = traced
    handle = server.prefill().kv_cache
    server.decode(handle, 5)
    trace_id, metadata = parent(7)
    with pytest.raises(grpc.RpcError):
        server.stub.Decode(executor_pb2.DecodeRequest(input=decode_item(handle, 6)), timeout=10, metadata=metadata)
    span = collector.wait(trace_id)
    attributes = attributes_of(span.attributes)
    assert attributes["rpc.response.status_code"] == "ABORTED"
    assert attributes["ferrule.reason"] == "HANDLE_STALE"
    assert attributes["ferrule.handle_id"] == server.info(handle).summary.handle_id
    assert span.status.code == Status.STATUS_CODE_UNSET
    assert "error.type" not in attributes


def test_a_fault_is_an_error(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    """Status and error.type, by which traces are searched."""
    server, collector = traced
    trace_id, metadata = parent(8)
    monkeypatch.setattr(server.engine, "submit", None)
    with pytest.raises(grpc.RpcError):
        server.stub.ListCaches(cache_pb2.ListCachesRequest(), timeout=10, metadata=metadata)
    span = collector.wait(trace_id)
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert span.status.message == "ENGINE_FAULT"
    assert attributes_of(span.attributes)["error.type"] == "INTERNAL"


def test_a_cancelled_call_ends_its_span(traced: Traced) -> None:
    """CANCELLED is what the client wanted, so no error."""
    server, collector = traced
    trace_id, metadata = parent(9)
    stream = StreamClient(server.stub, metadata=metadata)
    stream.send()
    stream.read()  # it is under way
    stream.call.cancel()
    stream.half_close()
    span = collector.wait(trace_id)
    assert attributes_of(span.attributes)["rpc.response.status_code"] == "CANCELLED"
    assert span.status.code == Status.STATUS_CODE_UNSET


def test_headers_that_are_none_begin_a_trace_of_their_own(traced: Traced, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a client sends as its context: the call is served, the span has no parent, the log stays quiet."""
    server, collector = traced
    odd = [
        (("traceparent", "00-zz-00-01"),),
        (("traceparent", ""), ("tracestate", "=,=" * 50)),
        (("traceparent", f"00-{10:032x}-{0:016x}-01"),),
        (("traceparent", f"ff-{10:032x}-{7:016x}-01"),),
        (("tracestate", "a=b"),),
    ]
    before = len(collector.spans)
    for metadata in odd:
        server.stub.GetModelInfo(executor_pb2.GetModelInfoRequest(), timeout=10, metadata=metadata)
    wait_until(lambda: len(collector.spans) >= before + len(odd))
    assert all(not span.parent_span_id for span in collector.spans[before:])
    trace_id, metadata = parent(10)
    state = ("tracestate", ",".join(f"k{index}=?{chr(0x7E)}" for index in range(100)))
    server.stub.GetModelInfo(executor_pb2.GetModelInfoRequest(), timeout=10, metadata=(metadata[0], state))
    assert collector.wait(trace_id).parent_span_id
    long = (("traceparent", metadata[0][1] + "-x" * 300),)
    server.stub.GetModelInfo(executor_pb2.GetModelInfoRequest(), timeout=10, metadata=long)
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


def test_a_client_that_is_not_sampled_is_not_traced(traced: Traced) -> None:
    """Sampling follows the parent; what is not sent has its ids all the same, for the log."""
    server, collector = traced
    unsampled, metadata = parent(11, flags="00")
    server.stub.GetModelInfo(executor_pb2.GetModelInfoRequest(), timeout=10, metadata=metadata)
    sampled, metadata = parent(12)
    server.stub.GetModelInfo(executor_pb2.GetModelInfoRequest(), timeout=10, metadata=metadata)
    collector.wait(sampled)
    assert unsampled not in {span.trace_id.hex() for span in collector.spans}


def test_health_is_not_traced(traced: Traced) -> None:
    """Probes ask every few seconds, and nobody looks for them in a trace."""
    server, collector = traced
    trace_id, metadata = parent(13)
    health = health_pb2_grpc.HealthStub(server.channel)
    health.Check(health_pb2.HealthCheckRequest(), timeout=10, metadata=metadata)
    later, metadata = parent(14)
    server.stub.GetModelInfo(executor_pb2.GetModelInfoRequest(), timeout=10, metadata=metadata)
    collector.wait(later)
    assert trace_id not in {span.trace_id.hex() for span in collector.spans}


def test_the_page_names_all_that_spans_have(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attributes of spans and events, of an append, a refusal and a fault, are those that docs/observing.md tells."""
    server, collector = traced
    handle = server.prefill().kv_cache
    server.decode(handle, 5)
    with pytest.raises(grpc.RpcError):
        server.decode(handle, 6)
    trace_id, metadata = parent(15)
    monkeypatch.setattr(server.engine, "submit", None)
    with pytest.raises(grpc.RpcError):
        server.stub.ListCaches(cache_pb2.ListCachesRequest(), timeout=10, metadata=metadata)
    collector.wait(trace_id)
    page = (Path(__file__).parents[2] / "docs" / "observing.md").read_text()
    table = page[page.index("### Traces") : page.index("## Looking into a model")]
    told = set(re.findall(r"`((?:ferrule|rpc|network|error)\.[a-z_.]+)`", table))
    sent = {key for span in collector.spans for key in attributes_of(span.attributes)}
    sent |= {key for span in collector.spans for event in span.events for key in attributes_of(event.attributes)}
    assert told == sent
    assert {event.name for span in collector.spans for event in span.events} == {"queue", "step"}


def test_a_collector_that_is_away_costs_spans_and_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Calls go on; one warning says what is lost; when the collector is back the log says so, and spans arrive."""
    for name, value in _FAST.items():
        monkeypatch.setenv(name, value)
    caplog.set_level(logging.INFO)
    port = _free_port()
    tracer = Tracer(f"http://127.0.0.1:{port}", "here")
    with RunningServer(observers=(tracer,)) as server:
        for _ in range(3):
            server.stub.GetModelInfo(executor_pb2.GetModelInfoRequest(), timeout=10)
            time.sleep(0.05)
        wait_until(lambda: "traces lost" in caplog.text)
        with Collector(port) as collector:
            number = 100
            while "traces arrive again" not in caplog.text:
                number += 1
                assert number < 400
                server.stub.GetModelInfo(executor_pb2.GetModelInfoRequest(), timeout=10, metadata=parent(number)[1])
                time.sleep(0.05)
            assert collector.spans
            tracer.close()
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"traces lost endpoint=http://127.0.0.1:{port} lost_spans=")
    assert "UNAVAILABLE" in lines[0]


def test_closing_is_bounded_and_sends_what_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Spans of the last moment arrive; a collector that answers nothing holds up the end for no more than its time."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    with Collector() as collector:
        tracer = Tracer(collector.endpoint, "here")
        _trace_one(tracer)
        tracer.close()
        assert len(collector.spans) == 1
    monkeypatch.setattr(tracing, "_CLOSE_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
        tracer = Tracer(f"http://127.0.0.1:{silent.getsockname()[1]}", "here")
        for _ in range(3):
            _trace_one(tracer)
        begun_s = time.monotonic()
        tracer.close()
        assert time.monotonic() - begun_s < 5  # what is being sent is given up, the rest not tried
        assert "ferrule-traces" not in {thread.name for thread in threading.enumerate()}
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "lost_spans=1 " in caplog.text


def test_nothing_is_left_at_a_logger_that_outlives_the_tracer() -> None:
    """It has the filters that it had before, so a tracer that is closed can be freed."""
    logger = logging.getLogger(tracing._EXPORT_LOGGER)
    with Collector() as collector:
        OTLPSpanExporter(endpoint=collector.endpoint).shutdown()  # adds the SDK's own filter
        before = list(logger.filters)
        first, second = Tracer(collector.endpoint, "here"), Tracer(collector.endpoint, "here")
        assert len(logger.filters) > len(before)
        first.close()
        second.close()
    assert logger.filters == before


def test_the_standard_variables_are_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name, resource attributes and sampler."""
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab,service.version=7")
    with Collector() as collector:
        tracer = Tracer(collector.endpoint, "here")
        _trace_one(tracer)
        tracer.close()
        assert collector.resource["service.name"] == "mine"
        assert collector.resource["service.version"] == "7"
        assert collector.resource["deployment.environment.name"] == "lab"
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
        tracer = Tracer(collector.endpoint, "here")
        _trace_one(tracer)
        tracer.close()
        assert len(collector.spans) == 1


def test_without_the_extra_the_flag_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the settings, not a traceback; a variable that is wrong is one too."""
    config = ServerConfig(otlp_endpoint="http://127.0.0.1:4317")
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "ferrule_server.api.telemetry.tracing")
        for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
            patch.setitem(sys.modules, name, None)
        with pytest.raises(ConfigError, match=r"install ferrule-server\[otel\]"):
            composition.tracer_of(config)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")
    with pytest.raises(ConfigError, match="OTEL_"):
        composition.tracer_of(config)


def test_nothing_of_it_is_imported_unless_it_is_asked_for() -> None:
    """A server without the flag does not know OpenTelemetry."""
    code = (
        "import sys; from ferrule_server import composition\n"
        "import ferrule_server.api.telemetry.call_log\n"
        "from ferrule_server.config import ServerConfig\n"
        "assert composition.tracer_of(ServerConfig()) is None\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=300).returncode == 0


class _Context:
    """gRPC's side of a call that is over at once."""

    def invocation_metadata(self) -> tuple[()]:
        """Nothing was sent."""
        return ()

    def peer(self) -> str:
        """Return an address."""
        return "ipv6:%5B::1%5D:7"

    def code(self) -> None:
        """None was set."""


def _trace_one(tracer: Tracer) -> None:
    """Begin and end a call, in a context of its own as each call has one."""
    call = Call(_SERVICE, "Decode", _Context(), (tracer,))  # type: ignore[arg-type]
    contextvars.copy_context().run(lambda: call.__enter__().__exit__(None, None, None))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
