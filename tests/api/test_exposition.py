"""Metrics for Prometheus: what the documentation lists is there after real traffic, and nothing else."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from ferrule.v1 import executor_pb2, policy_pb2
from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.rpc.call_counts import name_of
from ferrule_server.api.rpc.observe import Call
from ferrule_server.api.rpc.state import Phase
from ferrule_server.api.serve import SERVICES
from ferrule_server.api.telemetry.metrics import Exposition
from ferrule_server.engine.settings import EngineSettings
from ferrule_server.executor.base import DeviceLost
from tests.api.harness import GREEDY, NOTHING, RunningServer, decode_item, refused, wait_until
from tests.api.test_device_status import STATE, PreparingExecutor
from tests.api.test_durability import figures
from tests.fakes import FakeExecutor
from tests.tools import tool

DOCS = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
_ROW = re.compile(
    r"^\* `((?:ferrule|process)_\w+)(?:\{([\w,]+)\})?` \((gauge|counter|histogram)\): (.+)$", re.MULTILINE
)
OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


class Described(NamedTuple):
    """What a row of the documentation, or a family of the text, says of a metric."""

    name: str
    type: str
    labels: frozenset[str]


def documented() -> set[Described]:
    """Every metric in the lists of docs/metrics.md."""
    rows = _ROW.findall(DOCS)
    assert len(rows) == len({name for name, *_ in rows}), "a metric is listed twice"
    return {Described(name, kind, frozenset(re.findall(r"\w+", labels))) for name, labels, kind, _ in rows}


def text_of(server: RunningServer) -> str:
    """What the server answers to Prometheus."""
    return Exposition(server.state).render()[1].decode()


def values_of(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Each sample by its name and labels; none may be there twice."""
    values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in values, f"{key} is told twice"
            values[key] = sample.value
    return values


def value(server: RunningServer, name: str, **labels: str) -> float:
    """One sample of a server's metrics; 0 where it is not there."""
    return values_of(text_of(server)).get((f"ferrule_{name}", frozenset(labels.items())), 0.0)


def emitted(text: str) -> set[Described]:
    """Every metric in a text, its samples' labels with it; those of buckets left out."""
    found = set()
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = frozenset(label for sample in family.samples for label in sample.labels) - {"le"}
        found.add(Described(name, family.type, labels))
    return found


def make_traffic(server: RunningServer) -> None:
    """Do a bit of everything that is counted."""
    handle = server.prefill().kv_cache
    tip = server.decode(handle, 5).kv_cache
    assert server.decode(handle, 5).replayed
    with refused():
        server.decode(handle, 6)
    branch, *_ = server.fork(tip, 2)
    server.decode(branch, 7)
    drafts = executor_pb2.VerifyInput(kv_cache=tip, input_ids=[7], draft_ids=[8, 9], logits_policy=GREEDY)
    server.stub.ForwardVerify(executor_pb2.ForwardVerifyRequest(input=drafts), timeout=10)
    request = executor_pb2.GenerateRequest(input_ids=[1, 2, 3], logits_policy=GREEDY, max_tokens=4)
    list(server.stub.Generate(request, timeout=10))
    stream = server.open_stream()
    stream.send(decode_item(branch, 99_999_999), None)
    stream.rest()
    server.release(branch)
    health_pb2_grpc.HealthStub(server.channel).Check(health_pb2.HealthCheckRequest(), timeout=10)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    """One on the paged reference, with the figures of a journal."""
    with RunningServer() as running:
        monkeypatch.setattr(running.engine, "durability", figures)
        yield running


# ---- what there is ---------------------------------------------------------------------------------------------------


def test_documentation_and_metrics_agree(server: RunningServer) -> None:
    """After traffic every documented metric is there, with its type and labels, and every metric is documented."""
    make_traffic(server)
    found, told = emitted(text_of(server)), documented()
    assert found - told == set(), "not documented, or not like this"
    assert told - found == set(), "documented and not there"


