"""Load the model and the executor that the settings name. Torch is imported only if it is needed."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ferrule_server.config import DEFAULT_KV_BYTES, INT8_INPUTS, ServerConfig
from ferrule_server.errors import ConfigError, ModelError
from ferrule_server.executor.base import BLOCK_SIZE, Executor
from ferrule_server.executor.host_plan import RESERVE_BYTES, HostPlan, gib
from ferrule_server.executor.reference import PagedReferenceExecutor
from ferrule_server.host import Host
from ferrule_server.model.config_reader import read_config
from ferrule_server.model.families.rotary import Note
from ferrule_server.model.gguf.blocks import BLOCKS
from ferrule_server.model_files import is_file, is_folder, listed, name_of
from ferrule_server.named_models import NAMED_MODELS

if TYPE_CHECKING:
    from ferrule_server.executor.cpu.executor import Prepared
    from ferrule_server.executor.cpu.support import Choice
    from ferrule_server.executor.cuda.compose import Preparation
    from ferrule_server.executor.devices import Device
    from ferrule_server.kernels.cpu.plan import WeightKind
    from ferrule_server.model.config import ModelConfig
    from ferrule_server.model.weights import DTypeName, LoadedModel
    from ferrule_server.text.chat_template import ChatTemplate
    from ferrule_server.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

OnProgress = Callable[[str, float], None]
"""Called with the current stage, for people, and the progress of the whole load from 0 to 1; from any thread."""

_HOST: Final = Host()
_PAGED_REFERENCE_CONTEXT: Final = 512
_SMALL_WEIGHTS_BYTES: Final = 128 << 20
_TOKENIZERS: Final = re.compile(r".*(tekken|token|vocab|merges|piece|bpe).*\.(json|model|txt|tiktoken)")
"""Files of other tokenizers, and what belongs to them."""
_DOWNLOAD_SHARE: Final = 0.9
"""The rough share of the loading time that a download takes, if there is one."""
_IMPORT_SHARE: Final = 0.05
"""The rough share of the rest that importing torch takes, and compiling kernels."""
_WEIGHTS_SHARE: Final = 0.85
"""The rough share of the rest that reading weights takes."""


@dataclass(frozen=True, slots=True)
class LoadedExecutor:
    """An executor that is ready to run, and what belongs to its model.

    Attributes:
        executor: Runs the steps.
        tokenizer: None if the model has none.
        chat_template: None if the model has none.
        commit: The commit of the repository, if the model is from the hub.
    """

    executor: Executor
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None = None
    commit: str | None = None


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How a model will run, decided before its weights are read.

    Attributes:
        network: Its configuration.
        device: The GPU, or the processor.
        choice: How the kernels of the processor run it; without a reason if a GPU does, or torch, as the settings say.
        dtype: Type of weights that are not quantised, activations and KV.
        packed_types: Of the matrices that stay as they are in the file.
        memory: What the memory of the host will be for.
    """

    network: ModelConfig
    device: Device
    choice: Choice
    dtype: DTypeName
    packed_types: tuple[str, ...]
    memory: HostPlan


def create_executor(config: ServerConfig, on_progress: OnProgress, host: Host = _HOST) -> LoadedExecutor:
    """Load the model and the executor that the settings name, which may take minutes.

    Raises:
        ConfigError: The settings do not fit the model or the machine, such as its memory.
        ModelError: The model folder cannot be loaded, or this machine has too little memory for it.
    """
    try:
        if config.kernel_bundle is not None:
            from ferrule_server.executor.cuda.bundle import check_bundle_file

            check_bundle_file(config.kernel_bundle)
        if config.executor == "paged-reference":
            return LoadedExecutor(_paged_reference(config), None)
        return _load(config, on_progress, host)
    except MemoryError as error:
        raise ModelError(f"--model {name_of(config.model)}: this machine has too little memory to load it") from error


def download(config: ServerConfig, on_progress: OnProgress) -> Path:
    """Return the folder of the model that the settings name; fetch it from the hub if it is not there.

    Raises:
        ConfigError: The settings do not fit the model.
        ModelError: The model cannot be fetched, or it is not a model that can run.
    """
    folder, _, _ = find_model(config, on_progress)
    network_of(config, folder)
    return folder


