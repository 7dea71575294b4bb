"""A TCP proxy that cuts connections on purpose: at random places, in both directions, by RST or FIN.

Every connection gets a random number of bytes to live for, counted over both directions. The chunk of bytes in which
it runs out is withheld, forwarded in part (so that a frame is torn), or forwarded whole and given a moment to be acted
on; then both sides are closed. What is drawn depends on the seed and the number of the connection alone.

It can also freeze (nothing is forwarded any more, nobody is told: a partition).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

_CHUNK_BYTES = 1 << 16
_LONGEST_PAUSE_S = 0.004
_RESET = struct.pack("ii", 1, 0)


@dataclass(eq=False)
class Link:
    """One connection through the proxy.

    Attributes:
        chance: Draws everything about it.
        bytes_left: It is cut when they are used up; None: never.
    """

    chance: random.Random
    bytes_left: float | None
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    is_cut: bool = False

    def cut_at(self, num_bytes: int) -> int | None:
        """Count a chunk of bytes; returns where in it the connection is to be cut, or None."""
        if self.bytes_left is None:
            return None
        before, self.bytes_left = self.bytes_left, self.bytes_left - num_bytes
        return int(before) if self.bytes_left < 0 <= before else None


class CuttingProxy:
    """Stands between clients and a server on this machine. Enter it to start, leave it to close every connection.

    Args:
        port: Of the server; may be changed while it runs (``port`` is where new connections go).
        seed: Of all that is drawn.
        mean_bytes: Mean number of bytes, both directions together, after which a connection is cut. None: never.

    Attributes:
        cuts: How many, by (direction, place, kind), such as ("up", "middle", "rst").
        num_connections: Connections taken.
    """

    def __init__(self, port: int, *, seed: int = 0, mean_bytes: float | None = None) -> None:
        self.port = port
        self.seed = seed
        self.mean_bytes = mean_bytes
        self.cuts: Counter[tuple[str, str, str]] = Counter()
        self.num_connections = 0
        self._links: set[Link] = set()

    def __enter__(self) -> CuttingProxy:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cutting-proxy", daemon=True)
        self._thread.start()
        self._run(self._open())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def target(self) -> str:
        """The address for clients."""
        return f"127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    @property
    def num_cuts(self) -> int:
        """Connections cut so far."""
        return self.cuts.total()

    def freeze(self) -> None:
        """Forward nothing from now on: neither bytes nor the ends of connections."""
        self._loop.call_soon_threadsafe(self._flowing.clear)

    def thaw(self) -> None:
        """Forward again, beginning with what was held back."""
        self._loop.call_soon_threadsafe(self._flowing.set)

    def cut_all(self) -> None:
        """Reset every connection there is now."""
        self._run(self._cut_all())

    # ---- on the proxy's loop ----------------------------------------------------------------------------------------

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=20)

    async def _open(self) -> None:
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = await asyncio.start_server(self._take, "127.0.0.1", 0)

    async def _close(self) -> None:
        self._listener.close()
        await self._cut_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _cut_all(self) -> None:
        for link in list(self._links):
            _end(link, is_reset=True)

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection from a client."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.num_connections += 1
        chance = random.Random(f"{self.seed}:{self.num_connections}")
        link = Link(chance, None if self.mean_bytes is None else chance.expovariate(1 / self.mean_bytes), [writer])
        self._links.add(link)
        try:
            with contextlib.suppress(asyncio.CancelledError):  # by _close; Python 3.11's streams would log it
                await self._serve(link, reader, writer)
        finally:
            _end(link, is_reset=False)
            self._links.discard(link)
            self._tasks.discard(task)

    async def _serve(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._flowing.wait()
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return  # nobody listens: the client sees its connection end
        link.writers.append(up_writer)
        await asyncio.gather(self._pump(link, "up", reader, up_writer), self._pump(link, "down", up_reader, writer))

    async def _pump(
        self, link: Link, direction: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Forward one direction until it ends or the connection is cut."""
        with contextlib.suppress(OSError):
            while (data := await reader.read(_CHUNK_BYTES)) and not link.is_cut:
                await self._flowing.wait()
                at = link.cut_at(len(data))
                if at is not None:
                    await self._cut(link, direction, data, at, writer)
                    return
                writer.write(data)
                await writer.drain()
            await self._flowing.wait()
        _end(link, is_reset=False)

    async def _cut(self, link: Link, direction: str, data: bytes, at: int, writer: asyncio.StreamWriter) -> None:
        place = link.chance.choice(("before", "middle", "after"))
        kind = link.chance.choice(("rst", "fin"))
        if place != "before":
            writer.write(data[:at] if place == "middle" else data)
            await writer.drain()
            await asyncio.sleep(link.chance.uniform(0, _LONGEST_PAUSE_S))
        if not link.is_cut:
            self.cuts[direction, place, kind] += 1
        _end(link, is_reset=kind == "rst")


def _end(link: Link, *, is_reset: bool) -> None:
    """Close both sides of a connection."""
    link.is_cut = True
    for writer in link.writers:
        sock = writer.get_extra_info("socket")
        if is_reset and sock is not None and sock.fileno() >= 0:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()
        else:
            writer.close()
