"""Putting the executor on a GPU together: what is decided before the model is read, and what keeps the kernels away."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from ferrule_server.errors import ConfigError
from ferrule_server.executor.cuda import bundle, compose
from ferrule_server.executor.cuda.buffers import Limits
from ferrule_server.executor.cuda.compose import Preparation, prepare
from ferrule_server.executor.cuda.early_launch import EarlyLaunch
from ferrule_server.executor.cuda.gpu import Gpu, GpuError
from ferrule_server.executor.cuda.kernel_choice import shape_of, specs_needed
from ferrule_server.executor.cuda.memory_plan import format_plan
from ferrule_server.executor.cuda.options import GpuOptions
from ferrule_server.executor.cuda.torch_gpu import TorchGpu
from ferrule_server.executor.torch import TorchExecutor
from ferrule_server.kernel_builder.bundles import write_bundle
from ferrule_server.kernels.cuda.catalog import merged
from ferrule_server.kernels.cuda.spec import Cubin, KernelSpec, ModelShape
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.weights import LoadedModel
from tests.configs import with_layers
from tests.executor.cuda.fake_gpu import FakeGpu
from tests.executor.cuda.tiny_model import tiny_config, tiny_model

GIB = 1 << 30


@pytest.fixture(autouse=True)
def bundles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which bundles are looked for; empty."""
    folder = tmp_path / "bundles"
    folder.mkdir()
    monkeypatch.setattr(bundle, "_places", lambda: [folder])
    return folder


def write(path: Path, specs: Iterable[KernelSpec], **changes: Any) -> Path:
    """Write a bundle of stand-ins for sm_90a."""
    cubins = {spec: Cubin(spec.kernel.__name__, b"early", b"late") for spec in specs}
    write_bundle(path, **{"architecture": "sm_90a", "cubins": cubins, "cuda": (12, 9)} | changes)
    return path


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    """Of a model that the kernels can run."""
    return tiny_config()


@pytest.fixture(scope="module")
def specs(config: ModelConfig) -> list[KernelSpec]:
    """Every kernel of that model."""
    return specs_needed(shape_of(config), is_deterministic=False)


@pytest.fixture
def _whole(bundles: Path, specs: list[KernelSpec]) -> None:
    """Have a bundle with all of them."""
    write(bundles / "sm_90a.bundle", specs)


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


def prepared(config: ModelConfig, *, open_gpu: Callable[[str], Gpu] | None = None, **changes: Any) -> Preparation:
    """Return what is begun, on a GPU that does nothing unless another is opened."""
    return prepare(config, options(**changes), open_gpu=open_gpu or opening(FakeGpu()))


@pytest.mark.usefixtures("_whole")
def test_memory_is_planned_and_kernels_are_found_before_the_model_is_read(
    config: ModelConfig, specs: list[KernelSpec], caplog: pytest.LogCaptureFixture
) -> None:
    """The plan is in the log, a line for each use; so is where the kernels are from."""
    with caplog.at_level(logging.INFO):
        preparation = prepared(config)
    assert preparation.kernels is not None
    assert set(preparation.kernels.cubins) == set(specs)
    plan = preparation.plan
    assert plan.kv_pool == 1 << 20
    assert plan.buffers > 0
    assert plan.graphs > 0
    text = "\n".join(record.getMessage() for record in caplog.records)
    for word in ("weights", "KV pool", "buffers", "workspace", "graphs", "free"):
        assert word in text
    assert f"num={len(specs)} wanted={len(specs)} architecture=sm_90a bundle=" in text


def test_the_page_shows_the_plan_as_the_log_does(config: ModelConfig) -> None:
    """The same uses in the same order, in columns."""
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
    shown = page[page.index("memory of the GPU  ") :].partition("```")[0].splitlines()
    printed = format_plan(prepared(config).plan).splitlines()
    assert [line[:18] for line in shown] == [line[:18] for line in printed]
    assert {len(line) for line in shown} == {len(line) for line in printed}


