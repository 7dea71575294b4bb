"""Makes the executor under test from weights in memory, as the server would from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import models
from ferrule_server.executor.base import Executor
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.tensors import ModelWeights

BLOCK_SIZE = 16
_SPARE_BLOCKS = 16
_SHARE_TO_FILL = 0.85
"""Of the memory, by what is known beforehand; the rest is for buffers, graphs and torch."""
_SHARE_TO_USE = 0.98


def device_of(task: dict[str, Any]) -> torch.device:
    """Return where a task runs."""
    return torch.device("cpu" if task["dry"] else "cuda")


def kv_bytes(config: ModelConfig, batch: int, length: int) -> int:
    """Return the size of a pool for so many sequences of so many tokens."""
    num_blocks = batch * -(-length // BLOCK_SIZE) + _SPARE_BLOCKS
    return num_blocks * BLOCK_SIZE * models.kv_bytes_per_token(config)


def fits(config: ModelConfig, batch: int, length: int, task: dict[str, Any], copies: int = 1) -> bool:
    """Return whether weights, ``copies`` of the KV and room to work fit the device."""
    if task["dry"]:
        return True
    needed = 2 * models.num_read_weights(config) + copies * kv_bytes(config, batch, length)
    return needed < _SHARE_TO_FILL * torch.cuda.mem_get_info()[1]


def open_executor(task: dict[str, Any], weights: ModelWeights, pool_bytes: int, max_context: int) -> Executor:
    """Return the executor over shared weights; without a GPU, torch on the CPU."""
    model = models.loaded(task["model"], weights)
    max_context = min(max_context, model.config.max_positions)
    if task["dry"]:
        from ferrule_server.executor.torch import TorchExecutor

        return TorchExecutor(model, kv_memory_bytes=pool_bytes, max_context=max_context, block_size=BLOCK_SIZE)
    from ferrule_server.executor.cuda.compose import prepare
    from ferrule_server.executor.cuda.options import GpuOptions

    free_bytes, total_bytes = torch.cuda.mem_get_info()
    options = GpuOptions(
        device="cuda:0",
        free_bytes=free_bytes + model.weights_bytes,  # the plan is for a model that is yet to come
        total_bytes=total_bytes,
        dtype=torch.bfloat16,
        max_context=max_context,
        memory_fraction=_SHARE_TO_USE,
        kv_memory_bytes=pool_bytes,
        kernel_bundle=Path(task["bundle"]) if task.get("bundle") else None,
    )
    return prepare(model.config, options).finish(model)
