"""One model: whether it loads, in how much memory, on what path, and what is left out. No weights are read."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import torch

from ferrule_server.config import ServerConfig
from ferrule_server.errors import ConfigError, ModelError
from ferrule_server.executor.base import BLOCK_SIZE
from ferrule_server.executor.cpu.support import choose, unsupported
from ferrule_server.executor.cuda.kernel_choice import unsupported_reason
from ferrule_server.executor.host_plan import HostPlan
from ferrule_server.executor.sizes import active_bytes, kv_bytes, num_parameters, read_rate, weights_bytes
from ferrule_server.kernels.cpu.plan import WeightKind
from ferrule_server.loading import LoadPlan, as_folder, find_model, load_texts, network_of, note_no_tokenizer, plan_load
from ferrule_server.model.checkpoint import list_tensors
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.config_reader import read_config
from ferrule_server.model.families.others import NotSupported
from ferrule_server.model.families.rotary import Note
from ferrule_server.model.hub import Outline, cached_models, has_weights, outline_folder, outline_model
from ferrule_server.model.hub_names import is_hub_name
from ferrule_server.model.parts import HEAD
from ferrule_server.model.stored import StoredTensor
from ferrule_server.model.tensors import on_meta
from ferrule_server.model.weights import TORCH_DTYPES, check_tensors, is_ignorable, of_text_model
from ferrule_server.model_files import listed
from ferrule_server.named_models import NAMED_MODELS

_QUANTISED: Final[tuple[WeightKind, ...]] = ("int8", "int4")


@dataclass(frozen=True, slots=True)
class Details:
    """How a model loads.

    Attributes:
        commit: Of a model of the hub; None for a folder.
        architecture: As in config.json.
        num_layers: Decoder layers.
        num_parameters: Distinct parameters of what is loaded.
        max_context: Longest sequence in tokens.
        executor: What runs it on this machine: ``numba-cuda``, ``numba-cpu`` or ``torch``.
        device: As PyTorch names it.
        dtype: Of weights that are not quantised, activations and KV.
        path_reason: Why this executor, for people; may be empty.
        processor_kernels: Why the kernels of the processor cannot run it; empty if they can.
        gpu_kernels: Why the kernels of a GPU cannot run it; empty if they can.
        weights: As ``--weights`` says.
        packed_types: Of the matrices that stay as they are in the file, by the names of its format.
        weights_bytes: Of the weights in memory.
        active_bytes: Of them, those that a token reads: of experts the few that it passes.
        most_tokens_per_s: Of one sequence, if only reading them takes time; for mixtures on a processor, else None.
        weights_bytes_by_type: The same for each type that ``--dtype`` and ``--weights`` could name.
        kv_bytes_per_token: Of K and V.
        kv_bytes: Of K and V of one sequence of ``max_context`` tokens.
        left_out: Parts of the checkpoint that are not loaded.
        stored_bytes: Size of the files with the weights.
        download_bytes: How many of them are still to be fetched.
        memory: What the memory of this machine would be for.
        warnings: Those of a server's log about the files.
    """

    commit: str | None
    architecture: str
    num_layers: int
    num_parameters: int
    max_context: int
    executor: str
    device: str
    dtype: str
    path_reason: str
    processor_kernels: str
    gpu_kernels: str
    weights: str
    packed_types: tuple[str, ...]
    weights_bytes: int
    active_bytes: int
    most_tokens_per_s: float | None
    weights_bytes_by_type: dict[str, int]
    kv_bytes_per_token: int
    kv_bytes: int
    left_out: tuple[str, ...]
    stored_bytes: int
    download_bytes: int
    memory: HostPlan
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Whether a model loads.

    Attributes:
        model: As it was named.
        reason: Why it does not load; empty if it does.
        instead: What to try in its place, if that is known.
        details: How it loads; None if it does not.
    """

    model: str
    reason: str = ""
    instead: str = ""
    details: Details | None = None

    @property
    def loads(self) -> bool:
        """Whether it loads."""
        return self.details is not None

    def facts(self) -> dict[str, Any]:
        """Return the report for JSON; the keys are always the same."""
        first = {"model": self.model, "loads": self.loads, "reason": self.reason, "instead": self.instead}
        details = None if self.details is None else asdict(self.details)
        return first | (details or dict.fromkeys(field.name for field in fields(Details)))


@dataclass(frozen=True, slots=True)
class Cached:
    """A model in the cache of the hub on this disk.

    Attributes:
        model: ``org/name``.
        disk_bytes: Size of its files, those of all commits together.
        loads: Whether it loads.
        reason: Why it does not; empty if it does.
    """

    model: str
    disk_bytes: int
    loads: bool
    reason: str


def gpu_reason(network: ModelConfig, dtype: torch.dtype = torch.bfloat16) -> str:
    """Return why the kernels of a GPU cannot run a network; empty if they can."""
    return unsupported_reason(network, dtype, BLOCK_SIZE)


def check_model(config: ServerConfig) -> Report:
    """Return whether the model of the settings loads, and how. Of a model of the hub no weights are fetched.

    Raises:
        ConfigError: The settings cannot be used with this model or on this machine.
    """
    name, warnings = str(config.model), list[str]()

    def note(form: str, *values: object) -> None:
        warnings.append((form % values).removeprefix("event="))

    with tempfile.TemporaryDirectory(prefix="ferrule-") as place:
        try:
            source = _located(config, name, Path(place))
            network = network_of(config, source.folder, note)
            names = _checked_names(network, source, note)
            return Report(name, details=_details(config, network, source, names, warnings))
        except ModelError as error:
            reason, instead = (error.reason, error.instead) if isinstance(error, NotSupported) else (str(error), "")
            return Report(name, reason.removeprefix(f"--model {name}: "), instead)
        except ConfigError as error:
            if config.weights == "float" or "needs kernels" not in str(error):
                raise
            return Report(name, str(error), f"--weights float in place of {config.weights}")


