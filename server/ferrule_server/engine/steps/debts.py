"""Debts: which principals let others go first, because their cohorts made steps long.

A cohort runs whole, even if that makes its step longer than the pace allows. The excess is charged to the principal of
the cohort. Until it is paid off, the principal's prompts and its cohorts with prompts wait::

    engine   | decode | cohort of A .......... | decode | decode | decode | cohort of A .......... | decode
    A owes            .        |<-- excess --->| ---- paid off by time -->|

A debt is paid off by time, whether or not others use all of it: a client needs some between two decodes. Time by which
another cohort makes a step long does not count, so each of n principals with cohorts leaves others their n-th part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class Debts:
    """The time that principals owe. All times are seconds on one monotonic clock.

    Attributes:
        owed: By principal: when the step that was charged last began, and when the debt is paid off. The latter is on a
            clock that stands still for the sum of all that was ever charged. Debts that are paid off may still be here.
    """

    def __init__(self) -> None:
        self.owed: dict[str, tuple[float, float]] = {}
        self._stretched_s = 0.0

    def charge(self, num_rows: Mapping[str, int], began: float, now: float, excess_s: float) -> None:
        """Charge a step's excess to principals, in proportion to their rows.

        Debts do not add up: a principal that was alone for long owes no more than its longest step.
        """
        self._stretched_s += excess_s
        share_s = excess_s / sum(num_rows.values())
        for name, count in num_rows.items():
            _, until = self.owed.get(name, (0.0, 0.0))
            self.owed[name] = began, max(until, now - self._stretched_s + share_s * count)

    def held(self, now: float, waiting: Iterable[str], decoded: Iterable[tuple[float, str]]) -> dict[str, float]:
        """Return how long each principal that owes time has to wait, and forget the debts that are paid off.

        A principal waits for others that owe nothing, if they have rows waiting or have decoded since the step that it
        is charged for began. So a principal that is alone never waits.

        Args:
            now: The time.
            waiting: Principals with rows left.
            decoded: When a sequence was decoded and its principal, the latest first.
        """
        calm = now - self._stretched_s
        self.owed = {name: debt for name, debt in self.owed.items() if debt[1] > calm}
        seen = now
        if all(name in self.owed for name in waiting):
            seen = next((at for at, name in decoded if name not in self.owed), 0.0)
        return {name: until - calm for name, (began, until) in self.owed.items() if seen > began}
