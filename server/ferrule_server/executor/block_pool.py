"""The KV pool as one preallocated tensor, in which whole blocks and single slots are moved."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ferrule_server.executor.base import ExecutorInfo, Int32Array
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.memory import new_tensor

_COPY_BYTES = 64 << 20
"""The most bytes of blocks that are copied at a time, which bounds the memory allocated for a copy."""


def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of K and V of all layers of one block."""
    return config.kv_values * block_size * dtype.itemsize


class BlockPool:
    """The KV of every sequence: one tensor for each group of layers with equal heads, and a block is a row of all.

    Invariant: the tensors are contiguous, and allocated and committed once.

    Args:
        info: Of the executor that owns the pool.
        dtype: Of K and V.

    Attributes:
        tensors: For each of ``config.kv_groups``: ``[num_blocks, layers, 2, num_kv_heads, block_size, head_dim]``.
    """

    def __init__(self, info: ExecutorInfo, dtype: torch.dtype) -> None:
        self.tensors = tuple(_new_pool(info, group, dtype) for group in info.model.config.kv_groups)
        self._blocks = [tensor.view(info.num_blocks, -1).view(torch.uint8) for tensor in self.tensors]

    @torch.inference_mode()
    def copy_blocks(self, block_pairs: Int32Array) -> None:
        """Copy whole blocks, all layers: int32 [n, 2] of (source, destination), destinations distinct.

        No block is both a source and a destination.
        """
        for blocks in self._blocks:
            words = blocks.view(torch.int64) if blocks.shape[1] % 8 == 0 else blocks
            size = max(1, _COPY_BYTES // blocks.shape[1])
            for first in range(0, len(block_pairs), size):
                source, destination = self._index(block_pairs[first : first + size]).unbind(1)
                words.index_copy_(0, destination, words.index_select(0, source))

    @torch.inference_mode()
    def copy_slots(self, slot_pairs: Int32Array) -> None:
        """Copy single slots, all layers: int32 [n, 2] of (source, destination), read before any is written."""
        source, destination = self._index(slot_pairs).unbind(1)
        for tensor in self.tensors:
            block_size = tensor.shape[4]
            kept = tensor[source // block_size, :, :, :, source % block_size]
            tensor[destination // block_size, :, :, :, destination % block_size] = kept

    @torch.inference_mode()
    def read_blocks(self, block_ids: Int32Array) -> npt.NDArray[np.uint8]:
        """Return the raw bytes of blocks: uint8 [n, bytes_per_block], a copy."""
        parts = [blocks.index_select(0, self._index(block_ids)) for blocks in self._blocks]
        data: npt.NDArray[np.uint8] = (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).cpu().numpy()
        return data

    @torch.inference_mode()
    def write_blocks(self, block_ids: Int32Array, data: npt.NDArray[np.uint8]) -> None:
        """Overwrite blocks with raw bytes of the same shape as :meth:`read_blocks` returns.

        Raises:
            ValueError: ``data`` has another shape or dtype; nothing is written.
        """
        sizes = [blocks.shape[1] for blocks in self._blocks]
        if data.dtype != np.uint8 or data.shape != (len(block_ids), sum(sizes)):
            raise ValueError(f"block data is {data.dtype} {data.shape}, expected uint8 [n, {sum(sizes)}]")
        copied = torch.tensor(data, device=self.tensors[0].device)
        for blocks, part in zip(self._blocks, torch.split(copied, sizes, 1), strict=True):
            blocks.index_copy_(0, self._index(block_ids), part)

    def _index(self, values: Int32Array) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.tensors[0].device)


def _new_pool(info: ExecutorInfo, group: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    device = torch.device(info.device)
    kind = info.model.config.layers[group[0]]
    shape = (info.num_blocks, len(group), 2, kind.num_kv_heads, info.block_size, kind.head_dim)
    if device.type == "cpu":
        return new_tensor(shape, dtype).zero_()  # touches every page, so a lack of memory shows now
    return torch.zeros(shape, dtype=dtype, device=device)
