"""What became of each request, and the figures made of it."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, MutableSequence, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

__all__ = ["OK", "UNFINISHED", "Quantiles", "Record", "Summary", "percentile", "quantiles_ms", "rounded", "summarize"]

OK = "ok"
UNFINISHED = "unfinished"


@dataclass(slots=True)
class Record:
    """One request. All times are of the clock of the event loop.

    Attributes:
        prompt_length: Tokens of its prompt.
        intended_s: When it was scheduled to begin. Latencies count from here.
        sent_s: When it began; 0: it never did.
        arrivals: The times at which tokens arrived, in order, by branch.
        outcome: ``ok``, ``unfinished``, or the reason of the error that ended it.
    """

    prompt_length: int
    intended_s: float
    sent_s: float = 0.0
    arrivals: dict[int, MutableSequence[float]] = field(default_factory=dict)
    outcome: str = UNFINISHED

    def note(self, branch: int, at_s: float) -> None:
        """Note a token of a branch."""
        self.arrivals.setdefault(branch, array("d")).append(at_s)

    @property
    def first_s(self) -> float:
        """When its first token arrived; infinity if none did."""
        return min((times[0] for times in self.arrivals.values()), default=math.inf)

    @property
    def last_s(self) -> float:
        """When its last token arrived; infinity if none did."""
        return max((times[-1] for times in self.arrivals.values()), default=math.inf)

    @property
    def gaps_s(self) -> list[float]:
        """The times between one token and the next of the same branch."""
        return [after - before for times in self.arrivals.values() for before, after in pairwise(times)]


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of some latencies, in milliseconds; NaN if there are none."""

    p50: float
    p90: float
    p99: float
    num: int


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a window of time.

    Attributes:
        seconds: The length of the window.
        requests_per_s: Requests whose last token arrived in the window.
        tokens_per_s: Tokens that arrived in the window, of all branches and all requests.
        prompt_tokens_per_s: Tokens of the prompts whose first new token arrived in the window.
        first_token_ms: From the scheduled begin of a request to its first token.
        inter_token_ms: Between one token and the next of the same branch.
        end_to_end_ms: From the scheduled begin of a request to its last token; of requests that ended well.
        late_ms: From the scheduled begin of a request to its real begin: the wait for a place, and the generator.
        num_ok: Requests that ended well.
        num_unfinished: Requests that had not ended when the run did. Their latencies would have been long ones.
        errors: Number of failed requests by reason.
    """

    seconds: float
    requests_per_s: float
    tokens_per_s: float
    prompt_tokens_per_s: float
    first_token_ms: Quantiles
    inter_token_ms: Quantiles
    end_to_end_ms: Quantiles
    late_ms: Quantiles
    num_ok: int
    num_unfinished: int
    errors: dict[str, int]

    def as_json(self) -> dict[str, Any]:  # Any: what JSON holds
        """Return it as plain values; a latency without a measurement is None."""
        plain: dict[str, Any] = rounded(asdict(self))
        return plain


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest of ordered values that at least this share of them does not exceed (nearest rank).

    Nothing is interpolated, so the value was measured. NaN if there are no values.
    """
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def quantiles_ms(seconds: Iterable[float]) -> Quantiles:
    """Return the quantiles of latencies in seconds."""
    ordered = sorted(1e3 * value for value in seconds)
    p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
    return Quantiles(p50, p90, p99, len(ordered))


def summarize(records: Sequence[Record], begin_s: float, end_s: float) -> Summary:
    """Return the figures of the window from ``begin_s`` to ``end_s``.

    Latencies and errors are those of requests scheduled in the window, even if they ended after it: leaving out slow
    requests would make a slow server look fast. Rates count everything that arrived in the window.
    """
    length_s = max(1e-9, end_s - begin_s)
    scheduled = [record for record in records if begin_s <= record.intended_s <= end_s]
    ok = [record for record in scheduled if record.outcome == OK]
    failed = [record.outcome for record in scheduled if record.outcome not in (OK, UNFINISHED)]
    times = [at for record in records for branch in record.arrivals.values() for at in branch]
    ended = [record for record in records if record.outcome == OK and begin_s < record.last_s <= end_s]
    prompts = [record.prompt_length for record in records if begin_s < record.first_s <= end_s]
    return Summary(
        seconds=length_s,
        requests_per_s=len(ended) / length_s,
        tokens_per_s=sum(begin_s < at <= end_s for at in times) / length_s,
        prompt_tokens_per_s=sum(prompts) / length_s,
        first_token_ms=quantiles_ms(one.first_s - one.intended_s for one in scheduled if one.arrivals),
        inter_token_ms=quantiles_ms(gap for record in scheduled for gap in record.gaps_s),
        end_to_end_ms=quantiles_ms(one.last_s - one.intended_s for one in ok),
        late_ms=quantiles_ms(one.sent_s - one.intended_s for one in scheduled if one.sent_s),
        num_ok=len(ok),
        num_unfinished=len(scheduled) - len(ok) - len(failed),
        errors=dict(sorted(Counter(failed).items())),
    )


def rounded(value: Any) -> Any:  # Any: what JSON holds
    """Return plain values with three decimals, and None for NaN."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, float):
        return None if math.isnan(value) else round(value, 3)
    return value
