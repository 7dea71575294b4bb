"""When leases are to be renewed, and what is logged of it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from ferrule_client._route import instance_of_handle
from ferrule_client._tip import Tip
from ferrule_client.errors import FerruleError
from ferrule_client.types import Handle

__all__ = ["call_timeout_s", "due_groups", "lease_s", "note_failure", "note_loss", "pause_s"]


_log = logging.getLogger(__name__)


# No lease is shorter than 5 s, so where the server has not said how long it is, a first renewal after a third of that
# is early enough, and its answer says it. What lives shorter than this never costs a call.
_MIN_LEASE_S = 5.0


_MAX_CALL_S = 5.0


_MIN_CALL_S = 0.5


_MAX_PAUSE_S = 1.0


def due_groups(due: Iterable[tuple[Tip, float]], now: float, num_failures: Counter[str]) -> list[tuple[str, list[Tip]]]:
    """Return the sequences of each instance that has one which is due, those of failing instances last.

    Within an instance the sequences that are due first come first.

    Args:
        due: Sequences and when each is due.
        now: The time, on the same clock.
        num_failures: Failures in a row by instance.
    """
    groups: dict[str, list[Tip]] = {}
    urgent = set()
    for tip, end in sorted(due, key=lambda one: one[1]):
        instance = instance_of_handle(tip.handle)
        groups.setdefault(instance, []).append(tip)
        if end <= now:
            urgent.add(instance)
    return sorted(
        ((instance, tips) for instance, tips in groups.items() if instance in urgent),
        key=lambda group: num_failures[group[0]],
    )


def note_failure(error: FerruleError, num_tips: int, num_failures: int) -> None:
    """Log a renewal that failed; the second in a row as a warning, since leases may run out by it."""
    level = logging.WARNING if num_failures == 2 else logging.DEBUG
    _log.log(level, "keep-alive failed reason=%s caches=%d failures=%d", error.reason, num_tips, num_failures)


def note_loss(tip: Tip, handle: Handle, error: FerruleError) -> None:
    """Log a sequence that is kept no longer; as a warning unless it was released while its lease was renewed."""
    level = logging.DEBUG if tip.is_released else logging.WARNING
    _log.log(level, "keep-alive lost handle_id=%s reason=%s", handle.handle_id, error.reason)


def lease_s(tip: Tip) -> float:
    """Return the length of a sequence's lease as far as it is known, in seconds."""
    return _MIN_LEASE_S if tip.ttl_s is None else tip.ttl_s


def call_timeout_s(tips: Sequence[Tip]) -> float:
    """Return the seconds that one renewal may take, so that there is time for others after one that hangs."""
    return max(_MIN_CALL_S, min(_MAX_CALL_S, min(map(lease_s, tips)) / 3))


def pause_s(tips: Sequence[Tip]) -> float:
    """Return the seconds to wait after a renewal that failed."""
    return min(_MAX_PAUSE_S, min(map(lease_s, tips)) / 10)
