"""Matrix times 3 to 64 vectors on tensor cores, with residual, SwiGLU or float32 logits behind it.

Maths: ``y[m, n] = sum_k x[m, k] * weight[n, k]`` with float32 sums, then the epilogue. The 16 rows of an ``m16n8k16``
are rows of the weight and its 8 columns are tokens, so that tokens are padded to 8 and no further.

K-permuted fragments: a sum does not care which k stands in which slot of an mma, as long as both operands agree. Lane
``4 g + t`` loads the 16 contiguous bytes k = 8 t .. 8 t + 7 of a slab of 32 of its rows, and uses them as the slots it
owes in two mma steps; activations come from shared memory by the same rule. No second copy of the weights, no ldmatrix:

    elements of the 16 bytes     0 1     2 3      4 5     6 7
    slots they stand for         2t,+1   2t+8,+9  2t,+1   2t+8,+9
    mma step                     first   first    second  second

A CTA owns ``16 * ROW_TILES * ROW_WARPS`` rows at a time; ``K_WARPS`` warps share each row tile along K, and their sums
meet in shared memory. Every warp keeps its share of DEPTH tiles of K in flight in registers, each register being loaded
again as soon as it is used; the first of them are loaded above ``grid_wait``, while the kernel before this one still
runs. Activations pass through STAGES buffers of shared memory. Their rows are 64 bytes longer than a tile of K, so that
the eight lanes which read at a time (two rows of 64 bytes) meet different banks. At the end of a group of rows, the
partial sums take the place of the activations that were read last: the other buffers already receive activations of the
next group. With separate memory for them, a CTA would exceed the 101,376 bytes of compute capability 8.6 and 8.9.

Reduction order: slab s of a row belongs to warp ``s % K_WARPS``; a warp adds its slabs in order, the warps are added in
order. It depends on ``size`` and K_WARPS and on nothing else: not on the number of tokens, the grid, the tile sizes or
the other tokens. ``sizes_for`` chooses K_WARPS by the rows of the weight alone, so a token's result has the same bits
alone and among 64.

Bytes moved: ``2 * num_rows * size`` of weights (twice for SwiGLU), once; activations are read from L2 once for each
group of rows: ``num_tokens / (16 * ROW_TILES * ROW_WARPS)`` of the weights.

Source: NVIDIA, "Parallel Thread Execution ISA" 9.0, "Matrix Fragments for mma.m16n8k16"; permuting K so that fragments
are contiguous in memory is the idea of Marlin (IST-DASLab/marlin, README, Apache-2.0), which prepacks; here the
activations are permuted instead. No code was taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ferrule_server.kernels.cuda import intrinsics as ptx
from ferrule_server.kernels.cuda.constants import LOG2
from ferrule_server.kernels.cuda.gemv import swiglu
from ferrule_server.kernels.cuda.intrinsics import F32, I32, Address, Offset, device
from ferrule_server.kernels.cuda.spec import KernelSpec, ModelShape
from ferrule_server.kernels.cuda.specialise import Constant, i32, registers, u32, unrolled

__all__ = [
    "MAX_TOKENS",
    "gemm",
    "num_ctas_needed",
    "shared_bytes",
    "sizes_for",
    "spec",
    "specs",
    "tiles_for",
]

SLAB = 32
"""Values of K that a warp takes at a time: 4 lanes with 8 each."""
MAX_TOKENS = 64
"""Of one launch; above, cuBLAS or several launches."""
PAD = 64
"""Bytes between the rows of a buffer of activations."""
ROW_PAD = 4
"""Floats between the tokens of partial sums: the 32 lanes that store one register meet different banks."""
NUM_MULTIPROCESSORS = 132
"""Of an H100 or H200; the default sizes are chosen for them."""
TILE_ROWS = {"store": 16, "residual": 16, "logits": 16, "swiglu": 8}
"""Values per token that a tile of 16 rows gives: gate and up stand 8 rows apart in a tile."""
NEXT_K, NEXT_GROUP, NEXT_BUFFER, BUFFER = range(4)
"""What is copied next: first value of K, group of rows, offset of the buffer; and the buffer that is read now."""
TILES_BUILT = (1, 2, 4, 8)
"""Of the kernels of :func:`specs`."""
VALUE_BYTES = {"store": 2, "residual": 2, "logits": 4, "swiglu": 2}


def gemm(
    x: Address,
    weight: Address,
    bias: Address,
    out: Address,
    num_tokens: I32,
    num_rows: I32,
    size: I32,
    *,
    TILES: int,
    ROW_TILES: int,
    ROW_WARPS: int,
    K_WARPS: int,
    SLABS: int,
    DEPTH: int,
    STAGES: int,
    EPILOGUE: str,
    BIAS: bool,
) -> None:
    """Multiply up to ``8 * TILES`` vectors by a matrix.

    Launch: any grid of at least one CTA (``num_ctas_needed`` at most is of use), ``32 * ROW_WARPS * K_WARPS`` threads,
    ``shared_bytes`` of dynamic shared memory.

    Args:
        x: bf16 [num_tokens, size].
        weight: bf16 [num_rows, size], immutable; [2 * num_rows, size], rows of gate, then up, for swiglu.
        bias: bf16 [rows of weight], immutable; read where BIAS.
        out: bf16 [num_tokens, num_rows], float32 for logits; ``residual`` adds to what is there.
        num_tokens: 1 to ``8 * TILES``; rows beyond are neither read nor written.
        num_rows: Values per token that come out.
        size: Of a vector, a multiple of 8.
        TILES: Tiles of 8 tokens.
        ROW_TILES: Tiles of 16 rows that a warp holds at a time.
        ROW_WARPS: Warps side by side along rows.
        K_WARPS: Warps that share a row tile along K; decides the order of the sums.
        SLABS: Slabs of each warp in a tile of K: a tile is ``32 * SLABS * K_WARPS`` values.
        DEPTH: Tiles of K whose weights are in flight.
        STAGES: Buffers of activations, 2 or 3.
        EPILOGUE: ``store``, ``residual``, ``swiglu``, or ``logits`` (rounded to bf16 and stored as float32).
        BIAS: Add a bias before rounding.
    """
    assert STAGES in (2, 3)
    lane_k = i32(((ptx.thread_id() >> 5) & (K_WARPS - 1)) * SLAB + (ptx.thread_id() & 3) * 8)
    row_warp = i32(ptx.thread_id() >> (5 + LOG2[K_WARPS]))
    group = i32(ptx.cta_id())
    num_groups = i32(
        (num_rows + TILE_ROWS[EPILOGUE] * ROW_TILES * ROW_WARPS - 1)
        >> LOG2[TILE_ROWS[EPILOGUE] * ROW_TILES * ROW_WARPS]
    )
    left = i32(size - lane_k)
    if group >= num_groups:
        left = i32(0)
    rows = registers(ROW_TILES, 2)
    first = i32(group * ROW_WARPS + row_warp)
    _point(rows, weight, first, num_rows, size, lane_k, ROW_TILES=ROW_TILES, EPILOGUE=EPILOGUE)
    w = registers(DEPTH, SLABS, ROW_TILES, 2)
    for d in unrolled(DEPTH):
        for s in unrolled(SLABS):
            for r in unrolled(ROW_TILES):
                w[d, s, r, 0] = (0, 0, 0, 0)
                w[d, s, r, 1] = (0, 0, 0, 0)
            _load(w, rows, left, ROW_TILES=ROW_TILES, K_WARPS=K_WARPS, SLABS=SLABS, d=d, s=s)
    ptx.grid_launch_dependents()
    ptx.grid_wait()
    zero = i32(num_tokens >> 31)
    buffer_bytes = _buffer_bytes(TILES=TILES, K_WARPS=K_WARPS, SLABS=SLABS, ROW_TILES=ROW_TILES, ROW_WARPS=ROW_WARPS)
    tile = registers(4, init=0)
    tile[NEXT_GROUP] = group
    for _ in unrolled(STAGES - 1):
        _copy_tile(
            tile,
            x,
            num_tokens,
            num_groups,
            size,
            buffer_bytes,
            TILES=TILES,
            CHUNKS=K_WARPS * SLABS * 4,
            STAGES=STAGES,
            THREADS=32 * ROW_WARPS * K_WARPS,
        )
    sums = registers(ROW_TILES, TILES)
    while group < num_groups:
        for r in unrolled(ROW_TILES):
            for n in unrolled(TILES):
                sums[r, n] = (0.0, 0.0, 0.0, 0.0)
        start = i32(0)
        while start < size:
            # Where the weights come from that are loaded in this turn, for the next: further along, or the next group.
            ahead = i32(start + DEPTH * SLABS * K_WARPS * SLAB)
            left = i32(size - ahead - lane_k)
            for r in unrolled(ROW_TILES):
                rows[r, 0] += DEPTH * SLABS * K_WARPS * SLAB * 2
                rows[r, 1] += DEPTH * SLABS * K_WARPS * SLAB * 2
            if ahead >= size:
                left = i32(size - lane_k)
                following = i32(group + ptx.num_ctas())
                if following >= num_groups:
                    left = i32(0)
                first = i32(following * ROW_WARPS + row_warp)
                _point(rows, weight, first, num_rows, size, lane_k, ROW_TILES=ROW_TILES, EPILOGUE=EPILOGUE)
            for d in unrolled(DEPTH):
                if d == 0 or i32(start + d * SLABS * K_WARPS * SLAB) < size:
                    ptx.copy_async_wait(STAGES - 2)
                    ptx.barrier()
                    _copy_tile(
                        tile,
                        x,
                        num_tokens,
                        num_groups,
                        size,
                        buffer_bytes,
                        TILES=TILES,
                        CHUNKS=K_WARPS * SLABS * 4,
                        STAGES=STAGES,
                        THREADS=32 * ROW_WARPS * K_WARPS,
                    )
                    token = i32((ptx.thread_id() & 31) >> 2)
                    values = i32(tile[BUFFER] + token * (K_WARPS * SLABS * 64 + PAD) + lane_k * 2)
                    for s in unrolled(SLABS):
                        _multiply(
                            sums,
                            w,
                            values,
                            zero,
                            TILES=TILES,
                            ROW_TILES=ROW_TILES,
                            K_WARPS=K_WARPS,
                            SLABS=SLABS,
                            d=d,
                            s=s,
                        )
                        _load(w, rows, left, ROW_TILES=ROW_TILES, K_WARPS=K_WARPS, SLABS=SLABS, d=d, s=s)
                    tile[BUFFER] = _next_buffer(tile[BUFFER], buffer_bytes, STAGES=STAGES)
                else:
                    for s in unrolled(SLABS):
                        _load(w, rows, left, ROW_TILES=ROW_TILES, K_WARPS=K_WARPS, SLABS=SLABS, d=d, s=s)
            start = ahead
        _finish(
            sums,
            out,
            bias,
            group,
            num_tokens,
            num_rows,
            tile[NEXT_BUFFER],
            TILES=TILES,
            ROW_TILES=ROW_TILES,
            K_WARPS=K_WARPS,
            OUTS=TILE_ROWS[EPILOGUE] * ROW_TILES * ROW_WARPS,
            STEP=32 * K_WARPS // (TILE_ROWS[EPILOGUE] * ROW_TILES),
            STRIDE=16 * ROW_TILES * ROW_WARPS + ROW_PAD,
            EPILOGUE=EPILOGUE,
            BIAS=BIAS,
        )
        group = i32(group + ptx.num_ctas())


@device
def _point(
    rows: Any, weight: Address, first: I32, num_rows: I32, size: I32, lane_k: I32, *, ROW_TILES: int, EPILOGUE: str
) -> None:
    """Set the addresses of this lane's rows in tile row ``first``; the last row stands for any beyond."""
    for r in unrolled(ROW_TILES):
        for h in unrolled(2):
            n = i32((first * ROW_TILES + r) * TILE_ROWS[EPILOGUE] + ((ptx.thread_id() & 31) >> 2))
            if EPILOGUE != "swiglu":
                n = i32(n + 8 * h)
            if n >= num_rows:
                n = i32(num_rows - 1)
            if EPILOGUE == "swiglu":
                n = i32(n + h * num_rows)
            rows[r, h] = weight + n * (size * 2) + lane_k * 2