def suggested_threads(weights_bytes: int, num_cores: int) -> int:
    """Return how many threads compute a model of this size fastest: one for a small model, else one per core.

    Threads that sleep while they wait are woken for every operation, which takes longer than an operation of a small
    model. With one thread the bundled model (9 MB) decodes batch 1 twice as fast; batch 16 and prefill are faster too.
    """
    return 1 if weights_bytes < _SMALL_WEIGHTS_BYTES else num_cores


def plan_load(config: ServerConfig, network: ModelConfig, host: Host = _HOST) -> LoadPlan:
    """Return how a model will run.

    Raises:
        ConfigError: The settings require kernels that cannot run, or a GPU that is not there.
    """
    from ferrule_server.executor.cpu.weights import block_types
    from ferrule_server.executor.sizes import largest_matrix_bytes, pair_bytes, weights_bytes
    from ferrule_server.executor.torch import least_kv_bytes
    from ferrule_server.model.weights import TORCH_DTYPES

    device = _device_of(config)
    choice = _cpu_choice(config, device, network)
    name = _dtype_of(config, device, choice, host)
    dtype, form = TORCH_DTYPES[name], name if config.weights == "float" else config.weights
    types = () if choice.plan is None else block_types(network)
    memory = HostPlan(
        limits=host.memory_limits(),
        weights=weights_bytes(network, dtype, choice.plan),
        weights_source=f"--model {name_of(config.model)} as {', '.join((*types, form))}",
        loading=0 if choice.plan is None else largest_matrix_bytes(network, dtype),
        reserve=RESERVE_BYTES + (0 if choice.plan is None else pair_bytes(network, config.max_step_rows)),
    )
    if device.index is None:  # on the way to a GPU all weights are in the memory of the host, and no pool
        least_bytes = least_kv_bytes(network, dtype, BLOCK_SIZE)
        memory = memory.with_pool(config.kv_memory_bytes, DEFAULT_KV_BYTES, least_bytes)
    return LoadPlan(network, device, choice, name, types, memory)


def _for_host(config: ServerConfig, plan: LoadPlan) -> ServerConfig:
    """Return the settings with the size of the pool, if it is in the memory of the host.

    Raises:
        ConfigError: There is too little memory, or ``--kv-memory`` is too small for the model.
    """
    from ferrule_server.executor.torch import check_settings
    from ferrule_server.model.weights import TORCH_DTYPES

    plan.memory.check()
    if plan.device.index is not None:
        return config
    kv_pool = plan.memory.kv_pool
    if config.kv_memory_bytes is None and kv_pool < DEFAULT_KV_BYTES:
        limit = plan.memory.limits[0].name
        _log.warning("event=kv_pool_reduced kv_memory=%r limit=%r", gib(kv_pool), limit)
    check_settings(
        plan.network, TORCH_DTYPES[plan.dtype], kv_pool, config.max_context or plan.network.max_positions, BLOCK_SIZE
    )
    return replace(config, kv_memory_bytes=kv_pool)


def _paged_reference(config: ServerConfig) -> Executor:
    with _allocating(config) as kv_memory_bytes:
        return PagedReferenceExecutor(
            vocab_size=config.reference_vocab_size, num_layers=config.reference_layers,
            num_heads=config.reference_heads, num_kv_heads=config.reference_heads,
            max_context=config.max_context or _PAGED_REFERENCE_CONTEXT, block_size=config.reference_block_size,
            kv_memory_bytes=kv_memory_bytes,
        )  # fmt: skip


