"""Turns on the event loop, between principals and within one large request, by their shares of the host's time.

The batcher shares out rows. All other work for a request (parsing, planning, refusing and answering on the event loop;
judging and host calls on the engine thread) is measured here, per principal::

    event loop     charge(principal, ns) --.
    engine thread  add_host_work(...) -----+--> Account.ahead: when its next piece of work may begin
    engine thread  add_service(...) -------'    demand of each principal: how much the others have to leave

A principal that is alone is never held back, and nothing is measured. While several are active, each may use the larger
of a part of an equal share and the time that the others leave over. The limit may be exceeded by one piece of work,
which is worked off before the next one.

Every call runs inside :func:`metered`, which measures its work on the event loop and charges it to its principal.
Before a piece of work (parsing a message, a slice of a large one) the call waits for its :func:`turn`. A principal that
has used more than its share waits until the others have caught up; then one of its calls continues, in arrival order.

    read --> turn --> parse, plan --> turn --> plan --> submit ... engine ... --> turn --> write
             '------ charged ------'  '-- charged ---'                            '- charged'
"""

from __future__ import annotations

import asyncio
import time
import types
from collections.abc import Callable, Coroutine, Generator, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from ferrule_server.fairness.bucket import Bucket
from ferrule_server.fairness.queue import FairQueue

_T = TypeVar("_T")

_WINDOW_NS: Final = 100_000_000
"""Demands are measured over windows of this length."""
_ACTIVE_NS: Final = 1_000_000_000
"""A principal counts as active for this long after its last request or step."""
_BURST_NS: Final = 1_000_000
"""Work that a principal within its share may do at once before it has to wait."""
_APPEND_NS: Final = 50_000
"""Work on the event loop and the engine thread that belongs to a request with an append; it is not charged."""
_PART: Final = 0.5
"""Part of an equal share that work without rows may take: it holds the interpreter, which the engine needs too."""
_LEAST_DEMAND: Final = 0.01
"""Share of the time below which a principal is not counted when the time is divided equally."""
_RECHECK_S: Final = 0.02
"""Longest time between two checks: a principal that waits may have become the only one."""
SLICE_NS: Final = 1_000_000
"""Work on one request before others get their turn."""


@dataclass(eq=False, slots=True)
class Account:
    """The time that one principal has used.

    Attributes:
        principal: Owner of the account.
        seen_ns: When its last request came.
        ahead: The time that its work takes at its share, beyond the time that has passed, in nanoseconds. Its next
            piece of work may begin when it is within a burst.
        loop_ns: Work on the event loop in this window. engine_ns: running sum of work on the engine thread, including
            steps that served it; written by the engine thread only. engine_read_ns: how much of it the event loop has
            counted in a window; host_read_ns: how much of ``host_ns`` it has charged.
        host_ns: Running sum of the engine's host work, less what belongs to appends; written by the engine thread only.
        demand: Share of the time of the last windows in which the server worked for it, from 0 to 1.
        rate: Share of the time that its work may take.
    """

    principal: str
    seen_ns: int
    ahead: Bucket = field(default_factory=Bucket)
    loop_ns: int = 0
    engine_ns: int = 0
    engine_read_ns: int = 0
    host_ns: int = 0
    host_read_ns: int = 0
    demand: float = 0.0  # unknown: a new principal takes nothing from others before it is measured
    rate: float = 1.0


