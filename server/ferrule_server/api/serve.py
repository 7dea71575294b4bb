"""The gRPC server around the servicers: binding, health, draining."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from ferrule.v1 import admin_pb2, admin_pb2_grpc, executor_pb2, executor_pb2_grpc, tokenizer_pb2, tokenizer_pb2_grpc
from ferrule_server.api.admin_service import AdminServicer
from ferrule_server.api.executor_service import ModelExecutorServicer
from ferrule_server.api.handlers import as_server
from ferrule_server.api.limits import ApiLimits
from ferrule_server.api.state import Phase, ServerState, Serving
from ferrule_server.api.tokenizer_service import TokenizerServicer
from ferrule_server.api.unix_socket import SocketPath
from ferrule_server.config import ListenAddress
from ferrule_server.errors import ConfigError, Draining

SERVICES: Final = (
    executor_pb2.DESCRIPTOR.services_by_name["ModelExecutorService"].full_name,
    tokenizer_pb2.DESCRIPTOR.services_by_name["TokenizerService"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
)
"""Full names of the services; health knows each of them and ``""`` for the server."""

_REPLY_SLACK_BYTES: Final = 1 << 20
_POLL_S: Final = 0.02
_QUIET_S: Final = 0.2
"""A stream that has had nothing to do for this long is ended when the server drains: longer than a client in the
middle of a decode loop thinks between two tokens."""
_SHARE_FOR_ANSWERS: Final = 0.25
"""The last part of the grace, in which nothing more is taken and what was taken is answered."""


def server_options(limits: ApiLimits) -> list[tuple[str, int]]:
    """Return the channel arguments of the server, each for a measured reason.

    so_reuseport: two servers would share a port silently, and handles belong to one. ping_timeout: without it a
    frozen client is noticed after 60 s. Pings of clients are taken every 10 s, also on idle connections.
    """
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", limits.max_request_bytes),
        ("grpc.max_send_message_length", limits.max_reply_bytes + _REPLY_SLACK_BYTES),
        ("grpc.max_concurrent_streams", 1024),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.ping_timeout_ms", 5_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ]


class ApiServer:
    """Serves the contract on one address. All methods run on the event loop.

    Args:
        state: Shared by all servicers.
        has_reflection: Serve gRPC reflection too.
    """

    def __init__(self, state: ServerState, *, has_reflection: bool = False) -> None:
        self.state = state
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(options=server_options(state.limits))
        self._socket_path: SocketPath | None = None
        typed = as_server(self._server)
        executor_pb2_grpc.add_ModelExecutorServiceServicer_to_server(ModelExecutorServicer(state), typed)
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(TokenizerServicer(state), typed)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(state), typed)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, typed)
        if has_reflection:
            _add_reflection(self._server)

    def bind(self, address: ListenAddress) -> ListenAddress:
        """Take the address and return it, with the port chosen where it was 0. Nothing is accepted yet.

        Raises:
            ConfigError: The address is in use, or cannot be bound.
        """
        if address.path is not None:
            self._socket_path = SocketPath(address.path)
            with _umask(0o177):  # the socket is the owner's from its first moment
                self._add_port(address)
            return address
        _check_free(address)
        return ListenAddress(host=address.host, port=self._add_port(address))

    async def start(self) -> None:
        """Accept calls; until :meth:`ready` all but GetStatus and health answer STARTING."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.start()

    async def ready(self, serving: Serving) -> None:
        """Serve from now on, and say so."""
        self.state.ready(serving)
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def drain(self, grace_s: float, *, has_failed: bool = False) -> None:
        """Refuse new prompts with DRAINING and serve live handles for up to ``grace_s`` seconds; then nothing runs.

        Returns as soon as no call is under way; quiet streams are ended at once. In the last part of the grace
        nothing more is taken, so that what was taken gets its answer. After a fault (``has_failed``) everything is
        refused.
        """
        self.state.phase = Phase.FAILED if has_failed else Phase.DRAINING
        await self._health.enter_graceful_shutdown()
        await self._until_idle(grace_s * (1 - _SHARE_FOR_ANSWERS), _QUIET_S)
        if not has_failed:
            self.state.phase = Phase.CLOSING
        await self._until_idle(grace_s * _SHARE_FOR_ANSWERS, 0.0)
        self.state.end_streams(Draining())

    async def _until_idle(self, timeout_s: float, quiet_s: float) -> None:
        """Wait until no call and no stream is left, ending streams once they are quiet."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        self.state.end_quiet_streams(quiet_s, Draining())
        while (self.state.num_active or self.state.streams) and loop.time() < deadline:
            await asyncio.sleep(_POLL_S)
            self.state.end_quiet_streams(quiet_s, Draining())

    async def stop(self) -> None:
        """Close the listener, give last answers a moment to leave, and free the address; once is enough."""
        await self._server.stop(grace=0.2)
        if self._socket_path is not None:
            self._socket_path.release()
            self._socket_path = None

    async def _set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in ("", *SERVICES):
            await self._health.set(name, status)

    def _add_port(self, address: ListenAddress) -> int:
        try:
            port: int = self._server.add_insecure_port(address.target)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address.target}: {error}") from error
        return port


def _add_reflection(server: grpc.aio.Server) -> None:
    from grpc_reflection.v1alpha import reflection

    names = (*SERVICES, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)


def _check_free(address: ListenAddress) -> None:
    """Bind every address of the host once: gRPC is content with one of several, and says little when all fail."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, where in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(where)
    except OSError as error:
        hint = "; another server uses it: stop it or choose another port" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot listen on {address.target}: {error.strerror}{hint}") from error


@contextlib.contextmanager
def _umask(mask: int) -> Iterator[None]:
    previous = os.umask(mask)
    try:
        yield
    finally:
        os.umask(previous)
