"""Registers servicers so that every call has a caller, and a message which is none ends in a typed error.

Every method of every service passes here, so none can be forgotten: nothing of ours runs before the call's credentials
are accepted and its service's role is there. Health alone is open to all, since whoever asks for it has no secrets.
What names a server that this one is not goes no further: a drain that went astray would drain the wrong one.
Nor does an observer miss one: each is told of every call, also of those that are refused here.

A method with one request gets its bytes from gRPC, and they are parsed once the caller is let in: 16 MB of empty
messages take a second and 500 MB to parse, which is nothing for strangers.

gRPC answers a failed deserializer with UNKNOWN and a traceback in the log. Here deserializers never fail: what cannot
be parsed becomes a :class:`Malformed`, refused before a method with one request sees it. A method that reads a stream
of requests from its context meets it there, and raises :meth:`Malformed.error` itself.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, cast

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.message import DecodeError

from ferrule_server.api.auth import Access
from ferrule_server.api.calls import Context, refuse, refuse_unknown
from ferrule_server.api.observe import Call, Observer
from ferrule_server.api.principal import ADMIN, Caller, enter
from ferrule_server.errors import CallElsewhere, FerruleError, InvalidRequest

OPEN_SERVICES: Final = frozenset({"grpc.health.v1.Health"})
"""Services that need no credentials: probes and load balancers have none."""

ROLES: Final[Mapping[str, str]] = MappingProxyType({"ferrule.v1.AdminService": ADMIN})
"""Service: role that each of its methods needs."""

INSTANCE_KEY: Final = "ferrule-instance"
"""Key of the metadata that says which of several servers a call is for."""

_MAX_NAME_CHARS: Final = 64

ANYBODY: Final = "-"
"""Principal of a call that needs no credentials; owns nothing."""

_Deserializer = Callable[[bytes], object]
_Behavior = Callable[[Any, Context], Awaitable[object]]
"""A method; Any, because every method takes its own request, or an iterator of them."""
_Admit = Callable[[Call, Context], Awaitable[Caller]]
_Watch = Callable[[Context], Call]


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


class Registrar:
    """Stands in for the server in the generated ``add_*Servicer_to_server`` functions.

    Args:
        server: Gets the handlers, changed as described above.
        access: Decides who may call.
        instance: Name of this server.
        observers: Are told of every call.
    """

    def __init__(
        self, server: grpc.aio.Server, access: Access, instance: str, observers: Sequence[Observer] = ()
    ) -> None:
        self._server = server
        self._access = access
        self._instance = instance
        self._observers = tuple(observers)

    def add_generic_rpc_handlers(self, generic_rpc_handlers: object) -> None:
        """Leave out the handlers as generated: the same ones follow by name."""

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """Register the handlers of one service."""
        admit = _admission(service_name, self._access, self._instance)
        handlers = {
            name: _guarded(service_name, name, handler, admit, self._observers)
            for name, handler in method_handlers.items()
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service_name, handlers),))


def as_server(
    server: grpc.aio.Server, access: Access, instance: str, observers: Sequence[Observer] = ()
) -> grpc.aio.Server:
    """Return a stand-in for ``server`` that the generated functions can register servicers with."""
    return cast("grpc.aio.Server", Registrar(server, access, instance, observers))


def _admission(service: str, access: Access, instance: str) -> _Admit:
    """Return what lets a call of a service in, or refuses it."""
    role = ROLES.get(service)
    anybody = Caller(ANYBODY) if service in OPEN_SERVICES else None

    async def admit(call: Call, context: Context) -> Caller:
        try:
            caller = anybody or access.admit(context)
        except FerruleError as error:
            await refuse_unknown(context, call.rpc, error)
        enter(caller)
        call.caller = caller
        try:
            if anybody is None:
                _check_instance(call, instance)
            if role is not None:
                caller.require(role)
        except FerruleError as error:
            await refuse(context, call.rpc, error)
        return caller

    return admit


def _check_instance(call: Call, instance: str) -> None:
    """Make sure that a call which names a server names this one; what no server can be called is none of its names.

    Raises:
        CallElsewhere: It names another one.
    """
    for key, value in call.metadata:
        if key == INSTANCE_KEY and value != instance:
            raise CallElsewhere(str(value)[:_MAX_NAME_CHARS], instance)


def _guarded(
    service: str, name: str, handler: Any, admit: _Admit, observers: tuple[Observer, ...]
) -> grpc.RpcMethodHandler[Any, Any]:
    """Return a handler that admits, then serves; Any, because the stubs do not know that it is a named tuple."""

    def watch(context: Context) -> Call:
        return Call(service, name, context, observers)

    method = descriptor_pool.Default().FindMethodByName(f"{service}.{name}")
    parse = _never_failing(handler.request_deserializer, method.input_type.full_name)
    changes: dict[str, Any] = {"request_deserializer": parse if handler.request_streaming else None}
    for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
        if (behavior := getattr(handler, kind)) is not None:
            wrap = _admitting_generator if inspect.isasyncgenfunction(behavior) else _admitting
            changes[kind] = wrap(behavior, watch, admit, None if handler.request_streaming else parse)
    guarded: grpc.RpcMethodHandler[Any, Any] = handler._replace(**changes)
    return guarded


def _never_failing(deserialize: _Deserializer, message_name: str) -> _Deserializer:
    malformed = Malformed(message_name)

    def deserialize_or_mark(data: bytes) -> object:
        try:
            return deserialize(data)
        except DecodeError:
            return malformed

    return deserialize_or_mark


def _admitting(behavior: _Behavior, watch: _Watch, admit: _Admit, parse: _Deserializer | None) -> _Behavior:
    """Return a method that refuses whoever may not call, and what is no message.

    Args:
        behavior: The method as it is.
        watch: Makes the record of a call.
        admit: Lets the caller in.
        parse: Reads its one request; None where requests come as a stream.
    """

    @functools.wraps(behavior)
    async def call(request: Any, context: Context) -> object:
        try:
            with watch(context) as under_way:
                await admit(under_way, context)
                if parse is not None:
                    request = parse(request)
                if isinstance(request, Malformed):
                    await refuse(context, under_way.rpc, request.error())
                return await behavior(request, context)
        except grpc.aio.AbortError as abort:
            del request
            raise _forgetful(abort) from None

    return call


def _forgetful(abort: grpc.aio.AbortError) -> grpc.aio.AbortError:
    """Return what ends a refused call, without the frames and errors that it has come by.

    gRPC keeps it in a reference cycle, so all it refers to would stay until the garbage collector comes by: the request
    too, which may have hundreds of megabytes once it is parsed.
    """
    abort.__context__ = None
    return abort.with_traceback(None)


def _admitting_generator(
    behavior: Callable[..., AsyncIterator[object]], watch: _Watch, admit: _Admit, parse: _Deserializer | None
) -> Any:
    """Return the same for a method that yields its replies; the caller is checked again before each."""

    @functools.wraps(behavior)
    async def call(request: Any, context: Context) -> AsyncIterator[object]:
        with watch(context) as under_way:
            caller = await admit(under_way, context)
            requests = _well_formed(request) if parse is None else parse(request)
            try:
                if isinstance(requests, Malformed):
                    raise requests.error()
                async for reply in behavior(requests, context):
                    caller.check()
                    yield reply
            except FerruleError as error:
                await refuse(context, under_way.rpc, error)

    return call


async def _well_formed(requests: AsyncIterator[object]) -> AsyncIterator[object]:
    """Give the requests of a stream up to the first that is no message.

    Raises:
        InvalidRequest: That one.
    """
    async for request in requests:
        if isinstance(request, Malformed):
            raise request.error()
        yield request
