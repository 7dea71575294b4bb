"""What each CTA of an attention kernel does in a step: written by the host, so that one grid serves any lengths.

The KV of a sequence is cut into *splits* of a fixed number of tokens, its rows into *tiles* (some rows of one sequence,
times the query heads of one KV head). An *item* is a tile and a run of its splits; every CTA does a chain of items.

Results must not depend on how splits were dealt, so the order of sums is fixed by the splits alone: a *segment* is
SEGMENT splits; the splits of a segment are folded in order, then the segments. An item folds on its own as long as it
has folded from the begin of the segment, and leaves one *partial* per segment then, one per split otherwise; a tile
that one item covers leaves none. The CTA that arrives last at a tile's ticket folds the partials. Room for partials is
counted in *places*: a partial takes one for each query token of its tile.

Source: the idea of splitting KV over CTAs is "Flash-Decoding for long-context inference" (Dao, Haziza, Massa, Sizov,
2023); planning on the host for a fixed grid is FlashInfer's (Ye et al., 2025). The code is our own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

__all__ = ["FIELDS", "MAX_NEW", "SEGMENT", "SPLIT", "WorkLists", "make_work_list", "max_items", "max_places"]

Int32Array = npt.NDArray[np.int32]
_Ints = npt.NDArray[np.int64]

SPLIT = 128
"""Tokens of a split, the same for every list and kernel of a server: it decides the order of sums.

A multiple of 64, 16 for each warp of a CTA. 64 spreads short contexts over twice as many CTAs, but a warp then executes
830 instructions for 16 KB of K and V in place of 636 (of 128 dims, counted in the machine code of sm_90a): a split ends
with a merge.
"""
SEGMENT = 4
"""Splits of a segment."""
MAX_NEW = 64
"""New tokens per sequence and step that fit the shared memory of the attention kernels."""
FIELDS = (
    "seq",
    "kv_head",
    "first_row",  # of the tile, in the step
    "num_rows",  # of the tile; 0 = nothing to do, all other fields are 0 too
    "first_split",
    "end_split",
    "kv_len",
    "num_new",  # last tokens of the sequence, whose K and V are in no slot yet
    "first_new_row",
    "writes_new",  # 1: this item appends those new tokens that lie in its splits
    "tile",  # its ticket
    "num_items",  # of the tile, which meet at the ticket
    "first_place",  # of the item's partials
    "tile_first_place",
    "tile_num_partials",
    "next",  # index of this CTA's next item, 0 = none
)
"""The 16 integers of an item."""

_SEQ, _NUM_ROWS, _KV_LEN = map(FIELDS.index, ("seq", "num_rows", "kv_len"))
_ITEM_COST = 1.0
"""What an item costs besides its splits (queries, ticket), in splits."""


class WorkListError(ValueError):
    """A step that the attention kernels cannot serve; the message says which sequence and what would do."""


@dataclass(frozen=True, slots=True)
class WorkList:
    """The items of a step.

    Invariant: every (tile, split) is in exactly one item, every new token in exactly one writing item.

    Attributes:
        items: int32 [num_items, 16], see FIELDS. Item c is the first of CTA c; further ones follow by ``next``.
        num_ctas: The grid it was made for.
        num_tiles: Tickets in use.
        num_places: Of partials, in use.
    """

    items: Int32Array
    num_ctas: int
    num_tiles: int
    num_places: int


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Splits dealt: piece i is splits [first[i], end[i]) of a tile, done by a CTA; ascending by tile and split."""

    tile: _Ints
    first: _Ints
    end: _Ints
    cta: _Ints


def max_items(num_tiles: int, num_ctas: int) -> int:
    """Return how many items a list of so many tiles holds at most."""
    return num_tiles + 2 * num_ctas