@device
def _load(w: Any, rows: Any, left: I32, *, ROW_TILES: int, K_WARPS: int, SLABS: int, d: int, s: int) -> None:
    """Load slab s of tile d again, unless it lies beyond the end: some older weight is multiplied by zeros then."""
    if left > (d * SLABS + s) * K_WARPS * SLAB:
        for r in unrolled(ROW_TILES):
            for h in unrolled(2):
                w[d, s, r, h] = ptx.load_stream_v4(rows[r, h] + (d * SLABS + s) * K_WARPS * SLAB * 2)


@device
def _multiply(
    sums: Any,
    w: Any,
    values: Offset,
    zero: I32,
    *,
    TILES: int,
    ROW_TILES: int,
    K_WARPS: int,
    SLABS: int,
    d: int,
    s: int,
) -> None:
    """Add the products of slab s, two mma steps for each tile of rows and tokens.

    Up to four tiles of tokens at a time: their fragments fit the registers, and two mma that depend on each other are
    as many apart.

    ``zero`` is 0, which no compiler knows: the words that a load leaves in one order and an mma wants in another become
    new values by it, laid out once. Without it ptxas (13.0) gives each mma copies of its own, and spills.
    """
    b = registers(4)
    for m in unrolled(0, TILES, 4):
        for n in unrolled(m, min(m + 4, TILES)):
            b[n - m] = ptx.shared_load_v4(values + n * 8 * (K_WARPS * SLABS * 64 + PAD) + s * K_WARPS * 64)
        for i in unrolled(2):
            for r in unrolled(ROW_TILES):
                low, high = w[d, s, r, 0], w[d, s, r, 1]
                a = (
                    u32(low[2 * i] ^ zero),
                    u32(high[2 * i] ^ zero),
                    u32(low[2 * i + 1] ^ zero),
                    u32(high[2 * i + 1] ^ zero),
                )
                for n in unrolled(m, min(m + 4, TILES)):
                    sums[r, n] = ptx.mma_bf16(a, (b[n - m][2 * i], b[n - m][2 * i + 1]), sums[r, n])


