"""The output head for one or two rows, which also finds the best token; and the best token of rows of logits.

Maths: ``logits[m, v] = float32(bf16(scale[v] * sum_k bf16(rms_norm(hidden)[m, k]) * weight[v, k]))``, and per row the
token with the largest logit, the lowest id among equals, -1 where a logit is NaN or infinite. See
``kernels.reference.best_tokens``.

A logit and its token are one 64-bit key, larger for a larger logit, then for a lower id, so that the best token is a
maximum, whatever the order: of lanes, of warps, of CTAs. The CTA that arrives last at a ticket takes the maximum over
the CTAs. NaN and infinities have the largest key of all.

Source: the multiplication is :mod:`ferrule_server.kernels.cuda.gemv`'s; the ticket is the "threadFenceReduction" of
NVIDIA's CUDA samples, with a counter that wraps.
"""

from __future__ import annotations

from ferrule_server.kernels.cuda.gemv import (
    VALUES,
    chunks_per_thread,
    multiply,
    own_sum,
    plan,
    prefetch,
    prefetch_norm,
    stage_vectors,
    vector_stride,
)
from ferrule_server.kernels.cuda.gemv import shared_bytes as vector_bytes
from ferrule_server.kernels.cuda.intrinsics import (
    F32,
    I32,
    U32,
    U64,
    Address,
    Offset,
    barrier,
    cta_id,
    device,
    float_bits,
    grid_launch_dependents,
    grid_wait,
    load_f32,
    load_relaxed_u64,
    num_ctas,
    order_key,
    round_bf16,
    shared_load_u64,
    shared_store_u64,
    shuffle_xor_u32,
    store_f32,
    store_i32,
    store_u64,
    thread_id,
)
from ferrule_server.kernels.cuda.logit_rows import (
    DEFAULT_SLICE,
    DEFAULT_WARPS,
    NEGATIVE_INFINITY,
    arrive,
    load_slice,
    num_slices,
)
from ferrule_server.kernels.cuda.spec import KernelSpec, ModelShape
from ferrule_server.kernels.cuda.specialise import Constant, i32, registers, unrolled

__all__ = [
    "argmax",
    "argmax_num_ctas_needed",
    "argmax_partial_bytes",
    "argmax_shared_bytes",
    "argmax_spec",
    "head",
    "num_ctas_needed",
    "partial_bytes",
    "shared_bytes",
    "spec",
    "specs",
    "variants",
]

EXPONENT = 0x7F800000
NOT_FINITE = 0xFFFFFFFF
"""Above the order of every finite number."""
LAST_ID = 0x7FFFFFFF
LOG2_OF = {1 << bit: bit for bit in range(20)}


