"""Matrix times one or two vectors on CUDA cores, RMSNorm in front of it, residual or SwiGLU behind it.

Maths: ``y[m, n] = sum_k bf16(rms_norm(x)[m, k]) * weight[n, k]`` with float32 sums, then the epilogue. A warp owns R
rows of the weight at a time and reads them in chunks of 16 bytes per lane; U chunks of every row are always in flight,
each register being loaded again as soon as its chunk is used. Beyond the end of a row nothing is loaded: what is left
in the register is some weight, and is multiplied by zero. The first of them are loaded above ``grid_wait``, while
the kernel before this one still runs. The vectors lie in shared memory as bf16, zero beyond ``size``.

Reduction order: lane, then chunk, then the butterfly over lanes; it depends on R and U nowhere, and on M, grid and
neighbours not at all.

Bytes moved: ``2 * num_rows * size`` of weights (twice for SwiGLU), once; every CTA reads the vectors again from L2.

Source: the structure is the usual warp-per-row GEMV; prefetch above the wait after NVIDIA's "Programmatic Dependent
Launch" chapter of the CUDA C++ Programming Guide.
"""

from __future__ import annotations

from ferrule_server.kernels.cuda.intrinsics import (
    F32,
    I32,
    Address,
    Vec4,
    barrier,
    bf16_high,
    bf16_low,
    cta_id,
    device,
    exp2,
    float_of,
    fma,
    grid_launch_dependents,
    grid_wait,
    load_stream_v4,
    load_u16,
    load_v4,
    num_ctas,
    pack_bf16,
    reciprocal,
    reciprocal_sqrt,
    round_bf16,
    shared_load_f32,
    shared_load_v4,
    shared_store_f32,
    shared_store_v4,
    shuffle_xor_f32,
    store_u16,
    thread_id,
)
from ferrule_server.kernels.cuda.spec import KernelSpec, ModelShape
from ferrule_server.kernels.cuda.specialise import Constant, i32, registers, unrolled

__all__ = ["gemv", "num_ctas_needed", "shared_bytes", "spec", "specs", "variants"]

