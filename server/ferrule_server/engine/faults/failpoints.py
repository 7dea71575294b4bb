"""Failpoints: places where a test makes the engine fail on purpose. In production each is one call that does nothing.

=================  =====================================================================================
place              state of the engine
=================  =====================================================================================
before_schedule    appends are in flight, the rows of the next step are not chosen: nothing of it has happened
after_schedule     the rows are chosen and cancelling no longer stops them; nothing of the step has run
during_copy        some blocks of the step's copy-on-write are copied, others not (with one block: before it)
after_commit       appended, created, forked or truncated, and recorded; not answered
during_free        a sequence is about to be released, or some are about to expire; earlier ones of the list are gone
=================  =====================================================================================

As text, for ``--failpoints``: ``after_commit=exit@3;during_free=sleep(50)``. The actions are ``error`` (raises
:class:`FailpointHit`), ``sleep(milliseconds)`` and ``exit`` (the process ends at once with 137, as if killed); ``@n``
acts at the n-th hit only, otherwise every hit counts.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from typing import Final, Literal, TypeVar, get_args

Place = Literal["before_schedule", "after_schedule", "during_copy", "after_commit", "during_free"]
PLACES: Final[tuple[Place, ...]] = get_args(Place)

EXIT_CODE: Final = 137
"""Exit code of the action ``exit``: the one that a shell shows for a killed process."""

_TERM: Final = re.compile(r"(?P<place>\w+)=(?P<action>error|exit|sleep\((?P<ms>\d{1,6})\))(@(?P<nth>[1-9]\d{0,8}))?")


_T = TypeVar("_T")


class FailpointHit(Exception):
    """Raised on purpose by a failpoint."""


class NoFailpoints:
    """Nothing fails on purpose."""

    hit: Final[Callable[[Place], object]] = frozenset[Place]().__contains__
    """Do nothing. A builtin costs half of what a function does, and this is called for every token."""

    def halves(self, items: list[_T], _: Place, /) -> Iterator[list[_T]]:
        """Return all items at once."""
        return iter((items,))


class Failpoints:
    """The actions at each place. Armed before the engine starts, hit on its thread.

    Attributes:
        num_hits: How often the engine has reached each place; read only.
    """

    def __init__(self) -> None:
        self._armed: dict[Place, list[tuple[Callable[[], object], int | None]]] = {}
        self.num_hits: dict[Place, int] = dict.fromkeys(PLACES, 0)

    @classmethod
    def parse(cls, text: str) -> Failpoints:
        """Return the failpoints that ``text`` arms.

        Raises:
            ValueError: The text does not have the form that the module describes.
        """
        failpoints = cls()
        for term in filter(None, (part.strip() for part in text.split(";"))):
            match = _TERM.fullmatch(term)
            place = next((each for each in PLACES if match is not None and each == match["place"]), None)
            if match is None or place is None:
                raise ValueError(
                    f"{term!r} is not a failpoint; write PLACE=ACTION or PLACE=ACTION@N, where PLACE is one of "
                    f"{', '.join(PLACES)} and ACTION is one of error, sleep(MS), exit"
                )
            failpoints.arm(place, _action(match), None if match["nth"] is None else int(match["nth"]))
        return failpoints

    def arm(self, place: Place, act: Callable[[], object], nth: int | None = None) -> None:
        """Call ``act`` on the engine thread at every hit of ``place``, or at the ``nth`` only (1 is the first)."""
        self._armed.setdefault(place, []).append((act, nth))

    def hit(self, place: Place) -> None:
        """Run the actions of ``place``, which the engine has reached; raises what they raise."""
        self.num_hits[place] += 1
        for act, nth in self._armed.get(place, ()):
            if nth is None or nth == self.num_hits[place]:
                act()

    def halves(self, items: list[_T], place: Place) -> Iterator[list[_T]]:
        """Return the first half of the items, hit ``place``, and return the others."""
        num_first = len(items) // 2
        yield items[:num_first]
        self.hit(place)
        yield items[num_first:]


Failing = Failpoints | NoFailpoints
"""Where the engine may fail on purpose."""


def fail() -> None:
    """Raise the exception of the action ``error``."""
    raise FailpointHit("a failpoint was hit")


def _action(match: re.Match[str]) -> Callable[[], object]:
    if match["action"] == "error":
        return fail
    if match["action"] == "exit":
        return lambda: os._exit(EXIT_CODE)
    seconds = int(match["ms"]) / 1000
    return lambda: time.sleep(seconds)