class Shares:
    """Accounts of all active principals.

    The methods :meth:`add_host_work` and :meth:`add_service` are called on the engine thread, all others on the event
    loop's thread. Each field has one writer, and the dictionary is only read as a copy, so there is no lock.

    Invariant: ``is_contended`` exactly while at least two accounts are kept, as of the last request or window. Accounts
    that are idle for a second are forgotten.

    Args:
        clock: Monotonic nanoseconds.

    Attributes:
        is_contended: Several principals are active; read from any thread.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self.is_contended = False
        self._accounts: dict[str, Account] = {}
        self._window_from_ns = clock()

    # ---- on the event loop ------------------------------------------------------------------------------------------

    def account(self, principal: str) -> Account:
        """Return the account of a principal that sends a request now."""
        now_ns = self._clock()
        account = self._accounts.get(principal)
        if account is None:
            account = self._accounts[principal] = Account(principal, now_ns)
            self._divide()
        account.seen_ns = now_ns
        if now_ns - self._window_from_ns >= _WINDOW_NS:
            self._end_window(now_ns)
        return account

    def charge(self, principal: str, work_ns: int) -> None:
        """Count work that was done on the event loop for a principal."""
        account = self._accounts.get(principal)
        if account is not None and self.is_contended:
            account.loop_ns += work_ns
            account.ahead.pour(work_ns / account.rate, self._clock())

    def wait_ns(self, account: Account) -> int:
        """Return how long the principal's next piece of work has to wait; 0 or less: it may begin."""
        now_ns = self._clock()
        if now_ns - self._window_from_ns >= _WINDOW_NS:
            self._end_window(now_ns)
        if not self.is_contended:
            return 0
        if (host_ns := account.host_ns) != account.host_read_ns:
            account.ahead.pour((host_ns - account.host_read_ns) / account.rate, now_ns)
            account.host_read_ns = host_ns
        return int(account.ahead.settle(now_ns)) - _BURST_NS

    # ---- on the engine thread ---------------------------------------------------------------------------------------

    def add_host_work(self, principal: str, work_ns: int) -> None:
        """Count work of the engine for a principal, apart from rows."""
        account = self._accounts.get(principal)
        if account is not None:
            account.host_ns += work_ns
            account.engine_ns += work_ns

    def add_service(self, appends: Iterable[tuple[str, bool]], elapsed_ns: int) -> None:
        """Count a step for the principals that have rows in it: each with its full time, undivided.

        The step is not charged. Each append that a request asked for accounts for some work for it and its reply.

        Args:
            appends: Of each append in the step its principal, and whether it is that of a request. Those that a
                Generate makes for its next tokens are not.
            elapsed_ns: Duration of the step.
        """
        num_requests: dict[str, int] = {}
        for principal, is_asked in appends:  # a Counter takes ten times as long for one
            num_requests[principal] = num_requests.get(principal, 0) + is_asked
        for name, count in num_requests.items():  # the client of a long Generate sends nothing more
            account = self._accounts.get(name) or self._accounts.setdefault(name, Account(name, self._clock()))
            account.engine_ns += elapsed_ns
            account.host_ns -= count * _APPEND_NS

    # ---- inner ------------------------------------------------------------------------------------------------------

    def _end_window(self, now_ns: int) -> None:
        """Measure the work for each principal since the last window, forget idle ones, and divide again."""
        length_ns = now_ns - self._window_from_ns
        self._window_from_ns = now_ns
        for account in list(self._accounts.values()):
            engine_ns = account.engine_ns
            busy_ns = account.loop_ns + engine_ns - account.engine_read_ns
            account.loop_ns, account.engine_read_ns = 0, engine_ns
            account.demand = min(1.0, 0.5 * account.demand + 0.5 * busy_ns / length_ns)
            if not busy_ns and now_ns - account.seen_ns > _ACTIVE_NS and account.ahead.settle(now_ns) <= _BURST_NS:
                del self._accounts[account.principal]
        self._divide()

    def _divide(self) -> None:
        """Give each principal the larger of an equal share and what the demands of the others leave."""
        accounts = list(self._accounts.values())
        total = sum(account.demand for account in accounts)
        num_counted = sum(account.demand > _LEAST_DEMAND for account in accounts)
        for account in accounts:
            num_others = num_counted - (account.demand > _LEAST_DEMAND)
            account.rate = max(_PART / (1 + num_others), 1.0 - (total - account.demand))
        self.is_contended = len(accounts) > 1


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

    async def rest(self) -> None:
        """Pause for as long as the work took, whatever its principal has had: where others wait for this request.

        A step takes the interpreter many times, and waits for it each time if the event loop never lets go.
        """
        used_ns = time.monotonic_ns() - self._begun_ns
        if used_ns >= SLICE_NS:
            await asyncio.sleep(used_ns * 1e-9)
            self._begun_ns = time.monotonic_ns()