def _load(config: ServerConfig, on_progress: OnProgress, host: Host) -> LoadedExecutor:
    folder, commit, on_progress = find_model(config, on_progress)
    model_config = network_of(config, folder, _log.warning)
    on_progress("importing torch", 0.0)
    import torch

    from ferrule_server.model.weights import load_model

    def on_bytes(done_bytes: int, total_bytes: int) -> None:
        on_progress("reading weights", 2 * _IMPORT_SHARE + _WEIGHTS_SHARE * done_bytes / max(1, total_bytes))

    plan = plan_load(config, model_config, host)
    config = _for_host(config, plan)
    tokenizer, chat_template = load_texts(folder)
    if tokenizer is None:
        note_no_tokenizer(folder, _log.warning)
    with _preparing(config, plan, on_progress) as preparation:
        prepared = _prepare_processor(config, plan, on_progress)
        encoding = None if prepared is None else prepared.packer
        model = load_model(folder, dtype=plan.dtype, config=model_config, on_progress=on_bytes, encoding=encoding)
        if parts := ",".join(model_config.names.parts_left_out()):
            _log.info("event=text_model_only architecture=%s left_out=%s", model_config.architecture, parts)
        if config.model in NAMED_MODELS or commit is not None:
            model.model_id = config.model or ""
        num_cores = host.num_threads()
        num_threads = suggested_threads(model.weights_bytes, min(torch.get_num_threads(), num_cores))
        torch.set_num_threads(config.num_threads or num_threads)
        on_progress("allocating the KV pool", 2 * _IMPORT_SHARE + _WEIGHTS_SHARE)
        if preparation is None:
            config = replace(config, num_threads=config.num_threads or num_cores)
            executor = _on_processor(config, plan, model, prepared)
        else:
            executor = preparation.finish(model, lambda stage: on_progress(stage, 0.05 + _WEIGHTS_SHARE))
    return LoadedExecutor(executor, tokenizer, chat_template, commit)


def load_texts(folder: Path) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """Return the tokenizer of a model folder and its chat templates; None for what it does not have.

    Raises:
        ModelError: One of their files is not usable.
    """
    from ferrule_server.text.chat_template import ChatTemplate
    from ferrule_server.text.tokenizer import Tokenizer

    has_tokenizer = is_file(folder) or os.path.lexists(folder / "tokenizer.json")
    chat_template = ChatTemplate.load(folder) if has_tokenizer else None
    return Tokenizer.load(folder, chat_template), chat_template


def note_no_tokenizer(folder: Path, note: Note) -> None:
    """Warn that a model has no tokenizer.json, and name the files of other tokenizers in it."""
    names = [] if is_file(folder) else sorted(path.name for path in folder.iterdir())
    others = [name for name in names if _TOKENIZERS.fullmatch(name)]
    found = listed(others) or "none"
    note("event=no_tokenizer found=%r (tokenizer.json is not there; calls with text are UNIMPLEMENTED)", found)


def _device_of(config: ServerConfig) -> Device:
    """Return the device that the model will run on; the processor for an executor that runs only there.

    Raises:
        ConfigError: A GPU is named or needed, and there is none.
    """
    from ferrule_server.executor.devices import find_device

    device = find_device("cpu" if config.executor == "numba-cpu" or config.needs_kernels else config.device)
    if device.index is None and config.device.startswith("cuda"):
        raise ConfigError(f"--device {config.device}: {device.reason}; --device auto runs the model on the processor")
    if device.index is None and config.executor == "numba-cuda":
        raise ConfigError(f"--executor numba-cuda: {device.reason}; --executor auto or torch runs without a GPU")
    if device.index is not None and config.is_deterministic and config.dtype == "float32":
        raise ConfigError("--deterministic needs the kernels of the GPU, which compute in bfloat16: no --dtype float32")
    return device


@contextlib.contextmanager
def _preparing(config: ServerConfig, plan: LoadPlan, on_progress: OnProgress) -> Iterator[Preparation | None]:
    """Begin on a GPU what can be done before the model is read, and close it if the body fails; None without a GPU."""
    device = plan.device
    if device.index is None:
        yield None
        return
    import torch

    from ferrule_server.executor.cuda.compose import prepare
    from ferrule_server.executor.cuda.options import GpuOptions
    from ferrule_server.kernel_builder.at_start import built_bundle

    def on_kernel(share: float) -> None:
        on_progress("compiling GPU kernels", share)

    free_bytes, total_bytes = torch.cuda.mem_get_info(device.index)
    options = GpuOptions(
        device=device.name, free_bytes=free_bytes, total_bytes=total_bytes, dtype=getattr(torch, plan.dtype),
        max_context=config.max_context or plan.network.max_positions, max_step_rows=config.max_step_rows,
        memory_fraction=config.gpu_memory_fraction, kv_memory_bytes=config.kv_memory_bytes,
        wants_kernels=config.executor in ("auto", "numba-cuda"),
        reason="" if config.has_cuda_runner else "the kernels are switched off by --disable-cuda-runner",
        is_deterministic=config.is_deterministic, kernel_cache=config.kernel_cache, kernel_bundle=config.kernel_bundle,
        build=partial(built_bundle, cache=config.kernel_cache, on_progress=on_kernel),
        early_launch=config.early_launch, has_graphs=config.has_cuda_graphs,
    )  # fmt: skip
    preparation = prepare(plan.network, options)
    try:
        yield preparation
    except BaseException:
        preparation.close()
        raise


