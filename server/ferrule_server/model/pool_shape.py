"""The places of K and V in the block pool, and how the rows of a step are written there."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PoolShape:
    """The pool as a matrix. A *piece* is K or V of one head in one block: ``block_size`` slots of ``head_dim``."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    block_size: int
    head_dim: int

    @classmethod
    def of(cls, pool: Tensor, num_heads: int) -> PoolShape:
        """Return the shape of a pool [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]."""
        _, num_layers, _, num_kv_heads, block_size, head_dim = pool.shape
        return cls(num_layers, num_heads, num_kv_heads, block_size, head_dim)

    @property
    def num_queries_per_kv(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    def slot_rows(self, slots: Int32Array) -> Int64Array:
        """Return the rows of layer 0 in the pool viewed as [-1, head_dim], flat [slots, 2, num_kv_heads]."""
        blocks, offsets = np.divmod(slots.astype(np.int64), self.block_size)
        heads = np.arange(2 * self.num_kv_heads, dtype=np.int64) * self.block_size
        first = blocks * (self.num_layers * 2 * self.num_kv_heads * self.block_size) + offsets
        return (first[:, None] + heads).reshape(-1)

    def pieces(self, block_tables: Int32Array) -> Int64Array:
        """Return the pieces of layer 0, flat [2, seqs, num_kv_heads, blocks], in the order of the gathered copy."""
        first = block_tables.astype(np.int64) * (self.num_layers * 2 * self.num_kv_heads)
        heads = np.arange(2 * self.num_kv_heads, dtype=np.int64).reshape(2, 1, self.num_kv_heads, 1)
        return (first[None, :, None, :] + heads).reshape(-1)

    def layer_pieces(self, pool: Tensor, layer: int) -> Tensor:
        """Return a view [-1, block_size * head_dim] of the pool, in which :meth:`pieces` are those of this layer."""
        return pool.view(-1, self.block_size * self.head_dim)[layer * 2 * self.num_kv_heads :]


class KvWriter:
    """Writes the K and V of a step's rows; rows without a slot are left out.

    Args:
        pool: The KV pool, contiguous; :meth:`write` changes it.
        shape: The shape of the pool.
        slot_mapping: int32 [num_rows]; -1 = do not write.
    """

    def __init__(self, pool: Tensor, shape: PoolShape, slot_mapping: Int32Array) -> None:
        self._shape = shape
        self._slots = pool.view(-1, shape.head_dim)
        written = np.flatnonzero(slot_mapping >= 0)
        self._written = None if len(written) == len(slot_mapping) else index_tensor(written, pool)
        self._slot_rows = index_tensor(shape.slot_rows(slot_mapping[written]), pool)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the K and V of one layer, each [num_rows, num_kv_heads, head_dim]."""
        kv = torch.stack((key, value), dim=1)
        if self._written is not None:
            kv = kv[self._written]
        shape = self._shape
        layer_slots = self._slots[layer * 2 * shape.num_kv_heads * shape.block_size :]
        layer_slots.index_copy_(0, self._slot_rows, kv.view(-1, shape.head_dim))


def index_tensor(values: npt.NDArray[np.integer], pool: Tensor) -> Tensor:
    """Return a copy of the values as int64 on the device of the pool."""
    return torch.from_numpy(values.astype(np.int64)).to(pool.device)
