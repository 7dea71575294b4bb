"""Keeps the leases of live caches from running out, from one thread that exists only while there are any."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from ferrule_client._leases import Leases, call_timeout_s
from ferrule_client._tip import Tip
from ferrule_client.errors import FerruleError
from ferrule_client.types import Handle, Lease

Renew = Callable[[Sequence[Handle], float], Sequence[Lease | FerruleError]]
"""Renews leases in one call of at most so many seconds; the answers are those of the first handles, at least one."""


class LeaseKeeper:
    """Renews the lease of each registered sequence at a third of its length.

    Invariant: a thread runs if and only if a sequence is registered and the keeper is open (it may take a moment to
    end). It is a daemon and holds sequences weakly, so it keeps neither them nor the process alive.
    """

    def __init__(self, renew: Renew) -> None:
        self._renew = renew
        self._leases = Leases()
        self._condition = threading.Condition(self._leases.lock)
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def add(self, tip: Tip) -> None:
        """Keep a sequence from now on, its lease being new. Adding it again only starts over."""
        with self._condition:
            if self._is_closed:
                return
            self._leases.begin(tip, time.monotonic())
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ferrule-keep-alive", daemon=True)
                self._thread.start()
            self._condition.notify()

    def remove(self, tip: Tip) -> None:
        """Keep a sequence no longer. Removing twice changes nothing."""
        with self._condition:
            self._leases.due.pop(tip, None)
            if not self._leases.due:
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
            while not self._is_closed and (due := self._leases.first()) is not None:
                wait_s = due - time.monotonic()
                if wait_s <= 0:
                    return self._leases.groups(time.monotonic())
                self._condition.wait(wait_s)
            self._thread = None
            return None

    def _renew_all(self, instance: str, tips: Sequence[Tip]) -> None:
        """Renew the leases of an instance, request by request; if one fails, the rest is due again soon."""
        timeout_s = call_timeout_s(tips)
        answers: Sequence[Lease | FerruleError] | FerruleError
        while tips:
            handles = [tip.handle for tip in tips]
            try:
                answers = self._renew(handles, timeout_s)
            except FerruleError as error:
                answers = error
            tips = self._leases.take(instance, tips, handles, answers, time.monotonic())