def head(
    hidden: Address,
    norm_weight: Address,
    weight: Address,
    scales: Address,
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
    INT8: bool,
) -> None:
    """Multiply M normalised vectors by the output matrix and find the best token of each.

    Launch: any grid, ``32 * WARPS`` threads, ``shared_bytes`` of dynamic shared memory.

    Bytes moved: the weights once, ``2 * vocab_size * size`` (int8 half, and 4 a row); 4 per logit that is written.

    Args:
        hidden: bf16 [M, size], before the final norm.
        norm_weight: bf16 [size], immutable.
        weight: bf16 [vocab_size, size], immutable; int8 where INT8.
        scales: float32 [vocab_size], immutable; read where INT8.
        logits: float32 [M, vocab_size], written; 0 where nobody reads them, as in greedy decoding.
        tokens: int32 [M], written.
        partials: uint64 [CTAs, M], scratch.
        ticket: uint32, 0 before the first launch and after every one.
        vocab_size: Rows of the weight, below 2^31.
        size: Of a vector, a multiple of 8, of 16 where INT8.
        eps: Of the norm.
        M: Vectors, 1 or 2.
        R: Rows per warp and turn.
        U: Chunks per row in flight.
        X: Chunks of a vector that a thread holds, all of them.
        WARPS: Per CTA, at least M.
        INT8: The weights are int8 with a scale per row.
    """
    assert M in (1, 2)
    assert M <= WARPS
    lane = i32(thread_id() & 31)
    warp = i32(thread_id() >> 5)
    row_bytes = i32(size * (16 // VALUES[INT8]))
    stride = vector_stride(size, SPAN=32 * U * VALUES[INT8])
    first = i32(cta_id() * WARPS * R)
    w = registers(R, U)
    norm = registers(X)
    prefetch(w, weight, i32(first + warp * R), vocab_size, row_bytes, P=1, R=R, U=U)
    prefetch_norm(norm, norm_weight, size, X=X, WARPS=WARPS)
    grid_launch_dependents()
    grid_wait()
    stage_vectors(hidden, norm, size, eps, M=M, X=X, SPAN=32 * U * VALUES[INT8], WARPS=WARPS, NORM=True, INT8=INT8)
    mine_of = i32(lane & (M - 1))
    best = 0
    while first < vocab_size:
        row = i32(first + warp * R)
        n = i32(row + (lane >> LOG2_OF[M]))
        factor = 1.0
        if INT8:
            if lane < R * M and n < vocab_size:
                factor = load_f32(scales + n * 4)
        sums = registers(R, M, init=0.0)
        after = i32(row + num_ctas() * WARPS * R)
        multiply(w, sums, weight, row, after, vocab_size, row_bytes, stride, M=M, P=1, R=R, U=U, INT8=INT8)
        mine = own_sum(sums, lane, M=M, R=R, PART=0)
        if INT8:
            mine = mine * factor
        mine = round_bf16(mine)
        key = key_of(float_bits(mine), n)
        if lane < R * M and n < vocab_size:
            if logits != 0:
                store_f32(logits + (mine_of * vocab_size + n) * 4, mine)
            best = max_key(best, key)
        first = i32(first + num_ctas() * WARPS * R)
    keys = i32(M * stride + KEYS_AT[M * X * WARPS])
    best = warp_max_key(best, COUNT=M)
    if lane < M:
        shared_store_u64(i32(keys + (lane * WARPS + warp) * 8), best)
    barrier()
    if thread_id() == 0:
        for m in unrolled(M):
            best = cta_max_key(i32(keys + m * WARPS * 8), WARPS=WARPS)
            store_u64(partials + (cta_id() * M + m) * 8, best)
    if arrive(ticket, num_ctas(), i32(keys + M * WARPS * 8), ALL_STORE=False) == 1:
        if warp < M:
            best = best_partial(partials + warp * 8, num_ctas(), STEP=M * 8)
            if lane == 0:
                store_i32(tokens + warp * 4, token_of(best))


def argmax(
    logits: Address,
    tokens: Address,
    partials: Address,
    tickets: Address,
    num_rows: I32,
    vocab_size: I32,
    *,
    WARPS: int,
    SLICE: int,
    MASKED: bool,
) -> None:
    """Find the best token of rows of logits.

    Launch: any grid (one CTA per row and slice at most is of use), ``32 * WARPS`` threads, ``argmax_shared_bytes`` of
    dynamic shared memory.

    Bytes moved: 4 per logit.

    Args:
        logits: float32 [num_rows, vocab_size].
        tokens: int32 [num_rows], written.
        partials: uint64 [num_rows, slices], scratch; a slice is SLICE tokens.
        tickets: uint32 [num_rows], 0 before the first launch and after every one.
        num_rows: Rows.
        vocab_size: Logits per row, below 2^20.
        WARPS: Per CTA.
        SLICE: Tokens that a CTA looks at at a time, a multiple of 128 * WARPS.
        MASKED: -inf stands for a token that is not allowed, and is no error; -1 where no token is allowed.
    """
    assert SLICE % (128 * WARPS) == 0
    lane = i32(thread_id() & 31)
    grid_launch_dependents()
    grid_wait()
    slices = i32((vocab_size + SLICE - 1) >> LOG2_OF[SLICE])
    row = i32(0)
    part = i32(cta_id())
    while part >= slices and row < num_rows:
        part = i32(part - slices)
        row = i32(row + 1)
    while row < num_rows:
        words = registers(SLICE // (128 * WARPS))
        load_slice(
            logits + row * (vocab_size * 4), i32(part * SLICE), vocab_size, words, THREADS=32 * WARPS, SLICE=SLICE
        )
        best = 0
        for g in unrolled(SLICE // (128 * WARPS)):
            for i in unrolled(4):
                token = i32(part * SLICE + (thread_id() + 32 * WARPS * g) * 4 + i)
                key = key_of(words[g][i], token)
                if MASKED:
                    key = 0 if words[g][i] == NEGATIVE_INFINITY else key
                if token < vocab_size:
                    best = max_key(best, key)
        best = warp_max_key(best, COUNT=1)
        if lane == 0:
            shared_store_u64(i32((thread_id() >> 5) * 8), best)
        barrier()
        place = partials + (row * slices + part) * 8
        if thread_id() == 0:
            best = cta_max_key(i32(0), WARPS=WARPS)
            store_u64(place, best)
        if arrive(tickets + row * 4, slices, i32(WARPS * 8), ALL_STORE=False) == 1:
            if thread_id() < 32:
                best = best_partial(partials + row * slices * 8, slices, STEP=8)
                if lane == 0:
                    store_i32(tokens + row * 4, token_of(best))
        part = i32(part + num_ctas())
        while part >= slices and row < num_rows:
            part = i32(part - slices)
            row = i32(row + 1)


@device
def key_of(bits: U32, token: I32) -> U64:
    """Return the key of a logit: its order, then the lower id; above 0, and below 2^63."""
    order = order_key(bits)
    if (bits & EXPONENT) == EXPONENT:
        order = NOT_FINITE
    return (order << 31) | (LAST_ID - token)


@device
def token_of(key: U64) -> I32:
    """Return the token of the largest key: -1 if there is none, or a logit is not finite."""
    token = i32(LAST_ID - (key & LAST_ID))
    if key == 0 or (key >> 31) == NOT_FINITE:
        token = i32(-1)
    return token


@device
def max_key(a: U64, b: U64) -> U64:
    """Return the larger key."""
    return b if b > a else a


@device
def warp_max_key(key: U64, *, COUNT: int) -> U64:
    """Return the largest key of the lanes that are equal modulo COUNT, a power of two."""
    for s in unrolled(5 - LOG2_OF[COUNT]):
        high = shuffle_xor_u32(key >> 32, 16 >> s)
        low = shuffle_xor_u32(key & 0xFFFFFFFF, 16 >> s)
        key = max_key(key, (high << 32) | low)
    return key


@device
def cta_max_key(keys: Offset, *, WARPS: int) -> U64:
    """Return the largest of the keys that the warps left in shared memory."""
    best = shared_load_u64(keys)
    for warp in unrolled(1, WARPS):
        best = max_key(best, shared_load_u64(i32(keys + warp * 8)))
    return best


@device
def best_partial(partials: Address, count: I32, *, STEP: int) -> U64:
    """Return the largest of ``count`` keys that CTAs left STEP bytes apart; for a whole warp."""
    best = 0
    index = i32(thread_id() & 31)
    while index < count:
        best = max_key(best, load_relaxed_u64(partials + index * STEP))
        index = i32(index + 32)
    return warp_max_key(best, COUNT=1)


KEYS_AT = tuple((sums * 4 + 15) & -16 for sums in range(129))
"""Where keys lie behind the vectors and that many sums of the norm."""


def shared_bytes(size: int, *, M: int, U: int, X: int, WARPS: int, INT8: bool) -> int:
    """Return the dynamic shared memory of a launch of :func:`head` in bytes."""
    vectors = vector_bytes(size, M=M, U=U, X=X, WARPS=WARPS, INT8=INT8) - M * X * WARPS * 4
    return vectors + KEYS_AT[M * X * WARPS] + M * WARPS * 8 + 16


def num_ctas_needed(vocab_size: int, *, R: int, WARPS: int) -> int:
    """Return how many CTAs of :func:`head` find work at all."""
    return -(-vocab_size // (R * WARPS))


def partial_bytes(num_ctas: int, *, M: int) -> int:
    """Return the size of the scratch of a launch of :func:`head`; it need not be cleared, the ticket must be 0."""
    return num_ctas * M * 8


def argmax_num_ctas_needed(num_rows: int, vocab_size: int, *, SLICE: int = DEFAULT_SLICE) -> int:
    """Return how many CTAs of :func:`argmax` find work at all."""
    return num_rows * -(-vocab_size // SLICE)


def argmax_partial_bytes(num_rows: int, vocab_size: int, *, SLICE: int = DEFAULT_SLICE) -> int:
    """Return the size of the scratch of a launch of :func:`argmax`; it need not be cleared, the tickets must be 0."""
    return num_rows * -(-vocab_size // SLICE) * 8


def argmax_shared_bytes(*, WARPS: int) -> int:
    """Return the dynamic shared memory of a launch of :func:`argmax` in bytes."""
    return WARPS * 8 + 16


def spec(
    size: int,
    *,
    M: int,
    INT8: bool = False,
    R: int = 2,
    U: int = 4,
    WARPS: int = 8,
    ctas_per_sm: int = 1,
) -> KernelSpec:
    """Return the output head for vectors of ``size`` values; the keywords are its constants."""
    chunks = chunks_per_thread(size, M=M, U=U, WARPS=WARPS, NORM=True, INT8=INT8)
    constants: dict[str, Constant] = {
        "INT8": INT8,
        "M": M,
        "R": R,
        "U": U,
        "WARPS": WARPS,
        "X": chunks,
    }
    return KernelSpec(
        kernel=head,
        constants=tuple(sorted(constants.items())),
        num_threads=32 * WARPS,
        shared_bytes=shared_bytes(size, M=M, U=U, X=chunks, WARPS=WARPS, INT8=INT8),
        ctas_per_sm=ctas_per_sm,
        min_vector_loads=R * U,
        prefetches=True,
        has_ticket=True,
    )


def argmax_spec(*, MASKED: bool, WARPS: int = DEFAULT_WARPS, SLICE: int = DEFAULT_SLICE) -> KernelSpec:
    """Return the argmax over rows of logits; the keywords are its constants."""
    constants: dict[str, Constant] = {"MASKED": MASKED, "SLICE": SLICE, "WARPS": WARPS}
    return KernelSpec(
        kernel=argmax,
        constants=tuple(sorted(constants.items())),
        num_threads=32 * WARPS,
        shared_bytes=argmax_shared_bytes(WARPS=WARPS),
        min_vector_loads=SLICE // (128 * WARPS),
        has_ticket=True,
    )


def specs(shape: ModelShape) -> list[KernelSpec]:
    """Return what the end of a model needs: its head for one and two rows, and the argmax for more."""
    num_slices(shape.vocab_size)
    found = [argmax_spec(MASKED=is_masked) for is_masked in (False, True)]
    for is_int8 in (False, True):
        rows, chunks, warps = plan(shape.vocab_size, shape.hidden_size, parts=1, is_int8=is_int8)
        found += [spec(shape.hidden_size, M=m, INT8=is_int8, R=rows, U=chunks, WARPS=warps) for m in (1, 2)]
    return found


def variants(shape: ModelShape) -> list[KernelSpec]:
    """Return what a sweep on a GPU tries: rows per warp, chunks in flight, warps per CTA, CTAs per multiprocessor."""
    sizes = ((1, 8, 8, 1), (2, 4, 8, 1), (4, 4, 8, 1), (4, 2, 8, 1), (2, 4, 4, 2), (2, 4, 12, 1))
    return [
        spec(shape.hidden_size, M=1, R=rows, U=chunks, WARPS=warps, ctas_per_sm=ctas)
        for rows, chunks, warps, ctas in sizes
    ]
