"""What GetStatus and GetCapabilities say of an executor that prepares things on a device of its own."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from ferrule import Client
from ferrule.v1 import executor_pb2, info_pb2, types_pb2
from ferrule_cli.app import main
from ferrule_server.composition import serving_of
from ferrule_server.config import ServerConfig
from ferrule_server.executor.base import ExecutorState, MemoryPlan, PendingStep, StepBatch
from ferrule_server.executor.reference import PagedReferenceExecutor
from ferrule_server.loading import LoadedExecutor
from tests.api.harness import RunningServer

PLAN = MemoryPlan(total=900, weights=100, kv_pool=200, buffers=30, workspace=40, graphs=5, free=525)
STATE = ExecutorState(
    name="torch",
    preparation="capturing graphs, 3 left",
    memory=PLAN,
    captured_batch_sizes=(1, 2, 8),
    num_graph_steps=3,
    num_launched_steps=4,
    num_torch_steps=5,
    device_allocated_bytes=330,
    device_peak_bytes=340,
)


class PreparingExecutor(PagedReferenceExecutor):
    """The paged reference with a state that is set from outside; takes no step ahead."""

    state: ExecutorState = STATE

    def can_submit(self, batch: StepBatch) -> bool:
        """Return that every step runs at once."""
        return False

    def submit(self, batch: StepBatch) -> PendingStep:
        """Fail: nobody may ask."""
        raise AssertionError("it said that it cannot")

    def tend(self) -> bool:
        """Return that there is nothing to do."""
        return False


def _status(server: RunningServer) -> info_pb2.ExecutorStatus:
    return server.stub.GetStatus(executor_pb2.GetStatusRequest(), timeout=20).status


def _capabilities(server: RunningServer) -> info_pb2.ExecutorCapabilities:
    return server.stub.GetCapabilities(executor_pb2.GetCapabilitiesRequest(), timeout=20).capabilities


@pytest.fixture
def executor() -> PreparingExecutor:
    """One that is still compiling."""
    return PreparingExecutor(kv_memory_bytes=4 << 20)


def test_status_tells_what_is_prepared_and_what_the_memory_is_for(executor: PreparingExecutor) -> None:
    """Each field of the executor's state has its place, and follows it."""
    with RunningServer(executor) as server:
        status = _status(server)
        assert (status.executor, status.fallback_reason) == ("torch", "")
        assert status.debug["preparation"] == "capturing graphs, 3 left"
        plan = {name: status.debug[f"memory_plan.{name}_bytes"] for name in asdict(PLAN)}
        assert plan == {name: str(size) for name, size in asdict(PLAN).items()}
        memory = status.memory
        assert (memory.device_total_bytes, memory.device_allocated_bytes, memory.device_peak_bytes) == (900, 330, 340)
        assert status.debug["captured_batch_sizes"] == "1,2,8"
        assert [status.debug[f"{how}_steps"] for how in ("graph", "launched", "torch")] == ["3", "4", "5"]
        executor.state = replace(STATE, name="numba-cuda", preparation="", num_graph_steps=99)
        later = _status(server)
        assert (later.executor, later.debug["graph_steps"]) == ("numba-cuda", "99")
        assert "preparation" not in later.debug


def test_steps_queued_ahead_are_counted() -> None:
    """By the engine, on any executor."""
    with RunningServer() as server:
        server.engine.counters.queued_steps, server.engine.counters.discarded_rows = 5, 2
        status = _status(server)
        assert (status.debug["queued_steps"], status.debug["discarded_rows"]) == ("5", "2")


def test_a_fallback_is_told_with_its_reason(executor: PreparingExecutor) -> None:
    """As the state has it now, whatever was expected at the start; a plan that does not add up stays readable."""
    with RunningServer(executor) as server:
        plan = replace(PLAN, free=-7)
        executor.state = ExecutorState("torch", fallback_reason="kernels: no memory for a graph", memory=plan)
        status = _status(server)
        assert status.fallback_reason == "kernels: no memory for a graph"
        assert status.debug["memory_plan.free_bytes"] == "0"


def test_an_executor_without_a_device_of_its_own_leaves_all_of_it_unset() -> None:
    """No plan, no zeros that look like one."""
    with RunningServer() as server:
        status = _status(server)
        assert (status.executor, status.fallback_reason) == ("paged-reference", "")
        assert set(status.debug) == {"queued_steps", "discarded_rows", "tokenizer"}
        assert (status.memory.device_allocated_bytes, status.memory.device_total_bytes) == (0, 0)
        assert info_pb2.FEATURE_DETERMINISTIC not in _capabilities(server).features


def test_the_device_goes_by_its_drivers_name() -> None:
    """Its number where nobody has asked the driver."""
    for name, shown in (("NVIDIA H100", "NVIDIA H100"), ("", "cuda:0")):
        executor = PreparingExecutor(kv_memory_bytes=4 << 20)
        executor.info = replace(executor.info, device="cuda:0", device_name=name)
        with RunningServer(executor) as server:
            model = server.stub.GetModelInfo(executor_pb2.GetModelInfoRequest(), timeout=20).info
            assert (model.device_name, model.device_type) == (shown, types_pb2.DEVICE_TYPE_CUDA)


def test_the_process_hands_state_and_promise_on(executor: PreparingExecutor) -> None:
    """From the settings and the executor to what describes them."""
    with RunningServer(executor) as server:
        config = ServerConfig(is_deterministic=True)
        serving = serving_of(config, server.state, server.engine, LoadedExecutor(executor, None))
        assert serving.is_deterministic
        assert serving.executor_state() is STATE


def test_determinism_is_announced_where_it_is_kept(executor: PreparingExecutor) -> None:
    """The flag of the settings becomes a feature."""
    with RunningServer(executor, is_deterministic=True) as server:
        assert info_pb2.FEATURE_DETERMINISTIC in _capabilities(server).features


def test_the_client_reads_it_and_the_command_line_says_it(
    executor: PreparingExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    """``Client.status`` has every field; ``ferrule health`` a line for what is prepared, or for what went wrong."""
    with RunningServer(executor) as server, Client(server.address.target) as client:
        status = client.status()
        assert (status.debug["memory_plan.kv_pool_bytes"], status.debug["captured_batch_sizes"]) == ("200", "1,2,8")
        assert (status.debug["preparation"], status.debug["torch_steps"]) == ("capturing graphs, 3 left", "5")
        assert main(["health", "--target", server.address.target]) == 0
        assert capsys.readouterr().out.splitlines()[1:] == ["preparing: capturing graphs, 3 left"]
        executor.state = ExecutorState("torch", fallback_reason="there is no GPU")
        assert "memory_plan.kv_pool_bytes" not in client.status().debug
        assert main(["health", "--target", server.address.target]) == 0
        assert capsys.readouterr().out.splitlines()[1:] == ["fallback: there is no GPU"]
        assert main(["health", "--json", "--target", server.address.target]) == 0
        assert json.loads(capsys.readouterr().out)["debug"]["graph_steps"] == "0"
