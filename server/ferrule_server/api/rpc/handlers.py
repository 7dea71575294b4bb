"""Registers servicers so that every call has a caller, takes its turn, and ends in a typed error where it must.

Every method of every service passes here, so none can be forgotten: nothing of ours runs before the call's credentials
are accepted and its service's role is there. Health alone is open to all, since probes have no credentials.
A call that names another server goes no further: a drain that went astray would drain the wrong one.
Observers are told of every call, also of those that are refused here.

Methods with one request are registered as if they took a stream of them: gRPC then receives nothing until it is asked
to, so a call is judged by its metadata alone, and what a stranger sends after it is never held. On the wire both kinds
of methods are the same.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, cast

import grpc

from ferrule_server.api.receiving.turns import metered, take_turns
from ferrule_server.api.rpc.calls import CallEnded, Context, abort, refuse
from ferrule_server.api.rpc.intake import CALL_NS, Intake, Method
from ferrule_server.api.rpc.observe import Call, Observer
from ferrule_server.api.security.auth import Access
from ferrule_server.api.security.principal import ADMIN, ANYBODY, Caller, enter
from ferrule_server.errors import CallElsewhere, FerruleError

OPEN_SERVICES: Final = frozenset({"grpc.health.v1.Health"})
"""Services that need no credentials: probes and load balancers have none."""

ROLES: Final[Mapping[str, str]] = MappingProxyType({"ferrule.v1.AdminService": ADMIN})
"""Service: role that each of its methods needs."""

INSTANCE_KEY: Final = "ferrule-instance"
"""Key of the metadata that says which of several servers a call is for."""

_MAX_NAME_CHARS: Final = 64

_Behavior = Callable[[Any, Context], Awaitable[object]]
"""A method; Any, because every method takes its own request, or an iterator of them."""
_RequestOf = Callable[[Call, Context, Caller], Awaitable[tuple[object, int]]]

_STRANGER: Final = Caller(ANYBODY)


@dataclass(frozen=True, slots=True)
class Registrar:
    """Stands in for the server in the generated ``add_*Servicer_to_server`` functions.

    Attributes:
        server: Gets the handlers, changed as described above.
        access: Decides who may call.
        intake: Receives requests.
        instance: Name of this server.
        observers: Are told of every call.
    """

    server: grpc.aio.Server
    access: Access
    intake: Intake
    instance: str
    observers: tuple[Observer, ...] = ()

    def add_generic_rpc_handlers(self, generic_rpc_handlers: object) -> None:
        """Leave out the handlers as generated: the same ones follow by name."""

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """Register the handlers of one service."""
        handlers = {
            name: _Guard(self, service_name, name).handler(handler) for name, handler in method_handlers.items()
        }
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service_name, handlers),))

    def as_server(self) -> grpc.aio.Server:
        """Return this as what the generated functions take."""
        return cast("grpc.aio.Server", self)


@dataclass(frozen=True, slots=True)
class _Guard:
    """Stands in front of one method.

    Attributes:
        registrar: What all methods have in common.
        service: Full name of the service. name: of the method in it.
    """

    registrar: Registrar
    service: str
    name: str

    def handler(self, handler: Any) -> grpc.RpcMethodHandler[Any, Any]:
        """Return a handler that admits, receives, then serves; Any: the stubs do not know that it is a named tuple."""
        method = Method(f"{self.service}.{self.name}")
        if handler.request_streaming and inspect.isasyncgenfunction(handler.stream_stream):
            generator = self._serve_generator(handler.stream_stream, method)
            return grpc.stream_stream_rpc_method_handler(generator, None, handler.response_serializer)
        behavior = handler.unary_unary or handler.unary_stream or handler.stream_stream
        request_of = self._stream_of if handler.request_streaming else self._one_of
        request_of = functools.partial(request_of, method)
        if handler.response_streaming:
            serve = self._serve(behavior, request_of, _nothing)
            return grpc.stream_stream_rpc_method_handler(serve, None, handler.response_serializer)
        serve = self._serve(behavior, request_of, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(serve, None, None)

    def _serve(self, behavior: _Behavior, request_of: _RequestOf, pack: Callable[[Any], bytes | None]) -> _Behavior:
        """Return a method that refuses callers without access, receives its request in turn, and counts its work.

        Args:
            behavior: The method as it is.
            request_of: Returns what the method is given as its request.
            pack: Serialises the reply; a method that writes its replies itself has none.
        """
        shares = self.registrar.intake.turns.shares

        async def serve(under_way: Call, context: Context) -> bytes | None:
            caller = await self._admit(under_way, context)
            request, held_bytes = await request_of(under_way, context, caller)
            try:
                return pack(await behavior(request, context))
            finally:
                if held_bytes:
                    self.registrar.intake.give_back(caller, held_bytes)

        async def served(context: Context) -> bytes | grpc.Status | None:
            try:
                with self._watch(context) as under_way:
                    return await metered(serve(under_way, context), shares)
            except CallEnded as ended:
                return ended.status

        @functools.wraps(behavior)
        async def call(_requests: object, context: Context) -> bytes | None:
            reply = await served(context)
            if not isinstance(reply, grpc.Status):
                return reply
            aborted = await _aborted(context, reply)
            del _requests, context
            try:
                raise aborted
            finally:
                del aborted

        return call

    def _serve_generator(self, behavior: Callable[..., AsyncIterator[object]], method: Method) -> Any:
        """Return the same for a method of somebody else that yields its replies: reflection.

        The caller is checked again before each reply.
        """

        @functools.wraps(behavior)
        async def call(_requests: object, context: Context) -> AsyncIterator[object]:
            try:
                with self._watch(context) as under_way:
                    caller = await self._admit(under_way, context)
                    try:
                        async for reply in behavior(self.registrar.intake.frames(method, context, caller), context):
                            caller.check()
                            yield reply
                    except FerruleError as error:
                        refuse(context, under_way.rpc, error)
            except CallEnded as ended:
                await context.abort_with_status(ended.status)

        return call

    def _watch(self, context: Context) -> Call:
        return Call(self.service, self.name, context, self.registrar.observers)

    async def _admit(self, call: Call, context: Context) -> Caller:
        """Return the caller, by the metadata alone; a call that may not go on ends here."""
        intake = self.registrar.intake
        is_open = self.service in OPEN_SERVICES
        try:
            caller = _STRANGER if is_open else self.registrar.access.admit(context)
        except FerruleError as error:
            take_turns(intake.turns, ANYBODY)
            await intake.refuse_in_turn(call.peer)
            intake.strangers.record(call.rpc, error, call.peer, call.trace_id)
            abort(error)
        enter(caller)
        take_turns(intake.turns, caller.principal)
        intake.turns.shares.charge(caller.principal, CALL_NS)
        call.caller = caller
        await intake.turns.turn(caller.principal, call.peer if is_open else "")  # refusing takes time, too
        try:
            if not is_open:
                _check_instance(call, self.registrar.instance)
                intake.count_call(caller)
            if (role := ROLES.get(self.service)) is not None:
                caller.require(role)
        except FerruleError as error:
            refuse(context, call.rpc, error)
        return caller

    async def _one_of(self, method: Method, call: Call, context: Context, caller: Caller) -> tuple[object, int]:
        """Return the one request of a call and what it holds; a call without a proper one ends here."""
        try:
            return await self.registrar.intake.one(method, context, caller)
        except FerruleError as error:
            refuse(context, call.rpc, error)

    async def _stream_of(self, method: Method, call: Call, context: Context, caller: Caller) -> tuple[object, int]:  # noqa: ARG002
        """Return an iterator over the requests of a call, which holds what each of them needs itself."""
        return self.registrar.intake.frames(method, context, caller), 0


def _nothing(_reply: object) -> None:
    """Serialise the reply of a method that has written its replies itself."""


def _check_instance(call: Call, instance: str) -> None:
    """Make sure that a call which names a server names this one.

    Raises:
        CallElsewhere: It names another one.
    """
    for key, value in call.metadata:
        if key == INSTANCE_KEY and value != instance:
            raise CallElsewhere(str(value)[:_MAX_NAME_CHARS], instance)


async def _aborted(context: Context, status: grpc.Status) -> grpc.aio.AbortError:
    """End a call with a status, and return the exception that gRPC wants raised.

    gRPC keeps that exception with the call. While a frame in its traceback refers to the call, both stay until the
    garbage collector comes by, and the call counts as one of its connection's streams: so it is returned without a
    traceback, and the code that raises it drops its references to the call first.
    """
    try:
        await context.abort_with_status(status)
    except grpc.aio.AbortError as abort:
        abort.__context__ = None
        return abort.with_traceback(None)
    raise AssertionError("abort_with_status raises")
