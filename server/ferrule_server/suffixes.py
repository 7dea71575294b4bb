"""Suffix sets: whether a growing text ends with one of some byte strings, at a cost that does not depend on them.

Strings are kept reversed and sorted, and a string that ends with another one of the set is left out: wherever it ends,
the other one ends too. The rest is prefix-free, so at most one of them can begin at any place of the reversed text, and
that one is the last string that is not greater than what is there: one binary search finds it.

An Aho-Corasick automaton would need a step less, but its states are the bytes of all strings: the largest set a request
may bring (64 KiB) takes 18 MB of dictionaries and 70 ms to build, for every request. This takes the strings themselves.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable


class Suffixes:
    """Some byte strings, of which a text may end with one. Never changed, so threads may share it.

    Invariant: ``_reversed`` is sorted, and none of it is a prefix of another.

    Args:
        strings: None of them empty; they may repeat, and contain each other.
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
            text: Newest byte first, as far back as the longest string reaches.
            start: So many of the newest bytes are left out.
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
