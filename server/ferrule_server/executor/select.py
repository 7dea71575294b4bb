"""Chooses and makes the executor that the settings ask for. Torch is imported only when it is needed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from ferrule_server.config import DEFAULT_KV_BYTES, DEMO_MODEL, ServerConfig
from ferrule_server.errors import ConfigError, ModelError
from ferrule_server.executor.base import Executor
from ferrule_server.executor.paged_reference import PagedReferenceExecutor
from ferrule_server.model.config import read_config

if TYPE_CHECKING:
    from ferrule_server.text.chat_template import ChatTemplate
    from ferrule_server.text.tokenizer import Tokenizer

OnProgress = Callable[[str, float], None]
"""Called with what is being done, for people, and how far all of it has come, from 0 to 1; from any thread."""

_BLOCK_SIZE: Final = 16
_DEMO_FOLDER: Final = Path(__file__).parent.parent / "demo_model"
_CPUINFO: Final = Path("/proc/cpuinfo")
_BFLOAT16_FLAGS: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_PAGED_REFERENCE_CONTEXT: Final = 512
_SMALL_WEIGHTS_BYTES: Final = 128 << 20
_WEIGHTS_SHARE: Final = 0.9
"""Part of the loading time, roughly, that reading weights takes."""


@dataclass(frozen=True, slots=True)
class LoadedExecutor:
    """An executor ready to run, and the tokenizer and the chat template of its model (None where it has none)."""

    executor: Executor
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None = None


def create_executor(config: ServerConfig, on_progress: OnProgress) -> LoadedExecutor:
    """Load what the settings name; may take long.

    Raises:
        ConfigError: The settings do not fit the model or the machine.
        ModelError: The model folder cannot be loaded.
    """
    if config.executor == "paged-reference":
        return LoadedExecutor(_paged_reference(config), None)
    return _torch(config, on_progress)


def suggested_threads(weights_bytes: int, num_cores: int) -> int:
    """Return how many threads compute a model of this size fastest: one for a small one, else one per core.

    Threads that do not spin while they wait are woken for every operation; a small model's operations are shorter than
    that (the shipped model, 9 MB: batch 1 twice as fast with one thread, batch 16 and prefill faster too).
    """
    return 1 if weights_bytes < _SMALL_WEIGHTS_BYTES else num_cores


def has_bfloat16_instructions(cpuinfo: str) -> bool:
    """Whether the processor multiplies bfloat16 in hardware, by the flags of ``/proc/cpuinfo``."""
    lines = (line for line in cpuinfo.splitlines() if line.startswith(("flags", "Features")))
    return any(_BFLOAT16_FLAGS & set(line.partition(":")[2].split()) for line in lines)


def _paged_reference(config: ServerConfig) -> Executor:
    kv_memory_bytes = config.kv_memory_bytes or DEFAULT_KV_BYTES
    with _allocating(kv_memory_bytes):
        return PagedReferenceExecutor(
            max_context=config.max_context or _PAGED_REFERENCE_CONTEXT,
            block_size=_BLOCK_SIZE,
            kv_memory_bytes=kv_memory_bytes,
        )


def _torch(config: ServerConfig, on_progress: OnProgress) -> LoadedExecutor:
    folder = _folder(config)
    _check_context(config, folder)
    on_progress("importing torch", 0.0)
    import torch

    from ferrule_server.executor.torch_executor import TorchExecutor
    from ferrule_server.model.weights import load_model
    from ferrule_server.text.chat_template import ChatTemplate
    from ferrule_server.text.tokenizer import Tokenizer

    def on_bytes(done_bytes: int, total_bytes: int) -> None:
        on_progress("reading weights", 0.05 + _WEIGHTS_SHARE * done_bytes / max(1, total_bytes))

    tokenizer = Tokenizer.load(folder)
    chat_template = None if tokenizer is None else ChatTemplate.load(folder)
    model = load_model(folder, dtype=_dtype(config), on_progress=on_bytes)
    if config.model == DEMO_MODEL:
        model.model_id = DEMO_MODEL
    torch.set_num_threads(config.num_threads or suggested_threads(model.weights_bytes, torch.get_num_threads()))
    on_progress("allocating the KV pool", 0.05 + _WEIGHTS_SHARE)
    kv_memory_bytes = config.kv_memory_bytes or DEFAULT_KV_BYTES
    with _allocating(kv_memory_bytes):
        executor = TorchExecutor(
            model,
            kv_memory_bytes=kv_memory_bytes,
            max_context=config.max_context or model.config.max_positions,
            block_size=_BLOCK_SIZE,
        )
    return LoadedExecutor(executor, tokenizer, chat_template)


@contextlib.contextmanager
def _allocating(num_bytes: int) -> Iterator[None]:
    """Say which setting to change when the body, which allocates the KV pool, finds no memory for it.

    Raises:
        ConfigError: The system refused it.
    """
    try:
        yield
    except (MemoryError, OSError) as error:
        text = f"--kv-memory: this machine has no {num_bytes / (1 << 30):.1f} GiB for the KV pool; ask for less"
        raise ConfigError(text) from error


def _folder(config: ServerConfig) -> Path:
    if config.model is None:
        raise ConfigError("--model is needed: demo, or a folder")
    if config.model == DEMO_MODEL:
        return _demo_folder()
    folder = Path(config.model).expanduser()
    if not folder.is_dir():
        raise ModelError(f"--model {config.model}: there is no such folder")
    return folder


def _demo_folder() -> Path:
    if not (_DEMO_FOLDER / "model.safetensors").is_file():
        raise ModelError(
            "--model demo: this installation lacks the files of the model that ships; install ferrule again, "
            "name a folder with --model, or run --executor paged-reference, which needs none"
        )
    return _DEMO_FOLDER


def _check_context(config: ServerConfig, folder: Path) -> None:
    """Refuse a context that the model does not have, before its weights are read.

    Raises:
        ConfigError: ``--max-context`` is beyond it.
        ModelError: config.json is missing or unusable.
    """
    most = read_config(folder).max_positions
    if config.max_context is not None and config.max_context > most:
        raise ConfigError(f"--max-context {config.max_context} is beyond the {most} tokens that {config.model} knows")


def _dtype(config: ServerConfig) -> Literal["float32", "bfloat16"]:
    if config.dtype == "auto":
        return "bfloat16" if _has_bfloat16() else "float32"
    return "bfloat16" if config.dtype == "bfloat16" else "float32"


def _has_bfloat16() -> bool:
    try:
        return has_bfloat16_instructions(_CPUINFO.read_text())
    except OSError:
        return False
