"""Suffix sets: test whether a growing text ends with one of several byte strings, at a cost independent of them.

Strings are stored reversed and sorted. A string that ends with another string of the set is left out, because every
match of it is a match of the other one. The rest is prefix-free, so at most one string begins at any position of the
reversed text. It is the last string that is not greater than the text at this position; one binary search finds it.

An Aho-Corasick automaton would save the search, but its states are the bytes of all strings. For the largest set of a
request (64 KiB) it takes 18 MB of dictionaries and 70 ms to build, for every request. This class stores only the
strings.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable


class Suffixes:
    """A set of byte strings that a text may end with. It never changes, so threads may share it.

    Invariant: ``_reversed`` is sorted, and no string in it is a prefix of another.

    Args:
        strings: Not empty; they may repeat and contain each other.
    """

    __slots__ = ("_last_bytes", "_reversed", "longest")

    def __init__(self, strings: Iterable[bytes]) -> None:
        self._reversed: list[bytes] = []
        for string in sorted(string[::-1] for string in strings):
            if not self._reversed or not string.startswith(self._reversed[-1]):
                self._reversed.append(string)
        self._last_bytes = frozenset(string[0] for string in self._reversed)
        self.longest = max(map(len, self._reversed), default=0)

    def is_at(self, text: bytes, start: int = 0) -> bool:
        """Return whether a string of the set begins at ``start``.

        Args:
            text: The newest byte first, as far back as the longest string reaches.
            start: Number of the newest bytes to skip.
        """
        if text[start] not in self._last_bytes:
            return False
        text = text[start : start + self.longest]
        return text.startswith(self._reversed[bisect_right(self._reversed, text) - 1])

    def is_within(self, text: bytes, num_new: int) -> bool:
        """Return whether a string of the set ends with one of the ``num_new`` newest bytes of ``text``."""
        if self._last_bytes.isdisjoint(text[:num_new]):
            return False
        return any(self.is_at(text, start) for start in range(num_new))
