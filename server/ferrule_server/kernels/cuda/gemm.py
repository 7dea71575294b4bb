"""Matrix times 3 to 64 vectors on tensor cores, with residual, SwiGLU or float32 logits behind it.

Maths: ``y[m, n] = sum_k x[m, k] * weight[n, k]`` with float32 sums, then the epilogue. The 16 rows of an ``m16n8k16``
are rows of the weight and its 8 columns are tokens, so that tokens are padded to 8 and no further.

K-permuted fragments: a sum does not care which k stands in which slot of an mma, as long as both operands agree. Lane
``4 g + t`` loads the 16 contiguous bytes k = 8 t .. 8 t + 7 of a slab of 32 of its rows, and uses them as the slots it
owes in two mma steps; activations come from shared memory by the same rule. No second copy of the weights, no ldmatrix:

    elements of the 16 bytes     0 1     2 3      4 5     6 7
    slots they stand for         2t,+1   2t+8,+9  2t,+1   2t+8,+9
    mma step                     first   first    second  second

An item of work is a group of 64 rows of the weight and a part of K. Two warps share each tile of 16 rows and take slabs
of the part in turn; up to 32 tokens that makes eight warps with one row tile each, above it four with two and twice the
registers. A pair of warps keeps 256 values of K in flight in registers, each being loaded again as soon as it is used,
for the next item too; the first are loaded above ``grid_wait``, while the kernel before this one still runs.
Activations pass through STAGES buffers of shared memory, 256 values of K at a time, or 128 with two row tiles. Their
rows are 64 bytes longer than that, so that the eight lanes which read at a time (two rows of 64 bytes) meet different
banks.

At the end of an item the two warps of a row tile exchange sums, so that each has half of the tokens. If K is split,
they store them, and the CTA that comes last to the ticket of the group adds those of all parts.

Reduction order: slab s of a part belongs to warp ``s % 2``; a warp adds its slabs in order, then the second warp is
added to the first, then the parts are added in order. It depends on ``size`` and ``part_size`` and on nothing else: not
on the number of tokens, the grid, the tile sizes or the other tokens. :func:`split` chooses ``part_size`` by the shape
of the weight alone, so a token's result has the same bits alone and among 64.

Bytes moved: ``2 * num_rows * size`` of weights (twice for SwiGLU), once; activations are read from L2 once for each
group of rows: ``num_tokens / 64`` of the weights; if K is split, 8 per token, row and part.

Source: NVIDIA, "Parallel Thread Execution ISA" 9.0, "Matrix Fragments for mma.m16n8k16"; permuting K so that fragments
are contiguous in memory is the idea of Marlin (IST-DASLab/marlin, README, Apache-2.0), which prepacks; here the
activations are permuted instead. No code was taken.
"""

from __future__ import annotations

from typing import Any

from ferrule_server.kernels.cuda import intrinsics as ptx
from ferrule_server.kernels.cuda.constants import LOG2
from ferrule_server.kernels.cuda.gemv import swiglu
from ferrule_server.kernels.cuda.intrinsics import I32, Address, Offset, device
from ferrule_server.kernels.cuda.spec import KernelSpec, LinearShape, ModelShape
from ferrule_server.kernels.cuda.specialise import Constant, i32, registers, u32, unrolled
from ferrule_server.kernels.cuda.ticket import arrive

__all__ = ["MAX_TOKENS", "gemm", "num_ctas_needed", "scratch", "shared_bytes", "spec", "specs", "split", "tiles_for"]

