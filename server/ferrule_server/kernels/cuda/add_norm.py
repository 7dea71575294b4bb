"""Residual and RMSNorm of many rows: what precedes a linear when there are too many rows to normalise in each CTA.

Maths: ``hidden += delta`` (where there is one), ``normed = rms_norm(hidden) * weight``, rounded to bf16 after the sum,
after the scaling and after the multiplication. See ``kernels.reference.rms_norm``. The bits are those of the norm in
front of a GEMV: the order of the sum is the same, and depends on nothing.

Bytes moved: ``4 * num_rows * size``, twice that with a delta. Source: nothing to name.
"""

from __future__ import annotations

from typing import Any

from ferrule_server.kernels.cuda import intrinsics as ptx
from ferrule_server.kernels.cuda.constants import CHUNK
from ferrule_server.kernels.cuda.intrinsics import F32, I32, Address, Vec4, device
from ferrule_server.kernels.cuda.spec import KernelSpec, ModelShape
from ferrule_server.kernels.cuda.specialise import Constant, i32, registers, unrolled
from ferrule_server.kernels.cuda.vectors import load_vector, normalise, prefetch_norm

__all__ = ["add_norm", "chunks_per_thread", "shared_bytes", "spec", "specs"]


def add_norm(
    hidden: Address,
    delta: Address,
    norm_weight: Address,
    normed: Address,
    num_rows: I32,
    size: I32,
    eps: F32,
    *,
    X: int,
    WARPS: int,
    ADD: bool,
) -> None:
    """Add to rows of the residual stream and normalise them.

    Launch: any grid (one CTA per row at most is of use), ``32 * WARPS`` threads, ``shared_bytes`` of dynamic shared
    memory.

    Args:
        hidden: bf16 [num_rows, size], changed where ADD.
        delta: bf16 [num_rows, size], read where ADD.
        norm_weight: bf16 [size], immutable.
        normed: bf16 [num_rows, size], written; may be ``delta``.
        num_rows: Rows.
        size: Of a row, a multiple of 8, at most ``256 * X * WARPS``.
        eps: Of the norm.
        X: Chunks of a row that a thread holds.
        WARPS: Per CTA.
        ADD: There is a delta.
    """
    norm = registers(X)
    prefetch_norm(norm, norm_weight, size, X=X, WARPS=WARPS)
    ptx.grid_launch_dependents()
    ptx.grid_wait()
    row = i32(ptx.cta_id())
    # Two sets of sums in turn: who writes one again has passed the barrier of the row between, and that comes after
    # the last read of it.
    base = i32(0)
    while row < num_rows:
        chunks = registers(1, X)
        load_vector(chunks, hidden + row * (size * 2), i32(0), size, X=X, WARPS=WARPS, m=0)
        if ADD:
            deltas = registers(1, X)
            load_vector(deltas, delta + row * (size * 2), i32(0), size, X=X, WARPS=WARPS, m=0)
            for i in unrolled(X):
                chunks[0, i] = add_chunk(chunks[0, i], deltas[0, i])
            store_vector(hidden + row * (size * 2), chunks, size, X=X, WARPS=WARPS)
        normalise(chunks, norm, size, eps, base, M=1, X=X, WARPS=WARPS)
        store_vector(normed + row * (size * 2), chunks, size, X=X, WARPS=WARPS)
        base = i32(X * WARPS * 4 - base)
        row = i32(row + ptx.num_ctas())


@device
def add_chunk(a: Vec4, b: Vec4) -> Vec4:
    """Return eight sums of bf16 values, rounded."""
    words = registers(4, init=0)
    for k in unrolled(4):
        words[k] = ptx.pack_bf16(ptx.bf16_low(a[k]) + ptx.bf16_low(b[k]), ptx.bf16_high(a[k]) + ptx.bf16_high(b[k]))
    return (words[0], words[1], words[2], words[3])


@device
def store_vector(out: Address, chunks: Any, size: I32, *, X: int, WARPS: int) -> None:
    """Store this thread's chunks [1, X] of a row."""
    for i in unrolled(X):
        k = i32((ptx.thread_id() + 32 * WARPS * i) * CHUNK)
        if k < size:
            ptx.store_v4(out + k * 2, chunks[0, i])


def chunks_per_thread(size: int, *, WARPS: int) -> int:
    """Return the constant X for rows of ``size`` values; at least 2, so that few cubins serve all models."""
    return max(2, -(-size // (32 * WARPS * CHUNK)))


def shared_bytes(*, X: int, WARPS: int) -> int:
    """Return the dynamic shared memory of a launch in bytes."""
    return 2 * X * WARPS * 4


def spec(size: int, *, ADD: bool, WARPS: int = 8) -> KernelSpec:
    """Return the kernel for rows of up to ``size`` values; the keywords are its constants."""
    chunks = chunks_per_thread(size, WARPS=WARPS)
    constants: dict[str, Constant] = {"ADD": ADD, "WARPS": WARPS, "X": chunks}
    return KernelSpec(
        kernel=add_norm,
        constants=tuple(sorted(constants.items())),
        num_threads=32 * WARPS,
        shared_bytes=shared_bytes(X=chunks, WARPS=WARPS),
        min_vector_loads=(3 if ADD else 2) * chunks,
        prefetches=True,
    )


def specs(shape: ModelShape) -> list[KernelSpec]:
    """Return what a model needs: with and without a delta."""
    return [spec(shape.hidden_size, ADD=has_delta) for has_delta in (False, True)]
