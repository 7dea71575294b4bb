"""A KV pool with gaps between its layers and blocks, in the simulator's memory: what a kernel must not touch shows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tools.cuda_simulator import Memory

Bits = NDArray[np.uint16]
GAP = 0x7FC1  # a NaN that no test writes


@dataclass(frozen=True)
class PaddedPool:
    """Sizes of a pool; strides in bytes, multiples of 16.

    Attributes:
        num_blocks: Block 0 included.
        layer_gap: Bytes between the layers of a block.
        block_gap: Bytes between blocks.
    """

    num_blocks: int
    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    layer_gap: int = 48
    block_gap: int = 112

    @property
    def inside(self) -> tuple[int, int, int, int]:
        """Shape of one layer of one block."""
        return (2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one block."""
        return 2 * int(np.prod(self.inside))

    @property
    def layer_stride(self) -> int:
        """Bytes from layer to layer."""
        return self.layer_bytes + self.layer_gap

    @property
    def block_stride(self) -> int:
        """Bytes from block to block."""
        return self.num_layers * self.layer_stride + self.block_gap

    def random(self, seed: int) -> Bits:
        """Return bits of every kind: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]."""
        shape = (self.num_blocks, self.num_layers, *self.inside)
        return np.random.default_rng(seed).integers(0, 0x7F80, shape).astype(np.uint16)

    def put(self, memory: Memory, values: Bits, *, offset: int = 16) -> int:
        """Place a pool with its gaps and return its address."""
        return memory.put("pool", self._spread(values), mutable=True, offset=offset)

    def get(self, memory: Memory) -> Bits:
        """Return the pool without its gaps, which nobody has written."""
        raw = memory.get("pool")
        layers, rest = np.split(raw, [self.num_layers * self.layer_stride // 2], axis=1)
        layers = layers.reshape(self.num_blocks, self.num_layers, -1)
        values, gaps = np.split(layers, [self.layer_bytes // 2], axis=2)
        assert (gaps == GAP).all()
        assert (rest == GAP).all()
        return values.reshape(self.num_blocks, self.num_layers, *self.inside)

    def _spread(self, values: Bits) -> Bits:
        raw = np.full((self.num_blocks, self.block_stride // 2), GAP, np.uint16)
        for layer in range(self.num_layers):
            begin = layer * self.layer_stride // 2
            raw[:, begin : begin + self.layer_bytes // 2] = values[:, layer].reshape(self.num_blocks, -1)
        return raw
