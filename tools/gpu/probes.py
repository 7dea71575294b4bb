"""Kernels that only read: the ceiling that all others are measured against, and reads of KV in two layouts."""

from __future__ import annotations

from ferrule_server.kernels.cuda.intrinsics import (
    I32,
    Address,
    cta_id,
    grid_launch_dependents,
    grid_wait,
    load_i32,
    load_stream_v4,
    load_v4,
    num_ctas,
    store_u32,
    thread_id,
)
from ferrule_server.kernels.cuda.spec import KernelSpec
from ferrule_server.kernels.cuda.specialise import i32, registers, unrolled


def read_range(buffer: Address, num_bytes: Address, out: Address, *, U: int, THREADS: int) -> None:  # noqa: N803
    """Read a range once, 16 bytes per thread and access, U in flight.

    Args:
        buffer: Any bytes.
        num_bytes: A multiple of 16 * U * THREADS.
        out: uint32 [grid * THREADS], so that nothing is left out as unused.
        U: Accesses in flight.
        THREADS: Per CTA.
    """
    grid_launch_dependents()
    grid_wait()
    total = 0
    words = registers(U)
    for u in unrolled(U):
        words[u] = (0, 0, 0, 0)
    at = buffer + cta_id() * (U * THREADS * 16) + thread_id() * 16
    end = buffer + num_bytes
    while at < end:
        for u in unrolled(U):
            words[u] = load_stream_v4(at + u * THREADS * 16)
        for u in unrolled(U):
            total = total ^ words[u][0] ^ words[u][1] ^ words[u][2] ^ words[u][3]
        at = at + num_ctas() * (U * THREADS * 16)
    store_u32(out + (cta_id() * THREADS + thread_id()) * 4, total)


def read_blocks(  # noqa: PLR0917  (a launch has many arguments)
    pool: Address,
    block_stride: Address,
    layer_stride: Address,
    block_ids: Address,
    out: Address,
    num_blocks: I32,
    layer: I32,
    layer_bytes: I32,
    *,
    U: int,  # noqa: N803
    THREADS: int,  # noqa: N803
) -> None:
    """Read one layer of many blocks, in the order of a table.

    Args:
        pool: Any bytes.
        block_stride: Bytes from block to block.
        layer_stride: Bytes from layer to layer.
        block_ids: int32 [num_blocks].
        out: uint32 [grid * THREADS].
        num_blocks: In the table.
        layer: Which layer.
        layer_bytes: Of one block, a multiple of 16 * U * THREADS.
        U: Accesses in flight.
        THREADS: Per CTA.
    """
    grid_launch_dependents()
    grid_wait()
    total = 0
    words = registers(U)
    for u in unrolled(U):
        words[u] = (0, 0, 0, 0)
    index = cta_id()
    while index < num_blocks:
        at = pool + load_i32(block_ids + index * 4) * block_stride + layer * layer_stride + thread_id() * 16
        done = i32(0)
        while done < layer_bytes:
            for u in unrolled(U):
                words[u] = load_v4(at + done + u * THREADS * 16)
            for u in unrolled(U):
                total = total ^ words[u][0] ^ words[u][1] ^ words[u][2] ^ words[u][3]
            done = i32(done + U * THREADS * 16)
        index = i32(index + num_ctas())
    store_u32(out + (cta_id() * THREADS + thread_id()) * 4, total)


def read_range_spec(unroll: int, num_threads: int, ctas_per_sm: int) -> KernelSpec:
    """Return ``read_range`` for one choice of its constants."""
    constants = (("THREADS", num_threads), ("U", unroll))
    return KernelSpec(read_range, constants, num_threads, 0, ctas_per_sm)


def read_blocks_spec(unroll: int = 8, num_threads: int = 256, ctas_per_sm: int = 2) -> KernelSpec:
    """Return ``read_blocks`` for one choice of its constants."""
    constants = (("THREADS", num_threads), ("U", unroll))
    return KernelSpec(read_blocks, constants, num_threads, 0, ctas_per_sm)


CEILINGS = tuple(
    read_range_spec(unroll, num_threads, ctas)
    for unroll, num_threads, ctas in ((8, 256, 2), (8, 512, 1), (12, 256, 2), (12, 512, 1), (24, 128, 2))
)
"""What is tried for the ceiling, 64 and 96 KiB in flight per multiprocessor; the best counts. All loads of a turn fit
the registers that ``compile_spec`` leaves, half of a multiprocessor for all its CTAs."""
