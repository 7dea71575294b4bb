"""Sizes of graphs: a step runs in the smallest one that holds its rows, the rest of which is padding.

Up to 128 rows sizes are 8 apart, as many rows as the tensor cores take at a time anyway; below that stand 1, 2 and 4.
Above 128 they are 16 apart. From 57 rows on at most 12 % of the rows are padding; below, a step costs what reading the
weights costs, whatever its rows.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache

_SMALL = (1, 2, 4)
_FINE_END = 128


@lru_cache
def bucket_sizes(max_rows: int) -> tuple[int, ...]:
    """Return all sizes, ascending; the last one is ``max_rows``.

    Args:
        max_rows: Most rows of a step, at least 1.

    Raises:
        ValueError: It is less.
    """
    if max_rows < 1:
        raise ValueError(f"a step of at most {max_rows} rows has no size; give it 1 or more")
    sizes = (*_SMALL, *range(8, _FINE_END, 8), *range(_FINE_END, max_rows + 16, 16))
    return (*(size for size in sizes if size < max_rows), max_rows)


def bucket_for(num_rows: int, max_rows: int) -> int:
    """Return the smallest size that holds ``num_rows``.

    Raises:
        ValueError: They are more than ``max_rows``, or none.
    """
    if not 1 <= num_rows <= max_rows:
        raise ValueError(f"{num_rows} rows fit no bucket of 1 to {max_rows} rows")
    sizes = bucket_sizes(max_rows)
    return sizes[bisect_left(sizes, num_rows)]
