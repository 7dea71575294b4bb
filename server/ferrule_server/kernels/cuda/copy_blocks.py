"""Whole blocks of the KV pool copied within it, all layers: what a fork does before two sequences write one block.

Maths: none. ``pool[target, l] = pool[source, l]`` for every pair and layer l, byte for byte. A layer of a block is one
contiguous range; a CTA copies one part of one layer of one pair at a time, 16 bytes per thread and access, U in flight.

Bytes moved: every copied byte is read once and written once.

Source: the operation is ``copy_blocks`` of vLLM (csrc/cache_kernels.cu, Apache-2.0); nothing of its code is used.
"""

from __future__ import annotations

from ferrule_server.kernels.cuda.intrinsics import (
    I32,
    Address,
    cta_id,
    device,
    grid_launch_dependents,
    grid_wait,
    load_i32,
    load_v4,
    num_ctas,
    store_v4,
    thread_id,
)
from ferrule_server.kernels.cuda.spec import KernelSpec, ModelShape
from ferrule_server.kernels.cuda.specialise import Constant, i32, registers, unrolled

__all__ = ["copy_blocks", "copy_range", "num_ctas_needed", "num_parts", "spec", "specs"]


def copy_blocks(
    pool: Address,
    block_stride: Address,
    layer_stride: Address,
    pairs: Address,
    num_pairs: I32,
    num_layers: I32,
    part_bytes: I32,
    *,
    PARTS: int,
    U: int,
    THREADS: int,
) -> None:
    """Copy blocks.

    Launch: any grid of at least one CTA (``num_ctas_needed`` at most is of use), THREADS threads, no shared memory.

    Args:
        pool: bf16 [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], changed in place.
        block_stride: Bytes from one block to the next, a multiple of 16.
        layer_stride: Bytes from one layer of a block to the next, a multiple of 16.
        pairs: int32 [num_pairs, 2], (source, target) blocks; targets are distinct and no source is one.
        num_pairs: 0 or more.
        num_layers: Layers of a block.
        part_bytes: Bytes of a layer over PARTS, a multiple of 16.
        PARTS: Pieces of a layer that different CTAs may copy.
        U: Accesses in flight per thread.
        THREADS: Per CTA.
    """
    grid_launch_dependents()
    grid_wait()
    parts_per_block = i32(num_layers * PARTS)
    pair = i32(0)
    piece = cta_id()
    while piece >= parts_per_block:
        piece = i32(piece - parts_per_block)
        pair = i32(pair + 1)
    while pair < num_pairs:
        layer = i32(0)
        part = piece
        while part >= PARTS:
            part = i32(part - PARTS)
            layer = i32(layer + 1)
        place = pool + layer * layer_stride + part * part_bytes
        source = place + load_i32(pairs + pair * 8) * block_stride
        target = place + load_i32(pairs + pair * 8 + 4) * block_stride
        copy_range(source, target, part_bytes, U=U, THREADS=THREADS)
        piece = i32(piece + num_ctas())
        while piece >= parts_per_block:
            piece = i32(piece - parts_per_block)
            pair = i32(pair + 1)


@device
def copy_range(source: Address, target: Address, num_bytes: I32, *, U: int, THREADS: int) -> None:
    """Copy a range that does not overlap its target, by all threads of the CTA; both start at multiples of 16."""
    words = registers(U)
    for u in unrolled(U):
        words[u] = (0, 0, 0, 0)
    at = i32(thread_id() * 16)
    while at < num_bytes:
        left = i32(num_bytes - at)
        for u in unrolled(U):
            if left > u * THREADS * 16:
                words[u] = load_v4(source + at + u * THREADS * 16)
        for u in unrolled(U):
            if left > u * THREADS * 16:
                store_v4(target + at + u * THREADS * 16, words[u])
        at = i32(at + U * THREADS * 16)


def spec(*, parts: int = 4, unroll: int = 4, num_threads: int = 256) -> KernelSpec:
    """Return the kernel for one choice of its constants."""
    constants: dict[str, Constant] = {"PARTS": parts, "U": unroll, "THREADS": num_threads}
    return KernelSpec(
        copy_blocks,
        tuple(sorted(constants.items())),
        num_threads=num_threads,
        shared_bytes=0,
        ctas_per_sm=2,
        min_vector_loads=unroll,
    )


def specs(shape: ModelShape) -> list[KernelSpec]:  # noqa: ARG001  (every shape takes the same)
    """Return what a model of this shape needs."""
    return [spec()]


def num_ctas_needed(made: KernelSpec, num_pairs: int, num_layers: int, num_sms: int) -> int:
    """Return the CTAs that have work, at most one wave of half the GPU."""
    return max(1, min(num_pairs * num_layers * num_parts(made), num_sms * made.ctas_per_sm))


def num_parts(made: KernelSpec) -> int:
    """Return PARTS: what ``part_bytes`` is a layer of a block divided by."""
    parts = dict(made.constants)["PARTS"]
    assert isinstance(parts, int)
    return parts
