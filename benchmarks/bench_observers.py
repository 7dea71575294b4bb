"""What watching calls costs the event loop: metrics, the log, traces.

One call that does nothing goes through the same wrapper as every call of the server, in this process and without gRPC,
so that a few microseconds are seen: unwatched, watched as by default (counts, and the log at INFO), traced, and traced
but sampled out. Then what an item of a StreamDecode costs that is traced. All is the thread's own processor time. Spans
wait in a queue and are dropped with the process: sending them is the work of another thread, and is not in the figures.

Usage: python benchmarks/bench_observers.py [--rounds 15] [--calls 1000]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import grpc
from opentelemetry.sdk.version import __version__ as otel_version

from ferrule.v1 import executor_pb2
from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.rpc.call_counts import CallCounts
from ferrule_server.api.rpc.handlers import Registrar
from ferrule_server.api.rpc.intake import Intake
from ferrule_server.api.rpc.observe import Call, Observer
from ferrule_server.api.rpc.state import ServerState
from ferrule_server.api.security.auth import OpenAccess
from ferrule_server.api.telemetry.call_log import CallLog
from ferrule_server.api.telemetry.tracing import Tracer
from ferrule_server.engine.jobs import AppendResult, StepTiming
from ferrule_server.kv.handle import Handle

SERVICE = "ferrule.v1.ModelExecutorService"
PARENT = (("user-agent", "bench"), ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"))
NOWHERE = "http://127.0.0.1:9"
HOLD = {"OTEL_BSP_SCHEDULE_DELAY": "10000000", "OTEL_BSP_MAX_QUEUE_SIZE": "1000000"}
HOLD |= {"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "1000000"}


class Context:
    """gRPC's side of a call."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return what a client that traces sends."""
        return PARENT

    def peer(self) -> str:
        """Return an address."""
        return "ipv4:127.0.0.1:41234"

    def code(self) -> None:
        """None was set."""

    async def read(self) -> bytes:
        """Return an empty request."""
        return b""


class Handlers:
    """Takes what a server would."""

    def __init__(self) -> None:
        self.generic: Any = None

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Keep the handlers."""
        (self.generic,) = handlers


async def nothing(_request: object, _context: object) -> executor_pb2.GetStatusResponse:
    """Answer."""
    return executor_pb2.GetStatusResponse()


def watched_by(*observers: Observer) -> Callable[[bytes, Any], Awaitable[object]]:
    """Return a method as it is registered with a server that these observers watch."""
    server = Handlers()
    handler = grpc.unary_unary_rpc_method_handler(
        nothing,
        executor_pb2.GetStatusRequest.FromString,
        executor_pb2.GetStatusResponse.SerializeToString,
    )
    access = OpenAccess(is_admin=True)
    state = ServerState("bench", "0", "0", ApiLimits(), access.limits_of)
    registrar = Registrar(server, state, access, Intake(state), observers)  # type: ignore[arg-type]
    registrar.add_registered_method_handlers(SERVICE, {"GetStatus": handler})
    details = SimpleNamespace(method=f"/{SERVICE}/GetStatus", invocation_metadata=())
    method: Callable[[bytes, Any], Awaitable[object]] = server.generic.service(details).stream_unary
    return method


async def us_per_call(method: Callable[[bytes, Any], Awaitable[object]], num_calls: int) -> float:
    """Return how long a call takes."""
    context = Context()
    begin = time.thread_time()
    for _ in range(num_calls):
        await method(b"", context)
    return (time.thread_time() - begin) / num_calls * 1e6


def us_per_item(tracer: Tracer, num_items: int) -> float:
    """Return what an answer of a traced stream costs, 16 of them in a step."""
    handle = Handle("ignored", 1, b"")
    results = [AppendResult(handle, timing=StepTiming(1, 2, 3, 1 + index // 16)) for index in range(num_items)]
    with Call(SERVICE, "StreamDecode", Context(), (tracer,)) as call:  # type: ignore[arg-type]
        begin = time.thread_time()
        for result in results:
            call.record_step(result)
        return (time.thread_time() - begin) / num_items * 1e6


async def measure(num_rounds: int, num_calls: int) -> dict[str, list[float]]:
    """Return the figures of each round."""
    os.environ.update(HOLD)
    tracer = Tracer(NOWHERE, "bench")
    os.environ["OTEL_TRACES_SAMPLER"] = "always_off"
    methods = {
        "unwatched": watched_by(),
        "as by default": watched_by(CallCounts(), CallLog()),
        "traced": watched_by(CallCounts(), tracer, CallLog()),
        "sampled out": watched_by(CallCounts(), Tracer(NOWHERE, "bench"), CallLog()),
    }
    figures: dict[str, list[float]] = {name: [] for name in (*methods, "item of a traced stream")}
    for _ in range(num_rounds):
        for name, method in methods.items():
            figures[name].append(await us_per_call(method, num_calls))
        figures["item of a traced stream"].append(us_per_item(tracer, num_calls))
    return figures


def main() -> None:
    """Measure; print a table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=1000)
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments.rounds, arguments.calls))
    print(f"{'us':24} {'lowest':>8} {'median':>8} {'highest':>8}")
    for name, values in figures.items():
        print(f"{name:24} {min(values):8.2f} {statistics.median(values):8.2f} {max(values):8.2f}")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    machine = {"commit": commit.stdout.strip(), "cpus": os.cpu_count(), "python": platform.python_version()}
    medians = {name: round(statistics.median(values), 2) for name, values in figures.items()}
    print(json.dumps({**machine, "opentelemetry": otel_version, "median_us": medians}), flush=True)
    os._exit(0)  # what was traced is sent nowhere


if __name__ == "__main__":
    main()
