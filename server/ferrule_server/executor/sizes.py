"""Sizes of weights and KV, from the configuration alone: nothing is read or allocated."""

from __future__ import annotations

import time
from math import prod
from typing import TYPE_CHECKING

import torch

from ferrule_server.executor.base import BLOCK_SIZE
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.parts import specs
from ferrule_server.model.stored import LAYOUTS
from ferrule_server.model.tensors import on_meta

if TYPE_CHECKING:
    from ferrule_server.kernels.cpu.plan import Plan

_PAIR_BYTES = 11
"""Of each value of a row: as an input, as an integer, and as an output."""
_PROBE_BYTES = 256 << 20
"""Far more than caches hold."""


def num_parameters(config: ModelConfig) -> int:
    """Return the distinct parameters of a network, tied ones once."""
    return sum(tensor.numel() for tensor in on_meta(config, torch.float32)[0].tensors())


def weights_bytes(config: ModelConfig, dtype: torch.dtype, plan: Plan | None = None) -> int:
    """Return the bytes of the weights of a loaded model.

    Args:
        config: The network.
        dtype: Of what is not packed.
        plan: Of the kernels of the processor, for which matrices are packed; None: they are not.
    """
    weights, _ = on_meta(config, dtype)
    total = sum(tensor.nbytes for tensor in weights.tensors())
    if plan is None:
        return total
    from ferrule_server.executor.cpu.weights import is_packed, packed_bytes

    linear = [spec for spec in specs(config) if is_packed(config, spec)]
    return total + sum(packed_bytes(config, plan, spec) - prod(spec.shape) * dtype.itemsize for spec in linear)


def active_bytes(config: ModelConfig, dtype: torch.dtype, plan: Plan | None = None) -> int:
    """Return the bytes of weights that a step of one row reads: of experts those that it passes, of embeddings none.

    The arguments are those of :func:`weights_bytes`.
    """
    from ferrule_server.executor.cpu.weights import is_packed, packed_bytes

    total, experts = 0.0, config.experts
    for spec in specs(config):
        is_read = spec.is_linear or spec.part.kind != "embedding"
        share = 1.0 if experts is None or spec.expert < 0 else experts.used / experts.count
        is_kept = plan is not None and is_packed(config, spec)
        num_bytes = packed_bytes(config, plan, spec) if plan and is_kept else prod(spec.shape) * dtype.itemsize
        total += is_read * share * num_bytes
    return round(total)


def pair_bytes(config: ModelConfig, num_rows: int) -> int:
    """Return about how many bytes are between the stages of a mixture, on a processor, for the rows of a step."""
    experts = config.experts
    if experts is None:
        return 0
    return num_rows * experts.used * (_PAIR_BYTES * config.hidden_size + 4 * experts.width)


def read_rate() -> float:
    """Return how many bytes of memory a second all threads of torch read together; this takes a third of a second."""
    values = torch.ones(_PROBE_BYTES // 8, dtype=torch.int64)
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        values.sum()
        seconds.append(time.perf_counter() - begin)
    return values.nbytes / min(seconds)


def largest_matrix_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of the largest matrix that may be packed when all others are in memory, as it is in the file.

    A head that is tied is not, if it is floats: it is the embedding, which files begin with.
    """
    found = []
    for spec in specs(config):
        num_values, num_bytes = LAYOUTS.get(config.blocks.get(spec.names[0], ""), (1, dtype.itemsize))
        if spec.is_linear and (num_values > 1 or spec.part.name != "embedding"):
            found.append(prod(spec.shape) // num_values * num_bytes)
    return max(found)


def kv_bytes(config: ModelConfig, dtype: torch.dtype, num_tokens: int) -> int:
    """Return the bytes of K and V of a sequence, in whole blocks."""
    return -(-num_tokens // BLOCK_SIZE) * BLOCK_SIZE * config.kv_values * dtype.itemsize
