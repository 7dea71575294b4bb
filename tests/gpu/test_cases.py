"""The cases of layer 3 without a GPU: their kernels run in the simulator, and what is expected of them comes out.

Sizes of a toy model. So a case that passes arguments in the wrong order, or expects something else than the kernel
does, fails here and not in the minutes on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ferrule_server.executor.cuda.driver import Device
from ferrule_server.kernels.cuda.spec import ModelShape, parameters
from tools.cuda_simulator import Launch, Memory
from tools.cuda_simulator import run as simulate
from tools.gpu import attention_cases, cases, measure, run, worker
from tools.gpu.cases import Case, Instance
from tools.gpu.gpu import Call
from tools.gpu.probes import CEILINGS

SHAPE = ModelShape(
    hidden_size=128,
    intermediate_size=192,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=1000,
    has_qk_norm=True,
)
IMMUTABLE = ("bias", "buffer", "k_norm", "norm_weight", "q_norm", "rope", "weight")
"""What kernels may load above their wait."""
GPU: Any = SimpleNamespace(is_dry=False, torch_device=torch.device("cpu"), num_sms=2)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences of a few splits."""
    monkeypatch.setattr(attention_cases, "CONTEXT", 272)


def _simulate(instance: Instance) -> None:
    """Run the calls on copies of their tensors, as one chain, and copy back."""
    memory = Memory()
    tensors: dict[int, tuple[str, Tensor]] = {}

    def place(parameter: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.data_ptr() not in tensors:
            name = f"{parameter}{len(tensors)}"
            memory.put(name, _bytes(value), mutable=parameter not in IMMUTABLE)
            tensors[value.data_ptr()] = name, value
        return memory.address(tensors[value.data_ptr()][0])

    launches = [
        _launch(call, [place(name, call.arguments[name]) for name, _ in parameters(call.spec.kernel)])
        for call in instance.calls
    ]
    simulate(memory, launches, seed=1)
    for name, value in tensors.values():
        value.copy_(torch.from_numpy(memory.get(name)).view(value.dtype).view(value.shape))


def _launch(call: Call, arguments: Sequence[Any]) -> Launch:
    shared = call.spec.shared_bytes if call.shared_bytes is None else call.shared_bytes
    assert shared <= call.spec.shared_bytes
    return Launch(
        call.spec.kernel, dict(call.spec.constants), tuple(arguments), call.grid, call.spec.num_threads, shared
    )


def _bytes(values: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    data: np.ndarray[Any, np.dtype[np.uint8]] = values.contiguous().view(-1).view(torch.uint8).numpy()
    return data


def _check(case: Case) -> float:
    instance = case.build(GPU, 0)
    expected = instance.expect()
    instance.restore()
    _simulate(instance)
    error = instance.check(expected)
    instance.torch_op()
    return error


def _of(op: str) -> list[Case]:
    return cases.cases_of(op, SHAPE)


@pytest.mark.parametrize("op", ["embed"])
def test_cases_expect_what_their_kernels_do(op: str) -> None:
    """The short ones, all of them."""
    for case in _of(op):
        assert _check(case) <= 1, case.name


@pytest.mark.slow
@pytest.mark.parametrize("op", [op for op in run.OPS if op != "embed"])
def test_long_cases_expect_what_their_kernels_do(op: str) -> None:
    """The others."""
    for case in _of(op):
        assert _check(case) <= 1, case.name


def test_checks_notice_a_wrong_result() -> None:
    """A case whose kernel has not run is not right by accident."""
    for op in ("gemv", "add_norm", "embed", "head", "top_k"):
        case = _of(op)[0]
        instance = case.build(GPU, 0)
        assert instance.check(instance.expect()) > 1, case.name


class SimulatedGpu:
    """Launches in the simulator; what is prepared are the calls."""

    is_dry = False
    starts_early = True
    torch_device = torch.device("cpu")
    num_sms = 2

    def load(self, specs: Sequence[object]) -> None:
        """Nothing is loaded."""

    def prepare(self, calls: Sequence[Call]) -> Sequence[Call]:
        """Return them."""
        return calls

    def launch(self, launches: Sequence[Call]) -> None:
        """Simulate a chain."""
        _simulate(Instance(list(launches), [], lambda: None, lambda _: 0.0, lambda: None))

    def synchronize(self) -> None:
        """Nothing is left to wait for."""


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    """With graphs that are the functions they are captured from, and a clock that says 10 us."""
    gpu = SimulatedGpu()
    monkeypatch.setattr(worker, "_gpu", lambda *_: gpu)
    monkeypatch.setattr(worker, "MODEL_SHAPES", {"toy": SHAPE})
    monkeypatch.setattr(measure, "captured", lambda step: step() or SimpleNamespace(replay=step))
    monkeypatch.setattr(measure, "time_us", lambda graph: [10.0, 20.0, 12.0])
    monkeypatch.setattr(measure, "NUM_REPLAYS", 2)
    monkeypatch.setattr(measure, "COLD_BYTES", 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (8, 8))
    return {"shape": "toy", "bundle": None, "dry": None}


def test_worker_checks_replays_and_times(simulated: dict[str, Any]) -> None:
    """Right, the same every time, and how fast beside torch and the ceiling."""
    (result,) = worker.TASKS["op"]({**simulated, "op": "embed", "ceiling_gbs": 100.0})
    assert (result["status"], result["us"]) == ("ok", 12.0)
    assert (result["replays"], result["different"], result["times_torch"]) == (2, 0, 1.0)
    assert result["share_of_ceiling"] == round(result["gbs"] / 100, 3)


@pytest.mark.slow
def test_worker_compares_triggers(simulated: dict[str, Any]) -> None:
    """The same layer three times."""
    results = list(worker.TASKS["trigger"](simulated))
    assert [result["case"].rpartition(" ")[2] for result in results] == ["trigger=early", "trigger=late", "trigger=off"]
    assert {result["status"] for result in results} == {"ok"}


def test_readers_give_the_ceiling(simulated: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what they read whole, and what comes later is compared with the best."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 20, 1 << 20))
    reads: list[float] = []
    monkeypatch.setattr(worker, "_reads_gbs", reads)
    results = list(worker.TASKS["ceiling"](simulated))
    assert [result["status"] for result in results] == ["ok"] * len(CEILINGS)
    assert reads == [pytest.approx(result["gbs"], abs=0.1) for result in results]


def test_a_gpu_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, which the run takes apart."""
    info = SimpleNamespace(name="H100", capability=(9, 0), num_sms=132)
    monkeypatch.setattr(Device, "open", lambda: SimpleNamespace(info=info))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 30, 80 << 30))
    (said,) = worker.TASKS["device"]({})
    assert (said["device"], said["architecture"], said["num_sms"], said["memory_gib"]) == ("H100", "sm_90a", 132, 80.0)
    info = SimpleNamespace(name="T4", capability=(7, 5), num_sms=40)
    assert list(worker.TASKS["device"]({})) == [{"error": "T4 has compute capability 7.5, there are no kernels for it"}]


def test_every_op_of_the_catalog_is_run() -> None:
    """An op that nobody listed would never meet a GPU."""
    from ferrule_server.kernels.cuda import catalog

    assert set(run.OPS) == {op.name for op in catalog.OPS} | {"layer"}
    for op in run.OPS:
        assert _of(op), op


def test_kernels_of_a_run_are_known_beforehand() -> None:
    """A bundle for another machine lacks none: cases and probes."""
    specs = worker.every_spec(["gemv", "embed"], SHAPE)
    names = {spec.kernel.__name__ for spec in specs}
    assert names == {"gemv", "embed", "litmus", "read_range", "read_blocks"}
    assert len(set(specs)) == len(specs)
