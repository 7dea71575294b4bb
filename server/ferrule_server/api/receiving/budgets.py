"""Budgets for receiving requests: the memory of a message while it arrives, and the time to wait for it.

gRPC reserves room for a whole message as soon as a call reads it. A call is therefore judged by its metadata first and
reads afterwards, with a permit::

    metadata --> admitted? --> permit --> read one message --> size --> turn --> parse
                                 '---- max_request_bytes ----'  '- its bytes -'

Calls with credentials share one budget by principal (:class:`ReceiveBudget`). Health needs no credentials, so its calls
share another by connection (:class:`ProbeBudget`); the messages of honest clients are tiny there and arrive at once.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Generic, TypeVar

from ferrule_server.errors import QueueFull, RequestTimeout
from ferrule_server.fairness.places import Places

_T = TypeVar("_T")
_Key = TypeVar("_Key")

_LOG = logging.getLogger(__name__)

PROBE_TIMEOUT_S: Final = 1.0
"""How long the message of a Health call is awaited while no other call waits to read one."""
PROBE_PATIENCE_S: Final = 0.01
"""How long a Health call that holds a permit may await its message while others wait for the permit."""
_PATIENCE: Final = 1 / 6
"""The part of its time limit that a message of a call with credentials has while others wait."""
_PROBES_AT_ONCE: Final = 3
_MAX_PROBES: Final = 256
"""Most Health calls that wait for a permit, of all connections."""
_MAX_PROBES_OF_ONE: Final = 32
"""The same for one connection; a proxy sends the probes of many clients over one."""
_MAX_LATE: Final = 1024
"""Most connections that are remembered as late with a message."""
_RETRY_S: Final = 0.1
_WATCH_S: Final = 0.01
"""How often the memory is measured while messages take that long to arrive."""
_PROBE_BYTES: Final = 16 << 20
"""Memory for the messages of Health calls while they arrive."""
_PAGE_BYTES: Final = mmap.PAGESIZE


def resident_bytes() -> int:
    """Return the resident memory of the process; 0 if the system does not report it."""
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123  (20 us less than Path, a hundred times a second)
            return int(file.read().split()[1]) * _PAGE_BYTES
    except OSError:
        return 0


@dataclass(eq=False, slots=True)
class _Readings:
    """Reads under way, each with a time limit that becomes shorter when another call waits for its room.

    gRPC compares a message with its limit only when all of it has arrived, so a message may claim, and send, gigabytes.
    While reads take long, the memory of the process is measured. If it grows by more than the reads may take, they are
    ended.

    Attributes:
        timeout_s: How long a message is awaited.
        patience_s: How long a message is awaited while others wait.
        max_bytes: Memory for messages while they arrive.
        memory: Returns the memory of the process, in bytes.
    """

    timeout_s: float
    patience_s: float
    max_bytes: int
    memory: Callable[[], int] = resident_bytes
    _least_bytes: int | None = None
    _watch: asyncio.TimerHandle | None = None
    _under_way: dict[asyncio.Timeout, float] = field(default_factory=dict)

    async def read(self, read: Callable[[], Awaitable[_T]], *, others_wait: bool) -> _T:
        """Return what ``read`` returns.

        Raises:
            RequestTimeout: The read took too long.
        """
        begun_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self.patience_s if others_wait else self.timeout_s) as deadline:
                self._under_way[deadline] = begun_s
                if self._watch is None:
                    self._watch = asyncio.get_running_loop().call_later(_WATCH_S, self._look)
                try:
                    return await read()
                finally:
                    del self._under_way[deadline]
        except TimeoutError:
            raise RequestTimeout(self.timeout_s) from None

    def hurry(self) -> None:
        """Shorten the time limit of every read: another call waits."""
        for deadline, begun_s in self._under_way.items():
            soon_s, when_s = begun_s + self.patience_s, deadline.when()
            if when_s is not None and soon_s < when_s and not deadline.expired():
                deadline.reschedule(soon_s)

    def _look(self) -> None:
        """Compare the memory of the process with its least value since the reads under way take long."""
        loop = asyncio.get_running_loop()
        oldest_s = min(self._under_way.values(), default=None)
        self._watch = None
        if oldest_s is None:
            self._least_bytes = None
            return
        self._watch = loop.call_later(_WATCH_S, self._look)
        if loop.time() - oldest_s < _WATCH_S:
            self._least_bytes = None
            return
        now_bytes = self.memory()
        self._least_bytes = now_bytes if self._least_bytes is None else min(self._least_bytes, now_bytes)
        if now_bytes - self._least_bytes > self.max_bytes:
            _LOG.warning(
                "message given up awaited=%d grown_bytes=%d", len(self._under_way), now_bytes - self._least_bytes
            )
            self._end_oldest()

    def _end_oldest(self) -> None:
        """End the oldest read; the next measurement ends another one unless the memory has fallen."""
        deadline = min(self._under_way, key=lambda each: self._under_way[each])
        if not deadline.expired():
            deadline.reschedule(asyncio.get_running_loop().time())


class _Waiting(Generic[_Key]):
    """Calls that wait for a permit, by the key of their turn. The newest call of a key is first.

    Invariant: every key has a call, and each call either waits here, has a permit, or was refused or cancelled.
    """

    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls: dict[_Key, dict[asyncio.Future[None], None]] = {}

    async def wait(self, key: _Key, give_back: Callable[[], None]) -> None:
        """Wait for a permit; if the call is cancelled when it has just been given one, call ``give_back``."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.calls.setdefault(key, {})[future] = None
        try:
            await future
        except asyncio.CancelledError:
            if future.cancelled():
                self._forget(key, future)
            elif future.exception() is None:
                give_back()
            raise

    def take(self, key: _Key, *, oldest: bool = False) -> asyncio.Future[None] | None:
        """Take out the newest call of a key, or the oldest, whose future the caller must set; None: none waits."""
        while key in self.calls:
            calls = self.calls[key]
            future = next(iter(calls) if oldest else reversed(calls))
            self._forget(key, future)
            if not future.done():
                return future
        return None

    def _forget(self, key: _Key, future: asyncio.Future[None]) -> None:
        calls = self.calls.get(key, {})
        calls.pop(future, None)
        if not calls:
            self.calls.pop(key, None)


