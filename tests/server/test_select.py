"""Choosing the executor: the kernels of the device by default, and torch where they cannot run."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks import make_random_model
from ferrule_server import loading as select
from ferrule_server import named_models
from ferrule_server.config import ServerConfig
from ferrule_server.errors import ConfigError, ModelError
from ferrule_server.executor import devices
from ferrule_server.executor.base import Executor, PipelinedExecutor
from ferrule_server.executor.cpu.executor import NumbaCpuExecutor
from ferrule_server.executor.cuda import bundle, compose
from ferrule_server.executor.cuda.gpu import GpuError
from ferrule_server.executor.cuda.options import GpuOptions
from ferrule_server.executor.cuda.torch_gpu import TorchGpu
from ferrule_server.executor.devices import Device
from ferrule_server.executor.fallback.executor import FallbackExecutor
from ferrule_server.executor.host_plan import RESERVE_BYTES, HostPlan
from ferrule_server.executor.torch import TorchExecutor
from ferrule_server.host import Host
from ferrule_server.kernel_builder import at_start
from ferrule_server.kernel_builder.bundles import write_bundle
from ferrule_server.loading import create_executor
from ferrule_server.model import weights
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.config_reader import read_config
from tests.executor.cpu.models import DEMO
from tests.executor.cuda.fake_gpu import FakeGpu

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def _ignore(stage: str, share: float) -> None:
    """Progress nobody looks at."""


def test_paged_reference_has_the_settings_asked_for() -> None:
    """Context and pool come from the settings; there is no tokenizer."""
    config = ServerConfig(model=None, executor="paged-reference", max_context=99, kv_memory_bytes=1 << 20)
    loaded = create_executor(config, _ignore)
    info = loaded.executor.info
    assert loaded.tokenizer is None
    assert info.model.max_context == 99
    assert info.num_blocks * info.bytes_per_block == 1 << 20
    loaded.executor.close()


@pytest.mark.parametrize(
    ("settings", "left_out"),
    [
        ({"model": None, "executor": "paged-reference"}, ("torch", "numba", "tokenizers")),
        ({"kv_memory_bytes": 1 << 22}, ("numba.cuda", "ferrule_server.kernels.cuda", "ferrule_server.executor.cuda")),
    ],
    ids=["reference", "processor"],
)
def test_a_start_imports_only_what_it_uses(settings: dict[str, Any], left_out: tuple[str, ...]) -> None:
    """Importing torch takes longer than all else together; kernels of a GPU and their compiler make a start longer."""
    code = (
        "import sys; from ferrule_server.loading import create_executor; import ferrule_server.api.serve;"
        "from ferrule_server.config import ServerConfig;"
        f"create_executor(ServerConfig(**{settings!r}), lambda *_: None).executor.close();"
        f"found = [name for name in sys.modules if name.startswith({left_out!r})];"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


@pytest.mark.parametrize(
    ("cpuinfo", "has"),
    [
        ("model name : x\nflags : fpu avx2 avx512_bf16\n", True),
        ("flags : fpu amx_bf16 amx_tile\n", True),
        ("Features : fp asimd bf16 i8mm\n", True),
        ("flags : fpu avx2 avx512f\n", False),
        ("model name : avx512_bf16 in name only\n", False),
        ("", False),
    ],
)
def test_bfloat16_is_chosen_by_processor_flags(cpuinfo: str, has: bool, tmp_path: Path) -> None:
    """Without the instructions bfloat16 is emulated and slower than float32."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(cpuinfo)
    assert Host(tmp_path).has_bfloat16() is has
    assert Host(tmp_path).processor_name() == (re.findall("model name : (.+)", cpuinfo) or ["cpu"])[0]
    assert not Host(tmp_path / "none").has_bfloat16()


_HEAD_NORMS = ("q_norm.weight", "k_norm.weight")
SMALL: dict[str, Any] = {"kv_memory_bytes": 1 << 22}


