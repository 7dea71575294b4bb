"""The token ids of one sequence, kept by the client at 4 bytes each."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence

_TYPE = "I"  # 4 bytes wherever Python runs


class TokenLog:
    """What is known of the text of one sequence, from some position on up to its end.

    Branches share what they have in common::

        parent   [ base ................ ] [ own .. ]
        branch   [ base ............ |          one array, read by all, written by none; each log reads its beginning
                   read by the branch| [ own . ]

    Invariant: the token at position p, for ``start`` <= p < ``end``, is known. A log that knows all begins at 0.
    """

    __slots__ = ("_base", "_num_base", "_own", "start")

    def __init__(self, ids: Iterable[int] = (), *, start: int = 0) -> None:
        self.start = start
        self._base = array(_TYPE)
        self._num_base = 0
        self._own = array(_TYPE, ids)

    @property
    def end(self) -> int:
        """Length of the sequence, in tokens."""
        return self.start + self._num_base + len(self._own)

    @property
    def is_whole(self) -> bool:
        """True: every token is known."""
        return self.start == 0

    def extend(self, ids: Iterable[int]) -> None:
        """Put tokens behind the last one."""
        self._own.extend(ids)

    def cut(self, length: int) -> None:
        """Forget everything from position ``length`` on."""
        if length < self.start:
            self.forget(length)
            return
        num_own = length - self.start - self._num_base
        del self._own[max(0, num_own) :]
        self._num_base += min(0, num_own)

    def forget(self, length: int) -> None:
        """Know nothing of a sequence of that length."""
        self.start, self._num_base = length, 0
        self._base, self._own = array(_TYPE), array(_TYPE)

    def branch(self, length: int | None = None) -> TokenLog:
        """Return the log of a branch of the first ``length`` tokens (None: of all), without a copy of its own."""
        if self._own:
            self._base = self._base[: self._num_base] + self._own
            self._num_base, self._own = len(self._base), array(_TYPE)
        child = TokenLog(start=self.start)
        child._base, child._num_base = self._base, self._num_base
        if length is not None:
            child.cut(length)
        return child

    def tail(self, count: int) -> tuple[int, ...]:
        """Return the last tokens, as far as they are known, at most ``count``."""
        own = self._own[-count:]
        return (*self._base[max(0, self._num_base - count + len(own)) : self._num_base], *own)

    def to_list(self) -> list[int]:
        """Return every known token."""
        return [*self._base[: self._num_base], *self._own]


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two lists begin with in common."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
