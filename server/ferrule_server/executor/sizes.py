"""Sizes of weights and KV, from the configuration alone: nothing is read or allocated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ferrule_server.executor.base import BLOCK_SIZE
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.tensors import ModelWeights, on_meta
from ferrule_server.model.weights import TORCH_DTYPES

if TYPE_CHECKING:
    from ferrule_server.kernels.cpu.plan import Plan

__all__ = ["TORCH_DTYPES", "kv_bytes", "largest_matrix_bytes", "num_parameters", "weights_bytes"]


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
    from ferrule_server.executor.cpu.weights import matrices, packed_bytes

    packed = matrices(config)
    return total + sum(packed_bytes(config, plan, *it) - _matrix(weights, *it).nbytes for it in packed)


def largest_matrix_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of the largest matrix that may be packed when all others are in memory.

    A head that is tied is not: it is the embedding, which files begin with.
    """
    from ferrule_server.executor.cpu.weights import matrices

    weights, _ = on_meta(config, dtype)
    found = (_matrix(weights, *it) for it in matrices(config))
    return max(matrix.nbytes for matrix in found if matrix is not weights.embedding)


def kv_bytes(config: ModelConfig, dtype: torch.dtype, num_tokens: int) -> int:
    """Return the bytes of K and V of a sequence, in whole blocks."""
    return -(-num_tokens // BLOCK_SIZE) * BLOCK_SIZE * config.kv_values * dtype.itemsize


def _matrix(weights: ModelWeights, name: str, layer: int) -> torch.Tensor:
    """Return a matrix by its field and its layer; -1: a field of the whole model."""
    matrix: torch.Tensor = getattr(weights if layer < 0 else weights.layers[layer], name)
    return matrix
