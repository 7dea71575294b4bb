"""Timings: histograms of steps, queues and tokens, observed on the engine thread.

A histogram is light enough for the step loop: one thread observes, any thread reads, without a lock.

Values that occur once per step are observed at once. Values that occur once per row are noted by their starting time,
and observed in bulk after the tokens of the step have been handed out, since rows that began together waited together::

    step ends --> answers: appends by their submission   --+
    turn      --> draws:   tokens by the token before them +--> settle: one observation for each time
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

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

_HISTOGRAMS: Final = ("step", "step_rows", "step_sequences", "queue", "first_token", "inter_token", "decode")


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
        return list(accumulate(self.counts))


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


@dataclass(eq=False, slots=True)
class EngineTimings:
    """Durations in the engine. Written by the engine thread alone; read from any thread, at most a step behind.

    All of them leave out jobs that needed no step: answers from a record, jobs that joined another, refusals.

    Attributes:
        step: Nanoseconds of each step on the executor, where overlaps count once. step_rows: its rows. step_sequences:
            its sequences.
        queue: From submission to the start of the first step: of each append that a client requested, each Generate and
            each Forward; not of the appends that the engine enters for these.
        first_token: From submission to the end of the step that gave the first token of a Generate, or the output of a
            prompt: a new sequence, or an append of more than one token, with rows that are returned.
        inter_token: Between the ends of the steps that gave two consecutive tokens of one branch of a Generate. A token
            after a wait for the reader is left out.
        decode: From submission to the end of the last step: of each append of one token that a client requested, and of
            each verify. The time that the client and the wire take in between is not included.
        step_end_ns: When the newest step ended, on the monotonic clock.
        num_left_out: Appends in flight that had no row in the newest step.
    """

    step: Histogram = field(default_factory=of_time)
    step_rows: Histogram = field(default_factory=lambda: Histogram(COUNT_BOUNDS))
    step_sequences: Histogram = field(default_factory=lambda: Histogram(COUNT_BOUNDS))
    queue: Histogram = field(default_factory=of_time)
    first_token: Histogram = field(default_factory=of_time)
    inter_token: Histogram = field(default_factory=of_time)
    decode: Histogram = field(default_factory=of_time)
    step_end_ns: int = 0
    num_left_out: int = 0
    _queues: dict[int, int] = field(default_factory=dict)
    _answers: dict[int, int] = field(default_factory=dict)
    _draws: dict[int, int] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[str, HistogramReading]]:
        """Return the current reading of each histogram, by its attribute's name; from any thread."""
        return ((name, getattr(self, name).read()) for name in _HISTOGRAMS)

    def copy(self) -> EngineTimings:
        """Return a copy of the observations so far, without those that are only noted; from any thread."""
        copied = copy(self)
        for name in _HISTOGRAMS:
            setattr(copied, name, getattr(self, name).copy())
        copied._queues, copied._answers, copied._draws = {}, {}, {}  # noqa: SLF001  (of its own class)
        return copied

    def record_step(self, end_ns: int, elapsed_ns: int, num_rows: int, num_seqs: int) -> None:
        """Observe a step that was run and whose rows are known."""
        self.step_end_ns = end_ns
        self.step.observe(elapsed_ns)
        self.step_rows.observe(num_rows)
        self.step_sequences.observe(num_seqs)

    def record_queue(self, queue_ns: int) -> None:
        """Note how long a request of a client waited for its first step; the newest step is its last."""
        queues = self._queues
        queues[queue_ns] = queues.get(queue_ns, 0) + 1

    def record_first_token(self, submitted_ns: int) -> None:
        """Observe that the newest step gave the first output after a prompt."""
        self.first_token.observe(self.step_end_ns - submitted_ns)

    def record_decode(self, submitted_ns: int) -> None:
        """Note that the newest step was the last of a client's append of one token, or of its verify."""
        answers = self._answers
        answers[submitted_ns] = answers.get(submitted_ns, 0) + 1

    def record_token(self, since_ns: int) -> int:
        """Note that the newest step gave a token of a Generate, after one at ``since_ns``; 0: nothing is measured.

        Returns:
            When this token was given, for the next call.
        """
        if since_ns:
            draws = self._draws
            draws[since_ns] = draws.get(since_ns, 0) + 1
        return self.step_end_ns

    def settle(self) -> None:
        """Observe what was noted since the newest step, before the next one."""
        if self._queues:
            for queue_ns, times in self._queues.items():
                self.queue.observe(queue_ns, times)
            self._queues.clear()
        end_ns = self.step_end_ns
        for noted, histogram in ((self._answers, self.decode), (self._draws, self.inter_token)):
            for since_ns, times in noted.items():
                histogram.observe(end_ns - since_ns, times)
            noted.clear()
