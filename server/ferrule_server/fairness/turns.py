"""Turns on the event loop: between principals, and within one large request.

Every call runs inside :func:`metered`, which measures its work on the event loop and charges it to its principal.
Before a piece of work (parsing a message, a slice of a large one) the call waits for its :func:`turn`. A principal that
has used more than its share waits until the others have caught up; then one of its calls continues, in arrival order.
While a principal is alone its calls never wait.

    read --> turn --> parse, plan --> turn --> plan --> submit ... engine ... --> turn --> write
             '------ charged ------'  '-- charged ---'                            '- charged'
"""

from __future__ import annotations

import asyncio
import time
import types
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from ferrule_server.fairness.queue import FairQueue
from ferrule_server.fairness.shares import Shares

_T = TypeVar("_T")

_RECHECK_S: Final = 0.02
"""Longest time between two checks: a principal that waits may have become the only one."""
SLICE_NS: Final = 1_000_000
"""Work on one request before others get their turn."""


class TurnTaker:
    """Delays the calls of each principal that has used more than its share.

    Invariant: a principal has an entry in ``_waiting`` exactly while calls of it wait, and then exactly one scheduled
    callback of the event loop wakes the first of them.

    Args:
        shares: The accounts; the engine charges them too.
    """

    def __init__(self, shares: Shares) -> None:
        self.shares = shares
        self._waiting: dict[str, FairQueue[asyncio.Future[None]]] = {}

    def num_waiting(self, principal: str) -> int:
        """Return the number of calls of a principal that wait for their turn."""
        waiting = self._waiting.get(principal)
        return 0 if waiting is None else waiting.num_items

    async def turn(self, principal: str, flow: str = "") -> None:
        """Wait until the principal's next piece of work may begin.

        Args:
            principal: The principal whose share is used.
            flow: The flows of one principal take turns; they are the connections of strangers.
        """
        account = self.shares.account(principal)
        waiting = self._waiting.get(principal)
        if waiting is None and self.shares.wait_ns(account) <= 0:
            return
        future = asyncio.get_running_loop().create_future()
        if waiting is None:
            waiting = self._waiting[principal] = FairQueue()
            asyncio.get_running_loop().call_soon(self._wake_next, principal)
        waiting.add(flow, future)
        await future

    def _wake_next(self, principal: str) -> None:
        """Wake the first call that waits as soon as the share allows; the next one when its work is charged."""
        loop = asyncio.get_running_loop()
        delay_ns = self.shares.wait_ns(self.shares.account(principal))
        if delay_ns > 0:
            loop.call_later(min(delay_ns * 1e-9, _RECHECK_S), self._wake_next, principal)
            return
        waiting = self._waiting[principal]
        _wake_one(waiting)
        if waiting.num_items:
            loop.call_soon(self._wake_next, principal)  # runs after the call that was woken
        else:
            del self._waiting[principal]


def _wake_one(waiting: FairQueue[asyncio.Future[None]]) -> None:
    """Wake one call, and drop those that are no longer awaited; the flows take turns."""
    while (taken := waiting.take()) is not None:
        flow, future = taken
        waiting.charge(flow, 1)
        if not future.done():
            future.set_result(None)
            return


@dataclass(frozen=True, slots=True)
class _Turn:
    """The principal whose turns the call under way takes."""

    taker: TurnTaker
    principal: str


# Each call runs in a task of its own and so in a context of its own: a value set there ends with the call.
_TURN: Final[ContextVar[_Turn | None]] = ContextVar("ferrule_turn", default=None)


def take_turns(taker: TurnTaker, principal: str) -> None:
    """Let the call under way, and the tasks that it starts, take the turns of a principal."""
    _TURN.set(_Turn(taker, principal))


async def turn() -> None:
    """Wait until the call under way may begin a piece of work."""
    mine = _TURN.get()
    if mine is not None:
        await mine.taker.turn(mine.principal)


@types.coroutine
def metered(coroutine: Coroutine[Any, Any, _T], shares: Shares) -> Generator[Any, Any, _T]:
    """Run a coroutine of a call and charge the time that it holds the event loop to its principal.

    Nothing is measured while only one principal is active. Any: the values that its futures yield pass through.
    """
    resume: Callable[[Any], Any] = coroutine.send
    value: Any = None
    while True:
        begun_ns = time.monotonic_ns() if shares.is_contended else 0
        try:
            awaited = resume(value)
        except StopIteration as stop:
            result: _T = stop.value
            return result
        finally:
            if begun_ns and (mine := _TURN.get()) is not None:
                shares.charge(mine.principal, time.monotonic_ns() - begun_ns)
        try:
            value = yield awaited
            resume = coroutine.send
        except GeneratorExit:
            coroutine.close()
            raise
        except BaseException as error:  # noqa: BLE001  (thrown into the coroutine, as an await would)
            value, resume = error, coroutine.throw


def spawn(coroutine: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
    """Start a task of the call under way, metered like the call itself."""
    task = asyncio.create_task(_metered_if_shared(coroutine))
    task.add_done_callback(lambda _: coroutine.close())  # it may be cancelled before it begins
    return task


async def _metered_if_shared(coroutine: Coroutine[Any, Any, _T]) -> _T:
    mine = _TURN.get()
    return await (coroutine if mine is None else metered(coroutine, mine.taker.shares))


class Turns:
    """Divides the work on one large request into slices, with turns of others in between."""

    __slots__ = ("_begun_ns",)

    def __init__(self) -> None:
        self._begun_ns = time.monotonic_ns()

    async def pause(self) -> None:
        """Let other calls run if this request has been worked on for a slice since the last pause."""
        if time.monotonic_ns() - self._begun_ns < SLICE_NS:
            return
        await asyncio.sleep(0)  # the work so far is charged here
        await turn()
        self._begun_ns = time.monotonic_ns()