def _cpu_choice(config: ServerConfig, device: Device, network: ModelConfig) -> Choice:
    """Return how the kernels of the processor run a model.

    Raises:
        ConfigError: They cannot run, although the settings require them.
    """
    from ferrule_server.executor.cpu.support import Choice, choose

    if device.index is not None or config.executor == "torch":
        return Choice(None, "")
    weights: WeightKind = config.weights  # type: ignore[assignment]
    dtype = "float32" if config.dtype == "float32" else "bfloat16"
    choice = choose(network, dtype, weights, has_int8_inputs=config.activations == "int8")
    if config.dtype == "float16":
        choice = Choice(None, "the kernels of the processor compute in bfloat16 or float32, not in float16")
    if choice.plan is None and (needs := "--deterministic" if config.is_deterministic else config.needs_kernels):
        raise ConfigError(f"{needs} needs kernels, not torch: {choice.reason}")
    return choice


def _prepare_processor(config: ServerConfig, plan: LoadPlan, on_progress: OnProgress) -> Prepared | None:
    """Return what the kernels of the processor need before the weights are read; None: they do not run.

    Raises:
        ModelError: There is no memory for the weights.
    """
    if plan.choice.plan is None:
        return None
    from ferrule_server.executor.cpu.executor import prepare

    try:
        return prepare(
            plan.network,
            plan.choice.plan,
            config.kernel_cache,
            lambda stage, share: on_progress(stage, _IMPORT_SHARE * (1 + share)),
        )
    except (MemoryError, OSError) as error:
        raise ModelError(f"--model {name_of(config.model)}: no memory for the weights: {error}") from error


def _on_processor(config: ServerConfig, plan: LoadPlan, model: LoadedModel, prepared: Prepared | None) -> Executor:
    """Return the executor of the processor; it reports why a GPU that is there is not used."""
    reason = f"{plan.device.reason}; the model runs on the processor" if plan.device.is_broken else ""
    if plan.choice.plan is None or prepared is None:
        return _on_torch(config, model, "; ".join(filter(None, [reason, plan.choice.reason])))
    from ferrule_server.executor.cpu.executor import CpuOptions, NumbaCpuExecutor

    with _allocating(config) as kv_memory_bytes:
        options = CpuOptions(
            plan.choice.plan, plan.choice.reason, num_threads=config.num_threads or 1, kv_memory_bytes=kv_memory_bytes,
            max_context=config.max_context or model.config.max_positions, max_step_rows=config.max_step_rows,
            fallback_reason=reason,
        )  # fmt: skip
        return NumbaCpuExecutor(model, options, prepared)


def _on_torch(config: ServerConfig, model: LoadedModel, reason: str) -> Executor:
    """Return torch on the processor, which reports why no other executor runs, if there is a reason."""
    from ferrule_server.executor.torch import TorchExecutor

    if reason:
        _log.warning("event=torch_serves reason=%r", reason)
    with _allocating(config) as kv_memory_bytes:
        return TorchExecutor(
            model, kv_memory_bytes=kv_memory_bytes, max_context=config.max_context or model.config.max_positions,
            block_size=BLOCK_SIZE, fallback_reason=reason,
        )  # fmt: skip


@contextlib.contextmanager
def _allocating(config: ServerConfig) -> Iterator[int]:
    """Yield the bytes of the KV pool, which the body allocates.

    Raises:
        ConfigError: There is no memory for it; the message names the setting to change.
    """
    num_bytes = config.kv_memory_bytes or DEFAULT_KV_BYTES
    try:
        yield num_bytes
    except (MemoryError, OSError) as error:
        raise ConfigError(f"--kv-memory: {gib(num_bytes)} cannot be allocated ({error}); lower it") from error


