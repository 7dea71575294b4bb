"""Builds the HTTP side from the settings, and logs which clients can reach it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, Generic, TypeVar

from ferrule.v1 import admin_pb2
from ferrule_server.addresses import ListenAddress
from ferrule_server.api.responses.view import Views
from ferrule_server.api.rpc.state import ServerState
from ferrule_server.api.telemetry.metrics import Exposition
from ferrule_server.api.web.events import VIEW_REQUEST, Events, PageMessage
from ferrule_server.api.web.listener import WebListener
from ferrule_server.api.web.site import Metrics, Site
from ferrule_server.config import ServerConfig

_T = TypeVar("_T")

_LOG = logging.getLogger(__name__)

_VIEW_S: Final = 5.0
_OPENMETRICS: Final = "application/openmetrics-text"
_REST: Final = 9.0
"""Pause after a rendering, as a multiple of its duration, so that rendering takes at most a tenth of one core."""
_MAX_REST_S: Final = 0.5
"""Longest pause, so that one slow rendering does not delay the next one for long."""


def listener_of(config: ServerConfig, address: ListenAddress, state: ServerState, views: Views) -> WebListener:
    """Return the listener for the metrics and, if the settings enable it, the page. It is bound but not started.

    Call it on the event loop of ``views``.

    Raises:
        ConfigError: The address is in use, or cannot be bound.
    """
    events = Events(PageMessage(state, _reader(views, asyncio.get_running_loop()))) if config.has_ui else None
    listener = WebListener(address, Site(_metrics(state), events, address.host))
    _LOG.info("metrics address=%s ui=%s", listener.address.target, "on" if config.has_ui else "off")
    if not address.is_local:
        what = "the metrics, and at /ui who uses the server and how" if config.has_ui else "the metrics"
        _LOG.warning("insecure: everybody who can reach %s can read %s", listener.address.target, what)
    return listener


def _reader(views: Views, loop: asyncio.AbstractEventLoop) -> Callable[[], Coroutine[Any, Any, admin_pb2.ServerView]]:
    """Return a function that gets a view from ``loop`` while another event loop awaits it."""

    async def read() -> admin_pb2.ServerView:
        view = asyncio.run_coroutine_threadsafe(views.view(VIEW_REQUEST), loop)
        return await asyncio.wait_for(asyncio.wrap_future(view), _VIEW_S)

    return read


def _metrics(state: ServerState) -> Metrics:
    """Return a function that renders the metrics in the format that an Accept header asks for."""
    exposition = Exposition(state)
    plain = SharedRender(exposition.render)
    openmetrics = SharedRender(lambda: exposition.render(_OPENMETRICS))
    return lambda accept: (openmetrics if _OPENMETRICS in accept else plain).get()


class SharedRender(Generic[_T]):
    """Renders for all callers that wait at the same time. Used on one event loop.

    Invariant: each caller gets a rendering that began after its call. One rendering runs at a time, and renderings take
    at most a tenth of the time, however many callers there are.

    Args:
        render: Returns the rendering. What it raises reaches the callers that share the rendering.
    """

    def __init__(self, render: Callable[[], _T]) -> None:
        self._render = render
        self._next: asyncio.Task[_T] | None = None
        self._rest_until = 0.0

    async def get(self) -> _T:
        """Return a rendering that began after this call."""
        if self._next is None:
            self._next = asyncio.create_task(self._render_next())
        return await asyncio.shield(self._next)

    async def _render_next(self) -> _T:
        await asyncio.sleep(self._rest_until - time.monotonic())
        self._next = None
        began = time.monotonic()
        try:
            return self._render()
        finally:
            ended = time.monotonic()
            self._rest_until = ended + min(_REST * (ended - began), _MAX_REST_S)