def list_cached() -> list[Cached]:
    """Return the models in the cache, by name."""
    found = ((name, num_bytes, _reason_of(folder)) for name, folder, num_bytes in cached_models())
    return [Cached(name, num_bytes, not reason, reason) for name, num_bytes, reason in found]


def _reason_of(folder: Path | None) -> str:
    """Return why the model in a folder does not load, None if there is no complete one; empty if it does."""
    if folder is None:
        return "its weights are not complete in the cache"
    try:
        check_tensors(folder, read_config(folder))
    except ModelError as error:
        return str(error)
    return ""


def _located(config: ServerConfig, name: str, place: Path) -> Outline:
    """Return what is known of a model before its weights are read; of one of the hub, fetch configuration and index.

    The header of a GGUF file is written into the folder ``place``.
    """
    if name in NAMED_MODELS or as_folder(name) is not None or not is_hub_name(name):
        folder, _, _ = find_model(config, lambda _stage, _share: None)
        return outline_folder(folder)
    check = functools.partial(network_of, config)
    return outline_model(name, config.revision, is_offline=config.is_offline, check=check, place=place)


def _checked_names(network: ModelConfig, source: Outline, note: Note) -> frozenset[str] | None:
    """Return the names of the tensors, which are those that the network needs; None: they are not known yet.

    The tokenizer and the chat templates are loaded once, if they have been fetched.

    Raises:
        ModelError: They are others, or the tokenizer or a template is not usable.
    """
    if source.commit is None or has_weights(source.folder):
        check_tensors(source.folder, network)
        if load_texts(source.folder)[0] is None:
            note_no_tokenizer(source.folder, note)
        return frozenset(list_tensors(source.folder)[0])
    if source.tensors:
        _check_index(network, source.tensors)
    return source.tensors or None


def _check_index(network: ModelConfig, names: frozenset[str]) -> None:
    """Compare the names in an index with those that a network needs; shapes are known after the download only."""
    shape = () if network.experts is None else (network.experts.count, 2, 1)  # one may hold those of all experts
    unread = {name: StoredTensor(name, "F32", shape, Path(), 0, 0) for name in names}
    found = {name for name in of_text_model(network, unread) if not is_ignorable(name)}
    needed = on_meta(network)[1].keys()
    for verb, tensors in (("lacks", needed - found), ("has unexpected", found - needed - {HEAD})):
        if tensors:
            raise ModelError(f"the index of the weights {verb} tensors: {listed(sorted(tensors))}")


def _details(
    config: ServerConfig, network: ModelConfig, source: Outline, names: frozenset[str] | None, warnings: list[str]
) -> Details:
    plan = plan_load(config, network)
    (executor, path_reason), sizes = _executor_of(config, plan), _bytes_by_type(config, plan)
    dtype = TORCH_DTYPES[plan.dtype]
    max_context = config.max_context or network.max_positions
    active = active_bytes(network, dtype, plan.choice.plan)
    is_probed = network.experts is not None and plan.device.index is None
    return Details(
        commit=source.commit, architecture=network.architecture, num_layers=network.num_layers,
        num_parameters=num_parameters(network), max_context=max_context, executor=executor, device=plan.device.name,
        dtype=plan.dtype, path_reason=path_reason, processor_kernels=unsupported(network),
        gpu_kernels=gpu_reason(network), weights=config.weights, packed_types=plan.packed_types,
        weights_bytes=sizes[plan.dtype if config.weights == "float" else config.weights], weights_bytes_by_type=sizes,
        active_bytes=active, most_tokens_per_s=read_rate() / active if is_probed else None,
        kv_bytes_per_token=network.kv_values * dtype.itemsize, kv_bytes=kv_bytes(network, dtype, max_context),
        left_out=network.names.parts_left_out(names), stored_bytes=source.stored_bytes,
        download_bytes=source.missing_bytes, memory=plan.memory, warnings=tuple(warnings),
    )  # fmt: skip


def _executor_of(config: ServerConfig, plan: LoadPlan) -> tuple[str, str]:
    """Return what runs a model, ``numba-cuda``, ``numba-cpu`` or ``torch``, and why, for people; may be empty."""
    is_gpu = plan.device.index is not None
    if config.executor == "torch" or (is_gpu and not config.has_cuda_runner):
        return "torch", "the settings say so"
    if not is_gpu:
        return "torch" if plan.choice.plan is None else "numba-cpu", plan.choice.reason
    reason = gpu_reason(plan.network, TORCH_DTYPES[plan.dtype])
    return "torch" if reason else "numba-cuda", reason


def _bytes_by_type(config: ServerConfig, plan: LoadPlan) -> dict[str, int]:
    """Return the bytes of the weights for each type of ``--dtype``, and of ``--weights`` that can be used."""
    network, has_kernels = plan.network, plan.device.index is None and config.executor != "torch"
    sizes = {}
    for name, dtype in TORCH_DTYPES.items():
        kernels = choose(network, name).plan if has_kernels and name != "float16" else None
        sizes[name] = weights_bytes(network, dtype, kernels)
    for weights in _QUANTISED if has_kernels and not network.blocks else ():
        has_int8_inputs = config.activations == "int8" and weights == "int8"
        kernels = choose(network, plan.dtype, weights, has_int8_inputs=has_int8_inputs).plan
        if kernels is not None:
            sizes[weights] = weights_bytes(network, TORCH_DTYPES[plan.dtype], kernels)
    return sizes
