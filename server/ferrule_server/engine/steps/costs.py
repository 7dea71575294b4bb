"""Costs: what the rows of each principal add to a step, choosing tokens included.

The time of a step is modelled and measured as::

    step_s = base_s + sum of price_s * rows          over the principals and the kinds of their rows
             ------         -------
             shortest step  by what a row asks for: a plain draw may cost a hundred times a greedy one, and one from a
                            truncated distribution a hundred times that

While several principals are active, each has an equal part of the time that rows may add to a step. The parts that
some do not need go to the others. Rows beyond a part wait, but for the first append of a principal that needs more,
while the parts of such principals together are not used up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from ferrule_server.engine.appends.running import RunningAppend
from ferrule_server.executor.base import OutputSpec

LONGEST_S: Final = 0.025
"""Longest step while several principals are active, unless a longer one is allowed or its first rows take more."""
_LEAST_SHARE: Final = 0.5
"""Part of the longest step that rows may add even if the shortest one takes nearly as long, as with a large model."""
_FIRST_ROWS: Final = 2
_FIRST_PROMPT_ROWS: Final = 16
"""Rows of a principal and kind that are tried first, of those that return nothing more; later at most twice as many."""
_FIRST_PRICE: Final = 1 / 16
"""Price of a row that is not known yet, as a part of the shortest step."""
_LEAST_PRICE: Final = 1 / 1024
_MAX_RISE: Final = 8.0
"""Most by which one step multiplies a price: one slow step (a page fault, another process) says little."""
_FALL: Final = 0.25
"""Part of an error that is corrected downwards: prices err towards short steps."""
_FORGETTING: Final = 1 / 4096
"""Part of the time of a step that neither the shortest one nor prices explain by which the shortest one rises."""

Kind = tuple[bool, ...]
"""What a row asks for; empty: a row of a prompt."""
_NOTHING: Final = OutputSpec()
_Key = tuple[str, Kind]


@dataclass(slots=True)
class Chunk:
    """Rows ``run.cursor .. run.cursor + num_rows`` of one append, scheduled for the next step."""

    run: RunningAppend
    num_rows: int


@dataclass(slots=True)
class _Price:
    """Seconds that a row adds, and the most rows of this principal and kind that a step has had."""

    row_s: float
    reach: int


class Costs:
    """Learns prices from steps, and cuts steps to the time that they may take.

    Invariant: every price is above 0, and those of principals that :meth:`forget` has named are unknown.

    Args:
        max_step_time_s: Longest step that prefills may make; None: not given.

    Attributes:
        longest_s: The longest step while several principals are active.
        base_s: The shortest step of late, in seconds; written by its owner whenever one is shorter.
    """

    def __init__(self, max_step_time_s: float | None) -> None:
        self.longest_s = max(LONGEST_S, max_step_time_s or 0.0)
        self.base_s = 0.0
        self._prices: dict[_Key, _Price] = {}

    def fit(self, chunks: list[Chunk], exempt: str | None) -> list[Chunk]:
        """Leave out the rows beyond the part of each principal; cuts are between the rows of prefills.

        Args:
            chunks: Changed where rows are left out; those of the principal that has had least come first.
            exempt: The principal that is not limited, because no other one decodes.
        """
        principals = ((chunk, chunk.run.job.principal) for chunk in chunks)
        priced = [(chunk, name, self._price(_key(chunk))) for chunk, name in principals if name != exempt]
        wanted: dict[str, float] = {}
        for chunk, principal, price in priced:
            wanted[principal] = wanted.get(principal, 0.0) + price.row_s * chunk.num_rows
        left_s = _equal_parts(wanted, max(self.longest_s - self.base_s, _LEAST_SHARE * self.longest_s))
        heavy = {name for name, wanted_s in wanted.items() if wanted_s > left_s[name]}
        spare_s = sum(left_s[name] for name in heavy)
        begun, tried = set[str](), dict[int, int]()
        for chunk, principal, price in priced:
            room = min(int(left_s[principal] / price.row_s), 2 * price.reach - tried.get(id(price), 0))
            if room < chunk.num_rows:
                is_first = principal not in begun and (spare_s > 0.0 or principal not in heavy)
                least = 0 if not is_first else chunk.num_rows if chunk.run.is_decode else 1
                chunk.num_rows = least if chunk.run.is_decode else max(least, room)
            if principal in heavy:
                spare_s -= price.row_s * chunk.num_rows
            if chunk.num_rows > 0:
                begun.add(principal)
            left_s[principal] -= price.row_s * chunk.num_rows
            tried[id(price)] = tried.get(id(price), 0) + chunk.num_rows
        return [chunk for chunk in chunks if chunk.num_rows > 0]

    def learn(self, chunks: Iterable[Chunk], step_s: float) -> dict[str, float]:
        """Learn from a step while several principals are active; return the seconds of it that each has had.

        The shortest step is shared equally: whoever has rows needs it.
        """
        num_rows: dict[_Key, int] = {}
        for chunk in chunks:
            key = _key(chunk)
            num_rows[key] = num_rows.get(key, 0) + chunk.num_rows
        added_s = max(0.0, step_s - self.base_s)
        self._correct(num_rows, added_s)
        estimates = {key: self._price(key).row_s * count for key, count in num_rows.items()}
        scale = added_s / sum(estimates.values())
        costs = dict.fromkeys((principal for principal, _ in estimates), 0.0)
        costs = dict.fromkeys(costs, (step_s - added_s) / len(costs))
        for (principal, _), estimate in estimates.items():
            costs[principal] += scale * estimate
        return costs

    def forget(self, principals: Iterable[str]) -> None:
        """Forget the prices of principals that are no longer active."""
        gone = set(principals)
        self._prices = {key: price for key, price in self._prices.items() if key[0] not in gone}

    def _correct(self, num_rows: Mapping[_Key, int], added_s: float) -> None:
        """Correct prices by what the rows have added in all, those most that were most of the estimate.

        The shortest step is forgotten by what the prices have not explained.
        """
        estimates = {key: self._price(key).row_s * count for key, count in num_rows.items()}
        total = sum(estimates.values())
        self.base_s += _FORGETTING * max(0.0, added_s - total)
        error = min(added_s / total, _MAX_RISE) - 1.0
        error *= 1.0 if error > 0.0 else _FALL
        for key, estimate in estimates.items():
            price = self._prices[key]
            price.row_s = max(price.row_s * (1.0 + error * estimate / total), _LEAST_PRICE * self.base_s)
            price.reach = max(price.reach, num_rows[key])

    def _price(self, key: _Key) -> _Price:
        price = self._prices.get(key)
        if price is None:
            first = _FIRST_ROWS if key[1] else _FIRST_PROMPT_ROWS
            price = self._prices[key] = _Price(max(_FIRST_PRICE * self.base_s, 1e-6), first // 2)
        return price


def _key(chunk: Chunk) -> _Key:
    run = chunk.run
    if len(run.specs) <= 1 and not run.is_decode:  # at most the last row of a prompt returns anything
        return run.job.principal, ()
    return run.job.principal, _kind(next(iter(run.specs.values()), _NOTHING))


def _kind(spec: OutputSpec) -> Kind:
    """Return what an output row asks for, by what it costs."""
    sample = spec.sample
    return (
        spec.full_logits or spec.hidden_state,
        spec.num_top_logprobs > 0 or bool(spec.logprob_ids) or spec.entropy or spec.logprobs or spec.target_id >= 0,
        spec.shaping is not None,
        sample is not None and sample.temperature > 0.0,
        sample is not None and (sample.top_p < 1.0 or sample.top_k > 0 or sample.min_p > 0.0),
        spec.draft is not None,
    )


def _equal_parts(wanted: Mapping[str, float], room: float) -> dict[str, float]:
    """Split the room equally; what one does not need goes to the others."""
    parts: dict[str, float] = {}
    for num_left, name in zip(range(len(wanted), 0, -1), sorted(wanted, key=wanted.__getitem__), strict=True):
        parts[name] = min(wanted[name], room / num_left) if num_left > 1 else room
        room -= parts[name]
    return parts
