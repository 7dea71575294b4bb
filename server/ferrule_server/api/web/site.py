"""The answers of the HTTP side: a fixed table of paths. No request makes the server read a file."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Final

from ferrule_server.api.web.events import Events

TEXT: Final = "text/plain; charset=utf-8"
EVENT_STREAM: Final = "text/event-stream; charset=utf-8"
METHODS: Final = ("GET", "HEAD")

Metrics = Callable[[str], Awaitable[tuple[str, bytes]]]
"""Returns the content type and the text of the metrics, for the value of an Accept header."""

_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_FETCHED: Final = ("same-origin", "none")
"""Values of Sec-Fetch-Site for requests that no other site has caused."""


@dataclass(frozen=True, slots=True)
class Request:
    """The parts of a request that the answer depends on.

    Attributes:
        method: As it was sent.
        path: Without the query.
        headers: By lower-case name; the first value of a header that is repeated.
    """

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """A response.

    Attributes:
        status: The HTTP status.
        content_type: Type of the body.
        body: The whole body; empty for an event stream.
        headers: Further headers.
        is_stream: The messages of the events follow for as long as the client listens.
    """

    status: int
    content_type: str = TEXT
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    is_stream: bool = False


def refusal(status: int, message: str, **headers: str) -> Answer:
    """Return an error as one line of text."""
    return Answer(status, body=f"{message}\n".encode(), headers=headers)


_NO_PAGE: Final = (
    "not found; there is /metrics. The page /ui is off, as it is by default where callers need credentials, "
    "because it asks for none: start the server with --ui on to serve it"
)


class Site:
    """Answers requests.

    Args:
        metrics: Renders the answer to ``/metrics``.
        events: The messages of ``/ui/events``; None: there is no page.
        host: Where the listener listens; ``Host`` headers are compared with it.
    """

    def __init__(self, metrics: Metrics, events: Events | None, host: str) -> None:
        self._metrics = metrics
        self.events = events
        self._host = host.lower()
        self._files = _page_files() if events is not None else {}

    async def answer(self, request: Request) -> Answer:
        """Return the answer to a request; an error is an answer too."""
        if not self._is_for_us(request):
            return refusal(403, "ask for this machine by its address; a proxy in front must send Host: localhost")
        if request.method not in METHODS:
            return refusal(405, "only GET and HEAD are served", Allow=", ".join(METHODS))
        if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
            return refusal(413, "a request has no body here")
        if request.path == "/":
            return Answer(302, headers={"Location": "metrics" if self.events is None else "ui"})
        if request.path == "/metrics":
            return Answer(200, *await self._metrics(request.headers.get("accept", "")))
        return self._page(request)

    def _page(self, request: Request) -> Answer:
        if self.events is not None and request.path == "/ui/events":
            if request.headers.get("sec-fetch-site", "none") not in _FETCHED:
                return refusal(403, "another site's page may not watch")
            return Answer(200, EVENT_STREAM, headers={"X-Accel-Buffering": "no"}, is_stream=True)
        if self.events is not None and request.path == "/ui/":
            return Answer(302, headers={"Location": "../ui"})
        found = self._files.get(request.path)
        if found is None:
            return refusal(404, "not found; there is /metrics and /ui" if self.events is not None else _NO_PAGE)
        return Answer(200, *found)

    def _is_for_us(self, request: Request) -> bool:
        """Whether the Host header names this machine, rather than a web site whose name resolves to it.

        Otherwise any site could let its own name resolve to 127.0.0.1, or to an address inside the reader's network,
        and read what the page reads: the browser would take both for one site. Programs that send no Host header are
        not browsers. Scrapers use any name, so metrics are strict only where this machine alone can reach them.
        """
        host = request.headers.get("host")
        if host is None:
            return True
        name = _name_of(host)
        if name == self._host:
            return True
        if _is_loopback(self._host):
            return name == "localhost" or _is_loopback(name)
        return not request.path.startswith("/ui") or "." not in name or _is_address(name)


def _name_of(host: str) -> str:
    """Return a Host header without its port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _is_loopback(host: str) -> bool:
    return _is_address(host) and ipaddress.ip_address(host).is_loopback


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _page_files() -> dict[str, tuple[str, bytes]]:
    """Return content type and bytes of every file of the page by its path, read once."""
    folder = resources.files("ferrule_server.api.web") / "page"
    files = {
        f"/ui/{file.name}": (_TYPES[kind], file.read_bytes())
        for file in folder.iterdir()
        if (kind := file.name.rpartition(".")[2]) in _TYPES
    }
    files["/ui"] = files.pop("/ui/index.html")
    return files
