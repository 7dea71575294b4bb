"""Putting the executor on a GPU together: what is decided before the model is read, and what keeps the kernels away."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ferrule_server.errors import ConfigError
from ferrule_server.executor.cuda import compose
from ferrule_server.executor.cuda.buffers import Limits
from ferrule_server.executor.cuda.compose import GpuOptions, Preparation, prepare
from ferrule_server.executor.cuda.early_launch import EarlyLaunch
from ferrule_server.executor.cuda.gpu import Gpu, GpuError
from ferrule_server.executor.cuda.kernel_build import KernelBuild
from ferrule_server.executor.cuda.kernel_choice import attention_grid, shape_of, specs_needed
from ferrule_server.executor.cuda.memory_plan import format_plan
from ferrule_server.executor.cuda.torch_gpu import TorchGpu
from ferrule_server.executor.fallback.executor import FallbackExecutor
from ferrule_server.executor.torch import TorchExecutor
from ferrule_server.kernels.cuda.spec import KernelSpec
from ferrule_server.kernels.cuda.toolchain.bundle import Bundle, write_bundle
from ferrule_server.kernels.cuda.toolchain.compile import CompileError, Cubin
from ferrule_server.kernels.cuda.toolchain.cubin_cache import CubinCache
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.weights import LoadedModel
from tests.executor.cuda.fake_gpu import CUBIN, FakeGpu
from tests.executor.cuda.tiny_model import tiny_config, tiny_model

GIB = 1 << 30


class Compiler:
    """Has 3 of 9 kernels when it is asked, gets stuck until it is released, and fails then."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[KernelSpec], str, CubinCache, Bundle | None]] = []
        self.has_begun, self.is_released = threading.Event(), threading.Event()

    def __call__(
        self,
        specs: list[KernelSpec],
        architecture: str,
        *,
        cache: CubinCache,
        bundle: Bundle | None,
        progress: Callable[[int, int, str], None],
        **_: object,
    ) -> dict[KernelSpec, Cubin]:
        """Take the place of ``toolchain.build.load_all``."""
        self.asked.append((specs, architecture, cache, bundle))
        progress(3, 9, "embed")
        self.has_begun.set()
        self.is_released.wait(20)
        progress(4, 9, "gemv")
        raise CompileError("no compiler")


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    """No kernel is compiled here."""
    compiler = Compiler()
    monkeypatch.setattr(compose, "KernelBuild", partial(KernelBuild, load=compiler))
    monkeypatch.setattr(compose, "_POLL_S", 0.01)
    yield compiler
    compiler.is_released.set()


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    """Of a model that the kernels can run."""
    return tiny_config()


@pytest.fixture
def model() -> LoadedModel:
    """That model."""
    return tiny_model()


def options(**changes: Any) -> GpuOptions:
    """Return the defaults on a GPU of 4 GiB, whose tensors lie on the CPU."""
    settings: dict[str, Any] = {
        "device": "cpu",
        "free_bytes": 4 * GIB,
        "total_bytes": 4 * GIB,
        "dtype": torch.bfloat16,
        "max_context": 256,
        "kv_memory_bytes": 1 << 20,
    }
    return GpuOptions(**settings | changes)


def opening(gpu: Gpu) -> Callable[[str], Gpu]:
    """Return what opens that GPU."""
    return lambda _: gpu


def no_gpu(device: str) -> Gpu:
    """Find that our driver layer cannot use it."""
    raise GpuError(f"no kernels for {device}")


def prepared(config: ModelConfig, **changes: Any) -> Preparation:
    """Return what is begun on a GPU that does nothing."""
    return prepare(config, options(**changes), open_gpu=opening(FakeGpu()))


def finished(preparation: Preparation, model: LoadedModel) -> FallbackExecutor:
    """Return the executor."""
    return preparation.finish(model)


