"""Numbers of a request: the interval that each must lie in."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Final

from ferrule.v1 import policy_pb2
from ferrule_server.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Interval:
    """Values that a field may have: finite, from ``low`` to ``high``, the lower end left out where ``is_open``."""

    name: str
    low: float
    high: float
    is_open: bool = False

    def holds(self, value: float) -> bool:
        """Whether a value lies in it; NaN lies in none."""
        return self.low <= value <= self.high and not (self.is_open and value == self.low)


_MAX_FLOAT: Final = sys.float_info.max
FINITE: Final = Interval("finite", -_MAX_FLOAT, _MAX_FLOAT)
POSITIVE: Final = Interval("finite and more than 0", 0.0, _MAX_FLOAT, is_open=True)
NOT_NEGATIVE: Final = Interval("finite and at least 0", 0.0, _MAX_FLOAT)
TOP_P: Final = Interval("in (0, 1]", 0.0, 1.0, is_open=True)
MIN_P: Final = Interval("in [0, 1]", 0.0, 1.0)


def number(
    message: policy_pb2.GreedyArgmax | policy_pb2.Sample, name: str, path: str, interval: Interval, unset: float
) -> float:
    """Return an optional float of ``message``, ``unset`` where it is not set.

    Raises:
        InvalidRequest: It lies outside the interval.
    """
    if not message.HasField(name):
        return unset
    value: float = getattr(message, name)
    if not interval.holds(value):
        raise InvalidRequest(f"{path}.{name}", f"must be {interval.name}, got {value}")
    return value
