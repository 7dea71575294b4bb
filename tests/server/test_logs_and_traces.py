"""A server as it runs in production: its log is JSON, its traces arrive, and one trace id leads from each to the other.

The clients are ours and one of gRPC's own; the trace begins in OpenTelemetry's own SDK, the collector is not ours.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry import propagate
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import format_span_id, format_trace_id

from ferrule import Client
from ferrule.v1 import executor_pb2, executor_pb2_grpc
from tests.api.certificates import Authority, ServerFiles
from tests.api.collector import Collector, attributes_of
from tests.server.test_main import _environment

Metadata = Sequence[tuple[str, str]]


@dataclass
class Served:
    """A server, its collector, and after its end the lines of its log."""

    target: str
    collector: Collector
    process: subprocess.Popen[str]
    log: Path
    lines: list[dict[str, Any]] = field(default_factory=list)

    def end(self) -> list[dict[str, Any]]:
        """End the server and return its log."""
        if not self.lines:
            self.process.terminate()
            assert self.process.wait(20) == 0
            self.lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return self.lines


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that logs all there is as JSON, and traces."""
    folder = tmp_path_factory.mktemp("logs")
    target = f"unix:{folder}/ferrule.sock"
    arguments = ["--executor", "paged-reference", "--kv-memory", "4MiB", "--listen", target, "--drain-grace", "0s"]
    arguments += ["--log-format", "json", "--log-level", "debug"]
    with Collector() as collector, (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "ferrule_server", *arguments],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=_environment(FERRULE_OTLP_ENDPOINT=collector.endpoint, OTEL_SERVICE_NAME="ferrule-test"),
        )
        with process:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["message"] == "ready", (folder / "log").read_text()
            yield Served(target, collector, process, folder / "log")
            process.kill()


def current_metadata() -> Metadata:
    """Return the context of the span that is current, as a client sends it."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return list(carrier.items())


def refuse(target: str) -> None:
    """Make a call with gRPC's own client that the server refuses."""
    with grpc.insecure_channel(target) as channel:
        stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
        with pytest.raises(grpc.RpcError):
            stub.Decode(executor_pb2.DecodeRequest(), metadata=tuple(current_metadata()), timeout=10)


