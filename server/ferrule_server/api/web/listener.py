"""A small HTTP/1.1 server on threads of its own, bounded in every direction; the event loop never waits for it."""

from __future__ import annotations

import collections
import contextlib
import errno
import http.server
import io
import logging
import socket
import socketserver
import threading
import time
from email.message import Message
from http import HTTPStatus
from typing import Any, Final

from ferrule_server.api.web.events import TooManyWatchers
from ferrule_server.api.web.request_head import HEAD_S, BadHead, read_head
from ferrule_server.api.web.site import Answer, Request, Site, refusal
from ferrule_server.config import ListenAddress
from ferrule_server.errors import ConfigError

_LOG = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 64
SEND_S: Final = 10.0
"""How long a client may take to read one answer, or one message of a stream; one that is slower is dropped."""

_RETRY: Final = b"retry: 1000\n\n"
"""How soon a browser comes back when the stream has ended, in milliseconds: soon after a restart."""
_POLL_S: Final = 0.05
_LINGER_S: Final = 1.0
_CLOSE_S: Final = 2.0
_LAST_READ_S: Final = 0.5
_ROOM_S: Final = 0.5
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
_FULL: Final = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: text/plain; charset=utf-8\r\nRetry-After: 1\r\n"
    b"Content-Length: 21\r\nConnection: close\r\n\r\ntoo many connections\n"
)


