"""Pace: how many prefill rows fit into the next step without delaying decodes.

The time of a step is modelled and measured as::

    step_s = decode_s(decode rows) + row_s * prefill rows
             -------------------     -----
             steps without prefills  additional time of the others

A decode waits for the step that runs when it arrives, and takes part in the next one. Together they take at most as
long as the longest step and a decode step::

    waited + decode_s + prefill_s <= decode_s + (decode_s + spare_s)        spare_s = budget - decode_s

So prefills have ``spare_s`` if no decode has waited for most of a decode step, and less after a step that prefills made
long. If decodes always come late, prefills get every second step. A step without decodes directly after one with
decodes is short, because the decodes that are about to come back would wait for all of it.

Cohorts that run whole are not limited by the pace.
"""

from __future__ import annotations

from typing import Final

MIN_PREFILL_ROWS: Final = 16
"""Prefills get at least this many rows in a step; otherwise a prompt might never end."""

_LATE_SHARE: Final = 0.25
"""Part of ``spare_s`` that prefills have in at least one of two steps, even if a decode has waited for long."""
_LEAST_SPARE_S: Final = 0.002
"""Least value of ``spare_s``, unless a step time is given: finer pieces of prompts cost more than they gain."""
_MARGIN: Final = 0.2
"""Part of a decode step that the network and the event loop may take of the promised time."""
_NUM_FIRST: Final = 2
_NUM_MIXED: Final = 32
_MAX_RISE: Final = 8.0
_MIN_PREFILL_SHARE: Final = 0.125


class Pace:
    """Measures steps and limits the prefill rows of the next one.

    Both figures err towards short steps. ``decode_s`` falls to a faster step at once and rises slowly, since it is the
    time of an undisturbed decode step. ``row_s`` rises fast and falls slowly. One slow step (a page fault, the first
    step) counts for at most ``_MAX_RISE`` times the current figure, and the next few steps correct it.

    ``decode_s`` is kept for each power of two of decode rows. A mixed step does not show it, so prefills are left out
    of a step if it is not known yet, and of one in ``_NUM_MIXED`` steps.

    Args:
        max_step_time_s: Longest step that prefill rows may make; None: twice a decode step.
    """

    def __init__(self, max_step_time_s: float | None) -> None:
        self._max_step_time_s = max_step_time_s
        self._decode_s: dict[int, float] = {}
        self._num_alone: dict[int, int] = {}
        self._num_mixed: dict[int, int] = {}
        self._row_s: float | None = None
        self._reach = MIN_PREFILL_ROWS
        self._last_size = 0
        self._had_decodes = self._had_prefills = False

    def prefill_rows(self, decode_rows: int, waited_s: float) -> int:
        """Return the most prefill rows that the next step may have.

        Args:
            decode_rows: Decode rows of the step. 0: the answer is at least 1.
            waited_s: Longest time that one of these decodes has waited.
        """
        size = decode_rows.bit_length() or self._last_size
        if decode_rows and self._is_unsure(size):
            return 0
        decode_s = self._decode_s.get(size, 0.0)
        spare_s = self._spare_s(decode_s)
        if not decode_rows:
            return self._rows_in(spare_s / 2 if self._had_decodes else spare_s)
        prefill_s = spare_s - max(0.0, waited_s - (1.0 - _MARGIN) * decode_s)
        if prefill_s < spare_s * _LATE_SHARE:
            if self._had_prefills:
                return 0
            prefill_s = spare_s * _LATE_SHARE
        return self._rows_in(prefill_s)

    def _spare_s(self, decode_s: float) -> float:
        """Return the time of a step that prefills may have."""
        if self._max_step_time_s is None:
            return max(decode_s, _LEAST_SPARE_S)
        return max(0.0, self._max_step_time_s - decode_s)

    def learn(self, decode_rows: int, prefill_rows: int, step_s: float) -> None:
        """Learn from a step that has just been run."""
        size = decode_rows.bit_length()
        self._had_decodes, self._had_prefills = decode_rows > 0, prefill_rows > 0
        if decode_rows:
            self._last_size = size
        if prefill_rows:
            self._num_mixed[size] = self._num_mixed.get(size, 0) + 1
            self._learn_row(self._base_s(size), prefill_rows, step_s)
        else:
            self._learn_decode(size, step_s)

    def _is_unsure(self, size: int) -> bool:
        """Return whether the time of this many decodes alone has to be measured again."""
        return self._num_alone.get(size, 0) < _NUM_FIRST or self._num_mixed.get(size, 0) >= _NUM_MIXED

    def _rows_in(self, prefill_s: float) -> int:
        """Return how many rows take ``prefill_s``; at most twice as many as were ever measured together."""
        if self._row_s is None:
            return MIN_PREFILL_ROWS
        most = 2 * self._reach
        if self._row_s * most <= prefill_s:
            return most
        return max(MIN_PREFILL_ROWS, int(prefill_s / self._row_s))

    def _base_s(self, size: int) -> float:
        """Return what a step would have taken without its prefill rows."""
        return self._decode_s.get(size) or min(self._decode_s.values(), default=0.0)

    def _learn_decode(self, size: int, step_s: float) -> None:
        known = self._decode_s.get(size)
        if not known or step_s <= known:
            self._decode_s[size] = step_s
        else:
            self._decode_s[size] = known + (min(step_s, _MAX_RISE * known) - known) / 8
        self._num_alone[size] = self._num_alone.get(size, 0) + 1
        self._num_mixed[size] = 0

    def _learn_row(self, base_s: float, num_rows: int, step_s: float) -> None:
        sample = max(step_s - base_s, step_s * _MIN_PREFILL_SHARE) / num_rows
        weight = min(1.0, num_rows / MIN_PREFILL_ROWS)  # the time of a few rows is mostly noise
        known = self._row_s
        if not known:
            self._row_s = sample
        elif sample > known:
            self._row_s = known + weight * (min(sample, _MAX_RISE * known) - known) / 2
        else:
            self._row_s = known + weight * (sample - known) / 4
        self._reach = max(self._reach, num_rows)
