"""The best token of each of any number of rows of logits.

Maths: per row the token with the largest logit, the lowest id among equals, -1 where a logit is NaN or infinite. See
``kernels.reference.best_tokens``.

A CTA looks at a slice of a row at a time; the one that arrives last at the row's ticket takes the maximum over the
keys (:mod:`ferrule_server.kernels.cuda.best_token`) of all slices.

Source: the ticket is the "threadFenceReduction" of NVIDIA's CUDA samples, with a counter that wraps.
"""

from __future__ import annotations

from ferrule_server.kernels.cuda import best_token
from ferrule_server.kernels.cuda import intrinsics as ptx
from ferrule_server.kernels.cuda.constants import LOG2
from ferrule_server.kernels.cuda.intrinsics import I32, Address
from ferrule_server.kernels.cuda.logit_rows import DEFAULT_SLICE, DEFAULT_WARPS, num_slices
from ferrule_server.kernels.cuda.spec import KernelSpec, ModelShape
from ferrule_server.kernels.cuda.specialise import Constant, i32
from ferrule_server.kernels.cuda.ticket import arrive

__all__ = ["argmax", "num_ctas_needed", "partial_bytes", "shared_bytes", "spec", "specs"]


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
) -> None:
    """Find the best token of rows of logits.

    Launch: any grid (one CTA per row and slice at most is of use), ``32 * WARPS`` threads, ``shared_bytes`` of
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
    """
    ptx.grid_launch_dependents()
    ptx.grid_wait()
    slices = i32((vocab_size + SLICE - 1) >> LOG2[SLICE])
    row = i32(0)
    part = i32(ptx.cta_id())
    while row < num_rows:
        if part >= slices:
            part = i32(part - slices)
            row = i32(row + 1)
        else:
            source = logits + row * (vocab_size * 4)
            best = best_token.best_of_slice(
                source, i32(part * SLICE), vocab_size, i32(0), STRONG=False, MASKED=False, SLICE=SLICE, WARPS=WARPS
            )
            if ptx.thread_id() == 0:
                ptx.store_u64(partials + (row * slices + part) * 8, best)
            if arrive(tickets + row * 4, slices, i32(WARPS * 8), ALL_STORE=False) == 1:
                if ptx.thread_id() < 32:
                    best = best_token.best_partial(partials + row * slices * 8, slices, STEP=8)
                    if ptx.thread_id() == 0:
                        ptx.store_i32(tokens + row * 4, best_token.token_of(best))
            part = i32(part + ptx.num_ctas())


def shared_bytes(*, WARPS: int) -> int:
    """Return the dynamic shared memory of a launch in bytes."""
    return WARPS * 8 + 16


def num_ctas_needed(num_rows: int, vocab_size: int, *, SLICE: int = DEFAULT_SLICE) -> int:
    """Return how many CTAs find work at all."""
    return num_rows * -(-vocab_size // SLICE)


def partial_bytes(num_rows: int, vocab_size: int, *, SLICE: int = DEFAULT_SLICE) -> int:
    """Return the size of the scratch of a launch; it need not be cleared, the tickets must be 0."""
    return num_rows * -(-vocab_size // SLICE) * 8


def spec(*, WARPS: int = DEFAULT_WARPS, SLICE: int = DEFAULT_SLICE) -> KernelSpec:
    """Return the kernel; the keywords are its constants."""
    constants: dict[str, Constant] = {"SLICE": SLICE, "WARPS": WARPS}
    return KernelSpec(
        kernel=argmax,
        constants=tuple(sorted(constants.items())),
        num_threads=32 * WARPS,
        shared_bytes=shared_bytes(WARPS=WARPS),
        min_vector_loads=SLICE // (128 * WARPS),
        has_ticket=True,
    )


def specs(shape: ModelShape) -> list[KernelSpec]:
    """Return what a model needs."""
    num_slices(shape.vocab_size)
    return [spec()]
