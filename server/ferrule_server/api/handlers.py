"""Registers servicers so that a message which is none ends in a typed error.

gRPC answers a failed deserializer with UNKNOWN and a traceback in the log. Here deserializers never fail: what cannot
be parsed becomes a :class:`Malformed`, refused before a method with one request sees it. A method that reads a stream
of requests meets it there, and raises :meth:`Malformed.error` itself.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.message import DecodeError

from ferrule_server.api.calls import Context, refuse
from ferrule_server.errors import InvalidRequest

_Deserializer = Callable[[bytes], object]
_Behavior = Callable[[Any, Context], Awaitable[object]]
"""A method with one request; Any, because every method takes its own."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """What was sent in the place of a message and cannot be parsed as one.

    Attributes:
        message_name: Full name of the message that was expected.
    """

    message_name: str

    def error(self) -> InvalidRequest:
        """Return what the caller is told."""
        return InvalidRequest("request", f"is no valid {self.message_name} message")


class TypedErrors:
    """Stands in for the server in the generated ``add_*Servicer_to_server`` functions.

    Args:
        server: Gets the handlers, changed as described above.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, generic_rpc_handlers: object) -> None:
        """Leave out the handlers as generated: the same ones follow by name."""

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """Register the handlers of one service."""
        handlers = {name: _typed(service_name, name, handler) for name, handler in method_handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service_name, handlers),))


def as_server(server: grpc.aio.Server) -> grpc.aio.Server:
    """Return a stand-in for ``server`` that the generated functions can register servicers with."""
    return cast("grpc.aio.Server", TypedErrors(server))


def _typed(service: str, name: str, handler: Any) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler whose deserializer never fails; Any, because the stubs do not know that it is a named tuple."""
    method = descriptor_pool.Default().FindMethodByName(f"{service}.{name}")
    changes: dict[str, Any] = {
        "request_deserializer": _never_failing(handler.request_deserializer, method.input_type.full_name)
    }
    for kind in ("unary_unary", "unary_stream"):
        if (behavior := getattr(handler, kind)) is not None:
            changes[kind] = _refusing(behavior, name)
    typed: grpc.RpcMethodHandler[Any, Any] = handler._replace(**changes)
    return typed


def _never_failing(deserialize: _Deserializer, message_name: str) -> _Deserializer:
    malformed = Malformed(message_name)

    def deserialize_or_mark(data: bytes) -> object:
        try:
            return deserialize(data)
        except DecodeError:
            return malformed

    return deserialize_or_mark


def _refusing(behavior: _Behavior, rpc: str) -> _Behavior:
    """Return a method that refuses what is no message."""

    @functools.wraps(behavior)
    async def call(request: object, context: Context) -> object:
        if isinstance(request, Malformed):
            await refuse(context, rpc, request.error())
        return await behavior(request, context)

    return call
