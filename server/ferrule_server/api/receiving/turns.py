"""Turns on the event loop: between principals, and within one large request.

Every call runs inside :func:`metered`, which measures the work it does on the event loop and charges it to its
principal. Before it starts a piece of work (parsing a message, a slice of a large one) it waits for its :func:`turn`.
A principal that has used more than its share waits until the time it took is worked off; then one of its calls goes on,
in arrival order. While a principal is alone no call ever waits.

    read --> turn --> parse, plan --> turn --> plan --> submit ... engine ... --> turn --> write
             '------ charged ------'  '-- charged ---'                            '- charged'
"""

from __future__ import annotations

import asyncio
import time
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from ferrule_server.engine.shares import Shares

_T = TypeVar("_T")

_LOOK_AGAIN_S: Final = 0.02
"""Shares change: a principal that waits may find itself alone."""
SLICE_NS: Final = 1_000_000
"""Work on one request that is done before others get their turn."""


class TurnTaker:
    """Has the calls of each principal wait while it has used more than its share.

    Invariant: a principal has an entry in ``_waiting`` exactly while calls of it wait, and then exactly one callback of
    the event loop is scheduled that wakes the first of them.

    Args:
        shares: The accounts; the engine writes into them too.
    """

    def __init__(self, shares: Shares) -> None:
        self.shares = shares
        self._waiting: dict[str, _Waiting] = {}

    def num_waiting(self, principal: str) -> int:
        """Return how many calls of a principal wait for their turn."""
        waiting = self._waiting.get(principal)
        return 0 if waiting is None else waiting.num_calls

    async def turn(self, principal: str, flow: str = "") -> None:
        """Return when the principal's next piece of work may begin.

        Args:
            principal: Whose share it comes out of.
            flow: Those of one principal take turns among each other: the connections of strangers.
        """
        account = self.shares.account(principal)
        waiting = self._waiting.get(principal)
        if waiting is None and self.shares.wait_ns(account) <= 0:
            return
        future = asyncio.get_running_loop().create_future()
        if waiting is None:
            waiting = self._waiting[principal] = _Waiting()
            asyncio.get_running_loop().call_soon(self._wake_next, principal)
        waiting.add(flow, future)
        await future

    def _wake_next(self, principal: str) -> None:
        """Wake the first call that still waits, now or in time; the next one when that one's work is charged."""
        loop = asyncio.get_running_loop()
        delay_ns = self.shares.wait_ns(self.shares.account(principal))
        if delay_ns > 0:
            loop.call_later(min(delay_ns * 1e-9, _LOOK_AGAIN_S), self._wake_next, principal)
            return
        waiting = self._waiting[principal]
        waiting.wake_one()
        if waiting.num_calls:
            loop.call_soon(self._wake_next, principal)  # runs after the call that was woken
        else:
            del self._waiting[principal]


class _Waiting:
    """The calls of one principal that wait: in turn between flows, in arrival order within one.

    Invariant: no flow is empty, and ``num_calls`` is the sum of their lengths.
    """

    __slots__ = ("_flows", "num_calls")

    def __init__(self) -> None:
        self._flows: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self.num_calls = 0

    def add(self, flow: str, future: asyncio.Future[None]) -> None:
        """Add a call at the end of its flow."""
        self._flows.setdefault(flow, deque()).append(future)
        self.num_calls += 1

    def wake_one(self) -> None:
        """Let one call go on, and leave out those that nobody awaits any more."""
        while self._flows:
            flow, futures = self._flows.popitem(last=False)
            future = futures.popleft()
            self.num_calls -= 1
            if futures:
                self._flows[flow] = futures
            if not future.done():
                future.set_result(None)
                return


@dataclass(frozen=True, slots=True)
class _Turn:
    """Whose turns the call under way takes."""

    taker: TurnTaker
    principal: str


# Each call runs in a task of its own and so in a context of its own: a value set there ends with the call.
_TURN: Final[ContextVar[_Turn | None]] = ContextVar("ferrule_turn", default=None)


def take_turns(taker: TurnTaker, principal: str) -> None:
    """Have the call under way, and the tasks it starts, take the turns of a principal."""
    _TURN.set(_Turn(taker, principal))


async def turn() -> None:
    """Wait until the call under way may begin a piece of work; at once where nobody is to be waited for."""
    mine = _TURN.get()
    if mine is not None:
        await mine.taker.turn(mine.principal)


@types.coroutine
def metered(coroutine: Coroutine[Any, Any, _T], shares: Shares) -> Generator[Any, Any, _T]:
    """Run a coroutine of a call and charge the time it holds the event loop to its principal.

    Nothing is measured while only one principal is active. Any: what its futures yield and are sent passes through.
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
    """Start a task of the call under way, metered as the call itself is."""
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
        """Let others go first if this request has been worked on for a slice since the last time."""
        if time.monotonic_ns() - self._begun_ns < SLICE_NS:
            return
        await asyncio.sleep(0)  # what was done is charged here
        await turn()
        self._begun_ns = time.monotonic_ns()
