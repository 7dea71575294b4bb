"""Matrix times one or two vectors on CUDA cores, RMSNorm in front of it, residual or SwiGLU behind it.

Maths: ``y[m, n] = sum_k bf16(rms_norm(x)[m, k]) * weight[n, k]`` with float32 sums, then the epilogue. A warp owns R
rows of the weight at a time and reads them in tiles of U chunks of every row, 16 bytes per lane and chunk. The vectors
lie in shared memory as bf16, zero beyond ``size``.

Two ways of having tiles in flight, the same bits:

* RING > 0: tiles are copied asynchronously into a ring of the warp's own in shared memory, RING of them in flight. A
  lane reads back only what it copied itself, so nobody waits for anybody, and refills each place as soon as it has read
  it. Beyond the end of a row, or of the rows, zeros are written and nothing is read.
* RING = 0: one tile is in flight in registers, each loaded again as soon as it is used. Beyond the end nothing is
  loaded: what is left in the register is some weight, and is multiplied by zero.

The first tiles, and the weight of the norm, are read above ``grid_wait``, while the kernel before this one still runs.

Rows go round the CTAs first, then round the warps of each: group g belongs to CTA ``g % num_ctas``. So no
multiprocessor has more than one group more than another, however many there are, and nothing is planned for a number
of them.

Reduction order: lane, then chunk, then the butterfly over lanes. It does not depend on R, U, WARPS, M, RING, the grid
and the neighbours; the norm's sum neither: 256 values by a butterfly, then these sums in order.

Bytes moved: the weights once (``2 * num_rows * size``, twice for SwiGLU); every CTA reads the vectors again from L2.

Source: the structure is the usual warp-per-row GEMV; prefetch above the wait after NVIDIA's "Programmatic Dependent
Launch" chapter of the CUDA C++ Programming Guide; the ring after its chapter "Asynchronous Data Copies", with a
pipeline per thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ferrule_server.kernels.cuda import intrinsics as ptx
from ferrule_server.kernels.cuda.constants import CHUNK, LOG2, LOG2_E
from ferrule_server.kernels.cuda.intrinsics import F32, I32, Address, device
from ferrule_server.kernels.cuda.spec import SHARED_LIMITS, KernelSpec, LinearShape, ModelShape, first_that_fits
from ferrule_server.kernels.cuda.specialise import Constant, i32, registers, unrolled
from ferrule_server.kernels.cuda.vectors import prefetch_norm, stage_vectors, vector_stride, warp_sum

__all__ = ["RINGS", "gemv", "num_ctas_needed", "planned", "shared_bytes", "spec", "specs"]

PARTS = {"store": 1, "residual": 1, "swiglu": 2}
"""Matrices whose rows belong together."""
RINGS = (5, 4, 3, 2, 0)
"""Tiles in the ring of a warp, in the order of choice: 16 KiB in flight per CTA for each; 0: 32 KiB, in registers."""
ROW, START, PLACE = range(3)
"""What a warp reads next: the first of its rows, the byte of a row, and this lane's place in its ring."""


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
    RING: int,
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
        U: Chunks per row in a tile, a power of two.
        X: Chunks of a vector that a thread loads at a time; where NORM, all of them.
        WARPS: Per CTA.
        RING: Tiles in the ring of a warp, at most 7; 0: one, in registers.
        NORM: Normalise the vectors first (RMSNorm).
        EPILOGUE: ``store``, ``residual`` or ``swiglu``.
        BIAS: Add a bias before rounding.
    """
    assert M in (1, 2)
    assert EPILOGUE in ("store", "residual", "swiglu")
    lane = i32(ptx.thread_id() & 31)
    w = registers(PARTS[EPILOGUE] * R, U)
    at = registers(3)
    norm = registers(X)
    begin_rows(w, at, weight, num_rows, size, P=PARTS[EPILOGUE], R=R, U=U, WARPS=WARPS, RING=RING)
    if NORM:
        prefetch_norm(norm, norm_weight, size, X=X, WARPS=WARPS)
    ptx.grid_launch_dependents()
    ptx.grid_wait()
    vectors = i32(WARPS * RING * PARTS[EPILOGUE] * R * U * 512)
    stage_vectors(x, norm, size, eps, vectors, M=M, X=X, SPAN=32 * U * CHUNK, WARPS=WARPS, NORM=NORM)
    # The bound is the same for the whole CTA, so that the compiler sees converged warps at the shuffles; a warp
    # beyond the last row multiplies what it has and stores nothing.
    first = i32(ptx.cta_id() * R)
    while first < num_rows:
        m = i32(lane & (M - 1))
        n = i32(first + (ptx.thread_id() >> 5) * ptx.num_ctas() * R + (lane >> LOG2[M]))
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
        multiply(w, at, sums, weight, num_rows, size, vectors, M=M, P=PARTS[EPILOGUE], R=R, U=U, WARPS=WARPS, RING=RING)
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
    if RING > 0:
        ptx.copy_async_wait(0)  # zeros, beyond the last row: nothing may arrive after the end


@device
def begin_rows(
    w: Any, at: Any, weight: Address, num_rows: I32, size: I32, *, P: int, R: int, U: int, WARPS: int, RING: int
) -> None:
    """Begin to read a warp's rows: RING tiles into its ring, or one into ``w`` [P * R, U]; ``at`` [3] is written."""
    warp = i32(ptx.thread_id() >> 5)
    # The mask changes nothing; it shows the check of addresses that this product is small.
    at[ROW] = i32((((warp * ptx.num_ctas()) & 0xFFFFFF) + ptx.cta_id()) * R)
    at[START] = i32(0)
    at[PLACE] = i32(warp * (RING * P * R * U * 512) + (ptx.thread_id() & 31) * 16)
    for r in unrolled(P * R):
        for u in unrolled(U):
            w[r, u] = (0, 0, 0, 0)
    for _ in unrolled(max(RING, 1)):
        addresses = registers(P * R)
        left = _aim(addresses, at, weight, num_rows, size, P=P, R=R)
        for u in unrolled(U):
            _read(w, at, addresses, left, P=P, R=R, U=U, RING=RING, u=u)
        _advance(at, size, P=P, R=R, U=U, WARPS=WARPS, RING=RING)


