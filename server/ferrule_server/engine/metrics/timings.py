"""Timings: histograms of steps, queues and tokens, observed on the engine thread.

Values that occur once per step are observed at once. Values that occur once per row are noted by their starting time,
and observed in bulk after the tokens of the step have been handed out, since rows that began together waited together::

    step ends --> answers: appends by their submission   --+
    turn      --> draws:   tokens by the token before them +--> settle: one observation for each time
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Final

from ferrule_server.engine.metrics.histogram import COUNT_BOUNDS, Histogram, HistogramReading, of_time

_HISTOGRAMS: Final = ("step", "step_rows", "step_sequences", "queue", "first_token", "inter_token", "decode")


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

    __slots__ = (
        "_answers",
        "_draws",
        "_queues",
        "decode",
        "first_token",
        "inter_token",
        "num_left_out",
        "queue",
        "step",
        "step_end_ns",
        "step_rows",
        "step_sequences",
    )

    def __init__(self) -> None:
        self.step = of_time()
        self.step_rows = Histogram(COUNT_BOUNDS)
        self.step_sequences = Histogram(COUNT_BOUNDS)
        self.queue = of_time()
        self.first_token = of_time()
        self.inter_token = of_time()
        self.decode = of_time()
        self.step_end_ns = 0
        self.num_left_out = 0
        self._queues: dict[int, int] = {}
        self._answers: dict[int, int] = {}
        self._draws: dict[int, int] = {}

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
