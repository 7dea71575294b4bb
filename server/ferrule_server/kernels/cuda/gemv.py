"""Matrix times one or two vectors on CUDA cores, RMSNorm in front of it, residual or SwiGLU behind it.

Maths: ``y[m, n] = sum_k bf16(rms_norm(x)[m, k]) * weight[n, k]`` with float32 sums, then the epilogue. A warp owns R
rows of the weight at a time and reads them in chunks of 16 bytes per lane; U chunks of every row are always in flight,
each register being loaded again as soon as its chunk is used. Beyond the end of a row nothing is loaded: what is left
in the register is some weight, and is multiplied by zero. The first of them, and the weight of the norm, are loaded
above ``grid_wait``, while the kernel before this one still runs. The vectors lie in shared memory as bf16, zero beyond
``size``.

Reduction order: lane, then chunk, then the butterfly over lanes. It does not depend on R, U, WARPS, M, the grid and
the neighbours; the norm's sum neither: 256 values by a butterfly, then these sums in order.

Bytes moved: the weights once (``2 * num_rows * size``, twice for SwiGLU); every CTA reads the vectors again from L2.

Source: the structure is the usual warp-per-row GEMV; prefetch above the wait after NVIDIA's "Programmatic Dependent
Launch" chapter of the CUDA C++ Programming Guide.
"""

from __future__ import annotations

import math
from typing import Any

from ferrule_server.kernels.cuda import intrinsics as ptx
from ferrule_server.kernels.cuda.constants import CHUNK, LOG2, LOG2_E
from ferrule_server.kernels.cuda.intrinsics import F32, I32, Address, device
from ferrule_server.kernels.cuda.spec import KernelSpec, ModelShape
from ferrule_server.kernels.cuda.specialise import Constant, i32, registers, unrolled
from ferrule_server.kernels.cuda.vectors import prefetch_norm, stage_vectors, vector_stride, warp_sum

__all__ = [
    "chunks_per_thread",
    "gemv",
    "num_ctas_needed",
    "plan",
    "planned",
    "shared_bytes",
    "spec",
    "specs",
]

PARTS = {"store": 1, "residual": 1, "swiglu": 2}
"""Matrices whose rows belong together."""


def gemv(
    x: Address,
    norm_weight: Address,
    weight: Address,
    bias: Address,
    out: Address,
    num_rows: I32,
    size: I32,
    eps: F32,
    *,
    M: int,
    R: int,
    U: int,
    X: int,
    WARPS: int,
    NORM: bool,
    EPILOGUE: str,
    BIAS: bool,
) -> None:
    """Multiply M vectors by a matrix.

    Launch: any grid of at least one CTA (``num_ctas_needed`` at most is of use), ``32 * WARPS`` threads,
    ``shared_bytes`` of dynamic shared memory.

    Args:
        x: bf16 [M, size].
        norm_weight: bf16 [size], immutable; read where NORM.
        weight: bf16 [num_rows, size], immutable; [2 * num_rows, size], rows of gate, then up, for swiglu.
        bias: bf16 [rows of weight], immutable; read where BIAS.
        out: bf16 [M, num_rows]; ``residual`` adds to what is there.
        num_rows: Values per vector that come out.
        size: Of a vector, a multiple of 8.
        eps: Of the norm.
        M: Vectors, 1 or 2.
        R: Rows per warp and turn.
        U: Chunks per row in flight.
        X: Chunks of a vector that a thread loads at a time; where NORM, all of them.
        WARPS: Per CTA.
        NORM: Normalise the vectors first (RMSNorm).
        EPILOGUE: ``store``, ``residual`` or ``swiglu``.
        BIAS: Add a bias before rounding.
    """
    assert M in (1, 2)
    assert EPILOGUE in ("store", "residual", "swiglu")
    lane = i32(ptx.thread_id() & 31)
    warp = i32(ptx.thread_id() >> 5)
    row_bytes = i32(size * 2)
    first = i32(ptx.cta_id() * WARPS * R)
    w = registers(PARTS[EPILOGUE] * R, U)
    norm = registers(X)
    prefetch(w, weight, i32(first + warp * R), num_rows, row_bytes, P=PARTS[EPILOGUE], R=R, U=U)
    if NORM:
        prefetch_norm(norm, norm_weight, size, X=X, WARPS=WARPS)
    ptx.grid_launch_dependents()
    ptx.grid_wait()
    stage_vectors(x, norm, size, eps, M=M, X=X, SPAN=32 * U * CHUNK, WARPS=WARPS, NORM=NORM)
    # The bound is the same for the whole CTA, so that the compiler sees converged warps at the shuffles; a warp
    # beyond the last row multiplies what it has and stores nothing.
    while first < num_rows:
        row = i32(first + warp * R)
        after = i32(row + ptx.num_ctas() * WARPS * R)
        m = i32(lane & (M - 1))
        n = i32(row + (lane >> LOG2[M]))
        place = out + (m * num_rows + n) * 2
        before = 0.0
        offsets = registers(PARTS[EPILOGUE], init=0.0)
        if lane < R * M and n < num_rows:
            if EPILOGUE == "residual":
                before = ptx.bf16_low(ptx.load_u16(place))
            for p in unrolled(PARTS[EPILOGUE]):
                if BIAS:
                    offsets[p] = ptx.bf16_low(ptx.load_u16(bias + (n + p * num_rows) * 2))
        sums = registers(PARTS[EPILOGUE] * R, M, init=0.0)
        multiply(
            w,
            sums,
            weight,
            row,
            after,
            num_rows,
            row_bytes,
            vector_stride(size, SPAN=32 * U * CHUNK),
            M=M,
            P=PARTS[EPILOGUE],
            R=R,
            U=U,
        )
        mine = registers(PARTS[EPILOGUE])
        for p in unrolled(PARTS[EPILOGUE]):
            mine[p] = own_sum(sums, lane, M=M, R=R, PART=p)
            if BIAS:
                mine[p] = mine[p] + offsets[p]
        if lane < R * M and n < num_rows:
            result = mine[0]
            if EPILOGUE == "swiglu":
                result = swiglu(mine[0], mine[PARTS[EPILOGUE] - 1])
            if EPILOGUE == "residual":
                result = before + ptx.round_bf16(result)
            ptx.store_u16(place, ptx.pack_bf16(result, 0.0))
        first = i32(first + ptx.num_ctas() * WARPS * R)


