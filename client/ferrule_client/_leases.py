"""When leases are to be renewed, and what came of it."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence

from ferrule_client._route import instance_of_handle
from ferrule_client._tip import Tip
from ferrule_client.errors import FerruleError, UnavailableError
from ferrule_client.types import Handle, Lease

_log = logging.getLogger(__name__)

# No lease is shorter than 5 s, so where the server has not said how long it is, a first renewal after a third of that
# is early enough, and its answer says it. What lives shorter than this never costs a call.
_MIN_LEASE_S = 5.0
_MAX_CALL_S = 5.0
_MIN_CALL_S = 0.5
_MAX_PAUSE_S = 1.0


class Leases:
    """When the lease of each sequence is due, which is at a third of its length; sequences are held weakly.

    A renewal may take as long again, so one that hangs in a dead connection leaves a third of the lease for the next.
    There are separate calls for each instance of the server, those that failed last time at the end: what is dead, or
    frozen, costs the others none of their time. Where one request cannot hold all handles, those that are due first are
    renewed first, each request has its own time, and the next one begins where a failed one left off.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # reentrant: a finaliser may call in from the same thread
        self.due: weakref.WeakKeyDictionary[Tip, float] = weakref.WeakKeyDictionary()
        self._num_failures: Counter[str] = Counter()  # in a row, by instance

    def begin(self, tip: Tip, now: float) -> float:
        """Keep a sequence whose lease is new, and return when it is due. Adding it again only starts over."""
        with self.lock:
            self.due[tip] = now + _lease_s(tip) / 3
            return self.due[tip]

    def first(self) -> float | None:
        """Return when the first one is due, or None if there is none."""
        with self.lock:
            return min((due for _, due in self._items()), default=None)

    def groups(self, now: float) -> list[tuple[str, list[Tip]]]:
        """Return what is to be renewed together as soon as one of it is due; see ``due_groups``."""
        with self.lock:
            return due_groups(self._items(), now, self._num_failures)

    def take(
        self,
        instance: str,
        tips: Sequence[Tip],
        handles: Sequence[Handle],
        answers: Sequence[Lease | FerruleError] | FerruleError,
        now: float,
    ) -> Sequence[Tip]:
        """Note what became of a request to renew the leases of an instance, and return those that it did not hold.

        Args:
            instance: Its name.
            tips: The sequences as they are now; those that have moved to another one meanwhile are due as they are.
            handles: What was renewed.
            answers: Those of the first handles, or what the request failed with: then all are due again soon.
            now: The time.
        """
        with self.lock:
            if isinstance(answers, FerruleError):
                self._num_failures[instance] += 1
                num, pause_s = self._num_failures[instance], min(_MAX_PAUSE_S, min(map(_lease_s, tips)) / 10)
                level = logging.WARNING if num == 2 else logging.DEBUG  # two in a row: leases may run out by it
                _log.log(level, "keep-alive failed reason=%s caches=%d failures=%d", answers.reason, len(tips), num)
                for tip in tips:
                    self._postpone(tip, now + pause_s)
                return ()
            del self._num_failures[instance]
            for tip, handle, answer in zip(tips, handles, answers, strict=False):
                if tip.handle.cache_id == handle.cache_id:
                    self._note(tip, handle, answer, now)
            return tips[len(answers) :]

    def _postpone(self, tip: Tip, until: float) -> None:
        if tip in self.due:
            self.due[tip] = max(self.due[tip], until)

    def _items(self) -> list[tuple[Tip, float]]:
        """Return what is kept; a finaliser may take some of it out meanwhile."""
        tips = [tip for ref in self.due.keyrefs() if (tip := ref()) is not None]
        return [(tip, due) for tip in tips if (due := self.due.get(tip)) is not None]

    def _note(self, tip: Tip, handle: Handle, answer: Lease | FerruleError, now: float) -> None:
        if isinstance(answer, Lease):
            tip.ttl_s = answer.ttl_s
            if tip in self.due:
                self.due[tip] = now + answer.ttl_s / 3
        elif isinstance(answer, UnavailableError):  # the server does not say so now, as while its journal fails
            _log.debug("keep-alive postponed handle_id=%s reason=%s", handle.handle_id, answer.reason)
            self._postpone(tip, now + min(_MAX_PAUSE_S, _lease_s(tip) / 10))
        else:  # the next call on it says why
            level = logging.DEBUG if tip.is_released else logging.WARNING
            _log.log(level, "keep-alive lost handle_id=%s reason=%s", handle.handle_id, answer.reason)
            self.due.pop(tip, None)


def due_groups(due: Iterable[tuple[Tip, float]], now: float, num_failures: Counter[str]) -> list[tuple[str, list[Tip]]]:
    """Return the sequences of each instance that has one which is due, those of failing instances last.

    Within an instance the sequences that are due first come first.
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


def call_timeout_s(tips: Sequence[Tip]) -> float:
    """Return the seconds that one renewal may take, so that there is time for others after one that hangs."""
    return max(_MIN_CALL_S, min(_MAX_CALL_S, min(map(_lease_s, tips)) / 3))


def _lease_s(tip: Tip) -> float:
    return _MIN_LEASE_S if tip.ttl_s is None else tip.ttl_s
