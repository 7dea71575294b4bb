"""Histograms light enough for the step loop: one thread observes, any thread reads, without a lock."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass

TIME_BOUNDS_S = (
    *(50e-6, 100e-6, 200e-6, 300e-6, 400e-6, 500e-6, 600e-6, 700e-6, 850e-6),
    *(1e-3, 1.2e-3, 1.4e-3, 1.7e-3, 2e-3, 2.5e-3, 3e-3, 4e-3, 5e-3, 7e-3),
    *(10e-3, 15e-3, 20e-3, 30e-3, 50e-3, 75e-3, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0),
)
"""Seconds, finest around 1 ms, where steps are: there a change of a fifth moves rows from one bucket to another."""

COUNT_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Rows or sequences of a step."""

NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class HistogramReading:
    """A histogram at one moment.

    Attributes:
        bounds: Upper bounds of the buckets, ascending, each included in its bucket.
        counts: Observations in each bucket, without those of lower ones; the last count, one more than bounds, is of
            those above all bounds.
        sum: Sum of all observations, in the unit of the bounds.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    def cumulative(self) -> list[int]:
        """Return for each bound how many observations are at most that, and last the total."""
        total, totals = 0, []
        for count in self.counts:
            total += count
            totals.append(total)
        return totals


class Histogram:
    """Counts integers by buckets. Observations may be in a finer unit, such as nanoseconds, than readings.

    Invariant: each observation is in exactly one bucket: the first whose bound is not below it, or the last.

    Args:
        bounds: Upper bounds in the unit of readings, ascending and above 0.
        per_unit: How many units of an observation make one unit of a reading.

    Raises:
        ValueError: The bounds do not ascend.
    """

    __slots__ = ("_bounds", "_counts", "_per_unit", "_sum", "bounds")

    def __init__(self, bounds: Iterable[float], per_unit: int = 1) -> None:
        self.bounds = tuple(float(bound) for bound in bounds)
        self._per_unit = per_unit
        self._bounds = [round(bound * per_unit) for bound in self.bounds]
        if not self._bounds or sorted(set(self._bounds)) != self._bounds:
            raise ValueError(f"bounds must ascend, got {self.bounds}")
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0

    def observe(self, value: int, times: int = 1) -> None:
        """Count ``value``, ``times`` times; negative ones (clocks of two threads) count as 0. One thread at a time."""
        if value < 0:  # noqa: PLR1730  (max would take a fifth of this method's time)
            value = 0
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def copy(self) -> Histogram:
        """Return a histogram with the same observations; from any thread, its sum at most one observation off."""
        copied = copy(self)
        copied._counts = self._counts.copy()  # noqa: SLF001  (of its own class)
        return copied

    def read(self) -> HistogramReading:
        """Return its current state; from any thread, the sum at most one observation off."""
        return HistogramReading(self.bounds, tuple(self._counts), self._sum / self._per_unit)


def of_time(bounds_s: Iterable[float] = TIME_BOUNDS_S) -> Histogram:
    """Return a histogram that observes nanoseconds and reads in seconds."""
    return Histogram(bounds_s, NS_PER_S)