def test_memory_is_planned_and_kernels_begun_before_the_model_is_read(
    config: ModelConfig, compiler: Compiler, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """The plan is in the log, a line for each use."""
    with caplog.at_level(logging.INFO):
        preparation = prepared(config, kernel_cache=tmp_path)
    assert compiler.has_begun.wait(20)
    ((specs, architecture, cache, bundle),) = compiler.asked
    assert set(specs) == set(specs_needed(shape_of(config), is_deterministic=False))
    assert (architecture, cache.folder, bundle) == (FakeGpu().info.architecture, tmp_path, None)
    plan = preparation.plan
    assert plan.kv_pool == 1 << 20
    assert plan.buffers > 0
    assert plan.graphs > 0
    text = "\n".join(record.getMessage() for record in caplog.records)
    for word in ("weights", "KV pool", "buffers", "workspace", "graphs", "free"):
        assert word in text


def test_the_page_shows_the_plan_as_the_log_does(config: ModelConfig) -> None:
    """The same uses in the same order, in columns."""
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
    shown = page[page.index("memory of the GPU  ") :].partition("```")[0].splitlines()
    printed = format_plan(prepared(config).plan).splitlines()
    assert [line[:18] for line in shown] == [line[:18] for line in printed]
    assert {len(line) for line in shown} == {len(line) for line in printed}


def test_the_executor_serves_in_torch_while_kernels_are_compiled(
    config: ModelConfig, model: LoadedModel, compiler: Compiler
) -> None:
    """Its state has the plan, and what is being prepared; nothing went wrong."""
    executor = finished(prepared(config), model)
    assert compiler.has_begun.wait(20)
    state = executor.state
    num_kernels = len(compiler.asked[0][0])
    assert (state.name, state.fallback_reason) == ("torch", "")
    assert state.preparation == f"compiling kernels, 3 of {num_kernels}"
    assert state.memory is not None
    assert state.memory.kv_pool == executor.info.num_blocks * executor.info.bytes_per_block
    executor.close()


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_what_is_allocated_is_what_was_planned(
    kind: str, is_deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte, but for the gaps between tensors: weights, pool, and all that the kernels need besides."""
    monkeypatch.setattr(compose, "TorchExecutor", partial(TorchExecutor, is_plain=True))
    monkeypatch.setattr(compose, "KernelBuild", partial(KernelBuild, load=_load_stand_ins))
    gpu, config = FakeGpu(), tiny_config(kind)
    settings = options(is_deterministic=is_deterministic, max_context=100)
    preparation = prepare(config, settings, open_gpu=opening(gpu))
    assert preparation.build is not None
    assert preparation.build.wait(20)
    executor = preparation.finish(tiny_model(kind))
    executor._has_decoded = True
    assert is_deterministic or executor.tend()
    memory = executor.state.memory
    assert memory is not None
    taken = sum(call.num_bytes for call in gpu.log if call.name in ("allocate", "adopt"))
    planned = memory.weights + memory.kv_pool + memory.buffers
    assert planned - (1 << 16) < taken <= planned
    executor.close()


def _load_stand_ins(specs: list[KernelSpec], *_: object, **__: object) -> dict[KernelSpec, Cubin]:
    return dict.fromkeys(specs, CUBIN)


def test_without_a_size_the_pool_gets_what_the_fraction_leaves(config: ModelConfig) -> None:
    """Of all memory, whoever uses it."""
    plan = prepared(config, kv_memory_bytes=None, memory_fraction=0.5, free_bytes=3 * GIB).plan
    used = plan.total - plan.free
    assert plan.kv_pool > GIB // 2
    assert 0 <= 2 * GIB - used < 1 << 20


def test_too_little_memory_is_one_error_before_anything_is_begun(config: ModelConfig, compiler: Compiler) -> None:
    """No kernel is compiled for a server that will not start."""
    with pytest.raises(ConfigError, match="--kv-memory"):
        prepared(config, kv_memory_bytes=8 * GIB)
    with pytest.raises(ConfigError, match="--gpu-memory-fraction"):
        prepared(config, kv_memory_bytes=None, memory_fraction=0.05)
    assert compiler.asked == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"reason": "they are switched off"}, "they are switched off"),
        ({"dtype": torch.float32}, "bfloat16"),
    ],
)
def test_kernels_that_may_not_run_leave_it_to_torch_with_the_reason(
    config: ModelConfig, model: LoadedModel, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], reason: str
) -> None:
    """One warning; no buffers are planned and nothing is compiled."""
    preparation = prepared(config, **changes)
    executor = finished(preparation, model)
    assert preparation.build is None
    assert (preparation.plan.buffers, preparation.plan.graphs) == (0, 0)
    assert executor.state.name == executor.info.name == "torch"
    assert reason in executor.state.fallback_reason
    assert [reason in record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [True]
    executor.close()


def test_torch_that_was_asked_for_is_no_fallback(
    config: ModelConfig, model: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody is warned, whatever the kernels would have said."""
    for open_gpu in (opening(FakeGpu()), no_gpu):
        preparation = prepare(config, options(wants_kernels=False), open_gpu=open_gpu)
        assert (preparation.reason, preparation.build, preparation.plan.buffers) == ("", None, 0)
    executor = finished(preparation, model)
    assert (executor.state.name, executor.state.fallback_reason) == ("torch", "")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    executor.close()


def test_a_gpu_that_only_torch_can_use_serves_in_torch(
    config: ModelConfig, model: LoadedModel, compiler: Compiler
) -> None:
    """The package of the driver is missing, or the GPU is too old for the kernels."""
    preparation = prepare(config, options(), open_gpu=no_gpu)
    executor = finished(preparation, model)
    assert executor.state.fallback_reason == "no kernels for cpu"
    assert executor.state.memory == preparation.plan
    assert compiler.asked == []
    executor.close()


def test_the_first_reason_is_told(config: ModelConfig) -> None:
    """What the operator has set before what the machine lacks."""
    preparation = prepare(config, options(reason="they are switched off"), open_gpu=no_gpu)
    assert preparation.reason == "they are switched off"


def test_the_gpu_is_opened_by_the_name_that_torch_has(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its index."""
    seen: list[int] = []

    def record(index: int) -> Gpu:
        seen.append(index)
        return FakeGpu()

    monkeypatch.setattr(TorchGpu, "open", record)
    prepare(config, options(device="cuda:1")).close()
    assert seen == [1]


def test_graphs_that_are_off_are_said(config: ModelConfig, caplog: pytest.LogCaptureFixture) -> None:
    """Steps take the host longer."""
    for has_graphs in (True, False):
        caplog.clear()
        prepared(config, has_graphs=has_graphs).close()
        assert ("--disable-cuda-graphs" in caplog.text) == (not has_graphs)


def test_products_are_summed_in_float32(config: ModelConfig) -> None:
    """It may add partial sums in bfloat16 unless cuBLAS is told not to: an error beyond what the kernels have."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = True
    prepared(config, wants_kernels=False).close()
    assert not matmul.allow_bf16_reduced_precision_reduction


def test_weights_are_there_before_they_are_moved(
    config: ModelConfig, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever made them on the GPU did it in another stream, which ours does not wait for."""
    done: list[object] = []

    def executor(*_: object, **__: object) -> None:
        done.append("executor")
        raise torch.OutOfMemoryError("enough")

    monkeypatch.setattr(torch.cuda, "synchronize", done.append)
    monkeypatch.setattr(compose, "TorchExecutor", executor)
    preparation = prepare(config, options(device="cuda:1"), open_gpu=opening(FakeGpu()))
    with pytest.raises(ConfigError, match="enough"):
        preparation.finish(model)
    assert done == ["cuda:1", "executor"]


@pytest.mark.parametrize(("setting", "trigger"), [("auto", "late"), ("on", "early"), ("off", "off")])
def test_the_runner_gets_what_was_planned(
    *,
    setting: str,
    trigger: str,
    config: ModelConfig,
    model: LoadedModel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Room for graphs, and for the whole of the longest sequence; and when kernels may start, which the log says."""
    caplog.set_level(logging.INFO)
    seen: dict[str, Any] = {}

    def create_runner(_: object, **settings: Any) -> None:
        seen.update(settings)
        raise GpuError("enough")

    monkeypatch.setattr(compose, "create_runner", create_runner)
    monkeypatch.setattr(compose, "KernelBuild", partial(KernelBuild, load=_load_stand_ins))
    gpu = FakeGpu()
    settings = options(max_context=100, has_graphs=False, early_launch=setting)
    preparation = prepare(config, settings, open_gpu=opening(gpu))
    assert preparation.build is not None
    assert preparation.build.wait(20)
    executor = finished(preparation, model)
    assert f"event=early_launch mode={trigger} " in caplog.text
    executor._has_decoded = True
    assert not executor.tend()
    assert (seen["gpu"], seen["is_deterministic"], seen["has_graphs"], seen["failures"]) == (gpu, False, False, {})
    assert seen["graph_bytes"] == preparation.plan.graphs
    assert seen["trigger"] == trigger
    assert seen["limits"] == Limits(max_blocks=7)
    assert seen["num_ctas"] == attention_grid(shape_of(config), gpu.info.num_sms)
    executor.close()


def test_a_gpu_with_too_little_shared_memory_serves_in_torch_from_the_start(
    config: ModelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is compiled, and no step gives the kernels up; in deterministic mode no kernel needs that much."""
    wide, small = replace(config, intermediate_size=32768), opening(FakeGpu(capability=(8, 6)))
    preparation = prepare(wide, options(), open_gpu=small)
    assert (preparation.build, preparation.limits) == (None, None)
    assert preparation.reason.startswith("gemv[")
    assert preparation.reason.endswith("] needs 131264 bytes of shared memory per CTA, Fake GPU has 101376")
    assert prepare(wide, options(wants_kernels=False), open_gpu=small).reason == ""
    for other in (prepare(wide, options(is_deterministic=True), open_gpu=small), prepared(wide)):
        assert other.build is not None
        assert other.reason == ""
        other.close()


@pytest.mark.parametrize(
    ("changes", "open_gpu", "reason"),
    [
        ({"dtype": torch.float32}, opening(FakeGpu()), "bfloat16"),
        ({}, no_gpu, "no kernels for cpu"),
    ],
)
def test_determinism_without_kernels_ends_the_start(
    config: ModelConfig, changes: dict[str, Any], open_gpu: Callable[[str], Gpu], reason: str
) -> None:
    """The promise is about their bits; torch cannot keep it."""
    with pytest.raises(ConfigError, match=f"--deterministic needs the kernels of a GPU: .*{reason}"):
        prepare(config, options(is_deterministic=True, **changes), open_gpu=open_gpu)


def test_a_deterministic_start_waits_for_its_kernels(
    config: ModelConfig, model: LoadedModel, compiler: Compiler
) -> None:
    """Telling how far they are; where there will be none, it ends."""
    told: list[str] = []

    def on_wait(text: str) -> None:
        told.append(text)
        if len(told) == 3:
            compiler.is_released.set()

    preparation = prepared(config, is_deterministic=True)
    assert compiler.has_begun.wait(20)
    assert set(compiler.asked[0][0]) == set(specs_needed(shape_of(config), is_deterministic=True))
    with pytest.raises(ConfigError, match=r"--deterministic.*no compiler"):
        preparation.finish(model, on_wait)
    assert len(told) >= 3
    assert told[0].startswith("compiling kernels, 3 of ")


@pytest.mark.parametrize("content", [None, b"no zip"])
def test_a_bundle_that_is_none_is_a_setting_to_change(
    config: ModelConfig, tmp_path: Path, content: bytes | None, compiler: Compiler
) -> None:
    """Whoever names a file wants it used."""
    path = tmp_path / "kernels.bundle"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"--kernel-bundle: .*kernels\.bundle"):
        prepared(config, kernel_bundle=path)
    assert compiler.asked == []


def test_a_bundle_for_another_gpu_is_refused(config: ModelConfig, tmp_path: Path, compiler: Compiler) -> None:
    """Else everything would be compiled in spite of it; the right one is handed on."""
    path = tmp_path / "kernels.bundle"
    for architecture in ("sm_80", FakeGpu().info.architecture):
        write_bundle(path, architecture, "versions", {})
        if architecture == "sm_80":
            with pytest.raises(ConfigError, match=r"--kernel-bundle: .* for sm_80"):
                prepared(config, kernel_bundle=path)
    prepared(config, kernel_bundle=path)
    assert compiler.has_begun.wait(20)
    bundle = compiler.asked[0][3]
    assert bundle is not None
    assert bundle.path == path


def test_memory_that_somebody_else_took_meanwhile_is_no_fault(
    config: ModelConfig, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the plan and the pool."""

    def refuse(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(compose, "TorchExecutor", refuse)
    with pytest.raises(ConfigError, match="somebody else: CUDA out of memory"):
        prepared(config).finish(model)


def test_the_test_of_early_launch_has_the_gpu_to_itself(
    config: ModelConfig, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has ended before weights and pool are allocated."""
    done: list[str] = []

    def decide(*_: object) -> str:
        done.append("decided")
        return "early"

    def allocate(*_: object, **__: object) -> None:
        done.append("allocated")
        raise torch.OutOfMemoryError("enough")

    monkeypatch.setattr(EarlyLaunch, "decide", decide)
    monkeypatch.setattr(compose, "TorchExecutor", allocate)
    with pytest.raises(ConfigError, match="enough"):
        finished(prepared(config), model)
    assert done == ["decided", "allocated"]


def test_what_was_begun_can_be_ended(config: ModelConfig, compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that cannot be read must leave neither a compiler nor a test behind."""
    gpu, closed = FakeGpu(), list[EarlyLaunch]()
    monkeypatch.setattr(EarlyLaunch, "close", lambda choice: closed.append(choice))  # noqa: PLW0108  (it is bound)
    preparation = prepare(config, options(), open_gpu=opening(gpu))
    preparation.close()
    assert closed == [preparation.early_launch]
    assert gpu.names()[-1] == "close"
    compiler.is_released.set()
    assert preparation.build is not None
    with pytest.raises(GpuError, match="the server ends"):
        preparation.build.result()