@device
def multiply(
    w: Any,
    at: Any,
    sums: Any,
    weight: Address,
    num_rows: I32,
    size: I32,
    vectors: I32,
    *,
    M: int,
    P: int,
    R: int,
    U: int,
    WARPS: int,
    RING: int,
) -> None:
    """Add this lane's part of a warp's rows times the vectors to ``sums`` [P * R, M], and read on.

    ``vectors`` is where they lie in shared memory; ``w`` and ``at`` are as :func:`begin_rows` leaves them.
    """
    start = i32(0)
    while start < i32(size * 2):
        addresses = registers(P * R)
        left = _aim(addresses, at, weight, num_rows, size, P=P, R=R)
        if RING > 0:
            ptx.copy_async_wait(max(RING - 1, 0))
        for u in unrolled(U):
            if RING > 0:
                for r in unrolled(P * R):
                    w[r, u] = ptx.shared_load_v4(i32(at[PLACE] + (r * U + u) * 512))
            for m in unrolled(M):
                place = i32(vectors + m * vector_stride(size, SPAN=32 * U * CHUNK) + start + 512 * u)
                values = ptx.shared_load_v4(i32(place + (ptx.thread_id() & 31) * 16))
                for r in unrolled(P * R):
                    sums[r, m] = ptx.dot_bf16(sums[r, m], w[r, u], values)
            _read(w, at, addresses, left, P=P, R=R, U=U, RING=RING, u=u)
        _advance(at, size, P=P, R=R, U=U, WARPS=WARPS, RING=RING)
        start = i32(start + 512 * U)