def test_figures_of_the_journal_are_its_own(server: RunningServer) -> None:
    """Each by its name; and a server without a journal has none of them."""
    names = {
        "healthy": 1,
        "sequences": 12,
        "cold_sequences": 11,
        "tokens_to_recompute": 10_000,
        "directory_bytes": 4_000,
        "restored_total": 9,
        "recomputed_tokens_total": 8,
        "groups_total": 7,
        "syncs_total": 6,
        "written_bytes_total": 5_000,
        "failures_total": 3,
        "snapshots_total": 2,
        "sync_seconds_sum": 1.5,
        "sync_seconds_count": figures().sync_times.count,
    }
    for name, expected in names.items():
        assert value(server, f"durable_{name}") == expected, name
    with RunningServer() as plain:
        assert "ferrule_durable" not in text_of(plain)


def test_queries_of_the_documentation_name_metrics_that_exist() -> None:
    """Whoever copies one gets an answer; and so do the lines for pickers and for those who know vLLM."""
    known = {each.name for each in documented()}
    for name in set(re.findall(r"\b(ferrule_[a-z_]+)\b", DOCS)):
        assert name in known or re.sub(r"_(bucket|sum|count)$", "", name) in known, name


def test_queries_of_the_documentation_are_promql(tmp_path: Path) -> None:
    """Each line of it that is no comment is a query that Prometheus takes."""
    (block,) = re.findall(r"^```promql\n(.*?)^```", DOCS, re.DOTALL | re.MULTILINE)
    queries = [line for line in block.splitlines() if line and not line.startswith("#")]
    assert len(queries) > 8
    rules = [{"record": f"query:{index}", "expr": query} for index, query in enumerate(queries)]
    path = tmp_path / "rules.yml"
    path.write_text(json.dumps({"groups": [{"name": "docs", "rules": rules}]}))  # YAML, too
    run = subprocess.run([tool("promtool"), "check", "rules", str(path)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_promtool_has_nothing_to_say(server: RunningServer) -> None:
    """Neither of the text format nor of the names."""
    make_traffic(server)
    run = subprocess.run(
        [tool("promtool"), "check", "metrics"], input=text_of(server), capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


@pytest.mark.parametrize("accept", [OPENMETRICS, "application/openmetrics-text"])
def test_openmetrics_is_told_to_whoever_accepts_it(server: RunningServer, accept: str) -> None:
    """The strict parser of the format takes it, and finds the same metrics."""
    make_traffic(server)
    content_type, text = Exposition(server.state).render(accept)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    names = {family.name for family in parse_openmetrics(text.decode())}  # type: ignore[no-untyped-call]
    assert {each.name.removesuffix("_total").removesuffix("_info") for each in documented()} == {
        name.removesuffix("_info") for name in names
    }


@pytest.mark.parametrize(
    "accept", ["", "*/*", "text/plain;version=0.0.4", "text/plain;version=x;q=\x00", "a,,;=" * 999]
)
def test_everybody_else_is_told_plain_text(server: RunningServer, accept: str) -> None:
    """Whatever is in the header, which nothing of ours repeats."""
    content_type, text = Exposition(server.state).render(accept)
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert b"ferrule_state" in text


def test_buckets_add_up(server: RunningServer) -> None:
    """Of every histogram: counts rise with the bounds, the last bucket is the count, and the bounds ascend."""
    make_traffic(server)
    for family in text_string_to_metric_families(text_of(server)):
        if family.type != "histogram":
            continue
        by_labels: dict[frozenset[tuple[str, str]], list[tuple[float, float]]] = {}
        totals: dict[frozenset[tuple[str, str]], float] = {}
        for sample in family.samples:
            labels = frozenset(item for item in sample.labels.items() if item[0] != "le")
            if sample.name.endswith("_bucket"):
                by_labels.setdefault(labels, []).append((float(sample.labels["le"]), sample.value))
            elif sample.name.endswith("_count"):
                totals[labels] = sample.value
        assert by_labels.keys() == totals.keys() != set()
        for labels, buckets in by_labels.items():
            assert buckets == sorted(buckets), family.name
            assert [count for _, count in buckets] == sorted(count for _, count in buckets), family.name
            assert buckets[-1] == (float("inf"), totals[labels])


# ---- what is counted -------------------------------------------------------------------------------------------------


def test_figures_are_those_of_what_was_done(server: RunningServer) -> None:
    """A prompt of 19, a decode, its replay, a stale one, two forks: each in its place."""
    handle = server.prefill().kv_cache
    tip = server.decode(handle, 5).kv_cache
    server.decode(handle, 5)
    with refused():
        server.decode(handle, 6)
    server.fork(tip, 2)
    wait_until(lambda: value(server, "rpc_seconds_count", rpc="Decode") == 3)
    seen = values_of(text_of(server))

    def told(name: str, **labels: str) -> float:
        return seen[f"ferrule_{name}", frozenset(labels.items())]

    assert (told("prompt_tokens_total"), told("generated_tokens_total"), told("prefills_total")) == (19, 1, 1)
    assert (told("replays_total"), told("conflicts_total"), told("forks_total")) == (1, 1, 2)
    assert (told("sequences"), told("sequences_created_total")) == (3, 3)
    assert (told("kv_blocks", state="used"), told("kv_blocks_shared"), told("kv_blocks_capacity")) == (2, 2, 511)
    assert told("kv_usage_ratio") == pytest.approx(2 / 511)
    assert told("rpcs_total", rpc="Decode", code="OK", reason="") == 2
    assert told("rpcs_total", rpc="Decode", code="ABORTED", reason="HANDLE_STALE") == 1
    assert told("rpc_seconds_count", rpc="Decode") == 3
    assert told("refused_total", reason="HANDLE_STALE") == 1
    assert told("steps_total", path="paged-reference") == told("step_seconds_count") == 2
    assert (told("step_rows_sum"), told("decode_seconds_count"), told("time_to_first_token_seconds_count")) == (
        20,
        1,
        1,
    )
    assert (told("jobs_running"), told("jobs_waiting"), told("rpcs_in_flight", rpc="Decode")) == (0, 0, 0)
    assert (told("state", state="ready"), told("state", state="busy")) == (1, 0)


def test_items_refused_before_the_engine_are_counted(server: RunningServer) -> None:
    """A stream or batch with bad items is a call that succeeds, and yet somebody was refused."""
    handle = server.prefill().kv_cache
    stream = server.open_stream()
    stream.send(None, decode_item(handle, 99_999_999), decode_item(handle, 5))
    stream.rest()
    items = [
        executor_pb2.DecodeInput(),
        executor_pb2.DecodeInput(input_ids=[1], kv_cache=handle, logits_policy=NOTHING),
    ]
    server.stub.BatchDecode(executor_pb2.BatchDecodeRequest(inputs=items), timeout=10)
    assert value(server, "refused_total", reason="INVALID_FIELD") == 2
    assert value(server, "refused_total", reason="TOKEN_OUT_OF_VOCAB") == 1
    assert value(server, "refused_total", reason="HANDLE_STALE") == 1
    wait_until(lambda: value(server, "rpcs_total", rpc="StreamDecode", code="OK", reason="") == 1)


def test_what_runs_and_what_waits_is_told_while_it_does() -> None:
    """One append in a step, one behind it on the same sequence, one that came since."""
    executor = FakeExecutor()
    with RunningServer(executor) as server:
        handle = server.prefill((1, 2, 3)).kv_cache
        executor.gate = threading.Event()
        stream = server.open_stream()
        stream.send(decode_item(handle, 7))
        assert executor.is_waiting.wait(10)
        stream.send(decode_item(handle, 8), first_seq=1)
        wait_until(lambda: value(server, "jobs_waiting") == 1)
        assert (value(server, "jobs_running"), value(server, "state", state="busy")) == (1, 1)
        assert value(server, "rpcs_in_flight", rpc="StreamDecode") == 1
        executor.gate.set()
        stream.rest()
        wait_until(lambda: value(server, "rpcs_in_flight", rpc="StreamDecode") == 0)
        assert (value(server, "jobs_running"), value(server, "jobs_waiting")) == (0, 0)


def test_who_finds_no_room_in_a_step_waits() -> None:
    """Three prompts and four rows in a step, which two of them share."""
    executor = FakeExecutor()
    with RunningServer(executor, settings=EngineSettings(max_step_rows=4, max_step_time_s=60.0)) as server:
        executor.gate = threading.Event()
        inputs = [
            executor_pb2.PrefillInput(input_ids=range(start, start + 4), logits_policy=GREEDY) for start in (0, 4, 8)
        ]
        call = server.stub.BatchPrefill.future(executor_pb2.BatchPrefillRequest(inputs=inputs), timeout=20)
        assert executor.is_waiting.wait(10)
        assert (value(server, "jobs_running"), value(server, "jobs_waiting")) == (2, 1)
        executor.gate.set()
        call.result()


def test_a_generate_that_nobody_reads_is_parked() -> None:
    """It is told as active and parked, and as neither once the client has gone."""
    executor = FakeExecutor(vocab_size=32768, num_blocks=512, max_context=1024)
    with RunningServer(executor, limits=ApiLimits(max_stream_queue_bytes=1 << 20)) as server:
        full = policy_pb2.LogitsReturnPolicy(sample=policy_pb2.Sample(seed=1), full_logits=policy_pb2.FullLogits())
        call = server.stub.Generate(
            executor_pb2.GenerateRequest(input_ids=[1, 2], logits_policy=full, max_tokens=900), timeout=30
        )
        wait_until(lambda: value(server, "streams_parked") == 1)
        assert value(server, "streams_active") == 1
        call.cancel()
        wait_until(lambda: value(server, "streams_active") == 0)
        assert value(server, "streams_parked") == 0


def test_a_stream_whose_reader_falls_behind_is_counted() -> None:
    """A client that sends what is refused at once and reads nothing loses its stream with SLOW_CONSUMER."""
    bad = executor_pb2.StreamDecodeRequest(items=[executor_pb2.StreamItem(seq=1)] * 100)
    with RunningServer(limits=ApiLimits(max_stream_queue_bytes=64 << 10)) as server:
        call = server.stub.StreamDecode(itertools.repeat(bad, 1000), timeout=20)
        wait_until(lambda: not server.state.streams and server.state.calls.refused_items())
        with refused():
            list(call)
        wait_until(lambda: value(server, "slow_consumers_total") == 1)
        labels = {"rpc": "StreamDecode", "code": "RESOURCE_EXHAUSTED", "reason": "SLOW_CONSUMER"}
        assert value(server, "rpcs_total", **labels) == 1


class _Context:
    """gRPC's side of a call that is not there."""

    def time_remaining(self) -> None:
        """Say that there is no deadline."""


def test_leases_that_run_out_are_counted(server: RunningServer) -> None:
    """Expired, and a tombstone for a while."""
    server.prefill()
    server.clock.offset_s = 100_000.0
    wait_until(lambda: value(server, "expired_total") == 1)
    assert (value(server, "tombstones"), value(server, "sequences"), value(server, "released_total")) == (1, 0, 0)


def test_a_call_that_its_client_gives_up_is_cancelled() -> None:
    """It ends with CANCELLED, and is in flight no more."""
    executor = FakeExecutor()
    with RunningServer(executor) as server:
        executor.gate = threading.Event()
        message = executor_pb2.PrefillInput(input_ids=[1, 2], logits_policy=GREEDY)
        call = server.stub.Prefill.future(executor_pb2.PrefillRequest(input=message), timeout=20)
        assert executor.is_waiting.wait(10)
        call.cancel()
        wait_until(lambda: value(server, "rpcs_total", rpc="Prefill", code="CANCELLED", reason="") == 1)
        executor.gate.set()
        wait_until(lambda: value(server, "rpcs_in_flight", rpc="Prefill") == 0)


def test_how_branches_ended_is_counted(server: RunningServer) -> None:
    """Two branches that reach their limit, and one whose client goes away in the middle."""
    request = executor_pb2.GenerateRequest(input_ids=[1, 2], logits_policy=GREEDY, max_tokens=4, n=2)
    list(server.stub.Generate(request, timeout=10))
    request.ClearField("max_tokens")
    request.n = 1
    call = server.stub.Generate(request, timeout=10)
    next(call)
    call.cancel()
    wait_until(lambda: value(server, "branches_finished_total", finish="cancelled") == 1)
    assert value(server, "branches_finished_total", finish="max_tokens") == 2
    assert value(server, "branches_finished_total", finish="error") == 0


# ---- labels ----------------------------------------------------------------------------------------------------------


def test_what_alerts_ask_for_is_there_before_it_happens() -> None:
    """A series that begins with its first event is never seen to grow by it: those of faults and full queues are 0."""
    executor = FakeExecutor()
    with RunningServer(executor) as server:
        told = values_of(text_of(server))
        assert told["ferrule_faults_total", frozenset()] == 0
        for reason in ("CANCELLED", "ENGINE_FAULT", "HANDLE_STALE", "KV_BLOCKS_EXHAUSTED", "QUEUE_FULL"):
            assert told["ferrule_refused_total", frozenset({("reason", reason)})] == 0, reason
        executor.errors = {1: RuntimeError("a bug"), 2: RuntimeError("a bug")}
        with refused():
            server.prefill((3, 4))
        wait_until(lambda: value(server, "faults_total") == 1)
        assert value(server, "refused_total", reason="ENGINE_FAULT") == 1


def test_no_client_can_make_a_label(server: RunningServer) -> None:
    """Neither by methods that do not exist, nor by what it sends: as many series afterwards as before."""
    make_traffic(server)
    with refused():
        server.prefill(request_id="x" * 5000)
    wait_until(lambda: value(server, "rpcs_total", rpc="Prefill", code="INVALID_ARGUMENT", reason="INVALID_FIELD") == 1)
    before = values_of(text_of(server)).keys()
    for index in range(20):
        for method in (f"ModelExecutorService/Evil{index}", f"Evil{index}/Prefill"):
            with pytest.raises(grpc.RpcError):
                server.raw_unary(method, b"")
        with refused():
            server.prefill(request_id=f"{index}" * 5000)
    assert values_of(text_of(server)).keys() == before


def test_a_method_has_its_name_for_itself() -> None:
    """No two methods are counted as one, whatever service they are of."""
    pool = descriptor_pool.Default()
    methods = [
        Call(service, method.name, _Context())  # type: ignore[arg-type]
        for service in (*SERVICES, "grpc.health.v1.Health")
        for method in pool.FindServiceByName(service).methods
    ]
    names = [name_of(each) for each in methods]
    assert len(names) == len(set(names)) > 25
    assert {"Decode", "TokenizerService/Detokenize", "Health/Check"} < set(names)


# ---- phases ----------------------------------------------------------------------------------------------------------


def test_a_server_that_loads_tells_less() -> None:
    """The state and the calls are there from the start, the rest comes with the engine."""
    with RunningServer(is_loaded=False) as server:
        server.state.load_progress = 0.25
        server.stub.GetStatus(executor_pb2.GetStatusRequest(), timeout=10)
        assert value(server, "state", state="starting") == 1
        assert value(server, "load_progress_ratio") == 0.25
        wait_until(lambda: value(server, "rpcs_total", rpc="GetStatus", code="OK", reason="") == 1)
        names = {each.name for each in emitted(text_of(server))}
        assert "ferrule_kv_blocks" not in names
        server.run(server.make_ready())
        assert (value(server, "state", state="starting"), value(server, "state", state="ready")) == (0, 1)
        assert value(server, "load_progress_ratio") == 1


def test_a_server_that_lost_its_device_says_so() -> None:
    """Failed, with no sequence left, and everything else still told."""
    executor = FakeExecutor()
    with RunningServer(executor) as server:
        server.prefill((1, 2))
        executor.errors[2] = DeviceLost()
        with refused():
            server.prefill((3, 4))
        wait_until(lambda: value(server, "state", state="failed") == 1)
        assert (value(server, "sequences"), value(server, "prefills_total")) == (0, 1)
        assert value(server, "refused_total", reason="HANDLE_LOST") == 1


def test_a_server_that_drains_or_has_stopped_is_still_told() -> None:
    """Whoever asks last, even after everything is closed, gets an answer."""
    with RunningServer() as server:
        server.prefill()
        server.loop.call_soon_threadsafe(server.server.begin_drain, 60.0)
        wait_until(lambda: server.state.phase is not Phase.READY)
        assert value(server, "state", state="draining") == 1
    assert value(server, "state", state="draining") == 1


def test_a_device_with_memory_of_its_own_is_told() -> None:
    """Each kind of memory, each path of a step, what serves and why."""
    executor = PreparingExecutor(kv_memory_bytes=4 << 20)
    with RunningServer(executor) as server:
        seen = {
            dict(labels)["kind"]: bytes_
            for (name, labels), bytes_ in values_of(text_of(server)).items()
            if "memory_bytes" in name and labels
        }
        assert (seen["weights"], seen["kv_pool"], seen["buffers"], seen["graphs"]) == (100, 200, 30, 5)
        assert (seen["device_total"], seen["device_allocated"], seen["device_peak"]) == (900, 330, 340)
        assert [value(server, "steps_total", path=path) for path in ("graph", "launched", "torch")] == [3, 4, 5]
        executor.state = replace(STATE, fallback_reason="a\nreason\t" + "with much to say " * 50)
        (reason,) = (
            dict(labels)["fallback_reason"]
            for name, labels in values_of(text_of(server))
            if name == "ferrule_executor_active"
        )
        assert reason.startswith("a reason with much")
        assert len(reason) <= 160


def test_a_model_whose_name_is_no_text_stops_no_scrape() -> None:
    """A folder may be named in any bytes; Python carries what is no UTF-8 along in a form that cannot be written."""
    executor = FakeExecutor()
    executor.info = replace(executor.info, model=replace(executor.info.model, model_id='m\udcff"x\\\n'))
    with RunningServer(executor) as server:
        (labels,) = (dict(labels) for name, labels in values_of(text_of(server)) if name == "ferrule_info")
        assert labels["model"] == 'm?"x\\'


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_reading_while_everything_changes_raises_nothing() -> None:
    """Two threads read at full speed while others make traffic: no exception, and no counter ever falls."""
    settings = EngineSettings(max_step_time_s=60.0, max_waiting_jobs=4)
    failures: list[BaseException] = []
    stop = threading.Event()
    with RunningServer(FakeExecutor(), settings=settings) as server:
        exposition = Exposition(server.state)

        def read() -> None:
            last: dict[Any, float] = {}
            try:
                while not stop.is_set():
                    now = values_of(exposition.render()[1].decode())
                    for key, number in last.items():
                        assert not key[0].endswith(("_total", "_count", "_bucket")) or now[key] >= number, key
                    last = now
            except BaseException as failure:  # noqa: BLE001 - told by the test
                failures.append(failure)

        def call(seed: int) -> None:
            for index in range(25):
                try:
                    handle = server.prefill((seed, index % 30, 3)).kv_cache
                    request = executor_pb2.GenerateRequest(kv_cache=handle, logits_policy=GREEDY, max_tokens=5, n=2)
                    list(server.stub.Generate(request, timeout=10))
                    server.release(handle)
                    server.decode(handle, 1)
                except grpc.RpcError:
                    continue

        readers = [threading.Thread(target=read) for _ in range(2)]
        callers = [threading.Thread(target=call, args=(seed,)) for seed in range(1, 9)]
        for thread in (*readers, *callers):
            thread.start()
        for thread in callers:
            thread.join()
        stop.set()
        for thread in readers:
            thread.join()
        assert failures == []
        assert value(server, "rpcs_total", rpc="Decode", code="NOT_FOUND", reason="HANDLE_UNKNOWN") > 0
