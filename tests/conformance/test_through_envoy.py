"""The examples behind a proxy: what they say of a handle's instance leads each call to the server that has it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import grpc
import pytest

from ferrule.v1 import executor_pb2, executor_pb2_grpc
from tests.conformance.languages import EXAMPLES, Missing
from tests.conformance.servers import Servers
from tests.conformance.test_languages import COMMANDS, absent, said
from tools.compose.envoy import EnvoyProcess

INSTANCES = ("ferrule-a", "ferrule-b")
RUNS = 4

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Addresses of two servers by instance, and of the Envoy in front of them as ``envoy``."""
    folder = tmp_path_factory.mktemp("envoy")
    with Servers(folder) as servers:
        found = {name: servers.named(name) for name in INSTANCES}
        ports = {name: int(target.rpartition(":")[2]) for name, target in found.items()}
        with EnvoyProcess(folder, ports) as envoy:
            envoy.wait_for_healthy(set(ports.values()))
            yield {**found, "envoy": f"127.0.0.1:{envoy.port}"}


@pytest.mark.parametrize("language", ["python", *COMMANDS])
def test_an_example_behind_a_proxy_finds_its_handles(language: str, targets: dict[str, str]) -> None:
    """Run after run the same text, whichever server took the prompt; both have taken some."""
    try:
        command = (
            [sys.executable, str(EXAMPLES / "python" / "raw_stubs.py")]
            if language == "python"
            else COMMANDS[language]()
        )
    except Missing as missing:
        absent(missing)
    texts = {said(command, targets["envoy"]) for _ in range(RUNS)}
    assert texts == {said(command, targets[INSTANCES[0]])}


def test_both_servers_took_prompts(targets: dict[str, str]) -> None:
    """Else the proxy had nothing to route."""
    for name in INSTANCES:
        with grpc.insecure_channel(targets[name]) as channel:
            stub = executor_pb2_grpc.ModelExecutorServiceStub(channel)
            status = stub.GetStatus(executor_pb2.GetStatusRequest(), timeout=20).status
        assert status.num_prefills >= 2
        assert status.live_sequences == 0
