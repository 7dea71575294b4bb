"""Ctrl-C and SIGTERM inside the event loop, where an exception out of nowhere would leave work half done."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

__all__ = ["MOST_S", "run_interruptible"]

MOST_S = 20.0
"""Seconds from the first signal to the end, at most."""
_SLOW_S = 1.0
_T = TypeVar("_T")
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


def run_interruptible(
    work: Callable[[], Coroutine[Any, Any, _T]], on_slow: Callable[[], object]
) -> tuple[_T, int | None]:
    """Run a coroutine in a loop of its own; return its result, and the signal that came meanwhile if one did.

    The first signal cancels the coroutine, which returns what it has after it released what it holds. The second
    signal, or ``MOST_S`` after the first, cancels that too: the coroutine and all tasks end at once.

    Args:
        work: Makes the coroutine.
        on_slow: Called if the coroutine has not ended a second after the first signal.

    Raises:
        KeyboardInterrupt: Ctrl-C came, and the coroutine returned nothing.
        SystemExit: Another signal came, and the coroutine returned nothing.
    """
    came: list[int] = []

    async def interruptible() -> _T:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()

        def interrupt(number: int) -> None:
            came.append(number)
            if len(came) == 1:
                task.cancel()
                loop.call_later(_SLOW_S, on_slow)
                loop.call_later(MOST_S, _abandon, task)
            elif len(came) == 2:
                _abandon(task)

        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                with contextlib.suppress(NotImplementedError):  # on Windows asyncio itself cancels at Ctrl-C
                    loop.add_signal_handler(number, interrupt, number)
        return await work()

    try:
        with _handlers_kept():
            result = asyncio.run(interruptible())
    except asyncio.CancelledError:
        if came and came[0] != signal.SIGINT:
            sys.exit(128 + came[0])
        raise KeyboardInterrupt from None
    return result, came[0] if came else None


def _abandon(main: asyncio.Task[Any]) -> None:
    """Cancel all tasks, and again whatever they await in their clean-up, until ``main`` has ended; it is the last."""
    if not main.done():
        loop = main.get_loop()
        for task in asyncio.all_tasks(loop) - {main} or {main}:
            task.cancel()
        loop.call_soon(_abandon, main)


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Put the handlers back that were there before: the loop leaves the system's own."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