def find_model(config: ServerConfig, on_progress: OnProgress) -> tuple[Path, str | None, OnProgress]:
    """Return the model's folder, its commit if it is from the hub, and the callback for the progress of the rest.

    Raises:
        ConfigError: A revision is set, but the model is a folder, which has none.
        ModelError: There is no such model.
    """
    if config.model is None:
        raise ConfigError("--model is needed: demo, a folder, a GGUF file, or org/name on the hub")
    if (find := NAMED_MODELS.get(config.model)) is not None:
        return find(), None, on_progress
    folder = as_folder(config.model)
    if folder is not None:
        if config.revision is not None:
            kind = "file" if is_file(folder) else "folder"
            raise ConfigError(f"--revision {config.revision}: --model {config.model} is a {kind} here, not on the hub")
        return folder, None, on_progress
    from ferrule_server.model.hub_names import is_hub_name

    if not is_hub_name(config.model):
        raise ModelError(
            f"--model {name_of(config.model)}: there is no such folder or file; a model of the hub is named org/name,"
            " org/name:Q4_K_M or org/name/FILE.gguf"
        )
    return _fetched(config, config.model, on_progress)


def as_folder(name: str) -> Path | None:
    """Return the folder or the GGUF file that a setting names; None if there is none."""
    try:
        folder = Path(name).expanduser()
    except RuntimeError:  # the home of a user who does not exist
        return None
    return folder if is_folder(folder) or is_file(folder) else None


def _fetched(config: ServerConfig, name: str, on_progress: OnProgress) -> tuple[Path, str, OnProgress]:
    """Return what :func:`_found` does for a model of the hub; fetch it if it is not in the cache."""
    from ferrule_server.model.hub import fetch_model, snapshot_of

    is_fetched = False

    def on_share(share: float) -> None:
        nonlocal is_fetched
        is_fetched = True
        on_progress("downloading", _DOWNLOAD_SHARE * share)

    def on_rest(stage: str, share: float) -> None:
        on_progress(stage, _DOWNLOAD_SHARE + (1 - _DOWNLOAD_SHARE) * share if is_fetched else share)

    on_progress("asking the hub", 0.0)
    folder = fetch_model(
        name,
        config.revision,
        is_offline=config.is_offline,
        check=lambda folder: network_of(config, folder),
        on_share=on_share,
    )
    return folder, snapshot_of(folder).name, on_rest


def network_of(config: ServerConfig, folder: Path, note: Note = _log.debug) -> ModelConfig:
    """Return the model's configuration. Too long a context is refused here, before the weights are read.

    Args:
        config: The settings.
        folder: Of the model.
        note: Called with each warning.

    Raises:
        ConfigError: ``--max-context`` is beyond the context of the model, or its matrices are not as other settings
            require.
        ModelError: config.json is missing or unusable.
    """
    heard: list[str] = []

    def hear(form: str, *values: object) -> None:
        heard.append(form % values)
        note(form, *values)

    model_config = read_config(folder, config.ignored_config_keys, hear)
    most = model_config.max_positions
    if config.max_context is not None and config.max_context > most:
        reason = "".join(f"; {text}" for text in heard if text.startswith("event=dynamic_positions"))
        raise ConfigError(
            f"--max-context {config.max_context} is beyond the {most} tokens that {config.model} supports{reason}"
        )
    if model_config.blocks and config.weights != "float":
        what = f"{name_of(folder.name)} is quantised already, and stays as it is"
        raise ConfigError(f"--weights {config.weights}: {what}; leave --weights out")
    has_bytes = config.weights == "int8" or any(BLOCKS[name].kind.bits == 8 for name in model_config.blocks.values())
    if config.activations == "int8" and not has_bytes:
        raise ConfigError(INT8_INPUTS)
    return model_config.for_context(config.max_context or most)


def _dtype_of(config: ServerConfig, device: Device, choice: Choice, host: Host) -> DTypeName:
    """Return the type of the weights; the kernels of either processor run bfloat16 unless told otherwise."""
    if choice.plan is not None:
        return "bfloat16" if choice.plan.is_bfloat16 else "float32"
    if config.dtype == "auto":
        return "bfloat16" if device.index is not None or host.has_bfloat16() else "float32"
    dtype: DTypeName = config.dtype  # type: ignore[assignment]
    return dtype
