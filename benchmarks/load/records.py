"""What came of the requests, and the figures made of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

OK = "ok"
UNFINISHED = "unfinished"


@dataclass(slots=True)
class Record:
    """One request.

    Attributes:
        prompt_length: Tokens of its prompt.
        intended_s: When it was to begin, by the clock of the loop; latency counts from here.
        sent_s: When it did begin.
        arrivals: When tokens came, and how many at a time.
        outcome: ``ok``, ``unfinished``, or the reason it was refused or failed for.
        is_rejected: The server had no room; anything else that is not ``ok`` is an error.
    """

    prompt_length: int
    intended_s: float
    sent_s: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    outcome: str = UNFINISHED
    is_rejected: bool = False


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Of some latencies, in milliseconds; NaN where there are none."""

    p50: float
    p90: float
    p99: float
    num: int


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run.

    Attributes:
        tokens_per_s: Tokens that came inside the window, of whatever request, by its length.
        requests_per_s: Requests that ended well inside it.
        first_token: From when a request was to begin until its first token, for those to begin inside the window.
        inter_token: Between tokens of one request that follow each other; tokens that come together are 0 apart.
        late: From when a request was to begin until it did: what the generator itself adds.
        num_ok, rejected, errors: What came of those to begin inside the window, by reason.
    """

    tokens_per_s: float
    requests_per_s: float
    first_token: Quantiles
    inter_token: Quantiles
    late: Quantiles
    num_ok: int
    rejected: dict[str, int]
    errors: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values; a latency that nobody had is None."""
        plain: dict[str, Any] = _without_nan(asdict(self))
        return plain


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the least of ordered values that at least this share of them does not exceed (nearest rank).

    Nothing is interpolated: what is returned did happen. NaN where there are no values.
    """
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def quantiles_ms(seconds: Iterable[float]) -> Quantiles:
    """Return the quantiles of latencies in seconds."""
    ordered = sorted(1e3 * value for value in seconds)
    p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
    return Quantiles(p50, p90, p99, len(ordered))


def gaps(arrivals: Sequence[tuple[float, int]]) -> list[float]:
    """Return the seconds between one token and the next, for each token but the first."""
    together = [0.0] * (sum(count for _, count in arrivals) - len(arrivals)) if arrivals else []
    return [after - before for (before, _), (after, _) in pairwise(arrivals)] + together


def summarize(records: Sequence[Record], begin_s: float, end_s: float) -> Summary:
    """Return the figures of the window from ``begin_s`` to ``end_s``.

    Whatever was to begin inside the window counts with its latency, also if it ended behind it: leaving the slow ones
    out would make a slow server look quick.
    """
    length_s = end_s - begin_s
    begun = [record for record in records if begin_s <= record.intended_s < end_s]
    num_tokens = sum(count for record in records for at, count in record.arrivals if begin_s < at <= end_s)
    num_done = sum(record.outcome == OK and begin_s < record.arrivals[-1][0] <= end_s for record in records)
    bad = [record for record in begun if record.outcome != OK]
    return Summary(
        tokens_per_s=num_tokens / length_s,
        requests_per_s=num_done / length_s,
        first_token=quantiles_ms(record.arrivals[0][0] - record.intended_s for record in begun if record.arrivals),
        inter_token=quantiles_ms(gap for record in begun for gap in gaps(record.arrivals)),
        late=quantiles_ms(record.sent_s - record.intended_s for record in begun if record.sent_s),
        num_ok=len(begun) - len(bad),
        rejected=dict(Counter(record.outcome for record in bad if record.is_rejected)),
        errors=dict(Counter(record.outcome for record in bad if not record.is_rejected)),
    )


def median_of(summaries: Sequence[Summary]) -> Summary:
    """Return the run whose throughput is the median one (the lower of two): figures that belong together."""
    return sorted(summaries, key=lambda summary: summary.tokens_per_s)[(len(summaries) - 1) // 2]


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
