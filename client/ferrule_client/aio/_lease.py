"""Keeps the leases of live caches from running out, by a timer that is set only while there are any."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence

from ferrule_client._leases import Leases, call_timeout_s
from ferrule_client._tip import Tip
from ferrule_client.aio._wire import is_running
from ferrule_client.errors import FerruleError
from ferrule_client.types import Handle, Lease

Renew = Callable[[Sequence[Handle], float], Awaitable[Sequence[Lease | FerruleError]]]
"""Renews leases in one call of at most so many seconds; the answers are those of the first handles, at least one."""


class LeaseKeeper:
    """Renews the lease of each registered sequence at a third of its length.

    Invariant: while a sequence is registered and the keeper is open, either a timer is set or a task renews; otherwise
    there is neither.
    """

    def __init__(self, renew: Renew) -> None:
        self._renew = renew
        self._loop = asyncio.get_running_loop()
        self._leases = Leases()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    def add(self, tip: Tip) -> None:
        """Keep a sequence from now on, its lease being new. Adding it again only starts over."""
        if self._is_closed:
            return
        due = self._leases.begin(tip, self._loop.time())
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
        self._leases.due.pop(tip, None)
        if not self._leases.due:
            self._stop_timer()

    def _set_timer(self, due: float | None) -> None:
        self._stop_timer()
        if due is not None:
            self._timer = self._loop.call_at(due, self._begin)

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None and not self._loop.is_closed():
            timer.cancel()

    def _begin(self) -> None:
        """Renew all sequences as soon as one of them is due; else wait for the next one."""
        self._timer = None
        if groups := self._leases.groups(self._loop.time()):
            self._task = self._loop.create_task(self._run(groups), name="ferrule-keep-alive")
        else:
            self._set_timer(self._leases.first())

    async def _run(self, groups: Sequence[tuple[str, Sequence[Tip]]]) -> None:
        try:
            for instance, tips in groups:
                await self._renew_all(instance, tips)
        finally:
            self._task = None
            if not self._is_closed:
                self._set_timer(self._leases.first())

    async def _renew_all(self, instance: str, tips: Sequence[Tip]) -> None:
        """Renew the leases of an instance, request by request; if one fails, the rest is due again soon."""
        timeout_s = call_timeout_s(tips)
        answers: Sequence[Lease | FerruleError] | FerruleError
        while tips:
            handles = [tip.handle for tip in tips]
            try:
                answers = await self._renew(handles, timeout_s)
            except FerruleError as error:
                answers = error
            tips = self._leases.take(instance, tips, handles, answers, self._loop.time())
