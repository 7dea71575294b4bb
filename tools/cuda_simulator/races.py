"""Finds races and reads of unwritten memory in the accesses of a launch, whatever order the threads happened to run in.

An access is one integer, ``address << SITE_BITS | site``; addresses of shared memory have ``SHARED_BIT``. A race is a
pair of accesses to the same bytes by two threads, one a store and not both strong, that the clocks leave unordered.

All accesses are sorted by place, then by the beginning of their segments, which agrees with every order the clocks
know. If in that row each access is ordered after the store before it, and each load before the next store, then by
transitivity all pairs are: two comparisons per access suffice. Only atomics, which need no order among themselves,
are compared with every other access to their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.cuda_simulator.clocks import Clocks, ThreadClock
from tools.cuda_simulator.errors import Race, Uninitialised
from tools.cuda_simulator.memory import Allocation, Memory
from tools.cuda_simulator.translate import Program
from tools.cuda_simulator.twins import SITE_BITS, size_of

__all__ = ["CTA_BITS", "SHARED_BIT", "check"]

SHARED_BIT = 1 << 50
CTA_BITS = 20
_LINE_BITS = 4
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(slots=True)
class _Accesses:
    """Columns, one entry per access, or per access and granule."""

    address: Ints
    size: Ints
    site: Ints
    thread: Ints
    now: Ints
    base: Ints
    order: Ints
    is_write: Flags
    is_strong: Flags

    def take(self, rows: NDArray[Any]) -> _Accesses:
        return _Accesses(*(getattr(self, name)[rows] for name in self.__slots__))


def check(program: Program, clocks: Clocks, threads: Sequence[ThreadClock], memory: Memory, num_threads: int) -> None:
    """Check all accesses of a launch.

    Args:
        program: What ran.
        clocks: Of the launch.
        threads: All of its threads.
        memory: Its tracked allocations learn what has been written.
        num_threads: Per CTA, for messages.

    Raises:
        Race: Two accesses are not ordered.
        Uninitialised: A load before any store, where nothing was written before the launch either.
    """
    accesses = _collect(program, threads)
    if not accesses.address.size:
        return
    report = _Report(program, memory, num_threads)
    tracked = [allocation for allocation in memory.allocations() if allocation.is_tracked]
    granule, rows = _split(accesses)
    order = np.lexsort((accesses.order[rows], granule))
    granule, rows = granule[order], rows[order]
    is_first = np.r_[True, granule[1:] != granule[:-1]]
    _check_neighbours(accesses, rows, granule, clocks, report)
    _check_atomics(accesses, rows, granule, clocks, report)
    _check_written(accesses, rows[is_first], tracked, report)
    for allocation in tracked:
        _mark_written(accesses, allocation)


def _collect(program: Program, threads: Sequence[ThreadClock]) -> _Accesses:
    counts = [len(thread.codes) for thread in threads]
    codes = np.empty(sum(counts), np.int64)
    segments, lengths, owners = [], [], []
    first = 0
    for thread, count in zip(threads, counts, strict=True):
        codes[first : first + count] = thread.codes
        first += count
        starts = [segment[0] for segment in thread.segments]
        lengths += [end - start for start, end in zip(starts, [*starts[1:], count], strict=True)]
        segments += thread.segments
        owners += [thread.index] * len(starts)
    _, now, base, order = np.array(segments, np.int64).T
    segment = np.repeat(np.arange(len(lengths)), lengths)
    sizes = np.array([size_of(site.name) for site in program.sites], np.int64)
    site = codes & ((1 << SITE_BITS) - 1)
    address = codes >> SITE_BITS
    is_shared = address >= SHARED_BIT
    names = [site.name for site in program.sites]
    copies = np.array([name.startswith("copy_async_") and "16" in name for name in names])
    writes = np.array(["store" in name or "_add" in name or name.startswith("atomic") for name in names])
    strong = np.array(["relaxed" in name or "_add" in name or name.startswith("atomic") for name in names])
    return _Accesses(
        address, sizes[site], site, np.array(owners)[segment], now[segment], base[segment], order[segment],
        writes[site] | copies[site] & is_shared, strong[site],
    )  # fmt: skip


def _split(accesses: _Accesses) -> tuple[Ints, Ints]:
    """Return a number for each granule of each access, and the access: a granule is the least piece of its line."""
    lines, index = np.unique(accesses.address >> _LINE_BITS, return_inverse=True)
    least = np.full(lines.size, 1 << _LINE_BITS, np.int64)
    np.minimum.at(least, index, accesses.size)
    unit = least[index]
    counts = accesses.size // unit
    rows = np.repeat(np.arange(counts.size), counts)
    nth = np.arange(rows.size) - np.repeat(np.cumsum(counts) - counts, counts)
    place = (accesses.address & (1 << _LINE_BITS) - 1) // unit
    return index[rows] * 8 + place[rows] + nth, rows


def _is_ordered(accesses: _Accesses, before: Ints, after: Ints, vectors: NDArray[np.int32]) -> Flags:
    """Return for each pair whether the first happens before the second."""
    is_known: Flags = vectors[accesses.base[after], accesses.thread[before]] >= accesses.now[before]
    is_same: Flags = accesses.thread[before] == accesses.thread[after]
    return is_known | is_same


def _check_neighbours(accesses: _Accesses, rows: Ints, granule: Ints, clocks: Clocks, report: _Report) -> None:
    keep = ~(accesses.is_write[rows] & accesses.is_strong[rows])
    rows, granule = rows[keep], granule[keep]
    if not rows.size:
        return
    vectors = np.stack(clocks.vectors)
    is_write, places = accesses.is_write[rows], np.arange(rows.size)
    last = np.r_[-1, np.maximum.accumulate(np.where(is_write, places, -1))[:-1]]
    has = (last >= 0) & (granule[last] == granule)
    _report_unordered(accesses, rows[last[has]], rows[has], vectors, report)
    after = np.minimum.accumulate(np.where(is_write, places, rows.size)[::-1])[::-1]
    has = ~is_write & (after < rows.size)
    has[has] = granule[after[has]] == granule[has]
    _report_unordered(accesses, rows[has], rows[after[has]], vectors, report)


def _report_unordered(
    accesses: _Accesses, before: Ints, after: Ints, vectors: NDArray[np.int32], report: _Report
) -> None:
    bad = np.flatnonzero(~_is_ordered(accesses, before, after, vectors))
    if bad.size:
        worst = bad[np.argmin(accesses.order[after[bad]])]
        report.race(accesses, int(before[worst]), int(after[worst]))


def _check_atomics(accesses: _Accesses, rows: Ints, granule: Ints, clocks: Clocks, report: _Report) -> None:
    is_atomic = accesses.is_write[rows] & accesses.is_strong[rows]
    is_weak = ~accesses.is_strong[rows]
    places = np.intersect1d(granule[is_atomic], granule[is_weak])
    if not places.size:
        return
    vectors = np.stack(clocks.vectors)
    mixed = np.isin(granule, places) & (is_atomic | is_weak)
    rows, granule, is_atomic = rows[mixed], granule[mixed], is_atomic[mixed]
    # one access stands for all that a thread does to the place in one segment
    keys = np.stack([granule, accesses.thread[rows], accesses.now[rows], is_atomic])
    _, chosen = np.unique(keys, axis=1, return_index=True)
    rows, granule, is_atomic = rows[chosen], granule[chosen], is_atomic[chosen]
    starts = np.flatnonzero(np.r_[True, granule[1:] != granule[:-1]])
    for start, end in zip(starts, [*starts[1:], granule.size], strict=True):
        here, flags = rows[start:end], is_atomic[start:end]
        atomics, weak = here[flags], here[~flags]
        first, second = np.repeat(atomics, weak.size), np.tile(weak, atomics.size)
        ordered = _is_ordered(accesses, first, second, vectors) | _is_ordered(accesses, second, first, vectors)
        if not ordered.all():
            bad = int(np.argmin(ordered))
            report.race(accesses, int(first[bad]), int(second[bad]))


def _check_written(accesses: _Accesses, first: Ints, tracked: list[Allocation], report: _Report) -> None:
    """Check the first access to each granule: a load needs bytes that were there before the launch."""
    reads = first[~accesses.is_write[first] | accesses.is_strong[first]]
    address, size = accesses.address[reads], accesses.size[reads]
    bad = address >= SHARED_BIT
    for allocation in tracked:
        inside = np.flatnonzero((address >= allocation.base) & (address < allocation.base + allocation.num_bytes))
        start = (address[inside] - allocation.base) >> 1
        for half in range(8):
            covered = inside[2 * half < size[inside]]
            bad[covered] |= ~allocation.written[start[2 * half < size[inside]] + half]
    if bad.any():
        report.uninitialised(accesses, int(reads[np.argmax(bad)]))


def _mark_written(accesses: _Accesses, allocation: Allocation) -> None:
    end = allocation.base + allocation.num_bytes
    inside = accesses.is_write & (accesses.address >= allocation.base) & (accesses.address < end)
    start, size = (accesses.address[inside] - allocation.base) >> 1, accesses.size[inside]
    for half in range(8):
        allocation.written[start[2 * half < size] + half] = True


@dataclass(frozen=True, slots=True)
class _Report:
    """Says which lines of the kernel an error is about."""

    program: Program
    memory: Memory
    num_threads: int

    def race(self, accesses: _Accesses, one: int, other: int) -> None:
        """Raise the error of two accesses."""
        both = " and ".join(self._describe(accesses, row) for row in (one, other))
        raise Race(f"{self.program.name}: nothing orders {both}")

    def uninitialised(self, accesses: _Accesses, row: int) -> None:
        """Raise the error of a load."""
        raise Uninitialised(f"{self.program.name}: nothing was written before {self._describe(accesses, row)}")

    def _describe(self, accesses: _Accesses, row: int) -> str:
        cta, thread = divmod(int(accesses.thread[row]), self.num_threads)
        address = int(accesses.address[row])
        place = f"shared+{address & (1 << CTA_BITS) - 1}" if address >= SHARED_BIT else self.memory.describe(address)
        site = self.program.sites[int(accesses.site[row])]
        return f"{site} ({accesses.size[row]} bytes at {place} by thread {thread} of CTA {cta})"
