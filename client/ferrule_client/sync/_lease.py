"""Keeps the leases of live caches from running out, from one thread that exists only while there are any."""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence

from ferrule_client._leases import call_timeout_s, due_groups, lease_s, note_failure, note_loss, pause_s
from ferrule_client._tip import Tip
from ferrule_client.errors import FerruleError
from ferrule_client.types import Handle, Lease

__all__ = ["LeaseKeeper", "Renew"]


Renew = Callable[[Sequence[Handle], float], Sequence[Lease | FerruleError]]
"""Renews leases in one call of at most so many seconds.

A request holds a limited number of handles: the answers are those of the first handles, at least one.
"""


class LeaseKeeper:
    """Renews the lease of each registered sequence at a third of its length.

    A renewal may take as long again, so one that hangs in a dead connection leaves a third of the lease for the next.
    There are separate calls for each instance of the server, those that failed last time at the end: what is dead, or
    frozen, costs the others none of their time. Where one request cannot hold all handles, those that are due first are
    renewed first, each request has its own time, and the next one begins where a failed one left off.

    Invariant: a thread runs if and only if a sequence is registered and the keeper is open (it may take a moment to
    end). It is a daemon and holds sequences weakly, so it keeps neither them nor the process alive.

    Args:
        renew: Renews many leases in one call.
    """

    def __init__(self, renew: Renew) -> None:
        self._renew = renew
        self._condition = threading.Condition()  # over an RLock: a finaliser may call in from the same thread
        self._due: weakref.WeakKeyDictionary[Tip, float] = weakref.WeakKeyDictionary()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._num_failures: Counter[str] = Counter()  # in a row, by instance

    def add(self, tip: Tip) -> None:
        """Keep a sequence from now on, its lease being new. Adding it again only starts over."""
        with self._condition:
            if self._is_closed:
                return
            self._due[tip] = time.monotonic() + lease_s(tip) / 3
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ferrule-keep-alive", daemon=True)
                self._thread.start()
            self._condition.notify()

    def remove(self, tip: Tip) -> None:
        """Keep a sequence no longer. Removing twice changes nothing."""
        with self._condition:
            self._due.pop(tip, None)
            if not self._due:
                self._condition.notify()

    def close(self) -> None:
        """Keep nothing any longer and let the thread end. Closing twice changes nothing."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5.0)

    def _run(self) -> None:
        while (groups := self._wait_for_due()) is not None:
            for instance, tips in groups:
                self._renew_all(instance, tips)

    def _wait_for_due(self) -> list[tuple[str, list[Tip]]] | None:
        """Return what there is to renew as soon as something is due, or None when the thread is to end."""
        with self._condition:
            while not self._is_closed:
                times = list(self._due.values())
                if not times:
                    break
                wait_s = min(times) - time.monotonic()
                if wait_s <= 0:
                    return due_groups(self._due.items(), time.monotonic(), self._num_failures)
                self._condition.wait(wait_s)
            self._thread = None
            return None

    def _renew_all(self, instance: str, tips: Sequence[Tip]) -> None:
        """Renew the leases of an instance, request by request; if one fails, the rest is due again soon."""
        handles, timeout_s = [tip.handle for tip in tips], call_timeout_s(tips)
        start = 0
        while start < len(tips):
            try:
                results = self._renew(handles[start:], timeout_s)
            except FerruleError as error:
                self._num_failures[instance] += 1
                note_failure(error, len(tips) - start, self._num_failures[instance])
                self._postpone(tips[start:], pause_s(tips))
                return
            del self._num_failures[instance]
            with self._condition:
                for tip, handle, result in zip(tips[start:], handles[start:], results, strict=False):
                    self._take(tip, handle, result)
            start += len(results)

    def _take(self, tip: Tip, handle: Handle, result: Lease | FerruleError) -> None:
        """Note what became of the renewal of one sequence; with the lock held, so that ``add`` comes before or after.

        Args:
            tip: Its tip now.
            handle: What was renewed. The tip may have moved to another sequence meanwhile, and is due as it is.
            result: The answer.
        """
        if tip.handle.cache_id != handle.cache_id:
            return
        if isinstance(result, Lease):
            tip.ttl_s = result.ttl_s
            self._schedule({tip: result.ttl_s / 3})
        else:  # the next call on it says why
            note_loss(tip, handle, result)
            self.remove(tip)

    def _postpone(self, tips: Sequence[Tip], wait_s: float) -> None:
        """Have sequences renewed again after a pause; those that are due later stay so, and do not get in the way."""
        now = time.monotonic()
        with self._condition:
            for tip in tips:
                if tip in self._due:
                    self._due[tip] = max(self._due[tip], now + wait_s)

    def _schedule(self, waits_s: dict[Tip, float]) -> None:
        now = time.monotonic()
        with self._condition:
            for tip, wait_s in waits_s.items():
                if tip in self._due:
                    self._due[tip] = now + wait_s
