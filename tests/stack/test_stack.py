"""The stack of docker-compose.yml comes up from its own files, serves, tells Prometheus, and goes down in order."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ferrule import Cache, Client
from ferrule.types import Append
from tests.stack.promql import DASHBOARD, Prometheus, panels
from tests.stack.traffic import traffic
from tests.tools import KERNEL_CACHE, tool
from tools.compose.compose_file import ROOT
from tools.compose.stack import Stack

SMALL = {"KV_MEMORY": "64MiB"}
PANELS = sorted(set(panels()))


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two servers behind Envoy, after a while of traffic that is not over, with a Prometheus that looks on."""
    tool("prometheus")
    folder = tmp_path_factory.mktemp("stack")
    names, profiles = ("envoy", "grafana"), ("scale", "observe")
    on_top = [ROOT / "deploy" / "compose.durable.yml"]  # the dashboard has a row for the journal
    with Stack(folder, names, profiles=profiles, on_top=on_top, environment=SMALL, scrape_interval="1s") as stack:
        assert stack.left_out == ["grafana"]
        prometheus = Prometheus(stack.address("prometheus", 9090))
        with traffic(stack.address("envoy", 50051)):
            prometheus.wait_for(lambda: len(prometheus.query("rate(ferrule_step_seconds_count[5s]) > 0")) == 2)
            time.sleep(4)
            yield stack
        assert stack.stop_all() == dict.fromkeys(stack.names[:-1], 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "expression"), PANELS, ids=[f"{title}-{index}" for index, (title, _) in enumerate(PANELS)]
)
def test_every_query_of_the_dashboard_returns_data(observed: Stack, title: str, expression: str) -> None:
    """From a real run: a panel without data is a metric that nobody exports, or a label that it does not have."""
    prometheus = Prometheus(observed.address("prometheus", 9090))
    prometheus.wait_for(lambda: bool(prometheus.query(expression)), what=f"{title}: {expression}")


@pytest.mark.slow
def test_every_alert_is_evaluated_and_none_fires_on_good_servers(observed: Stack) -> None:
    """Two of four servers that Prometheus knows never were: that alone is nothing to be told of."""
    prometheus = Prometheus(observed.address("prometheus", 9090))
    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert len(rules) > 10
    assert {(rule["name"], rule["health"], rule.get("lastError", "")) for rule in rules} == {
        (rule["name"], "ok", "") for rule in rules
    }
    assert [rule["name"] for rule in rules if rule["state"] == "firing"] == []
    for rule in rules:
        prometheus.ask("query", query=rule["query"])


@pytest.mark.slow
def test_prometheus_finds_every_server_that_runs(observed: Stack) -> None:
    """By the targets of its own file; what is not up is down and not an error."""
    prometheus = Prometheus(observed.address("prometheus", 9090))
    addresses = {name: observed.address(name, 9464) for name in ("ferrule-a", "ferrule-b", "envoy")}
    up = {labels["instance"]: value for labels, value in prometheus.query("up")}
    assert {name: up[address] for name, address in addresses.items()} == dict.fromkeys(addresses, 1.0)
    assert sum(up.values()) == 4  # and Prometheus itself
    shown = {labels["instance"] for labels, _ in prometheus.query("ferrule_info")}
    assert shown == {addresses["ferrule-a"], addresses["ferrule-b"]}
    assert {labels["exported_instance"] for labels, _ in prometheus.query("ferrule_info")} == {"ferrule-a", "ferrule-b"}


@pytest.mark.slow
def test_a_server_that_dies_is_told(observed: Stack) -> None:
    """The alert waits for its minute; one that was never up does not wait."""
    prometheus = Prometheus(observed.address("prometheus", 9090))
    down = f'ALERTS{{alertname="FerruleServerDown", instance="{observed.address("ferrule-b", 9464)}"}}'
    assert prometheus.query(down) == []
    observed.processes["ferrule-b"].kill()
    observed.processes["ferrule-b"].wait()
    prometheus.wait_for(lambda: len(prometheus.query(down)) == 1)
    assert len(prometheus.query('ALERTS{alertname="FerruleServerDown"}')) == 1
    observed.start("ferrule-b")
    observed.wait_until_healthy("ferrule-b")
    prometheus.wait_for(lambda: prometheus.query(down) == [])


def test_the_plain_stack_serves_and_stops(tmp_path: Path) -> None:
    """``docker compose up`` and ``stop``: healthy by its own check, answers, and ends with 0 in its time."""
    with Stack(tmp_path, environment=SMALL, settings={"FERRULE_KERNEL_CACHE": KERNEL_CACHE}) as stack:
        assert stack.names == ["ferrule"]
        with Client(stack.address("ferrule", 50051)) as client:
            assert client.status().instance == "ferrule"
            assert len(client.generate("def area(", 4).read().text) > 0
        assert stack.stop_all() == {"ferrule": 0}
        assert not stack.is_healthy("ferrule")


@pytest.mark.slow
def test_the_server_of_the_gpu_says_that_there_is_none(tmp_path: Path) -> None:
    """Its command and variables are understood; without a GPU it ends with 2 and one sentence."""
    stack = Stack(tmp_path, ("ferrule-gpu",), profiles=("gpu",), settings={"CUDA_VISIBLE_DEVICES": ""})
    stack.start("ferrule-gpu")
    assert stack.processes["ferrule-gpu"].wait(60) == 2
    assert "FERRULE_DEVICE=cuda" in stack.log("ferrule-gpu")


def test_the_dashboard_is_what_is_written_for_it() -> None:
    """``python deploy/grafana/dashboard.py`` was run after the last change."""
    command = [sys.executable, str(ROOT / "deploy" / "grafana" / "dashboard.py"), "-"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert made == DASHBOARD.read_text()


@pytest.mark.slow
def test_an_upgrade_of_one_server_after_the_other_fails_nobody(tmp_path: Path) -> None:
    """As the page has it: who holds handles goes on, who begins gets the other server, and both end with 0."""
    with Stack(tmp_path, ("envoy",), profiles=("scale",), environment=SMALL) as stack:
        with (
            Client(stack.address("envoy", 50051)) as client,
            client.stream() as stream,
            ThreadPoolExecutor() as pool,
        ):
            for name in ("ferrule-a", "ferrule-b"):
                caches = [client.prefill([1, 2, number]) for number in range(8)]
                assert {_instance(cache) for cache in caches} == {"ferrule-a", "ferrule-b"}
                stopped = pool.submit(stack.stop, name)
                for number in range(20):
                    stream.run([Append(cache, number) for cache in caches])
                    with client.prefill([3, number]) as fresh:
                        assert number < 10 or _instance(fresh) != name
                    time.sleep(0.1)
                assert not stopped.done()
                client.release(caches)
                assert stopped.result(40) == 0
                stack.start(name)
                stack.wait_until_healthy(name)
                time.sleep(2)  # Envoy asks each second
        assert stack.stop_all() == dict.fromkeys(stack.names, 0)


def _instance(cache: Cache) -> str:
    return cache.handle.instance
