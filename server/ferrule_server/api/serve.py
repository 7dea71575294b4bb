"""The gRPC server around the servicers: binding, health, draining."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ferrule.v1 import admin_pb2, admin_pb2_grpc, executor_pb2, executor_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc
from ferrule_server.addresses import ListenAddress, cannot_listen
from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.responses.view import Views
from ferrule_server.api.rpc.handlers import Registrar
from ferrule_server.api.rpc.intake import Intake
from ferrule_server.api.rpc.observe import Observer
from ferrule_server.api.rpc.state import Phase, ServerState, Serving
from ferrule_server.api.security.auth import Access
from ferrule_server.api.security.tls import TlsFiles
from ferrule_server.api.services.admin import AdminServicer
from ferrule_server.api.services.executor import ModelExecutorServicer
from ferrule_server.api.services.health import HealthServicer
from ferrule_server.api.services.tokenizer import TokenizerServicer
from ferrule_server.api.unix_socket import SocketPath
from ferrule_server.errors import Draining

_LOG = logging.getLogger(__name__)

SERVICES: Final = (
    executor_pb2.DESCRIPTOR.services_by_name["ModelExecutorService"].full_name,
    tokenizer_pb2.DESCRIPTOR.services_by_name["TokenizerService"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
)
"""Full names of the services; health reports each of them, and ``""`` for the server."""

_REPLY_SLACK_BYTES: Final = 1 << 20
_LOOKAHEAD_BYTES: Final = 4 << 10
_POLL_S: Final = 0.02
_REFRESH_S: Final = 1.0
"""How often the token file is checked; a withdrawn token is refused within about this time."""
_QUIET_S: Final = 0.2
"""A stream that has been idle for this long is ended once no live sequence is waited for. It is longer than the pause
of a client between two frames of a loop."""
_ANSWERS_S: Final = 2.0
"""How long a server that takes no more calls waits for the answers to those it has taken."""
_AGAIN_S: Final = 0.1
"""A client that calls within this time after the last answer still gets DRAINING."""


def server_options(limits: ApiLimits) -> list[tuple[str, int]]:
    """Return the channel arguments of the server, each for a measured reason.

    so_reuseport: two servers would share a port silently, and handles belong to one of them. keepalive: the server
    pings each client every 5 s and waits 5 s for the answer, so that a frozen or disconnected client is noticed within
    10 s rather than in minutes. ping_timeout is another limit on the same answer, 60 s unless set. A client may ping
    every 10 s, also on an idle connection; one that pings more often gets ENHANCE_YOUR_CALM and is disconnected.

    compression_enabled_algorithms_bitset: compressed messages are refused, because the limit on the size of a message
    must hold before it is inflated.

    max_pending_requests: beyond it gRPC answers CANCELLED to any caller, so there is room for all calls of the 12
    connections that strangers may have.

    bdp_probe and lookahead_bytes: these keep what a stream may send before a call reads it small; otherwise gRPC lets
    it grow with the bandwidth. While a message is read its stream may send all of it, so a large message takes one
    round trip longer. Clients queue calls beyond max_concurrent_streams.
    """
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", limits.max_request_bytes),
        ("grpc.max_send_message_length", limits.max_reply_bytes + _REPLY_SLACK_BYTES),
        ("grpc.max_concurrent_streams", limits.max_streams_per_connection),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        ("grpc.server.max_pending_requests", 3072),
        ("grpc.server.max_pending_requests_hard_limit", 4096),
        ("grpc.compression_enabled_algorithms_bitset", 1),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", _LOOKAHEAD_BYTES),
        ("grpc.keepalive_time_ms", 5_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ]


class ApiServer:
    """Serves the contract on one address. All methods run on the event loop.

    Args:
        state: Shared by all servicers.
        access: Decides who may call.
        has_reflection: Serve gRPC reflection too.
        drain_grace_s: How long a draining server serves live handles, unless a call sets another time.
        observers: See every call of every service, besides ``state.calls``.

    Attributes:
        asked_to_stop: Set when the process is to drain and end.
        grace_s: How long a draining server serves live handles, as set last.
        views: The views of the server for live displays.
    """

    def __init__(
        self,
        state: ServerState,
        access: Access,
        *,
        has_reflection: bool = False,
        drain_grace_s: float = 25.0,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.state = state
        self.asked_to_stop = asyncio.Event()
        self.views = Views(state)
        self._drain_grace_s = drain_grace_s
        self.grace_s = 0.0
        self._grace_end_s = 0.0
        self._closing: asyncio.Task[None] | None = None
        self._access = access
        self._refreshing: asyncio.Task[None] | None = None
        self._health = HealthServicer(("", *SERVICES))
        self._server = grpc.aio.server(options=server_options(state.limits))
        self._socket_path: SocketPath | None = None
        self._has_callers = False
        self._intake = Intake(state)
        registrar = Registrar(self._server, state, access, self._intake, (state.calls, *observers))
        typed = cast("grpc.aio.Server", registrar)  # what the generated functions call of it
        executor_pb2_grpc.add_ModelExecutorServiceServicer_to_server(ModelExecutorServicer(state), typed)
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(TokenizerServicer(state), typed)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(
            AdminServicer(state, self.views, self.begin_drain, self.ask_to_stop), typed
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, typed)
        if has_reflection:
            _add_reflection(typed)

    def bind(self, address: ListenAddress, tls: TlsFiles | None = None) -> ListenAddress:
        """Bind the address and return it, with the chosen port if it was 0. No connection is accepted yet.

        Args:
            address: Where to listen.
            tls: The certificates; None: plain text.

        Raises:
            ConfigError: The address is in use, or cannot be bound.
        """
        if address.path is not None:
            self._socket_path = SocketPath(address.path)
            usual = os.umask(0o177)  # the socket is the owner's from its first moment
            try:
                self._add_port(address, tls)
            finally:
                os.umask(usual)
            return address
        _check_free(address)
        self._intake.port = self._add_port(address, tls)
        return ListenAddress(host=address.host, port=self._intake.port)

    async def start(self) -> None:
        """Accept calls; until :meth:`ready` all methods but GetStatus and health answer STARTING."""
        await self._server.start()
        self._refreshing = asyncio.create_task(self._refresh_access())

    async def ready(self, serving: Serving) -> None:
        """Enter the phase READY and report SERVING."""
        self.state.ready(serving)
        self._health.set_status(health_pb2.HealthCheckResponse.SERVING)

    def begin_drain(self, grace_s: float | None) -> None:
        """Refuse new prompts with DRAINING and serve live handles for ``grace_s`` seconds, then refuse every call.

        The process keeps running. Another call replaces the grace that is running. A server that has closed stays
        closed.
        """
        self._set_grace(self._drain_grace_s if grace_s is None else grace_s)
        _LOG.info("drain asked for live_sequences=%d grace_s=%.1f", self.state.num_sequences, self.grace_s)
        self._refuse_new()
        if self._closing is None:
            self._closing = asyncio.create_task(self._close_in_time())

    def ask_to_stop(self, grace_s: float | None) -> None:
        """Set :attr:`asked_to_stop`, whose owner calls :meth:`drain`; the grace replaces one that is running."""
        self._set_grace(self._drain_grace_s if grace_s is None else grace_s)
        self.asked_to_stop.set()

    async def drain(self, grace_s: float | None = None, *, has_failed: bool = False) -> None:
        """Refuse new prompts with DRAINING and serve live handles until the grace is over; then no call is left.

        All calls on live handles are served during the grace: appends, forks, keep-alives, open and new streams, on
        open and new connections. Returns as soon as no call is left, and no live sequence that ends with the process.
        When the grace is over, no more calls are taken, those that were taken are answered, and open streams end with
        DRAINING. After a fault
        (``has_failed``) there is nothing to serve.

        Args:
            grace_s: The grace from now on; None: as set last.
            has_failed: The device is lost.
        """
        if grace_s is not None:
            self._set_grace(grace_s)
        if has_failed:
            self.state.phase = Phase.FAILED
            self._health.set_status(health_pb2.HealthCheckResponse.NOT_SERVING)
        else:
            self._refuse_new()
            await self._until(lambda: self._is_over() or self._end_unused_streams())
        await self._finish()

    def _set_grace(self, seconds: float) -> None:
        """Serve live handles for so many seconds from now."""
        self.grace_s = seconds
        self._grace_end_s = time.monotonic() + seconds

    def _is_over(self) -> bool:
        """Whether the grace is over, or the server takes no more calls."""
        return time.monotonic() >= self._grace_end_s or self.state.phase is Phase.CLOSING

    def _refuse_new(self) -> None:
        """Take no new prompts from now on and report NOT_SERVING; a closed server stays closed."""
        if self.state.phase is Phase.READY:
            self.state.phase = Phase.DRAINING
        self._health.set_status(health_pb2.HealthCheckResponse.NOT_SERVING)

    async def _close_in_time(self) -> None:
        """Take no more calls once the grace is over, and end open streams when they are answered."""
        await self._until(self._is_over)
        await self._finish()

    async def _finish(self) -> None:
        """Take no more calls, and end open streams when they are answered."""
        if self.state.phase is Phase.DRAINING:
            self.state.phase = Phase.CLOSING
            if self.grace_s and (num_sequences := self.state.num_ending):
                _LOG.warning("grace over live_sequences=%d grace_s=%.1f", num_sequences, self.grace_s)
                self._has_callers = True
        await self._until(self._end_answered_streams, _ANSWERS_S)
        self._has_callers |= not self._end_answered_streams()
        self.state.end_streams(Draining())

    async def _until(self, holds: Callable[[], bool], timeout_s: float = math.inf) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not holds() and loop.time() < deadline:
            await asyncio.sleep(_POLL_S)

    def _end_unused_streams(self) -> bool:
        """End quiet streams once no live sequence and no call is left; return whether nothing is left to serve."""
        state = self.state
        if state.num_ending or state.num_active:
            return False
        state.end_streams(Draining(), _QUIET_S)
        return not state.streams

    def _end_answered_streams(self) -> bool:
        """End the streams that have answered everything; return whether all calls are answered."""
        self.state.end_streams(Draining(), 0.0)
        return not (self.state.num_active or self.state.streams)

    async def stop(self) -> None:
        """Close the listener, let the last answers leave, and free the address; further calls change nothing.

        Calls whose step outlived the drain are answered when the engine closes, just before this. This method waits for
        them, and for the next call of their clients and of those with handles that outlived the grace: after it, gRPC
        answers CANCELLED, which does not say whether to try again.
        """
        self._health.stop()
        if self._has_callers:
            await self._until(self._end_answered_streams, _ANSWERS_S)
            await asyncio.sleep(_AGAIN_S)
            self._has_callers = False
        for task in (self._refreshing, self._closing):
            if task is not None:
                task.cancel()
        self._refreshing = self._closing = None
        await self._server.stop(grace=0.2)
        if self._socket_path is not None:
            self._socket_path.release()
            self._socket_path = None

    async def _refresh_access(self) -> None:
        """Apply changes of the token file until cancelled, off the event loop: its file system may be slow."""
        while True:
            await asyncio.sleep(_REFRESH_S)
            try:
                await asyncio.to_thread(self._access.refresh)
            except Exception:  # noqa: BLE001  (logged; tokens that are withdrawn later must still be refused)
                _LOG.exception("tokens not read")
            self.state.end_withdrawn_streams()

    def _add_port(self, address: ListenAddress, tls: TlsFiles | None) -> int:
        try:
            if tls is not None:
                return self._server.add_secure_port(address.target, tls.credentials())
            port: int = self._server.add_insecure_port(address.target)
        except RuntimeError as error:
            raise cannot_listen(address.target, error) from error
        return port


def _add_reflection(server: grpc.aio.Server) -> None:
    from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

    names = (*SERVICES, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflection.aio.ReflectionServicer(names), server)


def _check_free(address: ListenAddress) -> None:
    """Bind every address of the host once: gRPC accepts if one of several works, and says little if all fail."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, where in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
    except OSError as error:
        raise cannot_listen(address.target, error) from error
