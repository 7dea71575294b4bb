"""The picture of the block pool: a byte for each block, or for runs of blocks where there are more than fit.

A byte is 0 for an empty block, 1 for one that only the prefix cache holds, n + 1 for one with n owners.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ferrule.v1 import admin_pb2

_MOST: Final = 255
_PIECE: Final = 16384


async def as_array(refcounts: list[int]) -> npt.NDArray[np.int32]:
    """Return the numbers as an array, piece by piece: of a large pool it takes milliseconds, and others have turns."""
    owners = np.empty(len(refcounts), np.int32)
    for start in range(0, len(refcounts), _PIECE):
        owners[start : start + _PIECE] = refcounts[start : start + _PIECE]
        await asyncio.sleep(0)
    return owners


def block_map(owners: npt.NDArray[np.int32], is_cached: bytes, max_cells: int) -> admin_pb2.BlockMap:
    """Return the picture in at most ``max_cells`` cells.

    Args:
        owners: int32 [num_blocks], of each block, the null block at index 0; not changed.
        is_cached: A byte for each block, 1 where only the prefix cache holds it.
        max_cells: At least 1.
    """
    owners = owners[1:]
    marks = np.minimum(owners + (owners > 0), _MOST).astype(np.uint8)
    marks |= np.frombuffer(is_cached, np.uint8)[1:]
    cell_blocks = max(1, -(-len(marks) // max_cells))
    starts = np.arange(0, len(marks), cell_blocks)
    num_held = np.add.reduceat((owners > 0).astype(np.int64), starts)
    sizes = np.diff(starts, append=len(marks))
    return admin_pb2.BlockMap(
        cell_blocks=cell_blocks,
        cells=np.maximum.reduceat(marks, starts).tobytes(),
        fill=(-(-num_held * _MOST // sizes)).astype(np.uint8).tobytes(),
    )


def num_shared(block_ids: Sequence[int], refcounts: Sequence[int]) -> int:
    """Return how many blocks of a table have several owners, in O(log n): refcounts never rise along a table."""
    return bisect_left(block_ids, 1, key=lambda block_id: refcounts[block_id] == 1)