class WebListener:
    """Serves a site on one address. One request per connection; each has a thread while it lasts.

    Args:
        address: Where to listen; no unix socket.
        site: What is answered.
        max_connections: Most at a time. If all are in use, a new one takes the place of the one that has kept the
            server waiting longest for its request; if none does, the new one is answered 503 at once.
        head_s: How long a request may take to arrive.
        send_s: How long an answer may take to be read.

    Attributes:
        address: Where it listens, with the port chosen where it was 0.

    Raises:
        ConfigError: The address is in use, or cannot be bound.
    """

    def __init__(
        self,
        address: ListenAddress,
        site: Site,
        *,
        max_connections: int = MAX_CONNECTIONS,
        head_s: float = HEAD_S,
        send_s: float = SEND_S,
    ) -> None:
        self._site = site
        try:
            self._server = _Server(address, site, max_connections, head_s, send_s)
        except (OSError, UnicodeError) as error:
            raise _unusable(address, error) from error
        self.address = ListenAddress(host=address.host, port=self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="ferrule-web", daemon=True
        )

    def start(self) -> None:
        """Answer requests from now on."""
        if self._site.events is not None:
            self._site.events.start()
        self._thread.start()

    def close(self) -> None:
        """Free the address, end streams, and give answers under way a moment. Blocks until done."""
        if self._thread.is_alive():
            self._server.shutdown()
        if self._site.events is not None:
            self._site.events.close()
        self._server.server_close()
        self._server.end_connections(_CLOSE_S)


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Takes connections, at most so many at a time.

    Invariant: no connection is refused while another one waits for its client to send. A client that sends nothing, or
    slowly, therefore holds a place only as long as nobody else needs it. A request that has arrived is always answered:
    a connection that is given up is read to its end first.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, address: ListenAddress, site: Site, max_connections: int, head_s: float, send_s: float) -> None:
        self.site = site
        self.head_s = head_s
        self.send_s = send_s
        self._max_connections = max_connections
        self._ended = threading.Condition()
        self._open: set[socket.socket] = set()
        self._waiting: dict[socket.socket, None] = {}  # for their clients to send; the first has waited longest
        self._given_up: set[socket.socket] = set()
        self._refused: collections.deque[tuple[float, socket.socket]] = collections.deque()
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, where = found[0]
        super().__init__(where, _Handler)  # type: ignore[arg-type]  # an IPv6 address has four parts

    def get_request(self) -> tuple[Any, Any]:
        """Take a connection; without descriptors or memory for it wait a moment, or the loop would spin."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in _EXHAUSTED:
                time.sleep(_EXHAUSTED_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread; if there are too many connections, give up one that waits, or refuse this one."""
        with self._ended:
            has_room = len(self._open) < self._max_connections or self._make_room()
            if has_room:
                self._open.add(request)
                self._waiting[request] = None
        if not has_room:
            self._refuse(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no more threads
            self._forget(request)
            self._refuse(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, then have room for another connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def has_come(self, connection: socket.socket) -> None:
        """Keep the place of a connection from now on: its request has arrived."""
        with self._ended:
            self._waiting.pop(connection, None)

    def waits(self, connection: socket.socket) -> None:
        """Let a connection be given up from now on: its client has been answered, and may still send."""
        with self._ended:
            self._waiting[connection] = None

    def is_given_up(self, connection: socket.socket) -> bool:
        """Return whether another connection took the place of this one."""
        with self._ended:
            return connection in self._given_up

    def service_actions(self) -> None:
        """Close refused connections a moment later: with unread bytes, closing would take the answer back."""
        while self._refused and (self._refused[0][0] < time.monotonic() or len(self._refused) > self._max_connections):
            self._refused.popleft()[1].close()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002  (of the base class)
        """Log what nobody expected; the connection is closed."""
        _LOG.exception("request failed")

    def server_close(self) -> None:
        """Free the address."""
        super().server_close()
        while self._refused:
            self._refused.popleft()[1].close()

    def end_connections(self, timeout_s: float) -> None:
        """Hang up on whoever has not been answered, soon on whoever reads too slowly too; wait for the threads."""
        with self._ended:
            for how, patience_s in ((socket.SHUT_RD, _LAST_READ_S), (socket.SHUT_RDWR, timeout_s - _LAST_READ_S)):
                for connection in self._open:
                    with contextlib.suppress(OSError):
                        connection.shutdown(how)
                self._ended.wait_for(lambda: not self._open, patience_s)

    def _make_room(self) -> bool:
        """Give up the connection that has waited longest, and return whether there is room; the lock is held.

        Only reading is shut down: what has arrived can still be read, and a request that is whole is answered.
        """
        longest = next(iter(self._waiting), None)
        if longest is None:
            return False
        del self._waiting[longest]
        self._given_up.add(longest)
        with contextlib.suppress(OSError):
            longest.shutdown(socket.SHUT_RD)
        return self._ended.wait_for(lambda: len(self._open) < self._max_connections, _ROOM_S)

    def _forget(self, request: socket.socket) -> None:
        with self._ended:
            self._open.discard(request)
            self._waiting.pop(request, None)
            self._given_up.discard(request)
            self._ended.notify_all()

    def _refuse(self, request: socket.socket) -> None:
        with contextlib.suppress(OSError):
            request.setblocking(False)
            request.send(_FULL)
            request.shutdown(socket.SHUT_WR)
        self._refused.append((time.monotonic() + _LINGER_S, request))


class _Handler(http.server.BaseHTTPRequestHandler):
    """Reads one request and answers it."""

    protocol_version = "HTTP/1.1"
    server: _Server

    def handle(self) -> None:
        """Answer one request; who is too slow or gone is dropped without a word."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            try:
                head = read_head(self.connection, self.server.head_s)
            except BadHead as error:
                self._refuse_head(error)
                return
            self.server.has_come(self.connection)
            self.connection.settimeout(self.server.send_s)
            if head:
                self._handle_head(head)
            elif self.server.is_given_up(self.connection):
                self.connection.sendall(_FULL)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Send an error of the base class, which parses the request line, in our form."""
        self.command = ""  # a body, whatever was asked
        self._send(refusal(code, message or explain or HTTPStatus(code).phrase))

    def handle_expect_100(self) -> bool:
        """Promise nothing: bodies are refused."""
        return True

    def version_string(self) -> str:
        """Tell no versions."""
        return "ferrule"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (the name of the base class)
        """Log at DEBUG; what comes from the client is quoted."""
        _LOG.debug("http client=%s line=%r", self.client_address[0], format % args)

    def _handle_head(self, head: bytes) -> None:
        self.rfile = io.BufferedReader(io.BytesIO(head))
        self.raw_requestline = self.rfile.readline()
        if not self.parse_request():
            return
        if self.request_version == "HTTP/1.1" and self.headers.get("Host") is None:
            self._send(refusal(400, "HTTP/1.1 requests have a Host header"))
            return
        try:
            answer = self.server.site.answer(Request(self.command, self.path.partition("?")[0], _lower(self.headers)))
        except Exception:  # noqa: BLE001  (whatever it is, the client gets an answer and the log the cause)
            _LOG.exception("not answered path=%r", self.path[:80])
            answer = refusal(500, "something failed here; the log tells what")
        self._send(answer)

    def _send(self, answer: Answer) -> None:
        if answer.is_stream and self.command != "HEAD":
            self._send_stream(answer)
            return
        headers = {} if answer.is_stream else {"Content-Length": str(len(answer.body))}
        self._send_head(answer, headers)
        if self.command != "HEAD":
            self.wfile.write(answer.body)
        self._linger(answer)

    def _send_stream(self, answer: Answer) -> None:
        events = self.server.site.events
        assert events is not None
        try:
            with events.watch() as messages:
                self._send_head(answer, {})
                self.wfile.write(_RETRY)
                for message in messages:
                    self.wfile.write(message)
        except TooManyWatchers:
            self._send(refusal(503, "too many watch already", **{"Retry-After": "5"}))

    def _send_head(self, answer: Answer, headers: dict[str, str]) -> None:
        self.request_version = self.protocol_version  # else one that could not be read gets no head at all
        self.send_response(answer.status)
        for name, value in {
            "Content-Type": answer.content_type,
            **headers,
            **_SECURITY,
            **answer.headers,
            "Connection": "close",
        }.items():
            self.send_header(name, value)
        self.end_headers()

    def _linger(self, answer: Answer) -> None:
        """Let a client that still sends read why it is refused: closing with unread bytes would take that back."""
        if answer.status < HTTPStatus.BAD_REQUEST:
            return
        self.connection.shutdown(socket.SHUT_WR)
        self.server.waits(self.connection)
        deadline = time.monotonic() + _LINGER_S
        while (remaining_s := deadline - time.monotonic()) > 0.0:
            self.connection.settimeout(remaining_s)
            if not self.connection.recv(1 << 16):
                return

    def _refuse_head(self, error: BadHead) -> None:
        self.connection.settimeout(self.server.send_s)
        self.command, self.requestline = "", ""
        self._send(refusal(error.status, error.message))


def _lower(headers: Message) -> dict[str, str]:
    lower: dict[str, str] = {}
    for name, value in headers.items():
        lower.setdefault(name.lower(), str(value))
    return lower


def _unusable(address: ListenAddress, error: Exception) -> ConfigError:
    in_use = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
    hint = "; another server uses it: stop it or choose another port" if in_use else ""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return ConfigError(f"--metrics-listen: cannot listen on {address.target}: {reason}{hint}")
