"""Keeps the leases of live caches from running out, by a timer that is set only while there are any."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from ferrule_client._leases import call_timeout_s, due_groups, lease_s, note_failure, note_loss, pause_s
from ferrule_client._tip import Tip
from ferrule_client.aio._wire import is_running
from ferrule_client.errors import FerruleError
from ferrule_client.types import Handle, Lease

__all__ = ["LeaseKeeper"]


Renew = Callable[[Sequence[Handle], float], Awaitable[Sequence[Lease | FerruleError]]]
"""Renews leases in one call of at most so many seconds; the answers are those of the first handles, at least one."""


class LeaseKeeper:
    """Renews the lease of each registered sequence at a third of its length.

    Invariant: while a sequence is registered and the keeper is open, either a timer is set or a task renews; otherwise
    there is neither. Sequences are held weakly.

    Args:
        renew: Renews many leases in one call.
    """

    def __init__(self, renew: Renew) -> None:
        self._renew = renew
        self._loop = asyncio.get_running_loop()
        self._due: weakref.WeakKeyDictionary[Tip, float] = weakref.WeakKeyDictionary()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        self._num_failures: Counter[str] = Counter()  # in a row, by instance

    def add(self, tip: Tip) -> None:
        """Keep a sequence from now on, its lease being new. Adding it again only starts over."""
        if self._is_closed:
            return
        due = self._loop.time() + lease_s(tip) / 3
        self._due[tip] = due
        if self._task is None and (self._timer is None or due < self._timer.when()):
            self._set_timer(due)

    def remove(self, tip: Tip) -> None:
        """Keep a sequence no longer. Removing twice changes nothing. Finalisers may call in, from any thread."""
        if self._loop.is_closed() or is_running(self._loop):
            self._forget(tip)
        else:
            with contextlib.suppress(RuntimeError):  # the loop was closed at this very moment
                self._loop.call_soon_threadsafe(self._forget, tip)

    async def close(self) -> None:
        """Keep nothing any longer and let the task end. Closing twice changes nothing."""
        self._is_closed = True
        self._stop_timer()
        task = self._task
        if task is not None and is_running(self._loop):
            task.cancel()
            await asyncio.wait([task])

    def _forget(self, tip: Tip) -> None:
        self._due.pop(tip, None)
        if not self._due:
            self._stop_timer()

    def _set_timer(self, due: float) -> None:
        self._stop_timer()
        self._timer = self._loop.call_at(due, self._begin)

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None and not self._loop.is_closed():
            timer.cancel()

    def _begin(self) -> None:
        """Renew all sequences as soon as one of them is due; else wait for the next one."""
        self._timer = None
        due = min(self._due.values(), default=None)
        if due is None:
            return
        if due > self._loop.time():
            self._set_timer(due)
        else:
            groups = due_groups(self._due.items(), self._loop.time(), self._num_failures)
            self._task = self._loop.create_task(self._run(groups), name="ferrule-keep-alive")

    async def _run(self, groups: Sequence[tuple[str, Sequence[Tip]]]) -> None:
        try:
            for instance, tips in groups:
                await self._renew_all(instance, tips)
        finally:
            self._task = None
            if self._due and not self._is_closed:
                self._set_timer(min(self._due.values()))

    async def _renew_all(self, instance: str, tips: Sequence[Tip]) -> None:
        """Renew the leases of an instance, request by request; if one fails, the rest is due again soon."""
        handles, timeout_s = [tip.handle for tip in tips], call_timeout_s(tips)
        start = 0
        while start < len(tips):
            try:
                results = await self._renew(handles[start:], timeout_s)
            except FerruleError as error:
                self._num_failures[instance] += 1
                note_failure(error, len(tips) - start, self._num_failures[instance])
                self._postpone(tips[start:], pause_s(tips))
                return
            del self._num_failures[instance]
            for tip, handle, result in zip(tips[start:], handles[start:], results, strict=False):
                self._take(tip, handle, result)
            start += len(results)

    def _take(self, tip: Tip, handle: Handle, result: Lease | FerruleError) -> None:
        """Note what became of the renewal of one sequence.

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
        now = self._loop.time()
        for tip in tips:
            if tip in self._due:
                self._due[tip] = max(self._due[tip], now + wait_s)

    def _schedule(self, waits_s: dict[Tip, float]) -> None:
        now = self._loop.time()
        for tip, wait_s in waits_s.items():
            if tip in self._due:
                self._due[tip] = now + wait_s
