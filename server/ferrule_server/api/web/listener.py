"""A small HTTP/1.1 server on a thread with an event loop of its own, bounded in every direction."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import errno
import http.server
import io
import logging
import re
import socket
import threading
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

from ferrule_server.addresses import ListenAddress, cannot_listen
from ferrule_server.api.web.events import TooManyWatchers
from ferrule_server.api.web.site import Answer, Request, Site, refusal

_LOG = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 64
"""Most at a time. If all are in use, a new one takes the place of the one that has waited longest for its client to
send. If none waits, the new one is answered 503 at once."""
HEAD_S: Final = 10.0
"""How long a request may take to arrive, from the connection on; a byte now and then does not extend it."""
MAX_HEAD_BYTES: Final = 16 << 10
SEND_S: Final = 10.0
"""How long a client may take to read one answer, or one message of a stream; a slower client is disconnected."""

_RETRY: Final = b"retry: 1000\n\n"
"""How soon a browser reconnects when the stream has ended, in milliseconds: soon after a restart."""
_LINGER_S: Final = 1.0
_CLOSE_S: Final = 2.0
_LAST_READ_S: Final = 0.5
_ROOM_S: Final = 0.5
_RECEIVE_BYTES: Final = 4096
_END: Final = re.compile(rb"\n\r?\n")
_LONGEST_END: Final = 3
_EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_EXHAUSTED_S: Final = 0.1
_SECURITY: Final = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_FULL: Final = refusal(503, "too many connections", **{"Retry-After": "1"})


class _BadHead(Exception):
    """The bytes that arrived are not a request that can be answered.

    Attributes:
        answer: The refusal.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.answer = refusal(status, message)


@dataclass(eq=False, slots=True)
class _Connection:
    """One connection.

    Attributes:
        client: The socket, which does not block.
        host: Address of the client.
        is_given_up: Another connection takes its place.
        task: Serves it.
    """

    client: socket.socket
    host: str
    is_given_up: bool = False
    task: asyncio.Task[None] = field(init=False)