@device
def _copy_tile(
    tile: Any,
    x: Address,
    num_tokens: I32,
    num_groups: I32,
    size: I32,
    buffer_bytes: Offset,
    *,
    TILES: int,
    CHUNKS: int,
    STAGES: int,
    THREADS: int,
) -> None:
    """Begin to copy the next tile of activations; zeros where a token or a k does not exist."""
    assert CHUNKS <= THREADS
    if tile[NEXT_GROUP] < num_groups:
        token = i32(ptx.thread_id() >> LOG2[CHUNKS])
        chunk = i32(ptx.thread_id() & (CHUNKS - 1))
        k = i32(tile[NEXT_K] + chunk * 8)
        left = i32(num_tokens - token)
        if k >= size:
            left = i32(0)
        source = x + i32(token * size + k) * 2
        target = i32(tile[NEXT_BUFFER] + token * (CHUNKS * 16 + PAD) + chunk * 16)
        for j in unrolled(8 * TILES * CHUNKS // THREADS):
            num_bytes = i32(16 if left > j * (THREADS // CHUNKS) else 0)
            ptx.copy_async_16_or_zeros(target + j * (THREADS // CHUNKS) * (CHUNKS * 16 + PAD), source, num_bytes)
            source = source + i32(THREADS // CHUNKS * 2 * size)
        if 8 * TILES * CHUNKS < THREADS:
            if token < 8 * TILES:
                ptx.copy_async_16_or_zeros(target, source, i32(16 if left > 0 else 0))
    ptx.copy_async_commit()
    tile[NEXT_K] = i32(tile[NEXT_K] + CHUNKS * 8)
    if tile[NEXT_K] >= size:
        tile[NEXT_K] = i32(0)
        tile[NEXT_GROUP] = i32(tile[NEXT_GROUP] + ptx.num_ctas())
    tile[NEXT_BUFFER] = _next_buffer(tile[NEXT_BUFFER], buffer_bytes, STAGES=STAGES)


@device
def _buffer_bytes(*, TILES: int, K_WARPS: int, SLABS: int, ROW_TILES: int, ROW_WARPS: int) -> Offset:
    """Return the size of a buffer, which holds a tile of activations or all partial sums."""
    return 8 * TILES * max(K_WARPS * SLABS * 64 + PAD, K_WARPS * (16 * ROW_TILES * ROW_WARPS + ROW_PAD) * 4)


@device
def _next_buffer(buffer: Offset, buffer_bytes: Offset, *, STAGES: int) -> Offset:
    """Return the offset of the buffer after this one."""
    following = i32(buffer + buffer_bytes)
    if following >= STAGES * buffer_bytes:
        following = i32(0)
    return following


@device
def _finish(
    sums: Any,
    out: Address,
    bias: Address,
    group: I32,
    num_tokens: I32,
    num_rows: I32,
    base: Offset,
    *,
    TILES: int,
    ROW_TILES: int,
    K_WARPS: int,
    OUTS: int,
    STEP: int,
    STRIDE: int,
    EPILOGUE: str,
    BIAS: bool,
) -> None:
    """Add the sums of the warps in order and store what comes of them.

    Partial sums are float32 [K_WARPS, 8 * TILES tokens, STRIDE], at ``base``, where the activations of the last tile of
    K lie. The first barrier waits for the warps that still read those, the second for the sums. The next copy to this
    buffer begins after the next barrier of the loop. A thread gives one row's values for tokens STEP apart.
    """
    assert STEP >= 1
    ptx.barrier()
    lane = i32(ptx.thread_id() & 31)
    k_warp = i32((ptx.thread_id() >> 5) & (K_WARPS - 1))
    row = i32((ptx.thread_id() >> (5 + LOG2[K_WARPS])) * (16 * ROW_TILES) + (lane >> 2))
    mine = i32(base + ((k_warp * 8 * TILES + (lane & 3) * 2) * STRIDE + row) * 4)
    for r in unrolled(ROW_TILES):
        for n in unrolled(TILES):
            for c in unrolled(4):
                ptx.shared_store_f32(mine + ((8 * n + c % 2) * STRIDE + 16 * r + 8 * (c // 2)) * 4, sums[r, n][c])
    token = i32(ptx.thread_id() >> LOG2[OUTS])
    row = i32(ptx.thread_id() & (OUTS - 1))
    n = i32(group * OUTS + row)
    if EPILOGUE == "swiglu":
        row = i32(row + (row & -8))
    left = i32(num_tokens - token)
    if n >= num_rows:
        left = i32(0)
    place = out + i32(token * num_rows + n) * VALUE_BYTES[EPILOGUE]
    step_bytes = i32(num_rows * (VALUE_BYTES[EPILOGUE] * STEP))
    old = registers(-(-8 * TILES // STEP), init=0.0)
    if EPILOGUE == "residual":
        old_place = place
        for j in unrolled(-(-8 * TILES // STEP)):
            if left > j * STEP:
                old[j] = ptx.bf16_low(ptx.load_u16(old_place))
            old_place = old_place + step_bytes
    shifts = registers(2, init=0.0)
    if BIAS and left > 0:
        shifts[0] = ptx.bf16_low(ptx.load_u16(bias + n * 2))
        if EPILOGUE == "swiglu":
            shifts[1] = ptx.bf16_low(ptx.load_u16(bias + (n + num_rows) * 2))
    ptx.barrier()
    parts = i32(base + (token * STRIDE + row) * 4)
    for j in unrolled(-(-8 * TILES // STEP)):
        if left > j * STEP:
            value = _total(parts + j * STEP * STRIDE * 4, K_WARPS=K_WARPS, BYTES=8 * TILES * STRIDE * 4) + shifts[0]
            if EPILOGUE == "logits":
                ptx.store_f32(place, ptx.round_bf16(value))
            else:
                if EPILOGUE == "swiglu":
                    up = _total(parts + j * STEP * STRIDE * 4 + 32, K_WARPS=K_WARPS, BYTES=8 * TILES * STRIDE * 4)
                    value = swiglu(value, up + shifts[1])
                if EPILOGUE == "residual":
                    value = old[j] + ptx.round_bf16(value)
                ptx.store_u16(place, ptx.pack_bf16(value, 0.0))
        place = place + step_bytes


@device
def _total(area: Offset, *, K_WARPS: int, BYTES: int) -> F32:
    """Return the sum of the warps' parts, in order: ``fma`` by 1, because no compiler reorders it."""
    total = ptx.shared_load_f32(area)
    for k in unrolled(1, K_WARPS):
        total = ptx.fma(ptx.shared_load_f32(area + k * BYTES), 1.0, total)
    return total


def tiles_for(num_tokens: int) -> int:
    """Return the smallest TILES that kernels are built for and that holds so many tokens.

    Raises:
        ValueError: More than MAX_TOKENS, or none.
    """
    for tiles in TILES_BUILT:
        if 1 <= num_tokens <= 8 * tiles:
            return tiles
    raise ValueError(f"{num_tokens} tokens; one launch takes 1 to {MAX_TOKENS}")


def num_ctas_needed(num_rows: int, constants: Mapping[str, Constant]) -> int:
    """Return how many CTAs find work at all."""
    row_tiles, row_warps = _integers(constants, "ROW_TILES", "ROW_WARPS")
    return -(-num_rows // (TILE_ROWS[str(constants["EPILOGUE"])] * row_tiles * row_warps))


def shared_bytes(constants: Mapping[str, Constant]) -> int:
    """Return the dynamic shared memory of a launch in bytes: buffers of activations, or of partial sums."""
    names = ("TILES", "K_WARPS", "SLABS", "ROW_TILES", "ROW_WARPS")
    (stages,) = _integers(constants, "STAGES")
    return stages * _buffer_bytes(**dict(zip(names, _integers(constants, *names), strict=True)))


def _integers(constants: Mapping[str, Constant], *names: str) -> tuple[int, ...]:
    found = []
    for name in names:
        value = constants[name]
        assert isinstance(value, int), name
        found.append(value)
    return tuple(found)


def spec(
    num_rows: int,
    *,
    TILES: int,
    EPILOGUE: str,
    BIAS: bool = False,
    ctas_per_sm: int = 1,
    sizes: Mapping[str, int] | None = None,
) -> KernelSpec:
    """Return the kernel for a weight that gives ``num_rows`` values per token.

    Args:
        num_rows: Of the product.
        TILES: Tiles of 8 tokens.
        EPILOGUE: Of the kernel.
        BIAS: Of the kernel.
        ctas_per_sm: CTAs that share a multiprocessor.
        sizes: Other constants of the kernel, instead of :func:`sizes_for`.
    """
    constants: dict[str, Constant] = {
        **(sizes or sizes_for(num_rows, TILES, EPILOGUE)),
        "BIAS": BIAS,
        "EPILOGUE": EPILOGUE,
        "TILES": TILES,
    }
    row_tiles, row_warps, k_warps, slabs, depth = _integers(
        constants, "ROW_TILES", "ROW_WARPS", "K_WARPS", "SLABS", "DEPTH"
    )
    return KernelSpec(
        kernel=gemm,
        constants=tuple(sorted(constants.items())),
        num_threads=32 * row_warps * k_warps,
        shared_bytes=shared_bytes(constants),
        ctas_per_sm=ctas_per_sm,
        has_mma=True,
        min_vector_loads=2 * 2 * row_tiles * slabs * depth,
        prefetches=True,
    )


def sizes_for(num_rows: int, tiles: int, epilogue: str) -> dict[str, int]:
    """Return the constants that are a matter of speed: for 132 multiprocessors, 32 KiB of weights in flight on each.

    The largest groups of rows (activations are read the less often) that keep the busiest multiprocessor within a
    tenth of the least work. K_WARPS, which decides the order of the sums, comes out the same for any number of tokens.
    """
    num_tiles = -(-num_rows // TILE_ROWS[epilogue])
    turns = {rows: -(-num_tiles // (rows * NUM_MULTIPROCESSORS)) * rows for rows in (4, 2, 1)}
    rows = next(rows for rows, turn in turns.items() if turn <= 1.1 * min(turns.values()))
    k_warps = 2 if rows == 4 else 4
    if tiles == 8 or rows == 1:  # four warps with twice the registers
        row_tiles = min(2, rows) if tiles == 8 else 1
        row_warps, loads = 4 // k_warps, 16
    else:
        row_tiles, row_warps, loads = 1, rows, 8
    slabs = 4 // row_tiles if k_warps == 2 else 2
    depth = loads // (2 * row_tiles * slabs)
    return {
        "DEPTH": depth,
        "K_WARPS": k_warps,
        "ROW_TILES": row_tiles,
        "ROW_WARPS": row_warps,
        "SLABS": slabs,
        "STAGES": 2,
    }


def specs(shape: ModelShape) -> list[KernelSpec]:
    """Return what the linears and the output head of a model need for 3 to 64 tokens."""
    linears = {
        (shape.qkv_size, "store", shape.has_attention_bias),
        (shape.hidden_size, "residual", shape.has_attention_bias),
        (shape.hidden_size, "residual", shape.has_mlp_bias),
        (shape.intermediate_size, "swiglu", shape.has_mlp_bias),
        (shape.vocab_size, "logits", False),
    }
    return [
        spec(num_rows, TILES=tiles, EPILOGUE=epilogue, BIAS=has_bias)
        for num_rows, epilogue, has_bias in sorted(linears)
        for tiles in TILES_BUILT
    ]
