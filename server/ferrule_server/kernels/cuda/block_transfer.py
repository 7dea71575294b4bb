"""Blocks of the KV pool gathered into one contiguous buffer, and scattered from it: export and import.

Maths: none. ``buffer[i, l] = pool[block_ids[i], l]``, or the other way round, for every block and layer l, byte for
byte. The buffer has no padding whatever the strides of the pool are, so that what one pool exported another imports.

Bytes moved: every byte is read once and written once. The buffer may be pinned memory of the host.
"""

from __future__ import annotations

from ferrule_server.kernels.cuda.copy_blocks import copy_range, num_ctas_needed
from ferrule_server.kernels.cuda.intrinsics import (
    I32,
    Address,
    cta_id,
    grid_launch_dependents,
    grid_wait,
    load_i32,
    num_ctas,
)
from ferrule_server.kernels.cuda.spec import KernelSpec, ModelShape
from ferrule_server.kernels.cuda.specialise import Constant, i32

__all__ = ["num_ctas_needed", "spec", "specs", "transfer_blocks", "variants"]


def transfer_blocks(
    pool: Address,
    block_stride: Address,
    layer_stride: Address,
    block_ids: Address,
    buffer: Address,
    num_blocks: I32,
    num_layers: I32,
    part_bytes: I32,
    *,
    DIRECTION: str,
    PARTS: int,
    U: int,
    THREADS: int,
) -> None:
    """Gather or scatter blocks.

    Launch: any grid of at least one CTA (``num_ctas_needed`` at most is of use), THREADS threads, no shared memory.

    Args:
        pool: bf16 [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]; changed by ``scatter``.
        block_stride: Bytes from one block to the next, a multiple of 16.
        layer_stride: Bytes from one layer of a block to the next, a multiple of 16.
        block_ids: int32 [num_blocks]; distinct for ``scatter``.
        buffer: Bytes [num_blocks, num_layers, PARTS * part_bytes]; changed by ``gather``.
        num_blocks: 0 or more.
        num_layers: Layers of a block.
        part_bytes: Bytes of a layer over PARTS, a multiple of 16.
        DIRECTION: ``gather`` (pool to buffer) or ``scatter`` (buffer to pool).
        PARTS: Pieces of a layer that different CTAs may copy.
        U: Accesses in flight per thread.
        THREADS: Per CTA.
    """
    assert DIRECTION in ("gather", "scatter")
    grid_launch_dependents()
    grid_wait()
    parts_per_block = i32(num_layers * PARTS)
    index = i32(0)
    piece = cta_id()
    while piece >= parts_per_block:
        piece = i32(piece - parts_per_block)
        index = i32(index + 1)
    while index < num_blocks:
        layer = i32(0)
        part = piece
        while part >= PARTS:
            part = i32(part - PARTS)
            layer = i32(layer + 1)
        inside = pool + load_i32(block_ids + index * 4) * block_stride + layer * layer_stride + part * part_bytes
        outside = buffer + (index * parts_per_block + piece) * part_bytes
        if DIRECTION == "gather":
            copy_range(inside, outside, part_bytes, U=U, THREADS=THREADS)
        else:
            copy_range(outside, inside, part_bytes, U=U, THREADS=THREADS)
        piece = i32(piece + num_ctas())
        while piece >= parts_per_block:
            piece = i32(piece - parts_per_block)
            index = i32(index + 1)


def spec(direction: str, *, parts: int = 4, unroll: int = 4, num_threads: int = 256) -> KernelSpec:
    """Return the kernel for one choice of its constants."""
    constants: dict[str, Constant] = {"DIRECTION": direction, "PARTS": parts, "U": unroll, "THREADS": num_threads}
    return KernelSpec(
        transfer_blocks,
        tuple(sorted(constants.items())),
        num_threads=num_threads,
        shared_bytes=0,
        ctas_per_sm=2,
        min_vector_loads=unroll,
    )


def specs(shape: ModelShape) -> list[KernelSpec]:  # noqa: ARG001  (every shape takes the same)
    """Return what a model of this shape needs."""
    return [spec("gather"), spec("scatter")]


def variants(shape: ModelShape) -> list[KernelSpec]:  # noqa: ARG001  (likewise)
    """Return what is worth measuring."""
    return [
        spec(direction, parts=parts, unroll=unroll)
        for direction in ("gather", "scatter")
        for parts in (1, 4)
        for unroll in (4, 8)
    ]
