"""The KV pool: one preallocated tensor, and whole-block and single-slot moves in it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ferrule_server.executor.base import Int32Array
from ferrule_server.model.config import ModelConfig
from ferrule_server.model.memory import new_tensor

__all__ = ["KvPool", "bytes_per_block"]

_TILE_BYTES = 256 << 20
"""Blocks of so many bytes are copied at a time, which bounds what is allocated meanwhile."""


def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of K and V of all layers of one block."""
    return config.num_layers * 2 * config.num_kv_heads * block_size * config.head_dim * dtype.itemsize


class KvPool:
    """Owns the KV of every sequence.

    Invariant: ``tensor`` is ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``, contiguous, allocated
    and committed once; block 0 is the null block, whose content never matters.

    Args:
        config: Of the model.
        num_blocks: The null block included.
        block_size: Slots per block.
        dtype: Of K and V.
        device: Where the pool lies.
    """

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim)
        if device.type == "cpu":
            self.tensor = new_tensor(shape, dtype).zero_()  # the first touch: memory is short now or never
        else:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        self._blocks = self.tensor.view(num_blocks, -1).view(torch.uint8)
        self._words = self._blocks.view(torch.int64) if self._blocks.shape[1] % 8 == 0 else self._blocks

    def copy_blocks(self, block_pairs: Int32Array) -> None:
        """Copy whole blocks: int32 [n, 2] of (source, destination), destinations distinct, no source is one."""
        size = max(1, _TILE_BYTES // self._blocks.shape[1])
        for first in range(0, len(block_pairs), size):
            source, destination = self._columns(block_pairs[first : first + size])
            self._words.index_copy_(0, destination, self._words.index_select(0, source))

    def copy_slots(self, slot_pairs: Int32Array) -> None:
        """Copy single slots, all layers: int32 [n, 2] of (source, destination), read before any is written."""
        source, destination = self._columns(slot_pairs)
        block_size = self.tensor.shape[4]
        kept = self.tensor[source // block_size, :, :, :, source % block_size]
        self.tensor[destination // block_size, :, :, :, destination % block_size] = kept

    def read_blocks(self, block_ids: Int32Array) -> npt.NDArray[np.uint8]:
        """Return the raw bytes of blocks: uint8 [n, bytes_per_block], a copy."""
        data: npt.NDArray[np.uint8] = self._blocks.index_select(0, self._index(block_ids)).cpu().numpy()
        return data

    def write_blocks(self, block_ids: Int32Array, data: npt.NDArray[np.uint8]) -> None:
        """Overwrite blocks with raw bytes, uint8 [n, bytes_per_block].

        Raises:
            ValueError: ``data`` has another shape or dtype; nothing is written.
        """
        if data.dtype != np.uint8 or data.shape != (len(block_ids), self._blocks.shape[1]):
            raise ValueError(f"block data is {data.dtype} {data.shape}, expected uint8 [n, {self._blocks.shape[1]}]")
        self._blocks.index_copy_(0, self._index(block_ids), torch.tensor(data, device=self.tensor.device))

    def _index(self, ids: Int32Array) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self.tensor.device)

    def _columns(self, pairs: Int32Array) -> tuple[Tensor, Tensor]:
        source, destination = self._index(pairs).view(-1, 2).unbind(1)
        return source, destination