class WebListener:
    """Serves a site on one address, with one request per connection.

    Invariant: no connection is refused while another one waits for its client to send. A client that sends nothing, or
    slowly, therefore holds a place only as long as no other client needs it. A request that has arrived is always
    answered: a connection that is given up is read to its end first.

    Args:
        address: Where to listen; not a unix socket.
        site: Answers the requests.

    Attributes:
        address: Where it listens, with the chosen port if it was 0.

    Raises:
        ConfigError: The address is in use, or cannot be bound.
    """

    def __init__(self, address: ListenAddress, site: Site) -> None:
        self._site = site
        try:
            self._socket = _bound(address)
        except (OSError, UnicodeError) as error:
            raise cannot_listen(address.target, error, "--metrics-listen") from error
        self.address = ListenAddress(host=address.host, port=self._socket.getsockname()[1])
        self._open: set[_Connection] = set()
        self._waiting: dict[_Connection, None] = {}  # for their clients to send; the first has waited longest
        self._refused: dict[_Connection, None] = {}
        self._closing = asyncio.Event()
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._thread = threading.Thread(target=self._main, name="ferrule-web", daemon=True)

    def start(self) -> None:
        """Answer requests from now on."""
        self._runner.get_loop()
        self._thread.start()

    def close(self) -> None:
        """Free the address, end streams, and let answers under way finish for a moment. Blocks until done."""
        if self._thread.is_alive():
            self._runner.get_loop().call_soon_threadsafe(self._closing.set)
            self._thread.join(_CLOSE_S)
        self._socket.close()

    def _main(self) -> None:
        with self._runner:
            self._runner.run(self._run())

    async def _run(self) -> None:
        """Serve until :meth:`close`, then give clients a moment to read; what is left is cancelled with the loop."""
        self._listen()
        making = [asyncio.create_task(self._site.events.run())] if self._site.events is not None else []
        await self._closing.wait()
        asyncio.get_running_loop().remove_reader(self._socket)
        for task in (*making, *(connection.task for connection in (*self._waiting, *self._refused))):
            task.cancel()
        if tasks := [connection.task for connection in self._open]:
            await asyncio.wait(tasks, timeout=_LAST_READ_S)

    def _listen(self) -> None:
        if not self._closing.is_set():
            asyncio.get_running_loop().add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        """Take one connection; the next one is taken when it is known whether this one has a place."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket)
        try:
            client, (host, *_) = self._socket.accept()
        except OSError as error:
            loop.call_later(_EXHAUSTED_S if error.errno in _EXHAUSTED else 0.0, self._listen)
            return
        client.setblocking(False)
        connection = _Connection(client, host)
        connection.task = loop.create_task(self._connected(connection))
        connection.task.add_done_callback(lambda _: client.close())

    async def _connected(self, connection: _Connection) -> None:
        """Serve one connection."""
        try:
            has_place = await self._take_place(connection)
            self._listen()
            await (self._serve(connection) if has_place else self._refuse(connection))
        except OSError:
            pass  # the client is gone or too slow
        except Exception:  # noqa: BLE001  (logged; the connection is closed)
            _LOG.exception("request failed")
        finally:
            self._open.discard(connection)
            self._waiting.pop(connection, None)
            self._refused.pop(connection, None)

    async def _take_place(self, connection: _Connection) -> bool:
        """Give a connection a place, if need be that of the one that has waited longest; False: there is none.

        Only reading is shut down on the other one: what has arrived can still be read and answered.
        """
        if len(self._open) >= MAX_CONNECTIONS:
            longest = next(iter(self._waiting), None)
            if longest is None:
                return False
            del self._waiting[longest]
            longest.is_given_up = True
            with contextlib.suppress(OSError):  # its client may be gone already
                longest.client.shutdown(socket.SHUT_RD)
            await asyncio.wait([longest.task], timeout=_ROOM_S)
        has_place = len(self._open) < MAX_CONNECTIONS
        if has_place:
            self._open.add(connection)
            self._waiting[connection] = None
        return has_place

    async def _refuse(self, connection: _Connection) -> None:
        """Answer 503. At most as many refused clients are waited for as there are places."""
        if len(self._refused) >= MAX_CONNECTIONS:
            next(iter(self._refused)).task.cancel()
        self._refused[connection] = None
        await self._send(connection, _encoded(_FULL))
        await _linger(connection.client)

    async def _serve(self, connection: _Connection) -> None:
        """Read one request and answer it; once the request is there the connection keeps its place."""
        try:
            head = await _read_head(connection.client)
            self._waiting.pop(connection, None)
            request = _parsed(head) if head else None
        except _BadHead as bad:
            await self._reply(connection, bad.answer)
            return
        if request is not None:
            await self._reply(connection, await self._answer(request), is_head=request.method == "HEAD")
        elif connection.is_given_up:
            await self._send(connection, _encoded(_FULL))

    async def _answer(self, request: Request) -> Answer:
        try:
            return await self._site.answer(request)
        except Exception:  # noqa: BLE001  (the client gets an answer and the log the cause)
            _LOG.exception("not answered path=%r", request.path[:80])
            return refusal(500, "something failed here; the log says what")

    async def _reply(self, connection: _Connection, answer: Answer, *, is_head: bool = False) -> None:
        _LOG.debug("http client=%s status=%d", connection.host, answer.status)
        if answer.is_stream and not is_head:
            await self._stream(connection, answer)
            return
        await self._send(connection, _encoded(answer, is_head=is_head))
        if answer.status >= HTTPStatus.BAD_REQUEST:
            self._waiting[connection] = None
            await _linger(connection.client)

    async def _stream(self, connection: _Connection, answer: Answer) -> None:
        assert self._site.events is not None, "only a site with events answers with a stream"
        try:
            with self._site.events.watch() as messages:
                await self._send(connection, _encoded(answer) + _RETRY)
                async for message in messages:
                    await self._send(connection, message)
        except TooManyWatchers:
            await self._reply(connection, refusal(503, "too many pages watch already", **{"Retry-After": "5"}))

    async def _send(self, connection: _Connection, data: bytes) -> None:
        """Send bytes.

        Raises:
            OSError: The client is gone, or did not read them in time.
        """
        async with asyncio.timeout(SEND_S):
            await asyncio.get_running_loop().sock_sendall(connection.client, data)


async def _read_head(client: socket.socket) -> bytes:
    """Return the request line and the headers, up to the empty line; empty if the client ends before.

    Raises:
        _BadHead: They are too slow, too long, or not HTTP at all.
    """
    head = bytearray()
    try:
        async with asyncio.timeout(HEAD_S):
            while chunk := await asyncio.get_running_loop().sock_recv(client, _RECEIVE_BYTES):
                head += chunk
                if not head[:1].isalpha():
                    raise _BadHead(400, "this port speaks plain HTTP/1.1")
                found = _END.search(head, max(0, len(head) - len(chunk) - _LONGEST_END))
                if found is not None and found.end() <= MAX_HEAD_BYTES:
                    return bytes(head[: found.end()])
                if len(head) > MAX_HEAD_BYTES:
                    raise _BadHead(431, f"the request line and headers may take {MAX_HEAD_BYTES} bytes")
    except TimeoutError:
        raise _BadHead(408, "the request did not arrive in time") from None
    return b""


async def _linger(client: socket.socket) -> None:
    """Let a client that still sends read the refusal: closing with unread bytes would discard it."""
    client.shutdown(socket.SHUT_WR)
    async with asyncio.timeout(_LINGER_S):
        while await asyncio.get_running_loop().sock_recv(client, 1 << 16):
            pass


class _Head(http.server.BaseHTTPRequestHandler):
    """The head of a request, read by the parser of the standard library."""

    protocol_version = "HTTP/1.1"

    def __init__(self, head: bytes) -> None:  # not that of the base class, which serves a connection
        self.rfile = io.BufferedReader(io.BytesIO(head))
        self.raw_requestline = self.rfile.readline()
        self.parse_request()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """Raise the refusal; ``message`` could repeat what was sent."""
        raise _BadHead(code, HTTPStatus(code).phrase)

    def handle_expect_100(self) -> bool:
        """Promise nothing: bodies are refused."""
        return True


def _parsed(head: bytes) -> Request:
    """Return the request of a head.

    Raises:
        _BadHead: It is malformed.
    """
    parsed = _Head(head)
    headers = {name.lower(): str(value) for name, value in reversed(parsed.headers.items())}  # the first value counts
    if parsed.request_version == "HTTP/1.1" and "host" not in headers:
        raise _BadHead(400, "HTTP/1.1 requests have a Host header")
    return Request(parsed.command, parsed.path.partition("?")[0], headers)


def _encoded(answer: Answer, *, is_head: bool = False) -> bytes:
    """Return an answer as it is sent, without the body if the request was HEAD."""
    headers = {
        "Server": "ferrule",
        "Date": email.utils.formatdate(usegmt=True),
        "Content-Type": answer.content_type,
        **({} if answer.is_stream else {"Content-Length": str(len(answer.body))}),
        **_SECURITY,
        **answer.headers,
        "Connection": "close",
    }
    lines = (f"{name}: {value}\r\n" for name, value in headers.items())
    status = f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\n"
    return f"{status}{''.join(lines)}\r\n".encode() + (b"" if is_head else answer.body)


def _bound(address: ListenAddress) -> socket.socket:
    """Return a listening socket."""
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, where = found[0]
    listening = socket.create_server(where, family=family, backlog=MAX_CONNECTIONS)
    listening.setblocking(False)
    return listening