class ReceiveBudget:
    """The bytes of requests until they are parsed, shared by principal.

    A principal may hold at most as much as is left (:class:`~ferrule_server.fairness.places.Places`), but always one
    request. Other calls wait: the principal that holds least goes first, and the newest call of each principal. While
    calls wait, messages that have been awaited for long are given up, so a client that sends none delays others of its
    principal for that long at most.

    Invariant: room is given only within the budget. The real size of a request may overdraw the budget; then no room is
    given until enough is returned.

    Args:
        total_bytes: The budget.
        request_bytes: The room of a request that is not read yet.
        timeout_s: How long a message is awaited.
    """

    def __init__(self, total_bytes: int, request_bytes: int, timeout_s: float) -> None:
        total_bytes = max(total_bytes, request_bytes)
        self._bytes = Places(total_bytes)
        self._request_bytes = request_bytes
        self._waiting = _Waiting[str]()
        self._returned = asyncio.Event()
        self._readings = _Readings(timeout_s, timeout_s * _PATIENCE, total_bytes)

    async def read(self, principal: str, read: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        """Return what ``read`` returns, None for no message; bytes are held until :meth:`resize` gives them back.

        Raises:
            RequestTimeout: The read took too long.
        """
        await self.acquire(principal)
        kept_bytes = 0
        try:
            data = await self._readings.read(read, others_wait=bool(self._waiting.calls))
            kept_bytes = len(data or b"")
        finally:
            self.resize(principal, self._request_bytes, kept_bytes)
        return data

    async def acquire(self, principal: str) -> None:
        """Take the room of one request that is not read yet; wait until there is room."""
        if principal not in self._waiting.calls and self._bytes.has_room(principal, self._request_bytes):
            self._bytes.take(principal, self._request_bytes)
            return
        self._readings.hurry()
        await self._waiting.wait(principal, partial(self.resize, principal, self._request_bytes, 0))

    async def settled(self) -> None:
        """Wait until no more is held than the budget."""
        while self._bytes.num_free < 0:
            self._returned.clear()
            await self._returned.wait()

    def resize(self, principal: str, held_bytes: int, new_bytes: int) -> None:
        """Hold ``new_bytes`` in place of ``held_bytes``; if that is less, give room to calls that wait."""
        if new_bytes > held_bytes:
            self._bytes.take(principal, new_bytes - held_bytes)
        elif new_bytes < held_bytes:
            self._bytes.give_back(principal, held_bytes - new_bytes)
            self._returned.set()
            if self._waiting.calls:
                self._give_room()

    def _give_room(self) -> None:
        """Give room to calls that wait, beginning with the principal that holds least."""
        for principal in sorted(self._waiting.calls, key=self._bytes.of):
            while self._bytes.has_room(principal, self._request_bytes) and (call := self._waiting.take(principal)):
                self._bytes.take(principal, self._request_bytes)
                call.set_result(None)


class ProbeBudget:
    """Permits for Health calls to read their messages, a few at a time.

    A call that holds a permit and has not sent its message loses it as soon as another call waits for it. A connection
    that was late once is served after all that were not. The newest call is served first, so an earlier flood does not
    delay a probe that arrives now.

    Invariant: at most ``_PROBES_AT_ONCE`` calls read, and no call waits while a permit is free.

    Args:
        timeout_s: How long a message is awaited while no other call waits to read one.
    """

    def __init__(self, timeout_s: float = PROBE_TIMEOUT_S) -> None:
        self._num_free = _PROBES_AT_ONCE
        self._readings = _Readings(timeout_s, PROBE_PATIENCE_S, _PROBE_BYTES)
        self._waiting = _Waiting[bool]()  # by whether the connection was late
        self._waiting_of = Places()  # by connection
        self._late: OrderedDict[str, None] = OrderedDict()

    async def read(self, peer: str, read: Callable[[], Awaitable[_T]]) -> _T:
        """Return what ``read`` returns, once there is a permit.

        Args:
            peer: The connection.
            read: Reads the message.

        Raises:
            QueueFull: Too many calls wait.
            RequestTimeout: The message did not arrive in time.
        """
        await self._enter(peer)
        try:
            return await self._readings.read(read, others_wait=bool(self._waiting.calls))
        except RequestTimeout:
            self._note_late(peer)
            raise
        finally:
            self._leave()

    async def _enter(self, peer: str) -> None:
        """Take a permit."""
        if self._num_free:
            self._num_free -= 1
            return
        if (num_waiting := self._waiting_of.of(peer)) >= _MAX_PROBES_OF_ONE:
            raise QueueFull(num_waiting, _MAX_PROBES_OF_ONE, _RETRY_S)
        if self._waiting_of.num_held >= _MAX_PROBES:
            self._give_up_oldest()
        self._waiting_of.take(peer)
        self._readings.hurry()
        try:
            await self._waiting.wait(peer in self._late, self._leave)
        finally:
            self._waiting_of.give_back(peer)

    def _give_up_oldest(self) -> None:
        """Refuse the call that has waited longest, from connections that were late if there are any."""
        if call := self._waiting.take(True, oldest=True) or self._waiting.take(False, oldest=True):
            call.set_exception(QueueFull(_MAX_PROBES, _MAX_PROBES, _RETRY_S))

    def _leave(self) -> None:
        """Give the permit to the newest call that waits, from connections that were not late first."""
        if call := self._waiting.take(False) or self._waiting.take(True):
            call.set_result(None)
        else:
            self._num_free += 1

    def _note_late(self, peer: str) -> None:
        self._late[peer] = None
        self._late.move_to_end(peer)
        if len(self._late) > _MAX_LATE:
            self._late.popitem(last=False)
