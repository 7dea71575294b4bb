"""What the HTTP side answers: a fixed table, nothing is ever looked up on a disk by what a request says."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Final

from ferrule_server.api.web.events import Events

TEXT: Final = "text/plain; charset=utf-8"
EVENT_STREAM: Final = "text/event-stream; charset=utf-8"
METHODS: Final = ("GET", "HEAD")

Metrics = Callable[[str], tuple[str, bytes]]
"""Returns the content type and the text of the metrics, for the value of an Accept header."""

_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_FETCHED: Final = ("same-origin", "none")
"""What a browser says of a request that another site had no part in."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request, as far as it matters.

    Attributes:
        method: As it was sent.
        path: Without the query.
        headers: By lower-case name; of one that came twice the first.
    """

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """What is sent back.

    Attributes:
        status: The HTTP status.
        content_type: Of the body.
        body: All of it; of an event stream nothing.
        headers: Further ones.
        is_stream: The messages of the events follow, for as long as the client listens.
    """

    status: int
    content_type: str = TEXT
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    is_stream: bool = False


def refusal(status: int, message: str, **headers: str) -> Answer:
    """Return an error as one line of text."""
    return Answer(status, body=f"{message}\n".encode(), headers=headers)


class Site:
    """Answers requests; callable from any thread.

    Args:
        metrics: What ``/metrics`` answers.
        events: What ``/ui/events`` streams; None: there is no page.
        host: Where it listens; requests from this machine's browsers are told apart by it.
    """

    def __init__(self, metrics: Metrics, events: Events | None, host: str) -> None:
        self._metrics = metrics
        self.events = events
        self._host = host.lower()
        self._files = _page_files() if events is not None else {}

    def answer(self, request: Request) -> Answer:
        """Return what a request is answered with; an error is an answer too."""
        if not self._is_for_us(request):
            return refusal(403, "ask for this machine by its address; a proxy in front must send Host: localhost")
        if request.method not in METHODS:
            return refusal(405, "only GET and HEAD are served", Allow=", ".join(METHODS))
        if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
            return refusal(413, "a request has no body here")
        if request.path == "/":
            return Answer(302, headers={"Location": "metrics" if self.events is None else "ui"})
        if request.path == "/metrics":
            return Answer(200, *self._metrics(request.headers.get("accept", "")))
        return self._page(request)

    def _page(self, request: Request) -> Answer:
        if self.events is not None and request.path == "/ui/events":
            if request.headers.get("sec-fetch-site", "none") not in _FETCHED:
                return refusal(403, "another site's page may not watch")
            return Answer(200, EVENT_STREAM, headers={"X-Accel-Buffering": "no"}, is_stream=True)
        found = self._files.get(request.path)
        if found is None:
            return refusal(404, "not found; there is /metrics" + (" and /ui" if self.events is not None else ""))
        return Answer(200, *found)

    def _is_for_us(self, request: Request) -> bool:
        """Whether the Host header can be trusted to name this machine, and no web site whose name leads here.

        Else any site could have its own name resolve to 127.0.0.1, or to an address inside the reader's network, and
        read what the page reads: to the browser it would be one site. Programs without a Host header are no browsers.
        Scrapers use whatever name there is, so metrics are strict only where nobody but this machine reaches them.
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
    """Return content type and bytes of every file of the page by its path, as they were installed."""
    folder = resources.files("ferrule_server.api.web") / "page"
    files = {
        f"/ui/{file.name}": (_TYPES[kind], file.read_bytes())
        for file in folder.iterdir()
        if (kind := file.name.rpartition(".")[2]) in _TYPES
    }
    files["/ui"] = files.pop("/ui/index.html")
    return files
