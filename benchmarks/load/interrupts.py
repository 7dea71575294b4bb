"""Ctrl-C and SIGTERM, taken where that is safe.

An exception that a signal raises out of nowhere is lost where nobody can raise one, such as in a destructor or in a
callback of gRPC, and what it meets half done it leaves half done: asyncio that begins, or gRPC's own code. So it is
raised only while there is no loop; in one, its task is cancelled between two of its steps.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Takes both signals from now on: each ends in one KeyboardInterrupt, here or in :meth:`run`."""

    def __init__(self) -> None:
        self._has_come, self._is_held = False, False
        for number in _SIGNALS:
            signal.signal(number, self._take)

    def _take(self, *_: object) -> None:
        self._has_come = True
        if not self._is_held:
            raise KeyboardInterrupt

    def run(self, begin: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Run a coroutine in a loop of its own and return what it returns.

        Raises:
            KeyboardInterrupt: A signal has come; the coroutine was cancelled and has ended, or never began.
        """
        self._is_held = True
        try:
            return asyncio.run(self._cancelled_by_signals(begin))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None

    async def _cancelled_by_signals(self, begin: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        task = asyncio.current_task()
        assert task is not None
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        if self._has_come:
            raise asyncio.CancelledError
        return await begin()
