"""Registers servicers so that every call has a caller, takes its turn, and ends with a status.

Every method of every service passes here, so none can be forgotten: no code of a method runs before the call's
credentials are accepted and its caller has the role of the service. Health alone is open to all, since probes have no
credentials. A call that names another server is refused: a misrouted drain would drain the wrong one. Observers
see every call, including those that are refused here.

Methods with one request are registered as if they took a stream of them. gRPC then receives no message until it is
asked to, so a call is judged by its metadata alone, and what an unauthenticated client sends is never held. On the wire
both kinds of methods are the same.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
from google.protobuf.message import Message

from ferrule_server.api.rpc.calls import CallEnded, Context, abort, refuse
from ferrule_server.api.rpc.intake import CALL_NS, Intake, request_class
from ferrule_server.api.rpc.observe import Call, Observer
from ferrule_server.api.rpc.state import ServerState
from ferrule_server.api.rpc.status import fault_of
from ferrule_server.api.security.auth import Access
from ferrule_server.api.security.principal import ADMIN, ANYBODY, REFUSED, Caller, caller_of, enter
from ferrule_server.errors import CallElsewhere, FerruleError
from ferrule_server.fairness.turns import metered, take_turns

OPEN_SERVICES: Final = frozenset({"grpc.health.v1.Health"})
"""Services without credentials: probes and load balancers have none."""

ROLES: Final[Mapping[str, str]] = {"ferrule.v1.AdminService": ADMIN}
"""The role that each method of a service requires."""

ALWAYS_ADMITTED: Final = frozenset({"GetStatus", "KeepAlive", "ReleaseCache"})
"""Methods that no rate refuses: a caller that is ahead of its own can keep what it has, give it back, and look."""

INSTANCE_KEY: Final = "ferrule-instance"
"""Key of the metadata that names the server a call is for."""

_MAX_NAME_CHARS: Final = 64

_Behavior = Callable[[Any, Context], Awaitable[object]]
"""A method; Any, because every method takes its own request, or an iterator of them."""

_STRANGER: Final = Caller(ANYBODY)


@dataclass(frozen=True, slots=True)
class Registrar:
    """Replaces the server in the generated ``add_*Servicer_to_server`` functions.

    Attributes:
        server: Gets the handlers, changed as described above.
        state: The state of the server.
        access: Decides who may call.
        intake: Receives requests.
        observers: See every call.
    """

    server: grpc.aio.Server
    state: ServerState
    access: Access
    intake: Intake
    observers: Sequence[Observer] = ()

    def add_generic_rpc_handlers(self, generic_rpc_handlers: object) -> None:
        """Ignore the generated handlers: the same ones follow by name."""

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """Register the handlers of one service."""
        handlers = {
            name: _Guard(self, service_name, name).handler(handler) for name, handler in method_handlers.items()
        }
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service_name, handlers),))


@dataclass(frozen=True, slots=True)
class _Guard:
    """Admits the calls of one method, receives their requests, and runs the method.

    Attributes:
        registrar: The parts that all methods share.
        service: Full name of the service.
        name: Name of the method.
    """

    registrar: Registrar
    service: str
    name: str

    def handler(self, handler: Any) -> grpc.RpcMethodHandler[Any, Any]:
        """Return a handler that guards another one; Any: the stubs do not know that it is a named tuple."""
        kind = request_class(f"{self.service}.{self.name}")
        behavior = handler.unary_unary or handler.unary_stream or handler.stream_stream
        if inspect.isasyncgenfunction(behavior):
            behavior = _writing(behavior)
        receive = functools.partial(self._frames if handler.request_streaming else self.registrar.intake.one, kind)
        if handler.response_streaming:
            guarded = self._guard(behavior, receive, None)
            return grpc.stream_stream_rpc_method_handler(guarded, None, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(self._guard(behavior, receive, handler.response_serializer))

    def _guard(
        self,
        behavior: _Behavior,
        receive: Callable[[Context, Caller], Awaitable[tuple[object, int]]],
        serialize: Callable[[Any], bytes] | None,
    ) -> _Behavior:
        """Return a method that refuses callers without access, receives its request in turn, and measures its work.

        Args:
            behavior: The method.
            receive: Returns the request and the bytes that it holds.
            serialize: Serialises the reply; None: the method writes its replies itself.
        """
        intake = self.registrar.intake

        async def serve(call: Call, context: Context) -> bytes | None:
            caller = call.caller = await self._authenticate(call, context)
            held_bytes = 0
            try:
                with intake.strangers.admitted("" if caller is _STRANGER else call.peer):
                    await self._admit(call, caller)
                    request, held_bytes = await receive(context, caller)
                    reply = await self._run(behavior, request, context, is_unary=serialize is not None)
                    return None if serialize is None else serialize(reply)
            except FerruleError as error:
                refuse(context, call.rpc, error)
            finally:
                if held_bytes:
                    intake.give_back(caller, held_bytes)

        async def served(context: Context) -> bytes | grpc.Status | None:
            try:
                with Call(self.service, self.name, context, self.registrar.observers) as call:
                    return await metered(serve(call, context), intake.turns.shares)
            except CallEnded as ended:
                return ended.status

        @functools.wraps(behavior)
        async def guarded(_requests: object, context: Context) -> bytes | None:
            reply = await served(context)  # apart, so that no frame of the traceback below refers to the call
            if not isinstance(reply, grpc.Status):
                return reply
            aborted = await _aborted(context, reply)
            del _requests, context
            try:
                raise aborted
            finally:
                del aborted

        return guarded

    async def _run(self, behavior: _Behavior, request: object, context: Context, *, is_unary: bool) -> object:
        """Run the method, and count it as active if it is unary; streams register themselves.

        Raises:
            EngineFault: The method raised an exception that is not ours.
        """
        state = self.registrar.state
        state.num_active += is_unary
        try:
            return await behavior(request, context)
        except (FerruleError, CallEnded):
            raise
        except Exception as failure:  # noqa: BLE001  (fault_of logs it)
            raise fault_of(failure, self.name) from None
        finally:
            state.num_active -= is_unary

    async def _authenticate(self, call: Call, context: Context) -> Caller:
        """Return the caller, by the metadata alone; a call whose credentials are refused ends here."""
        intake = self.registrar.intake
        try:
            return _STRANGER if self.service in OPEN_SERVICES else self.registrar.access.admit(context)
        except FerruleError as error:
            take_turns(intake.turns, REFUSED)
            await intake.refuse_in_turn(call.peer)
            intake.stranger_log.record(call.rpc, error, call.peer, call.trace_id)
            abort(error)

    async def _admit(self, call: Call, caller: Caller) -> None:
        """Wait for the turn of the caller, and check that it may call this method of this server now.

        Raises:
            FerruleError: It may not.
        """
        intake = self.registrar.intake
        enter(caller)
        take_turns(intake.turns, caller.principal)
        intake.turns.shares.charge(caller.principal, CALL_NS)
        is_open = caller is _STRANGER
        await intake.turns.turn(caller.principal, call.peer if is_open else "")  # refusing takes time, too
        if not is_open:
            _check_instance(call, self.registrar.state.instance)
            intake.rates.admit(caller.principal, is_always=self.name in ALWAYS_ADMITTED)
        if (role := ROLES.get(self.service)) is not None:
            caller.require(role)

    async def _frames(self, kind: type[Message], context: Context, caller: Caller) -> tuple[object, int]:
        """Return an iterator over the requests of a call; each holds its own bytes."""
        return self.registrar.intake.frames(kind, context, caller), 0


def _writing(generator: Callable[..., AsyncIterator[object]]) -> _Behavior:
    """Return a method that writes the replies that a method from another library yields, such as reflection.

    The caller is checked again before each reply.
    """

    @functools.wraps(generator)
    async def behavior(requests: object, context: Context) -> None:
        caller = caller_of(context)
        async for reply in generator(requests, context):
            caller.check()
            await context.write(reply)

    return behavior


def _check_instance(call: Call, instance: str) -> None:
    """Check that a call which names a server names this one.

    Raises:
        CallElsewhere: The call names another server.
    """
    for key, value in call.metadata:
        if key == INSTANCE_KEY and value != instance:
            raise CallElsewhere(str(value)[:_MAX_NAME_CHARS], instance)


async def _aborted(context: Context, status: grpc.Status) -> grpc.aio.AbortError:
    """End a call with a status, and return the exception that gRPC expects to be raised.

    gRPC keeps that exception with the call. If a frame in its traceback refers to the call, both stay until the garbage
    collector runs, and the call counts as one of its connection's streams. The exception is therefore returned without
    a traceback, and the code that raises it drops its references to the call first.
    """
    try:
        await context.abort_with_status(status)
    except grpc.aio.AbortError as abort:
        abort.__context__ = None
        return abort.with_traceback(None)
    raise AssertionError("abort_with_status raises")
