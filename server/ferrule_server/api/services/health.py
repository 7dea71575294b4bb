"""grpc.health.v1.Health: NOT_SERVING, SERVING and NOT_SERVING again, as the phase of the server changes.

It replaces the servicer of grpcio-health-checking: there, the first watcher of a service that disconnects ends the
updates of the others, and a watcher that reads nothing delays every change of status.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ferrule_server.api.rpc.calls import Context, PlainStatus, abort, end_with
from ferrule_server.errors import Draining, QueueFull

_Status = health_pb2.HealthCheckResponse
_MAX_SHOWN_CHARS: Final = 80
MAX_WATCHERS: Final = 1024
"""Most Watch calls at a time; they need no credentials."""
_RETRY_S: Final = 1.0


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the package has no types
    """Reports the status of the server, which is that of each service. All methods run on the event loop.

    Every watcher has an event of its own, so that none can delay another or a change of status.

    Args:
        services: Full names of the services; ``""`` is the server as a whole. Others are unknown.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset(services)
        self._status: int = _Status.NOT_SERVING
        self._is_stopped = False
        self._watchers: set[asyncio.Event] = set()

    def set_status(self, status: int) -> None:
        """Report ``status`` from now on."""
        self._status = status
        self._wake()

    def stop(self) -> None:
        """End every Watch, now and later, with DRAINING, so that watchers learn that the server is gone."""
        self._is_stopped = True
        self._wake()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        """Return the status of one service; NOT_FOUND, as the protocol requires, for an unknown name."""
        if request.service not in self._services:
            shown = request.service[:_MAX_SHOWN_CHARS]
            end_with(PlainStatus(grpc.StatusCode.NOT_FOUND, f"no service {shown!r} here"))
        return _Status(status=self._status)

    async def List(self, request: health_pb2.HealthListRequest, context: Context) -> health_pb2.HealthListResponse:
        """Return the status of the server and of every service."""
        statuses = {service: _Status(status=self._status) for service in self._services}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """Send the status of one service, now and whenever it changes; SERVICE_UNKNOWN for an unknown name."""
        if len(self._watchers) >= MAX_WATCHERS:
            abort(QueueFull(len(self._watchers), MAX_WATCHERS, _RETRY_S))
        news = asyncio.Event()
        self._watchers.add(news)
        try:
            await self._watch(request.service, context, news)
        finally:
            self._watchers.discard(news)
        abort(Draining())

    async def _watch(self, service: str, context: Context, news: asyncio.Event) -> None:
        sent = None
        while not self._is_stopped:
            news.clear()
            status = self._status if service in self._services else _Status.SERVICE_UNKNOWN
            if status != sent:
                await context.write(_Status(status=status))
                sent = status
            await news.wait()

    def _wake(self) -> None:
        for news in self._watchers:
            news.set()
