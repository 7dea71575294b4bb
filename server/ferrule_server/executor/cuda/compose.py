"""Puts the executor on a GPU together, in two moves: before the model is read, and with it.

Before: what the memory is for, so that too little of it is said at once; and the kernels, from a bundle, which another
process builds if none is there. Whatever keeps the kernels away, if only one of them, leaves all steps to torch, with
the reason; only in deterministic mode, which promises the bits of the kernels, it ends the start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch

from ferrule_server.errors import ConfigError
from ferrule_server.executor.base import BLOCK_SIZE, MemoryPlan
from ferrule_server.executor.cuda.bundle import ADVICE, Bundle, BundleError, find_bundle
from ferrule_server.executor.cuda.cuda_device import CudaDevice
from ferrule_server.executor.cuda.driver import GpuInfo
from ferrule_server.executor.cuda.early_launch import EarlyLaunch
from ferrule_server.executor.cuda.gpu import Gpu, GpuError
from ferrule_server.executor.cuda.kernel_choice import attention_grid, shape_of, specs_needed, unsupported_reason
from ferrule_server.executor.cuda.kernel_set import Trigger
from ferrule_server.executor.cuda.memory_plan import format_plan, plan_memory
from ferrule_server.executor.cuda.options import GpuOptions
from ferrule_server.executor.cuda.runner import NAME, CudaDecodeRunner
from ferrule_server.executor.cuda.torch_gpu import TorchGpu
from ferrule_server.executor.fallback.executor import FallbackExecutor
from ferrule_server.executor.torch import TorchExecutor
from ferrule_server.kernels.cuda.spec import Cubin, KernelSpec, ModelShape
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.weights import LoadedModel

_FIRST_CAPABILITY: Final = (8, 0)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of a model for a GPU.

    Attributes:
        bundle: The file that they are from.
        cubins: By spec.
    """

    bundle: Path
    cubins: Mapping[KernelSpec, Cubin]


@dataclass(frozen=True, slots=True)
class Preparation:
    """An executor on a GPU, as far as it can be made without its model. Either finish it or close it.

    Attributes:
        options: As given.
        gpu: None: only torch can use it.
        plan: What the memory is for.
        kernels: The kernels of the model; None: torch runs all steps.
        early_launch: When kernels start, perhaps tested now; None: there are none.
        reason: Why torch runs all steps although that was not wanted.
    """

    options: GpuOptions
    gpu: Gpu | None
    plan: MemoryPlan
    kernels: Kernels | None
    early_launch: EarlyLaunch | None
    reason: str

    def finish(self, model: LoadedModel, on_wait: Callable[[str], None] = lambda _: None) -> FallbackExecutor:
        """Return the executor, with the weights and the pool on the GPU.

        A test of early launch is waited for: it must have the GPU, and the memory that it takes, to itself.

        Args:
            model: Its weights are taken over.
            on_wait: Told what is waited for.

        Raises:
            ConfigError: The GPU has less memory than it had, or there is no deterministic mode.
        """
        trigger = "off" if self.early_launch is None else self.early_launch.decide(on_wait)
        self._wait_for_weights()
        try:
            with nullcontext() if self.gpu is None else self.gpu.current():
                torch_executor = self._torch_executor(model)
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"the memory of {self.options.device} is taken by somebody else: {error}") from error
        return FallbackExecutor(
            torch_executor,
            CudaDevice(self.gpu, self.options.device),
            name=NAME,
            make_runner=None if self.kernels is None else partial(self._make_runner, torch_executor, trigger),
            reason=self.reason,
            is_deterministic=self.options.is_deterministic,
            memory=self.plan,
        )

    def close(self) -> None:
        """Give back what was begun."""
        for begun in (self.early_launch, self.gpu):
            if begun is not None:
                begun.close()

    def _wait_for_weights(self) -> None:
        """Let everything end that torch does on the GPU: weights that were made there are read in another stream."""
        if torch.device(self.options.device).type == "cuda":
            torch.cuda.synchronize(self.options.device)

    def _torch_executor(self, model: LoadedModel) -> TorchExecutor:
        return TorchExecutor(
            model,
            kv_memory_bytes=self.plan.kv_pool,
            max_context=self.options.max_context,
            block_size=BLOCK_SIZE,
            device=self.options.device,
        )

    def _make_runner(self, torch_executor: TorchExecutor, trigger: Trigger) -> CudaDecodeRunner:
        assert self.kernels is not None
        assert self.gpu is not None
        assert self.early_launch is not None
        runner = CudaDecodeRunner(
            self.kernels.cubins,
            gpu=self.gpu,
            torch_executor=torch_executor,
            limits=self.options.limits,
            is_deterministic=self.options.is_deterministic,
            graph_bytes=self.plan.graphs,
            has_graphs=self.options.has_graphs,
            trigger=trigger,
        )
        runner.notice = self.early_launch.notice
        return runner


def open_gpu(device: str) -> Gpu:
    """Return a GPU by the name that torch has for it.

    Raises:
        GpuError: The kernels cannot run there; the message says why.
    """
    return TorchGpu.open(torch.device(device).index or 0)