def max_places(num_tiles: int, num_ctas: int, max_kv_len: int, *, rows_per_tile: int, split: int = SPLIT) -> int:
    """Return how many places partials of so many tiles take at most: each CTA but the last cuts one tile."""
    segments = -(-max_kv_len // (split * SEGMENT))
    return rows_per_tile * (min(num_tiles, num_ctas) * segments + (SEGMENT - 1) * num_ctas)


def count_new_tokens(slot_mapping: Int32Array, cu_seqlens_q: Int32Array) -> Int32Array:
    """Return how many of each sequence's rows have a slot.

    Args:
        slot_mapping: int32 [rows], -1 = the row's K and V are in the pool already.
        cu_seqlens_q: int32 [seqs + 1].

    Returns:
        int32 [seqs].

    Raises:
        WorkListError: They are not the last rows of their sequence, or more than MAX_NEW.
    """
    has_slot = slot_mapping >= 0
    before = np.concatenate(([0], np.cumsum(has_slot)))
    num_new = (before[cu_seqlens_q[1:]] - before[cu_seqlens_q[:-1]]).astype(np.int32)
    breaks = np.flatnonzero(has_slot[:-1] & ~has_slot[1:]) + 1
    if len(breaks) and not np.isin(breaks, cu_seqlens_q).all():
        row = int(breaks[~np.isin(breaks, cu_seqlens_q)][0])
        raise WorkListError(f"row {row} has no slot but the row before it, of the same sequence, has one")
    _check_new(num_new)
    return num_new


def make_work_list(
    *,
    cu_seqlens_q: Int32Array,
    kv_lens: Int32Array,
    num_new: Int32Array,
    positions: Int32Array,
    num_kv_heads: int,
    rows_per_tile: int,
    num_ctas: int,
    split: int = SPLIT,
    is_tree: bool = False,
    num_places: int | None = None,
) -> WorkList:
    """Return the items of a step, dealt evenly: long sequences cut, short ones whole; no rows, no work.

    Args:
        cu_seqlens_q: int32 [seqs + 1], first row of each sequence.
        kv_lens: int32 [seqs], tokens with the new ones, at least 1.
        num_new: int32 [seqs], trailing rows whose K and V are new.
        positions: int32 [rows], ascending in each sequence unless ``is_tree``.
        num_kv_heads: KV heads.
        rows_per_tile: Query tokens of a tile.
        num_ctas: The grid.
        split: Tokens of a split.
        is_tree: Rows see what a mask lets them, not what their positions say: each tile needs all of its sequence.
        num_places: For partials: where they would take more, sequences are left whole.

    Raises:
        WorkListError: A sequence has more new tokens than MAX_NEW.
    """
    _check_new(num_new)
    begins, lengths = cu_seqlens_q.astype(np.int64), kv_lens.astype(np.int64)
    tiles_of_seq = -(-np.diff(begins) // rows_per_tile)
    if not tiles_of_seq.any():
        return WorkList(np.zeros((num_ctas, len(FIELDS)), np.int32), num_ctas, 0, 0)
    seq = np.repeat(np.arange(len(lengths)), tiles_of_seq)
    index = np.arange(len(seq)) - np.repeat(np.cumsum(tiles_of_seq) - tiles_of_seq, tiles_of_seq)
    first_row = begins[seq] + index * rows_per_tile
    num_rows = np.minimum(begins[seq + 1] - first_row, rows_per_tile)
    is_last = index == tiles_of_seq[seq] - 1
    end = lengths[seq]
    if not is_tree:
        end = np.where(is_last, end, positions[first_row + num_rows - 1] + 1)
    num_splits: _Ints = np.repeat(-(-end // split), num_kv_heads)
    pieces = _deal(num_splits, num_ctas)
    num_partials, num_items = _count_partials(pieces, len(num_splits))
    row_tile = pieces.tile // num_kv_heads
    places = num_partials * num_rows.take(row_tile)
    if num_places is not None and places.sum() > num_places:
        pieces = _deal_line(num_splits, num_ctas, is_whole=True)
        num_partials, num_items = _count_partials(pieces, len(num_splits))
        row_tile = pieces.tile // num_kv_heads
        places = num_partials * num_rows.take(row_tile)

    # One row per row tile, per tile, per item: gathered in one go each (this runs every step).
    of_rows = np.stack(
        (seq, first_row, num_rows, lengths[seq], num_new[seq], begins[seq + 1] - num_new[seq], is_last), axis=1
    ).astype(np.int32)
    before, first_items = np.cumsum(places) - places, np.cumsum(num_items) - num_items
    of_tiles = np.empty((len(num_splits), 4), np.int32)
    of_tiles[:, 0] = np.arange(len(num_splits))
    of_tiles[:, 1] = num_items
    of_tiles[:, 2] = before.take(first_items)
    of_tiles[:, 3] = np.add.reduceat(num_partials, first_items)

    is_first = np.empty(len(pieces.cta), np.bool_)
    is_first[0] = True
    np.not_equal(pieces.cta[1:], pieces.cta[:-1], out=is_first[1:])
    place = np.where(is_first, pieces.cta, num_ctas - 1 + np.cumsum(~is_first))
    fields = np.zeros((len(place), len(FIELDS)), np.int32)
    row, tile = of_rows.take(row_tile, 0), of_tiles.take(pieces.tile, 0)
    fields[:, 0] = row[:, 0]
    fields[:, 1] = pieces.tile - row_tile * num_kv_heads
    fields[:, 2:4] = row[:, 1:3]
    fields[:, 4] = pieces.first
    fields[:, 5] = pieces.end
    fields[:, 6:10] = row[:, 3:]
    fields[:, 10:12] = tile[:, :2]
    fields[:, 12] = before
    fields[:, 13:15] = tile[:, 2:]
    fields[:-1, 15] = np.where(is_first[1:], 0, place[1:])
    items = np.zeros((num_ctas + len(place) - int(np.count_nonzero(is_first)), len(FIELDS)), np.int32)
    items[place] = fields
    return WorkList(items, num_ctas, len(num_splits), int(places.sum()))


class WorkLists:
    """Makes the work lists of steps; the last one is used again as long as that is right.

    Where each sequence has one row, a list depends on the number of splits of each sequence and on whether its row is
    new. Within a split only the field ``kv_len`` changes. So a single sequence needs a new list every SPLIT tokens, and
    128 sequences of different lengths need one in two of three steps.

    Args:
        num_kv_heads, rows_per_tile, num_ctas, num_places, split: As :func:`make_work_list` takes them.
    """

    def __init__(
        self, *, num_kv_heads: int, rows_per_tile: int, num_ctas: int, num_places: int, split: int = SPLIT
    ) -> None:
        self._make = partial(
            make_work_list,
            num_kv_heads=num_kv_heads,
            rows_per_tile=rows_per_tile,
            num_ctas=num_ctas,
            num_places=num_places,
            split=split,
        )
        self._split = split
        self._key: bytes | None = None
        self._items = np.zeros((0, len(FIELDS)), np.int32)
        self._used = self._seqs = np.zeros(0, np.int64)

    def items(
        self, cu_seqlens_q: Int32Array, kv_lens: Int32Array, slot_mapping: Int32Array, positions: Int32Array
    ) -> Int32Array:
        """Return the items of a step; valid until the next call, not to be changed.

        Args:
            cu_seqlens_q: int32 [seqs + 1], first row of each sequence.
            kv_lens: int32 [seqs], tokens with the new ones, at least 1.
            slot_mapping: int32 [rows], -1 = the row's K and V are in the pool already.
            positions: int32 [rows], ascending in each sequence.

        Raises:
            WorkListError: As :func:`count_new_tokens`.
        """
        is_decode = len(positions) == len(kv_lens)
        key = ((kv_lens + (self._split - 1)) // self._split).tobytes() + (slot_mapping >= 0).tobytes()
        if is_decode and key == self._key:
            self._items[self._used, _KV_LEN] = kv_lens.take(self._seqs)
            return self._items
        self._key = None
        num_new = count_new_tokens(slot_mapping, cu_seqlens_q)
        self._items = self._make(cu_seqlens_q=cu_seqlens_q, kv_lens=kv_lens, num_new=num_new, positions=positions).items
        if is_decode:
            self._key = key
            self._used = np.flatnonzero(self._items[:, _NUM_ROWS])
            self._seqs = self._items[self._used, _SEQ].astype(np.int64)
        return self._items


def _check_new(num_new: Int32Array) -> None:
    if len(num_new) and num_new.max() > MAX_NEW:
        seq = int(num_new.argmax())
        raise WorkListError(
            f"sequence {seq} brings {num_new[seq]} new tokens, the attention kernels take {MAX_NEW}; use several steps"
        )


def _deal(num_splits: _Ints, num_ctas: int) -> _Pieces:
    """Deal in the way that lets the busiest CTA finish first, by estimate."""
    total = int(num_splits.sum())
    if len(num_splits) <= num_ctas:
        size = _smallest_piece(num_splits, num_ctas, total)
        if size + _ITEM_COST <= 1.15 * total / num_ctas + 2 * _ITEM_COST:
            return _deal_equal(num_splits, size)
    return _deal_line(num_splits, num_ctas)


def _smallest_piece(num_splits: _Ints, num_ctas: int, total: int) -> int:
    """Return the smallest size of pieces at which there are no more than CTAs."""
    low, high = max(-(-total // num_ctas), 1), int(num_splits.max())
    while low < high:
        middle = (low + high) // 2
        if (-(-num_splits // middle)).sum() <= num_ctas:
            high = middle
        else:
            low = middle + 1
    return low


def _deal_equal(num_splits: _Ints, size: int) -> _Pieces:
    """Cut each tile into pieces of one size, one per CTA."""
    num_pieces = -(-num_splits // size)
    tile = np.repeat(np.arange(len(num_splits)), num_pieces)
    cta = np.arange(len(tile))
    index = cta - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    step = SEGMENT if size >= 4 * SEGMENT else 1
    last = num_splits[tile]
    first = _round_to(last * index // num_pieces[tile], step)
    end = np.minimum(_round_to(last * (index + 1) // num_pieces[tile], step), last)
    end = np.where(index + 1 == num_pieces[tile], last, end)
    return _Pieces(tile, first, end, cta)


def _round_to(values: _Ints, step: int) -> _Ints:
    return (values + step // 2) // step * step


def _deal_line(num_splits: _Ints, num_ctas: int, *, is_whole: bool = False) -> _Pieces:
    """Lay all tiles in a line and cut it into equal shares; a cut near the end of a tile moves there, or every cut."""
    ends = np.cumsum(num_splits + _ITEM_COST)
    share = ends[-1] / num_ctas
    cuts = share * np.arange(1, num_ctas)
    tile = np.searchsorted(ends, cuts, side="right").clip(max=len(ends) - 1)
    size = num_splits[tile]
    at = cuts - (ends[tile] - size)
    if is_whole:
        return _cut_line(num_splits, tile, np.where(2 * at > size - _ITEM_COST, size, 0))
    at = at.clip(min=0).round().astype(np.int64)
    if share >= 4 * SEGMENT:
        at = _round_to(at, SEGMENT)
    snap = np.where(size <= SEGMENT, (size + 1) // 2, max(1, int(share) // 24))
    return _cut_line(num_splits, tile, np.where(at >= size - snap, size, np.where(at <= snap, 0, at)))


def _cut_line(num_splits: _Ints, tile: _Ints, at: _Ints) -> _Pieces:
    """Cut the line of tiles before split ``at`` of ``tile``, once per CTA but the last."""
    begins = np.concatenate(([0], np.cumsum(num_splits)))
    cuts = begins[tile] + at
    is_begin = np.zeros(begins[-1] + 1, np.bool_)
    is_begin[begins] = True
    is_cut = is_begin.copy()
    is_cut[cuts] = True
    places = np.flatnonzero(is_cut)
    starts = places[:-1]
    piece_tile = np.cumsum(is_begin.take(starts)) - 1
    origin = begins.take(piece_tile)
    return _Pieces(piece_tile, starts - origin, places[1:] - origin, np.searchsorted(cuts, starts, side="right"))


def _count_partials(pieces: _Pieces, num_tiles: int) -> tuple[_Ints, _Ints]:
    """Return how many partials each piece leaves, and how many pieces each tile has."""
    num_items = np.bincount(pieces.tile, minlength=num_tiles)
    aligned = -(-pieces.first // SEGMENT) * SEGMENT
    single = np.minimum(aligned, pieces.end) - pieces.first
    whole = -(-np.maximum(pieces.end - aligned, 0) // SEGMENT)
    return np.where(num_items.take(pieces.tile) > 1, single + whole, 0), num_items
