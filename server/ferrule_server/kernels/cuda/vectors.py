"""Vectors in shared memory, for kernels in which every CTA multiplies with all of them: loading, RMSNorm, padding.

A thread loads the chunks of 16 bytes ``thread, thread + threads, ...`` of a vector. The norm's sum of squares has one
order whatever the number of threads: eight values in order, 32 chunks by a butterfly, these sums in order.
"""

from __future__ import annotations

from typing import Any

from ferrule_server.kernels.cuda import intrinsics as ptx
from ferrule_server.kernels.cuda.constants import CHUNK
from ferrule_server.kernels.cuda.intrinsics import F32, I32, Address, Offset, Vec4, device
from ferrule_server.kernels.cuda.specialise import i32, registers, unrolled

__all__ = ["load_vector", "normalise", "prefetch_norm", "stage_vectors", "vector_stride", "warp_sum"]


@device
def vector_stride(size: I32, *, SPAN: int) -> I32:
    """Return the bytes of a vector in shared memory: ``size`` rounded up to a multiple of SPAN, a power of two."""
    return i32(((size + SPAN - 1) & -SPAN) * 2)


@device
def prefetch_norm(norm: Any, norm_weight: Address, size: I32, *, X: int, WARPS: int) -> None:
    """Load this thread's chunks of the norm's weight into ``norm`` [X]; zero beyond ``size``."""
    for i in unrolled(X):
        norm[i] = (0, 0, 0, 0)
        k = i32((ptx.thread_id() + 32 * WARPS * i) * CHUNK)
        if k < size:
            norm[i] = ptx.load_stream_v4(norm_weight + k * 2)


@device
def load_vector(chunks: Any, x: Address, start: I32, size: I32, *, X: int, WARPS: int, m: int) -> None:
    """Load this thread's chunks of a vector, from value ``start``, into ``chunks`` [m, X]; zero beyond ``size``."""
    for i in unrolled(X):
        chunks[m, i] = (0, 0, 0, 0)
        k = i32(start + (ptx.thread_id() + 32 * WARPS * i) * CHUNK)
        if k < size:
            chunks[m, i] = ptx.load_v4(x + k * 2)


@device
def normalise(chunks: Any, norm: Any, size: I32, eps: F32, base: I32, *, M: int, X: int, WARPS: int) -> None:
    """Apply RMSNorm to M vectors, spread over the CTA's registers as :func:`load_vector` does.

    ``base`` is the offset of float32 [M, X * WARPS] in shared memory; nothing else may use it before a barrier.
    """
    for m in unrolled(M):
        for i in unrolled(X):
            total = warp_sum(ptx.dot_bf16(0.0, chunks[m, i], chunks[m, i]))
            if (ptx.thread_id() & 31) == 0:
                ptx.shared_store_f32(i32(base + ((m * X + i) * WARPS + (ptx.thread_id() >> 5)) * 4), total)
    ptx.barrier()
    for m in unrolled(M):
        total = 0.0
        for i in unrolled(X * WARPS):
            # As a product: a sum the compiler is free to add in another order.
            total = ptx.fma(ptx.shared_load_f32(i32(base + (m * X * WARPS + i) * 4)), 1.0, total)
        scale = ptx.reciprocal_sqrt(total * ptx.reciprocal(ptx.float_of(size)) + eps)
        for i in unrolled(X):
            chunks[m, i] = scale_chunk(chunks[m, i], norm[i], scale)


@device
def stage_vectors(
    x: Address, norm: Any, size: I32, eps: F32, base: Offset, *, M: int, X: int, SPAN: int, WARPS: int, NORM: bool
) -> None:
    """Put M vectors, normalised where NORM, into shared memory at ``base``, padded with zeros; end with a barrier.

    Behind them lies what :func:`normalise` needs; ``norm`` is from :func:`prefetch_norm`. With NORM the CTA's X chunks
    per thread hold the whole padded vector, and there is no loop: out of one the compiler would move the unpacking of
    ``norm`` in front of the loads of ``x``, which would then wait for it.
    """
    stride = vector_stride(size, SPAN=SPAN)
    chunks = registers(M, X)
    start = i32(0)
    if NORM:
        for m in unrolled(M):
            load_vector(chunks, x + m * size * 2, start, size, X=X, WARPS=WARPS, m=m)
        normalise(chunks, norm, size, eps, i32(base + M * stride), M=M, X=X, WARPS=WARPS)
        _store_chunks(chunks, start, base, stride, M=M, X=X, WARPS=WARPS)
    else:
        while start * 2 < stride:
            for m in unrolled(M):
                load_vector(chunks, x + m * size * 2, start, size, X=X, WARPS=WARPS, m=m)
            _store_chunks(chunks, start, base, stride, M=M, X=X, WARPS=WARPS)
            start = i32(start + 32 * WARPS * X * CHUNK)
    ptx.barrier()


@device
def _store_chunks(chunks: Any, start: I32, base: Offset, stride: I32, *, M: int, X: int, WARPS: int) -> None:
    """Put this thread's chunks [M, X] of M vectors, from value ``start``, into shared memory."""
    for m in unrolled(M):
        for i in unrolled(X):
            k = i32(start + (ptx.thread_id() + 32 * WARPS * i) * CHUNK)
            if k * 2 < stride:
                ptx.shared_store_v4(i32(base + m * stride + k * 2), chunks[m, i])


@device
def scale_chunk(values: Vec4, weights: Vec4, scale: F32) -> Vec4:
    """Return eight values times a scale, rounded to bf16, times their weights, rounded again."""
    words = registers(4, init=0)
    for k in unrolled(4):
        low = ptx.round_bf16(ptx.bf16_low(values[k]) * scale) * ptx.bf16_low(weights[k])
        high = ptx.round_bf16(ptx.bf16_high(values[k]) * scale) * ptx.bf16_high(weights[k])
        words[k] = ptx.pack_bf16(low, high)
    return (words[0], words[1], words[2], words[3])


@device
def warp_sum(value: F32) -> F32:
    """Return the sum over the warp, the same bits in every lane."""
    for s in unrolled(5):
        value = value + ptx.shuffle_xor_f32(value, 16 >> s)
    return value