def test_without_a_bundle_torch_serves_and_says_what_to_do(
    config: ModelConfig, model: LoadedModel, bundles: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, and the same reason in the state; nothing is compiled."""
    executor = prepared(config).finish(model)
    reason = executor.state.fallback_reason
    assert reason == (
        f"no kernels for compute capability 9.0 in {bundles}, which has nothing; install the ferrule-kernels of this "
        "version, or run `make kernels` in a checkout of it"
    )
    assert executor.state.name == "torch"
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == [f"event=torch_serves reason={reason!r}"]
    executor.close()


@pytest.mark.parametrize("lacking", ["draw", "embed"])
def test_a_kernel_that_the_bundle_lacks_leaves_every_step_to_torch(
    config: ModelConfig, specs: list[KernelSpec], bundles: Path, lacking: str
) -> None:
    """Its name, with constants, and the bundle are said; no memory is planned for kernels."""
    path = write(bundles / "sm_90a.bundle", [spec for spec in specs if spec.kernel.__name__ != lacking])
    preparation = prepared(config)
    first = next(spec for spec in specs if spec.kernel.__name__ == lacking)
    reason = f"{first.name} is not in {path}; build the kernels of this model (tools/kernels/README.md)"
    assert (preparation.kernels, preparation.reason, preparation.plan.buffers) == (None, reason, 0)
    with pytest.raises(ConfigError, match=rf"--deterministic needs the kernels of a GPU: {lacking}"):
        prepared(config, is_deterministic=True)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_what_is_allocated_is_what_was_planned(
    kind: str, is_deterministic: bool, bundles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte, but for the gaps between tensors: weights, pool, and all that the kernels need besides."""
    monkeypatch.setattr(compose, "TorchExecutor", partial(TorchExecutor, is_plain=True))
    gpu, config = FakeGpu(), tiny_config(kind)
    write(bundles / "sm_90a.bundle", specs_needed(shape_of(config), is_deterministic=is_deterministic))
    settings = options(is_deterministic=is_deterministic, max_context=100)
    executor = prepare(config, settings, open_gpu=opening(gpu)).finish(tiny_model(kind))
    executor._has_decoded = True
    assert is_deterministic or executor.tend()
    memory = executor.state.memory
    assert memory is not None
    taken = sum(call.num_bytes for call in gpu.log if call.name in ("allocate", "adopt"))
    planned = memory.weights + memory.kv_pool + memory.buffers
    assert planned - (1 << 16) < taken <= planned
    executor.close()


def test_without_a_size_the_pool_gets_what_the_fraction_leaves(config: ModelConfig) -> None:
    """Of all memory, whoever uses it."""
    plan = prepared(config, kv_memory_bytes=None, memory_fraction=0.5, free_bytes=3 * GIB).plan
    used = plan.total - plan.free
    assert plan.kv_pool > GIB // 2
    assert 0 <= 2 * GIB - used < 1 << 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_memory_bytes": 8 * GIB}, "--kv-memory"),
        ({"kv_memory_bytes": None, "memory_fraction": 0.05}, "--gpu-memory-fraction"),
        ({"is_deterministic": True, "dtype": torch.float32}, "--deterministic needs the kernels of a GPU: .*bfloat16"),
        (
            {"is_deterministic": True, "open_gpu": no_gpu},
            "--deterministic needs the kernels of a GPU: .*no kernels for",
        ),
        ({"kernel_bundle": Path("missing.bundle")}, r"--kernel-bundle: .*missing\.bundle"),
        ({"kernel_bundle": Path(__file__)}, r"--kernel-bundle: .*test_compose\.py"),
    ],
)
def test_a_start_that_cannot_keep_its_settings_ends(config: ModelConfig, changes: dict[str, Any], message: str) -> None:
    """One error names the setting. Torch cannot keep the promise of bits; a bundle that is named must be used."""
    with pytest.raises(ConfigError, match=message):
        prepared(config, **changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"reason": "they are switched off"}, "they are switched off"),
        ({"reason": "they are switched off", "open_gpu": no_gpu}, "they are switched off"),
        ({"dtype": torch.float32}, "bfloat16"),
        ({"open_gpu": no_gpu}, "no kernels for cpu"),
    ],
)
def test_kernels_that_may_not_run_leave_it_to_torch_with_the_reason(
    config: ModelConfig, model: LoadedModel, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], reason: str
) -> None:
    """One warning; no buffers are planned. What the operator has set is told before what the machine lacks."""
    preparation = prepared(config, **changes)
    executor = preparation.finish(model)
    assert preparation.kernels is None
    assert (preparation.plan.buffers, preparation.plan.graphs) == (0, 0)
    assert executor.state.name == executor.info.name == "torch"
    assert reason in executor.state.fallback_reason
    assert executor.state.memory == preparation.plan
    assert [reason in record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [True]
    executor.close()


def test_kernels_that_are_missing_are_built(config: ModelConfig, specs: list[KernelSpec], tmp_path: Path) -> None:
    """If a bundle is there that lacks some, too; what is installed and whole needs no compiler."""
    asked: list[tuple[int, int]] = []

    def build(_: ModelShape, capability: tuple[int, int]) -> Path:
        asked.append(capability)
        write(tmp_path / "built.bundle", specs)
        return tmp_path / "built.bundle"

    preparation = prepared(config, build=build)
    assert preparation.kernels is not None
    assert preparation.kernels.bundle == tmp_path / "built.bundle"
    assert set(preparation.kernels.cubins) == set(specs)
    assert asked == [FakeGpu().info.capability]


@pytest.mark.usefixtures("_whole")
def test_kernels_that_are_there_are_not_built(config: ModelConfig) -> None:
    """Nobody is asked."""

    def build(_: ModelShape, __: tuple[int, int]) -> Path:
        raise AssertionError

    assert prepared(config, build=build).kernels is not None


def test_a_compiler_that_is_missing_leaves_it_to_torch_with_one_advice(config: ModelConfig) -> None:
    """The reason says what is missing and names one command."""

    def build(_: ModelShape, __: tuple[int, int]) -> Path:
        raise GpuError("the compiler of GPU kernels is not installed; pip install 'ferrule-server[cuda]'")

    preparation = prepared(config, build=build)
    assert preparation.kernels is None
    assert preparation.reason.endswith("not installed; pip install 'ferrule-server[cuda]'")
    assert "make kernels" not in preparation.reason


def test_torch_that_was_asked_for_is_no_fallback(
    config: ModelConfig, model: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody is warned, whatever the kernels would have said."""
    for open_gpu in (opening(FakeGpu()), no_gpu):
        preparation = prepare(config, options(wants_kernels=False), open_gpu=open_gpu)
        assert (preparation.reason, preparation.kernels, preparation.plan.buffers) == ("", None, 0)
    executor = preparation.finish(model)
    assert (executor.state.name, executor.state.fallback_reason) == ("torch", "")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    executor.close()


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
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = True
    prepared(config, wants_kernels=False).close()
    assert not matmul.allow_bf16_reduced_precision_reduction
    assert not matmul.allow_fp16_reduced_precision_reduction


@pytest.mark.usefixtures("_whole")
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

    def make_runner(_: object, **settings: Any) -> None:
        seen.update(settings)
        raise GpuError("enough")

    monkeypatch.setattr(compose, "CudaDecodeRunner", make_runner)
    gpu = FakeGpu()
    settings = options(max_context=100, has_graphs=False, early_launch=setting)
    preparation = prepare(config, settings, open_gpu=opening(gpu))
    executor = preparation.finish(model)
    assert f"event=early_launch mode={trigger} " in caplog.text
    executor._has_decoded = True
    assert not executor.tend()
    assert (seen["gpu"], seen["is_deterministic"], seen["has_graphs"]) == (gpu, False, False)
    assert seen["graph_bytes"] == preparation.plan.graphs
    assert seen["trigger"] == trigger
    assert seen["limits"] == Limits(max_blocks=7)
    executor.close()


def test_a_kernel_that_takes_more_shared_memory_than_there_is_leaves_every_step_to_torch(
    config: ModelConfig, bundles: Path
) -> None:
    """From the start: no step finds out; in deterministic mode no kernel needs that much."""
    wide, small = with_layers(config, intermediate_size=32768), opening(FakeGpu(capability=(8, 6)))
    shape = shape_of(wide)
    modes = (specs_needed(shape, is_deterministic=mode, limit=99 << 10) for mode in (False, True))
    specs = merged(chain.from_iterable(modes))
    write(bundles / "sm_80.bundle", specs, architecture="sm_80")
    preparation = prepare(wide, options(), open_gpu=small)
    assert preparation.kernels is None
    assert preparation.reason.startswith("gemv[")
    assert preparation.reason.endswith("] needs 131264 bytes of shared memory per CTA, Fake GPU has 101376")
    assert prepare(wide, options(is_deterministic=True), open_gpu=small).kernels is not None


def test_a_bundle_for_another_gpu_is_refused(config: ModelConfig, specs: list[KernelSpec], tmp_path: Path) -> None:
    """Another place is not looked at; the right one is used."""
    path = write(tmp_path / "kernels.bundle", specs, architecture="sm_80")
    with pytest.raises(ConfigError, match=r"--kernel-bundle: .* is for sm_80, the GPU has compute capability 9\.0"):
        prepared(config, kernel_bundle=path)
    assert prepared(config, kernel_bundle=write(path, specs)).kernels is not None


@pytest.mark.usefixtures("_whole")
def test_what_has_the_gpu_to_itself_has_ended_before_the_pool_is_allocated(
    config: ModelConfig, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test of early launch, and another stream that made weights; memory that others took is no fault."""
    done: list[object] = []

    def decide(*_: object) -> str:
        done.append("decided")
        return "early"

    def allocate(*_: object, **__: object) -> None:
        done.append("allocated")
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(EarlyLaunch, "decide", decide)
    monkeypatch.setattr(torch.cuda, "synchronize", done.append)
    monkeypatch.setattr(compose, "TorchExecutor", allocate)
    preparation = prepared(config, device="cuda:1")
    with pytest.raises(ConfigError, match="somebody else: CUDA out of memory"):
        preparation.finish(model)
    assert sorted(map(str, done[:-1])) == ["cuda:1", "decided"]
    assert done[-1] == "allocated"


@pytest.mark.usefixtures("_whole")
def test_what_was_begun_can_be_ended(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that cannot be read must leave no test behind."""
    gpu, closed = FakeGpu(), list[EarlyLaunch]()
    monkeypatch.setattr(EarlyLaunch, "close", lambda choice: closed.append(choice))  # noqa: PLW0108  (it is bound)
    preparation = prepare(config, options(), open_gpu=opening(gpu))
    preparation.close()
    assert closed == [preparation.early_launch]
    assert gpu.names()[-1] == "close"
