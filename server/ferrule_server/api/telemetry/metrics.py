"""Metrics for Prometheus, read from the live parts at each scrape, from any thread. See docs/metrics.md.

This module keeps no values and the step loop does not use it: each counter is kept by its owner without a lock, and a
reader may be one step behind. The number of series is bounded, since no label has a value that a client chooses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from operator import attrgetter
from typing import Final, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ferrule.v1 import info_pb2
from ferrule_server.api.responses import describe
from ferrule_server.api.rpc.state import Phase, ServerState
from ferrule_server.api.telemetry.metric_tables import COUNTERS, DURABLE_SYNC, GAUGES, HISTOGRAMS, Figure, Look
from ferrule_server.engine.jobs import Finish
from ferrule_server.engine.metrics.timings import HistogramReading

_PREFIX: Final = "ferrule_"
_STATES: Final = ("starting", "ready", "busy", "draining", "failed")
_ENDS: Final = (*(each.value for each in Finish), "cancelled")
_MAX_LABEL_CHARS: Final = 160

_Labels = TypeVar("_Labels", bound=str | tuple[str, ...])
_Family = type[GaugeMetricFamily] | type[CounterMetricFamily]


class Exposition(Collector):
    """Reads a server at each scrape and renders its metrics, from any thread and in every phase.

    Args:
        state: The server.
    """

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self, accept: str = "") -> tuple[str, bytes]:
        """Return the content type and the text: OpenMetrics if the client accepts it, otherwise Prometheus text 0.0.4.

        Args:
            accept: Value of the Accept header.
        """
        if "application/openmetrics-text" in accept:
            text: bytes = openmetrics.generate_latest(self._registry)  # type: ignore[no-untyped-call]
            return openmetrics.CONTENT_TYPE_LATEST, text
        return CONTENT_TYPE_PLAIN_0_0_4, generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Return every metric that exists in the phase of the server."""
        state, serving = self._state, self._state.serving
        status = describe.status(state)
        yield from _always(state, status)
        if serving is None:
            return
        snapshot, kv = serving.engine.snapshot(), serving.engine.kv_metrics()
        look = Look(state, serving, status, snapshot, kv, serving.engine.durability())
        yield from _described(look)
        yield from _plain(GAUGES, look)
        yield from _plain(COUNTERS, look, CounterMetricFamily)
        for attribute, reading in look.counters.timings:
            name, meaning = HISTOGRAMS[attribute]
            yield _histogram(name, meaning, reading)
        if look.journal is not None:
            yield _histogram(*DURABLE_SYNC, look.journal.sync_times)


def _always(state: ServerState, status: info_pb2.ExecutorStatus) -> Iterator[Metric]:
    """Return the metrics that exist before the model is loaded."""
    now = _state_name(state, status)
    yield _labelled("state", "1 for the state that the server is in.", "state", {each: each == now for each in _STATES})
    progress = 1.0 if state.serving is not None else state.load_progress
    yield GaugeMetricFamily(_PREFIX + "load_progress_ratio", "How much of the model is loaded.", progress)
    start_s = state.start_ns * 1e-9
    yield GaugeMetricFamily(_PREFIX + "start_timestamp_seconds", "When the server started, in Unix time.", start_s)
    yield _labelled("rpcs_in_flight", "Calls under way.", "rpc", state.calls.in_flight())
    labels = ("rpc", "code", "reason")
    yield _labelled("rpcs", "Calls that have ended, by their status.", labels, state.calls.ended(), CounterMetricFamily)
    seconds = HistogramMetricFamily(
        _PREFIX + "rpc_seconds", "Duration of calls, of streams from begin to end.", labels=("rpc",)
    )
    for rpc, reading in state.calls.seconds().items():
        seconds.add_metric((rpc,), _buckets(reading), reading.sum)
    yield seconds


