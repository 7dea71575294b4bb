"""Debts: which principals let others go first, because they have had more of the engine's time.

While several principals are active, each step is charged to those with rows in it (:class:`Costs`). Who has taken a
long step, and is ahead of another one, waits until that one has had as much time, or has let it pass::

    engine   | decode | rows of A .......... | decode | decode | decode |      | rows of A .......... | decode
    A is ahead        .   <----------------> | -- less by what others have had, and by idle time --> |

This is start-time fair queueing (Goyal, Vin and Cheng, 1996) of measured seconds, with two exceptions. Time that A
waits while the engine is idle counts as if others had used it: a client needs some between two decodes. And what A has
had beyond the longest step that is allowed is repaid once, by what the others have had together. Otherwise A would wait
for 16 s after a step of 2 s if eight others have come since.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from heapq import nsmallest
from typing import Final

_KEPT_S: Final = 1.0
_SLACK: Final = 0.5
"""How far a principal may be ahead, in shortest steps: principals with as many rows as each other share their steps."""
_LONG: Final = 1.5
"""Part of a step that makes it long, in shortest steps. A few rows never do, so a client with few never waits."""


@dataclass(slots=True)
class _Used:
    """What a principal has had.

    Attributes:
        seconds: Its time.
        began: When the step began that it was charged for last.
        long_s: The longest of its long steps since it was last not ahead; 0.0: there was none.
        owed_s: What of that the others have not had together.
    """

    seconds: float
    began: float = 0.0
    long_s: float = 0.0
    owed_s: float = 0.0


class Debts:
    """The time that active principals have had. All times are seconds on one monotonic clock.

    Invariant: a principal that comes begins with as much as the one that has had least, so only time in which others
    were active counts.

    Args:
        longest_s: The longest step that is allowed.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._used: dict[str, _Used] = {}
        self._idle_since: float | None = None
        self._waiting: frozenset[str] = frozenset()

    @property
    def is_anyone_long(self) -> bool:
        """Return whether somebody has taken a long step and may still be ahead."""
        return any(used.long_s for used in self._used.values())

    def seconds_of(self, principal: str) -> float:
        """Return how many seconds a principal has had; one that is new begins with the least."""
        return self._of(principal).seconds

    def charge(self, costs: Mapping[str, float], began: float, base_s: float) -> None:
        """Charge principals for a step that began then, each with its seconds; the shortest step has ``base_s``."""
        entries = {name: self._of(name) for name in costs}  # all of them before anybody is charged
        step_s = sum(costs.values())
        for name, used in self._used.items():
            used.owed_s -= step_s - costs.get(name, 0.0)
        for name, used in entries.items():
            cost_s = costs[name]
            used.seconds += cost_s
            used.began = began
            if cost_s > _LONG * base_s:
                used.long_s = max(used.long_s, cost_s)
                used.owed_s = max(used.owed_s, cost_s)

    def held(
        self, now: float, waiting: Collection[str], decoded: Mapping[str, float], base_s: float
    ) -> dict[str, float]:
        """Return how long each principal that is ahead has to wait if nobody else comes.

        A principal waits for others only if they have rows waiting or have decoded since the step that it was charged
        for last began. So a principal that is alone never waits. It is ahead of them by no more than its longest step,
        and by no more than the longest that is allowed once they have had as much as that step together.

        Args:
            now: The time.
            waiting: Principals with rows left.
            decoded: When principals have decoded last.
            base_s: The shortest step.
        """
        self._let_pass(now)
        held: dict[str, float] = {}
        for name, least in self._least_of_others(waiting, decoded):
            own = self._used[name]
            most_s = max(_LONG * base_s, min(own.long_s, max(own.owed_s, self._longest_s)))
            own.seconds = min(own.seconds, least + most_s)
            ahead_s = own.seconds - least - _SLACK * base_s
            if ahead_s <= 0.0:
                own.long_s = own.owed_s = 0.0
            elif own.long_s:
                held[name] = ahead_s
        if held and len(held) == len(waiting):
            self._idle_since, self._waiting = now, frozenset(held)
        return held

    def forget(self, now: float, active: Collection[str]) -> list[str]:
        """Forget all others that have had no step for a second, and return them."""
        gone = [name for name, used in self._used.items() if name not in active and used.began < now - _KEPT_S]
        for name in gone:
            del self._used[name]
        return gone

    def _let_pass(self, now: float) -> None:
        """Count the time in which all waited as if others had used it."""
        if self._idle_since is not None:
            for name in self._waiting & self._used.keys():
                self._used[name].seconds -= now - self._idle_since
                self._used[name].owed_s -= now - self._idle_since
            self._idle_since = None

    def _least_of_others(self, waiting: Collection[str], decoded: Mapping[str, float]) -> Iterator[tuple[str, float]]:
        """Yield each waiting principal, and the least that one of those beside it has had; itself if it is alone."""
        least = nsmallest(2, ((self._of(name).seconds, name) for name in waiting))
        absent = sorted((at, self._of(name).seconds, name) for name, at in decoded.items() if name not in waiting)
        for name in sorted(waiting, key=lambda each: self._used[each].began, reverse=True):
            while absent and absent[-1][0] > self._used[name].began:
                least = nsmallest(2, [*least, absent.pop()[1:]])
            yield name, next((seconds for seconds, other in least if other != name), self._used[name].seconds)

    def _of(self, name: str) -> _Used:
        used = self._used.get(name)
        if used is None:
            used = self._used[name] = _Used(min((each.seconds for each in self._used.values()), default=0.0))
        return used
