"""Puts the HTTP side together by the settings, and says in the log what it opens to whom."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from ferrule.v1 import admin_pb2
from ferrule_server.api.responses.view import Views
from ferrule_server.api.rpc.state import ServerState
from ferrule_server.api.telemetry.metrics import Exposition
from ferrule_server.api.web.events import Events
from ferrule_server.api.web.listener import WebListener
from ferrule_server.api.web.message import VIEW_REQUEST, PageMessage
from ferrule_server.api.web.shared_render import SharedRender
from ferrule_server.api.web.site import Metrics, Site
from ferrule_server.config import ListenAddress, ServerConfig

_LOG = logging.getLogger(__name__)

_ASK_S: Final = 5.0
_OPENMETRICS: Final = "application/openmetrics-text"


def listener_of(config: ServerConfig, address: ListenAddress, state: ServerState, views: Views) -> WebListener:
    """Return what serves metrics and, if it is wanted, the page, bound and not started yet.

    Called on the event loop, whose views the page shows.

    Raises:
        ConfigError: The address is in use, or cannot be bound.
    """
    events = Events(PageMessage(state, _asking(views, asyncio.get_running_loop()))) if config.has_ui else None
    listener = WebListener(address, Site(_metrics(state), events, address.host))
    _LOG.info("metrics address=%s ui=%s", listener.address.target, "on" if config.has_ui else "off")
    if not address.is_local:
        what = "the metrics, and at /ui who uses the server and how" if config.has_ui else "the metrics"
        _LOG.warning("insecure: everybody who can reach %s can read %s", listener.address.target, what)
    return listener


def _asking(views: Views, loop: asyncio.AbstractEventLoop) -> Callable[[], admin_pb2.ServerView]:
    """Return what gets a view from the event loop for a thread of its own."""

    def ask() -> admin_pb2.ServerView:
        future = asyncio.run_coroutine_threadsafe(views.view(VIEW_REQUEST), loop)
        try:
            return future.result(_ASK_S)
        finally:
            future.cancel()

    return ask


def _metrics(state: ServerState) -> Metrics:
    """Return what answers scrapes in one of two formats, each rendered once for all who ask at a time."""
    exposition = Exposition(state)
    plain = SharedRender(exposition.render)
    openmetrics = SharedRender(lambda: exposition.render(_OPENMETRICS))
    return lambda accept: (openmetrics if _OPENMETRICS in accept else plain).get()
