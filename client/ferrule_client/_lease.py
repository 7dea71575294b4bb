"""Keeps the leases of live caches from running out, from one thread that exists only while there are any."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from ferrule_client._tip import Tip
from ferrule_client.errors import ExecutorError
from ferrule_client.types import Handle, Lease

__all__ = ["FIRST_RENEWAL_S", "LeaseKeeper"]

_log = logging.getLogger(__name__)

# No lease is shorter than 5 s, so a first renewal after a third of that is early enough for each, and its answer
# says how long the lease really is. What lives shorter than this never costs a call.
FIRST_RENEWAL_S = 5.0 / 3
_AFTER_FAILURE_S = 1.0

Renew = Callable[[Sequence[Handle]], Sequence[Lease | ExecutorError]]


class LeaseKeeper:
    """Renews the lease of each registered sequence at a third of its length.

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

    def add(self, tip: Tip) -> None:
        """Keep a sequence from now on."""
        with self._condition:
            if self._is_closed:
                return
            self._due[tip] = time.monotonic() + FIRST_RENEWAL_S
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
        while (tips := self._wait_for_due()) is not None:
            self._renew_all(tips)

    def _wait_for_due(self) -> list[Tip] | None:
        """Return all sequences as soon as one of them is due, or None when the thread is to end."""
        with self._condition:
            while not self._is_closed:
                times = list(self._due.values())
                if not times:
                    break
                wait_s = min(times) - time.monotonic()
                if wait_s <= 0:
                    return list(self._due.keys())
                self._condition.wait(wait_s)
            self._thread = None
            return None

    def _renew_all(self, tips: Sequence[Tip]) -> None:
        try:
            results = self._renew([tip.handle for tip in tips])
        except ExecutorError as error:
            _log.debug("keep-alive failed reason=%s caches=%d", error.reason, len(tips))
            self._schedule(dict.fromkeys(tips, _AFTER_FAILURE_S))
            return
        lost = [tip for tip, result in zip(tips, results, strict=True) if isinstance(result, ExecutorError)]
        self._schedule(
            {tip: result.ttl_s / 3 for tip, result in zip(tips, results, strict=True) if isinstance(result, Lease)}
        )
        for tip in lost:  # the next call on it says why
            _log.debug("keep-alive lost handle_id=%s", tip.handle.handle_id)
            self.remove(tip)

    def _schedule(self, waits_s: dict[Tip, float]) -> None:
        now = time.monotonic()
        with self._condition:
            for tip, wait_s in waits_s.items():
                if tip in self._due:
                    self._due[tip] = now + wait_s
