"""Slows callers without valid credentials: their refusals wait longer and longer, and then their connection ends.

    refused --> pause: 10 ms, doubled up to 1 s --> UNAUTHENTICATED
           |--> many of its connection wait     --> UNAUTHENTICATED
           '--> too many of its connection came --> held for 10 s --> the connection is shut down

A client that opens each refused call again soon has too many, and one that connects again as soon as its connection
has ended can do so once in 10 s. Of many connections one ends each second, so that they do not all begin again at once.

gRPC cannot end a connection, but it names the client's address, by which this process finds its own socket.

A proxy sends the calls of many clients over one connection. So a connection is never ended while a call with valid
credentials is under way on it or has lately been, and no refusal is held there, since each keeps a stream from others.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final, TypeVar

from ferrule_server.fairness.places import Places

_T = TypeVar("_T")

_LOG = logging.getLogger(__name__)

FIRST_S: Final = 0.01
"""Pause before the first refusal of a connection."""
LONGEST_S: Final = 1.0
"""Longest pause."""
MAX_WAITING: Final = 16
"""Refusals that may wait on one connection. Further calls are refused without a pause."""
MAX_REFUSED: Final = 64
"""Refused calls of one connection after which further ones are held."""
MAX_HELD: Final = 256
"""Further calls after which a connection ends at once: as many as can be open, so the client cancels what is held."""
HELD_S: Final = 10.0
"""How long a connection lasts after its first call that is held. If it ended at once, its client would connect again
with hundreds of new calls, which costs more than to hold them."""
APART_S: Final = 1.0
"""The time between the ends of two connections, unless many wait for theirs: none waits longer than twice HELD_S."""
QUIET_S: Final = 10.0
"""Refusals are forgotten this long after the last one."""
SHARED_S: Final = 60.0
"""A connection counts as shared for this long after its last call with valid credentials."""
MAX_REMEMBERED: Final = 1024
"""Connections that are remembered, of those without a call under way."""


@dataclass(slots=True)
class _Refused:
    """The refused calls of one connection.

    Attributes:
        num_calls: All of them.
        places: For those that wait for their pause.
        seen_s: When the last one came.
        ending: Ends the connection; None until a call is held.
    """

    num_calls: int = 0
    places: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_WAITING))
    seen_s: float = 0.0
    ending: asyncio.Task[None] | None = None


@dataclass(slots=True)
class Strangers:
    """Decides how long each refusal waits, and ends connections. For one thread.

    Invariant: ``_open`` counts the calls under way with valid credentials. Besides these, at most ``MAX_REMEMBERED``
    connections with valid and as many with refused calls are remembered; the latter cannot displace the former.

    Attributes:
        hang_up: Ends the connection from an address; returns whether it could.
        clock: Monotonic seconds.
        sleep: Waits for so many seconds.
    """

    hang_up: Callable[[str], Awaitable[bool]]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _open: Places = field(default_factory=Places)
    _lately: OrderedDict[str, float] = field(default_factory=OrderedDict)
    _refused: OrderedDict[str, _Refused] = field(default_factory=OrderedDict)
    _last_end_s: float = 0.0

    @contextmanager
    def admitted(self, peer: str) -> Iterator[None]:
        """Count a call with valid credentials as under way on its connection."""
        self._open.take(peer)
        try:
            yield
        finally:
            self._open.give_back(peer)
            if peer not in self._open.held:
                _remember(self._lately, peer, self.clock())

    async def pause(self, peer: str) -> None:
        """Wait before a call is refused. If its connection is ended meanwhile, gRPC cancels the call."""
        refused = self._count(peer)
        if refused.num_calls > MAX_REFUSED and not self._is_shared(peer):
            await self._hold(refused, peer)
        elif not refused.places.locked():
            async with refused.places:
                await self.sleep(min(LONGEST_S, FIRST_S * 2.0 ** min(refused.num_calls - 1, MAX_REFUSED)))

    async def _hold(self, refused: _Refused, peer: str) -> None:
        """Hold a call until its connection is ended, which happens also if the client cancels the call."""
        is_over = refused.num_calls > MAX_REFUSED + MAX_HELD
        if refused.ending is None or is_over:
            refused.ending = asyncio.create_task(self._end(refused, peer, 0.0 if is_over else self._delay_s()))
        await asyncio.wait([refused.ending])

    def _delay_s(self) -> float:
        """Return how long to hold a connection, so that it ends after those that are held already."""
        now_s = self.clock()
        self._last_end_s = min(max(self._last_end_s + APART_S, now_s + HELD_S), now_s + 2 * HELD_S)
        return self._last_end_s - now_s

    async def _end(self, refused: _Refused, peer: str, delay_s: float) -> None:
        """Forget a connection and end it, unless it came to be shared. The next one from its address is a new one."""
        await self.sleep(delay_s)
        if self._refused.get(peer) is refused:
            del self._refused[peer]
            if not self._is_shared(peer) and await self.hang_up(peer):
                _LOG.warning("ended peer=%s: %d calls without valid credentials", peer, refused.num_calls)
                await self.sleep(LONGEST_S)

    def _is_shared(self, peer: str) -> bool:
        return peer in self._open.held or self.clock() - self._lately.get(peer, -math.inf) < SHARED_S

    def _count(self, peer: str) -> _Refused:
        """Count a refused call, and return those of its connection."""
        refused = self._refused.get(peer)
        if refused is None or self.clock() - refused.seen_s > QUIET_S:
            refused = _Refused()
        _remember(self._refused, peer, refused)
        refused.num_calls += 1
        refused.seen_s = self.clock()
        return refused


def hang_up(peer: str, port: int) -> bool:
    """Shut down the connection of this process from an address; gRPC then closes it as if the client had.

    With a thousand connections this takes tens of milliseconds: not for the event loop. Two connections have one name
    if the client reached two addresses of this machine from one port; then neither is ended.

    Args:
        peer: The address as gRPC writes it: ``ipv4:192.0.2.1:41234`` or ``ipv6:[2001:db8::1]:41234``.
        port: The port that this process listens at.

    Returns:
        Whether it was ended. Clients of a Unix socket have no addresses, and a connection may have been closed.
    """
    with suppress(OSError):  # no descriptor is left
        found = [int(fd) for fd in os.listdir("/dev/fd") if _is_from(int(fd), peer, port)]  # noqa: PTH208  (numbers)
        return len(found) == 1 and _is_from(found[0], peer, port, shuts_down=True)
    return False


def _is_from(fd: int, peer: str, port: int, *, shuts_down: bool = False) -> bool:
    """Return whether a file descriptor is the connection from an address, and shut it down if that is wanted.

    Its owner is another thread, which may close it at any time. A duplicate stays what it is while it is compared.
    """
    with suppress(OSError), ExitStack() as stack:  # no socket, or closed in the meantime
        own_fd = os.dup(fd)
        stack.callback(os.close, own_fd)
        connection = socket.socket(fileno=own_fd)
        stack.callback(connection.detach)
        if connection.getsockname()[1:2] == (port,) and _name_of(*connection.getpeername()) == peer:
            if shuts_down:
                connection.shutdown(socket.SHUT_RDWR)
            return True
    return False


def _name_of(host: str, port: int, *_: int) -> str:
    """Return an address as gRPC writes it: IPv4 within IPv6 is IPv4. Addresses with a scope are not found."""
    host = host.removeprefix("::ffff:")
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def _remember(known: OrderedDict[str, _T], peer: str, value: _T) -> None:
    """Keep a value as the newest, and forget the oldest ones beyond the limit."""
    known[peer] = value
    known.move_to_end(peer)
    if len(known) > MAX_REMEMBERED:
        known.popitem(last=False)
