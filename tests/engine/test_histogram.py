"""Histograms: every observation in one bucket, bounds included, cumulative as Prometheus wants them."""

import itertools
import threading

import pytest

from ferrule_server.engine.metrics.timings import (
    COUNT_BOUNDS,
    NS_PER_S,
    TIME_BOUNDS_S,
    Histogram,
    HistogramReading,
    of_time,
)


def test_a_bound_belongs_to_its_bucket() -> None:
    """A value that equals a bound is at most that bound; one above is in the next."""
    histogram = Histogram((1, 2, 4))
    for value in (0, 1, 2, 3, 4, 5, 1000):
        histogram.observe(value)
    assert histogram.read() == HistogramReading((1.0, 2.0, 4.0), (2, 1, 2, 2), 1015.0)


def test_cumulative_counts_rise_to_the_count() -> None:
    """Each is the number of observations at most the bound; the last is all of them."""
    reading = HistogramReading((1.0, 2.0, 4.0), (2, 1, 0, 2), 1015.0)
    assert reading.cumulative() == [2, 3, 3, 5]
    assert reading.count == 5


def test_times_are_told_in_seconds() -> None:
    """Nanoseconds go in, seconds come out; every bound is hit by its own number of nanoseconds."""
    histogram = of_time()
    for bound_s in TIME_BOUNDS_S:
        histogram.observe(round(bound_s * NS_PER_S))
    reading = histogram.read()
    assert reading.counts == (1,) * len(TIME_BOUNDS_S) + (0,)
    assert reading.sum == pytest.approx(sum(TIME_BOUNDS_S), rel=1e-12)


def test_steps_of_a_millisecond_are_told_apart() -> None:
    """Around 1 ms neighbouring bounds are at most 25 % apart, so that a step that grew by as much shows."""
    near = [bound for bound in TIME_BOUNDS_S if 0.4e-3 <= bound <= 2.5e-3]
    assert all(b / a <= 1.26 for a, b in itertools.pairwise(near)), near


def test_a_clock_that_went_back_counts_as_nothing() -> None:
    """What would be below 0 is 0: sums never fall."""
    histogram = of_time()
    histogram.observe(-5)
    assert (histogram.read().counts[0], histogram.read().sum) == (1, 0.0)


@pytest.mark.parametrize("bounds", [(), (2, 1), (1, 1)])
def test_bounds_that_do_not_ascend_are_refused(bounds: tuple[int, ...]) -> None:
    """There is at least one, and no bucket that nothing could fall into."""
    with pytest.raises(ValueError, match="ascend"):
        Histogram(bounds)


def test_a_reader_never_sees_less_than_before() -> None:
    """While one thread observes, another reads: counts never fall, and end up complete."""
    histogram, stop = Histogram(COUNT_BOUNDS), threading.Event()

    def observe() -> None:
        for value in range(50_000):
            histogram.observe(value & 1023)
        stop.set()

    writer = threading.Thread(target=observe)
    writer.start()
    seen = 0
    while not stop.is_set():
        count = histogram.read().count
        assert count >= seen
        seen = count
    writer.join()
    assert histogram.read().count == 50_000
