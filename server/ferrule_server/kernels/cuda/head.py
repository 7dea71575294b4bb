"""The output head for one or two rows: logits, and the best token of each row.

Maths: ``logits[m, v] = float32(bf16(sum_k bf16(rms_norm(hidden)[m, k]) * weight[v, k]))``, and per row the
token with the largest logit, the lowest id among equals, -1 where a logit is NaN or infinite. See
``kernels.reference.best_tokens``.

The CTA that arrives last at a ticket takes the maximum over the keys (:mod:`ferrule_server.kernels.cuda.best_token`)
of all CTAs.

Source: the multiplication is :mod:`ferrule_server.kernels.cuda.gemv`'s; the ticket is the "threadFenceReduction" of
NVIDIA's CUDA samples, with a counter that wraps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ferrule_server.kernels.cuda import intrinsics as ptx
from ferrule_server.kernels.cuda.best_token import (
    best_partial,
    cta_max_key,
    key_of,
    max_key,
    token_of,
    warp_max_key,
)
from ferrule_server.kernels.cuda.constants import CHUNK, LOG2
from ferrule_server.kernels.cuda.gemv import (
    RINGS,
    begin_rows,
    chunks_per_thread,
    multiply,
    own_sum,
    vector_loads,
)
from ferrule_server.kernels.cuda.gemv import shared_bytes as vector_bytes
from ferrule_server.kernels.cuda.intrinsics import F32, I32, Address
from ferrule_server.kernels.cuda.spec import SHARED_LIMITS, KernelSpec, ModelShape, first_that_fits
from ferrule_server.kernels.cuda.specialise import Constant, i32, registers, unrolled
from ferrule_server.kernels.cuda.ticket import arrive
from ferrule_server.kernels.cuda.vectors import prefetch_norm, stage_vectors, vector_stride

__all__ = ["head", "partial_bytes", "planned", "shared_bytes", "spec", "specs"]


def head(
    hidden: Address,
    norm_weight: Address,
    weight: Address,
    logits: Address,
    tokens: Address,
    partials: Address,
    ticket: Address,
    vocab_size: I32,
    size: I32,
    eps: F32,
    *,
    M: int,
    R: int,
    U: int,
    X: int,
    WARPS: int,
    RING: int,
) -> None:
    """Multiply M normalised vectors by the output matrix and find the best token of each.

    Launch: any grid, ``32 * WARPS`` threads, ``shared_bytes`` of dynamic shared memory.

    Bytes moved: the weights once, ``2 * vocab_size * size``; 4 per logit that is written.

    Args:
        hidden: bf16 [M, size], before the final norm.
        norm_weight: bf16 [size], immutable.
        weight: bf16 [vocab_size, size], immutable.
        logits: float32 [M, vocab_size], written; 0 where nobody reads them, as in greedy decoding.
        tokens: int32 [M], written.
        partials: uint64 [CTAs, M], scratch.
        ticket: uint32, 0 before the first launch and after every one.
        vocab_size: Rows of the weight, below 2^31.
        size: Of a vector, a multiple of 8.
        eps: Of the norm.
        M: Vectors, 1 or 2.
        R: Rows per warp and turn.
        U: Chunks per row in a tile, a power of two.
        X: Chunks of a vector that a thread holds, all of them.
        WARPS: Per CTA, at least M.
        RING: Tiles in the ring of a warp, at most 7; 0: one, in registers.
    """
    assert M in (1, 2)
    assert M <= WARPS
    assert M * X * WARPS % 2 == 0
    lane = i32(ptx.thread_id() & 31)
    warp = i32(ptx.thread_id() >> 5)
    w = registers(R, U)
    at = registers(3)
    norm = registers(X)
    begin_rows(w, at, weight, vocab_size, size, P=1, R=R, U=U, WARPS=WARPS, RING=RING)
    prefetch_norm(norm, norm_weight, size, X=X, WARPS=WARPS)
    ptx.grid_launch_dependents()
    ptx.grid_wait()
    vectors = i32(WARPS * RING * R * U * 512)
    stage_vectors(hidden, norm, size, eps, vectors, M=M, X=X, SPAN=32 * U * CHUNK, WARPS=WARPS, NORM=True)
    mine_of = i32(lane & (M - 1))
    best = 0
    first = i32(ptx.cta_id() * R)
    while first < vocab_size:
        n = i32(first + warp * ptx.num_ctas() * R + (lane >> LOG2[M]))
        sums = registers(R, M, init=0.0)
        multiply(w, at, sums, weight, vocab_size, size, vectors, M=M, P=1, R=R, U=U, WARPS=WARPS, RING=RING)
        mine = own_sum(sums, lane, M=M, R=R, PART=0)
        mine = ptx.round_bf16(mine)
        key = key_of(ptx.float_bits(mine), n)
        if lane < R * M and n < vocab_size:
            if logits != 0:
                ptx.store_f32(logits + (mine_of * vocab_size + n) * 4, mine)
            best = max_key(best, key)
        first = i32(first + ptx.num_ctas() * WARPS * R)
    if RING > 0:
        ptx.copy_async_wait(0)  # zeros, beyond the last row: nothing may arrive after the end
    keys = i32(vectors + M * vector_stride(size, SPAN=32 * U * CHUNK) + M * X * WARPS * 4)
    best = warp_max_key(best, COUNT=M)
    if lane < M:
        ptx.shared_store_u64(i32(keys + (lane * WARPS + warp) * 8), best)
    ptx.barrier()
    if ptx.thread_id() == 0:
        for m in unrolled(M):
            best = cta_max_key(i32(keys + m * WARPS * 8), WARPS=WARPS)
            ptx.store_u64(partials + (ptx.cta_id() * M + m) * 8, best)
    if arrive(ticket, ptx.num_ctas(), i32(keys + M * WARPS * 8), ALL_STORE=False) == 1:
        if warp < M:
            best = best_partial(partials + warp * 8, ptx.num_ctas(), STEP=M * 8)
            if lane == 0:
                ptx.store_i32(tokens + warp * 4, token_of(best))


def shared_bytes(size: int, constants: Mapping[str, Any]) -> int:
    """Return the dynamic shared memory of a launch of :func:`head` in bytes."""
    return vector_bytes(size, constants) + int(constants["M"] * constants["WARPS"] * 8) + 16


def partial_bytes(num_ctas: int, *, M: int) -> int:
    """Return the size of the scratch of a launch of :func:`head`; it need not be cleared, the ticket must be 0."""
    return num_ctas * M * 8


def spec(size: int, *, M: int, R: int = 2, U: int = 4, WARPS: int = 8, RING: int = 0) -> KernelSpec:
    """Return the output head for vectors of ``size`` values; the keywords are its constants."""
    chunks = chunks_per_thread(size, U=U, WARPS=WARPS)
    constants: dict[str, Constant] = {"M": M, "R": R, "RING": RING, "U": U, "WARPS": WARPS, "X": chunks}
    return KernelSpec(
        kernel=head,
        constants=tuple(sorted(constants.items())),
        num_threads=32 * WARPS,
        shared_bytes=shared_bytes(size, constants),
        min_vector_loads=vector_loads(constants, P=1),
        prefetches=True,
        has_ticket=True,
    )


def planned(shape: ModelShape, *, M: int, limit: int, rings: Sequence[int] = RINGS) -> KernelSpec:
    """Return the head of a model for M rows; as :func:`~ferrule_server.kernels.cuda.gemv.planned`."""
    variants = [spec(shape.hidden_size, M=M, U=2 if ring else 4, RING=ring) for ring in rings]
    return first_that_fits(variants, limit)


def specs(shape: ModelShape, limits: Iterable[int] = SHARED_LIMITS) -> list[KernelSpec]:
    """Return the head of a model for one and two rows, on GPUs with these limits of shared memory."""
    return list(dict.fromkeys(planned(shape, M=m, limit=one) for one in limits for m in (1, 2)))