@device
def row_address(weight: Address, row: I32, num_rows: I32, row_bytes: I32, *, R: int, r: int) -> Address:
    """Return where row r of a warp's rows starts: R rows, then those of ``up``; the last row stands for any beyond."""
    n = i32(row + r % R)
    if n >= num_rows:
        n = i32(num_rows - 1)
    return weight + (n + (r // R) * num_rows) * row_bytes


@device
def prefetch(w: Any, weight: Address, row: I32, num_rows: I32, row_bytes: I32, *, P: int, R: int, U: int) -> None:
    """Load the first chunks of a warp's rows into ``w`` [P * R, U]; zero where there are none."""
    for r in unrolled(P * R):
        for u in unrolled(U):
            w[r, u] = (0, 0, 0, 0)
    left = i32(row_bytes - (ptx.thread_id() & 31) * 16)
    if row >= num_rows:
        left = i32(0)
    for r in unrolled(P * R):
        address = row_address(weight, row, num_rows, row_bytes, R=R, r=r) + (ptx.thread_id() & 31) * 16
        for u in unrolled(U):
            if left > 512 * u:
                w[r, u] = ptx.load_stream_v4(address + 512 * u)


@device
def multiply(
    w: Any,
    sums: Any,
    weight: Address,
    row: I32,
    after: I32,
    num_rows: I32,
    row_bytes: I32,
    stride: I32,
    *,
    M: int,
    P: int,
    R: int,
    U: int,
) -> None:
    """Add this lane's part of a warp's rows times the vectors to ``sums`` [P * R, M].

    ``w`` holds the first chunks of the rows from ``row``, and at the end those of the rows from ``after``.
    """
    lane = i32(ptx.thread_id() & 31)
    start = i32(0)
    while start < row_bytes:
        next_row = row
        next_start = i32(start + 512 * U)
        if next_start >= row_bytes:
            next_start = i32(0)
            next_row = after
        left = i32(row_bytes - next_start - lane * 16)
        if next_row >= num_rows:
            left = i32(0)
        addresses = registers(P * R)
        for r in unrolled(P * R):
            addresses[r] = row_address(weight, next_row, num_rows, row_bytes, R=R, r=r) + (next_start + lane * 16)
        for u in unrolled(U):
            for m in unrolled(M):
                values = ptx.shared_load_v4(i32(m * stride + start + 512 * u + lane * 16))
                for r in unrolled(P * R):
                    sums[r, m] = ptx.dot_bf16(sums[r, m], w[r, u], values)
            if left > 512 * u:
                for r in unrolled(P * R):
                    w[r, u] = ptx.load_stream_v4(addresses[r] + 512 * u)
        start = i32(start + 512 * U)


@device
def own_sum(sums: Any, lane: I32, *, M: int, R: int, PART: int) -> F32:
    """Return the warp's sum of row ``lane // M`` and vector ``lane % M`` of a part, in the lanes that have one."""
    mine = 0.0
    for r in unrolled(R):
        for m in unrolled(M):
            total = warp_sum(sums[PART * R + r, m])
            if lane == r * M + m:
                mine = total
    return mine


@device
def swiglu(gate: F32, up: F32) -> F32:
    """Return silu(gate) * up, rounded to bf16 where torch rounds: gate, up, silu."""
    gate = ptx.round_bf16(gate)
    silu = gate * ptx.reciprocal(1.0 + ptx.exp2(-LOG2_E * gate))
    return ptx.round_bf16(silu) * ptx.round_bf16(up)


def shared_bytes(size: int, *, M: int, U: int, X: int, WARPS: int) -> int:
    """Return the dynamic shared memory of a launch in bytes."""
    return M * 2 * _padded(size, U=U) + M * X * WARPS * 4


def num_ctas_needed(num_rows: int, *, R: int, WARPS: int) -> int:
    """Return how many CTAs find work at all."""
    return -(-num_rows // (R * WARPS))


def spec(
    size: int,
    *,
    M: int,
    NORM: bool,
    EPILOGUE: str,
    BIAS: bool = False,
    R: int = 2,
    U: int = 4,
    WARPS: int = 8,
    ctas_per_sm: int = 1,
) -> KernelSpec:
    """Return the kernel for vectors of up to ``size`` values; the keywords are its constants."""
    chunks = chunks_per_thread(size, M=M, U=U, WARPS=WARPS, NORM=NORM)
    constants: dict[str, Constant] = {
        "BIAS": BIAS,
        "EPILOGUE": EPILOGUE,
        "M": M,
        "NORM": NORM,
        "R": R,
        "U": U,
        "WARPS": WARPS,
        "X": chunks,
    }
    return KernelSpec(
        kernel=gemv,
        constants=tuple(sorted(constants.items())),
        num_threads=32 * WARPS,
        shared_bytes=shared_bytes(size, M=M, U=U, X=chunks, WARPS=WARPS),
        ctas_per_sm=ctas_per_sm,
        min_vector_loads=vector_loads(M=M, P=PARTS[EPILOGUE], R=R, U=U, X=chunks, NORM=NORM),
        prefetches=True,
    )


def chunks_per_thread(size: int, *, M: int, U: int, WARPS: int, NORM: bool) -> int:
    """Return the constant X: a whole vector where it is normalised, otherwise what keeps six loads in flight.

    At least 2 with the warps of most plans, so that few cubins serve all models; the others lack registers for more.
    """
    if not NORM:
        return 6 // M
    return max(2 if WARPS == 8 else 1, -(-_padded(size, U=U) // (32 * WARPS * CHUNK)))


def vector_loads(*, M: int, P: int, R: int, U: int, X: int, NORM: bool) -> int:
    """Return the 16-byte loads in the code: weights above the wait and in the loop, vectors, weight of the norm."""
    return 2 * P * R * U + M * X + (X if NORM else 0)


def planned(num_rows: int, size: int, *, M: int, NORM: bool, EPILOGUE: str, BIAS: bool) -> KernelSpec:
    """Return the kernel of a linear, with the tiles that :func:`plan` chooses."""
    rows, chunks, warps = plan(num_rows, size, m=M, parts=PARTS[EPILOGUE])
    return spec(size, M=M, NORM=NORM, EPILOGUE=EPILOGUE, BIAS=BIAS, R=rows, U=chunks, WARPS=warps)


def specs(shape: ModelShape) -> list[KernelSpec]:
    """Return what the linears of a model need for one and two rows."""
    wide = max(shape.num_heads * shape.head_dim, shape.intermediate_size)
    linears = [
        (shape.qkv_size, shape.hidden_size, "store", shape.has_attention_bias),
        (shape.hidden_size, wide, "residual", shape.has_attention_bias),
        (shape.intermediate_size, shape.hidden_size, "swiglu", shape.has_mlp_bias),
    ]
    if shape.has_attention_bias != shape.has_mlp_bias:
        linears.append((shape.hidden_size, wide, "residual", shape.has_mlp_bias))
    return [
        planned(num_rows, size, M=m, NORM=epilogue != "residual", EPILOGUE=epilogue, BIAS=has_bias)
        for m in (1, 2)
        for num_rows, size, epilogue, has_bias in linears
    ]


def plan(num_rows: int, size: int, *, m: int, parts: int, num_sms: int = 132) -> tuple[int, int, int]:
    """Return R, U and WARPS, the first choice before a sweep on the GPU itself.

    The first of a few (few cubins serve all models) with which the last turn of the warps is nearly full, and U is
    little more than a row fills; else the one that comes closest.
    """
    filled = -(-size // (32 * CHUNK))

    def used(tiles: tuple[int, int, int]) -> float:
        rows, chunks, warps = tiles
        turns = num_rows / (rows * warps * num_sms)
        return turns / math.ceil(turns) * min(1.0, 4 * filled / (3 * -(-filled // chunks) * chunks))

    candidates = PLANS[m, parts]
    return next((tiles for tiles in candidates if used(tiles) >= 0.9), max(candidates, key=used))


PLANS = {
    (1, 1): ((2, 4, 8), (4, 2, 8), (1, 8, 8), (2, 4, 12), (4, 2, 12), (1, 8, 10)),
    (1, 2): ((1, 4, 8), (2, 2, 8), (2, 2, 12)),
    (2, 1): ((2, 4, 8), (4, 2, 8), (1, 8, 8), (1, 4, 12), (1, 8, 10)),
    (2, 2): ((1, 4, 8), (2, 2, 8), (1, 2, 12)),
}
"""R, U and WARPS by M and parts, best first; all keep eight loads of every lane in flight, or 24 KiB per CTA."""


def _padded(size: int, *, U: int) -> int:
    span = 32 * CHUNK * U
    return -(-size // span) * span