def _described(look: Look) -> Iterator[Metric]:
    """Return the metrics of the engine that have labels."""
    info, status, kv = look.serving.engine.info, look.status, look.kv
    about = {
        "version": look.state.version,
        "instance": look.state.instance,
        "model": info.model.model_id,
        "executor": info.name,
        "device": info.device_name or info.device,
        "dtype": info.model.dtype,
    }
    yield InfoMetricFamily(
        "ferrule", "Version, model and device of the server.", {key: _short(value) for key, value in about.items()}
    )
    meaning = "Always 1: the executor of the next step, and the reason if torch runs it for good."
    active = {(status.executor, _short(status.fallback_reason)): 1}
    yield _labelled("executor_active", meaning, ("executor", "fallback_reason"), active)
    blocks = {"empty": kv.empty_blocks, "cached": kv.cached_blocks, "used": kv.used_blocks}
    yield _labelled("kv_blocks", "Blocks of the pool by state.", "state", blocks)
    yield _labelled("memory_bytes", "Memory by use.", "kind", _memory(look))
    yield _labelled("steps", "Steps run, by execution path.", "path", _steps(look), CounterMetricFamily)
    ends = dict.fromkeys(_ENDS, 0) | look.counters.finished.copy()
    yield _labelled("branches_finished", "Branches of Generates, by their end.", "finish", ends, CounterMetricFamily)
    yield _labelled("refused", "Jobs and items refused, by reason.", "reason", look.refused, CounterMetricFamily)


def _plain(figures: Iterable[Figure], look: Look, family: _Family = GaugeMetricFamily) -> Iterator[Metric]:
    for figure in figures:
        if look.journal is not None or not figure.path.startswith("journal."):
            yield family(_PREFIX + figure.name, figure.help, attrgetter(figure.path)(look))


def _labelled(
    name: str,
    meaning: str,
    labels: str | tuple[str, ...],
    values: Mapping[_Labels, int],
    family: _Family = GaugeMetricFamily,
) -> Metric:
    """Return a metric with one label, whose value is each key, or with several, whose values are in each key."""
    metric = family(_PREFIX + name, meaning, labels=(labels,) if isinstance(labels, str) else labels)
    for key, value in values.items():
        metric.add_metric((key,) if isinstance(key, str) else key, int(value))
    return metric


def _histogram(name: str, meaning: str, reading: HistogramReading) -> Metric:
    return HistogramMetricFamily(_PREFIX + name, meaning, _buckets(reading), reading.sum)


def _buckets(reading: HistogramReading) -> list[tuple[str, float]]:
    bounds = [*map(floatToGoString, reading.bounds), "+Inf"]
    return list(zip(bounds, map(float, reading.cumulative()), strict=True))


def _state_name(state: ServerState, status: info_pb2.ExecutorStatus) -> str:
    """Return the state that GetStatus reports; that of a server whose model never loaded follows its phase."""
    if state.serving is None and state.phase is not Phase.STARTING:
        return "failed" if state.phase is Phase.FAILED else "draining"
    return info_pb2.ExecutorState.Name(status.state).removeprefix("EXECUTOR_STATE_").lower()


def _memory(look: Look) -> dict[str, int]:
    """Return bytes by kind: of the process, and of the device if it has memory of its own."""
    memory, info = look.status.memory, look.serving.engine.info
    kinds = {
        "host_resident": memory.host_resident_bytes,
        "host_peak": memory.host_peak_bytes,
        "weights": info.model.weights_bytes,
        "kv_pool": info.bytes_per_block * info.num_blocks,
    }
    state = look.serving.executor_state()
    if state is None or state.memory is None:
        return kinds
    plan = asdict(state.memory)
    kinds |= {"device_total": plan.pop("total"), "device_free": max(0, plan.pop("free"))}
    kinds |= {"device_allocated": state.device_allocated_bytes, "device_peak": state.device_peak_bytes}
    return kinds | plan


def _steps(look: Look) -> dict[str, int]:
    """Return steps by path; a step that torch and the kernels ran together counts for both."""
    state = look.serving.executor_state()
    if state is None:
        return {look.serving.engine.info.name: look.counters.steps}
    return {"graph": state.num_graph_steps, "launched": state.num_launched_steps, "torch": state.num_torch_steps}


def _short(text: str) -> str:
    """Return the text on one line, cut to the length of a label; a file name may hold bytes that are not UTF-8."""
    return " ".join(text.encode(errors="replace").decode().split())[:_MAX_LABEL_CHARS]
