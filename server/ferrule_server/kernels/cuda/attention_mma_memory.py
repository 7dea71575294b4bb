"""Where things lie for attention on tensor cores: shared memory of a CTA, rows of a tile, tokens of the pool."""

from __future__ import annotations

from typing import Any

from ferrule_server.kernels.cuda.append import kv_address
from ferrule_server.kernels.cuda.constants import LOG2
from ferrule_server.kernels.cuda.intrinsics import I32, Address, Offset, device
from ferrule_server.kernels.cuda.specialise import i32
from ferrule_server.kernels.cuda.work_list import MAX_NEW

__all__ = [
    "LOG2",
    "ROWS",
    "Registers",
    "TAIL_PAD",
    "TAIL_TOKENS",
    "TILE",
    "ends_offset",
    "flag_offset",
    "folds_offset",
    "larger",
    "shared_bytes",
    "slots_offset",
    "smaller",
    "stats_offset",
    "tail_offset",
    "token_address",
    "token_of_row",
]

ROWS = 16
"""Query rows of a tile: heads of the group times tokens."""
TILE = 16
"""Tokens of one step of the online softmax."""

Registers = Any
"""An array of variables; what it is in Python only the specialiser knows."""

# Shared memory: Q, K of the tail, V of the tail, results of the warps, their maxima and sums, the folded sums of the
# segment and of the segments before it, their maxima and sums of weights, a flag, what each row sees (two words).
# It must fit 101,376 bytes, the limit of a CTA on compute capability 8.6 and 8.9.
TAIL_PAD = 16
"""Bytes behind each row of the tail: spread what a quarter of a warp reads over all banks."""
TAIL_TOKENS = MAX_NEW + TILE


@device
def tail_offset(*, HEAD_DIM: int) -> Offset:
    """Return where the K of the tail begins."""
    return ROWS * HEAD_DIM * 2


@device
def slots_offset(*, HEAD_DIM: int) -> Offset:
    """Return where the results of the warps begin."""
    return ROWS * HEAD_DIM * 2 + 2 * TAIL_TOKENS * (HEAD_DIM * 2 + TAIL_PAD)


@device
def stats_offset(*, HEAD_DIM: int, WARPS: int) -> Offset:
    """Return where the maxima (float32 [WARPS, ROWS]) and then the sums of the warps begin."""
    return slots_offset(HEAD_DIM=HEAD_DIM) + WARPS * ROWS * HEAD_DIM * 4


@device
def folds_offset(*, HEAD_DIM: int, WARPS: int) -> Offset:
    """Return where the folded sums begin: float32 [2, ROWS, HEAD_DIM], of the segment, then of those before it."""
    return stats_offset(HEAD_DIM=HEAD_DIM, WARPS=WARPS) + WARPS * ROWS * 8


@device
def ends_offset(*, HEAD_DIM: int, WARPS: int) -> Offset:
    """Return where the maximum and the sum of weights of each folded row begin: float32 [2 folds, 2 turns, ROWS, 2]."""
    return folds_offset(HEAD_DIM=HEAD_DIM, WARPS=WARPS) + 2 * ROWS * HEAD_DIM * 4


@device
def flag_offset(*, HEAD_DIM: int, WARPS: int) -> Offset:
    """Return where the word lies that tells all threads what the ticket was; what rows see is 16 bytes further."""
    return ends_offset(HEAD_DIM=HEAD_DIM, WARPS=WARPS) + 2 * 2 * ROWS * 8


@device
def smaller(a: I32, b: I32) -> I32:
    """Return the smaller of two."""
    return a if a < b else b


@device
def larger(a: I32, b: I32) -> I32:
    """Return the larger of two."""
    return a if a > b else b


@device
def token_of_row(row: I32, num_rows: I32, *, GROUP: int) -> I32:
    """Return which token of the tile a query row belongs to; the last one for rows that are left over."""
    return smaller(i32((row * ((ROWS * ROWS + GROUP - 1) // GROUP)) >> 8), i32(num_rows - 1))


@device
def token_address(
    heads: Address, block: I32, token: I32, block_stride: Address, *, BLOCK_SIZE: int, HEAD_DIM: int
) -> Address:
    """Return where the K of a token in a block lies; ``heads`` is where that of this layer and head begins in block 0.

    ``token`` may be a slot too: what counts is its place in the block.
    """
    offset = i32(token & (BLOCK_SIZE - 1))
    return kv_address(heads, block, block_stride, 0, 0, offset, BLOCK_SIZE=BLOCK_SIZE, HEAD_DIM=HEAD_DIM)


def shared_bytes(head_dim: int, *, WARPS: int) -> int:
    """Return the dynamic shared memory of a launch in bytes."""
    return flag_offset(HEAD_DIM=head_dim, WARPS=WARPS) + 16 + ROWS * 8