def prepare(config: ModelConfig, options: GpuOptions, *, open_gpu: Callable[[str], Gpu] = open_gpu) -> Preparation:
    """Return what can be made of an executor without its model; log what the memory is for.

    Args:
        config: Of the model.
        options: What the settings say.
        open_gpu: Returns a GPU by its name, or raises GpuError.

    Raises:
        ConfigError: The memory is too little, a bundle is named that does not serve, or there is no deterministic mode.
    """
    # What cuBLAS adds up in parts it would round to 16 bits in between; the kernels and the CPU do not.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    gpu, reason = _opened(config, options, open_gpu)
    kernels, early_launch, num_ctas = None, None, 0
    if gpu is not None and options.wants_kernels and not reason:
        try:
            kernels = load_kernels(config, options, gpu.info)
            num_ctas = attention_grid(shape_of(config), gpu.info)
        except GpuError as error:
            reason = str(error)
    if options.is_deterministic and kernels is None:
        raise ConfigError(f"--deterministic needs the kernels of a GPU: {reason}")
    plan = plan_memory(config, options, num_ctas)
    for line in format_plan(plan).splitlines():
        _log.info("%s", line)
    if gpu is not None and kernels is not None:
        early_launch = EarlyLaunch(options.early_launch, gpu, options.kernel_cache, kernels.bundle)
    return Preparation(options, gpu, plan, kernels, early_launch, reason)


def _opened(config: ModelConfig, options: GpuOptions, open_gpu: Callable[[str], Gpu]) -> tuple[Gpu | None, str]:
    """Return the GPU, and why the kernels do not run on it where that is wanted."""
    reason = ""
    if options.wants_kernels:
        reason = options.reason or unsupported_reason(config, options.dtype, BLOCK_SIZE)
    try:
        gpu = open_gpu(options.device)
    except GpuError as error:
        return None, (reason or str(error)) if options.wants_kernels else ""
    if options.wants_kernels and not reason and gpu.info.capability < _FIRST_CAPABILITY:
        reason = f"{gpu.info.name} has compute capability {'.'.join(map(str, gpu.info.capability))}, kernels need 8.0"
    return gpu, reason


def load_kernels(config: ModelConfig, options: GpuOptions, gpu: GpuInfo) -> Kernels:
    """Return the kernels of a model for a GPU, from its bundle; a line in the log says where they are from.

    Where no bundle is named and none that is installed serves, one is built.

    Raises:
        ConfigError: A bundle is named, and it does not serve the GPU.
        GpuError: There is no bundle, or it lacks a kernel, or a kernel takes more shared memory than there is.
    """
    if not options.has_graphs:
        _log.warning("event=graphs_off reason=--disable-cuda-graphs: every step is launched kernel by kernel")
    is_deterministic, limit = options.is_deterministic, gpu.shared_bytes_per_cta
    specs = specs_needed(shape_of(config), is_deterministic=is_deterministic, block_size=BLOCK_SIZE, limit=limit)
    try:
        bundle, cubins = _read(options.kernel_bundle, specs, gpu)
        if options.build is not None and options.kernel_bundle is None and len(cubins) < len(specs):
            raise BundleError(f"{bundle.path} lacks kernels of this model")
    except BundleError as error:
        if options.kernel_bundle is not None:
            raise ConfigError(f"--kernel-bundle: {error}") from error
        if options.build is None:
            raise GpuError(str(error)) from error
        bundle, cubins = _built(options.build, error, config, specs, gpu)
    _log.info(
        "event=kernels_found num=%d wanted=%d architecture=%s bundle=%s",
        *(len(cubins), len(specs), bundle.architecture, bundle.path),
    )
    for spec in specs:
        if spec not in cubins:
            raise GpuError(
                f"{spec.name} is not in {bundle.path}; build the kernels of this model (tools/kernels/README.md)"
            )
        if spec.shared_bytes > limit:
            needed = f"{spec.name} needs {spec.shared_bytes} bytes of shared memory per CTA"
            raise GpuError(f"{needed}, {gpu.name} has {limit}")
    return Kernels(bundle.path, cubins)


def _read(named: Path | None, specs: Sequence[KernelSpec], gpu: GpuInfo) -> tuple[Bundle, dict[KernelSpec, Cubin]]:
    bundle = find_bundle(named, gpu.capability, gpu.cuda_version)
    return bundle, bundle.read(specs)


def _built(
    build: Callable[[ModelShape, tuple[int, int]], Path],
    missing: BundleError,
    config: ModelConfig,
    specs: Sequence[KernelSpec],
    gpu: GpuInfo,
) -> tuple[Bundle, dict[KernelSpec, Cubin]]:
    """Return a bundle that is built for a model, and its kernels.

    Raises:
        GpuError: It cannot be built, or this driver cannot load it; the message also says why none was found.
    """
    try:
        return _read(build(shape_of(config), gpu.capability), specs, gpu)
    except (GpuError, BundleError) as error:
        raise GpuError(f"{str(missing).removesuffix(f'; {ADVICE}')}; {error}") from error
