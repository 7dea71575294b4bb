"""Softmax sums of parts of a sequence: folded in a fixed order, inside a CTA or by the last one at a tile's ticket.

A *state* is what four values of one row know of some tokens, ``registers(6)``: four weighted sums, the maximum score
(log2 units), the sum of probabilities relative to it. A *partial* is the states of all rows of a tile in memory:
float32 [rows, HEAD_DIM + 4], HEAD_DIM sums, then (maximum, sum, begins a segment, 0).

Folding in a state of no tokens changes no bit, so partials may be cut as the work list likes: what is folded is always
split by split in a segment, then segment by segment (:mod:`ferrule_server.kernels.cuda.work_list`).
"""

from __future__ import annotations

from ferrule_server.kernels.cuda.append import Registers
from ferrule_server.kernels.cuda.intrinsics import (
    F32,
    I32,
    Address,
    device,
    exp2,
    fma,
    load_relaxed_f32x4,
    max_f32,
    store_f32x4,
)
from ferrule_server.kernels.cuda.specialise import i32, registers, unrolled

__all__ = ["EMPTY", "MASKED", "clear", "fold", "fold_partials", "partial_bytes", "store_partial"]

EMPTY = -1e30
"""Maximum of no scores."""
MASKED = -1e38
"""A score left out: so far below EMPTY that its probability is 0 even there."""
IN_FLIGHT = 8
"""Partials that a thread loads at a time."""


def partial_bytes(*, rows: int, head_dim: int) -> int:
    """Return the size of one partial of a tile with so many rows (tokens times query heads)."""
    return 4 * rows * (head_dim + 4)


@device
def clear(state: Registers) -> None:
    """Make a state that of no tokens."""
    for k in unrolled(6):
        state[k] = EMPTY if k == 4 else 0.0


@device
def fold(state: Registers, more: Registers) -> None:
    """Fold later tokens into a state; no tokens on either side leave the other side's bits as they are."""
    top = max_f32(state[4], more[4])
    factor = exp2(state[4] - top)
    more_factor = exp2(more[4] - top)
    for k in unrolled(4):
        state[k] = fma(more[k], more_factor, state[k] * factor)
    state[5] = fma(more[5], more_factor, state[5] * factor)
    state[4] = top


@device
def store_partial(place: Address, state: Registers, begins: F32, column: I32, *, HEAD_DIM: int) -> None:
    """Store a state as four columns, from ``4 * column``, of its row in a partial; ``begins`` is 1 or 0."""
    store_f32x4(place + column * 16, (state[0], state[1], state[2], state[3]))
    if column == 0:
        store_f32x4(place + HEAD_DIM * 4, (state[4], state[5], begins, 0.0))


@device
def fold_partials(
    total: Registers,
    segment: Registers,
    place: Address,
    count: I32,
    column: I32,
    *,
    HEAD_DIM: int,
    ROWS: int,
) -> None:
    """Fold a tile's partials as one CTA that had all splits would have: the last segment stays in ``segment``.

    Args:
        total: A state, empty at first.
        segment: A state, empty at first.
        place: The row in the tile's first partial.
        count: Partials of the tile.
        column: The state's columns begin at ``4 * column``.
        HEAD_DIM: Columns.
        ROWS: Rows of a partial.
    """
    done = i32(0)
    while done < count:
        sums = registers(IN_FLIGHT)
        ends = registers(IN_FLIGHT)
        for u in unrolled(IN_FLIGHT):
            sums[u] = (0.0, 0.0, 0.0, 0.0)
            ends[u] = (EMPTY, 0.0, 0.0, 0.0)
            if done + u < count:
                at = place + (done + u) * (ROWS * (HEAD_DIM + 4) * 4)
                sums[u] = load_relaxed_f32x4(at + column * 16)
                ends[u] = load_relaxed_f32x4(at + HEAD_DIM * 4)
        for u in unrolled(IN_FLIGHT):
            if ends[u][2] > 0.5:
                fold(total, segment)
                clear(segment)
            more = registers(6, init=0.0)
            for k in unrolled(4):
                more[k] = sums[u][k]
            more[4] = ends[u][0]
            more[5] = ends[u][1]
            fold(segment, more)
        done = i32(done + IN_FLIGHT)
