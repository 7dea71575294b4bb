"""Copy-on-write on the GPU: whole blocks copied within the pool by one kernel that allocates nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from ferrule_server.executor.base import Int32Array
from ferrule_server.executor.cuda.gpu import Gpu
from ferrule_server.executor.cuda.kernel_set import Arguments, KernelSet
from ferrule_server.executor.cuda.layout import pack
from ferrule_server.executor.cuda.staging import UploadRing
from ferrule_server.kernels.cuda import copy_blocks
from ferrule_server.kernels.cuda.spec import KernelSpec

__all__ = ["MAX_PAIRS", "PAIR_LAYOUT", "BlockCopies", "block_copy_spec"]

MAX_PAIRS = 1024
"""Pairs of one launch; more take several."""

PAIR_LAYOUT = pack([("pairs", torch.int32, (MAX_PAIRS, 2))])
"""Of what a launch reads."""


def block_copy_spec() -> KernelSpec:
    """Return the kernel that copies, for the set that is built."""
    return copy_blocks.spec()


class BlockCopies:
    """Copies blocks, in the order of the stream.

    Args:
        gpu: That the pool is on.
        kernels: With :func:`block_copy_spec` among them.
        pool: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], adopted by ``gpu`` already.
        pairs: uint8 [PAIR_LAYOUT.num_bytes] on the device, of ``gpu``; nobody else's.
    """

    def __init__(self, gpu: Gpu, kernels: KernelSet, pool: Tensor, pairs: Tensor) -> None:
        assert pool[0, 0].is_contiguous(), pool.stride()
        self._gpu = gpu
        self._kernels = kernels
        self._pool = pool
        self._pairs = pairs
        self._staging = UploadRing(gpu, "block pairs", pairs, PAIR_LAYOUT)

    def copy(self, block_pairs: Int32Array) -> None:
        """Put copies of whole blocks, all layers, into the stream.

        Args:
            block_pairs: int32 [n, 2] of (source, destination), destinations distinct, no source is one.

        Raises:
            GpuError: It was refused; some may be in the stream.
        """
        for first in range(0, len(block_pairs), MAX_PAIRS):
            self._copy(block_pairs[first : first + MAX_PAIRS])

    def _copy(self, pairs: Int32Array) -> None:
        self._staging.fill()["pairs"][: len(pairs)] = pairs
        self._staging.upload(slice(0, PAIR_LAYOUT.end_of("pairs", len(pairs))))
        spec, (_, num_layers) = block_copy_spec(), self._pool.shape[:2]
        layer_bytes = self._pool[0, 0].numel() * self._pool.itemsize
        arguments: Arguments = {
            "pool": self._pool,
            "block_stride": self._pool.stride(0) * self._pool.itemsize,
            "layer_stride": self._pool.stride(1) * self._pool.itemsize,
            "pairs": self._pairs,
            "num_pairs": len(pairs),
            "num_layers": num_layers,
            "part_bytes": layer_bytes // copy_blocks.num_parts(spec),
        }
        grid = copy_blocks.num_ctas_needed(spec, len(pairs), num_layers, self._gpu.info.num_sms)
        self._gpu.launch([self._kernels.prepare(spec, arguments, grid, starts_early=False)])
