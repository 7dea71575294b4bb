"""The stack of docker-compose.yml in real containers: healthy, contained, durable, watched, and rolling under load."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ferrule import Cache, Client, FerruleError, Handle, greedy
from ferrule.errors import EpochChangedError, InstanceUnreachableError
from tests.docker.engine import GRAFANA, Project, docker, has_registry
from tests.stack.fleet import NAMES, Worker, owner
from tests.stack.promql import Prometheus, panels
from tests.stack.traffic import traffic

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]
PANELS = sorted(set(panels()))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """``docker compose up``."""
    with Project(tmp_path_factory.mktemp("plain"), environment={"DRAIN_GRACE": "3s"}) as project:
        yield project


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """``docker compose --profile scale --profile observe up envoy prometheus``, with journals."""
    profiles, journal = ("scale", "observe"), {"DURABLE": "/data/journal", "DRAIN_GRACE": "20s"}
    folder = tmp_path_factory.mktemp("scaled")
    with Project(folder, "envoy", "prometheus", profiles=profiles, environment=journal) as project:
        yield project


def test_it_serves(plain: Project) -> None:
    """On the port that is published, with text; and its health check is content."""
    with Client(plain.target) as client:
        assert client.status().instance == "ferrule"
        assert client.generate("def area(", 8, policy=greedy()).read().text
    assert plain.inspect("ferrule")["State"]["Health"]["Status"] == "healthy"


def test_it_is_contained(plain: Project) -> None:
    """As the engine sees it, and as a process in it does."""
    host = plain.inspect("ferrule")["HostConfig"]
    assert (host["ReadonlyRootfs"], host["CapDrop"], host["Privileged"]) == (True, ["ALL"], False)
    assert "no-new-privileges:true" in host["SecurityOpt"]
    assert (host["Memory"], host["PidsLimit"]) == (4 << 30, 1024)
    assert plain.inspect("ferrule")["NetworkSettings"]["Ports"]["50051/tcp"][0]["HostIp"] == "127.0.0.1"
    said = plain.run("exec", "ferrule", "sh", "-c", "id -u; touch /opt/x; grep CapEff /proc/self/status", check=False)
    assert said.stdout.split() == ["10001", "CapEff:", "0000000000000000"]
    assert "Read-only file system" in said.stderr


def test_it_ends_in_order_and_comes_back(plain: Project) -> None:
    """``docker compose stop`` drains, exit code 0; afterwards handles are of another epoch."""
    with Client(plain.target, timeout=20) as client:
        cache = client.prefill([1, 2, 3])
        client.prefill([1]).release()
        assert plain.stop("ferrule") == 0
        plain.start("ferrule")
        with pytest.raises(EpochChangedError):
            cache.append([4])
        client.release([cache])


def test_a_wrong_setting_ends_with_2_and_a_sentence(tmp_path: Path) -> None:
    """The container tells what is wrong."""
    project = Project(tmp_path, environment={"KV_MEMORY": "lots"})
    try:
        ended = project.run("run", "--rm", "--no-deps", "ferrule", check=False)
        assert ended.returncode == 2, ended.stdout
        assert "FERRULE_KV_MEMORY" in ended.stdout + ended.stderr
    finally:
        project.__exit__()


def test_handles_survive_kill_9(tmp_path: Path) -> None:
    """With DURABLE the same handle goes on after SIGKILL, and after the container itself is made again."""
    with Project(tmp_path, environment={"DURABLE": "/data/journal", "DRAIN_GRACE": "1s"}) as project:
        with Client(project.target, timeout=60) as client, client.prefill("def area(") as cache:
            prompt = cache.info(token_ids=True).token_ids or ()
            with cache.fork() as branch:
                expected = list(branch.generate(12, policy=greedy()))
            list(cache.generate(4, policy=greedy()))
            saved = cache.detach().to_string()
        project.kill("ferrule")
        project.start("ferrule")
        with Client(project.target, timeout=60) as client:
            assert _goes_on(client.adopt(Handle.from_string(saved)), len(prompt)) == expected
        project.run("rm", "--stop", "--force", "ferrule")
        project.start("ferrule")
        with Client(project.target, timeout=60) as client:
            assert _goes_on(client.adopt(Handle.from_string(saved)), len(prompt)) == expected


def _goes_on(cache: Cache, num_of_prompt: int) -> list[int]:
    """Return the 12 tokens after the prompt: those that a sequence has, and those that a branch of it generates."""
    known = list(cache.info(token_ids=True).token_ids or ())[num_of_prompt:]
    with cache.fork() as branch:
        found = known + list(branch.generate(12 - len(known), policy=greedy()))
    cache.detach()
    return found


def test_a_rolling_restart_under_load_fails_nothing(scaled: Project) -> None:
    """Eight clients at work; ``docker compose stop`` and ``up`` of one server after the other."""
    stop = threading.Event()
    workers = [Worker(scaled.target, number, stop) for number in range(8)]
    for worker in workers:
        worker.start()
    try:
        for name in NAMES:
            time.sleep(1)
            assert scaled.stop(name) == 0, "it did not end by itself within the grace"
            scaled.start(name)
            time.sleep(3)  # Envoy asks each second
    finally:
        stop.set()
        for worker in workers:
            worker.join()
    print(f"rolling restart: {sum(worker.appends for worker in workers)} appends")
    assert [failure for worker in workers for failure in worker.failures] == []
    assert sum(worker.appends for worker in workers) > 500
    assert all(sum(worker.owners[name] for worker in workers) > 0 for name in NAMES)


def test_a_killed_server_is_typed_errors_and_its_handles_come_back(scaled: Project) -> None:
    """While it is away its handles are INSTANCE_UNREACHABLE, and others go on; its journal has them when it is back."""
    with Client(scaled.target, timeout=30, max_retries=1) as client:
        caches = [client.prefill([number, 7, 5]) for number in range(16)]
        of_b = [cache for cache in caches if owner(cache) == "ferrule-b"]
        of_a = [cache for cache in caches if owner(cache) == "ferrule-a"]
        assert of_a
        assert of_b
        scaled.kill("ferrule-b")
        with pytest.raises(InstanceUnreachableError):
            of_b[0].append([1])
        of_a[0].append([1])
        client.prefill([9]).release()
        scaled.start("ferrule-b")
        end = time.monotonic() + 20
        while True:  # Envoy asks each second
            try:
                of_b[0].append([1])
                break
            except FerruleError:
                assert time.monotonic() < end
        assert of_b[0].length == 4
        client.release(caches)


def test_prometheus_sees_every_query_of_the_dashboard(scaled: Project) -> None:
    """From a real run: a panel without data is a metric that nobody exports. No alert fires but for what is not up."""
    prometheus = Prometheus(f"127.0.0.1:{scaled.prometheus_port}")
    with traffic(scaled.target):
        for title, expression in PANELS:
            prometheus.wait_for(lambda: bool(prometheus.query(expression)), f"{title}: {expression}", 90)  # noqa: B023
    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert {(rule["health"], rule.get("lastError", "")) for rule in rules} == {("ok", "")}
    targets: dict[str, Any] = prometheus.ask("targets")
    up = {target["discoveredLabels"]["__address__"] for target in targets["activeTargets"] if target["health"] == "up"}
    assert {"ferrule-a:9464", "ferrule-b:9464", "envoy:9464"} <= up


def test_grafana_shows_the_dashboard(tmp_path: Path) -> None:
    """Its image must be pulled; the dashboard itself is tested by tests/stack."""
    if not has_registry():
        pytest.skip("no registry of images: Grafana's image has no stand-in")
    with Project(tmp_path, "ferrule", GRAFANA, profiles=("observe",)) as project:
        assert docker(
            "exec", project.container(GRAFANA), "wget", "-qO-", "http://127.0.0.1:3000/api/dashboards/uid/ferrule"
        )