@device
def _aim(addresses: Any, at: Any, weight: Address, num_rows: I32, size: I32, *, P: int, R: int) -> I32:
    """Set where this lane's part of the next tile begins in each row; return the bytes of a row from there on.

    The last row stands for any beyond it. A tile beyond all rows has no bytes.
    """
    along = i32(at[START] + (ptx.thread_id() & 31) * 16)
    for r in unrolled(P * R):
        n = i32(at[ROW] + r % R)
        if n >= num_rows:
            n = i32(num_rows - 1)
        addresses[r] = weight + i32(n + (r // R) * num_rows) * i32(size * 2) + along
    left = i32(size * 2 - along)
    if at[ROW] >= num_rows:
        left = i32(0)
    return left


@device
def _read(w: Any, at: Any, addresses: Any, left: I32, *, P: int, R: int, U: int, RING: int, u: int) -> None:
    """Begin to read chunk u of the next tile."""
    if RING > 0:
        num_bytes = i32(16 if left > 512 * u else 0)
        for r in unrolled(P * R):
            place = i32(at[PLACE] + (r * U + u) * 512)
            ptx.copy_async_stream_16_or_zeros(place, addresses[r] + 512 * u, num_bytes)
    elif left > 512 * u:
        for r in unrolled(P * R):
            w[r, u] = ptx.load_stream_v4(addresses[r] + 512 * u)


@device
def _advance(at: Any, size: I32, *, P: int, R: int, U: int, WARPS: int, RING: int) -> None:
    """Go on to the tile after the next: further along the rows, or the warp's next rows."""
    if RING > 0:
        ptx.copy_async_commit()
        at[PLACE] = i32(at[PLACE] + P * R * U * 512)
        if at[PLACE] >= i32(((ptx.thread_id() >> 5) + 1) * (RING * P * R * U * 512)):
            at[PLACE] = i32(at[PLACE] - RING * P * R * U * 512)
    at[START] = i32(at[START] + 512 * U)
    if at[START] >= i32(size * 2):
        at[START] = i32(0)
        at[ROW] = i32(at[ROW] + ptx.num_ctas() * WARPS * R)


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


def shared_bytes(size: int, constants: Mapping[str, Any]) -> int:
    """Return the dynamic shared memory of a launch in bytes: the ring, the vectors, the sums of their norm."""
    tile = PARTS[constants.get("EPILOGUE", "store")] * constants["R"] * constants["U"] * 512
    vector = 2 * _padded(size, constants["U"]) + constants["X"] * constants["WARPS"] * 4
    return int(constants["WARPS"] * constants["RING"] * tile + constants["M"] * vector)


def num_ctas_needed(num_rows: int, constants: Mapping[str, Any]) -> int:
    """Return how many CTAs find work at all."""
    return -(-num_rows // int(constants["R"]))


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
    RING: int = 0,
) -> KernelSpec:
    """Return the kernel for vectors of up to ``size`` values; the keywords are its constants."""
    constants: dict[str, Constant] = {
        "BIAS": BIAS,
        "EPILOGUE": EPILOGUE,
        "M": M,
        "NORM": NORM,
        "R": R,
        "RING": RING,
        "U": U,
        "WARPS": WARPS,
        "X": chunks_per_thread(size, U=U, WARPS=WARPS) if NORM else 6 // M,
    }
    return KernelSpec(
        kernel=gemv,
        constants=tuple(sorted(constants.items())),
        num_threads=32 * WARPS,
        shared_bytes=shared_bytes(size, constants),
        min_vector_loads=vector_loads(constants, P=PARTS[EPILOGUE]),
        prefetches=True,
    )


def chunks_per_thread(size: int, *, U: int, WARPS: int) -> int:
    """Return the constant X where a thread holds its part of a whole vector; at least 2, so models share cubins."""
    return max(2, -(-_padded(size, U) // (32 * WARPS * CHUNK)))


def vector_loads(constants: Mapping[str, Any], *, P: int) -> int:
    """Return the 16-byte loads in the code: weights above the wait and in the loop, vectors, weight of the norm."""
    tiles = max(constants["RING"], 1) + 1
    vectors = constants["M"] + constants.get("NORM", True)
    return int(tiles * P * constants["R"] * constants["U"] + vectors * constants["X"])


def planned(linear: LinearShape, *, M: int, limit: int, rings: Sequence[int] = RINGS) -> KernelSpec:
    """Return the kernel of a linear; all but ``residual`` have a norm in front.

    Two rows of a weight share the loads of the vectors, but for small weights, whose rows would not go round evenly.

    Args:
        linear: Of the model.
        M: Vectors.
        limit: Most shared memory of one CTA of the GPU.
        rings: To choose from.
    """
    rows = 2 if PARTS[linear.epilogue] == 1 and linear.num_rows >= 2048 else 1

    def with_ring(ring: int) -> KernelSpec:
        return spec(
            linear.planned_size,
            M=M,
            NORM=linear.epilogue != "residual",
            EPILOGUE=linear.epilogue,
            BIAS=linear.has_bias,
            R=rows,
            U=(4 if ring else 8) // (PARTS[linear.epilogue] * rows),
            RING=ring,
        )

    return first_that_fits([with_ring(ring) for ring in rings], limit)


def specs(shape: ModelShape, limits: Iterable[int] = SHARED_LIMITS) -> list[KernelSpec]:
    """Return what the linears of a model need for one and two rows, on GPUs with these limits of shared memory."""
    found = (planned(it, M=m, limit=one) for one in limits for m in (1, 2) for it in shape.linears.values())
    return list(dict.fromkeys(found))


def _padded(size: int, chunks: int) -> int:
    span = 32 * CHUNK * chunks
    return -(-size // span) * span