def _created(stages: list[str] | None = None, **settings: Any) -> Executor:
    """Return the executor for settings, with a small pool unless they say otherwise."""

    def on_progress(stage: str, share: float) -> None:
        if stages is not None:
            stages.append(stage)

    return create_executor(ServerConfig(**SMALL | settings), on_progress).executor


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [text for text in said if not text.startswith("event=no_tokenizer")]  # random models have none


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU."""
    monkeypatch.setattr(devices, "find_device", lambda wanted: Device(reason="" if wanted == "cpu" else "no GPU here"))


def _no_compiler(*_: object, **__: object) -> NoReturn:
    raise GpuError("no compiler here")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """A machine with a GPU of 3 GiB, a third of it taken, whose memory is that of the host; there are no kernels."""
    fake = FakeGpu()

    monkeypatch.setattr(devices, "find_device", lambda _: Device(0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (4 << 29, 3 << 30))
    monkeypatch.setattr(Device, "name", "cpu")
    monkeypatch.setattr(TorchGpu, "open", lambda *_, **__: fake)
    monkeypatch.setattr(bundle, "_places", list)
    monkeypatch.setattr(at_start, "built_bundle", _no_compiler)
    monkeypatch.setattr(Host, "has_bfloat16", lambda _: False)
    num_threads = torch.get_num_threads()
    yield fake
    torch.set_num_threads(num_threads)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("settings", [{}, {"executor": "numba-cpu"}, {"device": "cpu"}, {"is_deterministic": True}])
def test_without_a_gpu_the_kernels_of_the_processor_run(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """In bfloat16, with no word about GPUs; they say which kernels they are, and why."""
    executor = _created(**settings)
    assert isinstance(executor, NumbaCpuExecutor)
    assert not isinstance(executor, PipelinedExecutor)
    info = executor.info
    assert (info.name, info.device, info.fallback_reason, info.kv_dtype) == ("numba-cpu", "cpu", "", "bfloat16")
    assert info.kernel_set in ("fma-bf16/1", "avx512-bf16/1", "amx-bf16/1")
    assert "the processor" in info.kernel_set_reason
    assert _warnings(caplog) == []
    executor.close()


@pytest.mark.usefixtures("no_gpu")
def test_torch_runs_where_it_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    """That is no fallback, and it promises no bits."""
    executor = _created(executor="torch")
    assert isinstance(executor, TorchExecutor)
    assert (executor.info.device, executor.info.fallback_reason, executor.info.kernel_set) == ("cpu", "", "")
    assert _warnings(caplog) == []
    executor.close()


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("name", ["auto", "numba-cpu"])
def test_torch_runs_what_the_kernels_cannot(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose heads have an odd width, for example; the reason is in the status."""
    monkeypatch.setitem(make_random_model.SHAPES, "odd", make_random_model.SHAPES["tiny"] | {"head_dim": 24})
    make_random_model.write_model(tmp_path, "odd")
    executor = _created(executor=name, model=str(tmp_path))
    assert isinstance(executor, TorchExecutor)
    assert executor.info.name == "torch"
    assert "head_dim 24 is not a multiple of 16" in executor.info.fallback_reason
    assert len(_warnings(caplog)) == 1
    executor.close()
    with pytest.raises(ConfigError, match=r"--deterministic needs kernels, not torch: .*head_dim 24"):
        _created(executor=name, model=str(tmp_path), is_deterministic=True)


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(("name", "reason"), [("auto", "bfloat16 or float32, not in float16"), ("torch", "")])
def test_float16_runs_in_torch_on_the_processor(name: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """With the reason, unless torch was asked for."""
    executor = _created(executor=name, dtype="float16")
    assert isinstance(executor, TorchExecutor)
    info = executor.info
    assert (info.model.dtype, info.kv_dtype) == ("float16", "float16")
    assert "float16" in info.supported_dtypes
    assert info.model.weights_bytes == 2 * info.model.num_parameters
    assert reason in info.fallback_reason
    assert bool(info.fallback_reason) == bool(reason)
    assert len(_warnings(caplog)) == bool(reason)
    executor.close()


@pytest.mark.usefixtures("no_gpu")
def test_what_is_left_out_of_a_model_of_several_modalities_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In one line; a text model has none."""
    make_random_model.write_model(tmp_path, "tiny")
    stored = load_file(tmp_path / "model.safetensors")
    inner = {f"language_model.{name}": tensor for name, tensor in stored.items() if not name.endswith(_HEAD_NORMS)}
    save_file({**inner, "vision_tower.patch_conv.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "mistral"}
    del text["architectures"], text["attention_bias"]
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.INFO, "ferrule_server.loading"):
        _created(executor="torch").close()
        _created(executor="torch", model=str(tmp_path)).close()
    lines = [line for line in caplog.messages if line.startswith("event=text_model_only")]
    left_out = "left_out=vision_tower,multi_modal_projector"
    assert lines == [f"event=text_model_only architecture=Mistral3ForConditionalGeneration {left_out}"]


@pytest.mark.usefixtures("no_gpu")
def test_kernels_of_a_gpu_that_were_asked_for_without_one_end_the_start() -> None:
    """Before any weight is read; the message names what runs without a GPU."""
    stages: list[str] = []
    reason = "--executor numba-cuda: no GPU here; --executor auto or torch runs without a GPU"
    with pytest.raises(ConfigError, match=f"^{reason}$"):
        _created(stages, executor="numba-cuda")
    assert stages == ["importing torch"]


def test_a_gpu_that_cannot_be_used_is_told_of_unasked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody wants a model on the processor beside a GPU without knowing."""
    monkeypatch.setattr(devices, "find_device", lambda _: Device(None, "GPU 0 is taken", is_broken=True))
    executor = _created()
    assert isinstance(executor, NumbaCpuExecutor)
    assert executor.info.fallback_reason == "GPU 0 is taken; the model runs on the processor"
    assert len(_warnings(caplog)) == 1
    executor.close()


def test_a_pytorch_without_cuda_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU may well be there; its owner installed the wrong wheel."""
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match=r"--executor numba-cuda: .*install one with CUDA.*; --executor auto"):
        _created(executor="numba-cuda")
    with pytest.raises(ConfigError, match=r"--device cuda: .*install one with CUDA.*; --device auto"):
        _created(device="cuda")


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("content", [None, bytes(range(250)) * 20])
@pytest.mark.parametrize(
    "settings", [{}, {"executor": "numba-cuda"}, {"executor": "torch"}, {"executor": "paged-reference", "model": None}]
)
def test_a_bundle_that_is_none_ends_the_start_without_a_gpu_too(
    settings: dict[str, Any], content: bytes | None, tmp_path: Path
) -> None:
    """Missing or garbage: the mistake shows on the machine where it is made."""
    path = tmp_path / "kernels.bundle"
    if content is not None:
        path.write_bytes(content)
    stages: list[str] = []
    with pytest.raises(ConfigError, match=r"--kernel-bundle: .*kernels\.bundle is not a bundle of kernels"):
        _created(stages, kernel_bundle=path, **settings)
    assert stages == []


@pytest.mark.usefixtures("no_gpu")
def test_a_bundle_that_is_one_may_be_named_without_a_gpu(tmp_path: Path) -> None:
    """For whatever GPU it is, or a folder of some: nothing of it is used."""
    write_bundle(tmp_path / "kernels.bundle", "sm_80", {}, (12, 9))
    for path in (tmp_path / "kernels.bundle", tmp_path):
        _created(kernel_bundle=path).close()


@pytest.mark.usefixtures("no_gpu")
def test_a_gpu_that_must_be_there_and_is_not_ends_the_start() -> None:
    """Before any weight is read."""
    stages: list[str] = []
    with pytest.raises(ConfigError, match="--device cuda:1: no GPU here"):
        _created(stages, device="cuda:1")
    assert stages == ["importing torch"]


def test_a_gpu_that_is_found_serves(gpu: FakeGpu) -> None:
    """With weights in bfloat16, a pool of what the memory leaves, and the plan in the state."""
    executor = _created(kv_memory_bytes=None, gpu_memory_fraction=0.6, max_context=512)
    assert isinstance(executor, FallbackExecutor)
    info, memory = executor.info, executor.state.memory
    assert (info.model.dtype, info.block_size, info.model.max_context) == ("bfloat16", 16, 512)
    assert memory is not None
    assert memory.total == 3 << 30
    assert 0 < info.num_blocks * info.bytes_per_block == memory.kv_pool < 1 << 29
    executor.close()
    assert gpu.names()[-1] == "close"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("settings", "dtype", "reason"),
    [
        ({"executor": "torch"}, "bfloat16", ""),
        ({"executor": "torch", "dtype": "float16"}, "float16", ""),
        ({"dtype": "float16"}, "float16", "the kernels need bfloat16, not float16"),
        ({"has_cuda_runner": False}, "bfloat16", "the kernels are switched off by --disable-cuda-runner"),
    ],
    ids=str,
)
def test_torch_runs_on_a_gpu(
    settings: dict[str, Any], dtype: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """If it was asked for, that is no fallback; otherwise one warning says why, as the state does."""
    executor = _created(**settings)
    assert isinstance(executor, FallbackExecutor)
    assert (executor.state.name, executor.state.fallback_reason) == ("torch", reason)
    assert (executor.info.model.dtype, executor.info.kv_dtype) == (dtype, dtype)
    assert executor.state.memory is not None
    assert executor.state.memory.weights == executor.info.model.weights_bytes
    assert executor.state.memory.buffers == 0
    assert len(_warnings(caplog)) == bool(reason)
    executor.close()


@pytest.mark.usefixtures("gpu")
def test_every_setting_of_a_gpu_arrives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None is left at its default."""
    seen: list[GpuOptions] = []

    def prepare(config: ModelConfig, options: GpuOptions) -> None:
        seen.append(options)
        raise ConfigError("enough")

    monkeypatch.setattr(compose, "prepare", prepare)
    shared: dict[str, Any] = {"max_context": 99, "max_step_rows": 77, "kv_memory_bytes": 1 << 22}
    shared |= {"kernel_cache": tmp_path / "cache", "kernel_bundle": tmp_path}
    cases: tuple[dict[str, Any], ...] = (
        {"is_deterministic": True, "early_launch": "off", "has_cuda_graphs": False},
        {"executor": "torch", "has_cuda_runner": False, "dtype": "float32"},
        {"dtype": "float16"},
    )
    for settings in cases:
        with pytest.raises(ConfigError, match="enough"):
            _created(gpu_memory_fraction=0.3, **shared, **settings)
    assert all(options.build is not None for options in seen)
    assert replace(seen[0], build=None) == GpuOptions(
        device="cpu",
        free_bytes=4 << 29,
        total_bytes=3 << 30,
        dtype=torch.bfloat16,
        memory_fraction=0.3,
        is_deterministic=True,
        early_launch="off",
        has_graphs=False,
        **shared,
    )
    assert (seen[1].wants_kernels, seen[1].dtype) == (False, torch.float32)
    assert (seen[2].wants_kernels, seen[2].dtype) == (True, torch.float16)
    assert "--disable-cuda-runner" in seen[1].reason


@pytest.mark.usefixtures("gpu")
def test_too_little_memory_on_a_gpu_is_one_error_before_weights_are_read() -> None:
    """With the flag to change."""
    stages: list[str] = []
    with pytest.raises(ConfigError, match="--kv-memory"):
        _created(stages, kv_memory_bytes=3 << 30)
    assert stages == ["importing torch"]


@pytest.mark.usefixtures("gpu")
def test_kernels_that_do_not_fit_the_settings_end_a_deterministic_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch cannot keep the promise, so there is no fallback."""
    monkeypatch.setattr(compose, "unsupported_reason", lambda *_: "the kernels do not know this model")
    with pytest.raises(ConfigError, match=r"--deterministic needs .*: the kernels do not know this model"):
        _created(is_deterministic=True)


def test_what_was_begun_on_a_gpu_ends_where_weights_cannot_be_read(gpu: FakeGpu, tmp_path: Path) -> None:
    """No compiler may hold up the end of a process that cannot serve."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3))
    with pytest.raises(ModelError):
        _created(model=str(folder))
    assert gpu.names()[-1] == "close"


def test_a_folder_has_no_revision(tmp_path: Path) -> None:
    """Asking for one is a mistake that would go unseen."""
    with pytest.raises(ConfigError, match=f"--revision v1: --model {tmp_path} is a folder here, not on the hub"):
        create_executor(ServerConfig(model=str(tmp_path), revision="v1"), lambda *_: None)


def test_a_model_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Before torch is imported."""
    stages: list[str] = []
    with pytest.raises(ModelError, match="no such folder"):
        create_executor(ServerConfig(model=str(tmp_path / "nothing")), lambda stage, _: stages.append(stage))
    assert stages == []


def test_a_context_beyond_the_models_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    """The folder has none, and torch is not imported either."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    stages: list[str] = []
    config = ServerConfig(model=str(tmp_path), max_context=129)
    with pytest.raises(ConfigError, match="--max-context 129 is beyond the 128 tokens"):
        create_executor(config, lambda stage, _: stages.append(stage))
    assert stages == []


def test_a_pool_that_the_system_refuses_names_its_flag() -> None:
    """Such as beyond a limit on address space, or on a system that does not say how much memory is free."""
    config = ServerConfig(model=None, executor="paged-reference", kv_memory_bytes=1 << 49)
    with pytest.raises(ConfigError, match=r"--kv-memory: 524288\.00 GiB cannot be allocated \(.*\); lower it"):
        create_executor(config, _ignore)


# ---- the memory of the host -----------------------------------------------------------------------------------------


def _limited(folder: Path, num_bytes: int, quota: str = "max 100000") -> Host:
    """Return a machine with a control group of version 2."""
    group = folder / "sys/fs/cgroup/serve"
    group.mkdir(parents=True, exist_ok=True)
    (folder / "proc/self").mkdir(parents=True, exist_ok=True)
    (folder / "proc/self/mountinfo").write_text("31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
    (folder / "proc/self/cgroup").write_text("0::/serve\n")
    (group / "memory.max").write_text(f"{num_bytes}\n")
    (group / "cpu.max").write_text(f"{quota}\n")
    return Host(folder)


def _plan(**uses: Any) -> HostPlan:
    return HostPlan(**{"limits": (), "weights": 0, "weights_source": "", "loading": 0, "reserve": 0, **uses})


def _table(error: BaseException) -> dict[str, tuple[float, str]]:
    """Return the lines of the table in a message: GiB and source by name."""
    rows = re.findall(r"^  (\S.*?)  +([\d.]+) GiB *(.*)$", str(error), re.MULTILINE)
    return {name: (float(number), source) for name, number, source in rows}


@pytest.mark.parametrize("settings", [{}, {"weights": "int8"}, {"executor": "torch"}], ids=str)
def test_what_does_not_fit_the_control_group_is_refused_before_weights_are_read(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a table: each use, what decides it, and the limit."""
    monkeypatch.setattr(weights, "load_model", Mock(side_effect=AssertionError("weights are read")))
    stages: list[str] = []
    config = ServerConfig(device="cpu", kv_memory_bytes=2 << 30, **settings)
    with pytest.raises(ConfigError) as caught:
        create_executor(config, lambda stage, _: stages.append(stage), _limited(tmp_path, 1200 << 20))
    assert stages == ["importing torch"]
    table = _table(caught.value)
    assert table["KV pool"] == (2.0, "--kv-memory")
    assert table["weights"][1].startswith("--model demo as ")
    assert table["available"] == (1.17, "of 1.17 GiB: /sys/fs/cgroup/serve/memory.max")
    assert table["needed"][0] == pytest.approx(2 + table["weights"][0] + table["reserve"][0], abs=0.02)
    assert "lower --kv-memory to 9" in str(caught.value)


def test_a_pool_is_refused_only_if_it_cannot_fit(tmp_path: Path) -> None:
    """To the byte: what the message advises is accepted."""
    plan = _plan(limits=_limited(tmp_path, 1 << 30).memory_limits(), reserve=100 << 20, weights=300 << 20)
    pool = (1 << 30) - (400 << 20)
    assert plan.with_pool(pool, 1 << 30, 1).fits
    assert not plan.with_pool(pool + 1, 1 << 30, 1).fits
    with pytest.raises(ConfigError, match=f"lower --kv-memory to {pool >> 20}MiB or less"):
        plan.with_pool(pool + 1, 1 << 30, 1).check()
    assert _plan(reserve=1 << 50).with_pool(1 << 60, 1, 1).fits


def test_weights_that_do_not_fit_are_refused_whatever_the_pool(tmp_path: Path) -> None:
    """The message does not advise a smaller pool, which would not help."""
    plan = _plan(limits=_limited(tmp_path, 1 << 30).memory_limits(), weights=2 << 30)
    with pytest.raises(ConfigError) as caught:
        plan.with_pool(None, 1 << 30, 1 << 20).check()
    assert "lower --kv-memory" not in str(caught.value)
    assert "take a smaller model" in str(caught.value)


def test_the_largest_matrix_counts_while_weights_are_packed() -> None:
    """It is there twice for a while; the pool is not there yet."""
    plan = _plan(reserve=1, weights=10, loading=7)
    assert plan.with_pool(5, 0, 0).needed == 18
    assert plan.with_pool(9, 0, 0).needed == 20


def test_a_pool_without_a_size_takes_what_the_control_group_leaves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At most three quarters of it, with a warning; the usual size where that fits."""
    limit = 600 << 20
    loaded = create_executor(ServerConfig(device="cpu"), _ignore, _limited(tmp_path, limit))
    info = loaded.executor.info
    loaded.executor.close()
    left = limit - info.model.weights_bytes - RESERVE_BYTES
    assert 0 <= left * 3 // 4 - info.num_blocks * info.bytes_per_block < info.bytes_per_block
    assert [text for text in _warnings(caplog) if "kv_pool_reduced" in text]
    roomy = _plan(limits=_limited(tmp_path, 4 << 30).memory_limits())
    assert roomy.with_pool(None, 1 << 30, 1 << 20).kv_pool == 1 << 30


def test_weights_pass_through_the_host_on_their_way_to_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted, the pool is not: a plan of its own is for the memory of the GPU."""
    monkeypatch.setattr(select, "_device_of", lambda _config: Device(0))
    config = ServerConfig(kv_memory_bytes=1 << 40)
    plan = select.plan_load(config, read_config(DEMO), _limited(tmp_path, 1 << 30)).memory
    assert (plan.kv_pool, plan.fits) == (0, True)
    assert plan.weights > 8 << 20


@pytest.mark.parametrize("num_bytes", [64 << 10, 300 << 10])
def test_a_pool_that_is_too_small_for_the_model_is_refused_before_weights_are_read(
    num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the smallest size that can be used."""
    monkeypatch.setattr(weights, "load_model", Mock(side_effect=AssertionError("weights are read")))
    with pytest.raises(ConfigError, match="it needs at least 384KiB "):
        _created(device="cpu", kv_memory_bytes=num_bytes)


@pytest.mark.parametrize(("quota", "num_threads"), [("100000 100000", 1), ("max 100000", Host().num_threads())])
def test_threads_are_paid_for_by_the_control_group(quota: str, num_threads: int, tmp_path: Path) -> None:
    """Those of the kernels, and those of torch with a model that is large enough for more than one."""
    host = _limited(tmp_path, 4 << 30, quota)
    loaded = create_executor(ServerConfig(device="cpu", **SMALL), _ignore, host)
    assert isinstance(loaded.executor, NumbaCpuExecutor)
    assert len(loaded.executor._workers._threads) == num_threads - 1
    loaded.executor.close()


def test_threads_of_torch_are_paid_for_by_the_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a model that is large enough for more than one."""
    monkeypatch.setattr(select, "_SMALL_WEIGHTS_BYTES", 0)
    set_num_threads = Mock()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", set_num_threads)
    for quota, num_threads in (("100000 100000", 1), ("max 100000", min(8, Host().num_threads()))):
        config = ServerConfig(device="cpu", executor="torch", **SMALL)
        create_executor(config, _ignore, _limited(tmp_path, 4 << 30, quota)).executor.close()
        set_num_threads.assert_called_with(num_threads)


def test_the_model_that_ships_is_no_folder_to_look_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its files the message says what to do, and no path that the user never typed."""
    monkeypatch.setattr(named_models, "_DEMO_FOLDER", tmp_path)
    with pytest.raises(ModelError, match="--model demo: this installation lacks") as caught:
        create_executor(ServerConfig(), _ignore)
    assert str(tmp_path) not in str(caught.value)
