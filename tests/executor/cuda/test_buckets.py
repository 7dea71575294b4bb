"""Buckets: the sizes of graphs, and which one a step runs in."""

from __future__ import annotations

import pytest

from ferrule_server.executor.cuda.buckets import bucket_for, bucket_sizes


def test_sizes_are_those_that_the_kernels_take_at_a_time() -> None:
    """1, 2, 4, then by 8 up to 128, then by 16."""
    sizes = bucket_sizes(256)
    assert sizes[:6] == (1, 2, 4, 8, 16, 24)
    assert sizes[-10:] == (120, 128, 144, 160, 176, 192, 208, 224, 240, 256)
    assert len(sizes) == 3 + 16 + 8


@pytest.mark.parametrize("max_rows", [1, 2, 3, 5, 8, 63, 64, 100, 128, 130, 257])
def test_the_largest_size_is_the_limit(max_rows: int) -> None:
    """Nothing above it, nothing twice, ascending."""
    sizes = bucket_sizes(max_rows)
    assert sizes[-1] == max_rows
    assert list(sizes) == sorted(set(sizes))


@pytest.mark.parametrize("max_rows", [1, 7, 64, 100, 256])
def test_a_step_runs_in_the_smallest_size_that_holds_it(max_rows: int) -> None:
    """For every number of rows."""
    for num_rows in range(1, max_rows + 1):
        bucket = bucket_for(num_rows, max_rows)
        assert bucket == min(size for size in bucket_sizes(max_rows) if size >= num_rows)


def test_few_rows_are_padding() -> None:
    """At most seven rows up to 128, and 12 % of the bucket from 57 rows on."""
    for num_rows in range(1, 257):
        padding = bucket_for(num_rows, 256) - num_rows
        assert padding <= (7 if num_rows <= 128 else 15)
        assert num_rows < 57 or padding <= 0.12 * bucket_for(num_rows, 256)


@pytest.mark.parametrize(("num_rows", "max_rows"), [(0, 8), (9, 8), (-1, 8)])
def test_rows_that_fit_no_bucket_are_refused(num_rows: int, max_rows: int) -> None:
    """None at all, or more than the largest one holds."""
    with pytest.raises(ValueError, match=f"{num_rows} rows"):
        bucket_for(num_rows, max_rows)


def test_a_limit_of_no_rows_is_refused() -> None:
    """There is no such size."""
    with pytest.raises(ValueError, match="at most 0 rows"):
        bucket_sizes(0)