def test_the_client_of_the_page_takes_part_in_a_trace(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """What docs/observing.md shows is run as it stands, within a span."""
    page = (Path(__file__).parents[2] / "docs" / "observing.md").read_text()
    (piece,) = re.findall(r"^```python\n(import opentelemetry.*?)^```", page, re.DOTALL | re.MULTILINE)
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("client")
    with tracer.start_as_current_span("page") as span:
        exec(compile(piece.replace("127.0.0.1:50051", served.target), "page", "exec", dont_inherit=True), {})
        context = span.get_span_context()
    assert capsys.readouterr().out == "True\n"
    received = served.collector.wait(format_trace_id(context.trace_id))
    assert received.name == "ferrule.v1.ModelExecutorService/GetStatus"
    assert received.parent_span_id.hex() == format_span_id(context.span_id)


def test_one_trace_id_leads_from_the_client_to_spans_and_log_lines(served: Served) -> None:
    """A Python client, spans around its calls; a refusal and a stream among them; all of it found by its trace id."""
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("client")
    ids = {}
    with Client(served.target, metadata=current_metadata) as client:
        with tracer.start_as_current_span("prefill") as span, client.prefill(range(1, 20)) as cache:
            ids["prefill"] = span.get_span_context()
            handle_id = cache.handle.handle_id
            with tracer.start_as_current_span("generate") as inner:
                ids["generate"] = inner.get_span_context()
                assert len(list(cache.generate(max_tokens=5))) >= 1
        with tracer.start_as_current_span("refused") as span:
            ids["refused"] = span.get_span_context()
            refuse(served.target)
    lines = served.end()  # what waited to be sent has been
    for name, context in ids.items():
        trace_id = format_trace_id(context.trace_id)
        spans = [
            span for span in served.collector.spans if span.parent_span_id.hex() == format_span_id(context.span_id)
        ]
        assert spans, name
        assert {span.trace_id.hex() for span in spans} == {trace_id}
        ends = [
            line["span_id"] for line in lines if line.get("trace_id") == trace_id and line["message"][:5] == "call "
        ]
        assert {span.span_id.hex() for span in spans} <= set(ends)
    assert served.collector.resource["service.name"] == "ferrule-test"

    trace_id = format_trace_id(ids["refused"].trace_id)
    (refused,) = [line for line in lines if line["message"].startswith("refused") and line.get("trace_id") == trace_id]
    assert (refused["level"], refused["rpc"], refused["principal"]) == ("WARNING", "Decode", "local")
    assert (refused["code"], refused["reason"]) == ("INVALID_ARGUMENT", "INVALID_FIELD")

    trace_id = format_trace_id(ids["generate"].trace_id)
    assert ids["prefill"].trace_id == ids["generate"].trace_id  # one is within the other
    spans = [span for span in served.collector.spans if span.trace_id.hex() == trace_id]
    (span_of_generate,) = [span for span in spans if span.name.endswith("/Generate")]
    (ended,) = [line for line in lines if line.get("span_id") == span_of_generate.span_id.hex()]
    assert ended["handle_id"] == handle_id == attributes_of(span_of_generate.attributes)["ferrule.handle_id"]
    assert ended["code"] == "OK"
    (made,) = [line for line in lines if line["message"].startswith("call rpc=Prefill ")]
    assert made["handle_id"] == handle_id
    assert ended["duration_ms"] == pytest.approx(
        (span_of_generate.end_time_unix_nano - span_of_generate.start_time_unix_nano) * 1e-6, abs=0.001
    )


@pytest.mark.parametrize(
    ("arguments", "variables", "said"),
    [
        (["--log-format", "json", "--listen", "127.0.0.1:0", "--model", "/none"], {}, "/none"),
        (["--kv-memry", "5"], {"FERRULE_LOG_FORMAT": "json"}, "unknown flag --kv-memry (did you mean --kv-memory?)"),
    ],
    ids=["model", "flag"],
)
def test_settings_that_cannot_be_used_are_a_line_too(
    arguments: list[str], variables: dict[str, str], said: str
) -> None:
    """Exit code 2 as ever, and nothing on stderr but JSON, also where the command line itself is wrong."""
    command = [sys.executable, "-m", "ferrule_server", *arguments]
    environment = _environment(**variables)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert done.returncode == 2
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert lines[-1]["level"] == "ERROR"
    assert said in lines[-1]["message"]


def test_strangers_cannot_write_into_the_log(tmp_path: Path) -> None:
    """Who speaks no TLS where it is spoken: gRPC would write a line of its own form for each, in any number."""
    files = ServerFiles(tmp_path)
    authority = Authority()
    files.write(authority.server(), authority.cert)
    arguments = ["--executor", "paged-reference", "--kv-memory", "4MiB", "--listen", "127.0.0.1:0"]
    arguments += ["--tls-cert", str(files.paths[0]), "--tls-key", str(files.paths[1])]
    arguments += ["--drain-grace", "0s", "--log-format", "json"]
    command = [sys.executable, "-m", "ferrule_server", *arguments]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=_environment()) as process:
        assert process.stdout is not None
        host, _, port = json.loads(process.stdout.readline())["listen"].rpartition(":")
        for _ in range(3):
            with socket.create_connection((host, int(port)), timeout=10) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                while stranger.recv(100):
                    pass
        process.terminate()
        _, log = process.communicate(timeout=20)
    assert json.loads(log.splitlines()[-1])["message"] == "drained"
    assert not [line for line in log.splitlines() if not line.startswith("{")]


def test_the_whole_log_is_json(served: Served) -> None:
    """From the first line to the last, each with the keys that all have; no secret and no token is in it."""
    lines = served.end()
    messages = [line["message"] for line in lines]
    for line in lines:
        assert line["time"].endswith("Z")
        assert line["level"] in ("DEBUG", "INFO", "WARNING")
        assert line["logger"]
        assert "running loop" not in line["message"]  # gRPC's, for each call
    listening = next(line for line in lines if line["message"].startswith("listening"))
    assert listening["address"] == served.target
    assert listening["instance"]
    assert next(line for line in lines if line["message"].startswith("model loaded"))["blocks"] > 1
    assert "drained" in messages
    assert not [message for message in messages if "traceparent" in message]