LOG2_E = 1.4426950408889634
CHUNK = 8
"""bf16 values in the 16 bytes that a lane loads at a time."""


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
        WARPS: Per CTA.
        NORM: Normalise the vectors first (RMSNorm).
        EPILOGUE: ``store``, ``residual`` or ``swiglu``.
        BIAS: Add a bias before rounding.
    """
    assert M in (1, 2)
    assert EPILOGUE in ("store", "residual", "swiglu")
    lane = i32(thread_id() & 31)
    group = i32(cta_id() * WARPS + (thread_id() >> 5))
    step = i32(num_ctas() * WARPS)
    num_groups = i32((num_rows + R - 1) >> LOG2[R])
    w = registers(PARTS[EPILOGUE] * R, U)
    for r in unrolled(PARTS[EPILOGUE] * R):
        for u in unrolled(U):
            w[r, u] = (0, 0, 0, 0)
    left = i32(size - lane * CHUNK)
    if group >= num_groups:
        left = i32(0)
    for r in unrolled(PARTS[EPILOGUE] * R):
        row = _row_address(weight, group, num_rows, size, R=R, r=r) + lane * (CHUNK * 2)
        for u in unrolled(U):
            if left > 32 * CHUNK * u:
                w[r, u] = load_stream_v4(row + 64 * CHUNK * u)
    grid_launch_dependents()
    grid_wait()
    stage_vectors(x, norm_weight, size, eps, M=M, SPAN=32 * CHUNK * U, WARPS=WARPS, NORM=NORM)
    stride = i32(_padded(size, SPAN=32 * CHUNK * U) * 2)
    while group < num_groups:
        sums = registers(PARTS[EPILOGUE] * R, M, init=0.0)
        start = i32(0)
        while start < size:
            next_group = group
            next_start = i32(start + 32 * CHUNK * U)
            if next_start >= size:
                next_start = i32(0)
                next_group = i32(group + step)
            left = i32(size - next_start - lane * CHUNK)
            if next_group >= num_groups:
                left = i32(0)
            rows = registers(PARTS[EPILOGUE] * R)
            for r in unrolled(PARTS[EPILOGUE] * R):
                rows[r] = _row_address(weight, next_group, num_rows, size, R=R, r=r) + (next_start + lane * CHUNK) * 2
            for u in unrolled(U):
                offset = i32((start + (32 * u + lane) * CHUNK) * 2)
                for m in unrolled(M):
                    values = shared_load_v4(m * stride + offset)
                    for r in unrolled(PARTS[EPILOGUE] * R):
                        sums[r, m] = dot_chunk(sums[r, m], w[r, u], values)
                if left > 32 * CHUNK * u:
                    for r in unrolled(PARTS[EPILOGUE] * R):
                        w[r, u] = load_stream_v4(rows[r] + 64 * CHUNK * u)
            start = i32(start + 32 * CHUNK * U)
        for r in unrolled(PARTS[EPILOGUE] * R):
            for m in unrolled(M):
                sums[r, m] = warp_sum(sums[r, m])
        for r in unrolled(R):
            for m in unrolled(M):
                n = i32(group * R + r)
                if lane == r * M + m:
                    if n < num_rows:
                        first = sums[r, m]
                        if BIAS:
                            first = first + bf16_low(load_u16(bias + n * 2))
                        place = out + (m * num_rows + n) * 2
                        if EPILOGUE == "swiglu":
                            second = sums[R + r, m]
                            if BIAS:
                                second = second + bf16_low(load_u16(bias + (n + num_rows) * 2))
                            store_u16(place, pack_bf16(swiglu(first, second), 0.0))
                        elif EPILOGUE == "residual":
                            before = bf16_low(load_u16(place))
                            store_u16(place, pack_bf16(before + round_bf16(first), 0.0))
                        else:
                            store_u16(place, pack_bf16(first, 0.0))
        group = i32(group + step)


PARTS = {"store": 1, "residual": 1, "swiglu": 2}
LOG2 = {1: 0, 2: 1, 4: 2, 8: 3}


@device
def _row_address(weight: Address, group: I32, num_rows: I32, size: I32, *, R: int, r: int) -> Address:
    """Return where row r of a group starts: its R rows, then those of ``up``; the last row stands for any beyond."""
    n = i32(group * R + r % R)
    if n >= num_rows:
        n = i32(num_rows - 1)
    return weight + (n + (r // R) * num_rows) * (size * 2)


@device
def _padded(size: I32, *, SPAN: int) -> I32:
    """Return ``size`` rounded up to a multiple of SPAN, a power of two."""
    return i32((size + SPAN - 1) & -SPAN)


@device
def dot_chunk(total: F32, weights: Vec4, values: Vec4) -> F32:
    """Return ``total`` plus eight products of bf16 pairs, in order."""
    for k in unrolled(4):
        total = fma(bf16_low(weights[k]), bf16_low(values[k]), total)
        total = fma(bf16_high(weights[k]), bf16_high(values[k]), total)
    return total


@device
def warp_sum(value: F32) -> F32:
    """Return the sum over the warp, the same bits in every lane."""
    for s in unrolled(5):
        value = value + shuffle_xor_f32(value, 16 >> s)
    return value


@device
def swiglu(gate: F32, up: F32) -> F32:
    """Return silu(gate) * up, rounded to bf16 where torch rounds: gate, up, silu."""
    gate = round_bf16(gate)
    silu = gate * reciprocal(1.0 + exp2(-LOG2_E * gate))
    return round_bf16(silu) * round_bf16(up)


@device
def stage_vectors(
    x: Address, norm_weight: Address, size: I32, eps: F32, *, M: int, SPAN: int, WARPS: int, NORM: bool
) -> None:
    """Put M vectors into shared memory as bf16, each padded with zeros to a multiple of SPAN; ends with a barrier.

    With NORM each is scaled to mean square 1, rounded, multiplied by the weight and rounded again. Behind the vectors
    lie the sums of the warps, float32 [M, WARPS].
    """
    stride = i32(_padded(size, SPAN=SPAN) * 2)
    first = i32(thread_id() * CHUNK)
    squares = registers(M, init=0.0)
    for m in unrolled(M):
        k = first
        while k * 2 < stride:
            chunk = (0, 0, 0, 0)
            if k < size:
                chunk = load_v4(x + (m * size + k) * 2)
            shared_store_v4(i32(m * stride + k * 2), chunk)
            squares[m] = dot_chunk(squares[m], chunk, chunk)
            k = i32(k + 32 * WARPS * CHUNK)
    if NORM:
        for m in unrolled(M):
            total = warp_sum(squares[m])
            if (thread_id() & 31) == 0:
                shared_store_f32(i32(M * stride + (m * WARPS + (thread_id() >> 5)) * 4), total)
        barrier()
        for m in unrolled(M):
            total = 0.0
            for warp in unrolled(WARPS):
                total = total + shared_load_f32(i32(M * stride + (m * WARPS + warp) * 4))
            scale = reciprocal_sqrt(total * reciprocal(float_of(size)) + eps)
            k = first
            while k < size:
                place = i32(m * stride + k * 2)
                shared_store_v4(place, scale_chunk(shared_load_v4(place), load_v4(norm_weight + k * 2), scale))
                k = i32(k + 32 * WARPS * CHUNK)
    barrier()


@device
def scale_chunk(values: Vec4, weights: Vec4, scale: F32) -> Vec4:
    """Return eight values times a scale, rounded to bf16, times their weights, rounded again."""
    words = registers(4, init=0)
    for k in unrolled(4):
        low = round_bf16(bf16_low(values[k]) * scale) * bf16_low(weights[k])
        high = round_bf16(bf16_high(values[k]) * scale) * bf16_high(weights[k])
        words[k] = pack_bf16(low, high)
    return (words[0], words[1], words[2], words[3])


def shared_bytes(size: int, *, M: int, U: int, WARPS: int) -> int:
    """Return the dynamic shared memory of a launch in bytes."""
    span = 32 * CHUNK * U
    return M * (-(-size // span) * span) * 2 + M * WARPS * 4


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
    constants: dict[str, Constant] = {
        "BIAS": BIAS,
        "EPILOGUE": EPILOGUE,
        "M": M,
        "NORM": NORM,
        "R": R,
        "U": U,
        "WARPS": WARPS,
    }
    return KernelSpec(
        kernel=gemv,
        constants=tuple(sorted(constants.items())),
        num_threads=32 * WARPS,
        shared_bytes=shared_bytes(size, M=M, U=U, WARPS=WARPS),
        ctas_per_sm=ctas_per_sm,
        min_vector_loads=PARTS[EPILOGUE] * R * U,
        prefetches=True,
    )


def specs(shape: ModelShape) -> list[KernelSpec]:
    """Return what the linears of a model need for one and two rows."""
    attended = shape.num_heads * shape.head_dim
    found = []
    for m in (1, 2):
        found.append(spec(shape.hidden_size, M=m, NORM=True, EPILOGUE="store"))
        found.append(spec(max(attended, shape.intermediate_size), M=m, NORM=False, EPILOGUE="residual", R=1, U=8))
        found.append(spec(shape.hidden_size, M=m, NORM=True, EPILOGUE="swiglu", R=1))
    return found


def variants(shape: ModelShape) -> list[KernelSpec]:
    """Return what a sweep on a GPU tries: rows per warp, chunks in flight, warps per CTA, CTAs per multiprocessor."""
    found = []
    sizes = ((1, 4, 8, 1), (1, 8, 8, 1), (2, 4, 8, 1), (2, 8, 8, 1), (4, 4, 8, 1), (1, 4, 4, 2), (2, 4, 4, 2))
    for rows, chunks, warps, ctas in sizes:
        for size, is_normed, epilogue in (
            (shape.hidden_size, True, "store"),
            (shape.intermediate_size, False, "residual"),
            (shape.hidden_size, True, "swiglu"),
        ):
            found.append(
                spec(size, M=1, NORM=is_normed, EPILOGUE=epilogue, R=rows, U=chunks, WARPS=warps, ctas_per_sm=ctas)
            )
    return found