MAX_TOKENS = 64
"""Of one launch; above, cuBLAS or several launches."""
MAX_PARTS = 8
"""Of K."""
TILES_BUILT = (1, 2, 4, 8)
"""Tiles of 8 tokens of the kernels of :func:`specs`."""
ROW_TILES = {1: 1, 2: 1, 4: 1, 8: 2}
"""Tiles of 16 rows that a warp holds, by TILES."""
PAIRS = {1: 1, 2: 1, 4: 2, 8: 4}
"""Pairs of tiles of tokens by TILES; of each pair one warp keeps one at the end."""
ROWS = {"store": 16, "residual": 16, "logits": 16, "swiglu": 8}
"""Values per token that a tile of 16 rows gives: gate and up stand 8 rows apart in a tile."""
VALUE_BYTES = {"store": 2, "residual": 2, "logits": 4, "swiglu": 2}
TURN = 256
"""Values of K whose weights are in flight."""
PAD = 64
"""Bytes between the rows of a buffer of activations."""
BUFFER_BYTES = {tiles: 8 * tiles * (2 * TURN // ROW_TILES[tiles] + PAD) for tiles in TILES_BUILT}
"""Of a buffer of activations, by TILES."""
ITEMS, SIZE, PART_SIZE, PART_BITS = range(4)
"""How work is cut: the number of items, the values of K, those of a part, and the logarithm of the number of parts."""
NEXT_K, NEXT_END, NEXT_ITEM, NEXT_BUFFER, BUFFER = range(5)
"""What is copied next: first value of K, end of the part, item, offset of the buffer; and the buffer that is read."""


def gemm(
    x: Address,
    weight: Address,
    bias: Address,
    out: Address,
    partials: Address,
    tickets: Address,
    num_tokens: I32,
    num_rows: I32,
    size: I32,
    part_size: I32,
    part_bits: I32,
    *,
    TILES: int,
    STAGES: int,
    EPILOGUE: str,
    BIAS: bool,
) -> None:
    """Multiply up to ``8 * TILES`` vectors by a matrix.

    Launch: any grid of at least one CTA (``num_ctas_needed`` at most is of use), 256 threads, 128 with 8 TILES,
    ``shared_bytes`` of dynamic shared memory.

    Args:
        x: bf16 [num_tokens, size].
        weight: bf16 [num_rows, size], immutable; [2 * num_rows, size], rows of gate, then up, for swiglu.
        bias: bf16 [rows of weight], immutable; read where BIAS.
        out: bf16 [num_tokens, num_rows], float32 for logits; ``residual`` adds to what is there.
        partials: float32 [items, 64, at least 8 * TILES, 16], scratch; for several parts.
        tickets: uint32 [groups], 0 before the first launch and after every one; for several parts.
        num_tokens: 1 to ``8 * TILES``; rows beyond are neither read nor written.
        num_rows: Values per token that come out.
        size: Of a vector, a multiple of 8.
        part_size: Values of K in a part, a multiple of 128; no part is empty.
        part_bits: Logarithm of the number of parts, at most 3; 0 for logits.
        TILES: Tiles of 8 tokens: 1, 2, 4 or 8.
        STAGES: Buffers of activations, 2 to 8.
        EPILOGUE: ``store``, ``residual``, ``swiglu``, or ``logits`` (rounded to bf16 and stored as float32).
        BIAS: Add a bias before rounding.
    """
    item = i32(ptx.cta_id())
    cut = registers(4)
    cut[ITEMS] = i32(((num_rows + 4 * ROWS[EPILOGUE] - 1) >> LOG2[4 * ROWS[EPILOGUE]]) << part_bits)
    cut[SIZE] = size
    cut[PART_SIZE] = part_size
    cut[PART_BITS] = part_bits
    rows = registers(ROW_TILES[TILES], 2)
    left = _point(rows, weight, item, num_rows, cut, TILES=TILES, EPILOGUE=EPILOGUE)
    w = registers(ROW_TILES[TILES], 4 // ROW_TILES[TILES], ROW_TILES[TILES], 2)
    for d in unrolled(ROW_TILES[TILES]):
        for s in unrolled(4 // ROW_TILES[TILES]):
            for r in unrolled(ROW_TILES[TILES]):
                w[d, s, r, 0] = (0, 0, 0, 0)
                w[d, s, r, 1] = (0, 0, 0, 0)
            _load(w, rows, left, TILES=TILES, d=d, s=s)
    ptx.grid_launch_dependents()
    ptx.grid_wait()
    zero = i32(num_tokens >> 31)
    tile = registers(5, init=0)
    tile[NEXT_ITEM] = item
    tile[NEXT_K] = _begin(item, cut)
    tile[NEXT_END] = _end(item, cut)
    for _ in unrolled(STAGES - 1):
        _copy_tile(tile, x, num_tokens, cut, TILES=TILES, STAGES=STAGES)
    sums = registers(ROW_TILES[TILES], TILES)
    while item < cut[ITEMS]:
        for r in unrolled(ROW_TILES[TILES]):
            for n in unrolled(TILES):
                sums[r, n] = (0.0, 0.0, 0.0, 0.0)
        start = _begin(item, cut)
        end = _end(item, cut)
        while start < end:
            # Where the weights come from that are loaded in this turn, for the next: further along, or the next item.
            left = i32(left - TURN)
            for r in unrolled(ROW_TILES[TILES]):
                rows[r, 0] += TURN * 2
                rows[r, 1] += TURN * 2
            if i32(start + TURN) >= end:
                left = _point(rows, weight, i32(item + ptx.num_ctas()), num_rows, cut, TILES=TILES, EPILOGUE=EPILOGUE)
            for d in unrolled(ROW_TILES[TILES]):
                if d == 0 or i32(start + d * (TURN // ROW_TILES[TILES])) < end:
                    ptx.copy_async_wait(STAGES - 2)
                    ptx.barrier()
                    _copy_tile(tile, x, num_tokens, cut, TILES=TILES, STAGES=STAGES)
                    for s in unrolled(4 // ROW_TILES[TILES]):
                        _multiply(sums, w, tile[BUFFER], zero, TILES=TILES, d=d, s=s)
                        _load(w, rows, left, TILES=TILES, d=d, s=s)
                    tile[BUFFER] = _next_buffer(tile[BUFFER], TILES=TILES, STAGES=STAGES)
                else:
                    for s in unrolled(4 // ROW_TILES[TILES]):
                        _load(w, rows, left, TILES=TILES, d=d, s=s)
            start = i32(start + TURN)
        kept = registers(ROW_TILES[TILES], PAIRS[TILES], 4)
        _exchange(kept, sums, AREA=STAGES * BUFFER_BYTES[TILES], TILES=TILES)
        is_last = i32(1)
        if EPILOGUE != "logits":
            if part_bits > 0:
                flag = i32(STAGES * BUFFER_BYTES[TILES] + 4096 * PAIRS[TILES])
                is_last = _meet(kept, partials, tickets, item, part_bits, flag, TILES=TILES)
        if is_last == 1:
            first = i32((item >> part_bits) * 4 + (ptx.thread_id() >> 6) * ROW_TILES[TILES])
            for r in unrolled(ROW_TILES[TILES]):
                row = i32((first + r) * ROWS[EPILOGUE] + ((ptx.thread_id() & 31) >> 2))
                _store(kept, out, bias, row, num_tokens, num_rows, TILES=TILES, EPILOGUE=EPILOGUE, BIAS=BIAS, r=r)
        item = i32(item + ptx.num_ctas())


@device
def _begin(item: I32, cut: Any) -> I32:
    """Return the first value of K of an item."""
    return i32((item & ((1 << cut[PART_BITS]) - 1)) * cut[PART_SIZE])


@device
def _end(item: I32, cut: Any) -> I32:
    """Return the end of an item's part of K."""
    end = i32(_begin(item, cut) + cut[PART_SIZE])
    if end > cut[SIZE]:  # noqa: PLR1730 - kernels have no min
        end = cut[SIZE]
    return end


@device
def _lane_k() -> I32:
    """Return the first value of a slab that this lane takes: 32 for each warp of a pair, 8 for each of four lanes."""
    return i32(((ptx.thread_id() >> 5) & 1) * 32 + (ptx.thread_id() & 3) * 8)


@device
def _point(rows: Any, weight: Address, item: I32, num_rows: I32, cut: Any, *, TILES: int, EPILOGUE: str) -> I32:
    """Set the addresses of this lane's rows where an item begins; return how many values of its part lie there.

    The last row stands for any beyond. An item beyond all has no values.
    """
    part = i32(item & ((1 << cut[PART_BITS]) - 1))
    first = i32((item >> cut[PART_BITS]) * 4 + (ptx.thread_id() >> 6) * ROW_TILES[TILES])
    for r in unrolled(ROW_TILES[TILES]):
        for h in unrolled(2):
            n = i32((first + r) * ROWS[EPILOGUE] + ((ptx.thread_id() & 31) >> 2))
            if EPILOGUE != "swiglu":
                n = i32(n + 8 * h)
            if n >= num_rows:
                n = i32(num_rows - 1)
            if EPILOGUE == "swiglu":
                n = i32(n + h * num_rows)
            rows[r, h] = weight + n * i32(cut[SIZE] * 2) + part * i32(cut[PART_SIZE] * 2) + _lane_k() * 2
    left = i32(_end(item, cut) - _begin(item, cut) - _lane_k())
    if item >= cut[ITEMS]:
        left = i32(0)
    return left


@device
def _load(w: Any, rows: Any, left: I32, *, TILES: int, d: int, s: int) -> None:
    """Load slab s of tile d again, unless it lies beyond the end: some older weight is multiplied by zeros then."""
    if left > (d * (4 // ROW_TILES[TILES]) + s) * 64:
        for r in unrolled(ROW_TILES[TILES]):
            for h in unrolled(2):
                w[d, s, r, h] = ptx.load_stream_v4(rows[r, h] + (d * (4 // ROW_TILES[TILES]) + s) * 128)


@device
def _multiply(sums: Any, w: Any, buffer: Offset, zero: I32, *, TILES: int, d: int, s: int) -> None:
    """Add the products of slab s, two mma steps for each tile of rows and tokens.

    Up to four tiles of tokens at a time: their fragments fit the registers, and two mma that depend on each other are
    as many apart.

    ``zero`` is 0, which no compiler knows: the words that a load leaves in one order and an mma wants in another become
    new values by it, laid out once. Without it ptxas (13.0) gives each mma copies of its own, and spills.
    """
    b = registers(4)
    values = i32(buffer + ((ptx.thread_id() & 31) >> 2) * (512 // ROW_TILES[TILES] + PAD) + _lane_k() * 2)
    for m in unrolled(0, TILES, 4):
        for n in unrolled(m, min(m + 4, TILES)):
            b[n - m] = ptx.shared_load_v4(values + n * 8 * (512 // ROW_TILES[TILES] + PAD) + s * 128)
        for i in unrolled(2):
            for r in unrolled(ROW_TILES[TILES]):
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
def _copy_tile(tile: Any, x: Address, num_tokens: I32, cut: Any, *, TILES: int, STAGES: int) -> None:
    """Begin to copy the next tile of activations; zeros where a token or a k does not exist.

    A row of it is 32 chunks of 16 bytes, or 16; eight of them are copied at a time by all threads together.
    """
    if tile[NEXT_ITEM] < cut[ITEMS]:
        token = i32(ptx.thread_id() >> LOG2[32 // ROW_TILES[TILES]])
        chunk = i32(ptx.thread_id() & (32 // ROW_TILES[TILES] - 1))
        k = i32(tile[NEXT_K] + chunk * 8)
        left = i32(num_tokens - token)
        if k >= tile[NEXT_END]:
            left = i32(0)
        source = x + i32(token * cut[SIZE] + k) * 2
        target = i32(tile[NEXT_BUFFER] + token * (512 // ROW_TILES[TILES] + PAD) + chunk * 16)
        for j in unrolled(TILES):
            num_bytes = i32(16 if left > 8 * j else 0)
            ptx.copy_async_16_or_zeros(target + j * 8 * (512 // ROW_TILES[TILES] + PAD), source, num_bytes)
            source = source + i32(16 * cut[SIZE])
    ptx.copy_async_commit()
    tile[NEXT_K] = i32(tile[NEXT_K] + TURN // ROW_TILES[TILES])
    if tile[NEXT_K] >= tile[NEXT_END]:
        tile[NEXT_ITEM] = i32(tile[NEXT_ITEM] + ptx.num_ctas())
        tile[NEXT_K] = _begin(tile[NEXT_ITEM], cut)
        tile[NEXT_END] = _end(tile[NEXT_ITEM], cut)
    tile[NEXT_BUFFER] = _next_buffer(tile[NEXT_BUFFER], TILES=TILES, STAGES=STAGES)


@device
def _next_buffer(buffer: Offset, *, TILES: int, STAGES: int) -> Offset:
    """Return the offset of the buffer after this one."""
    following = i32(buffer + BUFFER_BYTES[TILES])
    if following >= STAGES * BUFFER_BYTES[TILES]:
        following = i32(0)
    return following


@device
def _exchange(kept: Any, sums: Any, *, AREA: int, TILES: int) -> None:
    """Add the sums of the two warps of each row tile.

    Of each pair of tiles of tokens the first warp keeps one, the second the other; each leaves at AREA what it does not
    keep. The sums of the next item come there after a barrier of its own.
    """
    second = i32((ptx.thread_id() >> 5) & 1)
    place = _place(TILES=TILES)
    for r in unrolled(ROW_TILES[TILES]):
        for h in unrolled(PAIRS[TILES]):
            one = sums[r, 2 * h]
            other = (0.0, 0.0, 0.0, 0.0)
            if TILES > 1:
                other = sums[r, min(2 * h + 1, TILES - 1)]
            given = registers(4)
            for c in unrolled(4):
                kept[r, h, c] = ptx.select_f32(second, other[c], one[c])
                given[c] = ptx.select_f32(second, one[c], other[c])
            target = i32((place ^ 512) + AREA + (r * PAIRS[TILES] + h) * 1024)
            ptx.shared_store_f32x4(target, (given[0], given[1], given[2], given[3]))
    ptx.barrier()
    for r in unrolled(ROW_TILES[TILES]):
        for h in unrolled(PAIRS[TILES]):
            other = ptx.shared_load_f32x4(i32(place + AREA + (r * PAIRS[TILES] + h) * 1024))
            for c in unrolled(4):
                # From either side the first warp plus the second; as a product, because no compiler reorders it.
                kept[r, h, c] = ptx.fma(other[c], 1.0, kept[r, h, c])


@device
def _place(*, TILES: int) -> I32:
    """Return where the first of a lane's kept sums lies among those of all: 16 bytes, 512 for a warp."""
    pairs = i32((ptx.thread_id() >> 6) * (ROW_TILES[TILES] * PAIRS[TILES] * 1024))
    return i32(pairs + (ptx.thread_id() & 63) * 16)


@device
def _meet(
    kept: Any, partials: Address, tickets: Address, item: I32, part_bits: I32, flag: Offset, *, TILES: int
) -> I32:
    """Store what this thread keeps; return 1 in the CTA that comes last, which then keeps the sums of all parts."""
    mine = partials + item * (4096 * PAIRS[TILES]) + _place(TILES=TILES)
    for r in unrolled(ROW_TILES[TILES]):
        for h in unrolled(PAIRS[TILES]):
            values = (kept[r, h, 0], kept[r, h, 1], kept[r, h, 2], kept[r, h, 3])
            ptx.store_f32x4(mine + (r * PAIRS[TILES] + h) * 1024, values)
    is_last = arrive(tickets + (item >> part_bits) * 4, i32(1 << part_bits), flag, ALL_STORE=True)
    if is_last == 1:
        mine = mine - (item & ((1 << part_bits) - 1)) * (4096 * PAIRS[TILES])
        for r in unrolled(ROW_TILES[TILES]):
            for h in unrolled(PAIRS[TILES]):
                parts = registers(MAX_PARTS)
                for p in unrolled(MAX_PARTS):
                    parts[p] = (0.0, 0.0, 0.0, 0.0)
                    if p < 1 << part_bits:
                        place = mine + p * (4096 * PAIRS[TILES]) + (r * PAIRS[TILES] + h) * 1024
                        parts[p] = ptx.load_relaxed_f32x4(place)
                for c in unrolled(4):
                    kept[r, h, c] = parts[0][c]
                    for p in unrolled(1, MAX_PARTS):
                        kept[r, h, c] = ptx.fma(parts[p][c], 1.0, kept[r, h, c])
    return is_last


@device
def _store(
    kept: Any,
    out: Address,
    bias: Address,
    row: I32,
    num_tokens: I32,
    num_rows: I32,
    *,
    TILES: int,
    EPILOGUE: str,
    BIAS: bool,
    r: int,
) -> None:
    """Store what comes of the sums of rows ``row`` and ``row + 8``; for swiglu those are gate and up of one."""
    first = i32(((ptx.thread_id() >> 5) & 1) * 8 + (ptx.thread_id() & 3) * 2)
    shifts = registers(2, init=0.0)
    for half in unrolled(2):
        if BIAS:
            n = i32(row + 8 * half)
            if EPILOGUE == "swiglu":
                n = row
            if n < num_rows:
                if EPILOGUE == "swiglu":
                    n = i32(row + half * num_rows)
                shifts[half] = ptx.bf16_low(ptx.load_u16(bias + n * 2))
    old = registers(PAIRS[TILES], 4, init=0.0)
    for h in unrolled(PAIRS[TILES]):
        for c in unrolled(4):
            token = i32(first + 16 * h + c % 2)
            n = i32(row + 8 * (c // 2))
            if EPILOGUE == "residual":
                if token < num_tokens and n < num_rows:
                    old[h, c] = ptx.bf16_low(ptx.load_u16(out + i32(token * num_rows + n) * 2))
    for h in unrolled(PAIRS[TILES]):
        for c in unrolled(2 if EPILOGUE == "swiglu" else 4):
            token = i32(first + 16 * h + c % 2)
            n = i32(row + 8 * (c // 2))
            place = out + i32(token * num_rows + n) * VALUE_BYTES[EPILOGUE]
            value = kept[r, h, c] + shifts[c // 2]
            if EPILOGUE == "swiglu":
                value = swiglu(value, kept[r, h, c + 2 if c < 2 else c] + shifts[1])
            if EPILOGUE == "residual":
                value = old[h, c] + ptx.round_bf16(value)
            if token < num_tokens and n < num_rows:
                if EPILOGUE == "logits":
                    ptx.store_f32(place, ptx.round_bf16(value))
                else:
                    ptx.store_u16(place, ptx.pack_bf16(value, 0.0))


def split(linear: LinearShape) -> tuple[int, int]:
    """Return how K is split, as ``part_size`` and ``part_bits``: by the shape alone, because it decides bits.

    As few parts as come within a fifth of the shortest time on 128 multiprocessors. Time counts tiles of 256 values,
    and one more for the begin and the end of an item.
    """
    times: dict[int, float] = {}
    for bits in range(1 if linear.epilogue == "logits" else 4):
        part_size = _part_size(linear.size, bits)
        if part_size * ((1 << bits) - 1) < linear.size:  # no part is empty
            times[bits] = -(-(_num_groups(linear) << bits) // 128) * (part_size / 256 + 1)
    best = next(bits for bits, time in times.items() if time <= 1.2 * min(times.values()))
    return _part_size(linear.size, best), best


def _part_size(size: int, bits: int) -> int:
    return -(-size // (128 << bits)) * 128


def _num_groups(linear: LinearShape) -> int:
    return -(-linear.num_rows // (4 * ROWS[linear.epilogue]))


def num_ctas_needed(linear: LinearShape) -> int:
    """Return how many CTAs find work at all."""
    return _num_groups(linear) << split(linear)[1]


def scratch(shape: ModelShape) -> tuple[int, int]:
    """Return how many float32 of partial sums and how many tickets the linears of a model need."""
    linears = [linear for linear in shape.linears.values() if split(linear)[1]]
    num_partials = max((num_ctas_needed(linear) * 64 * MAX_TOKENS for linear in linears), default=1)
    return num_partials, max(map(_num_groups, linears), default=1)


def tiles_for(num_tokens: int) -> int:
    """Return the smallest TILES that kernels are built for and that holds so many tokens.

    Raises:
        ValueError: More than MAX_TOKENS, or none.
    """
    for tiles in TILES_BUILT:
        if 1 <= num_tokens <= 8 * tiles:
            return tiles
    raise ValueError(f"{num_tokens} tokens; one launch takes 1 to {MAX_TOKENS}")


def shared_bytes(tiles: int, stages: int) -> int:
    """Return the dynamic shared memory of a launch in bytes: activations, sums that warps exchange, a flag."""
    return stages * BUFFER_BYTES[tiles] + 4096 * PAIRS[tiles] + 16


def spec(*, TILES: int, EPILOGUE: str, BIAS: bool = False, STAGES: int = 4) -> KernelSpec:
    """Return a kernel; its four buffers are what 99 KiB hold."""
    constants: dict[str, Constant] = {"BIAS": BIAS, "EPILOGUE": EPILOGUE, "STAGES": STAGES, "TILES": TILES}
    return KernelSpec(
        kernel=gemm,
        constants=tuple(sorted(constants.items())),
        num_threads=256 // ROW_TILES[TILES],
        shared_bytes=shared_bytes(TILES, STAGES),
        has_mma=True,
        min_vector_loads=16 * ROW_TILES[TILES],
        prefetches=True,
        has_ticket=EPILOGUE != "logits",
    )


def specs(shape: ModelShape) -> list[KernelSpec]:
    """Return what the linears and the output head of a model need for 3 to 64 tokens."""
    kinds = {(linear.epilogue, linear.has_bias) for linear in (*shape.linears.values(), shape.head)}
    return [
        spec(TILES=tiles, EPILOGUE=epilogue, BIAS=has_bias)
        for epilogue, has_bias in sorted(kinds)
        for tiles in TILES_BUILT
    ]
